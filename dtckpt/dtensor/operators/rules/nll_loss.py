"""Negative log likelihood, for cross entropy: ``nll_loss_forward``, ``nll_loss2d_forward``, and their gradients.

The class dim may be split, as in a model whose vocabulary is: each device picks the scores of the targets that its
component has, and a sum over the devices completes them. No scores are gathered.
"""

from __future__ import annotations

from typing import Any

import torch

from dtckpt.comm import torch_private
from dtckpt.comm.collectives import neutral_term
from dtckpt.dtensor.operators.call import Call
from dtckpt.dtensor.operators.composite_helpers import accumulation_dtype, are_replicated, cast, reduce_pending
from dtckpt.dtensor.operators.custom_ops import custom_op, kernel
from dtckpt.dtensor.operators.registry import composite, rule
from dtckpt.dtensor.operators.rule import LINEAR, Factors, Rule
from dtckpt.dtensor.operators.rules.losses import MEAN, NONE
from dtckpt.dtensor.tensor import DTensor

_aten = torch.ops.aten

NO_CLASS = torch.iinfo(torch.int64).min
"""The index of a target to ignore. It is no index that a program would have by mistake, as -1 is."""

_Offsets = list[tuple[int, ...]]


@kernel("pick(Tensor self, Tensor index, int dim, int size) -> Tensor")
def _pick(
    tensor: torch.Tensor, index: torch.Tensor, dim: int, size: int, offsets: _Offsets | None = None
) -> torch.Tensor:
    """Return one element along a dim for every index of the other dims; zero for `NO_CLASS`, or on another device.

    Args:
        tensor: A component.
        index: Global indices along the dim, of the other dims' shape.
        dim: The dim.
        size: Global size of the dim.
        offsets: Where the component begins, if `Rule.takes_offsets` gives it.

    Raises:
        IndexError: An index is beyond ``size``, on a CPU; on CUDA the device says so.
    """
    outside = ((index < 0) & (index != NO_CLASS)) | (index >= size)
    if index.is_cuda:
        torch_private.assert_async(~outside.any(), "Target is out of bounds.")
    elif not index.is_meta and outside.any():
        raise IndexError(f"Target {index[outside][0].item()} is out of bounds.")
    is_here, position = _locate(index, offsets[0][dim] if offsets else 0, tensor.shape[dim])
    neutral = neutral_term(tensor.dtype)
    if not tensor.shape[dim]:
        return tensor.new_full(index.shape, neutral)
    if tensor.ndim == 1:
        picked = tensor.gather(0, position.reshape(-1)).reshape(position.shape)
    else:
        picked = tensor.gather(dim, position.unsqueeze(dim)).squeeze(dim)
    return picked.masked_fill(~is_here, neutral)


@kernel("put(Tensor self, Tensor value, Tensor index, int dim) -> Tensor")
def _put(
    tensor: torch.Tensor, value: torch.Tensor, index: torch.Tensor, dim: int, offsets: _Offsets | None = None
) -> torch.Tensor:
    """Return zeros like a component, with a value along a dim for every index of the other dims, but `NO_CLASS`."""
    output = torch.zeros_like(tensor)
    if not output.shape[dim]:
        return output
    is_here, position = _locate(index, offsets[0][dim] if offsets else 0, tensor.shape[dim])
    return output.scatter_(dim, position.unsqueeze(dim), value.masked_fill(~is_here, 0).to(output.dtype).unsqueeze(dim))


def _locate(index: torch.Tensor, offset: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a mask of the indices that a component has, and positions in it; those of other indices mean nothing."""
    position = index - offset
    is_here = (position >= 0) & (position < size) & (index >= 0)
    return is_here, position.clamp(0, max(size - 1, 0))


@rule(custom_op("pick"))
def _pick_rule(call: Call) -> Rule:
    """The dim may be split, then the result waits for a sum."""
    shape, index_shape = call.shapes
    dim, factors = call["dim"], Factors()
    picked, index = factors.new(shape[dim]), factors.dims(index_shape)
    operand = ((picked,),) if len(shape) == 1 else (*index[:dim], (picked,), *index[dim:])
    return Rule(
        factors.sizes,
        (operand, index),
        (index,),
        contracted={picked: "sum"},
        passes=LINEAR,
        local=_pick,
        takes_offsets=True,
    )


@rule(custom_op("put"))
def _put_rule(call: Call) -> Rule:
    """All dims may be split; linear in the values."""
    dim, factors = call["dim"], Factors()
    dims = factors.dims(call.shapes[0])
    others = (*dims[:dim], *dims[dim + 1 :])
    return Rule(
        factors.sizes,
        (dims, others, others),
        (dims,),
        passes={"sum": ((1,),), "avg": ((1,),)},
        shape_only_operands=frozenset({0}),
        local=_put,
        takes_offsets=True,
    )


def class_dim(scores: DTensor) -> int:
    return 0 if scores.ndim == 1 else 1


def targets_and_weights(scores: Any, target: Any, weight: Any, ignore_index: int) -> tuple[Any, Any]:
    """Return the classes of targets, `NO_CLASS` for those to ignore, and the weight of each target."""
    ignored = torch.eq(target, ignore_index)
    target = torch.masked_fill(cast(target, torch.int64), ignored, NO_CLASS)
    if weight is None:
        return target, cast(torch.logical_not(ignored), accumulation_dtype(scores.dtype))
    dim = class_dim(scores)
    return target, reduce_pending(
        custom_op("pick")(cast(weight, accumulation_dtype(scores.dtype)), target, 0, scores.shape[dim])
    )


@composite(_aten.nll_loss_forward.default, _aten.nll_loss2d_forward.default)
def _forward(self: DTensor, target: DTensor, weight: DTensor | None, reduction: int, ignore_index: int) -> Any:
    """All dims may be split; no scores are gathered."""
    if are_replicated(self, target, weight) or not self.numel():
        return NotImplemented
    dim = class_dim(self)
    index, counts = targets_and_weights(self, target, weight, ignore_index)
    picked = reduce_pending(custom_op("pick")(reduce_pending(self), index, dim, self.shape[dim]))
    losses = torch.neg(picked * counts)
    if reduction == NONE:
        return cast(losses, self.dtype), _aten.new_zeros(losses, [], dtype=self.dtype)
    total, loss = reduce_pending(torch.sum(counts)), torch.sum(losses)
    if reduction == MEAN:
        loss = loss / total
    return cast(loss, self.dtype), cast(total, self.dtype)


@composite(_aten.nll_loss_backward.default, _aten.nll_loss2d_backward.default)
def _backward(
    grad_output: DTensor,
    self: DTensor,
    target: DTensor,
    weight: DTensor | None,
    reduction: int,
    ignore_index: int,
    total_weight: DTensor,
) -> Any:
    """All dims may be split; the gradient has the scores' layout."""
    if are_replicated(grad_output, self, target, weight) or not self.numel():
        return NotImplemented
    index, counts = targets_and_weights(self, target, weight, ignore_index)
    gradient = reduce_pending(grad_output)
    if reduction == MEAN:
        gradient = gradient / total_weight
    return custom_op("put")(self, torch.neg(counts * gradient), index, class_dim(self))
