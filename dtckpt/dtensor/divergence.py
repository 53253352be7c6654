"""When clients ask for different things of one redistribution: everybody goes along, then everybody raises.

Gloo cannot give up a message that it waits for, and a client whose arguments are wrong sends none. So a client that
fails says so in the store of the default process group, and one that has waited for long says there what it wants.
Whoever finds another wish takes part in that one too, with zeros, from a thread of its own if it waits itself: then no
message is left over, all waits end, and all raise the same error. Messages carry what they are part of in their tags
(`dtckpt.dtensor.hops`), so those of different wishes never meet.

Nothing of this happens, or costs anything, while clients agree and are quick. What runs on NCCL is not covered: there
the host does not wait.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from dtckpt._proto import layout_pb2
from dtckpt.dtensor import observing
from dtckpt.dtensor.hops import Change
from dtckpt.errors import CoordinationError, DtckptError, LayoutError, capped, from_wire, to_wire
from dtckpt.groups import is_connected
from dtckpt.layout import Layout
from dtckpt.mesh import Mesh

PATIENCE_S = 0.25
"""A client that has waited for so long looks whether all want the same."""
GRACE_S = 2.0
"""How long a client that failed looks for others that wait for it."""
_POLL_S = 0.01

_JOIN_S = 60.0
"""How long a client waits for those that it would give something, before it takes part in what they want."""

Part = tuple[frozenset[int], Callable[[Sequence[Mapping[int, torch.Tensor]]], None]]
"""A client's part in a redistribution: the clients it gives something, and what runs it, given components."""
Plan = Callable[[Sequence[Change]], Part]
"""Returns this client's part."""

Group = tuple[int, ...]
"""The clients of some meshes, as numbers that stand for them; see `_group`."""

_c10d: Any = distributed_c10d
# Calls so far, alike on all clients; by default process group, so what belongs to one that ended goes with it.
_counts: WeakKeyDictionary[Any, Counter[Group]] = WeakKeyDictionary()
_numbers = itertools.count()
_waiting: dict[int, Call] = {}
_watcher: threading.Thread | None = None
_lock = threading.Lock()


class Call:
    """One redistribution that this client takes part in, together with all clients of the source meshes.

    Args:
        changes: What this client wants.
        plan: Returns this client's part in another one.
    """

    def __init__(self, changes: Sequence[Change], plan: Plan) -> None:
        self._changes, self._plan = changes, plan
        self._group = _group([change.source.mesh for change in changes])
        counter = _counter()
        self._count = counter[self._group]
        counter[self._group] += 1
        self._was_looked_at = False
        self._joined: set[str] = set()
        self._looking = threading.Lock()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Look after what this client waits for in the body."""
        _watch()
        number = next(_numbers)
        _waiting[number] = self
        try:
            yield
        finally:
            del _waiting[number]

    def validate(self) -> None:
        """Check, when all is done, that all wanted the same.

        Raises:
            DtckptError: A client failed: its error. Clients wanted different things: `LayoutError`.
        """
        with self._looking:
            if not self._was_looked_at:
                return
            key = _key(self._group, self._count)
            if error := _odd(_read(key)):
                clients = _clients(change.source.mesh for change in self._changes)
                _settle(key, self._joined, clients, dist.get_rank(), self._plan)
                raise _odd(_read(key)) or error

    def look(self) -> None:
        """Say what this client wants, and take part in whatever else others want. Blocks until that is done."""
        mine, client = _described(self._changes), dist.get_rank()

        def add(state: dict[str, Any]) -> bool:
            clients = state["wanted"].setdefault(mine, [])
            if is_new := client not in clients:
                clients.append(client)
            return is_new

        with self._looking:
            self._was_looked_at = True
            key = _key(self._group, self._count)
            self._joined |= {mine}
            _update(key, add)
            _join(key, self._joined, client, self._plan)


def tell(error: DtckptError, meshes: Sequence[Mesh], plan: Plan) -> None:
    """Tell others of an error that keeps this client from a redistribution, and go along with what they do.

    Blocks: Until all have failed alike, or what others want is done, or for `GRACE_S` if they want nothing.

    Args:
        error: What went wrong here.
        meshes: The source meshes, as of `Call`.
        plan: Returns this client's part in a redistribution.
    """
    clients = _clients(meshes)
    client = dist.get_rank() if is_connected(clients) else -1
    if len(clients) < 2 or client not in clients:
        return
    group, store = _group(meshes), _store()
    key = _key(group, _counter()[group])
    _update(key, lambda state: state["errors"].append([client, *to_wire(error)]) or True)
    store.add(f"{key}/failed", 1)
    deadline = time.monotonic() + GRACE_S
    state = _read(key)
    while not state["wanted"] and store.add(f"{key}/failed", 0) < len(clients):
        if time.monotonic() > deadline:
            # Take it back, unless others begin to want something just now.
            state = _update(key, lambda state: not state["wanted"] and not state["errors"].clear())
            if not state["wanted"]:
                store.add(f"{key}/failed", -1)
                return
        time.sleep(_POLL_S)
        state = _read(key)
    # All have failed, or others communicate: this call counts.
    _counter()[group] += 1
    _settle(key, set(), clients, client, plan)


def _join(key: str, known: set[str], client: int, plan: Plan) -> None:
    """Take part in all wishes that are not known yet.

    Nobody may take what this client gives for an answer. So it gives only when all who get something have said what
    they want, as those who wait in vain will: they look at the state again when they are done.
    """
    for text in sorted(_read(key)["wanted"].keys() - known):
        known.add(text)
        changes = _changes(text, client)
        peers, run = plan(changes)
        deadline = time.monotonic() + _JOIN_S
        while not peers <= _heard(_read(key)):
            if time.monotonic() > deadline:
                raise CoordinationError(f"clients {capped(sorted(peers))} did not come to a redistribution in time")
            time.sleep(_POLL_S)
        run([_zeros(change) for change in changes])


def _heard(state: Mapping[str, Any]) -> set[int]:
    """Return the clients that have said something."""
    return {client for client, _, _ in state["errors"]}.union(*state["wanted"].values())


def _settle(key: str, known: set[str], clients: Set[int], client: int, plan: Plan) -> None:
    """Take part in what others want until all clients have said something, or no one has for `GRACE_S`."""
    deadline, seen = time.monotonic() + GRACE_S, set[int]()
    while seen < clients and time.monotonic() < deadline:
        _join(key, known, client, plan)
        if (now := _heard(_read(key))) != seen:
            deadline, seen = time.monotonic() + GRACE_S, now
        time.sleep(_POLL_S)
    _join(key, known, client, plan)


def _odd(state: Mapping[str, Any]) -> DtckptError | None:
    """Return the error that a state is, if it is one."""
    if state["errors"]:
        client, code, message = state["errors"][0]
        return from_wire(code, f"client {client}: {message}")
    if len(state["wanted"]) < 2:
        return None
    wishes = [f"client {min(clients)}: {_brief(text)}" for text, clients in state["wanted"].items()]
    return LayoutError(
        f"redistribute: clients want different things; got {capped(sorted(wishes), 4)}; expected the same on all"
    )


def _zeros(change: Change) -> dict[int, torch.Tensor]:
    mesh = change.source.mesh
    regions = {device: change.source.region(device, change.shape) for device in mesh.local_device_ids()}
    return {device: torch.zeros(region.shape, dtype=change.dtype) for device, region in regions.items()}


# --- calls are counted alike on all clients ------------------------------------------------------------------------


def _clients(meshes: Iterable[Mesh]) -> set[int]:
    return {client for mesh in meshes for client in mesh.clients}


def _group(meshes: Iterable[Mesh]) -> Group:
    return tuple({_clients_number(mesh): None for mesh in meshes})


@lru_cache(maxsize=256)
def _clients_number(mesh: Mesh) -> int:
    return zlib.crc32(repr(mesh.clients).encode())


def _counter() -> Counter[Group]:
    return _counts.setdefault(dist.group.WORLD, Counter())


def _key(group: Group, count: int) -> str:
    return f"dtckpt/redistribute/{'-'.join(map(str, group))}/{count}"


# --- the state: what clients want, and what went wrong ---------------------------------------------------------------


def _store() -> Any:
    return _c10d._get_default_store()


def _parsed(data: bytes) -> dict[str, Any]:
    return json.loads(data) if data else {"wanted": {}, "errors": []}


def _read(key: str) -> dict[str, Any]:
    store = _store()
    return _parsed(store.get(key) if store.check([key]) else b"")


def _update(key: str, change: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Change the state, whoever else changes it too, unless ``change`` returns False; return it."""
    store = _store()
    known = store.get(key) if store.check([key]) else b""
    while True:
        state = _parsed(known)
        if not change(state):
            return state
        wanted = json.dumps(state)
        found = store.compare_set(key, known.decode(), wanted)
        if found.decode() == wanted:
            return state
        known = found


