"""Pointwise operators: ``add``, ``mul``, ``div``, ``exp``, ``relu``, ``maximum``, ``masked_fill``.

All dims may be split. Here stand only the operators through which pending reductions pass, and those that PyTorch does
not tag. Every other operator with PyTorch's tag ``pointwise`` gets its rule from `registry.builder_of`; no reduction
passes it.
"""

from __future__ import annotations

import torch

from dtckpt.dtensor.operators.call import Call
from dtckpt.dtensor.operators.registry import rule
from dtckpt.dtensor.operators.rule import BILINEAR, LINEAR, MONOTONE, Passes, Rule
from dtckpt.dtensor.operators.rule_builders import pointwise

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
