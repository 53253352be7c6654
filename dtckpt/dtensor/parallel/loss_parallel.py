"""`loss_parallel`: cross entropy of scores whose class dim is split over devices, without communication backward.

Forward, each device has the scores of some classes::

    largest score                                       exchange of maxima
    sum of exponentials, score of the target            exchange of both sums
    loss = log(sum of exponentials) - score of the target

Backward, the gradient of a score is its probability, minus one for the target. A device computes those of its classes
alone. PyTorch's formulas for the two parts, softmax and choice, would add up a gradient over the classes first.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from dtckpt.dtensor.operators.call import Operator
from dtckpt.dtensor.operators.composite_helpers import cast, is_split, reduce_pending, reduce_pending_all
from dtckpt.dtensor.operators.custom_ops import custom_op
from dtckpt.dtensor.operators.plain_tensors import to_dtensors
from dtckpt.dtensor.operators.plans import trust_plain_tensors
from dtckpt.dtensor.operators.pre_autograd import before_autograd
from dtckpt.dtensor.operators.rules.losses import MEAN, NONE
from dtckpt.dtensor.operators.rules.nll_loss import NO_CLASS, class_dim, targets_and_weights
from dtckpt.dtensor.operators.rules.softmax import shifted_by_maxima
from dtckpt.dtensor.tensor import DTensor

_aten = torch.ops.aten

_blocks: set[object] = set()
"""Open blocks of `loss_parallel`. They hold for all threads: a card's backward pass runs in a thread of its own."""


@contextmanager
def loss_parallel() -> Iterator[None]:
    """Run cross entropy in a ``with`` block so that the scores stay split over their classes, backward too.

    For `torch.nn.functional.cross_entropy` and `torch.nn.CrossEntropyLoss` of scores that are DTensors. Targets and
    weights that are plain tensors count as replicated, and are not compared between clients, unless the batch is split.
    Scores in other layouts, targets that are probabilities, and label smoothing are computed as outside of the block.

    In the block, gradients of cross entropy with split classes cannot be differentiated again.

    Collective: Cross entropy, over the mesh's clients.
    """
    block = object()
    _blocks.add(block)
    try:
        yield
    finally:
        _blocks.remove(block)


@before_autograd(_aten.cross_entropy_loss.default)
def _cross_entropy(  # noqa: PLR0917  (the operator's arguments)
    operator: Operator,
    keys: Any,
    scores: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    reduction: int = MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Any:
    if not _blocks or not isinstance(scores, DTensor):
        return operator.redispatch(keys, scores, target, weight, reduction, ignore_index, label_smoothing)
    dim = class_dim(scores)
    if not is_split(scores, [one for one in range(scores.ndim) if one != dim]):
        target, weight = _replicated(target, scores), _replicated(weight, scores)
    others = (*scores.shape[:dim], *scores.shape[dim + 1 :])
    is_choice = not target.is_floating_point() and not label_smoothing and tuple(target.shape) == others
    has_weights = weight is None or (tuple(weight.shape) == (scores.shape[dim],) and not weight.requires_grad)
    if not (is_choice and has_weights and scores.numel() and is_split(scores, [dim])):
        return operator.redispatch(keys, scores, target, weight, reduction, ignore_index, label_smoothing)
    return _CrossEntropy.apply(  # type: ignore[no-untyped-call]  # torch leaves it untyped
        scores, *targets_and_weights(scores, target, weight, ignore_index), reduction
    )


def _replicated(tensor: torch.Tensor | None, scores: DTensor) -> Any:
    """Return a plain tensor as a replicated DTensor, without a comparison; anything else as it is."""
    if tensor is None or isinstance(tensor, DTensor):
        return tensor
    with trust_plain_tensors():
        return to_dtensors([tensor], scores.device_mesh)[0]


class _CrossEntropy(torch.autograd.Function):
    """Cross entropy of scores, the index of each target's class (`NO_CLASS` for one to ignore), and its weight."""

    @staticmethod
    def forward(ctx: Any, scores: DTensor, index: Any, weights: Any, reduction: int) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        dim = class_dim(scores)
        shifted, _ = shifted_by_maxima(scores, [dim])
        exponentials, picked = reduce_pending_all(
            [
                torch.sum(torch.exp(shifted), [dim], keepdim=True),
                custom_op("pick")(shifted, index, dim, scores.shape[dim]),
            ]
        )
        log_sum = torch.log(exponentials)
        losses = torch.masked_fill((log_sum.squeeze(dim) - picked) * weights, index == NO_CLASS, 0.0)
        total = reduce_pending(torch.sum(weights)) if reduction == MEAN else None
        ctx.dim, ctx.dtype = dim, scores.dtype
        ctx.save_for_backward(shifted - log_sum, index, weights, total)
        loss = losses if reduction == NONE else torch.sum(losses)
        return cast(loss if total is None else loss / total, scores.dtype)  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Any) -> tuple[Any, ...]:
        if gradient is None:
            return None, None, None, None
        log_probabilities, index, weights, total = ctx.saved_tensors
        gradient = reduce_pending(gradient)
        scale = weights * (gradient if total is None else gradient / total)
        chosen = custom_op("put")(log_probabilities, scale, index, ctx.dim)
        result = torch.exp(log_probabilities) * scale.unsqueeze(ctx.dim) - chosen
        return cast(result, ctx.dtype), None, None, None
