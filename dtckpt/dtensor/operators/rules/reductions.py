"""Reductions over dims: ``sum``, ``mean``, ``prod``, ``any``, ``amax``, ``median``, ``equal``.

Where an axis splits a dim that is reduced, each device reduces its component, and the result is pending until a
reduction over the devices finishes it. Of medians and modes that is impossible: there the dim must be whole.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from dtckpt.dtensor.operators.call import Call
from dtckpt.dtensor.operators.composite_helpers import accumulation_dtype, are_replicated
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
