"""When clients ask for different things of one redistribution: everybody goes along, then everybody raises.

Gloo cannot give up a message that it waits for, and a client whose arguments are wrong sends none. So a client that
fails says so in the store of the default process group, and one that has waited for long says there what it wants.
Whoever finds another wish takes part in that one too, with zeros, from a thread of its own if it waits itself: then no
message is left over, all waits end, and all raise the same error. Messages carry what they are part of in their tags
(`dtckpt.redistribution.execute`), so those of different wishes never meet.

Nothing of this happens, or costs anything, while clients agree and are quick. What runs on NCCL is not covered: there
the host does not wait.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
import weakref
import zlib
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from dtckpt._proto import layout_pb2
from dtckpt.comm import observers
from dtckpt.comm.process_groups import is_connected
from dtckpt.errors import DtckptError, LayoutError, capped, from_wire, to_wire
from dtckpt.layout.layout import Layout
from dtckpt.layout.mesh import Mesh
from dtckpt.redistribution.exchange import Change

PATIENCE_S = 0.25
"""A client that has waited for so long looks whether all want the same."""
GRACE_S = 2.0
"""How long a client that failed waits for others to come to the call; after that the watcher waits for them."""
_POLL_S = 0.01
_CLIENTS_PER_LOOK = 1000
"""Among more clients than this, each looks less often, so that the store is not asked more often than it can answer."""

_JOIN_S = 60.0
"""How long it waits for those without whom it may not take part in what others want."""

Part = tuple[frozenset[int], Callable[[], None]]
"""A client's part in a redistribution: who cannot be done before it takes part, and what does so, with zeros."""
Plan = Callable[[Callable[[int], Sequence[Change]], int], Part]
"""Returns this client's part by what is wanted, as any client sees it, and by which of their group's calls it is."""

Group = tuple[int, ...]
"""Clients, ascending."""

_c10d: Any = distributed_c10d
_MAX_LEFT = 8
"""Calls that a client keeps in mind after it has left them."""

# What clients know of their calls; by default process group, so what belongs to one that ended goes with it.
_jobs: WeakKeyDictionary[Any, _Job] = WeakKeyDictionary()
_numbers = itertools.count()
_waiting: dict[int, Call] = {}
_unsettled: list[Board] = []
"""Of calls that this client is done with, and that others have yet to come to."""
_watcher: threading.Thread | None = None
_lock = threading.Lock()


class _Job:
    """What this client knows of the calls so far, by group of clients.

    Args:
        counts: How many there were, alike on all clients.
        left: The last ones that it left before it heard that anything was wrong.
    """

    def __init__(self) -> None:
        self.counts: Counter[Group] = Counter()
        self.left: defaultdict[Group, deque[Call]] = defaultdict(lambda: deque(maxlen=_MAX_LEFT))

    @classmethod
    def current(cls) -> _Job:
        """Return that of the present default process group."""
        world = dist.group.WORLD
        return _jobs.get(world) or _jobs.setdefault(world, cls())

    def next(self, group: Group) -> int:
        """Count a call and return which it is."""
        self.counts[group] += 1
        return self.counts[group] - 1


