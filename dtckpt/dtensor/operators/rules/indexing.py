"""Elements by their index: taken, put, added.

Indices count within the dim that they go into, so that it is whole; where elements are only taken from it, or added to
it, each device may instead look after its own part. All other dims are as they were, those of the indices too.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any

import torch

from dtckpt.dtensor.operators.call import Call
from dtckpt.dtensor.operators.registry import rule
from dtckpt.dtensor.operators.rule import Passes, Rule, pointwise
from dtckpt.dtensor.operators.rule_builders import Labels, but, every, linked, place_of

_aten = torch.ops.aten

Lookup = Callable[..., torch.Tensor]


def by_part(rule_: Rule | None, dim: int, size: int, lookup: Lookup, *, can_be_negative: bool = False) -> Rule | None:
    """Return a rule with each device taking what its part of the first operand has, and zeros for the rest.

    Args:
        rule_: With the reduction that zeros wait for.
        dim: The dim of the first operand that indices go into.
        size: Its size.
        lookup: Of a piece and indices within it, in the shape of the indices; returns the result and what spreads a
            mask of the indices over it.
        can_be_negative: Indices may be counted from the end.
    """
    if rule_ is None:
        return None

    def local(piece: torch.Tensor, *args: Any, offsets: Sequence[tuple[int, ...]], **kwargs: Any) -> torch.Tensor:
        return lookup(piece, offsets[0][dim], size, can_be_negative, *args, **kwargs)

    return replace(rule_, local=local, is_located=True, staying=frozenset({0}))


def inside(index: torch.Tensor, start: int, count: int, size: int, can_be_negative: bool) -> tuple[Any, Any]:
    """Return indices within a part of a dim, and which of them fall outside the part.

    Raises:
        IndexError: An index falls outside the dim.
    """
    least = -size if can_be_negative else 0
    wrong = (index < least) | (index >= size)
    if index.device.type == "cpu":
        if bool(wrong.any()):
            raise IndexError(f"index out of range: got one below {least} or from {size} on for a dim of size {size}")
    elif not index.is_meta:
        torch._assert_async(~wrong.any())
    if can_be_negative:
        index = torch.where(index < 0, index + size, index)
    index = index - start
    absent = (index < 0) | (index >= count)
    return index.masked_fill(absent, 0), absent


def _summed(call: Call, dim: int) -> dict[Hashable, str]:
    """Return the reduction that zeros wait for when a dim is split that indices go into."""
    return {} if call.tensors[0].dtype == torch.bool else {dim: "sum"}


# --- taken --------------------------------------------------------------------------------------------------------


@rule(_aten.index_select.default)
def _index_select(call: Call) -> Rule | None:
    """``(a, n, b), (i) -> (a, i, b)``"""
    shape = call.shapes[0]
    dim = place_of(call["dim"], len(shape))
    if not shape or len(call.shapes[1]) != 1:
        return None
    result: list[Hashable] = ["i" if one == dim else one for one in range(len(shape))]
    found = linked(call, [range(len(shape)), ["i"]], [result], contracted=_summed(call, dim), passes=every())

    def lookup(piece: torch.Tensor, start: int, size: int, sign: bool, _: int, index: torch.Tensor) -> torch.Tensor:
        count = piece.shape[dim]
        if count == size:
            return piece.index_select(dim, index)
        index, absent = inside(index, start, count, size, sign)
        if not count:
            return piece.new_zeros([*piece.shape[:dim], len(index), *piece.shape[dim + 1 :]])
        # Not `index_fill_`: the host would wait to learn how many indices are absent.
        return piece.index_select(dim, index).masked_fill_(absent.view(-1, *[1] * (piece.ndim - dim - 1)), 0)

    return by_part(found, dim, shape[dim], lookup)


@rule(_aten.gather.default)
def _gather(call: Call) -> Rule | None:
    """``(a, n), (a, i) -> (a, i)``; along other dims the indices may be fewer, and then these are whole."""
    shape, ndim = call.shapes[0], len(call.shapes[0])
    dim = place_of(call["dim"], ndim)
    if not shape or len(call.shapes[1]) != ndim:
        return None
    index: list[Hashable] = ["i" if one == dim else one for one in range(ndim)]
    found = linked(call, [range(ndim), index], [index], contracted=_summed(call, dim), passes=every())

    def lookup(
        piece: torch.Tensor, start: int, size: int, sign: bool, _: int, index: torch.Tensor, **__: Any
    ) -> torch.Tensor:
        count = piece.shape[dim]
        if count == size:
            return piece.gather(dim, index)
        index, absent = inside(index, start, count, size, sign)
        if not count:
            return piece.new_zeros(index.shape)
        return piece.gather(dim, index).masked_fill_(absent, 0)

    return by_part(found, dim, shape[dim], lookup)


@rule(_aten.take.default)
def _take(call: Call) -> Rule | None:
    """``(n, m), (i) -> (i)``"""
    given, index = call.shapes
    return linked(call, [[None] * len(given), range(len(index))], [range(len(index))], passes=every())


def _batch(shapes: Sequence[Sequence[int]]) -> list[list[Hashable]]:
    """Return labels of index tensors that are broadcast together."""
    return [[("index", place - len(shape)) for place in range(len(shape))] for shape in shapes]


def _indexed(call: Call) -> tuple[Labels, list[list[Hashable]], Labels] | None:
    """Return labels of what is indexed, of the index tensors, and of what they pick; None for masks."""
    ndim, indices = len(call.shapes[0]), call["indices"]
    places = [dim for dim, index in enumerate(indices) if index is not None]
    given = [index for index in indices if index is not None]
    if not given or any(index.dtype in {torch.bool, torch.uint8} for index in given):
        return None
    batch = _batch([index.shape for index in given])
    together = max(batch, key=len)
    kept: list[Hashable] = [dim for dim in range(ndim) if dim not in places]
    is_adjacent = places == list(range(places[0], places[-1] + 1))
    first = places[0] if is_adjacent else 0
    return but(set(places), ndim), batch, [*kept[:first], *together, *kept[first:]]


@rule(_aten.index.Tensor, _aten._unsafe_index.Tensor)
def _index(call: Call) -> Rule | None:
    """``(a, n, m), (i, 1), (j) -> (a, i, j)``; masks pick as many elements as they have, which nobody knows."""
    labels = _indexed(call)
    if labels is None:
        return None
    given, batch, picked = labels
    names = {name for one in batch for name in one}
    return linked(call, [given, *batch], [picked], broadcast=names, passes=every())


@rule(_aten.index_put.default, _aten._index_put_impl.default, _aten._unsafe_index_put.default)
def _index_put(call: Call) -> Rule | None:
    """``(a, n, m), (i, 1), (j), values (a, i, j) -> (a, n, m)``"""
    labels = _indexed(call)
    if labels is None:
        return None
    given, batch, picked = labels
    count = len(call["values"].shape)
    if count > len(picked):
        return None
    values = list(picked)[len(picked) - count :]
    both = every(0, len(batch) + 1)
    passes = {op: both[op] for op in ("sum", "avg")} if call["accumulate"] else both
    return linked(call, [given, *batch, values], [given], broadcast=set(picked), passes=passes)


@rule(_aten.bucketize.Tensor)
def _bucketize(call: Call) -> Rule | None:
    """``(a), boundaries (n) -> (a)``"""
    dims = range(len(call.shapes[0]))
    return linked(call, [dims, [None]], [dims])


@rule(_aten.searchsorted.Tensor)
def _searchsorted(call: Call) -> Rule | None:
    """``(a, n), (a, v) -> (a, v)``, or ``(n), (v) -> (v)``"""
    dims = range(call["self"].ndim)
    inner = [None] if call["sorted_sequence"].ndim == 1 else but(len(dims) - 1, len(dims))
    return linked(call, call.operands(sorted_sequence=inner, self=dims, sorter=inner), [dims])


# --- put and added ------------------------------------------------------------------------------------------------


def _along(call: Call, operands: dict[str, Labels], passes: Passes) -> Rule | None:
    ndim = len(call.shapes[0])
    dims = but(place_of(call["dim"], ndim), ndim)
    return linked(call, call.operands(self=dims, **operands), [dims], passes=passes)


_ADDED: Passes = {"sum": ((0, 2),), "avg": ((0, 2),)}


@rule(_aten.index_add.default, _aten.index_copy.default, _aten.index_reduce.default)
def _along_index(call: Call) -> Rule | None:
    """``(a, n), (i), (a, i) -> (a, n)``"""
    ndim = len(call.shapes[0])
    packet = call.func.overloadpacket.__name__.removesuffix("_")
    passes = {"index_add": _ADDED, "index_copy": every(0, 2)}.get(packet, {})
    source = but(place_of(call["dim"], ndim), ndim) if call["source"].ndim == ndim else []
    return _along(call, {"index": [None] * call["index"].ndim, "source": source}, passes)


@rule(_aten.index_fill.int_Scalar, _aten.index_fill.int_Tensor)
def _index_fill(call: Call) -> Rule | None:
    """``(a, n), (i) -> (a, n)``"""
    return _along(call, {"index": [None] * call["index"].ndim, "value": []}, {})


@rule(
    _aten.scatter.src,
    _aten.scatter.value,
    _aten.scatter.reduce,
    _aten.scatter.value_reduce,
    _aten.scatter_add.default,
    _aten.scatter_reduce.two,
)
def _scatter(call: Call) -> Rule | None:
    """``(a, n), (a, i), (a, i) -> (a, n)``; dims along which sizes differ are whole."""
    ndim = len(call.shapes[0])
    packet = call.func.overloadpacket.__name__.removesuffix("_")
    is_plain = packet == "scatter" and "reduce" not in call and "src" in call
    passes = _ADDED if packet == "scatter_add" else every(0, 2) if is_plain else {}
    dims = but(place_of(call["dim"], ndim), ndim)
    return _along(call, {"index": dims, "src": dims}, passes)


@rule(_aten.masked_fill.Tensor)
def _masked_fill(call: Call) -> Rule | None:
    return pointwise(call.shapes)
