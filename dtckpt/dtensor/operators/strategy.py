"""Choose how operands are laid out for an operator: per mesh axis the factor that it shards, by cost."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from dtckpt.dtensor.operators.rule import Dims, Rule
from dtckpt.layout.layout import UNSHARDED, Layout
from dtckpt.layout.mesh import Mesh

_LATENCY_NBYTES = 1 << 16
"""What one exchange costs however little it moves, in bytes that could be moved meanwhile."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Layouts to bring the operands into (None: as they are) and those that the results then have."""

    operands: tuple[Layout | None, ...]
    results: tuple[Layout, ...]


@dataclass(frozen=True, slots=True)
class _Candidate:
    """What an axis does: shards a factor, or is one along which operands and results wait for a reduction, or nothing.

    Args:
        factor: The factor, if it shards one.
        reduction: What results then wait for.
        group: Operands that wait for it too.
    """

    factor: int | None = None
    reduction: str | None = None
    group: tuple[int, ...] = ()


def choose_layouts(
    rule: Rule, layouts: Sequence[Layout], nbytes: Sequence[int], result_nbytes: int, *, is_fixed: bool = False
) -> Choice | None:
    """Return the cheapest layouts for a rule, axis by axis of the mesh.

    Cost is what is received by a device to bring the operands there, and, where results wait for a reduction, what
    that will take.

    Args:
        rule: The operator's.
        layouts: Of the operands; all on one mesh.
        nbytes: Sizes of the operands.
        result_nbytes: Size of the results together.
        is_fixed: The first operand stays as it is and the result gets its layout, as in place; None if that cannot be.
    """
    mesh = layouts[0].mesh
    now = [_uses_by_axis(layout) for layout in layouts]
    chosen: dict[str, _Candidate] = {}
    for axis, size in mesh.axis_sizes.items():
        best: tuple[float, int] | None = None
        for number, candidate in enumerate(_candidates(rule, axis, now, chosen, mesh)):
            if is_fixed and not _keeps_first(rule, candidate, now[0].get(axis)):
                continue
            held = [operand.get(axis) for operand in now]
            cost = _cost(rule, candidate, size, held, (*nbytes, result_nbytes))
            if best is None or cost < best[0] - 1e-9:
                best = cost, number
                chosen[axis] = candidate
        if best is None:
            return None
    return _choice(rule, layouts, nbytes, chosen, is_fixed)


_AxisUse = int | str | None
"""What an axis does to an operand: splits this dim, leaves this reduction pending, or nothing."""


def _uses_by_axis(layout: Layout) -> dict[str, _AxisUse]:
    held: dict[str, _AxisUse] = dict(layout.partial)
    for dim, axes in enumerate(layout.split_axes):
        held.update(dict.fromkeys(axes, dim))
    return held


def _candidates(
    rule: Rule, axis: str, now: Sequence[dict[str, _AxisUse]], chosen: dict[str, _Candidate], mesh: Mesh
) -> Iterator[_Candidate]:
    reductions = dict.fromkeys(held[axis] for held in now if isinstance(held.get(axis), str))
    for reduction in reductions:
        for group in rule.passes.get(str(reduction), ()):
            if any(now[operand].get(axis) == reduction for operand in group):
                yield _Candidate(None, str(reduction), group)
    yield _Candidate()
    for factor in range(len(rule.sizes)):
        counts = [mesh.dim_size(other) for other, one in chosen.items() if one.factor == factor]
        if _may_shard(rule, factor, (*counts, mesh.dim_size(axis))):
            reduction = rule.contracted.get(factor)
            yield _Candidate(factor, reduction, () if reduction is None else tuple(rule.counted_once))


