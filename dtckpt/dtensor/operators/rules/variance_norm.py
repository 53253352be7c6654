"""Variances and norms: ``var``, ``std``, ``var_mean``, ``linalg_vector_norm``, ``norm``, ``dist``.

By rule where the dims are whole; where they are split, by sums over the devices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dtckpt.dtensor.operators.call import Call
from dtckpt.dtensor.operators.composite_helpers import accumulation_dtype, cast, is_split, reduce_pending
from dtckpt.dtensor.operators.registry import composite, rule
from dtckpt.dtensor.operators.rule import Rule
from dtckpt.dtensor.operators.rule_builders import reduce_dims, reduced_dims
from dtckpt.dtensor.tensor import DTensor

_aten = torch.ops.aten

_NORMS = (
    _aten.linalg_vector_norm.default,
    _aten.norm.Scalar,
    _aten.norm.ScalarOpt_dim,
    _aten.norm.ScalarOpt_dim_dtype,
    _aten.norm.ScalarOpt_dtype,
)


@rule(*_NORMS)
def _norm_rule(call: Call) -> Rule | None:
    """The dims that are reduced must be whole."""
    return reduce_dims(call, call.get("dim"), keepdim=bool(call.get("keepdim")))


@rule(_aten.var.correction, _aten.std.correction)
def _variance(call: Call) -> Rule | None:
    """The dims that are reduced must be whole."""
    return reduce_dims(call, call["dim"], keepdim=call["keepdim"], local=_quietly(call, 1))


@rule(_aten.var_mean.correction, _aten.std_mean.correction)
def _variance_and_mean(call: Call) -> Rule | None:
    """The dims that are reduced must be whole."""
    return reduce_dims(call, call["dim"], keepdim=call["keepdim"], num_results=2, local=_quietly(call, 2))


def _quietly(call: Call, num_results: int) -> Callable[..., Any]:
    """Return the operator without PyTorch's warning about too few elements, which an empty component would cause."""
    func, is_empty = call.func, not call.tensors[0].numel()

    def local(tensor: torch.Tensor, dim: Any = None, **kwargs: Any) -> Any:
        if is_empty or tensor.numel():
            return func(tensor, dim, **kwargs)
        empty = tensor.sum(dim, keepdim=kwargs.get("keepdim", False))
        return empty if num_results == 1 else (empty,) * num_results

    return local


def split_dims(tensor: DTensor, dim: int | Sequence[int] | None) -> list[int] | None:
    """Return the dims that an argument names if an axis splits one of them and the tensor has elements, else None."""
    reduced = reduced_dims(dim, tensor.ndim)
    return sorted(reduced) if reduced is not None and is_split(tensor, reduced) and tensor.numel() else None


def moments(tensor: Any, dims: list[int]) -> tuple[Any, Any]:
    """Return the mean over dims, and the sum of the squared differences from it; the dims stay, with size 1.

    Collective: Over the mesh's clients.

    Args:
        tensor: Without pending reductions, in the dtype to add up in.
        dims: The dims.
    """
    mean = reduce_pending(torch.mean(tensor, dims, keepdim=True))
    centred = tensor - mean
    return mean, reduce_pending(torch.sum(centred * centred, dims, keepdim=True))


def _register(of_one: Any, of_two: Any, finish: Callable[[Any], Any]) -> None:
    def both(tensor: DTensor, dim: Any, correction: Any, keepdim: bool) -> Any:
        dims = split_dims(tensor, dim)
        if dims is None or not tensor.is_floating_point():
            return NotImplemented
        mean, squares = moments(reduce_pending(cast(tensor, accumulation_dtype(tensor.dtype))), dims)
        degrees = math.prod(tensor.shape[one] for one in dims) - (1 if correction is None else correction)
        shape = [1 if one in dims else size for one, size in enumerate(tensor.shape) if keepdim or one not in dims]
        results = finish(squares / max(0.0, float(degrees))), mean
        return tuple(cast(one if keepdim else one.view(shape), tensor.dtype) for one in results)

    @composite(of_one)
    def variance(self: DTensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Any:
        results = both(self, dim, correction, keepdim)
        return results if results is NotImplemented else results[0]

    @composite(of_two)
    def variance_and_mean(self: DTensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Any:
        return both(self, dim, correction, keepdim)


_register(_aten.var.correction, _aten.var_mean.correction, lambda variance: variance)
_register(_aten.std.correction, _aten.std_mean.correction, torch.sqrt)


@composite(_aten.linalg_vector_norm.default)
def _norm(self: DTensor, ord: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    """Dims may be split: of order 0 it counts, of an infinite order it takes an extreme, else it sums powers."""
    dims = split_dims(self, dim)
    if dims is None:
        return NotImplemented
    tensor = self if dtype is None else cast(self, dtype)
    magnitude = torch.abs(reduce_pending(cast(tensor, accumulation_dtype(tensor.dtype))))
    if math.isinf(ord):
        norm = (torch.amax if ord > 0 else torch.amin)(magnitude, dims, keepdim)
    elif ord == 0:
        norm = torch.sum(torch.ne(magnitude, 0), dims, keepdim, dtype=magnitude.dtype)
    elif ord == 2:
        norm = torch.sqrt(torch.sum(magnitude * magnitude, dims, keepdim))
    elif ord == 1:
        norm = torch.sum(magnitude, dims, keepdim)
    else:
        norm = torch.pow(torch.sum(torch.pow(magnitude, ord), dims, keepdim), 1.0 / ord)
    return cast(norm, tensor.dtype.to_real())


@composite(*_NORMS[1:])
def _old_norm(self: DTensor, p: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    if split_dims(self, dim) is None:
        return NotImplemented
    return _aten.linalg_vector_norm(self, 2 if p is None else p, dim, keepdim, dtype=dtype)


@composite(_aten.dist.default)
def _dist(self: DTensor, other: DTensor, p: Any = 2) -> Any:
    return _aten.linalg_vector_norm(torch.sub(self, other), p)
