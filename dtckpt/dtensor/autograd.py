"""What takes DTensors apart, puts them together and moves them, all differentiable.

Gradients follow the values: the gradient of a sharded tensor is sharded alike, that of a replicated one replicated.
That of a Partial one is Replicate: each term adds to the tensor, so each has the tensor's whole gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from dtckpt.comm.host_memory import detached_clone
from dtckpt.comm.torch_device import device_of
from dtckpt.dtensor import meta_device
from dtckpt.dtensor.components import pack
from dtckpt.dtensor.tensor import DTensor, described
from dtckpt.errors import ComponentError, DtckptError, LayoutError, LayoutTypeError
from dtckpt.layout.layout import Layout
from dtckpt.layout.mesh import Mesh
from dtckpt.layout.placement import Placement, Replicate, validate_reductions
from dtckpt.redistribution.execute import Program, program_of, resolve_match, tell
from dtckpt.redistribution.execute import redistribute as redistribute_components


def gradient_layout(layout: Layout) -> Layout:
    """Return the layout of the gradient of a tensor in ``layout``."""
    return Layout(layout.sharding_specs, layout.mesh) if layout.partial else layout


def _apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    return function.apply(*args)  # type: ignore[no-untyped-call]  # torch leaves it untyped


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What is wanted of some tensors: a program each, the dtype to convert gradients to, and whether not to wait.

    The layouts are those that were asked for: the programs' own may be on equal meshes that know other names.
    """

    programs: tuple[Program, ...]
    layouts: tuple[Layout, ...]
    backward_dtype: torch.dtype | None = None
    is_async: bool = False


