"""``softmax``, ``log_softmax``, ``logsumexp``, and their gradients.

By rule where the dim is whole. Where it is split, each device computes the exponentials of its component; a maximum
and a sum over the devices do the rest, and nothing is gathered.
"""

from __future__ import annotations

from typing import Any

import torch

from dtckpt.dtensor.operators.call import Call
from dtckpt.dtensor.operators.composite_helpers import accumulation_dtype, cast, is_split, reduce_pending
from dtckpt.dtensor.operators.registry import composite, rule
from dtckpt.dtensor.operators.rule import Rule
from dtckpt.dtensor.operators.rule_builders import along_dim, reduce_dims
from dtckpt.dtensor.tensor import DTensor

_aten = torch.ops.aten


@rule(_aten._softmax.default, _aten._log_softmax.default, _aten._safe_softmax.default)
def _forward(call: Call) -> Rule | None:
    """The dim must be whole."""
    return along_dim(call)


@rule(_aten._softmax_backward_data.default, _aten._log_softmax_backward_data.default)
def _backward(call: Call) -> Rule | None:
    """The dim must be whole; gradient and result have one layout."""
    return along_dim(call, num_operands=2)


@rule(_aten.logsumexp.default)
def _logsumexp_rule(call: Call) -> Rule | None:
    """The dims that are reduced must be whole."""
    return reduce_dims(call, call["dim"], keepdim=call["keepdim"]) if call["dim"] else None


def _is_along_split(tensor: DTensor, dim: int) -> bool:
    """Whether an axis splits the dim."""
    return -tensor.ndim <= dim < tensor.ndim and is_split(tensor, [dim % tensor.ndim]) and bool(tensor.numel())


def shifted_by_maxima(tensor: DTensor, dims: list[int]) -> tuple[Any, Any]:
    """Return a tensor minus its maxima along dims, so that exponentials do not overflow, and the maxima."""
    tensor = reduce_pending(cast(tensor, accumulation_dtype(tensor.dtype)))
    largest = reduce_pending(torch.amax(tensor, dims, keepdim=True))
    return tensor - largest, largest


@composite(_aten._softmax.default)
def _softmax(self: DTensor, dim: int, half_to_float: bool) -> Any:
    if not _is_along_split(self, dim):
        return NotImplemented
    powers = torch.exp(shifted_by_maxima(self, [dim])[0])
    return _rounded(powers / torch.sum(powers, [dim], keepdim=True), self, half_to_float)


@composite(_aten._log_softmax.default)
def _log_softmax(self: DTensor, dim: int, half_to_float: bool) -> Any:
    if not _is_along_split(self, dim):
        return NotImplemented
    shifted, _ = shifted_by_maxima(self, [dim])
    total = reduce_pending(torch.sum(torch.exp(shifted), [dim], keepdim=True))
    return _rounded(shifted - torch.log(total), self, half_to_float)


def _rounded(result: Any, like: DTensor, is_wide: bool) -> Any:
    """Return a result in the operand's dtype, unless the caller wants the wider one."""
    return result if is_wide else cast(result, like.dtype)


@composite(_aten._safe_softmax.default)
def _safe_softmax(self: DTensor, dim: int, dtype: torch.dtype | None = None) -> Any:
    """The dim may be split, as in ``softmax``; rows of negative infinities give zeros."""
    if not _is_along_split(self, dim):
        return NotImplemented
    scores = reduce_pending(self if dtype is None else cast(self, dtype))
    largest = reduce_pending(torch.amax(scores, [dim], keepdim=True))
    return torch.masked_fill(_aten._softmax(scores, dim, False), largest == -torch.inf, 0.0)


@composite(_aten._softmax_backward_data.default)
def _softmax_backward(grad_output: DTensor, output: DTensor, dim: int, input_dtype: torch.dtype) -> Any:
    if not _is_along_split(output, dim):
        return NotImplemented
    scaled = reduce_pending(grad_output) * output
    total = torch.sum(scaled, [dim], keepdim=True, dtype=accumulation_dtype(scaled.dtype))
    return cast(scaled - output * total, input_dtype)


@composite(_aten._log_softmax_backward_data.default)
def _log_softmax_backward(grad_output: DTensor, output: DTensor, dim: int, input_dtype: torch.dtype) -> Any:
    if not _is_along_split(output, dim):
        return NotImplemented
    grad_output = reduce_pending(grad_output)
    total = torch.sum(grad_output, [dim], keepdim=True, dtype=accumulation_dtype(grad_output.dtype))
    return cast(grad_output - torch.exp(output) * total, input_dtype)


@composite(_aten.logsumexp.default)
def _logsumexp(self: DTensor, dim: list[int], keepdim: bool = False) -> Any:
    if not any(_is_along_split(self, one) for one in dim) or not self.is_floating_point():
        return NotImplemented
    wide = reduce_pending(cast(self, accumulation_dtype(self.dtype)))
    largest = reduce_pending(torch.amax(wide, dim, keepdim=True))
    largest = torch.masked_fill(largest, torch.isinf(largest), 0.0)
    total = torch.log(torch.sum(torch.exp(wide - largest), dim, keepdim=True)) + largest
    if keepdim:
        return cast(total, self.dtype)
    reduced = {one % self.ndim for one in dim}
    return cast(total.view([size for one, size in enumerate(self.shape) if one not in reduced]), self.dtype)
