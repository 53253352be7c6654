"""Reductions over dims that are finished by a reduction over devices: the dims that go may be split."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dtckpt.dtensor.operators.call import Call
from dtckpt.dtensor.operators.composite_helpers import accumulated, is_whole
from dtckpt.dtensor.operators.registry import composite, rule
from dtckpt.dtensor.operators.rule import LINEAR, MONOTONE, Factors, Passes, Rule
from dtckpt.dtensor.tensor import DTensor

_aten = torch.ops.aten


def reduced_dims(dim: int | Sequence[int] | None, ndim: int) -> frozenset[int] | None:
    """Return the dims that an argument names, all for None and none; None if they are no dims of the tensor."""
    named = [dim] if isinstance(dim, int) else list(dim or range(ndim))
    if not all(-max(ndim, 1) <= one < max(ndim, 1) for one in named):
        return None
    return frozenset(one % max(ndim, 1) for one in named)


def over_dims(
    call: Call,
    dim: int | Sequence[int] | None,
    *,
    is_kept: bool,
    reduction: str | None = None,
    passes: Passes | None = None,
    num_results: int = 1,
    local: Callable[..., Any] | None = None,
) -> Rule | None:
    """Return the rule of a reduction of the first operand.

    Args:
        call: The call.
        dim: The dims that go; None for all.
        is_kept: Whether they stay as dims of size 1.
        reduction: What results wait for when such a dim is sharded; None if it must be whole.
        passes: See `Rule`.
        num_results: Number of results, all of one shape.
        local: See `Rule`.
    """
    (shape,) = call.shapes
    gone = reduced_dims(dim, len(shape))
    if gone is None:
        return None
    factors = Factors()
    dims = factors.dims(shape)
    result = tuple(() if number in gone else one for number, one in enumerate(dims) if is_kept or number not in gone)
    numbers = frozenset(dims[one][0] for one in gone if one < len(dims))
    return Rule(
        factors.sizes,
        (dims,),
        (result,) * num_results,
        contracted={} if reduction is None else dict.fromkeys(numbers, reduction),
        passes=passes or {},
        local=local,
    )


def named(call: Call, name: str) -> Any:
    """Return an argument, None if the overload has no such one."""
    return call[name] if name in call else None  # noqa: SIM401  (a call is no mapping)


@rule(_aten.sum.default, _aten.sum.dim_IntList)
def _sum(call: Call) -> Rule | None:
    """Any dims; the result waits for a sum."""
    return over_dims(call, named(call, "dim"), is_kept=bool(named(call, "keepdim")), reduction="sum", passes=LINEAR)


@rule(_aten.nansum.default, _aten.count_nonzero.default, _aten.count_nonzero.dim_IntList)
def _sum_of_some(call: Call) -> Rule | None:
    """Any dims; the result waits for a sum."""
    return over_dims(call, named(call, "dim"), is_kept=bool(named(call, "keepdim")), reduction="sum")


@rule(_aten.mean.default, _aten.mean.dim)
def _mean(call: Call) -> Rule | None:
    """Any dims; devices divide their sums by the global count, so that pieces need not be of one size."""
    (shape,), dim = call.shapes, named(call, "dim")
    gone = reduced_dims(dim, len(shape))
    dtype = call["dtype"] or call.tensors[0].dtype
    if gone is None or not (dtype.is_floating_point or dtype.is_complex):
        return None
    count = math.prod(shape[one] for one in gone) if shape else 1
    func, is_kept = call.func, bool(named(call, "keepdim"))

    def local(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if math.prod(tensor.shape[one] for one in gone if shape) == count:
            return func(tensor, *args, **kwargs)  # type: ignore[no-any-return]
        total = tensor.sum(sorted(gone), is_kept, dtype=accumulated(dtype))
        return (total / count).to(dtype)

    return over_dims(call, dim, is_kept=is_kept, reduction="sum", passes=LINEAR, local=local)


@rule(_aten.prod.default, _aten.prod.dim_int)
def _prod(call: Call) -> Rule | None:
    """Any dims; the result waits for a product."""
    passes = {"product": ((0,),)}
    return over_dims(call, named(call, "dim"), is_kept=bool(named(call, "keepdim")), reduction="product", passes=passes)


_TRUTHS = {
    _aten.any.default: "max",
    _aten.any.dim: "max",
    _aten.any.dims: "max",
    _aten.all.default: "min",
    _aten.all.dim: "min",
    _aten.all.dims: "min",
}


@rule(*_TRUTHS)
def _truth(call: Call) -> Rule | None:
    """Any dims; the result waits for the largest truth (``any``) or the least."""
    dim = named(call, "dim")
    return (
        None if dim == [] else over_dims(call, dim, is_kept=bool(named(call, "keepdim")), reduction=_TRUTHS[call.func])
    )


_EXTREMES = {
    _aten.amax.default: "max",
    _aten.amin.default: "min",
    _aten.max.default: "max",
    _aten.min.default: "min",
}


@rule(*_EXTREMES)
def _extreme(call: Call) -> Rule | None:
    """Any dims; the result waits for the largest or the least. Of an empty piece it is what all others beat."""
    (shape,), dim, reduction = call.shapes, named(call, "dim"), _EXTREMES[call.func]
    gone = reduced_dims(dim, len(shape))
    if gone is None or not all(shape[one] for one in gone if shape):
        return None
    func, is_kept = call.func, bool(named(call, "keepdim"))
    worst = _worst(call.tensors[0].dtype, reduction)

    def local(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if all(tensor.shape[one] for one in gone if shape):
            return func(tensor, *args, **kwargs)  # type: ignore[no-any-return]
        sizes = [1 if one in gone else size for one, size in enumerate(tensor.shape) if is_kept or one not in gone]
        return tensor.new_full(sizes, worst)

    passes = {reduction: MONOTONE[reduction]}
    return over_dims(call, dim, is_kept=is_kept, reduction=reduction, passes=passes, local=local)


def _worst(dtype: torch.dtype, reduction: str) -> float | int | bool:
    """Return the number that a largest (``max``) or a least one (``min``) does not change by."""
    if dtype == torch.bool:
        return reduction == "min"
    if dtype.is_floating_point or dtype.is_complex:
        return -math.inf if reduction == "max" else math.inf
    info = torch.iinfo(dtype)
    return info.min if reduction == "max" else info.max


@composite(_aten.equal.default)
def _equal(self: DTensor, other: DTensor) -> Any:
    """Whether all pieces are equal; every client learns it."""
    if self.shape != other.shape or self.dtype != other.dtype or is_whole(self, other):
        return NotImplemented
    return bool(_aten._local_scalar_dense(torch.eq(self, other).all()))


@composite(_aten.allclose.default)
def _allclose(self: DTensor, other: DTensor, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False) -> Any:
    """Whether all pieces are close; every client learns it."""
    if self.dtype != other.dtype or is_whole(self, other):
        return NotImplemented
    return bool(_aten._local_scalar_dense(torch.isclose(self, other, rtol, atol, equal_nan).all()))


@rule(_aten.equal.default)
def _number(call: Call) -> None:
    """It gives no tensor, though PyTorch counts it among the operators on elements."""
    del call
