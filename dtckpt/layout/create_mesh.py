"""Create meshes: of one client's devices, of all clients' devices, or of devices that need not exist."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence

import numpy as np

from dtckpt.config import Config
from dtckpt.errors import MeshError, MeshTypeError
from dtckpt.layout.clients import device_kind_of, job_name, local_device_indices
from dtckpt.layout.device_names import DeviceSpec
from dtckpt.layout.mesh import Mesh

MeshDims = Mapping[str, int] | Sequence[tuple[str, int]]
"""Axes of a mesh with their sizes, major first."""


def create_mesh(
    mesh_dims: MeshDims | None = None,
    mesh_name: str = "",
    devices: Sequence[DeviceSpec | str] | None = None,
    device_type: str | None = None,
    use_xla_spmd: bool = False,
) -> Mesh:
    """Return a mesh of devices that all belong to this process.

    Args:
        mesh_dims: Axes and sizes, major first. If there is one axis, its size may be -1: all devices. Default: one axis
            ``x`` of all devices.
        mesh_name: Name of the mesh.
        devices: Names in mesh order. Job, replica and task may be left out; they are then this client's. Default: all
            local devices of ``device_type``.
        device_type: ``CPU`` (the default), ``GPU`` or ``TPU``.
        use_xla_spmd: A mark for TPU meshes.

    Raises:
        MeshError: The sizes do not fit the number of devices.

    >>> from dtckpt.layout.clients import virtual_devices
    >>> with virtual_devices(CPU=4):
    ...     create_mesh({"x": 2, "y": 2}).shape
    (2, 2)
    """
    config = Config.from_environ()
    client = config.client_id
    own = _devices_of(client, device_type, config) if devices is None else _full_specs(devices, device_type, client)
    axes = _parse_axes([("x", -1)] if mesh_dims is None else mesh_dims)
    if len(axes) == 1 and axes[0][1] == -1:
        axes = [(axes[0][0], len(own))]
    return _make_mesh(axes, mesh_name, own, use_xla_spmd=use_xla_spmd)


def create_distributed_mesh(
    mesh_dims: MeshDims,
    mesh_name: str = "",
    local_devices: Sequence[DeviceSpec | str] | None = None,
    device_type: str | None = None,
    use_xla_spmd: bool = False,
) -> Mesh:
    """Return one mesh over the devices of all clients; each client owns a run of consecutive device ids.

    Does not communicate. Every client calls it with the same axes and equally many local devices.

    Args:
        mesh_dims: Axes and sizes, major first; their product is the number of local devices times the number of
            clients.
        mesh_name: Name of the mesh.
        local_devices: Names of this client's devices; default: all of ``device_type``.
        device_type: ``CPU`` (the default), ``GPU`` or ``TPU``.
        use_xla_spmd: A mark for TPU meshes.

    Raises:
        MeshError: The sizes do not fit the number of devices.
    """
    config = Config.from_environ()
    client, count = config.client_id, config.num_clients
    all_devices: list[DeviceSpec] | None = None
    if local_devices is not None:
        own = _full_specs(local_devices, device_type, client)
    else:
        own = _devices_of(client, device_type, config)
        kind = own[0].device_type or ""
        # Clients that share a machine's GPUs have different indices. Then the mesh must name all devices, because it
        # cannot derive another client's names from this client's.
        if len({local_device_indices(kind, peer, config) for peer in range(config.local_world_size)}) > 1:
            all_devices = [device for peer in range(count) for device in _devices_of(peer, device_type, config)]
    axes = _parse_axes(mesh_dims)
    return _make_mesh(axes, mesh_name, own, client, count, all_devices=all_devices, use_xla_spmd=use_xla_spmd)


def abstract_mesh(axes: Mapping[str, int], name: str = "", *, devices_per_client: int | None = None) -> Mesh:
    """Return a mesh of CPU devices that need not exist, for planning and offline work.

    Args:
        axes: Axes and sizes, major first.
        name: Name of the mesh.
        devices_per_client: How many consecutive devices a client owns; default: one client owns all. The mesh is seen
            from client 0.

    Raises:
        MeshError: The devices cannot be divided evenly among clients.
    """
    total = math.prod(axes.values())
    each = total if devices_per_client is None else devices_per_client
    own = [DeviceSpec("localhost", 0, 0, "CPU", index) for index in range(each)]
    return _make_mesh(_parse_axes(axes), name, own, count=max(1, total // max(1, each)))


def _make_mesh(
    axes: list[tuple[str, int]],
    name: str,
    own: Sequence[DeviceSpec],
    client: int = 0,
    count: int = 1,
    *,
    all_devices: Sequence[DeviceSpec] | None = None,
    use_xla_spmd: bool = False,
) -> Mesh:
    """Return the mesh of ``count`` clients with as many devices as ``own``; ``client`` is this client.

    Args:
        axes: Names and sizes, major first.
        name: Name of the mesh.
        own: This client's devices.
        client: This client's position among the clients of the mesh.
        count: Number of clients of the mesh.
        all_devices: Devices of all clients, if they cannot be derived from this client's.
        use_xla_spmd: A mark for TPU meshes.
    """
    total = len(own) * count
    if min(size for _, size in axes) < 1 or math.prod(size for _, size in axes) != total:
        raise MeshError(
            f"mesh {name!r}: got axes {dict(axes)}, expected sizes whose product is {total}: "
            f"{len(own)} local devices on each of {count} clients"
        )
    ids = np.arange(total).reshape([size for _, size in axes])
    local_ids = range(client * len(own), (client + 1) * len(own))
    return Mesh([axis for axis, _ in axes], ids, local_ids, own, name, all_devices, use_xla_spmd)


def _devices_of(client: int, device_type: str | None, config: Config) -> list[DeviceSpec]:
    """Return a client's devices of a type, CPU by default; refuse a client without any."""
    kind = device_kind_of(device_type or "CPU")
    indices = local_device_indices(kind, client, config)
    if not indices:
        raise MeshError(f"mesh: got no {kind} devices on client {client}, expected some; see configure_virtual_devices")
    return [DeviceSpec(config.job_name, 0, client, kind, index) for index in indices]


def _full_specs(devices: Sequence[DeviceSpec | str], device_type: str | None, task: int) -> list[DeviceSpec]:
    """Parse device names, fill in the job, replica and task that they leave open, and check their type."""
    job = job_name()
    specs = [device if isinstance(device, DeviceSpec) else DeviceSpec.parse(device) for device in devices]
    if not specs:
        raise MeshError("mesh: got an empty list of devices, expected at least one")
    kinds = sorted({(spec.device_type or "").upper() for spec in specs})
    if device_type is not None and kinds != [device_kind_of(device_type)]:
        raise MeshError(f"mesh: got devices of type {', '.join(kinds)}, expected {device_type} as device_type says")
    return [spec.with_defaults(job=job, replica=0, task=task) for spec in specs]


def _parse_axes(mesh_dims: MeshDims) -> list[tuple[str, int]]:
    try:
        pairs = mesh_dims.items() if isinstance(mesh_dims, Mapping) else mesh_dims
        axes = [(axis, operator.index(size)) for axis, size in pairs]
    except (TypeError, ValueError):
        raise MeshTypeError(f"mesh: got axes {mesh_dims!r}, expected a mapping or pairs of name and size") from None
    if not axes:
        raise MeshError("mesh: got no axes, expected at least one name with a size")
    return axes
