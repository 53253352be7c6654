"""Extremes with indices, sorting, scans, search: ``max``, ``argmin``, ``sort``, ``topk``, ``cumsum``, ``bucketize``.

Where an axis splits the dim of an extreme, every device offers its best element and that element's global index. For
all else that dim must be whole, and the others may be split. Extremes without indices, ``amax`` and ``max`` of all, are
in `reductions`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from dtckpt.dtensor.operators.call import Call
from dtckpt.dtensor.operators.composite_helpers import is_split, reduce_pending
from dtckpt.dtensor.operators.registry import composite, custom_op, kernel, rule
from dtckpt.dtensor.operators.rule import LINEAR, Rule
from dtckpt.dtensor.operators.rule_builders import (
    DimLabels,
    along_dim,
    from_labels,
    reduce_dims,
    reduced_dims,
    same_dims,
    unlabel_dims,
)
from dtckpt.dtensor.tensor import DTensor

_aten = torch.ops.aten


@kernel("positions(Tensor self, int? dim, int[] shape) -> Tensor")
def _positions(
    component: torch.Tensor, dim: int | None, shape: list[int], offsets: list[tuple[int, ...]] | None = None
) -> torch.Tensor:
    """Return, for every element, its global index along a dim; in the flattened tensor if ``dim`` is None.

    Args:
        component: A device's component.
        dim: A dim, or None.
        shape: Global shape.
        offsets: Where the component begins.
    """
    offset = offsets[0] if offsets else (0,) * component.ndim
    positions = torch.zeros((), dtype=torch.int64, device=component.device)
    step = 1
    for one in reversed(range(component.ndim)):
        if dim is None or dim == one:
            indices = torch.arange(offset[one], offset[one] + component.shape[one], device=component.device)
            positions = positions + (indices * step).view(-1, *[1] * (component.ndim - one - 1))
        step *= shape[one] if dim is None else 1
    return positions.expand(component.shape)


@rule(custom_op("positions"))
def _positions_rule(call: Call) -> Rule:
    """All dims may be split; values are not read."""
    shape_only = frozenset({0})
    return replace(same_dims(call.shapes[0]), shape_only_operands=shape_only, local=_positions, takes_offsets=True)


def _best(tensor: Any, dim: int | None, *, keepdim: bool, is_largest: bool) -> tuple[Any, Any] | None:
    """Return the best elements along a dim and the first index of each; None if no axis splits the dim.

    A maximum over the devices finds the best value. A minimum over the devices finds the first of its indices: each
    device offers the least global index at which its component has that value, or the largest integer.
    """
    reduced = reduced_dims(dim, tensor.ndim)
    if reduced is None or not tensor.ndim or not is_split(tensor, reduced) or not tensor.numel():
        return None
    dims = sorted(reduced)
    tensor = reduce_pending(tensor)
    best = reduce_pending((torch.amax if is_largest else torch.amin)(tensor, dims, keepdim=True))
    is_best = tensor == best
    if tensor.is_floating_point():
        is_best = torch.logical_or(is_best, torch.isnan(tensor))  # NaN beats all numbers
    positions = custom_op("positions")(tensor, dim if dim is None else dims[0], list(tensor.shape))
    beyond = torch.iinfo(torch.int64).max
    first = torch.amin(torch.masked_fill(positions, torch.logical_not(is_best), beyond), dims, keepdim=keepdim)
    shape = [size for one, size in enumerate(tensor.shape) if one not in reduced]
    return best if keepdim else best.view(shape), reduce_pending(first)


def _register(of_dim: Any, of_all: Any, *, is_largest: bool) -> None:
    @composite(of_dim)
    def value_and_index(self: DTensor, dim: int, keepdim: bool = False) -> Any:
        """The dim is split: two reductions over the devices find values and indices; nothing is gathered."""
        best = _best(self, dim, keepdim=keepdim, is_largest=is_largest)
        return NotImplemented if best is None else best

    @composite(of_all)
    def index(self: DTensor, dim: int | None = None, keepdim: bool = False) -> Any:
        """The dim is split: two reductions over the devices find values and indices; nothing is gathered."""
        best = _best(self, dim, keepdim=keepdim, is_largest=is_largest)
        return NotImplemented if best is None else best[1]


_register(_aten.max.dim, _aten.argmax.default, is_largest=True)
_register(_aten.min.dim, _aten.argmin.default, is_largest=False)


@composite(_aten.aminmax.default)
def _aminmax(self: DTensor, *, dim: int | None = None, keepdim: bool = False) -> Any:
    """The dim is split: a minimum and a maximum over the devices."""
    dims = [] if dim is None else [dim]
    if not self.ndim or not is_split(self, reduced_dims(dim, self.ndim) or ()):
        return NotImplemented
    self = reduce_pending(self)
    return torch.amin(self, dims, keepdim), torch.amax(self, dims, keepdim)


@rule(_aten.argmax.default, _aten.argmin.default)
def _index(call: Call) -> Rule | None:
    """The dim that is reduced must be whole."""
    return reduce_dims(call, call.get("dim"), keepdim=bool(call.get("keepdim")))


@rule(_aten.aminmax.default, _aten.max.dim, _aten.min.dim)
def _value_and_index(call: Call) -> Rule | None:
    """The dim that is reduced must be whole; ``aminmax`` gives two values."""
    return reduce_dims(call, call["dim"], keepdim=call["keepdim"], num_results=2)


# --- scans, sorting, search ------------------------------------------------------------------------------------------


@rule(_aten.cumsum.default)
def _cumsum(call: Call) -> Rule | None:
    """The dim must be whole; linear."""
    return along_dim(call, passes=LINEAR)


@rule(_aten.cumprod.default, _aten.logcumsumexp.default)
def _scan(call: Call) -> Rule | None:
    """The dim must be whole."""
    return along_dim(call)


@rule(_aten.cummax.default, _aten.cummin.default, _aten.sort.default, _aten.sort.stable)
def _sort(call: Call) -> Rule | None:
    """The dim must be whole; values and indices."""
    return along_dim(call, num_results=2)


@rule(_aten.topk.default)
def _topk(call: Call) -> Rule | None:
    """The dim must be whole; values and indices, ``k`` of them."""
    return along_dim(call, num_results=2, size=call["k"])


@rule(_aten.bucketize.Tensor)
def _bucketize(call: Call) -> Rule | None:
    """``(a), boundaries (n) -> (a)``; the boundaries must be whole."""
    dims = range(len(call.shapes[0]))
    return from_labels(call, DimLabels([dims, [None]], [dims]))


@rule(_aten.searchsorted.Tensor)
def _searchsorted(call: Call) -> Rule | None:
    """``(a, n), (a, v) -> (a, v)``, or ``(n), (v) -> (v)``; the sorted dim must be whole."""
    dims = range(call["self"].ndim)
    sequence = [None] if call["sorted_sequence"].ndim == 1 else unlabel_dims(len(dims) - 1, len(dims))
    operands = call.operands(sorted_sequence=sequence, self=dims, sorter=sequence)
    return from_labels(call, DimLabels(operands, [dims]))
