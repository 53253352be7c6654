"""Restore without a target: choose a layout for every tensor of a checkpoint, and allocate it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from dtckpt.checkpoint.leaves import as_leaf, mesh_of, new_memory, with_arrays
from dtckpt.checkpoint.options import RestoreOptions
from dtckpt.checkpoint.reading.checkpoint import Checkpoint
from dtckpt.checkpoint.restoring.layout_choice import Layouts, choose_layout
from dtckpt.checkpoint.restoring.plan import RestorePlan, new_names
from dtckpt.comm import host_memory
from dtckpt.comm.torch_device import device_of
from dtckpt.dtensor import DTensor, torch_interop
from dtckpt.dtensor.torch_interop import KeptLayouts
from dtckpt.errors import MeshError
from dtckpt.format import tree as trees
from dtckpt.layout.layout import Layout
from dtckpt.layout.mesh import Mesh
from dtckpt.layout.region import Region


def meshes_of_layouts(mesh: Mesh | None, layouts: Layouts | None) -> set[Mesh]:
    """Return the meshes on which new tensors may lie, without calls of layout functions."""
    meshes = set() if mesh is None else {mesh}
    if isinstance(layouts, Mapping):
        meshes |= {choice.mesh for choice in layouts.values() if isinstance(choice, Layout)}
    return meshes


def plan_new_tensors(
    checkpoint: Checkpoint,
    mesh: Mesh | None,
    layouts: Layouts | None,
    options: RestoreOptions,
    device_mesh: Any = None,
) -> RestorePlan:
    """Allocate every tensor of a checkpoint in its layout, and plan to fill it.

    First checks that storage holds the elements that the manifest declares, before it allocates memory.

    Args:
        checkpoint: The checkpoint.
        mesh: As for `dtckpt.restore`.
        layouts: As for `dtckpt.restore`.
        options: See `RestoreOptions`.
        device_mesh: PyTorch's mesh that ``mesh`` was converted from, if the tensors shall be DTensors of PyTorch. A
            tensor that was saved plain stays plain then, unless ``layouts`` say otherwise.
    """
    checkpoint.validate_readable()
    names = new_names(checkpoint, options)
    structure = trees.rename(checkpoint.structure, names) if names else checkpoint.structure
    infos = dict(checkpoint.tensors)
    arrays, plain = set(trees.array_names(structure)), plain_names(checkpoint)
    keep_plain = device_mesh is not None
    chosen = {
        name: choose_layout(
            names.get(name, name), info, None if name in plain else mesh, layouts, keep_plain=keep_plain
        )
        for name, info in infos.items()
        if name not in arrays
    } | dict.fromkeys(arrays)
    meshes = {layout.mesh for layout in chosen.values() if layout is not None}
    device_meshes = {} if device_mesh is None else {each: _part_of(device_mesh, each) for each in meshes}
    checkpoint.validate_stored(
        (name, region) for name, layout in chosen.items() for region in _own_regions(infos[name].shape, layout)
    )
    tensors: dict[str, torch.Tensor] = {}
    for name, layout in chosen.items():
        info = infos[name]
        if layout is None:
            tensors[name] = new_memory(name, info.shape, info.dtype)
        elif device_meshes:
            tensors[name] = _empty_torch_dtensor(info.shape, info.dtype, layout, device_meshes[layout.mesh])
        else:
            tensors[name] = empty_dtensor(info.shape, info.dtype, layout)
    kept: KeptLayouts = {}
    leaves = [(name, as_leaf(tensor, name, kept)) for name, tensor in tensors.items()]
    made = with_arrays(tensors, arrays)
    return RestorePlan(leaves, lambda: trees.build(structure, made.__getitem__), names, is_new=True)


def plain_names(checkpoint: Checkpoint) -> set[str]:
    """Return the names of the tensors that belong on no mesh: arrays of numpy, and tensors of one client alone."""
    structure, infos = checkpoint.structure, checkpoint.tensors
    of_clients = (name for _, node in trees.per_client_nodes(structure) for name in trees.tensor_names(node))
    return {*trees.array_names(structure), *(name for name in of_clients if infos[name].layout is None)}


def _part_of(device_mesh: Any, mesh: Mesh) -> Any:
    """Return the PyTorch mesh with the devices of a mesh: ``device_mesh`` or a slice of it.

    Raises:
        MeshError: ``device_mesh`` has no such slice.
    """
    whole = Mesh.from_device_mesh(device_mesh)
    if whole == mesh:
        return device_mesh
    if set(mesh.dim_names) < set(whole.dim_names):
        part = device_mesh[mesh.dim_names]
        if Mesh.from_device_mesh(part) == mesh:
            return part
    raise MeshError(f"layouts for a restore to {whole}: got one on {mesh}, expected that mesh or a slice of it")


def _own_regions(shape: tuple[int, ...], layout: Layout | None) -> set[Region]:
    """Return the regions of a tensor that this client will hold."""
    if layout is None:
        return {Region.full(shape)}
    return {layout.region(device, shape) for device in layout.mesh.local_device_ids()}


def empty_dtensor(
    shape: tuple[int, ...], dtype: torch.dtype, layout: Layout, device: torch.device | None = None
) -> DTensor:
    """Allocate a DTensor of a global shape; its components are not initialized, and on ``device`` if it is given."""
    components = [
        host_memory.allocate(layout.region(number, shape).shape, dtype, device or device_of(name))
        for number, name in zip(layout.mesh.local_device_ids(), layout.mesh.local_devices(), strict=True)
    ]
    return DTensor(components, layout, shape, dtype)


def empty_beside(reference: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, layout: Layout) -> torch.Tensor:
    """Allocate a DTensor of the reference's kind, ours or PyTorch's; it is not initialized.

    A DTensor of ours lies on the devices of its mesh. A DTensor of PyTorch lies on the device of the reference, or on
    the mesh's device if the reference is on the meta device. FSDP2 may have offloaded the reference to the host. If it
    has, and the shapes are equal, the new tensor has the reference's layout, and ``layout`` is ignored.

    Args:
        reference: The other DTensor.
        shape: Global shape.
        dtype: Dtype.
        layout: A layout on the reference's mesh.
    """
    if not torch_interop.is_torch_dtensor(reference):
        return empty_dtensor(shape, dtype, layout)
    device_mesh = reference.device_mesh  # type: ignore[attr-defined]  # PyTorch's DTensor is not imported here
    is_offloaded = reference.device.type not in ("meta", device_mesh.device_type)
    if is_offloaded and tuple(reference.shape) == shape:
        return torch.empty_like(reference, dtype=dtype, requires_grad=False)
    return _empty_torch_dtensor(shape, dtype, layout, device_mesh, None if reference.is_meta else reference.device)


def _empty_torch_dtensor(
    shape: tuple[int, ...], dtype: torch.dtype, layout: Layout, device_mesh: Any, device: torch.device | None = None
) -> torch.Tensor:
    """Allocate a DTensor of PyTorch, by default on the current device of the kind of its mesh, as PyTorch does."""
    empty = empty_dtensor(shape, dtype, layout, device or torch.device(device_mesh.device_type))
    made: torch.Tensor = torch_interop.to_torch(empty, device_mesh)
    return made


def layout_of_tensor(tensor: torch.Tensor) -> Layout | None:
    """Return the layout of a DTensor, ours or PyTorch's; None for a plain tensor."""
    mesh = mesh_of(tensor)
    if mesh is None:
        return None
    if isinstance(tensor, DTensor):
        return tensor.layout
    return Layout.from_placements(mesh, tensor.placements, tensor.ndim)  # type: ignore[attr-defined]
