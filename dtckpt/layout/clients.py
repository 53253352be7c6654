"""This client, the others, their devices, and meshes over them.

Everything is read from the environment at each call (see `dtckpt.config`); nothing is cached.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import numpy as np

from dtckpt.config import Config
from dtckpt.errors import ConfigError, DeviceNotFoundError, MeshError, MeshTypeError
from dtckpt.layout.device_names import DEVICE_KINDS, DeviceSpec
from dtckpt.layout.mesh import Mesh

MeshDims = Mapping[str, int] | Sequence[tuple[str, int]]
"""Axes of a mesh with their sizes, major first."""

_configured: dict[str, int] = {}


# --- clients ------------------------------------------------------------------------------------------------------


def client_id() -> int:
    """Return the position of this process among the clients."""
    return Config.from_environ().client_id


def num_clients() -> int:
    """Return the number of processes that work together."""
    return Config.from_environ().num_clients


def jobs() -> list[str]:
    """Return one entry per client, in the order of their ids; nothing for a client alone.

    These are the addresses of ``DTENSOR_JOBS``. Where other variables say how many clients there are, no addresses are
    known and the entries are full job names. `dtckpt.job_status` says which of them are there, and in which state.
    """
    return Config.from_environ().jobs


def job_name() -> str:
    """Return the name of the job.

    That is ``DTENSOR_JOB_NAME``, else ``localhost`` for one client alone, else ``DTCKPT_JOB``, else ``worker``.
    """
    return Config.from_environ().job_name


def full_job_name(task_id: int | None = None) -> str:
    """Return the name of a client's task, this one's unless another is given: ``worker/replica:0/task:1``.

    A coordinator registers the client under this name, and no client that calls the job otherwise.
    """
    config = Config.from_environ()
    task = config.client_id if task_id is None else task_id
    if config.num_clients == 1 and task != 0:
        raise ConfigError(f"task: got {task}, expected 0, since there is one client")
    return f"{config.job_name}/replica:0/task:{task}"


def heartbeat_enabled() -> bool:
    """Tell whether ``DTENSOR_ENABLE_HEARTBEAT`` is unset, ``true`` or ``1``."""
    return Config.from_environ().heartbeat_enabled


# --- devices ------------------------------------------------------------------------------------------------------


def device_name() -> str:
    """Return the name of this client's device for DTensors."""
    return f"/job:{full_job_name()}/device:CUSTOM:0"


def configure_virtual_devices(device_type: str, count: int) -> None:
    """Set how many devices of a kind this client has; virtual GPUs may share a card."""
    if not isinstance(count, int) or count < 0:
        raise ConfigError(f"virtual {device_type} devices: got {count!r}, expected an integer that is zero or greater")
    _configured[_kind(device_type)] = count


@contextmanager
def virtual_devices(**counts: int) -> Iterator[None]:
    """Set numbers of devices for the body of a with statement: ``with virtual_devices(CPU=4): ...``."""
    before = dict(_configured)
    try:
        for device_type, count in counts.items():
            configure_virtual_devices(device_type, count)
        yield
    finally:
        _configured.clear()
        _configured.update(before)


def num_local_devices(device_type: str) -> int:
    """Return how many devices of a kind this client has; one CPU unless `configure_virtual_devices` said otherwise."""
    return len(_local_indices(_kind(device_type), 0, Config.from_environ()))


def num_global_devices(device_type: str) -> int:
    """Return how many devices of a kind all clients have, each of them as many as this one."""
    return num_local_devices(device_type) * num_clients()


def local_devices(device_type: str, for_client_id: int | None = None) -> list[DeviceSpec]:
    """Return a client's devices of a kind, this client's unless another is given."""
    kind, config = _kind(device_type), Config.from_environ()
    task = config.client_id if for_client_id is None else for_client_id
    return [DeviceSpec(config.job_name, 0, task, kind, index) for index in _local_indices(kind, task, config)]


