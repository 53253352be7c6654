"""Sharding strategy: choose for an operator's call which mesh axis shards which factor, by the cost of communication.

The input is the operator's `Rule` and the operands' layouts. The output is the new layouts of the operands and the
layouts of the results (`Choice`). The strategy decides the axes one after another, in the mesh's order. The candidates
for an axis are: leave a pending reduction pending, replicate, or shard one of the rule's factors. The cheapest wins::

    mm of (m, k) and (k, n), axis "x" of size 4; the left operand is split along k, the right one is replicated

    candidate       left operand        right operand     result            cost
    replicate       all-gather          stays             replicated        all-gather of the left operand
    shard m         all-to-all          stays             split along m     all-to-all of the left operand
    shard k         stays               slice, for free   pending sum       all-reduce of the result, later

Every client computes the choice by itself, from layouts and sizes alone, and all must get the same choice. So ties go
to the first candidate, and no choice depends on values, on the client, or on time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from dtckpt.dtensor.operators.rule import Dims, Rule
from dtckpt.layout.layout import UNSHARDED, Layout
from dtckpt.layout.mesh import Mesh

_LATENCY_NBYTES = 1 << 16
"""Fixed cost of an exchange, in the bytes that could move in the same time."""

_AxisUse = int | str | None
"""How a mesh axis treats a tensor: it splits the dim of this number, leaves this reduction pending, or replicates."""


@dataclass(frozen=True, slots=True)
class Choice:
    """How to run a call.

    Args:
        operands: New layout of each operand; None if the operand keeps its layout.
        results: Layout that each result then has.
    """

    operands: tuple[Layout | None, ...]
    results: tuple[Layout, ...]


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A use of one mesh axis: it shards a factor, or leaves a reduction pending; neither: it replicates everything.

    Args:
        factor: Number of the factor that the axis shards.
        reduction: Reduction that the results without the factor, or, if there is no factor, all results wait for.
        pending_operands: Operands that wait for the reduction as well.
    """

    factor: int | None = None
    reduction: str | None = None
    pending_operands: tuple[int, ...] = ()


def choose_layouts(
    rule: Rule, layouts: Sequence[Layout], nbytes: Sequence[int], result_nbytes: int, *, is_in_place: bool = False
) -> Choice | None:
    """Return the cheapest layouts for a rule, axis by axis of the mesh.

    Args:
        rule: The operator's rule.
        layouts: Layouts of the operands, all on one mesh.
        nbytes: Global sizes of the operands, in bytes.
        result_nbytes: Global size of all results together, in bytes.
        is_in_place: Whether the first operand must keep its layout, and the result must have it too.

    Returns:
        The choice; None if ``is_in_place`` and no candidate keeps the layout of the first operand.
    """
    if _is_elementwise(rule, layouts):
        return Choice((None,) * len(layouts), (layouts[0],) * len(rule.results))
    mesh = layouts[0].mesh
    operand_uses = [_uses_by_axis(layout) for layout in layouts]
    chosen: dict[str, _Candidate] = {}
    for axis, size in mesh.axis_sizes.items():
        uses = [uses_by_axis.get(axis) for uses_by_axis in operand_uses]
        least_cost: float | None = None
        for candidate in _candidates(rule, axis, operand_uses, chosen, mesh):
            if is_in_place and not _keeps_first(rule, candidate, uses[0]):
                continue
            cost = _cost(rule, candidate, size, uses, (*nbytes, result_nbytes))
            # Costs are sums of floats: a difference this small is a tie, and the first candidate keeps it.
            if least_cost is None or cost < least_cost - 1e-9:
                least_cost = cost
                chosen[axis] = candidate
            if not cost:
                break  # No cost is negative.
        if least_cost is None:
            return None
    return _choice(rule, layouts, nbytes, chosen, is_in_place)


def _is_elementwise(rule: Rule, layouts: Sequence[Layout]) -> bool:
    """Tell whether all layouts may stay: operands are laid out alike, without pending terms, and so are results.

    The search below would find the same. Most operators of an optimizer are of this kind, and each of them needs a
    plan.
    """
    first, dims = layouts[0], rule.operands[0]
    return (
        not (first.partial or rule.whole or rule.nonempty_pieces or rule.contracted)
        and not (rule.shape_only_operands or rule.any_layout_operands)
        and all(layout is first for layout in layouts)
        and all(each == dims for each in (*rule.operands, *rule.results))
        and dims == tuple((factor,) for factor in range(len(rule.sizes)))
    )


# --- candidates ---------------------------------------------------------------------------------------------------


def _uses_by_axis(layout: Layout) -> dict[str, _AxisUse]:
    """Return how each axis treats a tensor of this layout; axes that replicate it are left out."""
    uses: dict[str, _AxisUse] = dict(layout.partial)
    for dim, axes in enumerate(layout.split_axes):
        uses.update(dict.fromkeys(axes, dim))
    return uses


