"""What takes DTensors apart, puts them together and moves them, all differentiable.

Gradients follow the values: the gradient of a sharded tensor is sharded alike, that of a replicated one replicated.
That of a Partial one is Replicate: each term adds to the tensor, so each has the tensor's whole gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from dtckpt.dtensor import meta
from dtckpt.dtensor.packing import pack
from dtckpt.dtensor.redistribution import program_of, resolve_match
from dtckpt.dtensor.redistribution import redistribute as redistribute_components
from dtckpt.dtensor.tensor import DTensor, described
from dtckpt.errors import ComponentError, LayoutError, LayoutTypeError
from dtckpt.layout import Layout
from dtckpt.mesh import Mesh
from dtckpt.placement import Placement, validate_reductions


def gradient_layout(layout: Layout) -> Layout:
    """Return the layout of the gradient of a tensor in ``layout``."""
    return Layout(layout.sharding_specs, layout.mesh) if layout.partial else layout


def _apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    return function.apply(*args)  # type: ignore[no-untyped-call]  # torch leaves it untyped


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What is wanted of some tensors: layouts, the dtypes to convert to on the way and back, and whether to wait."""

    layouts: tuple[Layout, ...]
    forward_dtype: torch.dtype | None = None
    backward_dtype: torch.dtype | None = None
    is_async: bool = False


class _Redistribute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, wanted: _Wanted, *tensors: DTensor) -> tuple[DTensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.sources = [(tensor.layout, tensor.dtype) for tensor in tensors]
        ctx.backward_dtype = wanted.backward_dtype
        return _moved(wanted, tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: DTensor | None) -> tuple[Any, ...]:
        there = [number for number, gradient in enumerate(gradients) if gradient is not None]
        layouts = tuple(gradient_layout(ctx.sources[number][0]) for number in there)
        dtypes = {ctx.backward_dtype or ctx.sources[number][1] for number in there}
        if len(dtypes) == 1:
            moved = _apply(_Redistribute, _Wanted(layouts, dtypes.pop()), *(gradients[number] for number in there))
        else:
            moved = tuple(
                _apply(_Redistribute, _Wanted((layout,), ctx.sources[number][1]), gradients[number])[0]
                for number, layout in zip(there, layouts, strict=True)
            )
        back: list[DTensor | None] = [None] * len(gradients)
        for number, gradient in zip(there, moved, strict=True):
            dtype = ctx.sources[number][1]
            back[number] = gradient if gradient.dtype == dtype else gradient.to(dtype)
        return None, *back


def _moved(wanted: _Wanted, tensors: Sequence[DTensor]) -> tuple[DTensor, ...]:
    """Return tensors in other layouts, without a gradient."""
    programs, sources = [], []
    for tensor, layout in zip(tensors, wanted.layouts, strict=True):
        dtype = wanted.forward_dtype or tensor.dtype
        programs.append(program_of(tensor.layout, layout, tensor.shape, dtype))
        components = tensor.components if dtype == tensor.dtype else [part.to(dtype) for part in tensor.components]
        sources.append(dict(zip(tensor.device_mesh.local_device_ids(), components, strict=True)))
    running = redistribute_components(programs, sources)
    if not wanted.is_async:
        running.wait()
    made = []
    for program, moved in zip(programs, running.components, strict=True):
        layout = program.change.target
        ordered = [moved[device] for device in layout.mesh.local_device_ids()]
        made.append(DTensor(ordered, layout, program.change.shape, program.change.dtype))
        made[-1]._pending = running if wanted.is_async else None
    return tuple(made)


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
    is_async: bool = False,
) -> DTensor:
    """Return the tensor in another layout, on the same mesh or on another. Differentiable.

    Collective: Over the clients of both meshes, unless the layouts are equal or every client holds the whole tensor.

    Args:
        tensor: The tensor.
        layout: Its new layout; a MATCH spec keeps the present one.
        forward_dtype: Convert to this dtype before moving.
        backward_dtype: Convert the gradient to this dtype before moving it back; it returns to the tensor's dtype.
        is_async: Return while the last transfer is under way; the first use of the result waits for it.

    Raises:
        LayoutTypeError: ``tensor`` is no DTensor, or ``layout`` no Layout.
        LayoutError: The ranks differ.
    """
    return redistribute_all(
        [tensor], [layout], forward_dtype=forward_dtype, backward_dtype=backward_dtype, is_async=is_async
    )[0]


def redistribute_all(
    tensors: Sequence[DTensor],
    layouts: Sequence[Layout],
    *,
    forward_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
    is_async: bool = False,
) -> list[DTensor]:
    """Return tensors in other layouts; what goes from one client to another travels together. Differentiable.

    Collective: As `redistribute`, with the same tensors in the same order. Arguments and errors: as there.
    """
    result = list(tensors)
    moving: list[int] = []
    wanted: list[Layout] = []
    for number, (tensor, layout) in enumerate(zip(tensors, layouts, strict=True)):
        if not isinstance(tensor, DTensor):
            raise LayoutTypeError(f"redistribute needs a DTensor; got {type(tensor).__name__}")
        if not isinstance(layout, Layout):
            raise LayoutTypeError(f"redistribute needs a Layout; got {type(layout).__name__}")
        there = resolve_match(layout, tensor.layout)
        if tensor.components:  # a client without any may not know the dtype
            validate_reductions(there.partial, forward_dtype or tensor.dtype)
        if tensor.is_meta:
            result[number] = meta.redistribute(tensor, there, forward_dtype or tensor.dtype)
        elif there != tensor.layout or not {forward_dtype, backward_dtype} <= {None, tensor.dtype}:
            moving.append(number)
            wanted.append(there)
    if moving:
        asked = _Wanted(tuple(wanted), forward_dtype, backward_dtype, is_async)
        chosen = [tensors[number] for number in moving]
        needs_grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in chosen)
        moved = _apply(_Redistribute, asked, *chosen) if needs_grad else _moved(asked, chosen)
        for number, tensor in zip(moving, moved, strict=True):
            result[number] = tensor
    return result


def from_placements(mesh: Mesh, placements: Sequence[Placement] | None, ndim: int) -> Layout:
    """Return a layout from placements; None means replicated everywhere."""
    if placements is None:
        return Layout.replicated(mesh, ndim)
    if not isinstance(placements, Sequence):
        raise LayoutTypeError(f"placements: got {placements!r}, expected a sequence of one per axis")
    if not all(isinstance(each, Placement) for each in placements):
        return Layout.from_placements(mesh, placements, ndim)  # which says what is wrong
    return _known_layout(mesh, mesh.record.local_device_ids, tuple(placements), ndim)


@lru_cache(maxsize=4096)
def _known_layout(mesh: Mesh, local: tuple[int, ...], placements: tuple[Placement, ...], ndim: int) -> Layout:
    # Equal meshes may be seen from different clients of one process.
    del local
    return Layout.from_placements(mesh, placements, ndim)


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
        raise LayoutError(f"gradient placements: got {described(gradient)}, expected {described(tensor.layout)}")
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
        packed = DTensor([], layout, packed.shape, local.dtype, device=local.device)
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