class Call:
    """One redistribution that this client takes part in, together with all clients of its meshes.

    Args:
        changes: What this client wants.
        plan: Returns this client's part in another one.

    Attributes:
        count: Which of the calls among these clients it is, alike on all of them.
    """

    def __init__(self, changes: Sequence[Change], plan: Plan) -> None:
        self._changes, self._plan = changes, plan
        self._group = _group(tuple({mesh: None for change in changes for mesh in change.meshes}))
        self._job = _Job.current()
        self.count = self._job.next(self._group)
        self._board: Board | None = None
        self._next_look = 0.0
        self._looking, self._registering = threading.Lock(), threading.Lock()
        self._late: DtckptError | None = None

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
        """Check, when all is done, that all wanted the same, as far as this client has heard.

        Raises:
            DtckptError: A client failed: its error. Clients wanted different things: `LayoutError`. So also if that
                was in an earlier call, which this client had left.
        """
        with self._looking:
            if self._board is not None and (error := _odd(self._board.read())):
                self._board.settle()
                raise _odd(self._board.read()) or error
        left = self._job.left[self._group]
        late = [call for call in left if call._late is not None]
        for call in late:
            left.remove(call)
            _leave_to_watcher(call._register())
        left.append(self)
        if late:
            raise next(call._late for call in late if call._late is not None)

    def look(self, now: float) -> None:
        """Say what this client wants, and take part in what else is wanted, as far as all are here who have to be.

        Args:
            now: Monotonic seconds; nothing happens before the next look is due.
        """
        with self._looking:
            if now < self._next_look:
                return
            self._next_look = now + PATIENCE_S * max(1, len(self._group) / _CLIENTS_PER_LOOK)
            self._register().advance()
        look_back(self._group)

    def look_back(self) -> None:
        """As `look`, if others want something of a call that this client has left, and wait for it in vain."""
        with self._looking:
            board = self._board or Board(self._group, self.count, self._plan)
            state, own = board.read(), _described(self._changes)
            if state["errors"] or state["wanted"].keys() - {own}:
                # At once: when others hear that this client is here, they may be done with this call, and then it is
                # done with its present one and asks what it has heard, while this thread still goes along.
                state["wanted"].setdefault(own, dist.get_rank())
                self._late = _odd(state)
                self._register().advance()

    def _register(self) -> Board:
        """Say what this client wants, once."""
        with self._registering:
            if self._board is None:
                board = Board(self._group, self.count, self._plan)
                board.want(_described(self._changes))
                self._board = board
            return self._board


def look_back(group: Group) -> None:
    """Have this client take part in what others want of calls that it has left."""
    for call in list(_Job.current().left[group]):
        call.look_back()


def tell(error: DtckptError, meshes: Sequence[Mesh], plan: Plan) -> bool:
    """Tell others of an error that keeps this client from a redistribution, and go along with what they do.

    It stands for the next call among these clients, at which the others raise it, however late they come there.

    Blocks: Until all have failed alike, or what others want is done, or for `GRACE_S` if they want nothing.

    Args:
        error: What went wrong here.
        meshes: All that are known to take part, sources and targets.
        plan: Returns this client's part in a redistribution.

    Returns:
        Whether others wanted something.
    """
    group = _group(tuple(dict.fromkeys(meshes)))
    if len(group) < 2 or not is_connected(group) or dist.get_rank() not in group:
        return False
    board = Board(group, _Job.current().next(group), plan)
    board.fail(error)
    board.settle()
    return bool(board.read()["wanted"])


