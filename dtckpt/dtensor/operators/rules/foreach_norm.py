"""Reductions of lists of tensors: ``_foreach_norm`` of gradient clipping, ``_foreach_max``, the finite check of AMP."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch

from dtckpt.comm import torch_private
from dtckpt.dtensor.operators.composite_helpers import reduce_pending, reduce_pending_all
from dtckpt.dtensor.operators.operands import replicated_layout, to_layouts, to_replicated, unshare, write_into
from dtckpt.dtensor.operators.plans import finish_write
from dtckpt.dtensor.operators.registry import BY_INDEX, composite
from dtckpt.dtensor.tensor import DTensor
from dtckpt.layout.layout import UNSHARDED, Layout

_aten = torch.ops.aten

BY_INDEX.add(_aten._amp_foreach_non_finite_check_and_unscale_.default)


@composite(_aten._foreach_max.default)
def _foreach_max(tensors: Sequence[Any]) -> list[Any]:
    """One maximum per tensor."""
    return [tensor.max() for tensor in tensors]


@composite(_aten._foreach_norm.Scalar)
def _foreach_norm(tensors: Sequence[Any], ord: Any = 2, dtype: torch.dtype | None = None) -> Any:
    """Devices compute norms of components; one exchange for all tensors split by the same axes completes them."""
    order = float(ord)
    if order == 0 or order < 0:
        return [torch.linalg.vector_norm(tensor, order, dtype=dtype) for tensor in tensors]
    reduced = reduce_pending_all(tensors)
    mesh = reduced[0].device_mesh
    if any(not tensor.is_floating_point() for tensor in reduced):
        return [torch.linalg.vector_norm(tensor, order, dtype=dtype) for tensor in tensors]
    by_axes: defaultdict[tuple[str, ...], list[int]] = defaultdict(list)
    for number, tensor in enumerate(reduced):
        by_axes[tuple(axis for axes in tensor._layout.split_axes for axis in axes)].append(number)
    result: list[Any] = [None] * len(reduced)
    for axes, numbers in by_axes.items():
        terms = []
        for parts in zip(*(reduced[number].components for number in numbers), strict=True):
            norms = _norms(parts, order, dtype)
            # As float64, powers do not overflow where the norm itself fits a float32.
            terms.append(norms if math.isinf(order) else norms**order)
        layout = Layout([UNSHARDED], mesh, dict.fromkeys(axes, "max" if math.isinf(order) else "sum"))
        pending = DTensor(terms, layout, (len(numbers),), torch.float64)
        (total,) = to_layouts([pending], [replicated_layout(mesh, 1)])
        scalars = [one if math.isinf(order) else one ** (1 / order) for one in total.components]
        for position, number in enumerate(numbers):
            result_dtype = dtype or reduced[number].dtype
            components = [one[position].to(result_dtype) for one in scalars]
            device = reduced[number].device  # of a client outside the mesh, whose norms have no components
            result[number] = DTensor(components, replicated_layout(mesh, 0), (), result_dtype, device=device)
    return result


def _norms(components: Sequence[torch.Tensor], order: float, dtype: torch.dtype | None) -> torch.Tensor:
    """Return the norms of components as a vector of float64; that of an empty component is zero."""
    nonempty = [component for component in components if component.numel()]
    norms = iter(torch_private.foreach_norm(nonempty, order, dtype) if nonempty else ())
    zero = torch.zeros((), dtype=torch.float64, device=components[0].device)
    return torch.stack([next(norms).to(torch.float64) if component.numel() else zero for component in components])


@composite(_aten._amp_foreach_non_finite_check_and_unscale_.default)
def _unscale(gradients: Sequence[Any], found_inf: Any, inv_scale: Any) -> None:
    """An infinity or NaN that one device finds in its components reaches all clients: the flags wait for a maximum."""
    for tensor in gradients:
        unshare(tensor)
    reduced = reduce_pending_all(gradients)
    mesh = found_inf.device_mesh
    (scale,) = to_replicated([inv_scale])
    flags = []
    for device, local_scale in enumerate(scale.components):
        flags.append(torch.zeros(found_inf.shape, dtype=found_inf.dtype, device=local_scale.device))
        components = [tensor.components[device] for tensor in reduced]
        _aten._amp_foreach_non_finite_check_and_unscale_.default(components, flags[-1], local_scale)
    pending = Layout([UNSHARDED] * found_inf.ndim, mesh, dict.fromkeys(mesh.dim_names, "max"))
    flag = DTensor(flags, pending, found_inf.shape, found_inf.dtype, device=found_inf.device)
    found_inf.copy_(torch.maximum(found_inf, reduce_pending(flag)))
    for tensor, unscaled in zip(gradients, reduced, strict=True):
        if unscaled is not tensor:
            write_into(unscaled, tensor)
        finish_write(tensor)
