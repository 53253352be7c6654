"""Batch normalization: ``native_batch_norm``, ``cudnn_batch_norm``, and their gradients. All dims may be split.

Mean and variance cover the whole batch, as one device would compute them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from dtckpt.dtensor.operators.composite_helpers import accumulation_dtype, are_replicated, cast, reduce_pending
from dtckpt.dtensor.operators.registry import composite
from dtckpt.dtensor.operators.rules.normalization import dtype_of_statistics
from dtckpt.dtensor.operators.rules.reductions import moments
from dtckpt.dtensor.tensor import DTensor

_aten = torch.ops.aten


def _along_channels(tensor: Any, like: Any) -> Any:
    """Return a tensor of dims (C) as (1, C, 1, ...), to be broadcast with another; None stays None."""
    return None if tensor is None else tensor.view([1, -1, *[1] * (like.ndim - 2)])


def _dims_but_channels(tensor: Any) -> list[int]:
    return [dim for dim in range(tensor.ndim) if dim != 1]


def _normalize(
    tensor: Any, weight: Any, bias: Any, running: tuple[Any, Any], is_training: bool, momentum: float, eps: float
) -> tuple[Any, Any, Any]:
    """Return the normalized tensor, mean and reciprocal deviation; the last two are empty if not training.

    Args:
        tensor: Dims (N, C, space).
        weight: Dims (C), or None.
        bias: Dims (C), or None.
        running: Running mean and variance, which training updates; dims (C), or None.
        is_training: Whether to normalize by the statistics of the batch, else by the running ones.
        momentum: Weight of the batch in the running statistics.
        eps: Added to the variance.
    """
    wide = reduce_pending(cast(tensor, accumulation_dtype(tensor.dtype)))
    channels = [tensor.shape[1]]
    if is_training:
        mean, squares = moments(wide, _dims_but_channels(tensor))
        count = tensor.numel() // max(tensor.shape[1], 1)
        rstd = torch.rsqrt(squares / count + eps)
        _update(running[0], mean.view(channels), momentum)
        _update(running[1], squares.view(channels) / (count - 1 if count > 1 else math.nan), momentum)
        dtype = dtype_of_statistics(tensor, weight)
        saved = cast(mean.view(channels), dtype), cast(rstd.view(channels), dtype)
    else:
        mean = _along_channels(running[0], tensor)
        rstd = torch.rsqrt(_along_channels(running[1], tensor) + eps)
        saved = _empty(tensor), _empty(tensor)
    output = (wide - mean) * rstd
    output = output if weight is None else output * _along_channels(weight, tensor)
    output = output if bias is None else output + _along_channels(bias, tensor)
    return cast(output, tensor.dtype), *saved


def _update(running: Any, value: Any, momentum: float) -> None:
    if running is not None:
        running.mul_(1 - momentum).add_(cast(value, running.dtype), alpha=momentum)


def _empty(tensor: Any, dtype: torch.dtype | None = None) -> Any:
    return _aten.new_empty(tensor, [0], dtype=dtype)


def _needs_exchange(*tensors: Any) -> bool:
    """Whether a tensor is split or pending, and the first has channels and elements; else the composite declines."""
    return not are_replicated(*tensors) and tensors[0].ndim >= 2 and tensors[0].numel() > 0


@composite(_aten.native_batch_norm.default, _aten._native_batch_norm_legit.default)
def _batch_norm(
    input: DTensor,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    """All dims may be split: statistics are sums over the devices."""
    if not _needs_exchange(input, weight, bias, running_mean, running_var):
        return NotImplemented
    return _normalize(input, weight, bias, (running_mean, running_var), training, momentum, eps)


@composite(_aten._native_batch_norm_legit.no_stats)
def _without_running(input: DTensor, weight: Any, bias: Any, training: bool, momentum: float, eps: float) -> Any:
    """As ``native_batch_norm``."""
    if not _needs_exchange(input, weight, bias) or not training:
        return NotImplemented
    return _normalize(input, weight, bias, (None, None), training, momentum, eps)


@composite(_aten.cudnn_batch_norm.default)
def _with_reserve(
    input: DTensor,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    training: bool,
    exponential_average_factor: float,
    epsilon: float,
) -> Any:
    """As ``native_batch_norm``; the reserved space is empty."""
    running = running_mean, running_var
    if not _needs_exchange(input, weight, bias, *running):
        return NotImplemented
    results = _normalize(input, weight, bias, running, training, exponential_average_factor, epsilon)
    return *results, _empty(input, torch.uint8)


@composite(_aten._batch_norm_with_update.default)
def _with_update(
    input: DTensor,
    weight: Any,
    bias: Any,
    running_mean: DTensor,
    running_var: DTensor,
    momentum: float,
    eps: float,
) -> Any:
    """As ``native_batch_norm`` in training; the reserved space is empty."""
    if not _needs_exchange(input, weight, bias, running_mean, running_var):
        return NotImplemented
    results = _normalize(input, weight, bias, (running_mean, running_var), True, momentum, eps)
    return *results, _empty(input, torch.uint8)


@composite(_aten.native_batch_norm_backward.default)
def _backward(
    grad_out: DTensor,
    input: DTensor,
    weight: Any,
    running_mean: Any,
    running_var: Any,
    save_mean: Any,
    save_invstd: Any,
    train: bool,
    eps: float,
    output_mask: Sequence[bool],
) -> Any:
    """All dims may be split: gradients of weight and bias are sums over the devices."""
    if not _needs_exchange(input, grad_out, weight, running_mean, running_var, save_mean, save_invstd):
        return NotImplemented
    wide = accumulation_dtype(input.dtype)
    gradient = reduce_pending(cast(grad_out, wide))
    mean = save_mean if train else cast(running_mean, wide)
    rstd = _along_channels(save_invstd if train else torch.rsqrt(cast(running_var, wide) + eps), input)
    normal = (reduce_pending(cast(input, wide)) - _along_channels(mean, input)) * rstd
    total = reduce_pending(torch.sum(gradient, _dims_but_channels(input), keepdim=True))
    slope = reduce_pending(torch.sum(gradient * normal, _dims_but_channels(input), keepdim=True))
    scale = rstd if weight is None else rstd * _along_channels(weight, input)
    if train:
        count = input.numel() // input.shape[1]
        gradient = gradient - total / count - normal * (slope / count)
    gradients = cast(gradient * scale, input.dtype), _to_channels(slope, weight), _to_channels(total, weight)
    return tuple(one if is_needed else None for one, is_needed in zip(gradients, output_mask, strict=True))


def _to_channels(tensor: Any, like: Any) -> Any:
    """Return a tensor of dims (1, C, 1, ...) as (C), in the dtype of another."""
    return cast(tensor.view([tensor.shape[1]]), tensor.dtype if like is None else like.dtype)


@composite(_aten.cudnn_batch_norm_backward.default)
def _cudnn_backward(
    input: DTensor,
    grad_output: DTensor,
    weight: DTensor,
    running_mean: Any,
    running_var: Any,
    save_mean: Any,
    save_var: Any,
    epsilon: float,
    reserveSpace: DTensor,
) -> Any:
    """As ``native_batch_norm_backward`` in training; ``save_var`` is the reciprocal deviation here too."""
    del reserveSpace
    mask = [True, True, True]
    return _backward(grad_output, input, weight, running_mean, running_var, save_mean, save_var, True, epsilon, mask)


@composite(_aten.batch_norm_backward.default)
def _update_backward(
    grad_out: DTensor,
    input: DTensor,
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
    """As ``native_batch_norm_backward``; ``save_var`` is the reciprocal deviation here too."""
    del reserve
    return _backward(grad_out, input, weight, running_mean, running_var, save_mean, save_var, update, eps, output_mask)
