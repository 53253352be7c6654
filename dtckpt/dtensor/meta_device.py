"""DTensors on the meta device: they have layout, shape and dtype, and no values, so moving them sends nothing."""

from __future__ import annotations

from typing import Any

import torch

from dtckpt.dtensor.tensor import DTensor
from dtckpt.layout.layout import Layout


def redistribute(tensor: DTensor, layout: Layout, dtype: torch.dtype) -> DTensor:
    """Return the tensor in another layout, on the same mesh or another, and dtype. Differentiable."""
    moved: DTensor = _Redistribute.apply(tensor, layout, dtype)  # type: ignore[no-untyped-call]  # torch leaves it so
    return moved


class _Redistribute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: DTensor, layout: Layout, dtype: torch.dtype) -> DTensor:
        ctx.source, ctx.dtype = Layout(tensor.layout.sharding_specs, tensor.device_mesh), tensor.dtype
        regions = [layout.region(device, tensor.shape) for device in layout.mesh.local_device_ids()]
        components = [torch.empty(region.shape, dtype=dtype, device="meta") for region in regions]
        return DTensor(components, layout, tensor.shape, dtype, device=tensor.device)

    @staticmethod
    def backward(ctx: Any, gradient: DTensor) -> tuple[Any, ...]:
        return redistribute(gradient, ctx.source, ctx.dtype), None, None
