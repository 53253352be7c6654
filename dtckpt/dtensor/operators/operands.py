"""Bring operands into the layouts that an operator wants, below autograd."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import lru_cache

import torch

from dtckpt.dtensor import autograd
from dtckpt.dtensor.operators.tensor_spec import Spec, contiguous_stride, intern_spec, wrap_components
from dtckpt.dtensor.tensor import DTensor
from dtckpt.layout.layout import Layout
from dtckpt.layout.mesh import Mesh


def to_layouts(tensors: Sequence[DTensor], layouts: Sequence[Layout | None]) -> list[DTensor]:
    """Return tensors in other layouts (None: as they are), moved together.

    Collective: Over the mesh's clients, unless nothing moves between them.
    """
    changing = [
        number
        for number, (tensor, layout) in enumerate(zip(tensors, layouts, strict=True))
        if layout is not None and layout != tensor._layout
    ]
    result = list(tensors)
    for number in changing:
        layout = layouts[number]
        if layout is not None and _differs_in_name_only(tensors[number]._layout, layout):
            result[number] = wrap_components(tensors[number].components, _spec_in(tensors[number], layout))
    changing = [number for number in changing if result[number] is tensors[number]]
    if changing:
        with torch.no_grad():
            chosen = [tensors[number] for number in changing]
            wanted = [layout for layout in (layouts[number] for number in changing) if layout is not None]
            for number, moved in zip(changing, autograd.redistribute_all(chosen, wanted), strict=True):
                result[number] = moved
    return result


def _spec_in(tensor: DTensor, layout: Layout) -> Spec:
    return intern_spec(layout, tuple(tensor.shape), tensor.stride(), tensor.dtype)


@lru_cache(maxsize=4096)
def _have_same_pieces(source: Layout, target: Layout) -> bool:
    """Whether two layouts on one mesh have the same pieces, because axes of one device alone are used otherwise."""
    sizes = source.mesh.axis_sizes

    def split(layout: Layout) -> list[tuple[str, ...]]:
        return [tuple(axis for axis in axes if sizes[axis] > 1) for axes in layout.split_axes]

    def pending(layout: Layout) -> dict[str, str]:
        return {axis: reduction for axis, reduction in layout.partial.items() if sizes[axis] > 1}

    return split(source) == split(target) and pending(source) == pending(target)


def _differs_in_name_only(source: Layout, target: Layout) -> bool:
    has_small = 1 in source.mesh.shape
    return has_small and source.mesh is target.mesh and _have_same_pieces(source, target)


def to_replicated(tensors: Sequence[DTensor], *, is_copied: bool = False) -> list[DTensor]:
    """Return tensors that every device holds whole, each with its own strides.

    Args:
        tensors: Of one mesh.
        is_copied: Return new memory in any case.
    """
    whole = to_layouts(tensors, [replicated_layout(tensor.device_mesh, tensor.ndim) for tensor in tensors])
    return [
        made if made is tensor and not is_copied else _with_strides(made, tensor)
        for made, tensor in zip(whole, tensors, strict=True)
    ]


def _with_strides(made: DTensor, like: DTensor) -> DTensor:
    """Return a copy with the strides of another tensor; of one with memory of its own and such strides, itself."""
    stride = tuple(like.stride())
    if made is not like and stride == contiguous_stride(like.shape):
        return made
    components = []
    for component in made.components:
        if 0 in stride:  # elements that share memory cannot be written one by one
            components.append(component.clone())
            continue
        copy = torch.empty_strided(component.shape, stride, dtype=component.dtype, device=component.device)
        components.append(copy.copy_(component))
    return DTensor(components, made.layout, made.shape, made.dtype, device=made.device)


def replicated_layout(mesh: Mesh, ndim: int) -> Layout:
    """Return the layout of a tensor that every device holds whole."""
    return autograd.from_placements(mesh, None, ndim)


def unshare(tensor: DTensor) -> None:
    """Give components that share memory, as copies that were packed from one tensor, memory of their own.

    Called before each of them is written to, or something shares its memory, through which it may be.
    """
    if len(tensor.components) < 2:
        return
    known: set[int] = set()
    parted = []
    for component in tensor.components:
        is_there = component.layout is torch.strided and component.numel() and not component.is_meta
        place = component.data_ptr() if is_there else 0
        parted.append(component.clone() if place in known else component)
        known.add(place or -1)
    tensor._components = tuple(parted)


def write_into(source: DTensor, target: DTensor) -> None:
    """Write values to a tensor of the same shape, in its memory and layout. Collective: As `to_layouts`."""
    if source.dtype != target.dtype and target.layout.partial:
        components = [component.to(target.dtype) for component in source.components]
        source = DTensor(components, source.layout, source.shape, target.dtype, device=source.device)
    (moved,) = to_layouts([source], [target._layout])
    unshare(target)
    for there, value in zip(target.components, moved.components, strict=True):
        there.copy_(value)


def no_dispatch() -> AbstractContextManager[None]:
    """Have operators act on the wrappers alone, which have sizes and strides and no values."""
    return torch._C._DisableTorchDispatch()
