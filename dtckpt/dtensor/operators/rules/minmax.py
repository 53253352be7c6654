"""Largest and least elements and where they are: where the dim is split, every device names its best one."""

from __future__ import annotations

from typing import Any

import torch

from dtckpt.dtensor.operators.call import Call
from dtckpt.dtensor.operators.composite_helpers import is_split, settled
from dtckpt.dtensor.operators.custom_ops import kernel, operator
from dtckpt.dtensor.operators.registry import composite, rule
from dtckpt.dtensor.operators.rule import Factors, Rule
from dtckpt.dtensor.operators.rules.reductions import named, over_dims, reduced_dims
from dtckpt.dtensor.tensor import DTensor

_aten = torch.ops.aten


@kernel("positions(Tensor self, int? dim, int[] shape) -> Tensor")
def _positions(
    tensor: torch.Tensor, dim: int | None, shape: list[int], offsets: list[tuple[int, ...]] | None = None
) -> torch.Tensor:
    """Return, for every element, its place along a dim of the global shape; in all of the tensor if ``dim`` is None."""
    offset = offsets[0] if offsets else (0,) * tensor.ndim
    found = torch.zeros((), dtype=torch.int64, device=tensor.device)
    step = 1
    for one in reversed(range(tensor.ndim)):
        if dim is None or dim == one:
            places = torch.arange(offset[one], offset[one] + tensor.shape[one], device=tensor.device)
            found = found + (places * step).view(-1, *[1] * (tensor.ndim - one - 1))
        step *= shape[one] if dim is None else 1
    return found.expand(tensor.shape)


@rule(operator("positions"))
def _positions_rule(call: Call) -> Rule:
    """Any dims; values are not read."""
    factors = Factors()
    dims = factors.dims(call.shapes[0])
    return Rule(factors.sizes, (dims,), (dims,), unread=frozenset({0}), local=_positions, is_located=True)


def _found(tensor: Any, dim: int | None, *, is_kept: bool, is_largest: bool) -> tuple[Any, Any] | None:
    """Return the best elements along a dim and the first places of such; None if the dim is whole."""
    gone = reduced_dims(dim, tensor.ndim)
    if gone is None or not tensor.ndim or not is_split(tensor, gone) or not tensor.numel():
        return None
    dims = sorted(gone)
    tensor = settled(tensor)
    best = settled((torch.amax if is_largest else torch.amin)(tensor, dims, keepdim=True))
    is_best = tensor == best
    if tensor.is_floating_point():
        is_best = torch.logical_or(is_best, torch.isnan(tensor))  # which beats all numbers
    places = operator("positions")(tensor, dim if dim is None else dims[0], list(tensor.shape))
    beyond = torch.iinfo(torch.int64).max
    first = torch.amin(torch.masked_fill(places, torch.logical_not(is_best), beyond), dims, keepdim=is_kept)
    kept = [size for one, size in enumerate(tensor.shape) if one not in gone]
    return best if is_kept else best.view(kept), settled(first)


def _register(of_dim: Any, of_all: Any, *, is_largest: bool) -> None:
    @composite(of_dim)
    def best_and_place(self: DTensor, dim: int, keepdim: bool = False) -> Any:
        found = _found(self, dim, is_kept=keepdim, is_largest=is_largest)
        return NotImplemented if found is None else found

    @composite(of_all)
    def place(self: DTensor, dim: int | None = None, keepdim: bool = False) -> Any:
        found = _found(self, dim, is_kept=keepdim, is_largest=is_largest)
        return NotImplemented if found is None else found[1]


_register(_aten.max.dim, _aten.argmax.default, is_largest=True)
_register(_aten.min.dim, _aten.argmin.default, is_largest=False)


@composite(_aten.aminmax.default)
def _both(self: DTensor, *, dim: int | None = None, keepdim: bool = False) -> Any:
    dims = [] if dim is None else [dim]
    if not self.ndim or not is_split(self, reduced_dims(dim, self.ndim) or ()):
        return NotImplemented
    self = settled(self)
    return torch.amin(self, dims, keepdim), torch.amax(self, dims, keepdim)


@rule(
    _aten.argmax.default,
    _aten.argmin.default,
    _aten.median.default,
    _aten.nanmedian.default,
)
def _one(call: Call) -> Rule | None:
    """The dim that goes is whole."""
    return over_dims(call, named(call, "dim"), is_kept=bool(named(call, "keepdim")))


@rule(
    _aten.aminmax.default,
    _aten.kthvalue.default,
    _aten.max.dim,
    _aten.median.dim,
    _aten.min.dim,
    _aten.mode.default,
    _aten.nanmedian.dim,
)
def _two(call: Call) -> Rule | None:
    """The dim that goes is whole."""
    return over_dims(call, call["dim"], is_kept=call["keepdim"], num_results=2)
