"""Conversion between PyTorch's ``DeviceMesh`` and `Mesh`; the process groups are shared."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from dtckpt.comm import process_groups
from dtckpt.comm.torch_private import root_mesh_of
from dtckpt.errors import MeshError, MeshTypeError
from dtckpt.layout.clients import job_name
from dtckpt.layout.device_mesh import KINDS, mesh_of_ranks
from dtckpt.layout.mesh import Mesh

_converted: WeakKeyDictionary[Any, tuple[tuple[Any, ...], Mesh]] = WeakKeyDictionary()
"""By PyTorch mesh: what else the result of `mesh_of` depends on, and the result."""
_adopted: tuple[Any, dict[Mesh, Any]] = None, {}
"""The default process group; and by mesh, the PyTorch mesh whose groups it has, the first that there was."""


def mesh_of(device_mesh: Any) -> Mesh:
    """Return the `Mesh` of a PyTorch ``DeviceMesh``, whose ranks become clients with one device each.

    Device ids count the devices in row-major order; a device's name tells which client owns it. Axes without names are
    called ``dim_0``, ``dim_1`` and so on. A slice of a mesh knows its root (`Mesh.root_offsets`).

    Raises:
        MeshError: The value is no ``DeviceMesh``, or its device type is neither ``cpu`` nor ``cuda``.
    """
    _require_device_mesh(device_mesh)
    root = root_mesh_of(device_mesh)
    # A model has thousands of tensors on one mesh. Equal meshes may be slices of different roots.
    key = process_groups.rank(), job_name(), None if root is device_mesh else root
    kept = _converted.get(device_mesh)
    if kept is not None and kept[0] == key:
        return kept[1]
    mesh = _convert(device_mesh)
    if root is not device_mesh:
        offset_of = {rank: offset for offset, rank in enumerate(root.mesh.flatten().tolist())}
        offsets = [offset_of[rank] for rank in device_mesh.mesh.flatten().tolist()]
        # Written past the frozen dataclass, as slices of a `Mesh` have it.
        vars(mesh)["root_offsets"] = mesh_of(root), offsets
    _converted[device_mesh] = key, mesh
    return mesh


def _convert(device_mesh: Any) -> Mesh:
    if device_mesh.device_type not in KINDS:
        raise MeshError(f"mesh: got a DeviceMesh on {device_mesh.device_type}, expected one of {', '.join(KINDS)}")
    ranks = device_mesh.mesh.cpu().numpy()
    names = device_mesh.mesh_dim_names or tuple(f"dim_{axis}" for axis in range(ranks.ndim))
    return mesh_of_ranks(device_mesh.device_type, ranks, names)


def adopt(device_mesh: Any) -> Mesh:
    """Return `mesh_of`, and have `Mesh.get_group` return the groups of the PyTorch mesh.

    Collective: All clients of the mesh call it, though nothing is sent. A mesh is converted once for each default
    process group.
    """
    mesh = mesh_of(device_mesh)
    if mesh.is_remote() or not getattr(device_mesh, "_dim_group_names", None):  # a mesh may have no groups
        return mesh
    adopted = _adopted_meshes()
    if mesh not in adopted:
        for group in device_mesh.get_all_groups():
            process_groups.register_group(group, mesh.device_type)
        adopted[mesh] = device_mesh
    return mesh


def _adopted_meshes() -> dict[Mesh, Any]:
    """Return the adopted meshes of the present default group, and drop those of an earlier one.

    A PyTorch mesh refers to its groups. In a dictionary with groups as weak keys it would keep its own key alive, and
    each group has threads.
    """
    global _adopted  # noqa: PLW0603  (as the default group is)
    if _adopted[0] is not dist.group.WORLD:
        _adopted = dist.group.WORLD, {}
    return _adopted[1]


def _require_device_mesh(value: object) -> None:
    if not isinstance(value, DeviceMesh):
        raise MeshTypeError(f"mesh: got {type(value).__name__}, expected Mesh or a DeviceMesh of PyTorch")


def device_mesh_of(mesh: Mesh) -> Any:
    """Return the PyTorch ``DeviceMesh`` of a mesh, with the same process groups; every client owns one device.

    It is the mesh that `adopt` converted, if it was one, or else a new one, which is kept for the next call.

    Collective: As `Mesh.get_all_groups`. A client without a device in the mesh does not communicate, and gets a mesh
    without groups.

    Raises:
        MeshError: A client owns several devices, or there is no grid of devices.
        CoordinationError: No default process group spans the clients.
    """
    if not mesh.device_ids or mesh.num_clients != mesh.size():
        raise MeshError(
            f"PyTorch mesh: got {mesh.size()} devices of {mesh.num_clients} clients, expected one device per client"
        )
    if mesh.is_remote():
        remote = DeviceMesh(mesh.device_type, mesh.mesh, mesh_dim_names=mesh.mesh_dim_names, _init_backend=False)
        remote._dim_group_names = []
        return remote
    groups = mesh.get_all_groups()
    adopted = _adopted_meshes()
    if mesh not in adopted:
        adopted[mesh] = DeviceMesh.from_group(groups, mesh.device_type, mesh.mesh, mesh_dim_names=mesh.mesh_dim_names)
    return adopted[mesh]
