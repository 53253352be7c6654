"""What takes DTensors apart, puts them together and moves them, all differentiable.

Gradients follow the values: the gradient of a sharded tensor is sharded alike, that of a replicated one replicated.
That of a Partial one is Replicate: each term adds to the tensor, so each has the tensor's whole gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from dtckpt.dtensor.packing import pack
from dtckpt.dtensor.redistribution import redistribute as redistribute_components
from dtckpt.dtensor.redistribution import resolve_match
from dtckpt.dtensor.tensor import DTensor
from dtckpt.errors import ComponentError, LayoutError, LayoutTypeError
from dtckpt.layout import Layout
from dtckpt.mesh import Mesh
from dtckpt.placement import Placement


def gradient_layout(layout: Layout) -> Layout:
    """Return the layout of the gradient of a tensor in ``layout``."""
    return Layout(layout.sharding_specs, layout.mesh) if layout.partial else layout


def _apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    return function.apply(*args)  # type: ignore[no-untyped-call]  # torch leaves it untyped


class _Redistribute(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: DTensor, layout: Layout, forward_dtype: torch.dtype | None, backward_dtype: torch.dtype | None
    ) -> DTensor:
        ctx.source, ctx.dtype, ctx.backward_dtype = tensor.layout, tensor.dtype, backward_dtype
        dtype = forward_dtype or tensor.dtype
        components = dict(zip(tensor.device_mesh.local_device_ids(), tensor.components, strict=True))
        if dtype != tensor.dtype:
            components = {device: component.to(dtype) for device, component in components.items()}
        moved = redistribute_components(components, tensor.layout, layout, tensor.shape, dtype)
        ordered = [moved[device].view_as(moved[device]) for device in layout.mesh.local_device_ids()]
        return DTensor(ordered, layout, tensor.shape, dtype)

    @staticmethod
    def backward(ctx: Any, gradient: DTensor) -> tuple[Any, ...]:
        dtype = ctx.backward_dtype or ctx.dtype
        back = _apply(_Redistribute, gradient, gradient_layout(ctx.source), dtype, None)
        return back if back.dtype == ctx.dtype else back.to(ctx.dtype), None, None, None


class _FromLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, layout: Layout, shape: tuple[int, ...], gradient: Layout) -> DTensor:
        ctx.gradient, ctx.shape = gradient, local.shape
        components = [] if layout.mesh.is_remote() else [local.view_as(local)]
        return DTensor(components, layout, shape, local.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: DTensor) -> tuple[Any, ...]:
        moved = redistribute(gradient, ctx.gradient)
        local = to_local(moved, moved.layout) if moved.components else torch.zeros(ctx.shape, dtype=gradient.dtype)
        return local, None, None, None


class _ToLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: DTensor, gradient: Layout) -> torch.Tensor:
        ctx.gradient, ctx.shape = gradient, tuple(tensor.shape)
        (component,) = tensor.components
        return component.view_as(component)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        return _apply(_FromLocal, gradient.contiguous(), ctx.gradient, ctx.shape, ctx.gradient), None


def redistribute(
    tensor: DTensor,
    layout: Layout,
    *,
    forward_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
) -> DTensor:
    """Return the tensor in another layout, on the same mesh or on another. Differentiable.

    Collective: Over the clients of both meshes, unless the layouts are equal or every client holds the whole tensor.

    Args:
        tensor: The tensor.
        layout: Its new layout; a MATCH spec keeps the present one.
        forward_dtype: Convert to this dtype before moving.
        backward_dtype: Convert the gradient to this dtype before moving it back; it returns to the tensor's dtype.

    Raises:
        LayoutTypeError: ``tensor`` is no DTensor, or ``layout`` no Layout.
        LayoutError: The ranks differ.
    """
    if not isinstance(tensor, DTensor):
        raise LayoutTypeError(f"redistribute needs a DTensor; got {type(tensor).__name__}")
    if not isinstance(layout, Layout):
        raise LayoutTypeError(f"redistribute needs a Layout; got {type(layout).__name__}")
    layout = resolve_match(layout, tensor.layout)
    if layout == tensor.layout and forward_dtype in (None, tensor.dtype) and backward_dtype in (None, tensor.dtype):
        return tensor
    result: DTensor = _apply(_Redistribute, tensor, layout, forward_dtype, backward_dtype)
    return result


def from_placements(mesh: Mesh, placements: Sequence[Placement] | None, ndim: int) -> Layout:
    """Return a layout from placements; None means replicated everywhere."""
    if placements is not None and not isinstance(placements, Sequence):
        raise LayoutTypeError(f"placements: got {placements!r}, expected a sequence of one per axis")
    return Layout.replicated(mesh, ndim) if placements is None else Layout.from_placements(mesh, placements, ndim)


def to_local(tensor: DTensor, gradient: Layout) -> torch.Tensor:
    """Return this client's only component; ``gradient`` is the layout that its gradient is in. Differentiable.

    A client outside the mesh gets a tensor of shape (0,).

    Raises:
        ComponentError: This client has several devices in the mesh.
        LayoutError: The gradient's layout is on another mesh.
    """
    if len(tensor.components) > 1:
        raise ComponentError(
            f"to_local needs one local device; got {len(tensor.components)}; unpack returns every component"
        )
    if gradient.mesh != tensor.device_mesh:
        raise LayoutError(f"gradient placements are on mesh {gradient.mesh!r}, expected {tensor.device_mesh!r}")
    if not tensor.components:
        return torch.empty(0, dtype=tensor.dtype)
    if not (torch.is_grad_enabled() and tensor.requires_grad):
        return tensor.components[0]
    local: torch.Tensor = _apply(_ToLocal, tensor, gradient)
    return local


def from_local(
    local: torch.Tensor,
    layout: Layout,
    *,
    shape: Sequence[int] | None = None,
    gradient: Layout | None = None,
    run_check: bool = False,
) -> DTensor:
    """Return the DTensor of which ``local`` is this client's component. Differentiable. See `DTensor.from_local`."""
    components = [] if layout.mesh.is_remote() else [local.detach()]
    packed = pack(components, layout, shape, run_check=run_check)
    if not components:
        packed = DTensor([], layout, packed.shape, local.dtype)
    if not (torch.is_grad_enabled() and local.requires_grad):
        return packed
    tensor: DTensor = _apply(_FromLocal, local, layout, tuple(packed.shape), gradient or gradient_layout(layout))
    return tensor


def full_tensor(tensor: DTensor, gradient: Layout | None = None) -> torch.Tensor:
    """Return the whole tensor as a plain one, with pending reductions done. Collective: as `redistribute`."""
    hosts = one_device_per_client(tensor.device_mesh)
    whole = redistribute(tensor, Layout.replicated(hosts, tensor.ndim))
    return to_local(whole, whole.layout if gradient is None else gradient)


def one_device_per_client(mesh: Mesh) -> Mesh:
    """Return the mesh of every client's first device, on one axis."""
    names = mesh.portable().global_devices()
    first = mesh.min_global_device_id()
    chosen = [names[mesh.devices_of(client)[0] - first] for client in mesh.clients]
    mine = [mesh.clients.index(mesh.client_of(device)) for device in mesh.local_device_ids()[:1]]
    return Mesh(["client"], np.arange(len(chosen)), mine, [chosen[index] for index in mine], "", chosen)