def _candidates(
    rule: Rule, axis: str, operand_uses: Sequence[dict[str, _AxisUse]], chosen: dict[str, _Candidate], mesh: Mesh
) -> Iterator[_Candidate]:
    """Yield the candidates for an axis, given the choices for the axes before it."""
    reductions = dict.fromkeys(uses[axis] for uses in operand_uses if isinstance(uses.get(axis), str))
    for reduction in reductions:
        for group in rule.passes.get(str(reduction), ()):
            if any(operand_uses[operand].get(axis) == reduction for operand in group):
                yield _Candidate(None, str(reduction), group)
    yield _Candidate()
    for factor in range(len(rule.sizes)):
        counts = [mesh.dim_size(other) for other, candidate in chosen.items() if candidate.factor == factor]
        if _may_shard(rule, factor, (*counts, mesh.dim_size(axis))):
            reduction = rule.contracted.get(factor)
            yield _Candidate(factor, reduction, () if reduction is None else tuple(rule.counted_once))


def _may_shard(rule: Rule, factor: int, counts: tuple[int, ...]) -> bool:
    """Whether axes of these sizes may together shard a factor."""
    if factor in rule.whole:
        return False
    # A result without the factor is complete on no device, unless a reduction completes it.
    results = [dims for number, dims in enumerate(rule.results) if number not in rule.replicated_results]
    if factor not in rule.contracted and not all(any(factor in dim for dim in dims) for dims in results):
        return False
    if not any(factor in dim for dims in rule.operands for dim in dims):
        return False
    # An axis that splits a dim splits its major factor; it cannot split those behind.
    dims = [dim for dims in (*rule.operands, *rule.results) for dim in dims if factor in dim]
    if any(_major_factor(rule, dim) != factor for dim in dims):
        return False
    is_even = rule.sizes[factor] % math.prod(counts) == 0
    # A dim (a * b) is split in runs of elements: they end where pieces of ``a`` end only if ``a`` is split evenly.
    if any(len(dim) > 1 for dim in dims):
        return is_even
    return factor not in rule.nonempty_pieces or is_even or has_no_empty_piece(rule.sizes[factor], counts)


def _major_factor(rule: Rule, dim: tuple[int, ...]) -> int | None:
    """Return the first factor of a dim that has more than one element, else the first one."""
    return next((factor for factor in dim if rule.sizes[factor] != 1), dim[0] if dim else None)


