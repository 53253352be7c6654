"""Layer, RMS and group normalisation: by rule over other dims, by global statistics over split normalised dims."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from dtckpt.dtensor.operators.call import Call
from dtckpt.dtensor.operators.composite_helpers import accumulation_dtype, cast, reduce_pending
from dtckpt.dtensor.operators.registry import composite, rule
from dtckpt.dtensor.operators.rule import Dims, Factors, Rule
from dtckpt.dtensor.operators.rules.variance_norm import moments, split_dims
from dtckpt.dtensor.tensor import DTensor

_aten = torch.ops.aten


class _Normalised:
    """Dims of a call: leading ones, free; trailing ones, whole, as weights have; and those of statistics."""

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
    """Leading dims free, normalised ones whole; results: normalised, mean (not of RMS), reciprocal deviation."""
    ours = _Normalised(call)
    by_name = {"input": ours.dims, "weight": ours.trailing, "bias": ours.trailing}
    statistics = (ours.statistics,) * (2 if "bias" in call else 1)
    return Rule(ours.factors.sizes, call.operands(**by_name), (ours.dims, *statistics), whole=ours.whole)


@rule(_aten.native_layer_norm_backward.default, _aten._fused_rms_norm_backward.default)
def _backward(call: Call) -> Rule:
    """Leading dims free, normalised ones whole; gradients of weight and bias wait for a sum over leading dims."""
    ours = _Normalised(call)
    by_name = {
        "grad_out": ours.dims,
        "input": ours.dims,
        "mean": ours.statistics,
        "rstd": ours.statistics,
        "weight": ours.trailing,
        "bias": ours.trailing,
    }
    made = [
        dims
        for dims, is_wanted in zip((ours.dims, ours.trailing, ours.trailing), call["output_mask"], strict=False)
        if is_wanted
    ]
    return Rule(
        ours.factors.sizes,
        call.operands(**by_name),
        tuple(dims for dims, is_wanted in zip(made, call["output_mask"], strict=False) if is_wanted),
        contracted=dict.fromkeys(ours.lead, "sum"),
        whole=ours.whole,
    )


@composite(_aten.native_layer_norm.default)
def _layer_norm(input: DTensor, normalized_shape: Any, weight: Any, bias: Any, eps: float) -> Any:  # noqa: A002
    """Normalised dims split: mean and deviation are of all pieces."""
    dims = split_dims(input, range(-len(normalized_shape), 0))
    if dims is None:
        return NotImplemented
    wide = reduce_pending(cast(input, accumulation_dtype(input.dtype)))
    mean, squares = moments(wide, dims)
    rstd = torch.rsqrt(squares / math.prod(normalized_shape) + eps)
    made = (wide - mean) * rstd
    made = made if weight is None else made * weight
    made = made if bias is None else made + bias
    dtype = _dtype_of_statistics(input, weight)
    return cast(made, input.dtype), cast(mean, dtype), cast(rstd, dtype)


def _dtype_of_statistics(tensor: Any, weight: Any) -> torch.dtype:
    """Return the dtype in which PyTorch keeps mean and deviation."""
    if tensor.is_cuda:
        return accumulation_dtype(tensor.dtype)
    return tensor.dtype if weight is None else weight.dtype  # type: ignore[no-any-return]


@composite(_aten.native_layer_norm_backward.default)
def _layer_norm_backward(
    grad_out: DTensor,
    input: DTensor,  # noqa: A002
    normalized_shape: Any,
    mean: DTensor,
    rstd: DTensor,
    weight: Any,
    bias: Any,
    output_mask: Sequence[bool],
) -> Any:
    """Normalised dims split: as forward."""
    dims = split_dims(input, range(-len(normalized_shape), 0))
    if dims is None:
        return NotImplemented
    wide = accumulation_dtype(input.dtype)
    gradient = reduce_pending(cast(grad_out, wide))
    normal = (reduce_pending(cast(input, wide)) - mean) * rstd
    scaled = gradient if weight is None else gradient * weight
    projected = scaled - torch.mean(scaled, dims, keepdim=True)
    made = (projected - normal * torch.mean(scaled * normal, dims, keepdim=True)) * rstd
    return (
        cast(made, input.dtype) if output_mask[0] else None,
        _over_lead(gradient * normal, dims, weight) if output_mask[1] else None,
        _over_lead(gradient, dims, bias) if output_mask[2] else None,
    )


def _over_lead(tensor: Any, dims: list[int], like: Any) -> Any:
    """Return the sum over the dims that are not normalised."""
    lead = [dim for dim in range(tensor.ndim) if dim not in dims]
    return cast(torch.sum(tensor, lead) if lead else tensor, tensor.dtype if like is None else like.dtype)


@composite(_aten._fused_rms_norm.default)
def _rms_norm(input: DTensor, normalized_shape: Any, weight: Any, eps: float | None) -> Any:  # noqa: A002
    """Normalised dims split: the mean of squares is of all pieces."""
    dims = split_dims(input, range(-len(normalized_shape), 0))
    if dims is None:
        return NotImplemented
    wide = reduce_pending(cast(input, accumulation_dtype(input.dtype)))
    rstd = torch.rsqrt(
        torch.mean(wide * wide, dims, keepdim=True) + (torch.finfo(input.dtype).eps if eps is None else eps)
    )
    made = wide * rstd
    return cast(made if weight is None else made * weight, input.dtype), rstd


@composite(_aten._fused_rms_norm_backward.default)
def _rms_norm_backward(
    grad_out: DTensor,
    input: DTensor,  # noqa: A002
    normalized_shape: Any,
    rstd: DTensor,
    weight: Any,
    output_mask: Sequence[bool],
) -> Any:
    """Normalised dims split: as forward."""
    dims = split_dims(input, range(-len(normalized_shape), 0))
    if dims is None:
        return NotImplemented
    wide = accumulation_dtype(input.dtype)
    gradient = reduce_pending(cast(grad_out, wide))
    normal = reduce_pending(cast(input, wide)) * rstd
    scaled = gradient if weight is None else gradient * weight
    made = (scaled - normal * torch.mean(scaled * normal, dims, keepdim=True)) * rstd
    return (
        cast(made, input.dtype) if output_mask[0] else None,
        _over_lead(gradient * normal, dims, weight) if output_mask[1] else None,
    )


class _Grouped:
    """Dims of a call: batch, channels (groups of some each), and all others, which are whole."""

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

    def locally(self, func: Any, place: int) -> Any:
        """Return the operator with sizes, ``N`` at that place among the arguments, of the device's piece."""

        def local(*args: Any) -> Any:
            batch, channels, *rest = args[0].shape
            sizes = (batch, channels, math.prod(rest), channels // self.width)
            return func(*args[:place], *sizes, *args[place + 4 :])

        return local


@rule(_aten.native_group_norm.default)
def _group_norm(call: Call) -> Rule | None:
    """Batch free, channels by whole groups, the rest whole; results: normalised, mean, reciprocal deviation."""
    if call["input"].ndim < 2 or call.kwargs:
        return None
    ours = _Grouped(call)
    operands = call.operands(input=ours.dims, weight=ours.channels, bias=ours.channels)
    results = (ours.dims, ours.statistics, ours.statistics)
    return Rule(ours.factors.sizes, operands, results, whole=ours.whole, local=ours.locally(call.func, 3))


@rule(_aten.native_group_norm_backward.default)
def _group_norm_backward(call: Call) -> Rule | None:
    """As forward; gradients of weight and bias wait for a sum over the batch."""
    if call["input"].ndim < 2 or call.kwargs:
        return None
    ours = _Grouped(call)
    operands = call.operands(
        grad_out=ours.dims, input=ours.dims, mean=ours.statistics, rstd=ours.statistics, weight=ours.channels
    )
    made = (ours.dims, ours.channels, ours.channels)
    return Rule(
        ours.factors.sizes,
        operands,
        tuple(dims for dims, is_wanted in zip(made, call["output_mask"], strict=True) if is_wanted),
        contracted={ours.batch: "sum"},
        whole=ours.whole,
        local=ours.locally(call.func, 5),
    )
