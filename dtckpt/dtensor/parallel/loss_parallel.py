"""`loss_parallel`: cross entropy of scores whose class dim is split over devices, without communication backward.

Forward, each device has the scores of some classes::

    largest score                                       exchange of maxima
    sum of exponentials, score of the target            exchange of both sums
    loss = log(sum of exponentials) - score of the target

Backward, the gradient of a score is its probability, minus one for the target. A device computes the gradients of its
classes alone. PyTorch's formulas for the two parts, softmax and choice, would first sum a gradient over the classes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from dtckpt.dtensor.derived_layouts import gradient_layout
from dtckpt.dtensor.operators.call import Operator
from dtckpt.dtensor.operators.composite_helpers import cast, is_split, reduce_pending, reduce_pending_all
from dtckpt.dtensor.operators.plain_tensors import to_dtensors
from dtckpt.dtensor.operators.plans import trust_plain_tensors
from dtckpt.dtensor.operators.registry import before_autograd, custom_op
from dtckpt.dtensor.operators.rules.losses import MEAN, NO_CLASS, NONE, class_dim, targets_and_weights
from dtckpt.dtensor.operators.rules.softmax import shifted_by_maxima
from dtckpt.dtensor.redistribute import redistribute
from dtckpt.dtensor.tensor import DTensor
from dtckpt.errors import OperatorError

_aten = torch.ops.aten

_blocks: set[object] = set()
"""Open blocks of `loss_parallel`. A block holds for all threads: a GPU's backward pass runs in another thread."""


@contextmanager
def loss_parallel() -> Iterator[None]:
    """Run cross entropy in a ``with`` block so that the scores stay split over their classes, backward too.

    For `torch.nn.functional.cross_entropy` and `torch.nn.CrossEntropyLoss` of scores that are DTensors. Targets and
    weights that are plain tensors count as replicated, and are not compared between clients, unless the batch is split.
    Scores in other layouts, probabilities as targets, and label smoothing give the same computation as outside of the
    block.

    Collective: Cross entropy, over the mesh's clients.

    Raises:
        OperatorError: From the backward pass of cross entropy with split classes and ``create_graph=True``.
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
    is_batch_split = is_split(scores, [one for one in range(scores.ndim) if one != dim])
    # A plain target may be all of the batch, or by mistake a client's part of it: then clients compare.
    with nullcontext() if is_batch_split else trust_plain_tensors():
        target, *weights = to_dtensors([target] if weight is None else [target, weight], scores.device_mesh)
    weight = weights[0] if weights else None
    others = (*scores.shape[:dim], *scores.shape[dim + 1 :])
    is_choice = not target.is_floating_point() and not label_smoothing and tuple(target.shape) == others
    has_weights = weight is None or (tuple(weight.shape) == (scores.shape[dim],) and not weight.requires_grad)
    if not (is_choice and has_weights and scores.numel() and is_split(scores, [dim])):
        return operator.redispatch(keys, scores, target, weight, reduction, ignore_index, label_smoothing)
    complete = redistribute(scores, gradient_layout(scores.layout))  # nothing pending
    return _CrossEntropy.apply(  # type: ignore[no-untyped-call]  # torch leaves it untyped
        complete, *targets_and_weights(complete, target, weight, ignore_index), reduction
    )


class _CrossEntropy(torch.autograd.Function):
    """Cross entropy of scores, the index of each target's class (`NO_CLASS` for one to ignore), and its weight.

    The backward pass uses the scores instead of their probabilities: scores exist anyhow, and may have half precision.
    """

    @staticmethod
    def forward(ctx: Any, scores: DTensor, index: Any, weights: Any, reduction: int) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        dim = class_dim(scores)
        shifted, largest = shifted_by_maxima(scores, [dim])
        exponentials, picked = reduce_pending_all(
            [
                torch.sum(torch.exp(shifted), [dim], keepdim=True),
                custom_op("pick")(shifted, index, dim, scores.shape[dim]),
            ]
        )
        log_sum = torch.log(exponentials)
        losses = torch.masked_fill((log_sum.squeeze(dim) - picked) * weights, index == NO_CLASS, 0.0)
        total = reduce_pending(torch.sum(weights)) if reduction == MEAN else None
        ctx.save_for_backward(scores, largest, log_sum, index, weights, total)
        loss = losses if reduction == NONE else torch.sum(losses)
        return cast(loss if total is None else loss / total, scores.dtype)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple[Any, ...]:
        if gradient is None:
            return None, None, None, None
        if torch.is_grad_enabled():
            raise OperatorError(
                "cross entropy in a block of loss_parallel: got a backward pass with create_graph=True, expected one "
                "without, as its gradients cannot be differentiated again; compute this loss outside of the block"
            )
        scores, largest, log_sum, index, weights, total = ctx.saved_tensors
        dim, gradient = class_dim(scores), reduce_pending(gradient)
        probabilities = torch.exp(cast(scores, largest.dtype) - largest - log_sum)
        scale = weights * (gradient if total is None else gradient / total)
        result = probabilities * scale.unsqueeze(dim) - custom_op("put")(probabilities, scale, index, dim)
        return cast(result, scores.dtype), None, None, None
