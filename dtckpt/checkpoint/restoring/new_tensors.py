"""Restore without a target: choose a layout for every tensor of a checkpoint, and allocate it."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping
from typing import Any

import torch

from dtckpt.checkpoint.leaves import as_leaf, with_arrays
from dtckpt.checkpoint.options import RestoreOptions
from dtckpt.checkpoint.reading.checkpoint import Checkpoint, new_memory
from dtckpt.checkpoint.reading.tensor_info import TensorInfo
from dtckpt.checkpoint.restoring.plan import RestorePlan, new_names
from dtckpt.comm import host_memory
from dtckpt.comm.torch_device import device_of
from dtckpt.dtensor import DTensor
from dtckpt.errors import LayoutError, LayoutTypeError
from dtckpt.format import tree as trees
from dtckpt.layout.layout import UNSHARDED, Layout
from dtckpt.layout.mesh import Mesh
from dtckpt.layout.region import Region

LayoutChoice = Layout | Callable[[str, TensorInfo], Layout]
Layouts = Mapping[str, LayoutChoice] | Callable[[str, TensorInfo], Layout]
"""Layouts by tensor name or glob (first match wins), each a Layout or a function of (name, info); or one function."""


def meshes_of_layouts(mesh: Mesh | None, layouts: Layouts | None) -> set[Mesh]:
    """Return the meshes that new tensors may lie on, as far as they are known without calling functions of layouts."""
    meshes = set() if mesh is None else {mesh}
    if isinstance(layouts, Mapping):
        meshes |= {choice.mesh for choice in layouts.values() if isinstance(choice, Layout)}
    return meshes


def plan_new_tensors(
    checkpoint: Checkpoint, mesh: Mesh | None, layouts: Layouts | None, options: RestoreOptions
) -> RestorePlan:
    """Allocate every tensor of a checkpoint in its layout, and plan to fill it.

    Before any memory is taken, storage is asked whether it holds the elements that the manifest declares.

    Args:
        checkpoint: The checkpoint.
        mesh: As for `dtckpt.restore`.
        layouts: As for `dtckpt.restore`.
        options: See `RestoreOptions`.
    """
    names = new_names(checkpoint, options)
    structure = trees.rename(checkpoint.structure, names) if names else checkpoint.structure
    infos = dict(checkpoint.tensors)
    arrays, plain = set(trees.array_names(structure)), plain_names(checkpoint)
    chosen = {
        name: choose_layout(names.get(name, name), info, None if name in plain else mesh, layouts)
        for name, info in infos.items()
        if name not in arrays
    } | dict.fromkeys(arrays)
    checkpoint.validate_stored(
        (name, region) for name, layout in chosen.items() for region in _own_regions(infos[name].shape, layout)
    )
    tensors: dict[str, torch.Tensor] = {
        name: new_memory(name, infos[name].shape, infos[name].dtype)
        if layout is None
        else empty_dtensor(infos[name].shape, infos[name].dtype, layout)
        for name, layout in chosen.items()
    }
    leaves = [(name, as_leaf(tensor, name)) for name, tensor in tensors.items()]
    made = with_arrays(tensors, arrays)
    return RestorePlan(leaves, lambda: trees.build(structure, made.__getitem__), names)


def plain_names(checkpoint: Checkpoint) -> set[str]:
    """Return the names of the tensors that belong on no mesh: arrays of numpy, and what is of one client alone."""
    structure, infos = checkpoint.structure, checkpoint.tensors
    of_clients = (name for _, node in trees.per_client_nodes(structure) for name in trees.tensor_names(node))
    return {*trees.array_names(structure), *(name for name in of_clients if infos[name].layout is None)}


def _own_regions(shape: tuple[int, ...], layout: Layout | None) -> set[Region]:
    """Return the regions of a tensor that this client will hold."""
    if layout is None:
        return {Region.full(shape)}
    return {layout.region(device, shape) for device in layout.mesh.local_device_ids()}


def empty_dtensor(shape: tuple[int, ...], dtype: torch.dtype, layout: Layout) -> DTensor:
    """Allocate a DTensor of a global shape; its components are not initialized."""
    components = [
        host_memory.allocate(layout.region(device, shape).shape, dtype, device_of(name))
        for device, name in zip(layout.mesh.local_device_ids(), layout.mesh.local_devices(), strict=True)
    ]
    return DTensor(components, layout, shape, dtype)


def choose_layout(name: str, info: TensorInfo, mesh: Mesh | None, layouts: Layouts | None) -> Layout | None:
    """Return the layout that a tensor is restored into; None for a plain tensor.

    Raises:
        LayoutError: The chosen layout does not have the tensor's rank.
        LayoutTypeError: The choice is no Layout.
    """
    choice: Any = None
    if callable(layouts) and not isinstance(layouts, Mapping):
        choice = layouts
    elif layouts is not None:
        choice = layouts.get(name) or next(
            (chosen for pattern, chosen in layouts.items() if fnmatch.fnmatchcase(name, pattern)), None
        )
    if callable(choice):
        choice = choice(name, info)
    if choice is None:
        return None if mesh is None else kept_layout(info, mesh)
    if not isinstance(choice, Layout):
        raise LayoutTypeError(f"layout for tensor {name!r} must be a Layout; got {type(choice).__name__}")
    if choice.rank != len(info.shape):
        raise LayoutError(
            f"layout for tensor {name!r} does not fit; got rank {choice.rank}, expected {len(info.shape)} dims"
        )
    return choice


def kept_layout(info: TensorInfo, mesh: Mesh) -> Layout:
    """Return the saved sharding specs on another mesh, without the axes that this mesh lacks."""
    specs: list[str | tuple[str, ...]] = []
    for spec in info.layout.sharding_specs if info.layout else [UNSHARDED] * len(info.shape):
        axes = [axis for axis in ((spec,) if isinstance(spec, str) else spec) if axis in mesh]
        specs.append(tuple(axes) if axes else UNSHARDED)
    return Layout(specs, mesh)
