"""Rendezvous: where the clients of one attempt of a job find each other, and nothing that an earlier attempt left.

torchrun restarts a job at the store of its agent, which still holds what the killed processes wrote: their addresses,
which the new ones would call in vain. So the clients first agree on a name for their attempt, and keep everything
below it. torchrun's count of restarts cannot be this name: every agent counts those only that its own processes caused.

The keys of a rendezvous, of which the first is all that an earlier attempt can leave in the way:

``leader``          a random name that client 0 has drawn for the attempt
``begun/<name>``    written by client 0 when all clients have joined: the attempt's number
``joined/<name>/i`` written by client i: the least number that the attempt may have for it

A client joins under a name only if nothing has begun under it. Without this client nothing can begin, so whatever
begins later has begun with it; and the name of a leader that was killed is replaced by that of the next one.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from dtckpt.config import Config
from dtckpt.errors import (
    BarrierTimeoutError,
    ConfigError,
    CoordinationError,
    CoordinatorUnavailableError,
    capped,
)

TIMEOUT = timedelta(minutes=5)
"""How long clients look for each other, unless they say."""
POLL_S = 0.01
ADVICE = (
    "torchrun has restarted this job, and torch.distributed.init_process_group finds what the killed attempt left in "
    "the store; call dtckpt.init_process_group instead, on every client"
)

_attempts: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()
"""The attempts of default process groups that were made here."""


def init_process_group(
    backend: str | None = None,
    *,
    timeout: timedelta | None = None,
    pg_options: Any | None = None,
    device_id: torch.device | int | None = None,
) -> None:
    """Make the default process group of `torch.distributed`, also in a job that torchrun has restarted.

    `torch.distributed.init_process_group` hangs or fails there, as it finds the addresses of the killed processes.

    Collective: Over all clients, which find each other at the store that ``MASTER_ADDR`` and ``MASTER_PORT`` name.

    Blocks: On the slowest client, at most ``timeout``, by default 5 minutes.

    Args:
        backend: As for PyTorch: ``gloo``, ``nccl``, ``cpu:gloo,cuda:nccl``; default: what fits the devices.
        timeout: Of the group's collectives; default as for PyTorch.
        pg_options: As for PyTorch.
        device_id: As for PyTorch.

    Raises:
        ConfigError: There is a default process group already, a variable is missing, or there is no such backend.
        CoordinatorUnavailableError: The store cannot be reached.
        BarrierTimeoutError: Clients did not come in time; ``missing``: which.
        CoordinationError: The clients came, but could not be connected.
    """
    if dist.is_initialized():
        raise ConfigError(
            "process group: got a default one already, expected none; call dtckpt.init_process_group once, instead of "
            "torch.distributed.init_process_group"
        )
    config = Config.from_environ()
    store = open_store(config, timeout or TIMEOUT)
    own, attempt = meet(store, "process_group", config, timeout or TIMEOUT)
    try:
        dist.init_process_group(
            backend,
            timeout=timeout,
            store=own,
            rank=config.client_id,
            world_size=config.num_clients,
            pg_options=pg_options,
            device_id=device_id,
        )
    except ValueError as error:
        raise ConfigError(f"process group: {error}") from error
    except RuntimeError as error:
        raise CoordinationError(
            f"process group of {config.num_clients} clients, attempt {attempt}: connecting them failed: {error}"
        ) from error
    assert dist.group.WORLD is not None  # noqa: S101  (just made)
    _attempts[dist.group.WORLD] = attempt


def attempt_of_default_group() -> int | None:
    """Return which attempt of its job the default process group belongs to; None if another function made it."""
    world = dist.group.WORLD if dist.is_available() else None
    return None if world is None else _attempts.get(world)


def is_stale() -> bool:
    """Whether torchrun has restarted this client, and the default process group was made as if it had not."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0" and attempt_of_default_group() is None


@contextmanager
def advised() -> Iterator[None]:
    """Have errors of clients that do not find each other name the cure, if there may be one."""
    try:
        yield
    except CoordinationError as error:
        if is_stale():
            error.message += f"; {ADVICE}"
        raise


def suffix() -> str:
    """Return what tells keys of this attempt from those of others in the store of the default process group."""
    return f"_attempt_{Config.from_environ().attempt}" if is_stale() else ""


