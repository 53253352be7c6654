"""Layer, RMS and group normalization, forward and backward: ``native_layer_norm``, ``_fused_rms_norm``.

By rule where the normalized dims are whole. Where they are split, in layer and RMS normalization, the statistics are
sums over the devices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from dtckpt.dtensor.operators.call import Call
from dtckpt.dtensor.operators.composite_helpers import accumulation_dtype, cast, reduce_pending
from dtckpt.dtensor.operators.registry import composite, rule
from dtckpt.dtensor.operators.rule import Dims, Factors, Rule
from dtckpt.dtensor.operators.rules.reductions import moments, split_dims
from dtckpt.dtensor.tensor import DTensor

_aten = torch.ops.aten


class _LayerDims:
    """Factors of layer and RMS normalization: leading dims may be split, normalized ones must be whole.

    ::

        input        (lead, trailing)
        weight       (trailing)
        statistics   (lead, 1)
    """

    def __init__(self, call: Call) -> None:
        shape, trailing = tuple(call["input"].shape), call["normalized_shape"]
        self.factors = Factors()
        self.dims = self.factors.dims(shape)
        lead = len(shape) - len(trailing)
        self.trailing: Dims = self.dims[lead:]
        self.statistics: Dims = (*self.dims[:lead], *[() for _ in trailing])
        self.lead = frozenset(factor for dim in self.dims[:lead] for factor in dim)
        self.whole = frozenset(factor for dim in self.trailing for factor in dim)


@rule(_aten.native_layer_norm.default, _aten._fused_rms_norm.default)
def _forward(call: Call) -> Rule:
    """Leading dims may be split, normalized ones must be whole; output, mean (layer only), reciprocal deviation."""
    layer = _LayerDims(call)
    by_name = {"input": layer.dims, "weight": layer.trailing, "bias": layer.trailing}
    statistics = (layer.statistics,) * (2 if "bias" in call else 1)
    return Rule(layer.factors.sizes, call.operands(**by_name), (layer.dims, *statistics), whole=layer.whole)


@rule(_aten.native_layer_norm_backward.default, _aten._fused_rms_norm_backward.default)
def _backward(call: Call) -> Rule:
    """Leading dims may be split; if they are, gradients of weight and bias wait for a sum."""
    layer = _LayerDims(call)
    by_name = {
        "grad_out": layer.dims,
        "input": layer.dims,
        "mean": layer.statistics,
        "rstd": layer.statistics,
        "weight": layer.trailing,
        "bias": layer.trailing,
    }
    gradients = tuple(
        dims
        for dims, is_needed in zip((layer.dims, layer.trailing, layer.trailing), call["output_mask"], strict=False)
        if is_needed
    )
    return Rule(
        layer.factors.sizes,
        call.operands(**by_name),
        gradients,
        contracted=dict.fromkeys(layer.lead, "sum"),
        whole=layer.whole,
    )


@composite(_aten.native_layer_norm.default)
def _layer_norm(input: DTensor, normalized_shape: Any, weight: Any, bias: Any, eps: float) -> Any:
    """Normalized dims may be split: mean and deviation are sums over the devices."""
    dims = split_dims(input, range(-len(normalized_shape), 0))
    if dims is None:
        return NotImplemented
    wide = reduce_pending(cast(input, accumulation_dtype(input.dtype)))
    mean, squares = moments(wide, dims)
    rstd = torch.rsqrt(squares / math.prod(normalized_shape) + eps)
    output = (wide - mean) * rstd
    output = output if weight is None else output * weight
    output = output if bias is None else output + bias
    dtype = dtype_of_statistics(input, weight)
    return cast(output, input.dtype), cast(mean, dtype), cast(rstd, dtype)


def dtype_of_statistics(tensor: Any, weight: Any) -> torch.dtype:
    """Return the dtype in which PyTorch keeps mean and deviation."""
    if tensor.is_cuda:
        return accumulation_dtype(tensor.dtype)
    return tensor.dtype if weight is None else weight.dtype  # type: ignore[no-any-return]


@composite(_aten.native_layer_norm_backward.default)
def _layer_norm_backward(
    grad_out: DTensor,
    input: DTensor,
    normalized_shape: Any,
    mean: DTensor,
    rstd: DTensor,
    weight: Any,
    bias: Any,
    output_mask: Sequence[bool],
) -> Any:
    """Normalized dims may be split, as forward."""
    dims = split_dims(input, range(-len(normalized_shape), 0))
    if dims is None:
        return NotImplemented
    wide = accumulation_dtype(input.dtype)
    gradient = reduce_pending(cast(grad_out, wide))
    normal = (reduce_pending(cast(input, wide)) - mean) * rstd
    scaled = gradient if weight is None else gradient * weight
    projected = scaled - torch.mean(scaled, dims, keepdim=True)
    grad_input = (projected - normal * torch.mean(scaled * normal, dims, keepdim=True)) * rstd
    return (
        cast(grad_input, input.dtype) if output_mask[0] else None,
        _over_lead(gradient * normal, dims, weight) if output_mask[1] else None,
        _over_lead(gradient, dims, bias) if output_mask[2] else None,
    )


def _over_lead(tensor: Any, dims: list[int], like: Any) -> Any:
    """Return the sum over the dims that are not normalized, in the dtype of a weight.

    Args:
        tensor: Of the input's dims.
        dims: The normalized dims.
        like: The weight or bias; None for the tensor's own dtype.
    """
    lead = [dim for dim in range(tensor.ndim) if dim not in dims]
    return cast(torch.sum(tensor, lead) if lead else tensor, tensor.dtype if like is None else like.dtype)


@composite(_aten._fused_rms_norm.default)
def _rms_norm(input: DTensor, normalized_shape: Any, weight: Any, eps: float | None) -> Any:
    """Normalized dims may be split: the mean of squares is a sum over the devices."""
    dims = split_dims(input, range(-len(normalized_shape), 0))
    if dims is None:
        return NotImplemented
    wide = reduce_pending(cast(input, accumulation_dtype(input.dtype)))
    rstd = torch.rsqrt(
        torch.mean(wide * wide, dims, keepdim=True) + (torch.finfo(input.dtype).eps if eps is None else eps)
    )
    output = wide * rstd
    return cast(output if weight is None else output * weight, input.dtype), rstd


@composite(_aten._fused_rms_norm_backward.default)
def _rms_norm_backward(
    grad_out: DTensor,
    input: DTensor,
    normalized_shape: Any,
    rstd: DTensor,
    weight: Any,
    output_mask: Sequence[bool],
) -> Any:
    """Normalized dims may be split, as forward."""
    dims = split_dims(input, range(-len(normalized_shape), 0))
    if dims is None:
        return NotImplemented
    wide = accumulation_dtype(input.dtype)
    gradient = reduce_pending(cast(grad_out, wide))
    normal = reduce_pending(cast(input, wide)) * rstd
    scaled = gradient if weight is None else gradient * weight
    grad_input = (scaled - normal * torch.mean(scaled * normal, dims, keepdim=True)) * rstd
    return (
        cast(grad_input, input.dtype) if output_mask[0] else None,
        _over_lead(gradient * normal, dims, weight) if output_mask[1] else None,
    )


class _GroupDims:
    """Factors of group normalization: batch and groups may be split; channels of a group and all other dims may not.

    ::

        input        (batch, group * channels of a group, others)
        weight       (group * channels of a group)
        statistics   (batch, group)
    """

    def __init__(self, call: Call) -> None:
        batch, channels, *rest = call["input"].shape
        self.factors = Factors()
        self.batch, self.group = self.factors.new(batch), self.factors.new(call["group"])
        self.width = channels // call["group"]
        inside = self.factors.new(self.width)
        others = self.factors.dims(rest)
        self.channels: Dims = ((self.group, inside),)
        self.dims: Dims = ((self.batch,), *self.channels, *others)
        self.statistics: Dims = ((self.batch,), (self.group,))
        self.whole = frozenset((inside, *(factor for dim in others for factor in dim)))

    def with_local_sizes(self, func: Any, position: int) -> Any:
        """Return the operator with the sizes of a component in place of the global ones.

        Args:
            func: The operator.
            position: Position of the first of its arguments ``N, C, HxW, group``.
        """

        def local(*args: Any) -> Any:
            batch, channels, *rest = args[0].shape
            sizes = (batch, channels, math.prod(rest), channels // self.width)
            return func(*args[:position], *sizes, *args[position + 4 :])

        return local


@rule(_aten.native_group_norm.default)
def _group_norm(call: Call) -> Rule | None:
    """Batch may be split, channels between groups; output, mean, reciprocal deviation."""
    if call["input"].ndim < 2 or not call["input"].shape[1] or call.kwargs:
        return None
    groups = _GroupDims(call)
    operands = call.operands(input=groups.dims, weight=groups.channels, bias=groups.channels)
    results = (groups.dims, groups.statistics, groups.statistics)
    return Rule(
        groups.factors.sizes, operands, results, whole=groups.whole, local=groups.with_local_sizes(call.func, 3)
    )


@rule(_aten.native_group_norm_backward.default)
def _group_norm_backward(call: Call) -> Rule | None:
    """Batch may be split, channels between groups; if the batch is, gradients of weight and bias wait for a sum."""
    if call["input"].ndim < 2 or not call["input"].shape[1] or call.kwargs:
        return None
    groups = _GroupDims(call)
    operands = call.operands(
        grad_out=groups.dims, input=groups.dims, mean=groups.statistics, rstd=groups.statistics, weight=groups.channels
    )
    gradients = (groups.dims, groups.channels, groups.channels)
    return Rule(
        groups.factors.sizes,
        operands,
        tuple(dims for dims, is_needed in zip(gradients, call["output_mask"], strict=True) if is_needed),
        contracted={groups.batch: "sum"},
        whole=groups.whole,
        local=groups.with_local_sizes(call.func, 5),
    )
