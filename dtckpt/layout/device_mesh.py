"""PyTorch's meshes: `init_device_mesh` and `DeviceMesh` make a `Mesh` over ranks (clients with one device each).

`mesh_of`, `adopt` and `device_mesh_of` convert between PyTorch's own ``DeviceMesh`` and `Mesh`; the process groups are
shared.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh as PyTorchMesh

from dtckpt.comm import process_groups
from dtckpt.comm.default_process_group import init_process_group
from dtckpt.comm.torch_private import root_mesh_of
from dtckpt.config import Config
from dtckpt.errors import ConfigError, CoordinationError, MeshError, MeshTypeError, capped
from dtckpt.layout.clients import job_name
from dtckpt.layout.mesh import Mesh, get_default_mesh
from dtckpt.layout.mesh_validation import parse_backend_override

KINDS = {"cpu": "CPU", "cuda": "GPU"}
"""Device kinds of meshes by PyTorch's device types."""

MeshLike = Mesh | PyTorchMesh
"""A mesh, of this library or of PyTorch."""

BackendOverride = Mapping[int | str, Any] | Sequence[Any]
"""By axis, by position, or in order of the axes: a backend's name, its options, or a pair of both, as in PyTorch."""


def init_device_mesh(
    device_type: str,
    mesh_shape: Sequence[int],
    *,
    mesh_dim_names: Sequence[str] | None = None,
    backend_override: BackendOverride | None = None,
) -> Mesh:
    """Return the mesh of the ranks from 0, in row-major order.

    Collective: Over all clients if there is no default process group yet: the call makes the group. Otherwise local.

    Args:
        device_type: ``cpu`` or ``cuda``.
        mesh_shape: Size of every axis.
        mesh_dim_names: Name of every axis; default: ``dim_0``, ``dim_1`` and so on.
        backend_override: Backends of the process groups along some axes.

    Raises:
        MeshError: The arguments describe no mesh, or a mesh with more ranks than there are.
    """
    try:
        shape = tuple(map(operator.index, mesh_shape))
    except TypeError:
        raise MeshTypeError(f"device mesh: got mesh_shape {mesh_shape!r}, expected a sequence of integers") from None
    if min(shape, default=0) < 1:
        raise MeshError(f"device mesh: got mesh_shape {shape}, expected at least one size, and each at least 1")
    names = _parse_names(mesh_dim_names, len(shape), f"mesh_shape {shape}")
    return _make_mesh(device_type, np.arange(np.prod(shape)).reshape(shape), names, backend_override)


class _DeviceMeshType(type):
    """Metaclass of `DeviceMesh`: a call of the class makes a `Mesh`, and every `Mesh` is an instance of the class."""

    def __call__(
        cls,
        device_type: str,
        mesh: object,
        *,
        mesh_dim_names: Sequence[str] | None = None,
        backend_override: BackendOverride | None = None,
    ) -> Mesh:
        ranks = _parse_ranks(mesh)
        names = _parse_names(mesh_dim_names, ranks.ndim, f"ranks of shape {ranks.shape}")
        return _make_mesh(device_type, ranks, names, backend_override)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, Mesh)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, Mesh)


