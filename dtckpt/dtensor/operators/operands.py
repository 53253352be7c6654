"""Redistribution of operands, below autograd: to given layouts, to all devices, and back into a tensor's memory."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import lru_cache

import torch

from dtckpt.comm import torch_private
from dtckpt.dtensor import derived_layouts, redistribute
from dtckpt.dtensor.tensor import DTensor, described, wrap_components
from dtckpt.dtensor.tensor_spec import Spec, contiguous_stride, intern_spec
from dtckpt.errors import MeshMismatchError, capped
from dtckpt.layout.layout import Layout
from dtckpt.layout.mesh import Mesh
from dtckpt.redistribution import execute


def to_layouts(tensors: Sequence[DTensor], layouts: Sequence[Layout | None]) -> list[DTensor]:
    """Return tensors in other layouts, redistributed in one exchange.

    Collective: Over the mesh's clients, unless nothing moves between them.

    Args:
        tensors: The tensors.
        layouts: The layout of each; None for a tensor that keeps its layout.
    """
    changing = [
        number
        for number, (tensor, layout) in enumerate(zip(tensors, layouts, strict=True))
        if layout is not None and layout != tensor._layout
    ]
    result = list(tensors)
    for number in changing:
        layout = layouts[number]
        # Along an axis of one device all placements are the same, so the components serve unchanged.
        if layout is not None and _differs_in_name_only(tensors[number]._layout, layout):
            result[number] = wrap_components(tensors[number].components, _spec_in(tensors[number], layout))
    # All together: their boxes share messages, and clients wait for each other once.
    changing = [number for number in changing if result[number] is tensors[number]]
    if changing:
        with torch.no_grad():
            chosen = [tensors[number] for number in changing]
            targets = [layout for layout in (layouts[number] for number in changing) if layout is not None]
            for number, moved in zip(changing, redistribute.redistribute_all(chosen, targets), strict=True):
                result[number] = moved
    return result


def _spec_in(tensor: DTensor, layout: Layout) -> Spec:
    return intern_spec(layout, tuple(tensor.shape), tensor.stride(), tensor.dtype)


@lru_cache(maxsize=4096)
def _have_same_pieces(source: Layout, target: Layout) -> bool:
    """Whether two layouts on one mesh have the same components, as they differ only in axes of one device."""
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
    """Return tensors replicated, each with the strides of the given one.

    Collective: As `to_layouts`.

    Args:
        tensors: Tensors on one mesh.
        is_copied: Whether to copy a tensor that is replicated already.
    """
    whole = to_layouts(tensors, [replicated_layout(tensor.device_mesh, tensor.ndim) for tensor in tensors])
    return [
        tensor if copy is tensor and not is_copied and _has_own_strides(tensor) else _with_strides(copy, tensor)
        for copy, tensor in zip(whole, tensors, strict=True)
    ]


def _has_own_strides(tensor: DTensor) -> bool:
    """Whether the components of a replicated tensor have the strides of the global tensor."""
    # The stride of a dim of size 1 leads nowhere. A copy of no elements costs nothing.
    dims = [dim for dim, size in enumerate(tensor.shape) if size > 1 or not tensor.numel()]
    return all(component.stride(dim) == tensor.stride(dim) for component in tensor.components for dim in dims)


def _with_strides(tensor: DTensor, like: DTensor) -> DTensor:
    """Return a copy of a tensor with the strides of another; the tensor itself if it is new and has such strides."""
    shape, stride = tuple(like.shape), tuple(like.stride())
    if tensor is not like and stride == contiguous_stride(shape):
        return tensor
    components = [_strided_copy(component, stride) for component in tensor.components]
    return wrap_components(components, intern_spec(tensor.layout, shape, stride, tensor.dtype), tensor.device)


def _strided_copy(component: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    """Return a copy of a tensor with these strides, by which elements may share memory."""
    copy = torch.empty_strided(component.shape, stride, dtype=component.dtype, device=component.device)
    if not _may_overlap(component.shape, stride):
        return copy.copy_(component)
    # Elements that share memory are equal, so that any one of them may be the last to be written.
    whole = copy.as_strided((copy.untyped_storage().nbytes() // copy.dtype.itemsize,), (1,))
    places = torch.arange(whole.numel(), device=component.device).as_strided(component.shape, stride)
    whole[places.reshape(-1)] = component.reshape(-1)
    return copy


def _may_overlap(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether elements may share memory: whether a step along a dim ends within the range of the smaller steps."""
    covered = 1
    for step, size in sorted(zip(stride, shape, strict=True)):
        if size > 1 and step < covered:
            return True
        covered += (size - 1) * step
    return False


def common_mesh(what: str, tensors: Sequence[DTensor], mesh: Mesh | None = None) -> Mesh:
    """Return the mesh of all tensors.

    Args:
        what: The caller, for the error.
        tensors: The tensors, at least one.
        mesh: A mesh that must be theirs, too.

    Raises:
        MeshMismatchError: There are several meshes; on all clients of them all.
    """
    meshes = dict.fromkeys(tensor.device_mesh for tensor in tensors)
    if mesh is not None:
        meshes[mesh] = None
    if len(meshes) > 1:
        found = [described(tensor.layout) for tensor in tensors]
        if mesh is not None:
            found.append(f"device_mesh {mesh.label}")
        error = MeshMismatchError(
            f"{what}: got DTensors on different meshes ({capped(dict.fromkeys(found))}), expected one mesh; "
            "redistribute moves a DTensor to another mesh"
        )
        for each in {one.clients: one for one in meshes}.values():
            if execute.report_error(error, [each]):
                break
        raise error
    return next(iter(meshes))


def replicated_layout(mesh: Mesh, ndim: int) -> Layout:
    """Return the layout of a replicated tensor of so many dims."""
    return derived_layouts.cached_layout(mesh, None, ndim)


def unshare(tensor: DTensor) -> None:
    """Give separate memory to components that share memory with each other, such as components packed from one tensor.

    Call it before components are written to: each device writes, and shared memory would be written several times. Call
    it also before a view shares memory with components: a program may write through the view.
    """
    if len(tensor.components) < 2:
        return
    addresses: set[int] = set()
    components = []
    for component in tensor.components:
        has_memory = component.layout is torch.strided and component.numel() and not component.is_meta
        address = component.data_ptr() if has_memory else 0
        components.append(component.clone() if address in addresses else component)
        addresses.add(address or -1)
    tensor._components = tuple(components)


def write_into(source: DTensor, target: DTensor) -> None:
    """Write the values of a tensor into another of the same shape, whose memory and layout stay.

    Collective: As `to_layouts`.
    """
    if source.dtype != target.dtype and target.layout.partial:
        # Terms that are rounded, or wrap around, have another sum.
        (source,) = to_layouts([source], [derived_layouts.gradient_layout(source._layout)])
        components = [component.to(target.dtype) for component in source.components]
        # Before the redistribution, because the target's pending op may not fit the source's dtype, as ``band`` does
        # not fit floats.
        source = DTensor(components, source.layout, source.shape, target.dtype, device=source.device)
    (moved,) = to_layouts([source], [target._layout])
    unshare(target)
    for component, value in zip(target.components, moved.components, strict=True):
        component.copy_(value)


def no_dispatch() -> AbstractContextManager[None]:
    """Return a context in which operators change sizes and strides of DTensors only, and no components."""
    return torch_private.disable_torch_dispatch()  # type: ignore[no-any-return]
