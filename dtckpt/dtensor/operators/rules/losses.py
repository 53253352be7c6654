"""Losses, forward and backward: ``mse_loss``, ``binary_cross_entropy``, ``nll_loss_forward``, chunked cross entropy.

All dims of pointwise losses may be split. Each device adds up the losses of its component; a mean divides by the global
count, so uneven components do not matter.

Of the negative log likelihood, for cross entropy, the class dim may be split, as in a model whose vocabulary is. Each
device picks the scores of the targets that its component has, and a sum over the devices completes them. No scores are
gathered.
"""

from __future__ import annotations

import math
from functools import wraps
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from dtckpt.comm import torch_private
from dtckpt.comm.collectives import neutral_term
from dtckpt.dtensor.operators.call import Call, Operator, replace_tensors, signature_of, tensors_in
from dtckpt.dtensor.operators.composite_helpers import accumulation_dtype, are_replicated, cast, reduce_pending
from dtckpt.dtensor.operators.operands import common_mesh, replicated_layout, to_replicated
from dtckpt.dtensor.operators.plain_tensors import to_dtensors
from dtckpt.dtensor.operators.plans import results_without_devices
from dtckpt.dtensor.operators.registry import composite, custom_op, kernel, rule
from dtckpt.dtensor.operators.rule import LINEAR, Factors, Rule
from dtckpt.dtensor.operators.rule_builders import pointwise
from dtckpt.dtensor.tensor import DTensor

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
    """Return positional arguments with another reduction; if it was passed by name, change ``kwargs`` instead."""
    position = signature_of(func).names.index("reduction")
    positional = list(args)
    if position < len(positional):
        positional[position] = reduction
    else:
        kwargs["reduction"] = reduction
    return positional


# --- negative log likelihood -----------------------------------------------------------------------------------------


NO_CLASS = torch.iinfo(torch.int64).min
"""The index of a target to ignore. No program has this index by mistake, as it may have -1."""

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
    """Return a mask of the indices that a component has, and positions in it; other indices get no valid position."""
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
def _nll_forward(self: DTensor, target: DTensor, weight: DTensor | None, reduction: int, ignore_index: int) -> Any:
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
def _nll_backward(
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


# --- chunked cross entropy -------------------------------------------------------------------------------------------
#
# The loop of PyTorch's chunked ``linear_cross_entropy`` runs on whole tensors, on every device. The loop is a Python
# function that writes to its plain buffers. Forward, it is part of a custom operator, which runs on components. The
# backward pass calls it with DTensors; so the function here takes its place.

_MODULE = "torch.nn.modules.linear_cross_entropy"
"""PyTorch 2.12 and older lack it."""
_LOOP = "_linear_cross_entropy_batch_chunked_accumulator"

_module: Any = import_module(_MODULE) if find_spec(_MODULE) else None
_loop: Any = getattr(_module, _LOOP, None)


def _on_every_device(*args: Any, **kwargs: Any) -> Any:
    """Run the loop on whole tensors on every device, if there is a DTensor among the arguments.

    Collective: Over the mesh's clients, unless all operands are replicated.
    """
    tensors = list(tensors_in((*args, *kwargs.values())))
    dtensors = [tensor for tensor in tensors if isinstance(tensor, DTensor)]
    if not dtensors:
        return _loop(*args, **kwargs)
    mesh = common_mesh("linear_cross_entropy", dtensors)
    operands = to_replicated(to_dtensors(tensors, mesh))
    if not operands[0].components:
        return results_without_devices(_loop, args, kwargs, operands)
    outputs = []
    for components in zip(*(operand.components for operand in operands), strict=True):
        local_args, local_kwargs = replace_tensors(args, kwargs, components)
        outputs.append(_loop(*local_args, **local_kwargs))
    return tuple(
        DTensor(parts, replicated_layout(mesh, parts[0].ndim), parts[0].shape, parts[0].dtype)
        for parts in zip(*outputs, strict=True)
    )


if _loop is not None:
    setattr(_module, _LOOP, wraps(_loop)(_on_every_device))
