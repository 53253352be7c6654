"""Operators whose result has the operand's shape and does not mix elements: copies, conversions, fillings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dtckpt.dtensor.operators.call import Call
from dtckpt.dtensor.operators.registry import rule
from dtckpt.dtensor.operators.rule import Dims, Factors, Passes, Rule
from dtckpt.layout.placement import REDUCE_OPS

_aten = torch.ops.aten

_ALL: Passes = dict.fromkeys(REDUCE_OPS, ((0,),))


def _identity(call: Call, passes: Passes) -> Rule:
    factors = Factors()
    dims = factors.dims(call.shapes[0])
    return Rule(factors.sizes, (dims,), (dims,), passes=passes)


@rule(_aten.alias.default, _aten.clone.default, _aten.detach.default, _aten.lift_fresh.default)
def _copy(call: Call) -> Rule:
    return _identity(call, _ALL)


@rule(_aten._to_copy.default)
def _convert(call: Call) -> Rule:
    own = call.tensors[0].dtype
    return _identity(call, _ALL if _may_round(own, call["dtype"] or own) else {})


def _may_round(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether terms may be converted: to round them is not to round their sum, but it is what gradients want."""
    return source == target or (source.is_floating_point and target.is_floating_point)


@rule(_aten.zero_.default)
def _zero(call: Call) -> Rule:
    """Terms of zero reduce to zero, whatever the reduction."""
    return _identity(call, _ALL)


@rule(_aten.copy.default)
def _assign(call: Call) -> Rule | None:
    """The first operand gives the layout and is not read; where it waits for a reduction, the second may too."""
    target, value = call.shapes
    factors = Factors()
    dims = factors.dims(target)
    lead = len(target) - len(value)
    if lead < 0 or any(size not in {1, target[lead + dim]} for dim, size in enumerate(value)):
        return None
    given: Dims = tuple(dims[lead + dim] if size == target[lead + dim] else () for dim, size in enumerate(value))
    target_dtype, value_dtype = (tensor.dtype for tensor in call.tensors)
    both: Passes = dict.fromkeys(REDUCE_OPS, ((0, 1),)) if _may_round(value_dtype, target_dtype) else {}
    return Rule(factors.sizes, (dims, given), (dims,), passes=both, unread=frozenset({0}))


@rule(
    _aten.empty_like.default,
    _aten.full_like.default,
    _aten.ones_like.default,
    _aten.zeros_like.default,
    _aten.fill.Scalar,
)
def _like(call: Call) -> Rule:
    """The operand's values are not read."""
    factors = Factors()
    dims = factors.dims(call.shapes[0])
    return Rule(factors.sizes, (dims,), (dims,), unread=frozenset({0}))


@rule(
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
    _aten.new_full.default,
    _aten.new_ones.default,
    _aten.new_zeros.default,
)
def _new(call: Call) -> Rule | None:
    """A new tensor of the operand's shape lies as the operand does; any other is replicated."""
    factors = Factors()
    dims = factors.dims(call.shapes[0])
    if tuple(call["size"]) != call.shapes[0]:
        made = factors.dims(call["size"])
        return Rule(factors.sizes, (dims,), (made,), unseen=frozenset({0}))
    # Strides of the whole say nothing of a piece's.
    local = _empty_like if call.func is _aten.new_empty_strided.default else None
    return Rule(factors.sizes, (dims,), (dims,), unread=frozenset({0}), sized=(("size", 0),), local=local)


def _empty_like(tensor: torch.Tensor, size: Sequence[int], stride: Sequence[int], **options: Any) -> torch.Tensor:
    del size, stride
    return torch.empty_like(tensor, **options)
