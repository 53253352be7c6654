"""Convert between DTensors and plain tensors: `from_local`, `to_local`, `full_tensor`, components. Differentiable.

    from_local, from_components             to_local, to_components            full_tensor
    plain tensor(s) of each client   --->   DTensor   --->   plain tensor(s)   whole tensor on every client

Gradients take the same way back. The gradient of a component is a component of the gradient. The caller may choose the
gradient's layout; by default it is the `gradient_layout` of the tensor.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from dtckpt.comm import torch_private
from dtckpt.dtensor.components import is_shared, pack_strided
from dtckpt.dtensor.derived_layouts import cached_layout, gradient_layout, one_device_per_client
from dtckpt.dtensor.redistribute import redistribute
from dtckpt.dtensor.tensor import DTensor, described, spec_of, wrap_components
from dtckpt.dtensor.tensor_spec import Spec, contiguous_stride, global_stride, intern_spec
from dtckpt.errors import ComponentError, DtckptError, LayoutError, capped
from dtckpt.layout.layout import Layout
from dtckpt.layout.mesh import Mesh
from dtckpt.layout.placement import Placement
from dtckpt.redistribution.execute import report_error


class _FromComponents(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, spec: Spec, gradient: Layout, *parts: torch.Tensor) -> DTensor:
        ctx.set_materialize_grads(False)  # torch would make plain zeros, which are no gradient of a DTensor
        ctx.gradient, ctx.shapes, ctx.device = gradient, [part.shape for part in parts], parts[0].device
        components = [] if spec.layout.mesh.is_remote() else [part.view_as(part) for part in parts]
        return wrap_components(components, spec, ctx.device)

    @staticmethod
    def backward(ctx: Any, gradient: DTensor | None) -> tuple[Any, ...]:
        if gradient is None:
            return None, None, *(None for _ in ctx.shapes)
        moved = redistribute(gradient, ctx.gradient)
        if not moved.components:
            zeros = (torch.zeros(shape, dtype=gradient.dtype, device=ctx.device) for shape in ctx.shapes)
            return None, None, *zeros
        return None, None, *to_components(moved, moved.layout)


class _ToComponents(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: DTensor, gradient: Layout) -> tuple[torch.Tensor, ...]:
        ctx.gradient, ctx.shape = gradient, tensor.shape
        return tuple([component.view_as(component) for component in tensor.components])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        parts = [gradient.contiguous() for gradient in gradients]
        shape = tuple(ctx.shape)
        spec = intern_spec(ctx.gradient, shape, contiguous_stride(shape), parts[0].dtype)
        return _from_components(spec, ctx.gradient, parts), None


def _from_components(spec: Spec, gradient: Layout, parts: Sequence[torch.Tensor]) -> DTensor:
    tensor: DTensor = _FromComponents.apply(  # type: ignore[no-untyped-call]  # torch leaves it untyped
        spec, gradient, *parts
    )
    return tensor


def to_local(tensor: DTensor, gradient: Layout) -> torch.Tensor:
    """Return this client's only component. Differentiable. A client outside the mesh gets a tensor of shape (0,).

    Args:
        tensor: The tensor.
        gradient: The layout that the component's gradient is in.

    Raises:
        ComponentError: This client has several devices in the mesh.
        LayoutError: See `validate_gradient`.
    """
    if len(tensor.components) > 1:
        raise ComponentError(
            f"to_local needs one local device; got {len(tensor.components)}; unpack returns every component"
        )
    parts = to_components(tensor, gradient)
    local = parts[0] if parts else torch.empty(0, dtype=tensor.dtype)
    return local.as_subclass(AwaitedTensor) if tensor._is_async else local


class AwaitedTensor(torch.Tensor):
    """A component of a DTensor that was redistributed with ``async_op``: a plain tensor that has `wait`, as PyTorch's.

    Operators on it return plain tensors.
    """

    __torch_function__ = torch_private.disabled_torch_function

    def wait(self) -> torch.Tensor:
        """Return the plain tensor. Its values are there: `to_local` has waited for them."""
        return self.as_subclass(torch.Tensor)


def to_components(tensor: DTensor, gradient: Layout) -> tuple[torch.Tensor, ...]:
    """Return this client's components, in `Mesh.local_devices` order. Differentiable.

    Args:
        tensor: The tensor.
        gradient: The layout that the components' gradients are in.

    Raises:
        LayoutError: See `validate_gradient`.
    """
    if gradient is not tensor._layout:
        validate_gradient(gradient, tensor._layout, tuple(tensor.shape))
    return _to_components(tensor, gradient)


def validate_gradient(gradient: Layout, layout: Layout, shape: tuple[int, ...]) -> None:
    """Refuse a layout of a gradient whose components have other shapes than the tensor's.

    All clients find the same result, because the shapes on every device count, not only on this client's devices.

    Raises:
        LayoutError: The shapes differ on some device, or the gradient's layout is on another mesh.
    """
    if gradient is layout or (gradient.split_axes == layout.split_axes and gradient.mesh == layout.mesh):
        return
    if gradient.mesh != layout.mesh or not _have_equal_shapes(gradient, layout, shape):
        raise LayoutError(
            f"gradient placements: got {described(gradient)}, expected {described(layout)}, or others with components "
            f"of the same shapes, for a tensor of shape {shape}"
        )


@lru_cache(maxsize=1024)
def _have_equal_shapes(one: Layout, other: Layout, shape: tuple[int, ...]) -> bool:
    return all(one.region(device, shape).shape == other.region(device, shape).shape for device in one.mesh.device_ids)


def _to_components(tensor: DTensor, gradient: Layout) -> tuple[torch.Tensor, ...]:
    """Return this client's components; ``gradient`` may be on another mesh with one component per client."""
    if not (torch.is_grad_enabled() and tensor.requires_grad and tensor.components):
        return tensor.components
    parts: tuple[torch.Tensor, ...] = _ToComponents.apply(  # type: ignore[no-untyped-call]  # as above
        tensor, gradient
    )
    return parts


