"""The default process group: `init_process_group` for jobs that torchrun restarts, and the meeting of their clients.

torchrun starts the new processes of a restarted job with the old store, which belongs to its agent. The store still
holds the addresses of the killed processes, and the new processes would call these in vain. So the clients first agree
on a name for their attempt, and write all their keys below this name. torchrun's count of restarts cannot be the name,
because each agent counts only the restarts that its own processes caused.

The keys of a meeting:

``leader``          written by client 0: a random name for the attempt
``joined/<name>/i`` written by client i: the least number that this client accepts for the attempt
``begun/<name>``    written by client 0 when all clients have joined: the attempt's number
``attempt``         written by client 0 at the same time: the number of the latest attempt at this store

Invariant: a client joins under a name only if the attempt of that name has not begun. An attempt begins only when all
clients have joined, so an attempt that begins after this client has joined includes this client. Of the keys of an
earlier attempt, only ``leader`` can mislead, until the new client 0 overwrites it. Clients that have joined under the
name of a killed leader join again under the new name.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from dtckpt.comm.torch_private import PrefixStore, Store, forget_meshes, get_default_store
from dtckpt.config import Config
from dtckpt.errors import (
    BarrierTimeoutError,
    ConfigError,
    CoordinationError,
    CoordinatorUnavailableError,
    capped,
)

TIMEOUT = timedelta(minutes=5)
"""Default bound on the wait for the other clients."""
POLL_S = 0.01
RESTART_ADVICE = (
    "torchrun has restarted this job, and torch.distributed.init_process_group finds what the killed attempt left in "
    "the store; call dtckpt.init_process_group instead, on every client"
)

_attempts: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()
"""By default process group that `init_process_group` has made: the job's attempt."""


def init_process_group(
    backend: str | None = None,
    *,
    timeout: timedelta | None = None,
    pg_options: Any | None = None,
    device_id: torch.device | int | None = None,
) -> None:
    """Make the default process group of `torch.distributed`, also in a job that torchrun has restarted.

    `torch.distributed.init_process_group` hangs or fails there, because it finds the addresses of the killed processes.

    Collective: Over all clients, which find each other at the store that ``MASTER_ADDR`` and ``MASTER_PORT`` name, else
    at the first address of ``DTENSOR_JOBS`` (see `open_store`).

    Blocks: On the slowest client, at most ``timeout``, by default 5 minutes.

    Args:
        backend: As for PyTorch: ``gloo``, ``nccl``, ``cpu:gloo,cuda:nccl``; by default the backends that fit the
            devices.
        timeout: Bound on the group's collectives, and on finding the other clients; default as for PyTorch.
        pg_options: As for PyTorch.
        device_id: As for PyTorch.

    Raises:
        ConfigError: There is a default process group already, an environment variable is missing, or there is no such
            backend.
        CoordinatorUnavailableError: The store cannot be reached.
        BarrierTimeoutError: Clients did not come in time; its ``missing`` has their ids.
        CoordinationError: The clients came, but could not be connected.
    """
    if dist.is_initialized():
        raise ConfigError(
            "process group: got a default one already, expected none; call dtckpt.init_process_group once, instead of "
            "torch.distributed.init_process_group"
        )
    config = Config.from_environ()
    store = open_store(config, timeout or TIMEOUT)
    own_store, attempt = agree_on_attempt(store, "process_group", config, timeout or TIMEOUT)
    # The timeout as the caller gave it: None leaves every backend its own timeout, which is not `TIMEOUT`.
    make_default_group(own_store, attempt, config, backend, timeout=timeout, pg_options=pg_options, device_id=device_id)


def make_default_group(
    store: Store, attempt: int, config: Config, backend: str | None = None, **options: Any
) -> dist.ProcessGroup:
    """Make the default process group at a store without keys of earlier attempts; return the group.

    Collective: Over all clients.

    Args:
        store: The store.
        attempt: The job's attempt.
        config: This client's id, and the number of clients.
        backend: As for PyTorch.
        options: As for PyTorch.

    Raises:
        ConfigError: There is no such backend.
        CoordinationError: The clients could not be connected.
    """
    forget_meshes()  # of an earlier group of this process
    try:
        dist.init_process_group(backend, store=store, rank=config.client_id, world_size=config.num_clients, **options)
    except ValueError as error:
        raise ConfigError(f"process group: {error}") from error
    except RuntimeError as error:
        raise CoordinationError(
            f"process group of {config.num_clients} clients, attempt {attempt}: connecting them failed: {error}"
        ) from error
    assert dist.group.WORLD is not None  # noqa: S101  (made just now)
    _attempts[dist.group.WORLD] = attempt
    return dist.group.WORLD