class DeviceMesh(Mesh, metaclass=_DeviceMeshType):
    """PyTorch's signature for `Mesh`: ``DeviceMesh(device_type, mesh, *, mesh_dim_names=None, backend_override=None)``.

    Collective: As `init_device_mesh`.

    Args:
        device_type: ``cpu`` or ``cuda``.
        mesh: Ranks, not necessarily all, as nested sequences, an array or a tensor of the mesh's shape.
        mesh_dim_names: Name of every axis; default: ``dim_0``, ``dim_1`` and so on.
        backend_override: Backends of the process groups along some axes.

    Raises:
        MeshError: The arguments describe no mesh, or a rank does not exist.
    """

    @staticmethod
    def from_group(
        group: dist.ProcessGroup | Sequence[dist.ProcessGroup],
        device_type: str,
        mesh: object = None,
        *,
        mesh_dim_names: Sequence[str] | None = None,
    ) -> Mesh:
        """Return the mesh with the given process groups along its axes; `Mesh.get_group` returns them.

        Args:
            group: For every axis, this client's group along it; or one group.
            device_type: ``cpu`` or ``cuda``.
            mesh: Ranks, of the mesh's shape; default with one group: its ranks.
            mesh_dim_names: Name of every axis.

        Raises:
            MeshError: The arguments describe no mesh, or a group has other members than the mesh along its axis.
        """
        groups = [group] if isinstance(group, dist.ProcessGroup) else list(group)
        if mesh is None and len(groups) != 1:
            raise MeshError(f"device mesh: got {len(groups)} groups without mesh, expected one group or the ranks")
        ranks = _parse_ranks(dist.get_process_group_ranks(groups[0]) if mesh is None else mesh)
        names = _parse_names(mesh_dim_names, ranks.ndim, f"ranks of shape {ranks.shape}")
        new_mesh = _make_mesh(device_type, ranks, names)
        validate_groups(new_mesh, groups)
        for item in groups:
            process_groups.register_group(item, device_type)
        return new_mesh


def validate_groups(mesh: Mesh, groups: Sequence[dist.ProcessGroup]) -> None:
    """Refuse groups whose members are not the clients along a mesh's axes at this client's position.

    Raises:
        MeshError: The number of groups, or the members of one, differ; the message has the axis and both sets.
    """
    if len(groups) != mesh.ndim:
        raise MeshError(f"device mesh: got {len(groups)} groups for {mesh.ndim} axes, expected as many")
    for axis, group in zip(mesh.dim_names, groups, strict=True):
        members, expected = sorted(dist.get_process_group_ranks(group)), mesh.clients_along(axis)
        if members != list(expected):
            raise MeshError(
                f"device mesh: got a group of ranks {capped(members)} for axis {axis!r}, "
                f"expected ranks {capped(expected)}"
            )


def mesh_of_ranks(
    device_type: str, ranks: npt.NDArray[np.integer[Any]], names: Sequence[str], own: int | None = None
) -> Mesh:
    """Return the mesh with one device of each rank, as one client sees it; equal for every client.

    Device ids count the ranks in row-major order. A device's name contains its client.

    Args:
        device_type: ``cpu`` or ``cuda``.
        ranks: Array of the mesh's shape.
        names: Names of the axes.
        own: The client; default: this one.
    """
    kind, job, own = KINDS[device_type], job_name(), _own_rank() if own is None else own
    gpu_of = _gpu_function()
    flat: list[int] = ranks.ravel().tolist()
    devices = [
        f"/job:{job}/replica:0/task:{rank}/device:{kind}:{gpu_of(rank) if kind == 'GPU' else 0}" for rank in flat
    ]
    mine = [offset for offset, rank in enumerate(flat) if rank == own]
    ids = np.arange(len(flat)).reshape(ranks.shape)
    return Mesh(names, ids, mine, [devices[offset] for offset in mine], "", devices)


# --- arguments ----------------------------------------------------------------------------------------------------


def _make_mesh(
    device_type: str,
    ranks: npt.NDArray[np.integer[Any]],
    names: Sequence[str],
    backend_override: BackendOverride | None = None,
) -> Mesh:
    """Return the mesh of an array of ranks, after the remaining checks.

    The checks that depend on the arguments alone come first, before `_world_size` may communicate: then all clients
    refuse the same arguments, and no client waits for another.
    """
    _validate_device_type(device_type)
    flat = ranks.ravel()
    distinct, counts = np.unique(flat, return_counts=True)
    if len(distinct) != len(flat):
        raise MeshError(f"device mesh: got ranks {capped(distinct[counts > 1])} more than once, expected each once")
    if flat.min() < 0:
        raise MeshError(f"device mesh: got rank {flat.min()}, expected ranks from 0")
    backends = parse_backend_override(backend_override, names)
    mesh_of_ranks(device_type, ranks, names)  # refuses names that no mesh can have
    world = _world_size(device_type)
    if len(flat) > world or flat.max() >= world:
        raise MeshError(
            f"device mesh: got {len(flat)} ranks up to {flat.max()}, expected no more than the {world} of the "
            "world; start as many clients, or use create_mesh for several devices of one client"
        )
    mesh = mesh_of_ranks(device_type, ranks, names)
    mesh.backends.update(backends)
    _choose_gpu(mesh)
    return mesh


