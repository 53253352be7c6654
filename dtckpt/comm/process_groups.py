"""Process groups of `torch.distributed` over sets of clients: made on first use, once per set of members.

A client's id is its rank in the default process group.

`torch.distributed.new_group` does not fit: its members find each other under a name that counts all groups that the
process has made so far. Two clients that have made different numbers of other groups would wait for each other forever.
Here the members determine the name, so only the members have to call.
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

from dtckpt.comm import default_process_group, fork_guard, torch_private
from dtckpt.errors import CoordinationError, capped

_BACKENDS = {"cuda": "nccl"}
_DEFAULT_BACKEND = "gloo"
_CPU = torch.device("cpu")
_CPU_BACKENDS = frozenset({"gloo", "mpi"})

Override = tuple[str | None, Any]
"""Name and options of a group's backend; None: the usual ones."""

Key = tuple[tuple[int, ...], str, Any]
"""A group's members, ascending, its backend, and the backend's options (None: the usual ones)."""

_lock = threading.Lock()

# torch keeps a group alive until it is destroyed, so entries of destroyed groups vanish by themselves.
_groups: WeakValueDictionary[Key, dist.ProcessGroup] = WeakValueDictionary()
_connected: WeakSet[dist.ProcessGroup] = WeakSet()
_backends: WeakKeyDictionary[dist.ProcessGroup, dict[str, str]] = WeakKeyDictionary()
# By default group, the number of groups made so far of these members and this backend.
_generations: WeakKeyDictionary[dist.ProcessGroup, Counter[tuple[tuple[int, ...], str]]] = WeakKeyDictionary()


def is_connected(clients: Iterable[int]) -> bool:
    """Whether there is a default process group that spans ``clients``."""
    return dist.is_available() and dist.is_initialized() and max(clients) < dist.get_world_size()


def validate_connected(clients: Iterable[int], operation: str = "process group") -> None:
    """Check that a default process group spans some clients, before an operation that communicates among them.

    Raises:
        CoordinationError: There is no such group.
    """
    members = tuple(clients)
    if not members or not is_connected(members):
        raise CoordinationError(
            f"{operation}: got clients {capped(sorted(set(members)))}, expected clients that a default process "
            "group spans; call dtckpt.initialize_multi_client or dtckpt.init_process_group on every client first"
        )


def is_fake() -> bool:
    """Whether the default process group is PyTorch's ``fake`` one for dry runs: one client, and no messages."""
    return _default_group_backends().get("cpu") == "fake"


def rank() -> int | None:
    """Return this client's rank in the default process group, None if there is no such group."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else None


def size() -> int:
    """Return the number of clients in the default process group, 1 if there is no such group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def backend_of(device_type: str) -> str:
    """Return the backend for a device type: the default group's backend for it, else NCCL on CUDA, else Gloo."""
    return _default_group_backends().get(device_type) or _BACKENDS.get(device_type, _DEFAULT_BACKEND)


def message_memory(device_type: str) -> str:
    """Return the device type of message buffers among devices of a type: the same, or ``cpu`` for Gloo and MPI."""
    return "cpu" if backend_of(device_type) in _CPU_BACKENDS else device_type


def process_group_of(
    clients: Iterable[int], device_type: str = "cpu", override: Override = (None, None)
) -> dist.ProcessGroup:
    """Return the process group of some clients; make it at the first call. Ranks in it ascend with client ids.

    Returns the default group itself if it has the same members and a backend for the devices.

    Collective: The first time over ``clients``, bounded by the timeout of the default group; later calls do not
    communicate.

    Args:
        clients: Ids of the members in any order, this client among them.
        device_type: ``cpu`` or ``cuda``: where the tensors lie that the group carries.
        override: See `Override`; with one, the default group is never returned.

    Raises:
        CoordinationError: There is no default group that spans the clients, this client is not among them, or the
            members cannot be connected.
    """
    ranks = tuple(sorted(set(clients)))
    validate_connected(ranks)
    if dist.get_rank() not in ranks:
        raise CoordinationError(
            f"process group: got clients {capped(ranks)}, expected this client, {dist.get_rank()}, among them"
        )
    # A group costs connections among its members, so use the default group if it serves as well.
    world, is_usual = dist.group.WORLD, override == (None, None)
    if (
        is_usual
        and len(ranks) == dist.get_world_size()
        and device_type in _default_group_backends()
        and world is not None
    ):
        return world
    backend, options = override
    key = ranks, backend or backend_of(device_type), options
    with _lock:
        # Under the lock: if two threads made one group at once, the second thread would make the next generation, and
        # no other client waits for that.
        group = _groups.get(key)
        if group is None or not _is_alive(group):
            group = _groups[key] = _make(key)
    return group


def connected_process_group(clients: Iterable[int], device: torch.device) -> dist.ProcessGroup:
    """Return the process group of some clients, ready for messages between any two members.

    NCCL connects a group in its first operation, in which all members must take part. So an all-reduce of one element
    precedes the first message.

    Collective: The first time over ``clients``.

    Args:
        clients: As for `process_group_of`.
        device: Where this client's messages lie.

    Raises:
        CoordinationError: As for `process_group_of`, or the members cannot be connected.
    """
    group = process_group_of(clients, device.type)
    if group not in _connected:
        with _connection_errors(dist.get_process_group_ranks(group), f" on {device}"):
            dist.all_reduce(torch.zeros(1, device=device), group=group)
        _connected.add(group)
    return group