def _kind(device_type: str) -> str:
    kind = device_type.upper() if isinstance(device_type, str) else device_type
    if kind not in DEVICE_KINDS:
        raise ConfigError(f"device type: got {device_type!r}, expected one of {', '.join(DEVICE_KINDS)}")
    return kind


def _local_indices(kind: str, client: int, config: Config) -> range:
    """Return the indices of a client's devices.

    Clients that torchrun starts on one machine all see its cards, so each takes its share: card ``LOCAL_RANK`` when
    there is one card per client.
    """
    if kind in _configured:
        return range(_configured[kind])
    if kind != "GPU":
        return range(1 if kind == "CPU" else 0)
    cards, clients = _num_cards(), config.local_world_size
    if cards < clients or clients == 1:
        return range(cards)
    share = cards // clients
    first = client % clients * share
    return range(first, first + share)


def _num_cards() -> int:
    import torch

    return torch.cuda.device_count()


def initialize_tpu_system() -> None:
    """Make this client's TPU cores devices of the kind ``TPU``; works where ``torch_xla`` is installed and finds some.

    Raises:
        DeviceNotFoundError: There is no ``torch_xla``, or it finds no TPU.
    """
    configure_virtual_devices("TPU", _tpu_runtime().addressable_device_count())


def shutdown_tpu_system() -> None:
    """Forget the devices that `initialize_tpu_system` has found. Errors: as there."""
    _tpu_runtime()
    _configured.pop("TPU", None)


def _tpu_runtime() -> Any:
    try:
        runtime: Any = import_module("torch_xla.runtime")
        found = runtime.device_type()
    except (ImportError, RuntimeError) as error:
        raise DeviceNotFoundError(
            f"TPU system: got no working torch_xla ({error}), expected one; install torch_xla on a machine with TPUs"
        ) from error
    if found != "TPU":
        raise DeviceNotFoundError(f"TPU system: got {found} as device type of torch_xla, expected TPU; see PJRT_DEVICE")
    return runtime


# --- meshes -------------------------------------------------------------------------------------------------------


def create_mesh(
    mesh_dims: MeshDims | None = None,
    mesh_name: str = "",
    devices: Sequence[DeviceSpec | str] | None = None,
    device_type: str | None = None,
    use_xla_spmd: bool = False,
) -> Mesh:
    """Return a mesh of devices that all belong to this process.

    Args:
        mesh_dims: axes and sizes; a size of -1 for an only axis means all devices. Left out: one axis ``x``.
        mesh_name: name of the mesh.
        devices: names in mesh order; parts that they leave open are those of this client, replica 0.
        device_type: ``CPU`` (the default), ``GPU`` or ``TPU``; all local devices of it, unless ``devices`` are given.
        use_xla_spmd: a mark for TPU meshes.

    Raises:
        MeshError: the sizes do not fit the number of devices.

    >>> with virtual_devices(CPU=4):
    ...     create_mesh({"x": 2, "y": 2}).shape
    (2, 2)
    """
    config = Config.from_environ()
    client = config.client_id
    own = _devices(device_type, client, config) if devices is None else _completed(devices, device_type, client)
    axes = _axes([("x", -1)] if mesh_dims is None else mesh_dims)
    if len(axes) == 1 and axes[0][1] == -1:
        axes = [(axes[0][0], len(own))]
    return _mesh(axes, mesh_name, own, use_xla_spmd=use_xla_spmd)


