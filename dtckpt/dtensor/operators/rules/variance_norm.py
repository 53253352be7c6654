"""Variances and norms: over split dims, by sums that every device contributes to."""

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
    """The dims that go are whole."""
    return reduce_dims(call, call.get("dim"), keepdim=bool(call.get("keepdim")))


@rule(_aten.var.correction, _aten.std.correction)
def _one(call: Call) -> Rule | None:
    """The dims that go are whole."""
    return reduce_dims(call, call["dim"], keepdim=call["keepdim"], local=_quietly(call, 1))


@rule(_aten.var_mean.correction, _aten.std_mean.correction)
def _two(call: Call) -> Rule | None:
    """The dims that go are whole."""
    return reduce_dims(call, call["dim"], keepdim=call["keepdim"], num_results=2, local=_quietly(call, 2))


def _quietly(call: Call, num_results: int) -> Callable[..., Any]:
    """Return the operator without PyTorch's warning that empty pieces have too few elements."""

    func, is_empty = call.func, not call.tensors[0].numel()

    def local(tensor: torch.Tensor, dim: Any = None, **kwargs: Any) -> Any:
        if is_empty or tensor.numel():
            return func(tensor, dim, **kwargs)
        made = tensor.sum(dim, keepdim=kwargs.get("keepdim", False))
        return made if num_results == 1 else (made,) * num_results

    return local


def split_dims(tensor: DTensor, dim: int | Sequence[int] | None) -> list[int] | None:
    """Return dims that are reduced, if one of them is split and there are elements, else None."""
    gone = reduced_dims(dim, tensor.ndim)
    return sorted(gone) if gone is not None and is_split(tensor, gone) and tensor.numel() else None


def moments(tensor: Any, dims: list[int]) -> tuple[Any, Any]:
    """Return the mean over dims, which are kept, and the sum of squares of what elements differ from it.

    Args:
        tensor: Without pending reductions, in the dtype to add up in.
        dims: That are kept, of size 1.
    """
    mean = reduce_pending(torch.mean(tensor, dims, keepdim=True))
    centred = tensor - mean
    return mean, reduce_pending(torch.sum(centred * centred, dims, keepdim=True))


def _register(of_one: Any, of_two: Any, finish: Callable[[Any], Any]) -> None:
    def made(tensor: DTensor, dim: Any, correction: Any, is_kept: bool) -> Any:
        dims = split_dims(tensor, dim)
        if dims is None or not tensor.is_floating_point():
            return NotImplemented
        mean, squares = moments(reduce_pending(cast(tensor, accumulation_dtype(tensor.dtype))), dims)
        degrees = math.prod(tensor.shape[one] for one in dims) - (1 if correction is None else correction)
        kept = [1 if one in dims else size for one, size in enumerate(tensor.shape) if is_kept or one not in dims]
        both = finish(squares / max(0.0, float(degrees))), mean
        return tuple(cast(one if is_kept else one.view(kept), tensor.dtype) for one in both)

    @composite(of_one)
    def one(self: DTensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Any:
        found = made(self, dim, correction, keepdim)
        return found if found is NotImplemented else found[0]

    @composite(of_two)
    def two(self: DTensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Any:
        return made(self, dim, correction, keepdim)


_register(_aten.var.correction, _aten.var_mean.correction, lambda variance: variance)
_register(_aten.std.correction, _aten.std_mean.correction, torch.sqrt)


@composite(_aten.linalg_vector_norm.default)
def _norm(self: DTensor, ord: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:  # noqa: A002
    """Of order ``ord``; 0 counts, an infinity takes the largest or the least."""
    dims = split_dims(self, dim)
    if dims is None:
        return NotImplemented
    tensor = self if dtype is None else cast(self, dtype)
    size = torch.abs(reduce_pending(cast(tensor, accumulation_dtype(tensor.dtype))))
    if math.isinf(ord):
        found = (torch.amax if ord > 0 else torch.amin)(size, dims, keepdim)
    elif ord == 0:
        found = torch.sum(torch.ne(size, 0), dims, keepdim, dtype=size.dtype)
    elif ord == 2:
        found = torch.sqrt(torch.sum(size * size, dims, keepdim))
    elif ord == 1:
        found = torch.sum(size, dims, keepdim)
    else:
        found = torch.pow(torch.sum(torch.pow(size, ord), dims, keepdim), 1.0 / ord)
    return cast(found, tensor.dtype.to_real())


@composite(*_NORMS[1:])
def _old_norm(self: DTensor, p: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    if split_dims(self, dim) is None:
        return NotImplemented
    return _aten.linalg_vector_norm(self, 2 if p is None else p, dim, keepdim, dtype=dtype)


@composite(_aten.dist.default)
def _dist(self: DTensor, other: DTensor, p: Any = 2) -> Any:
    return _aten.linalg_vector_norm(torch.sub(self, other), p)
