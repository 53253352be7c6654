"""`initialize_multi_client`: make the default process group of `torch.distributed`, and end it again.

If the environment names no store, client 0 opens a store for this attempt alone, and sends its address in a vote at a
barrier. So an attempt never finds keys of an earlier attempt.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dtckpt.comm import default_process_group
from dtckpt.comm.torch_private import TCPStore
from dtckpt.config import Config
from dtckpt.coordination.api import Coordination, Vote
from dtckpt.errors import CoordinationError, CoordinatorUnavailableError

REACH_TIMEOUT = timedelta(seconds=30)
"""Bound on the search for the store of client 0, which exists already."""
_LOOPBACK = "127.0.0.1"
_own: dist.ProcessGroup | None = None
"""The default process group, if this module has made it."""


def is_wanted() -> bool:
    """Whether there are several clients and no default process group connects them."""
    return Config.from_environ().num_clients > 1 and dist.is_available() and not dist.is_initialized()


def make_at_store() -> None:
    """Make the default process group at the store that the environment names. Collective, raises: as
    `default_process_group.init_process_group`.
    """
    global _own  # noqa: PLW0603  (one default group per process)
    default_process_group.init_process_group(_backend())
    _own = dist.group.WORLD


def make_through(coordination: Coordination, coordinator: str) -> None:
    """Make the default process group; client 0 sends the address of its store through ``coordination``.

    Collective: Over all clients; barriers ``process_group/address`` and ``process_group/reached``.

    Args:
        coordination: The connection to the coordinator.
        coordinator: The coordinator's address, ``host:port``.

    Raises:
        CoordinatorUnavailableError: A client cannot reach the store of client 0; all clients raise it.
        CoordinationError: The clients could not be connected.
        DtckptError: As `Coordination.barrier`.
    """
    global _own  # noqa: PLW0603  (one default group per process)
    config = Config.from_environ()
    store: TCPStore | None = None

    def offer() -> bytes:
        nonlocal store
        if config.client_id != 0:
            return b""
        store = _open_store(_LOOPBACK, 0, is_host=True)
        address = {"host": _own_host(config, coordinator), "port": store.port, "machine": _machine()}
        return json.dumps(address).encode()

    def reach() -> bytes:
        nonlocal store
        if store is None:
            is_near = told["machine"] == _machine() != ""
            store = _open_store(_LOOPBACK if is_near else told["host"], told["port"])
        return b""

    told = json.loads(_meet(coordination, "process_group/address", offer)[0])
    _meet(coordination, "process_group/reached", reach)
    assert store is not None  # noqa: S101  (opened just now)
    _own = default_process_group.make_default_group(store, coordination.member.attempt, config, _backend())


def _meet(coordination: Coordination, name: str, work: Callable[[], bytes]) -> Any:
    """Do one step, and come to a barrier with its result or its failure; return the results of all clients."""
    try:
        vote = Vote(payload=work())
    except CoordinationError as error:
        vote = Vote.of_error(error)
    return coordination.barrier(
        name, vote, timeout_s=default_process_group.TIMEOUT.total_seconds(), collect=True
    ).payloads


def _open_store(host: str, port: int, *, is_host: bool = False) -> TCPStore:
    try:
        return TCPStore(host, port, None, is_host, REACH_TIMEOUT, wait_for_workers=False)
    except (dist.DistError, RuntimeError) as error:
        raise CoordinatorUnavailableError(
            f"process group: the store of client 0 at {host}:{port} cannot be reached: {error}; open the network "
            "between the clients, or name a store by MASTER_ADDR and MASTER_PORT"
        ) from error


def _own_host(config: Config, coordinator: str) -> str:
    """Return the name or address under which other machines find this machine.

    The first choice is the host of the first address in ``DTENSOR_JOBS``, the second the address from which this client
    reaches the coordinator. If that is a loopback address, or unknown, the machine's name is used.
    """
    if config.jobs_text and (host := config.jobs[0].rpartition(":")[0]):
        return host.strip("[]")
    host, _, port = coordinator.rpartition(":")
    try:
        family, kind, _, _, address = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing; chooses the route
            own = str(probe.getsockname()[0])
    except (OSError, ValueError):
        return socket.gethostname()
    return socket.gethostname() if own.startswith("127.") or own == "::1" else own


def _machine() -> str:
    """Return a text that processes share if they have one loopback interface; empty: not known."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return f"{boot} {Path('/proc/self/ns/net').stat().st_ino}"
    except OSError:
        return ""


def _backend() -> str:
    """Return Gloo for the host, and NCCL for GPUs if there are any."""
    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"


def end() -> None:
    """Destroy the default process group, if this module has made it and it still exists. Idempotent."""
    global _own
    group, _own = _own, None
    if group is not None and group is dist.group.WORLD:
        dist.destroy_process_group()