def _may_shard(rule: Rule, factor: int, counts: tuple[int, ...]) -> bool:
    """Whether axes of these sizes may split a factor."""
    if factor in rule.whole:
        return False
    split = [dims for number, dims in enumerate(rule.results) if number not in rule.replicated_results]
    if factor not in rule.contracted and not all(any(factor in dim for dim in dims) for dims in split):
        return False
    if not any(factor in dim for dims in rule.operands for dim in dims):
        return False
    dims = [dim for dims in (*rule.operands, *rule.results) for dim in dims if factor in dim]
    if any(_major_factor(rule, dim) != factor for dim in dims):
        return False
    is_even = rule.sizes[factor] % math.prod(counts) == 0
    if any(len(dim) > 1 for dim in dims):
        return is_even
    return factor not in rule.nonempty_pieces or is_even or has_no_empty_piece(rule.sizes[factor], counts)


def _major_factor(rule: Rule, dim: tuple[int, ...]) -> int | None:
    """Return the first factor of a dim that is more than one element; an axis that splits the dim splits this one."""
    return next((factor for factor in dim if rule.sizes[factor] != 1), dim[0] if dim else None)


@lru_cache(maxsize=4096)
def has_no_empty_piece(size: int, counts: tuple[int, ...]) -> bool:
    """Whether no piece is empty, in whatever order axes of these sizes split a factor."""
    pieces = {size}
    for count in sorted(counts, reverse=True):
        chunks = {(piece, -(-piece // count)) for piece in pieces}
        pieces = {min(chunk, max(0, piece - chunk * index)) for piece, chunk in chunks for index in range(count)}
    return 0 not in pieces


def _use_by(rule: Rule, candidate: _Candidate, operand: int) -> _AxisUse:
    """Return what an axis does to an operand if a candidate is taken."""
    if operand in candidate.group:
        return candidate.reduction
    return _dim_of(candidate.factor, rule.operands[operand])


def _dim_of(factor: int | None, dims: Dims) -> int | None:
    """Return the dim that a factor is part of."""
    return None if factor is None else next((dim for dim, factors in enumerate(dims) if factor in factors), None)


def _keeps_first(rule: Rule, candidate: _Candidate, held: _AxisUse) -> bool:
    """Whether the first operand stays as it is and is what the result is."""
    dim = _dim_of(candidate.factor, rule.results[0])
    result = candidate.reduction if dim is None else dim
    return held == result and (0 in rule.shape_only_operands or _use_by(rule, candidate, 0) == held)


def _cost(rule: Rule, candidate: _Candidate, size: int, held: Sequence[_AxisUse], nbytes: Sequence[int]) -> float:
    """Return the cost of a candidate for an axis, given what the axis does to the operands.

    Args:
        rule: The operator's.
        candidate: What the axis would do.
        size: Of the axis.
        held: By operand.
        nbytes: By operand, and of the results.
    """
    cost = 0.0
    for operand, source in enumerate(held):
        if operand in rule.any_layout_operands:
            continue
        wanted = _use_by(rule, candidate, operand)
        if operand in rule.costly_to_move and source != wanted:
            cost += 2 * move_cost(source, None, size, nbytes[operand])
        elif operand not in rule.shape_only_operands:
            cost += move_cost(source, wanted, size, nbytes[operand])
        elif source != wanted:
            cost += 1.0
    if candidate.reduction is not None:
        # What waited before may go on waiting, as in a copy: at the least it will be scattered.
        target = None if candidate.factor is not None else 0
        nbytes_waiting = math.ceil(nbytes[-1] * _pending_fraction(rule, candidate.factor))
        # Along one device nothing need be done for it ever, which is better than a change of the operands.
        cost += move_cost(candidate.reduction, target, size, nbytes_waiting) if size > 1 else 0.5
    return cost


def _pending_fraction(rule: Rule, factor: int | None) -> float:
    """Return the part of the results' elements that waits for a reduction when an axis splits a factor."""
    sizes = [math.prod(rule.shape(number)) for number in range(len(rule.results))]
    waits = [size for size, dims in zip(sizes, rule.results, strict=True) if _dim_of(factor, dims) is None]
    return sum(waits) / max(sum(sizes), 1)


def move_cost(source: _AxisUse, target: _AxisUse, size: int, nbytes: int) -> float:
    """Return what each device receives, in bytes, when an axis changes what it does to a tensor."""
    if source == target or source is None:
        return 0.0
    if size == 1:
        return 1.0  # nothing moves; but what need not change stays
    part = nbytes * (size - 1) / size
    if isinstance(source, int):
        return _LATENCY_NBYTES + (part / size if isinstance(target, int) else part)
    return _LATENCY_NBYTES + (part if isinstance(target, int) else 2 * part)


def _choice(
    rule: Rule, layouts: Sequence[Layout], nbytes: Sequence[int], chosen: dict[str, _Candidate], is_fixed: bool
) -> Choice | None:
    mesh = layouts[0].mesh
    axes_of = {factor: _axis_order(rule, factor, layouts, nbytes, chosen) for factor in range(len(rule.sizes))}
    operands: list[Layout | None] = []
    for number, (dims, layout) in enumerate(zip(rule.operands, layouts, strict=True)):
        partial = {axis: str(one.reduction) for axis, one in chosen.items() if number in one.group}
        wanted = _layout(dims, axes_of, mesh, partial)
        is_there = _is_same_layout(wanted, layout) or (
            number in rule.shape_only_operands and wanted.split_axes == layout.split_axes
        )
        is_there |= number in rule.any_layout_operands
        operands.append(None if is_there else wanted)
    made = [_layout(dims, axes_of, mesh, _pending_of(dims, chosen)) for dims in rule.results]
    # What lies as the first operand has its very layout, with all that it says besides.
    results = tuple(layouts[0] if _is_same_layout(one, layouts[0]) else one for one in made)
    if is_fixed and (operands[0] is not None or results[0] != layouts[0]):
        return None
    return Choice(tuple(operands), results)


def _is_same_layout(one: Layout, other: Layout) -> bool:
    """Whether two layouts on one mesh say the same of where values are, whatever their types."""
    return one.split_axes == other.split_axes and one.partial == other.partial


def _pending_of(dims: Dims, chosen: dict[str, _Candidate]) -> dict[str, str]:
    """Return what a result of these dims waits for, by axis."""
    return {
        axis: one.reduction
        for axis, one in chosen.items()
        if one.reduction is not None and _dim_of(one.factor, dims) is None
    }


def _axis_order(
    rule: Rule, factor: int, layouts: Sequence[Layout], nbytes: Sequence[int], chosen: dict[str, _Candidate]
) -> tuple[str, ...]:
    """Return the axes that split a factor, major first: as the largest operand has them already."""
    axes = [axis for axis, one in chosen.items() if one.factor == factor]
    if len(axes) < 2:
        return tuple(axes)
    for operand in sorted(range(len(layouts)), key=lambda number: -nbytes[number]):
        for dim, factors in enumerate(rule.operands[operand]):
            if factor in factors:
                have = [axis for axis in layouts[operand].split_axes[dim] if axis in axes]
                if have:
                    return (*have, *(axis for axis in axes if axis not in have))
    return tuple(axes)


def _layout(dims: Dims, axes_of: dict[int, tuple[str, ...]], mesh: Mesh, partial: dict[str, str]) -> Layout:
    specs = [tuple(axis for factor in dim for axis in axes_of[factor]) for dim in dims]
    return _cached_layout(id(mesh), mesh, tuple(specs), tuple(partial.items()))


@lru_cache(maxsize=8192)
def _cached_layout(
    identity: int, mesh: Mesh, specs: tuple[tuple[str, ...], ...], partial: tuple[tuple[str, str], ...]
) -> Layout:
    # Equal meshes may be seen from different clients of one process.
    del identity
    return Layout([axes or UNSHARDED for axes in specs], mesh, dict(partial))
