"""Operators on elements: which reductions may pass through them. The rest of their rules follows from broadcasting.

What PyTorch marks as pointwise and is not listed here is taken to let no reduction pass.
"""

from __future__ import annotations

import torch

from dtckpt.dtensor.operators.call import Call
from dtckpt.dtensor.operators.registry import rule
from dtckpt.dtensor.operators.rule import BILINEAR, LINEAR, MONOTONE, Passes, Rule, pointwise

_aten = torch.ops.aten

_ADDED: Passes = {"sum": ((0, 1),), "avg": ((0, 1),)}
"""Linear in both operands together: one that does not wait for the reduction counts once."""

_SHIFTED: Passes = {"avg": ((0,),), "max": ((0,),), "min": ((0,),)}
"""A number that is added to every term; to terms of a sum it would be added too often."""


@rule(_aten.add.Tensor, _aten.sub.Tensor)
def _add(call: Call) -> Rule | None:
    return pointwise(call.shapes, _ADDED if len(call.tensors) == 2 else _SHIFTED)


@rule(_aten.add.Scalar, _aten.sub.Scalar)
def _shift(call: Call) -> Rule | None:
    return pointwise(call.shapes, _SHIFTED)


@rule(_aten.mul.Tensor)
def _multiply(call: Call) -> Rule | None:
    return pointwise(call.shapes, BILINEAR if len(call.tensors) == 2 else LINEAR)


@rule(_aten.mul.Scalar, _aten.div.Scalar, _aten.div.Tensor, _aten.neg.default, _aten.real.default, _aten.imag.default)
def _scale(call: Call) -> Rule | None:
    """Division by a tensor is linear in the first operand alone, and only for numbers that are not whole."""
    return pointwise(call.shapes, LINEAR)


@rule(_aten.maximum.default)
def _maximum(call: Call) -> Rule | None:
    return pointwise(call.shapes, {"max": ((0, 1),)})


@rule(_aten.minimum.default)
def _minimum(call: Call) -> Rule | None:
    return pointwise(call.shapes, {"min": ((0, 1),)})


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
    return pointwise(call.shapes, MONOTONE)