def _validate_device_type(device_type: object) -> None:
    if not isinstance(device_type, str):
        raise MeshTypeError(f"device mesh: got device type {device_type!r}, expected str")
    if device_type not in KINDS:
        hint = " without an index, which every client finds itself" if ":" in device_type else ""
        raise MeshError(f"device mesh: got device type {device_type!r}, expected one of {', '.join(KINDS)}{hint}")


def _parse_names(names: Sequence[str] | None, num_axes: int, what: str) -> tuple[str, ...]:
    if names is None:
        return tuple(f"dim_{axis}" for axis in range(num_axes))
    if isinstance(names, str) or not isinstance(names, Sequence):
        raise MeshTypeError(f"device mesh: got mesh_dim_names {names!r}, expected a sequence of names")
    if len(names) != num_axes:
        raise MeshError(
            f"device mesh: got {len(names)} mesh_dim_names {tuple(names)} for {what}, expected one per axis"
        )
    return tuple(names)


def _parse_ranks(mesh: object) -> npt.NDArray[np.integer[Any]]:
    try:
        ranks = np.asarray(mesh.detach().cpu().numpy() if isinstance(mesh, torch.Tensor) else mesh)
    except ValueError:
        raise MeshError(f"device mesh: got ranks {mesh!r:.200} of uneven lengths, expected a grid") from None
    if ranks.size and not np.issubdtype(ranks.dtype, np.integer):
        raise MeshTypeError(f"device mesh: got ranks {mesh!r:.200}, expected integers")
    if not ranks.size or not ranks.ndim:
        raise MeshError(f"device mesh: got ranks {mesh!r:.200}, expected a list of at least one, or nested lists")
    return ranks.astype(np.int64)


# --- the world ----------------------------------------------------------------------------------------------------


def _own_rank() -> int:
    rank = process_groups.rank()
    return Config.from_environ().client_id if rank is None else rank


def _world_size(device_type: str) -> int:
    """Return the number of ranks; make the default process group if there is none.

    A single client that torchrun did not start needs no group.
    """
    if process_groups.rank() is None:
        config = Config.from_environ()
        if config.num_clients == 1 and not config.is_torchrun:
            return 1
        try:
            init_process_group(None if torch.cuda.is_available() else "gloo")
        except (ConfigError, CoordinationError) as error:
            raise MeshError(
                f"device mesh on {device_type}: got no default process group, and none could be made ({error}); "
                "expected torchrun's variables, or a call of dtckpt.init_process_group before"
            ) from error
    return dist.get_world_size()


