"""Redistribute DTensors on the meta device: they have layout, shape and dtype but no values, so nothing is sent."""

from __future__ import annotations

from typing import Any

import torch

from dtckpt.dtensor.derived_layouts import gradient_layout
from dtckpt.dtensor.tensor import DTensor
from dtckpt.layout.layout import Layout


def redistribute_meta(tensor: DTensor, layout: Layout, dtype: torch.dtype) -> DTensor:
    """Return a meta tensor in another layout, on the same mesh or another, and in another dtype. Differentiable."""
    result: DTensor = _RedistributeMeta.apply(  # type: ignore[no-untyped-call]  # torch leaves it untyped
        tensor, layout, dtype
    )
    return result


class _RedistributeMeta(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: DTensor, layout: Layout, dtype: torch.dtype) -> DTensor:
        ctx.source, ctx.dtype = gradient_layout(tensor.layout), tensor.dtype
        regions = [layout.region(device, tensor.shape) for device in layout.mesh.local_device_ids()]
        components = [torch.empty(region.shape, dtype=dtype, device="meta") for region in regions]
        return DTensor(components, layout, tensor.shape, dtype, device=tensor.device)

    @staticmethod
    def backward(ctx: Any, gradient: DTensor) -> tuple[Any, ...]:
        return redistribute_meta(gradient, ctx.source, ctx.dtype), None, None