def from_local(
    local: torch.Tensor,
    layout: Layout,
    *,
    shape: Sequence[int] | None = None,
    stride: Sequence[int] | None = None,
    gradient: Layout | None = None,
    run_check: bool = False,
) -> DTensor:
    """Return the DTensor of which ``local`` is this client's component. Differentiable. See `DTensor.from_local`."""
    if shape is None and layout.mesh.is_remote():
        shape = [size * layout.num_shards(dim) for dim, size in enumerate(local.shape)]
        stride = global_stride(local, shape)
    made = from_components(
        [local],
        layout,
        shape=shape,
        stride=stride,
        gradient=gradient,
        run_check=run_check,
        compares_values=False,
    )
    return broadcast_copies(made) if run_check and is_shared(layout.mesh) and not made.is_meta else made


def from_components(
    parts: Sequence[torch.Tensor],
    layout: Layout,
    *,
    shape: Sequence[int] | None = None,
    stride: Sequence[int] | None = None,
    gradient: Layout | None = None,
    run_check: bool = False,
    compares_values: bool = True,
    origin: Hashable = None,
) -> DTensor:
    """Return the DTensor whose components on this client are ``parts``. Differentiable.

    Collective: As `pack`, whose arguments and errors these are.

    Args:
        parts: One per local device, of the shapes that `pack` needs. On a client outside the mesh one tensor, of which
            only dtype and device count.
        layout: The tensor's layout.
        shape: Global shape; None means that the clients find it together.
        stride: Strides of the global tensor.
        gradient: The layout that the components' gradients are in; default `gradient_layout` of ``layout``.
        run_check: Compare the values of components that are copies of each other.
        compares_values: False if ``run_check`` only compares shapes, dtypes and ``requires_grad``.
        origin: As for `pack_strided`.
    """
    requires_grad = torch.is_grad_enabled() and any(part.requires_grad for part in parts)
    components = [] if layout.mesh.is_remote() else [part.detach() for part in parts]
    packed = pack_strided(
        components,
        layout,
        shape,
        run_check=run_check,
        stride=stride,
        compares_values=compares_values,
        requires_grad=requires_grad,
        origin=origin,
    )
    if gradient is not None:
        try:
            validate_gradient(gradient, layout, tuple(packed.shape))
        except DtckptError as error:
            report_error(error, [layout.mesh])
            raise
    if not components:
        spec = intern_spec(layout, tuple(packed.shape), packed.stride(), parts[0].dtype)
        packed = wrap_components([], spec, parts[0].device)
    if not requires_grad:
        return packed
    placed = [part.to(component.device) for part, component in zip(parts, packed.components, strict=True)] or parts
    return _from_components(spec_of(packed), gradient or gradient_layout(layout), placed)


