"""Which layouts a tensor goes through on its way to another: one hop, or several where that is cheaper or needed.

A hop is one exchange of boxes, so any two layouts are one hop apart. Layouts are put in between

- where reductions of different kinds are pending: they do not commute, the last axis goes first;
- where terms are reduced for several takers: each piece is reduced once, then handed on, so no term travels twice;
- where a device would hear from very many others: then the normal form of "Memory-efficient array redistribution
  through portable collective communication" (arXiv:2112.01075), local slices, an exchange of pieces of one size, then
  gathers along one axis each, needs the sum of the axes' sizes in messages instead of their product.

Of these ways the one counts that brings a device the fewest bytes, then the one that takes the shortest. No layout in
between has a larger piece than the source or the target. Everything here follows from layouts and shape alone, so
every client finds the same path.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from fractions import Fraction

from dtckpt.layout.layout import UNSHARDED, Layout
from dtckpt.redistribution.exchange_plan import kept_axes, kind_of, reduced_axes

HOP_S = 100e-6
"""What one more hop costs: clients wait for each other."""
MESSAGE_S = 20e-6
"""What one more message to a client costs."""

Axes = tuple[tuple[str, ...], ...]
"""The axes that split every dim, major first."""
Path = tuple[Layout, ...]
"""Layouts that a tensor goes through, without the first."""


def plan_path(source: Layout, target: Layout, shape: tuple[int, ...], *, is_native: bool = False) -> Path:
    """Return the layouts that a tensor goes through after ``source``, up to the target's sharding.

    Reductions that are pending in the target only are not part of it: terms are made of the result.

    Args:
        source: The present layout.
        target: The layout wanted.
        shape: Global shape.
        is_native: Whether one call reduces a tensor for everyone.
    """
    new = [axis for axis in target.partial if axis not in kept_axes(source, target)]
    is_mixed = len({kind_of(op) for op in target.partial.values()}) > 1
    # Terms of different kinds are made of the whole value, all axes together.
    wanted = without(target, list(target.partial) if new and is_mixed else new)
    path: list[Layout] = []
    here = source
    axes = reduced_axes(here, wanted)
    while len({kind_of(here.partial[axis]) for axis in axes}) > 1:
        here = without(here, axes[-1:])
        path.append(here)
        axes = reduced_axes(here, wanted)
    if is_native and axes and wanted == without(here, axes):
        return (*path, wanted)
    ways = _reductions(here, wanted, axes) if axes else _moves(here, wanted)
    return (*path, *min(ways, key=lambda way: _price(here, way, shape)))


def without(layout: Layout, axes: Iterable[str]) -> Layout:
    """Return a layout whose reductions along ``axes`` are done."""
    gone = set(axes)
    if not gone:
        return layout
    partial = {axis: op for axis, op in layout.partial.items() if axis not in gone}
    return Layout(layout.sharding_specs, layout.mesh, partial)


def _reductions(source: Layout, target: Layout, axes: Sequence[str]) -> list[Path]:
    """Return ways to a layout where reductions of one kind are done: at once, or scattered over some dim first."""
    reduced, fine = without(source, axes), source.split_axes
    if source.mesh == target.mesh:
        # What is to be split in the end is split at once.
        fine = _with_new_axes(fine, target)
    rest = [axis for axis in axes if not any(axis in split for split in fine)]
    scattered = dict.fromkeys(_split(reduced, _appended(fine, dim, rest)) for dim in range(source.rank))
    return [(target,), *((first, *way) for first in scattered if first != target for way in _moves(first, target))]


def _moves(source: Layout, target: Layout) -> list[Path]:
    """Return ways between layouts with the same reductions pending: at once, and in normal form."""
    if source == target:
        return [()]
    if source.mesh != target.mesh or source.partial != target.partial or source.mesh.num_clients == 1:
        return [(target,)]
    return [(target,), _normal_form(source, target)]


def _normal_form(source: Layout, target: Layout) -> Path:
    """Return the path: slice, exchange pieces of one size, gather along one axis after the other."""
    have, want = source.split_axes, target.split_axes
    wanted = {axis for split in want for axis in split}
    gathered: list[Axes] = [want]
    for dim, split in enumerate(have):
        # In the end a dim loses its last axis first, so the first of them is put back first.
        for axis in split:
            if axis not in wanted:
                gathered.append(_appended(gathered[-1], dim, [axis]))
    path = [_with_new_axes(have, target), *reversed(gathered)]
    steps = [step for before, step in zip([have, *path], path, strict=False) if step != before]
    return tuple(_split(target, step) for step in steps)


def _price(source: Layout, path: Path, shape: Sequence[int]) -> tuple[Fraction, float]:
    """Return what a path costs the device that has the largest pieces and holds least of what it needs.

    Returns:
        Elements received, and the seconds that do not depend on them.
    """
    numel, seconds, here = Fraction(0), 0.0, source
    for there in path:
        terms = math.prod(here.mesh.dim_size(axis) for axis in reduced_axes(here, there))
        held = _held(here, there)
        # Per dim, the source's shards that one of the target's meets.
        parts = math.prod(
            -(-old // new) if old > new else 1 + (new % old > 0)
            for old, new in zip(here.shard_grid, there.shard_grid, strict=True)
        )
        messages = terms * parts - (held > 0)
        piece = math.prod(-(-size // shards) for size, shards in zip(shape, there.shard_grid, strict=True))
        numel += piece * (terms - held)
        seconds += (HOP_S + messages * MESSAGE_S) if messages else 0.0
        here = there
    return numel, seconds


def _held(here: Layout, there: Layout) -> Fraction:
    """Return how much of its new box a device that holds least of it has."""
    if here.mesh != there.mesh:
        return Fraction(0)
    held = Fraction(1)
    for old, new in zip(here.split_axes, there.split_axes, strict=True):
        if new[: len(old)] != old:
            is_gathered = old[: len(new)] == new
            held *= Fraction(1, math.prod(map(here.mesh.dim_size, old[len(new) :]))) if is_gathered else 0
    return held


def _with_new_axes(axes: Axes, target: Layout) -> Axes:
    """Split every dim also by the axes that split it in the target and none now."""
    used = {axis for split in axes for axis in split}
    for dim, split in enumerate(target.split_axes):
        axes = _appended(axes, dim, [axis for axis in split if axis not in used])
    return axes


def _appended(axes: Axes, dim: int, more: Iterable[str]) -> Axes:
    return (*axes[:dim], (*axes[dim], *more), *axes[dim + 1 :])


def _split(layout: Layout, axes: Axes) -> Layout:
    """Return the layout with its dims split by other axes."""
    return Layout([split or UNSHARDED for split in axes], layout.mesh, layout.partial)