def open_store(config: Config, timeout: timedelta = TIMEOUT) -> Store:
    """Return the store that ``MASTER_ADDR`` and ``MASTER_PORT`` name: that of torchrun's agent, or of client 0.

    Raises:
        ConfigError: One of them is missing, or the port is none.
        CoordinatorUnavailableError: The store cannot be reached.
    """
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not os.environ.get(name):
            raise ConfigError(
                f"{config.num_clients} clients have no place to meet: got no {name}, expected the address of a store; "
                "run under torchrun, or set MASTER_ADDR and MASTER_PORT; a coordinator is named by "
                "DTCKPT_COORDINATOR=host:port"
            )
    store: Store
    try:
        store, _, _ = next(rendezvous("env://", config.client_id, config.num_clients, timeout=timeout))
    except ValueError as error:
        raise ConfigError(f"{config.num_clients} clients have no place to meet: {error}; see MASTER_PORT") from error
    except dist.DistError as error:
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise CoordinatorUnavailableError(f"the store at {address} cannot be reached: {error}") from error
    return store


def meet(store: Store, topic: str, config: Config, timeout: timedelta = TIMEOUT) -> tuple[Store, int]:
    """Agree with the other clients on an attempt.

    Collective: Over all clients.

    Args:
        store: Where they meet.
        topic: What they meet for; a meeting of one topic takes no part in those of others.
        config: Who this client is.
        timeout: Longest wait for the others.

    Returns:
        The part of the store that is the attempt's own, and its number, which is higher than those before at this
        store, and no lower than any client's environment says.

    Raises:
        BarrierTimeoutError: Clients did not come in time.
        CoordinatorUnavailableError: The store cannot be reached.
    """
    ours = PrefixStore(f"dtckpt/{topic}", store)
    wait = _Wait(timeout.total_seconds())
    try:
        name = _lead(ours, config, wait) if config.client_id == 0 else _join(ours, config, wait)
        attempt = int(ours.get(f"begun/{name}"))
        ours.delete_key(f"joined/{name}/{config.client_id}")
    except dist.DistError as error:
        raise CoordinatorUnavailableError(f"the store where clients meet cannot be reached: {error}") from error
    return PrefixStore(name, ours), attempt


class _Wait:
    """A wait with a deadline."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s

    def until(self, is_over: Callable[[], bool], missing: Callable[[], list[int]]) -> None:
        """Poll until something is so.

        Raises:
            BarrierTimeoutError: It is not so in time, for the lack of the clients that ``missing`` names.
        """
        while not is_over():
            if time.monotonic() > self._deadline:
                clients = missing()
                raise BarrierTimeoutError(
                    f"process group: clients {capped(clients)} did not come within {self._timeout_s:g} s; every client "
                    "of the job must call dtckpt.init_process_group",
                    missing=clients,
                )
            time.sleep(POLL_S)


def _lead(store: Store, config: Config, wait: _Wait) -> str:
    """Gather the clients under a new name, and begin."""
    name = secrets.token_hex(8)
    keys = [f"joined/{name}/{client}" for client in range(config.num_clients)]
    store.set(keys[0], str(config.attempt))
    store.set("leader", name)
    wait.until(lambda: store.check(keys), lambda: [client for client, key in enumerate(keys) if not store.check([key])])
    last = int(store.get("attempt")) if store.check(["attempt"]) else -1
    attempt = max(last + 1, *map(int, store.multi_get(keys)))
    store.set("attempt", str(attempt))
    store.set(f"begun/{name}", str(attempt))
    return name


def _join(store: Store, config: Config, wait: _Wait) -> str:
    """Join under the name of the leader of this attempt, however many of earlier ones are found first."""
    joined = ""

    def has_begun() -> bool:
        nonlocal joined
        if joined and store.check([f"begun/{joined}"]):
            return True
        name = store.get("leader").decode() if store.check(["leader"]) else joined
        if name != joined and not store.check([f"begun/{name}"]):
            store.set(f"joined/{name}/{config.client_id}", str(config.attempt))
            joined = name
        return False

    wait.until(has_begun, lambda: [0])
    return joined