class _Redistribute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, wanted: _Wanted, *tensors: DTensor) -> tuple[DTensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.sources = [(tensor.layout, tensor.dtype) for tensor in tensors]
        ctx.backward_dtype = wanted.backward_dtype
        moved = _moved(wanted, tensors)
        fixed = [one for one, tensor in zip(moved, tensors, strict=True) if not tensor.requires_grad]
        ctx.mark_non_differentiable(*fixed)
        return moved

    @staticmethod
    def backward(ctx: Any, *gradients: DTensor | None) -> tuple[Any, ...]:
        there = [number for number, gradient in enumerate(gradients) if gradient is not None]
        chosen = [gradient for gradient in gradients if gradient is not None]
        layouts = tuple(gradient_layout(ctx.sources[number][0]) for number in there)
        programs = tuple(
            program_of(gradient.layout, layout, gradient.shape, ctx.backward_dtype or ctx.sources[number][1])
            for number, gradient, layout in zip(there, chosen, layouts, strict=True)
        )
        back: list[DTensor | None] = [None] * len(gradients)
        for number, moved in zip(there, _apply(_Redistribute, _Wanted(programs, layouts), *chosen), strict=True):
            dtype = ctx.sources[number][1]
            back[number] = moved if moved.dtype == dtype else moved.to(dtype)
        return None, *back


def _moved(wanted: _Wanted, tensors: Sequence[DTensor]) -> tuple[DTensor, ...]:
    """Return tensors in other layouts, without a gradient."""
    sources = []
    for tensor, program in zip(tensors, wanted.programs, strict=True):
        dtype, mesh, components = program.change.dtype, tensor.device_mesh, tensor.components
        if dtype != tensor.dtype:
            components = tuple(part.to(dtype) for part in components)
        if mesh.device_type == "cuda" and tensor.is_cpu:  # by ``cpu()``; those that exchange messages are on the cards
            names = mesh.local_devices()
            components = tuple(part.to(device_of(name)) for part, name in zip(components, names, strict=True))
        sources.append(dict(zip(mesh.local_device_ids(), components, strict=True)))
    running = redistribute_components(wanted.programs, sources, is_async=wanted.is_async)
    made = []
    for program, layout, moved, source in zip(
        wanted.programs, wanted.layouts, running.components, sources, strict=True
    ):
        # What is written to the result on one device alone must not reach the source there.
        old = set(map(id, source.values()))
        ordered = [
            detached_clone(moved[device]) if id(moved[device]) in old else moved[device]
            for device in layout.mesh.local_device_ids()
        ]
        made.append(DTensor(ordered, layout, program.change.shape, program.change.dtype))
        if wanted.is_async:
            made[-1]._pending = running
    return tuple(made)


class _FromComponents(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layout: Layout, shape: tuple[int, ...], gradient: Layout, *parts: torch.Tensor) -> DTensor:
        ctx.set_materialize_grads(False)  # a plain tensor of zeros would be no gradient of a DTensor
        ctx.gradient, ctx.shapes, ctx.device = gradient, [part.shape for part in parts], parts[0].device
        components = [] if layout.mesh.is_remote() else [part.view_as(part) for part in parts]
        return DTensor(components, layout, shape, parts[0].dtype, device=ctx.device)

    @staticmethod
    def backward(ctx: Any, gradient: DTensor | None) -> tuple[Any, ...]:
        if gradient is None:
            return None, None, None, *(None for _ in ctx.shapes)
        moved = redistribute(gradient, ctx.gradient)
        if not moved.components:
            zeros = (torch.zeros(shape, dtype=gradient.dtype, device=ctx.device) for shape in ctx.shapes)
            return None, None, None, *zeros
        return None, None, None, *components_of(moved, moved.layout)


class _ToComponents(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: DTensor, gradient: Layout) -> tuple[torch.Tensor, ...]:
        ctx.gradient, ctx.shape = gradient, tuple(tensor.shape)
        return tuple(component.view_as(component) for component in tensor.components)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        parts = [gradient.contiguous() for gradient in gradients]
        return _apply(_FromComponents, ctx.gradient, ctx.shape, ctx.gradient, *parts), None


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
    try:
        there, program = _way(tensor, layout, forward_dtype, backward_dtype)
    except DtckptError as error:
        tell(error, meshes_of([tensor, layout]))
        raise
    if program is None:
        return _unmoved(tensor, there, forward_dtype)
    (moved,) = _run(_Wanted((program,), (there,), backward_dtype, is_async), (tensor,))
    return moved


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
    try:
        ways = [
            _way(tensor, layout, forward_dtype, backward_dtype) for tensor, layout in zip(tensors, layouts, strict=True)
        ]
    except DtckptError as error:
        tell(error, meshes_of([*tensors, *layouts]))
        raise
    result = [_unmoved(tensor, there, forward_dtype) for tensor, (there, _) in zip(tensors, ways, strict=True)]
    moving = [(number, there, program) for number, (there, program) in enumerate(ways) if program is not None]
    if moving:
        numbers, there, programs = zip(*moving, strict=True)
        wanted = _Wanted(programs, there, backward_dtype, is_async)
        for number, moved in zip(numbers, _run(wanted, [tensors[number] for number in numbers]), strict=True):
            result[number] = moved
    return result


def _way(
    tensor: DTensor, layout: Layout, forward_dtype: torch.dtype | None, backward_dtype: torch.dtype | None
) -> tuple[Layout, Program | None]:
    """Return the layout that a tensor is to get, MATCH specs resolved, and how it gets there unless nothing moves."""
    if not isinstance(tensor, DTensor):
        raise LayoutTypeError(f"redistribute needs a DTensor; got {type(tensor).__name__}")
    if not isinstance(layout, Layout):
        raise LayoutTypeError(f"redistribute needs a Layout; got {type(layout).__name__}")
    there, dtype = resolve_match(layout, tensor.layout), forward_dtype or tensor.dtype
    validate_reductions(there.partial, dtype)
    is_done = there == tensor.layout and dtype == tensor.dtype and backward_dtype in (None, tensor.dtype)
    return there, None if is_done or tensor.is_meta else program_of(tensor.layout, there, tensor.shape, dtype)


def _unmoved(tensor: DTensor, layout: Layout, dtype: torch.dtype | None) -> DTensor:
    """Return a tensor of which nothing moves."""
    return meta_device.redistribute(tensor, layout, dtype or tensor.dtype) if tensor.is_meta else tensor


def _run(wanted: _Wanted, tensors: Sequence[DTensor]) -> tuple[DTensor, ...]:
    needs_grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    moved: tuple[DTensor, ...] = _apply(_Redistribute, wanted, *tensors) if needs_grad else _moved(wanted, tensors)
    return moved


def meshes_of(values: Iterable[object]) -> list[Mesh]:
    """Return the meshes of what is a DTensor or a Layout."""
    meshes = (value.layout.mesh if isinstance(value, DTensor) else getattr(value, "mesh", None) for value in values)
    return [mesh for mesh in meshes if isinstance(mesh, Mesh) and mesh.device_ids]


def from_placements(mesh: Mesh, placements: Sequence[Placement] | None, ndim: int) -> Layout:
    """Return a layout from placements; None means replicated everywhere."""
    if placements is None:
        placements = (Replicate(),) * mesh.ndim
    if not isinstance(placements, Sequence):
        raise LayoutTypeError(f"placements: got {placements!r}, expected a sequence of one per axis")
    if not all(isinstance(each, Placement) for each in placements):
        return Layout.from_placements(mesh, placements, ndim)  # which says what is wrong
    return _known_layout(mesh, id(mesh), tuple(placements), ndim)


@lru_cache(maxsize=4096)
def _known_layout(mesh: Mesh, identity: int, placements: tuple[Placement, ...], ndim: int) -> Layout:
    # Equal meshes may be seen from different clients of one process, and know different names and backends.
    del identity
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
    parts = components_of(tensor, gradient)
    return parts[0] if parts else torch.empty(0, dtype=tensor.dtype)


def components_of(tensor: DTensor, gradient: Layout) -> tuple[torch.Tensor, ...]:
    """Return this client's components; ``gradient`` is the layout that their gradients are in. Differentiable.

    Raises:
        LayoutError: The gradient's layout is on another mesh.
    """
    if gradient.mesh != tensor.device_mesh:
        raise LayoutError(f"gradient placements: got {described(gradient)}, expected {described(tensor.layout)}")
    if not (torch.is_grad_enabled() and tensor.requires_grad and tensor.components):
        return tensor.components
    parts: tuple[torch.Tensor, ...] = _apply(_ToComponents, tensor, gradient)
    return parts


def from_local(
    local: torch.Tensor,
    layout: Layout,
    *,
    shape: Sequence[int] | None = None,
    gradient: Layout | None = None,
    run_check: bool = False,
) -> DTensor:
    """Return the DTensor of which ``local`` is this client's component. Differentiable. See `DTensor.from_local`."""
    return tensor_of([local], layout, shape=shape, gradient=gradient, run_check=run_check)


def tensor_of(
    parts: Sequence[torch.Tensor],
    layout: Layout,
    *,
    shape: Sequence[int] | None = None,
    gradient: Layout | None = None,
    run_check: bool = False,
) -> DTensor:
    """Return the DTensor whose components on this client are ``parts``. Differentiable.

    Collective: As `pack`, whose arguments and errors these are.

    Args:
        parts: One per local device; one, which is not read, on a client outside the mesh.
        layout: The tensor's.
        shape: Global shape; None means that the clients find it.
        gradient: Layout that the components' gradients are in; default the tensor's, Partial as Replicate.
        run_check: Compare copies.
    """
    components = [] if layout.mesh.is_remote() else [part.detach() for part in parts]
    packed = pack(components, layout, shape, run_check=run_check)
    if not components:
        packed = DTensor([], layout, packed.shape, parts[0].dtype, device=parts[0].device)
    if not (torch.is_grad_enabled() and any(part.requires_grad for part in parts)):
        return packed
    placed = [part.to(there.device) for part, there in zip(parts, packed.components, strict=True)] or parts
    wanted = gradient or gradient_layout(layout)
    tensor: DTensor = _apply(_FromComponents, layout, tuple(packed.shape), wanted, *placed)
    return tensor


def full_tensor(tensor: DTensor, gradient: Layout | None = None) -> torch.Tensor:
    """Return the whole tensor as a plain one, with pending reductions done. Collective: as `redistribute`."""
    hosts = one_device_per_client(tensor.device_mesh)
    whole = redistribute(tensor, from_placements(hosts, None, tensor.ndim))
    return to_local(whole, whole.layout if gradient is None else gradient)


def one_device_per_client(mesh: Mesh) -> Mesh:
    """Return the mesh of every client's first device, on one axis."""
    return _hosts(mesh, id(mesh))


@lru_cache(maxsize=256)
def _hosts(mesh: Mesh, identity: int) -> Mesh:
    # Equal meshes may be seen from different clients of one process.
    del identity
    names = mesh.portable().global_devices()
    first = mesh.min_global_device_id()
    chosen = [names[mesh.devices_of(client)[0] - first] for client in mesh.clients]
    mine = [mesh.clients.index(mesh.client_of(device)) for device in mesh.local_device_ids()[:1]]
    return Mesh(["client"], np.arange(len(chosen)), mine, [chosen[index] for index in mine], "", chosen)
