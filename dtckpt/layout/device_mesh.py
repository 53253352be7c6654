"""Meshes as PyTorch spells them: `init_device_mesh` and `DeviceMesh` over ranks, which are clients with one device."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from dtckpt.comm import process_groups
from dtckpt.comm.rendezvous import init_process_group
from dtckpt.config import Config
from dtckpt.errors import ConfigError, CoordinationError, MeshError, MeshTypeError, capped
from dtckpt.layout.clients import job_name
from dtckpt.layout.mesh import Mesh
from dtckpt.layout.mesh_validation import backends_of

KINDS = {"cpu": "CPU", "cuda": "GPU"}
"""Kinds of devices by PyTorch's names."""

BackendOverride = Mapping[int | str, Any] | Sequence[Any]
"""By axis, its position, or in order: name of a backend, its options, or a pair of both, as PyTorch takes them."""


def init_device_mesh(
    device_type: str,
    mesh_shape: Sequence[int],
    *,
    mesh_dim_names: Sequence[str] | None = None,
    backend_override: BackendOverride | None = None,
) -> Mesh:
    """Return the mesh of the first ranks, counted up in row-major order.

    Collective: Over all clients when there is no default process group yet, which is then made; else nothing is sent.

    Args:
        device_type: ``cpu`` or ``cuda``.
        mesh_shape: size of every axis.
        mesh_dim_names: name of every axis; ``dim_0``, ``dim_1`` and so on when left out.
        backend_override: backends of the process groups along some axes.

    Raises:
        MeshError: the arguments describe no mesh, or one of more ranks than there are.
    """
    try:
        shape = tuple(map(operator.index, mesh_shape))
    except TypeError:
        raise MeshTypeError(f"device mesh: got mesh_shape {mesh_shape!r}, expected a sequence of integers") from None
    if min(shape, default=0) < 1:
        raise MeshError(f"device mesh: got mesh_shape {shape}, expected at least one size, and each at least 1")
    names = _names(mesh_dim_names, len(shape), f"mesh_shape {shape}")
    return _over_ranks(device_type, np.arange(np.prod(shape)).reshape(shape), names, backend_override)


class _DeviceMeshType(type):
    """Calling the class makes a `Mesh`, and every `Mesh` counts as an instance."""

    def __call__(
        cls,
        device_type: str,
        mesh: object,
        *,
        mesh_dim_names: Sequence[str] | None = None,
        backend_override: BackendOverride | None = None,
    ) -> Mesh:
        ranks = _ranks(mesh)
        names = _names(mesh_dim_names, ranks.ndim, f"ranks of shape {ranks.shape}")
        return _over_ranks(device_type, ranks, names, backend_override)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, Mesh)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, Mesh)


class DeviceMesh(Mesh, metaclass=_DeviceMeshType):
    """PyTorch's spelling of `Mesh`: ``DeviceMesh(device_type, mesh, *, mesh_dim_names=None, backend_override=None)``.

    Collective: As `init_device_mesh`.

    Args:
        device_type: ``cpu`` or ``cuda``.
        mesh: ranks, in nested sequences, an array or a tensor; not all of the world's need to occur.
        mesh_dim_names: name of every axis; ``dim_0``, ``dim_1`` and so on when left out.
        backend_override: backends of the process groups along some axes.

    Raises:
        MeshError: the arguments describe no mesh, or name ranks that there are not.
    """

    @staticmethod
    def from_group(
        group: dist.ProcessGroup | Sequence[dist.ProcessGroup],
        device_type: str,
        mesh: object = None,
        *,
        mesh_dim_names: Sequence[str] | None = None,
    ) -> Mesh:
        """Return the mesh whose axes have the given process groups, which `Mesh.get_group` then returns.

        Args:
            group: the group of every axis that this client stands in.
            device_type: ``cpu`` or ``cuda``.
            mesh: ranks; may be left out if there is one group.
            mesh_dim_names: name of every axis.

        Raises:
            MeshError: the arguments describe no mesh, or one with other members along an axis than the group's.
        """
        given = [group] if isinstance(group, dist.ProcessGroup) else list(group)
        if mesh is None and len(given) != 1:
            raise MeshError(f"device mesh: got {len(given)} groups without mesh, expected one group or the ranks")
        ranks = _ranks(dist.get_process_group_ranks(given[0]) if mesh is None else mesh)
        made = _over_ranks(device_type, ranks, _names(mesh_dim_names, ranks.ndim, f"ranks of shape {ranks.shape}"))
        require_groups(made, given)
        for item in given:
            process_groups.register_group(item, device_type)
        return made


def require_groups(mesh: Mesh, given: Sequence[dist.ProcessGroup]) -> None:
    """Refuse groups that are not those of the lines along a mesh's axes that this client stands in.

    Raises:
        MeshError: with the axis and both sets of members.
    """
    if len(given) != mesh.ndim:
        raise MeshError(f"device mesh: got {len(given)} groups for {mesh.ndim} axes, expected as many")
    for axis, group in zip(mesh.dim_names, given, strict=True):
        members, expected = sorted(dist.get_process_group_ranks(group)), mesh.clients_along(axis)
        if members != list(expected):
            raise MeshError(
                f"device mesh: got a group of ranks {capped(members)} for axis {axis!r}, "
                f"expected ranks {capped(expected)}"
            )


