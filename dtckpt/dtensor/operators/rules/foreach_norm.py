"""What is reduced over lists of tensors: norms as gradient clipping takes them, and whether gradients are finite."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch

from dtckpt.dtensor.operators.composite_helpers import reduce_pending, reduce_pending_all
from dtckpt.dtensor.operators.operands import replicated_layout, to_layouts, to_replicated, unshare, write_into
from dtckpt.dtensor.operators.plans import finish_write
from dtckpt.dtensor.operators.registry import composite
from dtckpt.dtensor.tensor import DTensor
from dtckpt.layout.layout import UNSHARDED, Layout

_aten = torch.ops.aten


@composite(_aten._foreach_max.default)
def _foreach_max(tensors: Sequence[Any]) -> list[Any]:
    return [tensor.max() for tensor in tensors]


@composite(_aten._foreach_norm.Scalar)
def _foreach_norm(tensors: Sequence[Any], ord: Any = 2, dtype: torch.dtype | None = None) -> Any:  # noqa: A002
    """Norms of the pieces become those of the tensors by one exchange for all that are split by the same axes."""
    order = float(ord)
    if order == 0 or order < 0:
        return [torch.linalg.vector_norm(tensor, order, dtype=dtype) for tensor in tensors]
    whole = reduce_pending_all(tensors)
    mesh = whole[0].device_mesh
    if any(not tensor.is_floating_point() for tensor in whole) or not whole[0].components:
        return [torch.linalg.vector_norm(tensor, order, dtype=dtype) for tensor in tensors]
    by_axes: defaultdict[tuple[str, ...], list[int]] = defaultdict(list)
    for number, tensor in enumerate(whole):
        by_axes[tuple(axis for axes in tensor._layout.split_axes for axis in axes)].append(number)
    result: list[Any] = [None] * len(whole)
    for axes, numbers in by_axes.items():
        terms = []
        for device in range(len(whole[0].components)):
            norms = _norms([whole[number].components[device] for number in numbers], order, dtype)
            # A double's powers do not overflow where a float's norm does not.
            terms.append(norms if math.isinf(order) else norms**order)
        layout = Layout([UNSHARDED], mesh, dict.fromkeys(axes, "max" if math.isinf(order) else "sum"))
        made = DTensor(terms, layout, (len(numbers),), torch.float64)
        (total,) = to_layouts([made], [replicated_layout(mesh, 1)])
        scalars = [one if math.isinf(order) else one ** (1 / order) for one in total.components]
        for place, number in enumerate(numbers):
            kind = dtype or whole[number].dtype
            parts = [one[place].to(kind) for one in scalars]
            result[number] = DTensor(parts, replicated_layout(mesh, 0), (), kind)
    return result


def _norms(parts: Sequence[torch.Tensor], order: float, dtype: torch.dtype | None) -> torch.Tensor:
    """Return norms as a vector of doubles; those of no elements are zero."""
    filled = [part for part in parts if part.numel()]
    found = iter(torch._foreach_norm(filled, order, dtype) if filled else ())
    zero = torch.zeros((), dtype=torch.float64, device=parts[0].device)
    return torch.stack([next(found).to(torch.float64) if part.numel() else zero for part in parts])


@composite(_aten._amp_foreach_non_finite_check_and_unscale_.default)
def _unscale(gradients: Sequence[Any], found_inf: Any, inv_scale: Any) -> None:
    """What one device finds in its pieces, all get to know."""
    for tensor in gradients:
        unshare(tensor)
    whole = reduce_pending_all(gradients)
    mesh = found_inf.device_mesh
    (scale,) = to_replicated([inv_scale])
    found = []
    for device, own in enumerate(scale.components):
        found.append(torch.zeros(found_inf.shape, dtype=found_inf.dtype, device=own.device))
        parts = [tensor.components[device] for tensor in whole]
        _aten._amp_foreach_non_finite_check_and_unscale_.default(parts, found[-1], own)
    waiting = Layout([UNSHARDED] * found_inf.ndim, mesh, dict.fromkeys(mesh.dim_names, "max"))
    made = DTensor(found, waiting, found_inf.shape, found_inf.dtype, device=found_inf.device)
    found_inf.copy_(torch.maximum(found_inf, reduce_pending(made)))
    for tensor, one in zip(gradients, whole, strict=True):
        if one is not tensor:
            write_into(one, tensor)
        finish_write(tensor)