def attempt_of_default_group() -> int | None:
    """Return the job's attempt to which the default process group belongs, None if another function made the group."""
    world = dist.group.WORLD if dist.is_available() else None
    return None if world is None else _attempts.get(world)


def is_stale() -> bool:
    """Whether torchrun has restarted this client, but `init_process_group` did not make its default process group."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0" and attempt_of_default_group() is None


@contextmanager
def restart_advice() -> Iterator[None]:
    """Add `RESTART_ADVICE` to a `CoordinationError` of the body if a restart of the job may have caused it."""
    try:
        yield
    except CoordinationError as error:
        if is_stale():
            error.message += f"; {RESTART_ADVICE}"
        raise


def key_suffix() -> str:
    """Return a suffix for keys in the default group's store, unique to this attempt.

    Empty unless `is_stale`: the store of a group that `init_process_group` made belongs to one attempt.
    """
    return f"_attempt_{Config.from_environ().attempt}" if is_stale() else ""


def open_store(config: Config, timeout: timedelta = TIMEOUT) -> Store:
    """Return the store at which clients meet.

    The variables ``MASTER_ADDR`` and ``MASTER_PORT`` name it: the store of torchrun's agent, or of client 0. Else
    client 0 makes a store at its own address and port, the first in ``DTENSOR_JOBS``. This library uses that port for
    nothing else.

    Raises:
        ConfigError: Neither names an address, or the port is no port number.
        CoordinatorUnavailableError: The store cannot be reached.
    """
    url, address = "env://", f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    if not all(os.environ.get(name) for name in ("MASTER_ADDR", "MASTER_PORT")):
        address = config.jobs[0] if config.jobs_text else ""
        url = f"tcp://{address}"
        if not _is_address(url):
            name = "MASTER_PORT" if os.environ.get("MASTER_ADDR") else "MASTER_ADDR"
            raise ConfigError(
                f"{config.num_clients} clients have no place to meet: got no {name}, expected the address of a store; "
                "run under torchrun, or set MASTER_ADDR and MASTER_PORT, or DTENSOR_JOBS=host:port,host:port,...; a "
                "coordinator is named by DTCKPT_COORDINATOR=host:port"
            )
    store: Store
    try:
        store, _, _ = next(rendezvous(url, config.client_id, config.num_clients, timeout=timeout))
    except ValueError as error:
        raise ConfigError(f"{config.num_clients} clients have no place to meet: {error}; see MASTER_PORT") from error
    except dist.DistError as error:
        raise CoordinatorUnavailableError(f"the store at {address} cannot be reached: {error}") from error
    return store


def _is_address(url: str) -> bool:
    """Whether a URL has a host and a port."""
    parts = urlsplit(url)
    try:
        return bool(parts.hostname and parts.port)
    except ValueError:
        return False


def agree_on_attempt(
    store: Store, topic: str, config: Config, timeout: timedelta = TIMEOUT, call: str = "dtckpt.init_process_group"
) -> tuple[Store, int]:
    """Wait for the other clients, and agree with them on a number for this attempt of the job.

    Collective: Over all clients.

    Args:
        store: The store at which the clients meet.
        topic: The purpose of the meeting; meetings of different topics at one store are independent.
        config: This client's id, the number of clients, and the least number that this client accepts.
        timeout: Bound on the wait for the others.
        call: The function by which all clients come, for errors.

    Returns:
        A store whose keys belong to this attempt alone, and the attempt's number. This number exceeds the numbers of
        earlier attempts at this store, and is at least the number in each client's environment.

    Raises:
        BarrierTimeoutError: Clients did not come in time.
        CoordinatorUnavailableError: The store cannot be reached.
    """
    # The keys of an attempt lie under its random name, where no killed process has ever written.
    topic_store = PrefixStore(f"dtckpt/{topic}", store)
    wait = _Wait(timeout.total_seconds(), call)
    try:
        name = _lead(topic_store, config, wait) if config.client_id == 0 else _join(topic_store, config, wait)
        attempt = int(topic_store.get(f"begun/{name}"))
        topic_store.delete_key(f"joined/{name}/{config.client_id}")  # the leader, its only reader, has read it
    except dist.DistError as error:
        raise CoordinatorUnavailableError(f"the store where clients meet cannot be reached: {error}") from error
    return PrefixStore(name, topic_store), attempt


def agree_anew(least: int, config: Config, timeout: timedelta, call: str) -> int:
    """Agree with the clients of the default process group on an attempt, at the store of the group; return it.

    Collective: Over all clients of the group.

    Args:
        least: The least number that this client accepts.
        config: This client's id, and the number of clients.
        timeout: Bound on the wait for the others.
        call: As for `agree_on_attempt`.

    Raises: As `agree_on_attempt`.
    """
    config = replace(config, attempt_text=str(least))
    return agree_on_attempt(get_default_store(), "rejoin", config, timeout, call)[1]


class _Wait:
    """A wait with a deadline.

    Args:
        timeout_s: From now on.
        call: The function by which all clients come, for errors.
    """

    def __init__(self, timeout_s: float, call: str) -> None:
        self._timeout_s, self._call = timeout_s, call
        self._deadline = time.monotonic() + timeout_s

    def until(self, is_over: Callable[[], bool], missing: Callable[[], list[int]]) -> None:
        """Poll until ``is_over()``.

        Raises:
            BarrierTimeoutError: The deadline passes before; the clients that ``missing()`` returns did not come.
        """
        # The store's own wait would not notice a change of the leader, and would not name the missing clients.
        while not is_over():
            if time.monotonic() > self._deadline:
                clients = missing()
                raise BarrierTimeoutError(
                    f"process group: clients {capped(clients)} did not come within {self._timeout_s:g} s; every client "
                    f"of the job must call {self._call}",
                    missing=clients,
                )
            time.sleep(POLL_S)


def _lead(store: Store, config: Config, wait: _Wait) -> str:
    """Publish a new name, wait until all clients have joined under it, and begin the attempt; return the name."""
    # Random, so that this store has no keys of an earlier attempt below this name.
    name = secrets.token_hex(8)
    keys = [f"joined/{name}/{client}" for client in range(config.num_clients)]
    store.set(keys[0], str(config.attempt))
    store.set("leader", name)
    wait.until(lambda: store.check(keys), lambda: _missing(store, name, config))
    # Higher than all earlier attempts at this store, and at least the number in each client's environment.
    last = int(store.get("attempt")) if store.check(["attempt"]) else -1
    attempt = max(last + 1, *map(int, store.multi_get(keys)))
    store.set("attempt", str(attempt))
    store.set(f"begun/{name}", str(attempt))  # last: it releases the clients that have joined
    return name


def _join(store: Store, config: Config, wait: _Wait) -> str:
    """Join under the leader's name, again whenever it changes, until an attempt has begun; return its name.

    The first names may come from earlier attempts, whose leaders were killed.
    """
    joined = ""

    def has_begun() -> bool:
        nonlocal joined
        # In this order: a leader that begins an attempt may lead the next attempt right away. If the name has changed
        # and this client's attempt has not begun, then it will never begin.
        name = store.get("leader").decode() if store.check(["leader"]) else joined
        if joined and store.check([f"begun/{joined}"]):
            return True
        # If the attempt of an unknown name has begun, it began without this client, so it is an earlier one.
        if name != joined and not store.check([f"begun/{name}"]):
            store.set(f"joined/{name}/{config.client_id}", str(config.attempt))
            joined = name
        return False

    # Without a leader's name nothing tells who else has come.
    wait.until(has_begun, lambda: _missing(store, joined, config) if joined else [0])
    return joined


def _missing(store: Store, name: str, config: Config) -> list[int]:
    """Return the clients that have not joined under a name; the leader if all have, as it has not begun the attempt."""
    missing = [client for client in range(config.num_clients) if not store.check([f"joined/{name}/{client}"])]
    return missing or [0]
