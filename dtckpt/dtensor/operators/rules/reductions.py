"""Reductions over dims: ``sum``, ``any``, ``amax``, ``median``, ``equal``; variances and norms: ``var``, ``norm``.

Where an axis splits a dim that is reduced, each device reduces its component, and the result is pending until a
reduction over the devices finishes it. Medians and modes cannot be pending: the dim must be whole. Variances and norms
of split dims add sums over the devices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dtckpt.dtensor.operators.call import Call
from dtckpt.dtensor.operators.composite_helpers import (
    accumulation_dtype,
    are_replicated,
    cast,
    is_split,
    reduce_pending,
)
from dtckpt.dtensor.operators.registry import composite, rule
from dtckpt.dtensor.operators.rule import LINEAR, MONOTONE, Rule
from dtckpt.dtensor.operators.rule_builders import reduce_dims, reduced_dims
from dtckpt.dtensor.tensor import DTensor

_aten = torch.ops.aten


@rule(_aten.sum.default, _aten.sum.dim_IntList)
def _sum(call: Call) -> Rule | None:
    """All dims may be split; the result waits for a sum."""
    return reduce_dims(call, call.get("dim"), keepdim=bool(call.get("keepdim")), reduction="sum", passes=LINEAR)


@rule(_aten.nansum.default, _aten.count_nonzero.default, _aten.count_nonzero.dim_IntList)
def _sum_of_some(call: Call) -> Rule | None:
    """All dims may be split; the result waits for a sum."""
    return reduce_dims(call, call.get("dim"), keepdim=bool(call.get("keepdim")), reduction="sum")


@rule(_aten.mean.default, _aten.mean.dim)
def _mean(call: Call) -> Rule | None:
    """All dims may be split, unevenly too: each device divides its sum by the global count."""
    (shape,), dim = call.shapes, call.get("dim")
    reduced = reduced_dims(dim, len(shape))
    dtype = call["dtype"] or call.tensors[0].dtype
    if reduced is None or not (dtype.is_floating_point or dtype.is_complex):
        return None
    count = math.prod(shape[one] for one in reduced) if shape else 1
    func, keepdim = call.func, bool(call.get("keepdim"))

    def local(component: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if math.prod(component.shape[one] for one in reduced if shape) == count:
            return func(component, *args, **kwargs)  # type: ignore[no-any-return]
        total = component.sum(sorted(reduced), keepdim, dtype=accumulation_dtype(dtype))
        return (total / count).to(dtype)

    return reduce_dims(call, dim, keepdim=keepdim, reduction="sum", passes=LINEAR, local=local)


@rule(_aten.prod.default, _aten.prod.dim_int)
def _prod(call: Call) -> Rule | None:
    """All dims may be split; the result waits for a product."""
    passes = {"product": ((0,),)}
    return reduce_dims(call, call.get("dim"), keepdim=bool(call.get("keepdim")), reduction="product", passes=passes)


_TRUTH_REDUCTIONS = {
    _aten.any.default: "max",
    _aten.any.dim: "max",
    _aten.any.dims: "max",
    _aten.all.default: "min",
    _aten.all.dim: "min",
    _aten.all.dims: "min",
}


@rule(*_TRUTH_REDUCTIONS)
def _truth(call: Call) -> Rule | None:
    """All dims may be split; the result waits for a maximum (``any``) or a minimum (``all``)."""
    dim = call.get("dim")
    if dim == []:
        return None
    return reduce_dims(call, dim, keepdim=bool(call.get("keepdim")), reduction=_TRUTH_REDUCTIONS[call.func])


_EXTREME_REDUCTIONS = {
    _aten.amax.default: "max",
    _aten.amin.default: "min",
    _aten.max.default: "max",
    _aten.min.default: "min",
}


@rule(*_EXTREME_REDUCTIONS)
def _extreme(call: Call) -> Rule | None:
    """All dims may be split; an empty component gives the number that loses against every other."""
    (shape,), dim, reduction = call.shapes, call.get("dim"), _EXTREME_REDUCTIONS[call.func]
    reduced = reduced_dims(dim, len(shape))
    if reduced is None or not all(shape[one] for one in reduced if shape):
        return None
    func, keepdim = call.func, bool(call.get("keepdim"))
    neutral = _neutral(call.tensors[0].dtype, reduction)

    def local(component: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if all(component.shape[one] for one in reduced if shape):
            return func(component, *args, **kwargs)  # type: ignore[no-any-return]
        sizes = [
            1 if one in reduced else size for one, size in enumerate(component.shape) if keepdim or one not in reduced
        ]
        return component.new_full(sizes, neutral)

    passes = {reduction: MONOTONE[reduction]}
    return reduce_dims(call, dim, keepdim=keepdim, reduction=reduction, passes=passes, local=local)


def _neutral(dtype: torch.dtype, reduction: str) -> float | int | bool:
    """Return the number that never changes a maximum (``max``) or a minimum (``min``)."""
    if dtype == torch.bool:
        return reduction == "min"
    if dtype.is_floating_point or dtype.is_complex:
        return -math.inf if reduction == "max" else math.inf
    info = torch.iinfo(dtype)
    return info.min if reduction == "max" else info.max


@rule(_aten.median.default, _aten.nanmedian.default)
def _median(call: Call) -> Rule | None:
    """The dims that are reduced must be whole."""
    return reduce_dims(call, None, keepdim=False)


@rule(_aten.kthvalue.default, _aten.median.dim, _aten.mode.default, _aten.nanmedian.dim)
def _median_and_index(call: Call) -> Rule | None:
    """The dim that is reduced must be whole; values and indices."""
    func = call.func

    def of_elements(component: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # PyTorch's kernels for medians return uninitialized memory if dims were expanded.
        return func(component.contiguous() if 0 in component.stride() else component, *args, **kwargs)

    is_median = func in (_aten.median.dim, _aten.nanmedian.dim)
    local = of_elements if is_median else None
    return reduce_dims(call, call["dim"], keepdim=call["keepdim"], num_results=2, local=local)


# --- comparisons with one answer -------------------------------------------------------------------------------------


@composite(_aten.equal.default)
def _equal(self: DTensor, other: DTensor) -> Any:
    """Whether all components are equal; every client gets the answer."""
    if self.shape != other.shape or self.dtype != other.dtype or are_replicated(self, other):
        return NotImplemented
    return bool(_aten._local_scalar_dense(torch.eq(self, other).all()))


@composite(_aten.allclose.default)
def _allclose(self: DTensor, other: DTensor, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False) -> Any:
    """Whether all components are close; every client gets the answer."""
    if self.dtype != other.dtype or are_replicated(self, other):
        return NotImplemented
    return bool(_aten._local_scalar_dense(torch.isclose(self, other, rtol, atol, equal_nan).all()))


@composite(_aten.is_same_size.default)
def _is_same_size(self: DTensor, other: DTensor) -> Any:
    """The global shapes are compared; nothing moves."""
    return self.shape == other.shape


@rule(_aten.equal.default)
def _equal_of_whole(call: Call) -> None:
    """No rule: it returns no tensor, though PyTorch tags it as pointwise."""
    del call


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
