"""Dropout and its gradient: ``native_dropout``. The mask depends on global indices, not on the layout."""

from __future__ import annotations

from typing import Any

import torch

from dtckpt.dtensor.operators.call import Call
from dtckpt.dtensor.operators.registry import composite, rule
from dtckpt.dtensor.operators.rule import LINEAR, Rule
from dtckpt.dtensor.operators.rule_builders import pointwise
from dtckpt.dtensor.operators.rules.random import refill

_aten = torch.ops.aten


@composite(_aten.native_dropout.default)
def _dropout(input: Any, p: Any, train: Any) -> Any:
    """All dims may be split: the mask is drawn in the input's layout."""
    mask = torch.empty_like(input, dtype=torch.bool)
    if train is False or p == 0:
        return input.clone(), mask.fill_(True)
    refill(mask, "bernoulli", p=1 - p)
    return input * mask * (0.0 if p == 1 else 1 / (1 - p)), mask


@composite(_aten._fused_dropout.default)
def _fused_dropout(input: Any, p: Any, generator: Any = None) -> Any:
    """As ``native_dropout``, but ``p`` is the chance that an element stays."""
    mask = refill(torch.empty_like(input, dtype=torch.uint8), "bernoulli", generator, p=p)
    return input * mask * (1 / p if p else 0.0), mask


@rule(_aten.native_dropout_backward.default, _aten._masked_scale.default)
def _dropout_backward(call: Call) -> Rule | None:
    """All dims may be split; linear in the gradient."""
    return pointwise(call.shapes, LINEAR)
