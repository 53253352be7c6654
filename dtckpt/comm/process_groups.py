"""Process groups over sets of clients, each made once, when it is first needed.

Clients are the ranks of the default process group. `torch.distributed.new_group` would not do: it makes the members
find each other under a name that counts all groups that a process has made so far, so members that belong to
different numbers of other groups wait for each other in vain. Here the name says who the members are.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from dtckpt.comm import fork_guard, rendezvous
from dtckpt.errors import CoordinationError, capped

_BACKENDS = {"cuda": "nccl"}
_DEFAULT_BACKEND = "gloo"
_CPU = torch.device("cpu")
_CPU_BACKENDS = frozenset({"gloo", "mpi"})

Override = tuple[str | None, Any]
"""Backend of a group and options of the backend, where they are to be others than the usual ones."""

Key = tuple[tuple[int, ...], str, Any]
"""Members, ascending, backend of a group, and options of the backend; None for the usual ones."""

_c10d: Any = distributed_c10d
_lock = threading.Lock()

# Groups are kept alive by torch until they are destroyed, so these tables empty themselves.
_made: WeakValueDictionary[Key, dist.ProcessGroup] = WeakValueDictionary()
_connected: WeakSet[dist.ProcessGroup] = WeakSet()
_backends: WeakKeyDictionary[dist.ProcessGroup, dict[str, str]] = WeakKeyDictionary()
_times_made: WeakKeyDictionary[dist.ProcessGroup, Counter[tuple[tuple[int, ...], str]]] = WeakKeyDictionary()


def is_connected(clients: Iterable[int]) -> bool:
    """Whether a default process group is there that spans ``clients``."""
    return dist.is_available() and dist.is_initialized() and max(clients) < dist.get_world_size()


def rank() -> int | None:
    """Return this client's rank in the default process group, None if there is no such group."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else None


