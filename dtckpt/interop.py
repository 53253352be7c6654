"""PyTorch's own DTensors and meshes, seen as ours and back: the only module that looks at ``torch.distributed.tensor``.

Its DTensors are never imported from here: an object can be one only if the program has imported them already.
"""

from __future__ import annotations

import sys
from typing import Any
from weakref import WeakKeyDictionary

import torch

from dtckpt import groups
from dtckpt.dtensor.device_mesh import KINDS, mesh_of_ranks
from dtckpt.errors import MeshError, MeshTypeError
from dtckpt.layout import Layout
from dtckpt.mesh import Mesh
from dtckpt.placement import Partial, Placement, Replicate, Shard, _StridedShard

_adopted: WeakKeyDictionary[Any, tuple[int | None, Mesh]] = WeakKeyDictionary()
"""What `adopt` has made of PyTorch's meshes, and the rank that this client had then."""


def is_torch_dtensor(value: object) -> bool:
    """Whether a value is a ``torch.distributed.tensor.DTensor``."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def layout_and_local(value: Any) -> tuple[Layout, torch.Tensor | None]:
    """Return the layout and the local component (None for a client outside the mesh) of a PyTorch DTensor.

    Raises:
        LayoutError: Its placements have no counterpart here.
    """
    mesh = mesh_of(value.device_mesh)
    layout = Layout.from_placements(mesh, [_placement(item) for item in value.placements], value.ndim)
    return layout, None if mesh.is_remote() else value.to_local().detach()


# --- meshes -------------------------------------------------------------------------------------------------------


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
    if known is not None and known[0] == groups.rank():
        return known[1]
    mesh = mesh_of(device_mesh)
    _adopted[device_mesh] = groups.rank(), mesh
    if mesh.is_remote() or not getattr(device_mesh, "_dim_group_names", None):  # the groups may never have been made
        return mesh
    for group in device_mesh.get_all_groups():
        groups.remember(group, mesh.device_type)
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


# --- placements ---------------------------------------------------------------------------------------------------


def _placement(placement: Any) -> Placement:
    if placement.is_replicate():
        return Replicate()
    if placement.is_partial():
        return Partial(placement.reduce_op)
    if type(placement).__name__ == "_StridedShard":
        return _StridedShard(placement.dim, split_factor=placement.split_factor)
    return Shard(placement.dim)
