"""Pointwise operators, copies and new tensors: ``add``, ``mul``, ``maximum``, ``clone``, ``to``, ``zeros_like``.

All dims may be split. This module has only operators through which pending reductions pass, and operators that PyTorch
does not tag. Every other operator with PyTorch's tag ``pointwise`` gets its rule from `registry.builder_of`; no
reduction passes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from dtckpt.dtensor.operators.call import Call
from dtckpt.dtensor.operators.registry import rule
from dtckpt.dtensor.operators.rule import BILINEAR, LINEAR, MONOTONE, Dims, Factors, Passes, Rule, any_reduction
from dtckpt.dtensor.operators.rule_builders import pointwise, same_dims

_aten = torch.ops.aten

_ADDED: Passes = {"sum": ((0, 1),), "avg": ((0, 1),)}
"""Linear in both operands together. If one is pending, the other becomes pending too, else each device would add it."""

_SHIFTED: Passes = {"avg": ((0,),), "max": ((0,),), "min": ((0,),)}
"""Each device adds the number to its term: averages and extremes keep it, a sum would add it once per term."""


@rule(_aten.add.Tensor, _aten.sub.Tensor)
def _add(call: Call) -> Rule | None:
    """All dims may be split; a pending sum passes, and the other operand counts once."""
    return pointwise(call.shapes, _ADDED) if len(call.tensors) == 2 else _shift(call)


@rule(_aten.add.Scalar, _aten.sub.Scalar)
def _shift(call: Call) -> Rule | None:
    """All dims may be split; pending averages and extremes of floats pass."""
    # Integers wrap around: the largest term may become the smallest.
    return pointwise(call.shapes, _SHIFTED if call.tensors[0].is_floating_point() else {})


@rule(_aten.mul.Tensor)
def _multiply(call: Call) -> Rule | None:
    """All dims may be split; a pending sum of one operand passes."""
    return pointwise(call.shapes, BILINEAR if len(call.tensors) == 2 else LINEAR)


@rule(_aten.mul.Scalar, _aten.div.Scalar, _aten.div.Tensor, _aten.neg.default, _aten.real.default, _aten.imag.default)
def _scale(call: Call) -> Rule | None:
    """All dims may be split; a pending sum of the first operand passes."""
    return pointwise(call.shapes, LINEAR)


@rule(_aten.maximum.default)
def _maximum(call: Call) -> Rule | None:
    """All dims may be split; a pending maximum of one or both operands passes."""
    return pointwise(call.shapes, {"max": (tuple(range(len(call.tensors))),)})


@rule(_aten.minimum.default)
def _minimum(call: Call) -> Rule | None:
    """All dims may be split; a pending minimum of one or both operands passes."""
    return pointwise(call.shapes, {"min": (tuple(range(len(call.tensors))),)})


@rule(
    _aten.atan.default,
    _aten.ceil.default,
    _aten.erf.default,
    _aten.exp.default,
    _aten.floor.default,
    _aten.relu.default,
    _aten.sigmoid.default,
    _aten.tanh.default,
)
def _rising(call: Call) -> Rule | None:
    """All dims may be split; pending maxima and minima pass."""
    return pointwise(call.shapes, MONOTONE)


@rule(_aten.masked_fill.Tensor)
def _masked_fill(call: Call) -> Rule | None:
    """All dims may be split."""
    return pointwise(call.shapes)


# --- copies, conversions and new tensors -----------------------------------------------------------------------------
#
# A result of the operand's shape has the operand's layout; all dims may be split.


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
    """All dims may be split; the result, without values yet, is pending like the operand, except for averages."""
    source = call.tensors[0].dtype
    if (call["dtype"] or source) == source:
        # Values written to an average later may exceed its dtype: the terms are added up before they are divided.
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
        # The strides among the arguments belong to the global tensor, and do not fit a component.
        local=_empty_like if call.func is _aten.new_empty_strided.default else None,
    )


def _empty_like(component: torch.Tensor, size: Sequence[int], stride: Sequence[int], **options: Any) -> torch.Tensor:
    del size, stride
    return torch.empty_like(component, **options)