def size() -> int:
    """Return how many clients the default process group has; 1 if there is no such group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def backend_of(device_type: str) -> str:
    """Return the backend for a kind of devices: what the default group has for it, else NCCL on CUDA, else Gloo."""
    return _world_backends().get(device_type) or _BACKENDS.get(device_type, _DEFAULT_BACKEND)


def message_memory(device_type: str) -> str:
    """Return where messages among a kind of devices lie: with them, or in host memory, ``cpu``, for Gloo and MPI."""
    return "cpu" if backend_of(device_type) in _CPU_BACKENDS else device_type


def group_of(clients: Iterable[int], device_type: str = "cpu", override: Override = (None, None)) -> dist.ProcessGroup:
    """Return the group of some clients, the ranks in which ascend with the clients'.

    Collective: The first time over ``clients``, bounded by the timeout of the default group; later calls do not
    communicate. The default group itself is returned when it has no other members and fits the devices.

    Args:
        clients: Ids of the members in any order, of which this client is one.
        device_type: ``cpu`` or ``cuda``: where the tensors lie that the group is to carry.
        override: See `Override`; the default group is not returned then.

    Raises:
        CoordinationError: There is no default group that spans the clients, this client is not among them, or the
            members cannot be connected.
    """
    ranks = tuple(sorted(set(clients)))
    if not ranks or not is_connected(ranks):
        raise CoordinationError(
            f"process group: got clients {capped(ranks)}, expected clients that a default process group spans; "
            "call dtckpt.init_process_group on every client first"
        )
    if dist.get_rank() not in ranks:
        raise CoordinationError(
            f"process group: got clients {capped(ranks)}, expected this client, {dist.get_rank()}, among them"
        )
    world, is_usual = dist.group.WORLD, override == (None, None)
    if is_usual and len(ranks) == dist.get_world_size() and device_type in _world_backends() and world is not None:
        return world
    backend, options = override
    key = ranks, backend or backend_of(device_type), options
    with _lock:
        group = _made.get(key)
        if group is None or not _is_alive(group):
            group = _made[key] = _make(key)
    return group


def connected_group_of(clients: Iterable[int], device: torch.device) -> dist.ProcessGroup:
    """Return the group of some clients, in which any two may exchange messages without the others.

    On NCCL that takes a collective of all members before.

    Collective: The first time over ``clients``.

    Args:
        clients: As for `group_of`.
        device: Where this client's messages lie.

    Raises:
        CoordinationError: As there, or the members cannot be connected.
    """
    group = group_of(clients, device.type)
    if group not in _connected:
        with _connecting(dist.get_process_group_ranks(group), f" on {device}"):
            dist.all_reduce(torch.zeros(1, device=device), group=group)
        _connected.add(group)
    return group


def messenger(clients: Iterable[int]) -> tuple[Any, Mapping[int, int] | Sequence[int]]:
    """Return what carries tagged pairwise messages of CPU tensors among clients, and each client's rank there.

    Collective: As `group_of`, unless the default group can carry them itself, which needs no other group then.

    Raises:
        CoordinationError: There is no default group that spans the clients, or this client is not among them.
    """
    ranks = tuple(sorted(set(clients)))
    world = dist.group.WORLD
    if world is not None and ranks[-1] < (size := world.size()) and _world_backends().get("cpu") == _DEFAULT_BACKEND:
        return world._get_backend(_CPU), range(size)
    group = group_of(ranks, "cpu")
    return group._get_backend(_CPU), {client: rank for rank, client in enumerate(ranks)}


def remember(group: dist.ProcessGroup, device_type: str) -> None:
    """Have `group_of` return a group that somebody else made, unless it knows one of the same members already.

    All members remember it or none does.
    """
    ranks = dist.get_process_group_ranks(group)
    if ranks != sorted(ranks):
        return  # what counts on ranks that ascend would go wrong
    with _lock:
        key = tuple(ranks), backend_of(device_type), None
        known = _made.get(key)
        if known is None or not _is_alive(known):
            _made[key] = group


def _world_backends() -> dict[str, str]:
    """Return the backend that the default group has for every kind of devices."""
    world = dist.group.WORLD
    if world is None:
        return {}
    if world not in _backends:
        pairs = (pair.partition(":") for pair in dist.get_backend_config().split(","))
        _backends[world] = {device_type: backend for device_type, _, backend in pairs}
    return _backends[world]


def _is_alive(group: dist.ProcessGroup) -> bool:
    try:
        dist.get_backend(group)
    except ValueError:
        return False
    return True


def _make(key: Key) -> dist.ProcessGroup:
    ranks, backend, options = key
    world = dist.group.WORLD
    if world is None:
        raise CoordinationError("process group: got no default group, expected one")
    times = _times_made.setdefault(world, Counter())
    times[ranks, backend] += (
        1  # a group that was destroyed must not meet under its old name: addresses of then are still there
    )
    members = hashlib.sha1("_".join(map(str, ranks)).encode(), usedforsecurity=False).hexdigest()
    with _without_splitting(world), _connecting(ranks):
        group: dist.ProcessGroup
        group, _ = _c10d._new_process_group_helper(
            len(ranks),
            ranks.index(dist.get_rank()),
            list(ranks),
            dist.Backend(backend),
            _c10d._get_default_store(),
            f"dtckpt_{backend}_{members}_{times[ranks, backend]}{rendezvous.suffix()}",
            backend_options=options,
            timeout=timeout_of(world, backend) if options is None else options._timeout,
            group_desc="dtckpt",
        )
    _c10d._world.pg_group_ranks[group] = {rank: index for index, rank in enumerate(ranks)}
    return group


def _keep_groups() -> None:
    """Never destroy the groups of the parent: Gloo's would wait for threads that do not live in a forked process."""
    if fork_guard.is_forked() and dist.is_initialized():
        for group in _c10d._world.pg_map:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


os.register_at_fork(after_in_child=_keep_groups)


@contextmanager
def _connecting(ranks: Iterable[int], where: str = "") -> Iterator[None]:
    """Say which clients could not be connected, and what may help."""
    with rendezvous.advised():
        try:
            yield
        except RuntimeError as error:
            raise CoordinationError(f"connecting clients {capped(ranks)}{where} failed: {error}") from error


@contextmanager
def _without_splitting(world: dist.ProcessGroup) -> Iterator[None]:
    """Unbind the default group from its card for the body: NCCL would split it, which takes all clients to call."""
    bound = world.bound_device_id
    if bound is None:
        yield
        return
    world.bound_device_id = None
    try:
        yield
    finally:
        world.bound_device_id = bound


def timeout_of(world: dist.ProcessGroup, backend: str = _DEFAULT_BACKEND) -> timedelta:
    """Return the default group's timeout, or the backend's usual one where the default group does not tell."""
    inner: Any = world._get_backend(world._device_types[0])
    timeout: timedelta | None = getattr(getattr(inner, "options", None), "_timeout", None)
    return _c10d._get_default_timeout(backend) if timeout is None else timeout
