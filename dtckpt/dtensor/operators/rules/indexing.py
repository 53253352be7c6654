"""Elements by index: ``index_select``, ``gather``, ``index``, ``take``, ``index_put``, ``scatter_add``, ``index_add``.

Indices count within a dim, so that dim must be whole. Only in ``index_select`` and ``gather`` may it be split: then
each device takes the elements of its component, and a sum over the devices completes the result (`masked_lookup`). All
other dims may be split, also the dims of the indices.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

from dtckpt.comm import torch_private
from dtckpt.comm.collectives import neutral_term
from dtckpt.dtensor.operators.call import Call
from dtckpt.dtensor.operators.registry import rule
from dtckpt.dtensor.operators.rule import LINEAR, Passes, Rule, any_reduction
from dtckpt.dtensor.operators.rule_builders import (
    DimLabels,
    Labels,
    completed_by_sum,
    from_labels,
    masked_lookup,
    unlabel_dims,
    wrap_dim,
)

_aten = torch.ops.aten


def indices_in_component(index: torch.Tensor, start: int, count: int, size: int) -> tuple[Any, Any]:
    """Return indices within a device's component (0 for those outside), and a mask of those outside.

    Args:
        index: Global indices, of any shape.
        start: Global index at which the component begins.
        count: Size of the component's dim.
        size: Global size of the dim.

    Raises:
        IndexError: An index is outside the dim, on a CPU; on other devices an assertion of the device fails.
    """
    is_wrong = (index < 0) | (index >= size)
    if index.device.type == "cpu":
        if bool(is_wrong.any()):
            raise IndexError(f"index out of range: got one below 0 or from {size} on for a dim of size {size}")
    elif not index.is_meta:
        torch_private.assert_async(~is_wrong.any())
    index = index - start
    is_outside = (index < 0) | (index >= count)
    return index.masked_fill(is_outside, 0), is_outside


# --- elements taken -----------------------------------------------------------------------------------------------


@rule(_aten.index_select.default)
def _index_select(call: Call) -> Rule | None:
    """``(a, n, b), (i) -> (a, i, b)``; if the dim is split, the result waits for a sum."""
    shape = call.shapes[0]
    dim = wrap_dim(call["dim"], len(shape))
    if not shape or len(call.shapes[1]) != 1:
        return None
    result: list[Hashable] = ["i" if one == dim else one for one in range(len(shape))]
    labels = DimLabels([range(len(shape)), ["i"]], [result], contracted=completed_by_sum(call, dim))

    def lookup(component: torch.Tensor, start: int, size: int, _: int, index: torch.Tensor) -> torch.Tensor:
        count = component.shape[dim]
        if count == size:
            return component.index_select(dim, index)
        index, is_outside = indices_in_component(index, start, count, size)
        neutral = neutral_term(component.dtype)
        if not count:
            return component.new_full([*component.shape[:dim], len(index), *component.shape[dim + 1 :]], neutral)
        # Not `index_fill_`: the host would wait to learn how many indices are outside.
        mask = is_outside.view(-1, *[1] * (component.ndim - dim - 1))
        return component.index_select(dim, index).masked_fill_(mask, neutral)

    return masked_lookup(from_labels(call, labels), dim, shape[dim], lookup)


@rule(_aten.gather.default)
def _gather(call: Call) -> Rule | None:
    """``(a, n), (a, i) -> (a, i)``; where another dim of the indices is shorter than the tensor's, it must be whole."""
    shape, ndim = call.shapes[0], len(call.shapes[0])
    dim = wrap_dim(call["dim"], ndim)
    if not shape or len(call.shapes[1]) != ndim:
        return None
    indices: list[Hashable] = ["i" if one == dim else one for one in range(ndim)]
    labels = DimLabels([range(ndim), indices], [indices], contracted=completed_by_sum(call, dim))

    def lookup(component: torch.Tensor, start: int, size: int, _: int, index: torch.Tensor, **__: Any) -> torch.Tensor:
        count = component.shape[dim]
        if count == size:
            return component.gather(dim, index)
        index, is_outside = indices_in_component(index, start, count, size)
        neutral = neutral_term(component.dtype)
        if not count:
            return component.new_full(index.shape, neutral)
        return component.gather(dim, index).masked_fill_(is_outside, neutral)

    return masked_lookup(from_labels(call, labels), dim, shape[dim], lookup)


@rule(_aten.take.default)
def _take(call: Call) -> Rule | None:
    """``(n, m), (i) -> (i)``"""
    shape, index = call.shapes
    labels = DimLabels([[None] * len(shape), range(len(index))], [range(len(index))])
    return from_labels(call, labels, passes=any_reduction())


def _index_labels(call: Call) -> tuple[Labels, list[list[Hashable]], Labels] | None:
    """Return labels of the indexed tensor, of the index tensors, and of the elements they pick; None for masks.

    The index tensors are broadcast together, aligned at their last dim, so their labels count from there. PyTorch puts
    the dims of the indices where the indexed dims were if those are adjacent, else first::

        x[:, i, j, :]   (a, n, m, b) -> (a, i, b)
        x[i, :, j, :]   (n, a, m, b) -> (i, a, b)
    """
    ndim, indices = len(call.shapes[0]), call["indices"]
    indexed = [dim for dim, index in enumerate(indices) if index is not None]
    tensors = [index for index in indices if index is not None]
    if not tensors or any(index.dtype in {torch.bool, torch.uint8} for index in tensors):
        return None
    labels: list[list[Hashable]] = [[("index", dim - index.ndim) for dim in range(index.ndim)] for index in tensors]
    broadcast = max(labels, key=len)
    others: list[Hashable] = [dim for dim in range(ndim) if dim not in indexed]
    is_adjacent = indexed == list(range(indexed[0], indexed[-1] + 1))
    first = indexed[0] if is_adjacent else 0
    return unlabel_dims(set(indexed), ndim), labels, [*others[:first], *broadcast, *others[first:]]