def create_distributed_mesh(
    mesh_dims: MeshDims,
    mesh_name: str = "",
    local_devices: Sequence[DeviceSpec | str] | None = None,
    device_type: str | None = None,
    use_xla_spmd: bool = False,
) -> Mesh:
    """Return one mesh over the devices of all clients, each of which owns a run of consecutive ids.

    Communicates with nobody: every client calls it with the same axes and equally many local devices.

    Args:
        mesh_dims: axes and sizes, whose product is the number of local devices times the number of clients.
        mesh_name: name of the mesh.
        local_devices: names of this client's devices; all of ``device_type`` when left out.
        device_type: ``CPU`` (the default), ``GPU`` or ``TPU``.
        use_xla_spmd: a mark for TPU meshes.

    Raises:
        MeshError: the sizes do not fit the number of devices.
    """
    config = Config.from_environ()
    client, count = config.client_id, config.num_clients
    everyone: list[DeviceSpec] | None = None
    if local_devices is not None:
        own = _completed(local_devices, device_type, client)
    else:
        own = _devices(device_type, client, config)
        neighbours = {_local_indices(own[0].device_type or "", peer, config) for peer in range(config.local_world_size)}
        if len(neighbours) > 1:  # the names of one client's devices do not tell those of another
            everyone = [device for peer in range(count) for device in _devices(device_type, peer, config)]
    return _mesh(_axes(mesh_dims), mesh_name, own, client, count, everyone=everyone, use_xla_spmd=use_xla_spmd)


def abstract_mesh(axes: Mapping[str, int], name: str = "") -> Mesh:
    """Return a mesh of CPU devices that need not exist, for planning and offline work."""
    own = [DeviceSpec("localhost", 0, 0, "CPU", index) for index in range(math.prod(axes.values()))]
    return _mesh(_axes(axes), name, own)


def _mesh(
    axes: list[tuple[str, int]],
    name: str,
    own: Sequence[DeviceSpec],
    client: int = 0,
    count: int = 1,
    *,
    everyone: Sequence[DeviceSpec] | None = None,
    use_xla_spmd: bool = False,
) -> Mesh:
    total = len(own) * count
    if min(size for _, size in axes) < 1 or math.prod(size for _, size in axes) != total:
        raise MeshError(
            f"mesh {name!r}: got axes {dict(axes)}, expected sizes whose product is {total}: "
            f"{len(own)} local devices on each of {count} clients"
        )
    ids = np.arange(total).reshape([size for _, size in axes])
    local_ids = range(client * len(own), (client + 1) * len(own))
    return Mesh([axis for axis, _ in axes], ids, local_ids, own, name, everyone, use_xla_spmd)


def _devices(device_type: str | None, client: int, config: Config) -> list[DeviceSpec]:
    """Return a client's devices, of which there must be some."""
    kind = _kind(device_type or "CPU")
    found = [DeviceSpec(config.job_name, 0, client, kind, index) for index in _local_indices(kind, client, config)]
    if not found:
        raise MeshError(f"mesh: got no {kind} devices on client {client}, expected some; see configure_virtual_devices")
    return found


def _completed(devices: Sequence[DeviceSpec | str], device_type: str | None, task: int) -> list[DeviceSpec]:
    """Return given devices with the parts that they leave open."""
    job = job_name()
    specs = [device if isinstance(device, DeviceSpec) else DeviceSpec.parse(device) for device in devices]
    if not specs:
        raise MeshError("mesh: got an empty list of devices, expected at least one")
    kinds = sorted({(spec.device_type or "").upper() for spec in specs})
    if device_type is not None and kinds != [_kind(device_type)]:
        raise MeshError(f"mesh: got devices of type {', '.join(kinds)}, expected {device_type} as device_type says")
    return [spec.with_defaults(job=job, replica=0, task=task) for spec in specs]


def _axes(mesh_dims: MeshDims) -> list[tuple[str, int]]:
    try:
        pairs = mesh_dims.items() if isinstance(mesh_dims, Mapping) else mesh_dims
        axes = [(axis, operator.index(size)) for axis, size in pairs]
    except (TypeError, ValueError):
        raise MeshTypeError(f"mesh: got axes {mesh_dims!r}, expected a mapping or pairs of name and size") from None
    if not axes:
        raise MeshError("mesh: got no axes, expected at least one name with a size")
    return axes