class Board:
    """Where clients say what they want of one call, and what went wrong: a few keys of the default group's store.

    What a client wants, or why it fails, stands here before it takes part in what others want. And nobody may leave a
    call that this client has only zeros for without having read that: so it takes part only when all have registered
    who cannot be done before, as those who wait in vain will, and who has registered reads this again when all is done.

    Args:
        group: The clients.
        count: Which of their calls.
        plan: Returns this client's part in a redistribution.
    """

    def __init__(self, group: Group, count: int, plan: Plan) -> None:
        self._key = f"dtckpt/redistribute/{len(group)}-{zlib.crc32(repr(group).encode())}/{count}"
        self._group, self._count, self._plan = group, count, plan
        self._client = dist.get_rank()
        self._store: Any = _c10d._get_default_store()
        self._world = weakref.ref(dist.group.WORLD)
        self._known: set[str] = set()
        self._parts: dict[str, Part] = {}

    def read(self) -> dict[str, Any]:
        """Return ``wanted``: who was first to want it, by description; and ``errors``: code and text, by client."""
        return _parsed(self._store.get(self._key) if self._store.check([self._key]) else b"")

    def want(self, text: str) -> None:
        """Say what this client wants and does by itself, and that it is here."""
        self._known.add(text)
        self._update(lambda state: state["wanted"].setdefault(text, self._client) == self._client)
        self._register()

    def fail(self, error: DtckptError) -> None:
        """Say why this client fails, and that it is here."""
        # One error is enough: all may fail at once, and they may be many.
        self._update(
            lambda state: not state["errors"] and bool(state["errors"].setdefault(str(self._client), to_wire(error)))
        )
        self._register()

    def _update(self, change: Callable[[dict[str, Any]], bool]) -> None:
        """Change the state, whoever else changes it too, unless ``change`` returns False."""
        known = self._store.get(self._key) if self._store.check([self._key]) else b""
        while change(state := _parsed(known)):
            wanted = json.dumps(state)
            found = self._store.compare_set(self._key, known.decode(), wanted)
            if found.decode() == wanted:
                return
            known = found

    def _register(self) -> None:
        self._store.set(f"{self._key}/{self._client}", "here")
        self._store.add(f"{self._key}/here", 1)

    def advance(self) -> bool:
        """Take part in what is wanted, as far as all are here who have to be; return whether that was everything."""
        # In the order in which they were said, of which everybody knows a first part: in another order, three clients
        # could each take part in what the next one waits for.
        for text in [text for text in self.read()["wanted"] if text not in self._known]:
            if text not in self._parts:
                self._parts[text] = self._plan(partial(_changes, text), self._count)
            waiting, run = self._parts[text]
            if waiting and not self._store.check([f"{self._key}/{client}" for client in sorted(waiting)]):
                return False
            self._known.add(text)
            run()
        return True

    def settle(self) -> None:
        """Take part in what others want until all clients have registered; leave late ones to the watcher."""
        seen, since = 0, time.monotonic()
        while True:
            here, is_all = self._look()
            if here == len(self._group) and is_all:
                return
            if here != seen:
                seen, since = here, time.monotonic()
            if time.monotonic() > since + (GRACE_S if is_all else _JOIN_S):
                _leave_to_watcher(self)
                return
            look_back(self._group)
            time.sleep(_POLL_S)

    def is_settled(self) -> bool:
        """Take part in what others want; return whether all have registered, or the process group has ended."""
        world = self._world()
        return world is None or world is not dist.group.WORLD or self._look() == (len(self._group), True)

    def num_here(self) -> int:
        """Return how many clients have registered."""
        return int(self._store.add(f"{self._key}/here", 0))

    def _look(self) -> tuple[int, bool]:
        # In this order: who is here has said what it wants.
        return self.num_here(), self.advance()


def _parsed(data: bytes) -> dict[str, Any]:
    return json.loads(data) if data else {"wanted": {}, "errors": {}}


def _odd(state: Mapping[str, Any]) -> DtckptError | None:
    """Return the error that a state is, if it is one."""
    if state["errors"]:
        client, (code, message) = min(state["errors"].items(), key=lambda item: int(item[0]))
        return from_wire(code, f"client {client}: {message}")
    if len(state["wanted"]) < 2:
        return None
    wishes = sorted(f"client {client}: {_brief(text)}" for text, client in state["wanted"].items())
    return LayoutError(
        f"redistribute: clients want different things; got {capped(wishes, 4)}; expected the same on all"
    )


# --- calls are counted alike on all clients ------------------------------------------------------------------------


@lru_cache(maxsize=256)
def _group(meshes: tuple[Mesh, ...]) -> Group:
    """Return all clients of some meshes: who takes part in a redistribution between them, whatever it is."""
    if len(meshes) == 1:
        return meshes[0].clients
    return tuple(sorted({client for mesh in meshes for client in mesh.clients}))


# --- what clients want, as text --------------------------------------------------------------------------------------


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


def _leave_to_watcher(board: Board) -> None:
    _unsettled.append(board)
    _watch()


def _look_after_all() -> None:
    seen: set[int] = set()
    while True:
        time.sleep(PATIENCE_S)
        now = dict(_waiting)
        for number in seen & now.keys():
            try:
                now[number].look(time.monotonic())
            except Exception as error:  # the store or a peer is gone: the wait itself ends with that
                _say_unless_over("cannot look whether clients want the same: %s", error)
        seen = set(now)
        for board in list(_unsettled):
            try:
                is_over = board.is_settled()
            except Exception as error:  # as above
                _say_unless_over("cannot look after clients that were late: %s", error)
                is_over = True
            if is_over:
                _unsettled.remove(board)


def _say_unless_over(text: str, error: Exception) -> None:
    """Warn of what went wrong, but if the process group has ended meanwhile: then nobody waits any more."""
    if dist.is_initialized():
        observers.LOG.warning(text, error)