def _described(changes: Sequence[Change]) -> str:
    """Return changes as a text, the same on every client."""
    meshes: list[Mesh] = []

    def layout(each: Layout) -> list[Any]:
        if each.mesh not in meshes:
            meshes.append(each.mesh)
        return [meshes.index(each.mesh), each.sharding_specs, each.partial]

    listed = [
        [layout(each.source), layout(each.target), each.shape, str(each.dtype).removeprefix("torch.")]
        for each in changes
    ]
    return json.dumps([listed, [mesh.portable().as_proto().SerializeToString().hex() for mesh in meshes]])


def _changes(text: str, client: int) -> list[Change]:
    """Return the changes that a text describes, as this client sees them."""
    listed, meshes = json.loads(text)
    seen = [Mesh.from_proto(layout_pb2.MeshProto.FromString(bytes.fromhex(mesh))).seen_by(client) for mesh in meshes]

    def layout(number: int, specs: Sequence[Any], partial: dict[str, str]) -> Layout:
        return Layout([spec if isinstance(spec, str) else tuple(spec) for spec in specs], seen[number], partial)

    return [
        Change(layout(*source), layout(*target), tuple(shape), getattr(torch, dtype))
        for source, target, shape, dtype in listed
    ]


def _brief(text: str) -> str:
    changes = _changes(text, -1)
    ways = [f"{change.shape} of {change.dtype} to {change.target.placements}" for change in changes]
    return capped(ways, 3)


# --- the watcher -----------------------------------------------------------------------------------------------------


def _watch() -> None:
    """Have a thread look at what takes long; it ends with the process."""
    global _watcher  # noqa: PLW0603  (one per process)
    if _watcher is None or not _watcher.is_alive():
        with _lock:
            if _watcher is None or not _watcher.is_alive():
                _watcher = threading.Thread(target=_look_after_all, name="dtckpt-divergence", daemon=True)
                _watcher.start()


def _look_after_all() -> None:
    seen: set[int] = set()
    while True:
        time.sleep(PATIENCE_S)
        now = dict(_waiting)
        for number in seen & now.keys():
            try:
                now[number].look()
            except (
                CoordinationError,
                RuntimeError,
            ) as error:  # the store or a peer is gone: the wait itself ends with that
                observing.LOG.warning("cannot look whether clients want the same: %s", error)
        seen = set(now)
