"""Negative log likelihood of classes: a split class dim stays split, as every device picks what it has."""

from __future__ import annotations

from typing import Any

import torch

from dtckpt.dtensor.operators.call import Call
from dtckpt.dtensor.operators.composite_helpers import accumulation_dtype, are_replicated, cast, reduce_pending
from dtckpt.dtensor.operators.custom_ops import custom_op, kernel
from dtckpt.dtensor.operators.registry import composite, rule
from dtckpt.dtensor.operators.rule import LINEAR, Factors, Rule
from dtckpt.dtensor.operators.rules.losses import MEAN, NONE
from dtckpt.dtensor.tensor import DTensor

_aten = torch.ops.aten

_Offsets = list[tuple[int, ...]]


@kernel("pick(Tensor self, Tensor index, int dim, int size) -> Tensor")
def _pick(
    tensor: torch.Tensor, index: torch.Tensor, dim: int, size: int, offsets: _Offsets | None = None
) -> torch.Tensor:
    """Return one element along a dim for each of the others, 0 where it is on another device; -1 picks 0.

    Raises:
        IndexError: An index is beyond ``size``, on a CPU; on CUDA the device says so.
    """
    outside = (index < -1) | (index >= size)
    if index.is_cuda:
        torch._assert_async(~outside.any(), "Target is out of bounds.")
    elif outside.any():
        raise IndexError(f"Target {index[outside][0].item()} is out of bounds.")
    there, place = _here(index, offsets[0][dim] if offsets else 0, tensor.shape[dim])
    if not tensor.shape[dim]:
        return tensor.new_zeros(index.shape)
    picked = tensor[place] if tensor.ndim == 1 else tensor.gather(dim, place.unsqueeze(dim)).squeeze(dim)
    return picked.masked_fill(~there, 0)


@kernel("put(Tensor self, Tensor value, Tensor index, int dim) -> Tensor")
def _put(
    tensor: torch.Tensor, value: torch.Tensor, index: torch.Tensor, dim: int, offsets: _Offsets | None = None
) -> torch.Tensor:
    """Return zeros like a tensor, but one value along a dim for each of the others; none at -1."""
    made = torch.zeros_like(tensor)
    if not made.shape[dim]:
        return made
    there, place = _here(index, offsets[0][dim] if offsets else 0, tensor.shape[dim])
    return made.scatter_(dim, place.unsqueeze(dim), value.masked_fill(~there, 0).to(made.dtype).unsqueeze(dim))


def _here(index: torch.Tensor, offset: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which indices fall into a piece, and their places there, any for the others."""
    place = index - offset
    there = (place >= 0) & (place < size) & (index >= 0)
    return there, place.clamp(0, max(size - 1, 0))


@rule(custom_op("pick"))
def _pick_rule(call: Call) -> Rule:
    """The dim may be split, the result waits for a sum; of a tensor of one dim every element is picked for."""
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
    """The dim may be split; values are linear."""
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


def _class_dim(scores: DTensor) -> int:
    return 0 if scores.ndim == 1 else 1


def _weights(scores: Any, target: Any, weight: Any, ignore_index: int) -> tuple[Any, Any]:
    """Return targets with -1 for those to ignore, and what each counts."""
    ignored = torch.eq(target, ignore_index)
    target = torch.masked_fill(target, ignored, -1)
    if weight is None:
        return target, cast(torch.logical_not(ignored), accumulation_dtype(scores.dtype))
    dim = _class_dim(scores)
    return target, reduce_pending(
        custom_op("pick")(cast(weight, accumulation_dtype(scores.dtype)), target, 0, scores.shape[dim])
    )


@composite(_aten.nll_loss_forward.default, _aten.nll_loss2d_forward.default)
def _forward(self: DTensor, target: DTensor, weight: DTensor | None, reduction: int, ignore_index: int) -> Any:
    """The class dim and the others may be split; nothing of the scores is moved."""
    if are_replicated(self, target, weight) or not self.numel():
        return NotImplemented
    dim = _class_dim(self)
    index, counts = _weights(self, target, weight, ignore_index)
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
    """As the forward pass; the gradient lies as the scores do."""
    if are_replicated(grad_output, self, target, weight) or not self.numel():
        return NotImplemented
    index, counts = _weights(self, target, weight, ignore_index)
    gradient = reduce_pending(grad_output)
    if reduction == MEAN:
        gradient = gradient / total_weight
    return custom_op("put")(self, torch.neg(counts * gradient), index, _class_dim(self))
