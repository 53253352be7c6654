"""Which layouts a tensor goes through on its way to another: one hop, or several where that is cheaper or needed.

A hop is one exchange of boxes, so any two layouts are one hop apart. Layouts are put in between

- where reductions of different kinds are pending: they do not commute, the last axis goes first;
- where many terms are reduced for everyone: the sum is scattered, then gathered, so no term travels twice;
- where a device would hear from very many others: then the normal form of "Memory-efficient array redistribution
  through portable collective communication" (arXiv:2112.01075), local slices, an exchange of pieces of one size, then
  gathers along one axis each, needs the sum of the axes' sizes in messages instead of their product.

No layout in between has a larger piece than the source or the target. Everything here follows from layouts, shape and
item size alone, so every client finds the same path.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from dtckpt.layout import UNSHARDED, Layout
from dtckpt.planning.exchange import kept_axes, kind_of, reduced_axes

HOP_S = 100e-6
"""What one more hop costs: clients wait for each other."""
MESSAGE_S = 20e-6
"""What one more message to a client costs."""
BYTES_PER_S = 4e9

Axes = tuple[tuple[str, ...], ...]
"""The axes that split every dim, major first."""


def plan_path(
    source: Layout, target: Layout, shape: tuple[int, ...], itemsize: int, *, is_native: bool = False
) -> tuple[Layout, ...]:
    """Return the layouts that a tensor goes through after ``source``, up to the target's sharding.

    Reductions that are pending in the target only are not part of it: terms are made of the result.

    Args:
        source: The present layout.
        target: The layout wanted.
        shape: Global shape.
        itemsize: Bytes per element.
        is_native: Whether one call reduces a tensor for everyone.
    """
    new = [axis for axis in target.partial if axis not in kept_axes(source, target)]
    is_mixed = len({kind_of(op) for op in target.partial.values()}) > 1
    # Terms of different kinds are made of the whole value, all axes together.
    wanted = without(target, list(target.partial) if new and is_mixed else new)
    path: list[Layout] = []
    here = source
    while axes := reduced_axes(here, wanted):
        if len({kind_of(here.partial[axis]) for axis in axes}) > 1:
            here = without(here, axes[-1:])
        elif not (is_native and wanted == without(here, axes)) and _is_worth_scattering(here, wanted, axes):
            here = _scattered(here, axes, shape)
        else:
            return (*path, wanted)
        path.append(here)
    return (*path, *_moves(here, wanted, shape, itemsize))


def without(layout: Layout, axes: Iterable[str]) -> Layout:
    """Return a layout whose reductions along ``axes`` are done."""
    gone = set(axes)
    if not gone:
        return layout
    partial = {axis: op for axis, op in layout.partial.items() if axis not in gone}
    return Layout(layout.sharding_specs, layout.mesh, partial)


def _is_worth_scattering(here: Layout, target: Layout, axes: Sequence[str]) -> bool:
    """Whether everyone wants the reduced tensor, so that scattering its reduction and gathering it moves less."""
    terms = math.prod(here.mesh.dim_size(axis) for axis in axes)
    used = {axis for split in target.split_axes for axis in split}
    return terms > 2 and here.rank > 0 and here.mesh == target.mesh and not used & set(axes)


def _scattered(here: Layout, axes: Sequence[str], shape: Sequence[int]) -> Layout:
    """Return the layout that also splits, over the reduced axes, the dim with the longest shards."""
    lengths = [size // shards for size, shards in zip(shape, here.shard_grid, strict=True)]
    dim = lengths.index(max(lengths))
    return _split(without(here, axes), _appended(here.split_axes, dim, axes))


# --- moves: no reduction is done ----------------------------------------------------------------------------------


def _moves(source: Layout, target: Layout, shape: tuple[int, ...], itemsize: int) -> tuple[Layout, ...]:
    """Return the cheaper way between layouts with the same reductions pending: directly, or in normal form."""
    if source == target:
        return ()
    direct = (target,)
    if source.mesh != target.mesh or source.partial != target.partial or source.mesh.num_clients == 1:
        return direct
    return min((direct, _normal_form(source, target)), key=lambda path: _cost(source, path, shape, itemsize))


def _normal_form(source: Layout, target: Layout) -> tuple[Layout, ...]:
    """Return the path: slice, exchange pieces of one size, gather along one axis after the other."""
    have, want = source.split_axes, target.split_axes
    had, wanted = ({axis for split in axes for axis in split} for axes in (have, want))
    sliced = have
    for dim, split in enumerate(want):
        sliced = _appended(sliced, dim, [axis for axis in split if axis not in had])
    gathered: list[Axes] = [want]
    for dim, split in enumerate(have):
        # In the end a dim loses its last axis first, so the first of them is put back first.
        for axis in split:
            if axis not in wanted:
                gathered.append(_appended(gathered[-1], dim, [axis]))
    path = [sliced, *reversed(gathered)]
    steps = [step for before, step in zip([have, *path], path, strict=False) if step != before]
    return tuple(_split(target, step) for step in steps)


def _cost(source: Layout, path: Sequence[Layout], shape: tuple[int, ...], itemsize: int) -> float:
    """Return the seconds that a path takes for the device that hears from most others, pieces taken to be even."""
    seconds, here = 0.0, source
    for there in path:
        # Per dim, the source's shards that one of the target's meets.
        parts = math.prod(
            -(-old // new) if old > new else 1 + (new % old > 0)
            for old, new in zip(here.shard_grid, there.shard_grid, strict=True)
        )
        if _is_slice(here, there):
            here = there
            continue
        nbytes = math.prod(shape) * itemsize / max(1, math.prod(there.shard_grid))
        is_gather = _is_slice(there, here)
        messages = parts - 1 if is_gather else parts
        seconds += HOP_S + messages * MESSAGE_S + nbytes * messages / parts / BYTES_PER_S
        here = there
    return seconds


def _is_slice(before: Layout, after: Layout) -> bool:
    """Whether every device holds all that it needs: every dim is split by further axes only."""
    return all(fine[: len(coarse)] == coarse for coarse, fine in zip(before.split_axes, after.split_axes, strict=True))


def _appended(axes: Axes, dim: int, more: Iterable[str]) -> Axes:
    return (*axes[:dim], (*axes[dim], *more), *axes[dim + 1 :])


def _split(layout: Layout, axes: Axes) -> Layout:
    """Return the layout with its dims split by other axes."""
    return Layout([split or UNSHARDED for split in axes], layout.mesh, layout.partial)
