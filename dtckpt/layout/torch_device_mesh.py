"""Conversion between PyTorch's ``DeviceMesh`` and `Mesh`; the process groups are shared."""

from __future__ import annotations

import weakref
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from dtckpt.comm import process_groups
from dtckpt.errors import MeshError, MeshTypeError
from dtckpt.layout.device_mesh import KINDS, mesh_of_ranks
from dtckpt.layout.mesh import Mesh

_meshes: WeakKeyDictionary[Any, tuple[Any, Mesh]] = WeakKeyDictionary()
"""By PyTorch mesh: a reference to the default process group when `mesh_of` converted it, and the result."""
_adopted: WeakKeyDictionary[Any, dict[Mesh, Any]] = WeakKeyDictionary()
"""By default process group and mesh: the PyTorch mesh whose groups it has, the first that there was."""


def mesh_of(device_mesh: Any) -> Mesh:
    """Return the `Mesh` of a PyTorch ``DeviceMesh``, whose ranks become clients with one device each.

    Device ids count the devices in row-major order; a device's name tells which client owns it. Axes without names are
    called ``dim_0``, ``dim_1`` and so on.

    Raises:
        MeshError: The value is no ``DeviceMesh``, or its device type is neither ``cpu`` nor ``cuda``.
    """
    _require_device_mesh(device_mesh)
    world = None if dist.group.WORLD is None else weakref.ref(dist.group.WORLD)
    cached = _meshes.get(device_mesh)
    # Without a default group, which client this is may change at any time.
    if cached is not None and world is not None and cached[0] == world:
        return cached[1]
    if device_mesh.device_type not in KINDS:
        raise MeshError(f"mesh: got a DeviceMesh on {device_mesh.device_type}, expected one of {', '.join(KINDS)}")
    ranks = device_mesh.mesh.cpu().numpy()
    names = device_mesh.mesh_dim_names or tuple(f"dim_{axis}" for axis in range(ranks.ndim))
    mesh = mesh_of_ranks(device_mesh.device_type, ranks, names)
    _meshes[device_mesh] = world, mesh
    return mesh


def adopt(device_mesh: Any) -> Mesh:
    """Return `mesh_of`, and have `Mesh.get_group` return the groups of the PyTorch mesh.

    Collective: All clients of the mesh call it, though nothing is sent. A mesh is converted once for each default
    process group.
    """
    mesh = mesh_of(device_mesh)
    if mesh.is_remote() or not getattr(device_mesh, "_dim_group_names", None):  # a mesh may have no groups
        return mesh
    adopted = _adopted.setdefault(dist.group.WORLD, {})
    if mesh not in adopted:
        for group in device_mesh.get_all_groups():
            process_groups.register_group(group, mesh.device_type)
        adopted[mesh] = device_mesh
    return mesh


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
    adopted = _adopted.setdefault(dist.group.WORLD, {})
    if mesh not in adopted:
        adopted[mesh] = DeviceMesh.from_group(groups, mesh.device_type, mesh.mesh, mesh_dim_names=mesh.mesh_dim_names)
    return adopted[mesh]