def mesh_of_ranks(device_type: str, ranks: npt.NDArray[np.integer[Any]], names: Sequence[str]) -> Mesh:
    """Return the mesh with one device of each rank, as this client sees it; equal on every client.

    Device ids count the ranks row-major; which client owns a device stands in its name.
    """
    kind, job, own = KINDS[device_type], job_name(), _own_rank()
    card = _cards()
    listed: list[int] = ranks.ravel().tolist()
    devices = [
        f"/job:{job}/replica:0/task:{rank}/device:{kind}:{card(rank) if kind == 'GPU' else 0}" for rank in listed
    ]
    mine = [offset for offset, rank in enumerate(listed) if rank == own]
    ids = np.arange(len(listed)).reshape(ranks.shape)
    return Mesh(names, ids, mine, [devices[offset] for offset in mine], "", devices)


# --- arguments ----------------------------------------------------------------------------------------------------


def _over_ranks(
    device_type: str,
    ranks: npt.NDArray[np.integer[Any]],
    names: Sequence[str],
    backend_override: BackendOverride | None = None,
) -> Mesh:
    """Check what is left, from the arguments alone first, so that every client refuses what one refuses."""
    _require_device_type(device_type)
    listed = ranks.ravel()
    if len(np.unique(listed)) != len(listed):
        found, counts = np.unique(listed, return_counts=True)
        raise MeshError(f"device mesh: got ranks {capped(found[counts > 1])} more than once, expected each once")
    if listed.min() < 0:
        raise MeshError(f"device mesh: got rank {listed.min()}, expected ranks from 0")
    backends = backends_of(backend_override, names)
    mesh_of_ranks(device_type, ranks, names)
    world = _world_size(device_type)
    if len(listed) > world or listed.max() >= world:
        raise MeshError(
            f"device mesh: got {len(listed)} ranks up to {listed.max()}, expected no more than the {world} of the "
            "world; start as many clients, or use create_mesh for several devices of one client"
        )
    mesh = mesh_of_ranks(device_type, ranks, names)
    mesh.backends.update(backends)
    _choose_card(mesh)
    return mesh


def _require_device_type(device_type: object) -> None:
    if not isinstance(device_type, str):
        raise MeshTypeError(f"device mesh: got device type {device_type!r}, expected str")
    if device_type not in KINDS:
        hint = " without an index, which every client finds itself" if ":" in device_type else ""
        raise MeshError(f"device mesh: got device type {device_type!r}, expected one of {', '.join(KINDS)}{hint}")


def _names(names: Sequence[str] | None, num_axes: int, what: str) -> tuple[str, ...]:
    if names is None:
        return tuple(f"dim_{axis}" for axis in range(num_axes))
    if isinstance(names, str) or not isinstance(names, Sequence):
        raise MeshTypeError(f"device mesh: got mesh_dim_names {names!r}, expected a sequence of names")
    if len(names) != num_axes:
        raise MeshError(
            f"device mesh: got {len(names)} mesh_dim_names {tuple(names)} for {what}, expected one per axis"
        )
    return tuple(names)


def _ranks(mesh: object) -> npt.NDArray[np.integer[Any]]:
    try:
        found = np.asarray(mesh.detach().cpu().numpy() if isinstance(mesh, torch.Tensor) else mesh)
    except ValueError:
        raise MeshError(f"device mesh: got ranks {mesh!r:.200} of uneven lengths, expected a grid") from None
    if found.size and not np.issubdtype(found.dtype, np.integer):
        raise MeshTypeError(f"device mesh: got ranks {mesh!r:.200}, expected integers")
    if not found.size or not found.ndim:
        raise MeshError(f"device mesh: got ranks {mesh!r:.200}, expected a list of at least one, or nested lists")
    return found.astype(np.int64)


# --- the world ----------------------------------------------------------------------------------------------------


def _own_rank() -> int:
    rank = process_groups.rank()
    return Config.from_environ().client_id if rank is None else rank


def _world_size(device_type: str) -> int:
    """Return how many ranks there are; makes the default process group if there is none, unless for one client."""
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


def _cards() -> Callable[[int], int]:
    """Return the function from ranks to indices of cards: `create_distributed_mesh` chooses the same ones."""
    config, count = Config.from_environ(), torch.cuda.device_count()
    is_told = config.is_torchrun and config.local_world_size_text is not None
    neighbours = config.local_world_size if is_told else max(count, 1)
    share = max(count // neighbours, 1)
    return lambda rank: rank % neighbours * share % max(count, 1)


def _choose_card(mesh: Mesh) -> None:
    """Make this client's card the current one, as PyTorch does, unless the program has chosen one already."""
    own = mesh.local_devices()
    if mesh.device_type == "cuda" and own and torch.cuda.is_available() and not _has_chosen_card():
        torch.cuda.set_device(int(own[0].rpartition(":")[2]))


def _has_chosen_card() -> bool:
    is_initialized: Callable[[], bool] = torch.cuda.is_initialized
    return is_initialized()