@rule(_aten.index.Tensor, _aten._unsafe_index.Tensor)
def _index(call: Call) -> Rule | None:
    """``(a, n, m), (i, 1), (j) -> (a, i, j)``; no rule for masks: they pick as many elements as they have True ones."""
    labels = _index_labels(call)
    if labels is None:
        return None
    source, indices, picked = labels
    names = {name for one in indices for name in one}
    return from_labels(call, DimLabels([source, *indices], [picked], broadcast=names), passes=any_reduction())


@rule(_aten.index_put.default, _aten._index_put_impl.default, _aten._unsafe_index_put.default)
def _index_put(call: Call) -> Rule | None:
    """``(a, n, m), (i, 1), (j), values (a, i, j) -> (a, n, m)``"""
    labels = _index_labels(call)
    if labels is None:
        return None
    target, indices, picked = labels
    count = len(call["values"].shape)
    if count > len(picked):
        return None
    values = list(picked)[len(picked) - count :]
    both = any_reduction(0, len(indices) + 1)
    passes = {op: both[op] for op in ("sum", "avg")} if call["accumulate"] else both
    return from_labels(call, DimLabels([target, *indices, values], [target], broadcast=set(picked)), passes=passes)


# --- elements put or added along a dim ----------------------------------------------------------------------------


def _along_dim(call: Call, operands: dict[str, Labels], passes: Passes) -> Rule | None:
    """Return the rule of an operator that changes elements of its first operand along ``dim``."""
    ndim = len(call.shapes[0])
    dims = unlabel_dims(wrap_dim(call["dim"], ndim), ndim)
    return from_labels(call, DimLabels(call.operands(self=dims, **operands), [dims]), passes=passes)


_ADDED: Passes = {"sum": ((0, 2),), "avg": ((0, 2),)}
"""The source is added: if it or the target is pending, the other becomes pending too, else each device would add it."""


@rule(_aten.index_add.default, _aten.index_copy.default, _aten.index_reduce.default)
def _index_add(call: Call) -> Rule | None:
    """``(a, n), (i), (a, i) -> (a, n)``"""
    ndim = len(call.shapes[0])
    packet = call.func.overloadpacket.__name__.removesuffix("_")
    passes = {"index_add": _ADDED, "index_copy": any_reduction(0, 2)}.get(packet, {})
    source = unlabel_dims(wrap_dim(call["dim"], ndim), ndim) if call["source"].ndim == ndim else []
    return _along_dim(call, {"index": [None] * call["index"].ndim, "source": source}, passes)


@rule(_aten.index_fill.int_Scalar, _aten.index_fill.int_Tensor)
def _index_fill(call: Call) -> Rule | None:
    """``(a, n), (i) -> (a, n)``"""
    return _along_dim(call, {"index": [None] * call["index"].ndim, "value": []}, {})


@rule(
    _aten.scatter.src,
    _aten.scatter.value,
    _aten.scatter.reduce,
    _aten.scatter.value_reduce,
    _aten.scatter_add.default,
    _aten.scatter_reduce.two,
)
def _scatter(call: Call) -> Rule | None:
    """``(a, n), (a, i), (a, i) -> (a, n)``; dims along which the sizes differ must be whole."""
    ndim = len(call.shapes[0])
    packet = call.func.overloadpacket.__name__.removesuffix("_")
    is_copy = packet == "scatter" and "reduce" not in call and "src" in call
    passes = _ADDED if packet == "scatter_add" else any_reduction(0, 2) if is_copy else {}
    dims = unlabel_dims(wrap_dim(call["dim"], ndim), ndim)
    return _along_dim(call, {"index": dims, "src": dims}, passes)


# --- embedding -------------------------------------------------------------------------------------------------------


@rule(_aten.embedding.default)
def _embedding(call: Call) -> Rule | None:
    """``(v, d), (b) -> (b, d)``; if rows are split, the result waits for a sum."""
    if len(call.shapes[0]) != 2:
        return None
    batch = [("index", dim) for dim in range(len(call.shapes[1]))]
    labels = DimLabels([["v", "d"], batch], [[*batch, "d"]], contracted=completed_by_sum(call, "v"))

    def lookup(
        component: torch.Tensor, start: int, size: int, indices: torch.Tensor, *_: object, **__: object
    ) -> torch.Tensor:
        count = len(component)
        if count == size:
            return torch.embedding(component, indices)
        indices, is_outside = indices_in_component(indices, start, count, size)
        neutral = neutral_term(component.dtype)
        if not count:
            return component.new_full([*indices.shape, component.shape[1]], neutral)
        return torch.embedding(component, indices).masked_fill_(is_outside.unsqueeze(-1), neutral)

    return masked_lookup(from_labels(call, labels), 0, call.shapes[0][0], lookup)


@rule(_aten.embedding_dense_backward.default)
def _embedding_backward(call: Call) -> Rule | None:
    """``(b, d), (b) -> (v, d)``; to scale by the count of a row needs all indices: then b must be whole."""
    batch = [("index", dim) for dim in range(len(call.shapes[1]))]
    contracted: dict[Hashable, str] = {} if call["scale_grad_by_freq"] else dict.fromkeys(batch, "sum")
    return from_labels(call, DimLabels([[*batch, "d"], batch], [[None, "d"]], contracted=contracted), passes=LINEAR)
