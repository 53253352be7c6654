"""Pointwise losses, forward and backward: ``mse_loss``, ``smooth_l1_loss``, ``binary_cross_entropy``.

All dims may be split. Each device adds up the losses of its component; a mean divides by the global count, so uneven
components do not matter.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from dtckpt.dtensor.operators.call import Call, Operator, signature_of
from dtckpt.dtensor.operators.composite_helpers import accumulation_dtype
from dtckpt.dtensor.operators.registry import rule
from dtckpt.dtensor.operators.rule import LINEAR, Rule
from dtckpt.dtensor.operators.rule_builders import pointwise

_aten = torch.ops.aten

NONE, MEAN, SUM = range(3)
"""Values of the argument ``reduction``, as in ``at::Reduction``."""


@rule(
    _aten.binary_cross_entropy.default,
    _aten.binary_cross_entropy_with_logits.default,
    _aten.huber_loss.default,
    _aten.mse_loss.default,
    _aten.smooth_l1_loss.default,
    _aten.soft_margin_loss.default,
)
def _forward(call: Call) -> Rule | None:
    """All dims may be split; a reduced loss waits for a sum."""
    each, reduction = pointwise(call.shapes), call["reduction"]
    if each is None or reduction == NONE:
        return each
    func, count = call.func, math.prod(each.shape(0)) if reduction == MEAN else 1

    def local(*args: Any, **kwargs: Any) -> torch.Tensor:
        loss = func(*_reduced_by(func, NONE, args, kwargs), **kwargs)
        return (loss.sum(dtype=accumulation_dtype(loss.dtype)) / count).to(loss.dtype)  # type: ignore[no-any-return]

    return Rule(each.sizes, each.operands, ((),), contracted=dict.fromkeys(range(len(each.sizes)), "sum"), local=local)


@rule(
    _aten.binary_cross_entropy_backward.default,
    _aten.huber_loss_backward.default,
    _aten.mse_loss_backward.default,
    _aten.smooth_l1_loss_backward.default,
    _aten.soft_margin_loss_backward.default,
)
def _backward(call: Call) -> Rule | None:
    """All dims may be split; linear in the gradient."""
    each, reduction = pointwise(call.shapes, LINEAR), call["reduction"]
    if each is None or reduction != MEAN:
        return each
    func, count = call.func, math.prod(each.shape(0))

    def local(gradient: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return func(*_reduced_by(func, SUM, (gradient / count, *args), kwargs), **kwargs)

    return Rule(each.sizes, each.operands, each.results, passes=each.passes, local=local)


def _reduced_by(func: Operator, reduction: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return positional arguments with another reduction; one that was passed by name is changed in ``kwargs``."""
    position = signature_of(func).names.index("reduction")
    positional = list(args)
    if position < len(positional):
        positional[position] = reduction
    else:
        kwargs["reduction"] = reduction
    return positional
