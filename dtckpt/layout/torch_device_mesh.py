"""Converts PyTorch's ``DeviceMesh`` to `Mesh` and back."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from dtckpt.comm import process_groups
from dtckpt.errors import MeshError, MeshTypeError
from dtckpt.layout.device_mesh import KINDS, mesh_of_ranks
from dtckpt.layout.mesh import Mesh

_adopted: WeakKeyDictionary[Any, tuple[int | None, Mesh]] = WeakKeyDictionary()
"""What `adopt` has returned for PyTorch's meshes, and the rank that this client had then."""


def mesh_of(device_mesh: Any) -> Mesh:
    """Return the `Mesh` of a PyTorch ``DeviceMesh``; ranks are clients with one device each.

    Device ids count the mesh's devices row-major; which client owns a device stands in its name. Axes without names
    are called ``dim_0`` and so on.

    Raises:
        MeshError: This is no ``DeviceMesh``, or one of devices that no mesh here has.
    """
    _require_device_mesh(device_mesh)
    if device_mesh.device_type not in KINDS:
        raise MeshError(f"mesh: got a DeviceMesh on {device_mesh.device_type}, expected one of {', '.join(KINDS)}")
    ranks = device_mesh.mesh.cpu().numpy()
    names = device_mesh.mesh_dim_names or tuple(f"dim_{axis}" for axis in range(ranks.ndim))
    return mesh_of_ranks(device_mesh.device_type, ranks, names)


def adopt(device_mesh: Any) -> Mesh:
    """Return `mesh_of`, and have `Mesh.get_group` return the groups of the PyTorch mesh. All its clients call it.

    Done once for a mesh, as long as this client has its rank.
    """
    _require_device_mesh(device_mesh)
    known = _adopted.get(device_mesh)
    if known is not None and known[0] == process_groups.rank():
        return known[1]
    mesh = mesh_of(device_mesh)
    _adopted[device_mesh] = process_groups.rank(), mesh
    if mesh.is_remote() or not getattr(device_mesh, "_dim_group_names", None):  # the groups may never have been made
        return mesh
    for group in device_mesh.get_all_groups():
        process_groups.register_group(group, mesh.device_type)
    return mesh


def _require_device_mesh(value: object) -> None:
    from torch.distributed.device_mesh import DeviceMesh

    if not isinstance(value, DeviceMesh):
        raise MeshTypeError(f"mesh: got {type(value).__name__}, expected Mesh or a DeviceMesh of PyTorch")


def device_mesh_of(mesh: Mesh) -> Any:
    """Return the PyTorch ``DeviceMesh`` of a mesh whose clients own one device each, over the same process groups.

    Collective: As `Mesh.get_all_groups`; a client without a device calls nothing and gets a mesh without groups.

    Raises:
        MeshError: A client owns several devices, or there is no grid of devices.
        CoordinationError: No default process group spans the clients.
    """
    from torch.distributed.device_mesh import DeviceMesh

    if not mesh.device_ids or mesh.num_clients != mesh.size():
        raise MeshError(
            f"PyTorch mesh: got {mesh.size()} devices of {mesh.num_clients} clients, expected one device per client"
        )
    if mesh.is_remote():
        remote = DeviceMesh(mesh.device_type, mesh.mesh, mesh_dim_names=mesh.mesh_dim_names, _init_backend=False)
        remote._dim_group_names = []
        return remote
    return DeviceMesh.from_group(mesh.get_all_groups(), mesh.device_type, mesh.mesh, mesh_dim_names=mesh.mesh_dim_names)
