"""Copies, conversions and new tensors: ``clone``, ``to``, ``copy_``, ``zeros_like``, ``new_empty``, ``fill``.

A result of the operand's shape has the operand's layout; all dims may be split.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from dtckpt.dtensor.operators.call import Call
from dtckpt.dtensor.operators.registry import rule
from dtckpt.dtensor.operators.rule import Dims, Factors, Rule, any_reduction
from dtckpt.dtensor.operators.rule_builders import same_dims

_aten = torch.ops.aten


@rule(_aten.alias.default, _aten.clone.default, _aten.detach.default, _aten.lift_fresh.default)
def _copy(call: Call) -> Rule:
    """All dims may be split; every pending reduction passes."""
    return same_dims(call.shapes[0], any_reduction())


@rule(_aten._to_copy.default)
def _convert(call: Call) -> Rule:
    """All dims may be split; pending reductions pass unless the dtype rounds terms that may cancel each other."""
    return same_dims(call.shapes[0], any_reduction())


@rule(_aten.zero_.default)
def _zero(call: Call) -> Rule:
    """All dims may be split; terms of zero reduce to zero, whatever the reduction."""
    return same_dims(call.shapes[0], any_reduction())


@rule(_aten.copy.default)
def _assign(call: Call) -> Rule | None:
    """The first operand has the layout, and its values are not read; if it is pending, the second may be too."""
    target, value = call.shapes
    factors = Factors()
    dims = factors.dims(target)
    lead = len(target) - len(value)
    if lead < 0 or any(size not in {1, target[lead + dim]} for dim, size in enumerate(value)):
        return None
    value_dims: Dims = tuple(dims[lead + dim] if size == target[lead + dim] else () for dim, size in enumerate(value))
    both = any_reduction(0, 1)
    return Rule(factors.sizes, (dims, value_dims), (dims,), passes=both, shape_only_operands=frozenset({0}))


@rule(_aten.empty_like.default)
def _empty(call: Call) -> Rule:
    """All dims may be split; values without meaning wait for what the operand waits for, but for averages."""
    source = call.tensors[0].dtype
    if (call["dtype"] or source) == source:
        # What is written to an average later may be beyond its dtype: the terms are added up before they are divided.
        passes = {reduce_op: groups for reduce_op, groups in any_reduction().items() if reduce_op != "avg"}
        return same_dims(call.shapes[0], passes)
    return _like(call)


@rule(
    _aten.full_like.default,
    _aten.ones_like.default,
    _aten.zeros_like.default,
    _aten.fill.Scalar,
)
def _like(call: Call) -> Rule:
    """All dims may be split; the operand's values are not read."""
    return replace(same_dims(call.shapes[0]), shape_only_operands=frozenset({0}))


@rule(
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
    _aten.new_full.default,
    _aten.new_ones.default,
    _aten.new_zeros.default,
)
def _new(call: Call) -> Rule | None:
    """A new tensor of the operand's shape has the operand's layout; any other is replicated."""
    shape = call.shapes[0]
    if tuple(call["size"]) != shape:
        factors = Factors()
        operand, result = factors.dims(shape), factors.dims(call["size"])
        return Rule(factors.sizes, (operand,), (result,), any_layout_operands=frozenset({0}))
    return replace(
        same_dims(shape),
        shape_only_operands=frozenset({0}),
        local_size_args=(("size", 0),),
        # The strides among the arguments are those of the global tensor, and do not fit a component.
        local=_empty_like if call.func is _aten.new_empty_strided.default else None,
    )


def _empty_like(component: torch.Tensor, size: Sequence[int], stride: Sequence[int], **options: Any) -> torch.Tensor:
    del size, stride
    return torch.empty_like(component, **options)
