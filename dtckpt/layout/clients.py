"""Clients and their devices: ids and names of the processes of a job, numbers and names of their CPUs, GPUs and TPUs.

Every function reads the environment at each call (see `dtckpt.config`); nothing is cached. `dtckpt.layout.create_mesh`
makes meshes of these devices.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from dtckpt.config import Config
from dtckpt.errors import ConfigError, DeviceNotFoundError
from dtckpt.layout.device_names import DEVICE_KINDS, DeviceSpec

_virtual_devices: dict[str, int] = {}
"""Number of this client's devices by kind, where `configure_virtual_devices` has set it."""


# --- clients ------------------------------------------------------------------------------------------------------


def client_id() -> int:
    """Return this process's id among the clients of the job, from 0."""
    return Config.from_environ().client_id


def num_clients() -> int:
    """Return the number of clients: the processes of the job that work together."""
    return Config.from_environ().num_clients


def jobs() -> list[str]:
    """Return one entry per client, in the order of their ids.

    The entries are the addresses in ``DTENSOR_JOBS``. Other variables have the number of clients but no addresses. Then
    the entries are full job names, and the list of a single client is empty. `dtckpt.job_status` returns all clients
    with their states.
    """
    return Config.from_environ().jobs


def job_name() -> str:
    """Return the name of the job.

    The name is ``DTENSOR_JOB_NAME``, else ``localhost`` for a single client, else ``DTCKPT_JOB``, else ``worker``.
    """
    return Config.from_environ().job_name


def full_job_name(task_id: int | None = None) -> str:
    """Return a client's task name, such as ``worker/replica:0/task:1``; the coordinator registers it under this name.

    Args:
        task_id: The client; default: this client.

    Raises:
        ConfigError: There is one client, and ``task_id`` is not 0.
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
    """Return the name of this client's DTensor device, which stands for all its devices, as in TensorFlow."""
    return f"/job:{full_job_name()}/device:CUSTOM:0"


def configure_virtual_devices(device_type: str, count: int) -> None:
    """Set the number of this client's devices of a kind; several virtual GPUs may share one physical GPU.

    Args:
        device_type: ``CPU``, ``GPU`` or ``TPU``, in any case.
        count: Number of devices, zero or greater.

    Raises:
        ConfigError: There is no such kind, or the count is no such integer.
    """
    if not isinstance(count, int) or count < 0:
        raise ConfigError(f"virtual {device_type} devices: got {count!r}, expected an integer that is zero or greater")
    _virtual_devices[device_kind_of(device_type)] = count


@contextmanager
def virtual_devices(**counts: int) -> Iterator[None]:
    """Configure virtual devices for the body of a with statement: ``with virtual_devices(CPU=4): ...``."""
    before = dict(_virtual_devices)
    try:
        for device_type, count in counts.items():
            configure_virtual_devices(device_type, count)
        yield
    finally:
        _virtual_devices.clear()
        _virtual_devices.update(before)


def num_local_devices(device_type: str) -> int:
    """Return the number of this client's devices of a kind.

    `configure_virtual_devices` sets the number; default: one CPU, the client's share of the GPUs, no TPU. An unknown
    kind has no devices, as in TensorFlow.
    """
    if isinstance(device_type, str) and device_type.upper() not in DEVICE_KINDS:
        return 0
    return len(local_device_indices(device_kind_of(device_type), 0, Config.from_environ()))


def num_global_devices(device_type: str) -> int:
    """Return the number of all clients' devices of a kind, assuming as many on every client as on this client."""
    return num_local_devices(device_type) * num_clients()


def local_devices(device_type: str, for_client_id: int | None = None) -> list[DeviceSpec]:
    """Return a client's devices of a kind.

    Args:
        device_type: ``CPU``, ``GPU`` or ``TPU``, in any case.
        for_client_id: The client; default: this one.
    """
    kind, config = device_kind_of(device_type), Config.from_environ()
    task = config.client_id if for_client_id is None else for_client_id
    return [DeviceSpec(config.job_name, 0, task, kind, index) for index in local_device_indices(kind, task, config)]


def device_kind_of(device_type: str) -> str:
    """Return the kind ``CPU``, ``GPU`` or ``TPU`` of a device type in any case.

    Raises:
        ConfigError: There is no such kind.
    """
    kind = device_type.upper() if isinstance(device_type, str) else device_type
    if kind not in DEVICE_KINDS:
        raise ConfigError(f"device type: got {device_type!r}, expected one of {', '.join(DEVICE_KINDS)}")
    return kind


def local_device_indices(kind: str, client: int, config: Config) -> range:
    """Return the indices of a client's devices of a kind.

    All clients that torchrun starts on one machine see all its GPUs, so each takes an equal share of consecutive
    GPUs. With one GPU per client that is GPU ``LOCAL_RANK``. With fewer GPUs than clients, all clients use all.
    """
    if kind in _virtual_devices:
        return range(_virtual_devices[kind])
    if kind != "GPU":
        return range(1 if kind == "CPU" else 0)
    gpus, clients = _num_gpus(), config.local_world_size
    if gpus < clients or clients == 1:
        return range(gpus)
    share = gpus // clients
    first = client % clients * share
    return range(first, first + share)


def _num_gpus() -> int:
    import torch  # here, because meshes and layouts of CPU devices work without torch, whose import takes seconds

    return torch.cuda.device_count()


def initialize_tpu_system(
    device_type: str | None = None,
    enable_coordination_service: bool = True,
    num_logical_cpu_devices: int | None = None,
    experimental_reset_context: bool = False,
    experimental_enable_megcore: bool = False,
) -> str:
    """Make this client's TPU cores its devices of kind ``TPU``. Needs ``torch_xla`` and a TPU.

    Args:
        device_type: ``TPU`` in any case, or None.
        enable_coordination_service: Accepted as in TensorFlow, and ignored: `initialize_multi_client` connects clients.
        num_logical_cpu_devices: The number of this client's CPU devices; default: as it is.
        experimental_reset_context: Accepted as in TensorFlow, and ignored.
        experimental_enable_megcore: As before.

    Returns:
        ``TPU``.

    Raises:
        ConfigError: ``device_type`` is another kind, or the number is no positive integer.
        DeviceNotFoundError: There is no ``torch_xla``, or it finds no TPU.
    """
    del enable_coordination_service, experimental_reset_context, experimental_enable_megcore
    if device_type is not None and device_kind_of(device_type) != "TPU":
        raise ConfigError(f"initialize_tpu_system: got device type {device_type!r}, expected 'TPU' or None")
    count = _tpu_runtime().addressable_device_count()
    if num_logical_cpu_devices is not None:
        configure_virtual_devices("CPU", num_logical_cpu_devices)
    configure_virtual_devices("TPU", count)
    return "TPU"


def shutdown_tpu_system() -> None:
    """Remove the devices that `initialize_tpu_system` has added. Raises: as there."""
    _tpu_runtime()
    _virtual_devices.pop("TPU", None)


def _tpu_runtime() -> Any:
    """Return the module ``torch_xla.runtime``, if it drives a TPU."""
    try:
        runtime: Any = import_module("torch_xla.runtime")
        device_type = runtime.device_type()
    except (ImportError, RuntimeError) as error:
        raise DeviceNotFoundError(
            f"TPU system: got no working torch_xla ({error}), expected one; install torch_xla on a machine with TPUs"
        ) from error
    if device_type != "TPU":
        raise DeviceNotFoundError(
            f"TPU system: got {device_type} as device type of torch_xla, expected TPU; see PJRT_DEVICE"
        )
    return runtime
