"""Elements in another order along dims, which must be whole: ``flip``, ``roll``, ``rot90``."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dtckpt.dtensor.operators.call import Call
from dtckpt.dtensor.operators.registry import rule
from dtckpt.dtensor.operators.rule import Rule, any_reduction
from dtckpt.dtensor.operators.rule_builders import DimLabels, from_labels, unlabel_dims, wrap_dims

_aten = torch.ops.aten


def _reordered(call: Call, dims: Sequence[int]) -> Rule | None:
    """Return the rule of an operator that moves elements along these dims."""
    ndim = len(call.shapes[0])
    result = unlabel_dims(wrap_dims(dims, ndim), ndim)
    return from_labels(call, DimLabels([range(ndim)], [result]), passes=any_reduction())


@rule(_aten.roll.default)
def _roll(call: Call) -> Rule | None:
    """The dims that it rolls must be whole, or, of the flattened tensor, all."""
    return _reordered(call, call["dims"] or range(len(call.shapes[0])))


@rule(_aten.flip.default, _aten.rot90.default)
def _flip(call: Call) -> Rule | None:
    """The dims that it turns must be whole."""
    return _reordered(call, call["dims"])