def _gpu_function() -> Callable[[int], int]:
    """Return the function from ranks to indices of GPUs; `create_distributed_mesh` chooses the same GPUs."""
    config, num_gpus = Config.from_environ(), torch.cuda.device_count()
    is_local_size_set = config.is_torchrun and config.local_world_size_text is not None
    local_size = config.local_world_size if is_local_size_set else max(num_gpus, 1)
    share = max(num_gpus // local_size, 1)
    return lambda rank: rank % local_size * share % max(num_gpus, 1)


def _choose_gpu(mesh: Mesh) -> None:
    """Make this client's GPU the current one, as PyTorch does, unless the program has chosen one already."""
    own = mesh.local_devices()
    if mesh.device_type == "cuda" and own and torch.cuda.is_available() and not _has_chosen_gpu():
        torch.cuda.set_device(int(own[0].rpartition(":")[2]))


def _has_chosen_gpu() -> bool:
    is_initialized: Callable[[], bool] = torch.cuda.is_initialized
    return is_initialized()


# --- conversion from and to PyTorch's class --------------------------------------------------------------------------

_converted: WeakKeyDictionary[Any, tuple[tuple[Any, ...], Mesh]] = WeakKeyDictionary()
"""By PyTorch mesh, the other inputs of `mesh_of` and its result."""
_adopted: tuple[Any, dict[Mesh, Any]] = None, {}
"""The default process group; and by mesh, the first PyTorch mesh whose groups the mesh has."""


def mesh_of(device_mesh: Any) -> Mesh:
    """Return the `Mesh` of a PyTorch ``DeviceMesh``, whose ranks become clients with one device each.

    Device ids count the devices in row-major order. A device's name contains its client. Axes without names are called
    ``dim_0``, ``dim_1`` and so on. A slice of a mesh knows its root (`Mesh.root_offsets`). This client is the rank that
    it was when the ``DeviceMesh`` was made: the default process group may be another one by now.

    Raises:
        MeshError: The value is no ``DeviceMesh``, or its device type is neither ``cpu`` nor ``cuda``.
    """
    _require_device_mesh(device_mesh)
    root = root_mesh_of(device_mesh)
    # A model has thousands of tensors on one mesh. Equal meshes may be slices of different roots.
    key = _rank_in(device_mesh), job_name(), None if root is device_mesh else root
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


def _rank_in(device_mesh: Any) -> int:
    """Return this client's rank as a PyTorch mesh knows it; -1 if the mesh has no device of this client."""
    coordinate = device_mesh.get_coordinate()
    return -1 if coordinate is None else int(device_mesh.mesh[tuple(coordinate)])


def _convert(device_mesh: Any) -> Mesh:
    if device_mesh.device_type not in KINDS:
        raise MeshError(f"mesh: got a DeviceMesh on {device_mesh.device_type}, expected one of {', '.join(KINDS)}")
    ranks = device_mesh.mesh.cpu().numpy()
    names = device_mesh.mesh_dim_names or tuple(f"dim_{axis}" for axis in range(ranks.ndim))
    return mesh_of_ranks(device_mesh.device_type, ranks, names, _rank_in(device_mesh))


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
    """Return the adopted meshes of the present default group, and drop the meshes of an earlier group.

    A PyTorch mesh refers to its groups. As a value in a dictionary with groups as weak keys, the mesh would keep its
    own key alive, and with it the threads of the group.
    """
    global _adopted  # noqa: PLW0603  (as the default group is)
    if _adopted[0] is not dist.group.WORLD:
        _adopted = dist.group.WORLD, {}
    return _adopted[1]


def _require_device_mesh(value: object) -> None:
    if not isinstance(value, PyTorchMesh):
        raise MeshTypeError(f"mesh: got {type(value).__name__}, expected Mesh or a DeviceMesh of PyTorch")


def device_mesh_of(mesh: Mesh) -> Any:
    """Return the PyTorch ``DeviceMesh`` of a mesh, with the same process groups; every client owns one device.

    If `adopt` made this mesh from a ``DeviceMesh``, the result is that ``DeviceMesh``. Otherwise it is a new
    ``DeviceMesh``, which is kept for the next call.

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
        remote = PyTorchMesh(mesh.device_type, mesh.mesh, mesh_dim_names=mesh.mesh_dim_names, _init_backend=False)
        remote._dim_group_names = []
        return remote
    groups = mesh.get_all_groups()
    adopted = _adopted_meshes()
    if mesh not in adopted:
        adopted[mesh] = PyTorchMesh.from_group(groups, mesh.device_type, mesh.mesh, mesh_dim_names=mesh.mesh_dim_names)
    return adopted[mesh]


def as_mesh(mesh: MeshLike) -> Mesh:
    """Return a mesh as it is, and the `Mesh` of a PyTorch ``DeviceMesh``.

    Raises:
        MeshTypeError: The argument is neither.
    """
    return mesh if isinstance(mesh, Mesh) else adopt(mesh)


def require_mesh(device_mesh: MeshLike | None) -> Mesh:
    """Return a mesh as a `Mesh`; for None, the default mesh, from the innermost ``with mesh:`` block.

    Args:
        device_mesh: A `Mesh`, PyTorch's ``DeviceMesh``, or None.

    Raises:
        MeshError: There is no default mesh.
        MeshTypeError: The argument is no mesh.
    """
    mesh = get_default_mesh() if device_mesh is None else as_mesh(device_mesh)
    if mesh is None:
        raise MeshError("no mesh was given and no mesh is active; pass device_mesh, or use run_on(mesh)")
    return mesh
