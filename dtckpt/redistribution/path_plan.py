"""Plan the path of a redistribution: the layouts that a tensor goes through, with one exchange between each two.

Any two layouts are one exchange apart. The plan puts layouts in between

- where reductions of different kinds are pending: they do not commute, so the last axes are reduced first;
- where terms are reduced for several receivers: each piece is reduced once, then sent on, so no term travels twice:

      terms on 2 devices     scatter: each piece is reduced once     gather
        [ a0 | b0 ]              [ a0 + a1 ]                          [ a | b ]
        [ a1 | b1 ]              [ b0 + b1 ]                          [ a | b ]

- where a device would receive from very many others: the normal form of "Memory-efficient array redistribution through
  portable collective communication" (arXiv:2112.01075). This path has local slices, an exchange of pieces of one size,
  then gathers along one axis each. The number of messages is the sum of the axes' sizes, not their product.

The plan takes the path by which a device receives the fewest bytes; of equal paths, the path that takes the least time.
No layout in between has a larger piece than the source or the target. The path follows from layouts and shape alone, so
every client finds the same one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from fractions import Fraction

from dtckpt.layout.layout import UNSHARDED, Layout
from dtckpt.redistribution.exchange_plan import kept_axes, reduced_axes, reduction_kind

EXCHANGE_S = 100e-6
"""Cost of one more exchange: clients wait for each other."""
MESSAGE_S = 20e-6
"""Cost of one more message to a client."""

Axes = tuple[tuple[str, ...], ...]
"""The axes that split every dim, major first."""
Path = tuple[Layout, ...]
"""Layouts that a tensor goes through, without the first."""


def plan_path(
    source: Layout, target: Layout, shape: tuple[int, ...], *, is_native: bool = False, is_rounded: bool = False
) -> Path:
    """Return the layouts that a tensor goes through after ``source``, up to the target's sharding.

    The path leaves out reductions that are pending in the target only. The caller makes the terms of these reductions
    afterwards, from the path's result.

    Args:
        source: The layout before.
        target: The layout after.
        shape: Global shape.
        is_native: Whether exchanges run as collectives of the communication library where they can, as on GPUs. Then
            a path that only reduces is a single exchange, an all-reduce.
        is_rounded: Whether averages are rounded, as averages of integers are.
    """
    new = [axis for axis in target.partial if axis not in kept_axes(source, target)]
    is_mixed = len({reduction_kind(op) for op in target.partial.values()}) > 1
    # The caller makes terms of different kinds from the whole value, for all axes together.
    end = without(target, list(target.partial) if new and is_mixed else new)
    if is_rounded and _splits_average(source, end):
        end = without(target, target.partial)
    path: list[Layout] = []
    layout = source
    # Neighbouring averages and sums are one reduction, so that an average is rounded once.
    kinds = itertools.groupby(reduced_axes(source, end), lambda axis: reduction_kind(source.partial[axis]))
    runs = [tuple(run) for _, run in kinds]
    for run in reversed(runs[1:]):
        layout = without(layout, run)
        path.append(layout)
    axes = runs[0] if runs else ()
    if is_native and axes and end == without(layout, axes):
        return (*path, end)
    candidates = _reducing_paths(layout, end, axes) if axes else _moving_paths(layout, end)
    # Of equal candidates `min` takes the first, the direct one. Candidates stand in one order on every client.
    return (*path, *min(candidates, key=lambda candidate: _cost(layout, candidate, shape)))


def _splits_average(source: Layout, target: Layout) -> bool:
    """Whether an average would be divided before a sum, or another average, is complete: it would be rounded twice."""
    averages = any(source.partial[axis] == "avg" for axis in reduced_axes(source, target))
    return averages and any(reduction_kind(source.partial[axis]) == "sum" for axis in kept_axes(source, target))


def without(layout: Layout, axes: Iterable[str]) -> Layout:
    """Return a layout whose reductions along ``axes`` are done."""
    done = set(axes)
    if not done:
        return layout
    partial = {axis: op for axis, op in layout.partial.items() if axis not in done}
    return Layout(layout.sharding_specs, layout.mesh, partial)


def _reducing_paths(source: Layout, target: Layout, axes: Sequence[str]) -> list[Path]:
    """Return paths to a layout where reductions of one kind are done: directly, or scattered over some dim first."""
    reduced, fine = without(source, axes), source.split_axes
    if source.mesh == target.mesh:
        # Dims that are split in the end are split at once.
        fine = _with_new_axes(fine, target)
    rest = [axis for axis in axes if not any(axis in split for split in fine)]
    scattered = dict.fromkeys(_split(reduced, _appended(fine, dim, rest)) for dim in range(source.rank))
    return [
        (target,),
        *((first, *rest) for first in scattered if first != target for rest in _moving_paths(first, target)),
    ]


def _moving_paths(source: Layout, target: Layout) -> list[Path]:
    """Return paths between layouts with the same reductions pending: directly, and in normal form."""
    if source == target:
        return [()]
    if source.mesh != target.mesh or source.partial != target.partial or source.mesh.num_clients == 1:
        return [(target,)]
    return [(target,), _normal_form(source, target)]


def _normal_form(source: Layout, target: Layout) -> Path:
    """Return the path in normal form: slice, exchange pieces of one size, gather along one axis after the other."""
    source_axes, target_axes = source.split_axes, target.split_axes
    kept = {axis for split in target_axes for axis in split}
    # The gathers, backwards: from the target's axes, put back one gathered axis after the other.
    #     a dim, from x to y:    x  --slice-->  x, y  --exchange-->  y, x  --gather-->  y
    # The slice moves nothing, the exchange keeps the size of pieces, and gathers make them larger, up to the target's.
    gathered: list[Axes] = [target_axes]
    for dim, split in enumerate(source_axes):
        # A gather takes away the last axis of a dim. So backwards, the first axis is put back first.
        for axis in split:
            if axis not in kept:
                gathered.append(_appended(gathered[-1], dim, [axis]))
    path = [_with_new_axes(source_axes, target), *reversed(gathered)]
    steps = [step for before, step in zip([source_axes, *path], path, strict=False) if step != before]
    return tuple(_split(target, step) for step in steps)


def _cost(source: Layout, path: Path, shape: Sequence[int]) -> tuple[Fraction, float]:
    """Return the cost of a path for the device that has the largest pieces and holds least of its new boxes.

    Returns:
        Elements received, and the seconds that do not depend on them.
    """
    # Exact, so that paths of equal bytes compare as equal, and the time decides between them.
    numel, seconds, before = Fraction(0), 0.0, source
    for after in path:
        terms = math.prod(before.mesh.dim_size(axis) for axis in reduced_axes(before, after))
        share = _local_share(before, after)
        # Per dim, how many of the old shards one of the new shards overlaps.
        parts = math.prod(
            -(-old // new) if old > new else 1 + (new % old > 0)
            for old, new in zip(before.shard_grid, after.shard_grid, strict=True)
        )
        messages = terms * parts - (share > 0)
        piece = math.prod(-(-size // shards) for size, shards in zip(shape, after.shard_grid, strict=True))
        numel += piece * (terms - share)
        seconds += (EXCHANGE_S + messages * MESSAGE_S) if messages else 0.0
        before = after
    return numel, seconds


def _local_share(before: Layout, after: Layout) -> Fraction:
    """Return the share of its new box that a device holds, for the device that holds least."""
    if before.mesh != after.mesh:
        return Fraction(0)
    share = Fraction(1)
    for old, new in zip(before.split_axes, after.split_axes, strict=True):
        if new[: len(old)] != old:
            is_gathered = old[: len(new)] == new
            share *= Fraction(1, math.prod(map(before.mesh.dim_size, old[len(new) :]))) if is_gathered else 0
    return share


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