def whole_gradient_layout(tensor: DTensor, placements: Sequence[Placement]) -> Layout:
    """Return the layout of the gradient of a whole tensor, with one gradient on every client; see `full_tensor`.

    Args:
        tensor: The tensor.
        placements: Of the gradient, one per axis of the tensor's mesh.

    Raises:
        LayoutError: The placements do not fit the mesh, shard the gradient, or tell devices of one client apart.
    """
    mesh = tensor.device_mesh
    layout = Layout.from_placements(mesh, placements, tensor.ndim)
    if any(layout.split_axes):
        raise LayoutError(
            f"full_tensor: got grad_placements {list(placements)}, expected Replicate or Partial along every axis, as "
            "the gradient of a whole tensor has its shape on every client"
        )
    if mesh.num_clients == mesh.size():
        return layout
    if len(set(layout.placements)) > 1:
        raise LayoutError(
            f"full_tensor: got grad_placements {list(placements)} on mesh {mesh.axis_sizes} of clients "
            f"{capped(mesh.clients)}, expected one placement along all axes, as a client with several devices has one "
            "gradient"
        )
    return cached_layout(one_device_per_client(mesh), layout.placements[:1], tensor.ndim)


def full_tensor(tensor: DTensor, gradient: Layout | None = None) -> torch.Tensor:
    """Return the whole tensor as a plain one, with pending reductions done. Differentiable.

    Collective: As `redistribute`.

    Args:
        tensor: The tensor.
        gradient: The layout that the whole tensor's gradient is in, see `whole_gradient_layout`; default replicated.
    """
    hosts = one_device_per_client(tensor.device_mesh)
    whole = redistribute(tensor, cached_layout(hosts, None, tensor.ndim))
    parts = _to_components(whole, whole.layout if gradient is None else gradient)
    return parts[0] if parts else torch.empty(0, dtype=tensor.dtype)


# --- broadcast of copies ---------------------------------------------------------------------------------------------
#
# ``from_local`` can give all devices along replicated axes the values of the first one:
#
#     device (0, 0): a     device (0, 1): b              (0, 0): a     (0, 1): a
#     device (1, 0): c     device (1, 1): d     --->     (1, 0): c     (1, 1): c     sharded along the first axis
#
# It is a redistribution from the mesh of the first devices to the whole mesh.


def broadcast_copies(tensor: DTensor) -> DTensor:
    """Return a tensor with the first device's component on all devices along the replicated axes. Differentiable.

    The gradient passes as if nothing had been sent.

    Collective: Over the mesh's clients.
    """
    result: DTensor = _Broadcast.apply(tensor)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return result


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: DTensor) -> DTensor:
        ctx.set_materialize_grads(False)  # torch would make plain zeros, which are no gradient of a DTensor
        ctx.layout = tensor.layout
        return _broadcast(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: DTensor | None) -> DTensor | None:
        return None if gradient is None else redistribute(gradient, gradient_layout(ctx.layout))


def _broadcast(tensor: DTensor) -> DTensor:
    layout, mesh = tensor.layout, tensor.device_mesh
    # Terms of a sum are no copies of each other: here they are the shards of one more dim.
    pending = list(layout.partial)
    kept = {*pending, *(axis for axes in layout.split_axes for axis in axes)}
    firsts = _first_devices(mesh, id(mesh), tuple(axis in kept for axis in mesh.dim_names))
    specs = [*pending, *layout.sharding_specs]
    shape = (*(mesh.dim_size(axis) for axis in pending), *tensor.shape)
    own = dict(zip(mesh.local_devices(), tensor.components, strict=True))
    parts = [own[name].reshape((1,) * len(pending) + own[name].shape) for name in firsts.local_devices()]
    source = DTensor(parts, Layout(specs, firsts), shape, tensor.dtype, device=tensor.device)
    moved = dict(zip(own, redistribute(source, Layout(specs, mesh)).components, strict=True))
    # The first devices keep their components, which share memory with the caller's tensors.
    components = [
        part if name in firsts.local_devices() else moved[name].reshape(part.shape) for name, part in own.items()
    ]
    return wrap_components(components, spec_of(tensor))


@lru_cache(maxsize=256)
def _first_devices(mesh: Mesh, identity: int, is_kept: tuple[bool, ...]) -> Mesh:
    """Return the mesh of the devices that come first along all axes but those to keep; those axes have size 1 there."""
    # Equal meshes may be seen from different clients of one process.
    del identity
    names = np.array(mesh.device_names).reshape(mesh.shape)
    firsts = names[tuple(slice(None if is_whole else 1) for is_whole in is_kept)]
    flat, local = firsts.ravel().tolist(), set(mesh.local_devices())
    own = [position for position, name in enumerate(flat) if name in local]
    ids = np.arange(firsts.size).reshape(firsts.shape)
    return Mesh(mesh.dim_names, ids, own, [flat[position] for position in own], "", flat)
