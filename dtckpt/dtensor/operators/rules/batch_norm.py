"""Batch normalisation: statistics of the whole batch, however it is split, as one device would find them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from dtckpt.dtensor.operators.composite_helpers import accumulation_dtype, are_replicated, cast, reduce_pending
from dtckpt.dtensor.operators.registry import composite
from dtckpt.dtensor.operators.rules.variance_norm import moments
from dtckpt.dtensor.tensor import DTensor

_aten = torch.ops.aten


def _along_channels(tensor: Any, like: Any) -> Any:
    """Return a tensor of one dim, that of channels, as one that is broadcast over the others; None stays."""
    return None if tensor is None else tensor.view([1, -1, *[1] * (like.ndim - 2)])


def _others(tensor: Any) -> list[int]:
    return [dim for dim in range(tensor.ndim) if dim != 1]


def _normalise(
    tensor: Any, weight: Any, bias: Any, running: tuple[Any, Any], is_training: bool, momentum: float, eps: float
) -> tuple[Any, Any, Any]:
    """Return the normalised tensor, mean and reciprocal deviation (empty if not training); update what runs along."""
    wide = reduce_pending(cast(tensor, accumulation_dtype(tensor.dtype)))
    channels = [tensor.shape[1]]
    if is_training:
        mean, squares = moments(wide, _others(tensor))
        count = tensor.numel() // max(tensor.shape[1], 1)
        rstd = torch.rsqrt(squares / count + eps)
        _update(running[0], mean.view(channels), momentum)
        _update(running[1], squares.view(channels) / (count - 1 if count > 1 else math.nan), momentum)
        saved = mean.view(channels), rstd.view(channels)
    else:
        mean = _along_channels(running[0], tensor)
        rstd = torch.rsqrt(_along_channels(running[1], tensor) + eps)
        saved = _empty(tensor), _empty(tensor)
    made = (wide - mean) * rstd
    made = made if weight is None else made * _along_channels(weight, tensor)
    made = made if bias is None else made + _along_channels(bias, tensor)
    return cast(made, tensor.dtype), *saved


def _update(running: Any, value: Any, momentum: float) -> None:
    if running is not None:
        running.mul_(1 - momentum).add_(cast(value, running.dtype), alpha=momentum)


def _empty(tensor: Any, dtype: torch.dtype | None = None) -> Any:
    return _aten.new_empty(tensor, [0], dtype=dtype)


def _is_ours(*tensors: Any) -> bool:
    """Whether something is split or pending, and there is something to take statistics of."""
    return not are_replicated(*tensors) and tensors[0].ndim >= 2 and tensors[0].numel() > 0


@composite(_aten.native_batch_norm.default, _aten._native_batch_norm_legit.default)
def _batch_norm(
    input: DTensor,  # noqa: A002
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    """Any dims of the input; channels as weights and running statistics have them."""
    if not _is_ours(input, weight, bias, running_mean, running_var):
        return NotImplemented
    return _normalise(input, weight, bias, (running_mean, running_var), training, momentum, eps)


@composite(_aten._native_batch_norm_legit.no_stats)
def _without_running(input: DTensor, weight: Any, bias: Any, training: bool, momentum: float, eps: float) -> Any:  # noqa: A002
    """As `_batch_norm`."""
    if not _is_ours(input, weight, bias) or not training:
        return NotImplemented
    return _normalise(input, weight, bias, (None, None), training, momentum, eps)


@composite(_aten.cudnn_batch_norm.default)
def _with_reserve(
    input: DTensor,  # noqa: A002
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    training: bool,
    exponential_average_factor: float,
    epsilon: float,
) -> Any:
    """As `_batch_norm`; nothing is reserved."""
    running = running_mean, running_var
    if not _is_ours(input, weight, bias, *running):
        return NotImplemented
    made = _normalise(input, weight, bias, running, training, exponential_average_factor, epsilon)
    return *made, _empty(input, torch.uint8)


@composite(_aten._batch_norm_with_update.default)
def _with_update(
    input: DTensor,  # noqa: A002
    weight: Any,
    bias: Any,
    running_mean: DTensor,
    running_var: DTensor,
    momentum: float,
    eps: float,
) -> Any:
    """As `_batch_norm` in training; nothing is reserved."""
    if not _is_ours(input, weight, bias, running_mean, running_var):
        return NotImplemented
    made = _normalise(input, weight, bias, (running_mean, running_var), True, momentum, eps)
    return *made, _empty(input, torch.uint8)


@composite(_aten.native_batch_norm_backward.default)
def _backward(
    grad_out: DTensor,
    input: DTensor,  # noqa: A002
    weight: Any,
    running_mean: Any,
    running_var: Any,
    save_mean: Any,
    save_invstd: Any,
    train: bool,
    eps: float,
    output_mask: Sequence[bool],
) -> Any:
    """Any dims; gradients of weight and bias are sums over the whole batch."""
    if not _is_ours(input, grad_out, weight, running_mean, running_var, save_mean, save_invstd):
        return NotImplemented
    wide = accumulation_dtype(input.dtype)
    gradient = reduce_pending(cast(grad_out, wide))
    mean = save_mean if train else cast(running_mean, wide)
    rstd = _along_channels(save_invstd if train else torch.rsqrt(cast(running_var, wide) + eps), input)
    normal = (reduce_pending(cast(input, wide)) - _along_channels(mean, input)) * rstd
    total = reduce_pending(torch.sum(gradient, _others(input), keepdim=True))
    slope = reduce_pending(torch.sum(gradient * normal, _others(input), keepdim=True))
    scale = rstd if weight is None else rstd * _along_channels(weight, input)
    if train:
        count = input.numel() // input.shape[1]
        gradient = gradient - total / count - normal * (slope / count)
    made = cast(gradient * scale, input.dtype), _of_channels(slope, weight), _of_channels(total, weight)
    return tuple(one if is_wanted else None for one, is_wanted in zip(made, output_mask, strict=True))


def _of_channels(tensor: Any, like: Any) -> Any:
    return cast(tensor.view([tensor.shape[1]]), tensor.dtype if like is None else like.dtype)


@composite(_aten.cudnn_batch_norm_backward.default)
def _cudnn_backward(
    input: DTensor,  # noqa: A002
    grad_output: DTensor,
    weight: DTensor,
    running_mean: Any,
    running_var: Any,
    save_mean: Any,
    save_var: Any,
    epsilon: float,
    reserveSpace: DTensor,  # noqa: N803
) -> Any:
    """As `_backward` in training; the saved variance is the reciprocal deviation here too."""
    del reserveSpace
    mask = [True, True, True]
    return _backward(grad_output, input, weight, running_mean, running_var, save_mean, save_var, True, epsilon, mask)


@composite(_aten.batch_norm_backward.default)
def _update_backward(
    grad_out: DTensor,
    input: DTensor,  # noqa: A002
    weight: DTensor,
    running_mean: Any,
    running_var: Any,
    save_mean: Any,
    save_var: Any,
    update: bool,
    eps: float,
    output_mask: Sequence[bool],
    reserve: DTensor,
) -> Any:
    """As `_backward`; the saved variance is the reciprocal deviation here too."""
    del reserve
    return _backward(grad_out, input, weight, running_mean, running_var, save_mean, save_var, update, eps, output_mask)