def point_to_point_backend(clients: Iterable[int]) -> tuple[Any, Mapping[int, int] | Sequence[int]]:
    """Return a backend that carries tagged messages of CPU tensors among clients, and each client's rank in it.

    Collective: As `process_group_of`, unless the default group's own backend for CPU tensors is Gloo: then this
    backend is returned and no other group is made.

    Raises:
        CoordinationError: There is no default group that spans the clients, or this client is not among them.
    """
    ranks = tuple(sorted(set(clients)))
    world, backends = dist.group.WORLD, _default_group_backends()
    # Its connections serve any set of clients, since each message names its two ends.
    if world is not None and ranks[-1] < (size := world.size()) and backends.get("cpu") == _DEFAULT_BACKEND:
        return torch_private.backend_of(world, _CPU), range(size)
    group = process_group_of(ranks, "cpu")
    return torch_private.backend_of(group, _CPU), {client: rank for rank, client in enumerate(ranks)}


def register_group(group: dist.ProcessGroup, device_type: str) -> None:
    """Have `process_group_of` return this group for its members, unless it has a group of them already.

    All members register the group, or no member does. A group whose ranks do not ascend with client ids is not
    registered.
    """
    ranks = dist.get_process_group_ranks(group)
    if ranks != sorted(ranks):
        return  # callers of `process_group_of` rely on ascending ranks
    with _lock:
        key = tuple(ranks), backend_of(device_type), None
        registered = _groups.get(key)
        if registered is None or not _is_alive(registered):
            _groups[key] = group


def _default_group_backends() -> dict[str, str]:
    """Return the default group's backend for every device type; nothing if there is no default group."""
    world = dist.group.WORLD
    if world is None:
        return {}
    if world not in _backends:
        pairs = (pair.partition(":") for pair in dist.get_backend_config().split(","))
        _backends[world] = {device_type: backend for device_type, _, backend in pairs}
    return _backends[world]


def _is_alive(group: dist.ProcessGroup) -> bool:
    """Whether a group was not destroyed."""
    try:
        # torch looks up a group in its own table, and removes it there when the group is destroyed.
        dist.get_backend(group)
    except ValueError:
        return False
    return True


def _make(key: Key) -> dist.ProcessGroup:
    """Make a group. Calls torch's own helper, as ``new_group`` does, with a name of our choice."""
    ranks, backend, options = key
    world = dist.group.WORLD
    if world is None:
        raise CoordinationError("process group: got no default group, expected one")
    generations = _generations.setdefault(world, Counter())
    # A new name each time: the store still holds the addresses of a destroyed group under its name.
    generations[ranks, backend] += 1
    # A digest keeps the name short for any number of clients.
    members = hashlib.sha1("_".join(map(str, ranks)).encode(), usedforsecurity=False).hexdigest()
    with _without_splitting(world), _connection_errors(ranks):
        group: dist.ProcessGroup
        group, _ = torch_private.new_process_group(
            len(ranks),
            ranks.index(dist.get_rank()),
            list(ranks),
            dist.Backend(backend),
            torch_private.get_default_store(),
            f"dtckpt_{backend}_{members}_{generations[ranks, backend]}{default_process_group.key_suffix()}",
            backend_options=options,
            timeout=timeout_of(world, backend) if options is None else options._timeout,
            group_desc="dtckpt",
        )
    # ``new_group`` notes the ranks itself; the helper does not.
    torch_private.world.pg_group_ranks[group] = {rank: index for index, rank in enumerate(ranks)}
    return group


def _keep_groups_in_child() -> None:
    """Never destroy the parent's groups in a forked process: Gloo would wait for threads that do not exist there."""
    if fork_guard.is_forked() and dist.is_initialized():
        for group in torch_private.world.pg_map:
            # Never given back on purpose: no destructor runs, not even when the process ends.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


os.register_at_fork(after_in_child=_keep_groups_in_child)


@contextmanager
def _connection_errors(ranks: Iterable[int], suffix: str = "") -> Iterator[None]:
    """Turn torch's errors into errors that name the unreachable clients, and a cure if there is one."""
    with default_process_group.restart_advice():
        try:
            yield
        except RuntimeError as error:
            raise CoordinationError(f"connecting clients {capped(ranks)}{suffix} failed: {error}") from error


@contextmanager
def _without_splitting(world: dist.ProcessGroup) -> Iterator[None]:
    """Unbind the default group from its GPU for the body.

    NCCL makes other groups by splitting a bound default group, and then all clients would have to call.
    """
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
    """Return the default group's timeout, or the backend's usual timeout if the default group has none."""
    inner = torch_private.backend_of(world, torch_private.devices_of(world)[0])
    timeout: timedelta | None = getattr(getattr(inner, "options", None), "_timeout", None)
    return torch_private.get_default_timeout(backend) if timeout is None else timeout