@lru_cache(maxsize=4096)
def has_no_empty_piece(size: int, counts: tuple[int, ...]) -> bool:
    """Whether every device gets at least one element if axes of these sizes, in any order, split a dim of this size."""
    pieces = {size}
    for count in sorted(counts, reverse=True):
        chunks = {(piece, -(-piece // count)) for piece in pieces}
        pieces = {min(chunk, max(0, piece - chunk * index)) for piece, chunk in chunks for index in range(count)}
    return 0 not in pieces


def _use_by(rule: Rule, candidate: _Candidate, operand: int) -> _AxisUse:
    """Return how an axis treats an operand under a candidate."""
    if operand in candidate.pending_operands:
        return candidate.reduction
    return _dim_of(candidate.factor, rule.operands[operand])


def _dim_of(factor: int | None, dims: Dims) -> int | None:
    """Return the dim that has a factor."""
    return None if factor is None else next((dim for dim, factors in enumerate(dims) if factor in factors), None)


def _keeps_first(rule: Rule, candidate: _Candidate, use: _AxisUse) -> bool:
    """Whether the first operand stays as the axis has it, and the result is like it."""
    dim = _dim_of(candidate.factor, rule.results[0])
    result = candidate.reduction if dim is None else dim
    return use == result and (0 in rule.shape_only_operands or _use_by(rule, candidate, 0) == use)


# --- cost ---------------------------------------------------------------------------------------------------------


def _cost(rule: Rule, candidate: _Candidate, size: int, uses: Sequence[_AxisUse], nbytes: Sequence[int]) -> float:
    """Return the cost of a candidate for an axis: the bytes that a device receives, now or when the results are used.

    Args:
        rule: The operator's rule.
        candidate: The candidate for the axis.
        size: Number of devices along the axis.
        uses: How the axis treats each operand now.
        nbytes: Global sizes of the operands, and last the size of all results, in bytes.
    """
    cost = 0.0
    for operand, source in enumerate(uses):
        if operand in rule.any_layout_operands:
            continue
        target = _use_by(rule, candidate, operand)
        if operand in rule.costly_to_move and source != target:
            cost += 2 * move_cost(source, None, size, nbytes[operand])
        elif operand not in rule.shape_only_operands:
            cost += move_cost(source, target, size, nbytes[operand])
        elif source != target:
            cost += 1.0
    if candidate.reduction is not None:
        # A contraction makes a new pending result: reckon with an all-reduce. A reduction that only passes through the
        # operator, as through a copy, may stay pending: it costs at least a reduce-scatter.
        target = None if candidate.factor is not None else 0
        nbytes_pending = math.ceil(nbytes[-1] * _pending_fraction(rule, candidate.factor))
        # Along one device no reduction takes place, which is cheaper than a new label for an operand (1.0).
        cost += move_cost(candidate.reduction, target, size, nbytes_pending) if size > 1 else 0.5
    return cost


def _pending_fraction(rule: Rule, factor: int | None) -> float:
    """Return the part of the results' elements that waits for a reduction if an axis shards a factor."""
    sizes = [math.prod(rule.shape(number)) for number in range(len(rule.results))]
    pending = [size for size, dims in zip(sizes, rule.results, strict=True) if _dim_of(factor, dims) is None]
    return sum(pending) / max(sum(sizes), 1)


def move_cost(source: _AxisUse, target: _AxisUse, size: int, nbytes: int) -> float:
    """Return how many bytes each device receives, latency included, when an axis changes how it treats a tensor.

    For a tensor of n bytes and an axis of s devices, latency apart::

        from \\ to    split            replicated
        split        n (s-1) / s^2    n (s-1) / s      all-to-all, all-gather
        pending      n (s-1) / s      2 n (s-1) / s    reduce-scatter, all-reduce
        replicated   0                0                each device takes its part

    Args:
        source: How the axis treats the tensor now.
        target: How it is to treat it.
        size: Number of devices along the axis.
        nbytes: Global size of the tensor.
    """
    if source == target or source is None:
        return 0.0
    if size == 1:
        return 1.0  # Nothing moves, but prefer that a tensor keeps its layout.
    received = nbytes * (size - 1) / size
    if isinstance(source, int):
        return _LATENCY_NBYTES + (received / size if isinstance(target, int) else received)
    return _LATENCY_NBYTES + (received if isinstance(target, int) else 2 * received)


# --- layouts ------------------------------------------------------------------------------------------------------


def _choice(
    rule: Rule, layouts: Sequence[Layout], nbytes: Sequence[int], chosen: dict[str, _Candidate], is_in_place: bool
) -> Choice | None:
    """Return the layouts that follow from the choice for each axis."""
    mesh = layouts[0].mesh
    axes_of = {factor: _axis_order(rule, factor, layouts, nbytes, chosen) for factor in range(len(rule.sizes))}
    operands: list[Layout | None] = []
    for number, (dims, layout) in enumerate(zip(rule.operands, layouts, strict=True)):
        partial = {axis: str(one.reduction) for axis, one in chosen.items() if number in one.pending_operands}
        target = _layout(dims, axes_of, mesh, partial)
        is_split_so = target.split_axes == layout.split_axes
        stays = (
            _is_same_layout(target, layout)
            or (number in rule.shape_only_operands and is_split_so)
            or number in rule.any_layout_operands
        )
        operands.append(None if stays else target)
    computed = [_layout(dims, axes_of, mesh, _pending_of(dims, chosen)) for dims in rule.results]
    # A result like the first operand gets that very layout, so that its `LayoutType` stays.
    results = tuple(layouts[0] if _is_same_layout(layout, layouts[0]) else layout for layout in computed)
    if is_in_place and (operands[0] is not None or results[0] != layouts[0]):
        return None
    return Choice(tuple(operands), results)


def _is_same_layout(one: Layout, other: Layout) -> bool:
    """Whether two layouts on one mesh put the same values in the same places, whatever their `LayoutType`."""
    return one.split_axes == other.split_axes and one.partial == other.partial


def _pending_of(dims: Dims, chosen: dict[str, _Candidate]) -> dict[str, str]:
    """Return the reductions that a result of these dims waits for, by axis."""
    return {
        axis: candidate.reduction
        for axis, candidate in chosen.items()
        if candidate.reduction is not None and _dim_of(candidate.factor, dims) is None
    }


def _axis_order(
    rule: Rule, factor: int, layouts: Sequence[Layout], nbytes: Sequence[int], chosen: dict[str, _Candidate]
) -> tuple[str, ...]:
    """Return the axes that shard a factor, major first, in the order that the largest operand has already."""
    axes = [axis for axis, candidate in chosen.items() if candidate.factor == factor]
    if len(axes) < 2:
        return tuple(axes)
    for operand in sorted(range(len(layouts)), key=lambda number: -nbytes[number]):
        for dim, factors in enumerate(rule.operands[operand]):
            if factor in factors:
                present = [axis for axis in layouts[operand].split_axes[dim] if axis in axes]
                if present:
                    return (*present, *(axis for axis in axes if axis not in present))
    return tuple(axes)


def _layout(dims: Dims, axes_of: dict[int, tuple[str, ...]], mesh: Mesh, partial: dict[str, str]) -> Layout:
    specs = [tuple(axis for factor in dim for axis in axes_of[factor]) for dim in dims]
    return _cached_layout(id(mesh), mesh, tuple(specs), tuple(partial.items()))


@lru_cache(maxsize=8192)
def _cached_layout(
    mesh_id: int, mesh: Mesh, specs: tuple[tuple[str, ...], ...], partial: tuple[tuple[str, str], ...]
) -> Layout:
    # One process may hold equal meshes that are seen from different clients: the identity keeps them apart.
    del mesh_id
    return Layout([axes or UNSHARDED for axes in specs], mesh, dict(partial))
