"""Detect that clients ask for different redistributions in one call, so that all raise the same error and none hangs.

Gloo cannot cancel a message that it waits for, and a client whose arguments are wrong sends none. So the clients use a
record of the call in the store of the default process group. A client that fails writes its error there; a client that
has waited for long writes its request. Each client then takes part in all requests, in those of others with zeros:

    client 0: rows               client 1: rows                client 2: columns
        |  waits `PATIENCE_S`        |  waits                      |  waits
        v                            v                             v
    +---------------------------------------------------------------------------------+
    | record of call 7:  requests  rows (client 0), columns (client 2)                |
    |                    registered  0, 1, 2                    errors  none          |
    +---------------------------------------------------------------------------------+
        |  joins "columns"           |  joins "columns"            |  joins "rows"       with zeros
        v                            v                             v
    every request completes; each client reads the record again, finds two requests, and raises

No message is left over, all waits end, and all clients raise the same error. Messages of different requests never
meet: each request has tags of its own (`dtckpt.redistribution.execute`).

While clients agree and are quick, nobody touches the store. Redistributions on NCCL are not covered: the host does not
wait for those.
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
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from dtckpt._proto import layout_pb2
from dtckpt.comm import observers, torch_private
from dtckpt.comm.process_groups import is_connected
from dtckpt.errors import DtckptError, LayoutError, capped, from_wire, to_wire
from dtckpt.layout.layout import Layout
from dtckpt.layout.mesh import Mesh
from dtckpt.redistribution import agreements
from dtckpt.redistribution.agreements import Group
from dtckpt.redistribution.layout_change import LayoutChange

PATIENCE_S = 0.25
"""A client that has waited for so long writes its request to the record, and reads those of others."""
GRACE_S = 2.0
"""How long a client that failed waits for others to register; the watcher waits for those that come later."""
_POLL_S = 0.01
_CLIENTS_PER_POLL = 1000
"""Beyond this many clients, each reads the record less often, so that the store can answer all of them."""

_JOIN_S = 60.0
"""How long a client that settles a call waits for the clients without which it may not join a request."""


class Participation(NamedTuple):
    """How this client takes part, with zeros, in a redistribution that others ask for.

    Args:
        prerequisites: Other clients that cannot complete the redistribution before this one takes part.
        run: Takes part, and waits until that is done.
    """

    prerequisites: frozenset[int]
    run: Callable[[], None]


Planner = Callable[[Callable[[int], Sequence[LayoutChange]], int, int], Participation]
"""Returns a participation. Takes the changes that are asked for, as a function of the client that looks at them, the
number of the call among its clients, and the digest of what those who ask take for granted."""

ARGUMENTS_AXIS = "arguments"
"""The axis of meshes on which clients exchange the arguments of a call (`dtckpt.dtensor.gather_objects`)."""

_MAX_RETURNED = 8
"""Most calls that a client remembers after they have returned."""

# By default process group, so that the history of one that has ended goes with it.
_histories: WeakKeyDictionary[Any, _CallHistory] = WeakKeyDictionary()
_numbers = itertools.count()
_waiting: dict[int, RedistributionCall] = {}
"""Calls in which a thread of this client waits now."""
_unsettled: list[CallRecord] = []
"""Records of calls that have returned here, and to which other clients have yet to come."""
_watcher: threading.Thread | None = None
_lock = threading.Lock()


class _CallHistory:
    """The calls of this client so far, by group of clients.

    Attributes:
        counts: How many calls there were, alike on all clients of the group.
        returned: The last calls that returned before this client heard that anything was wrong with them.
    """

    def __init__(self) -> None:
        self.counts: Counter[Group] = Counter()
        self.returned: defaultdict[Group, deque[RedistributionCall]] = defaultdict(lambda: deque(maxlen=_MAX_RETURNED))

    @classmethod
    def current(cls) -> _CallHistory:
        """Return the history of the present default process group."""
        world = dist.group.WORLD
        return _histories.get(world) or _histories.setdefault(world, cls())

    def next(self, group: Group) -> int:
        """Count a call, and return its number."""
        self.counts[group] += 1
        return self.counts[group] - 1


class RedistributionCall:
    """One redistribution that this client asks for, together with all clients of its meshes.

    Args:
        changes: The changes that this client asks for.
        plan: Plans this client's participation in the requests of others.

    Attributes:
        count: The number of the call among these clients, alike on all of them.
        granted: The digest of what this client takes for granted; see `dtckpt.redistribution.agreements`.
    """

    def __init__(self, changes: Sequence[LayoutChange], plan: Planner) -> None:
        self._changes, self._plan = changes, plan
        self._group = _group(tuple({mesh: None for change in changes for mesh in change.meshes}))
        self._history = _CallHistory.current()
        self.count = self._history.next(self._group)
        self.granted = agreements.digest(self._group)
        self._record: CallRecord | None = None
        self._next_poll = 0.0
        self._polling, self._registering = threading.Lock(), threading.Lock()
        self._late_error: DtckptError | None = None

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Have the watcher thread poll for this call while the body waits for other clients."""
        _ensure_watcher()
        number = next(_numbers)
        _waiting[number] = self
        try:
            yield
        finally:
            del _waiting[number]

    def validate(self) -> None:
        """Check, when the redistribution is complete, that all clients asked for the same, as far as is known here.

        Raises:
            DtckptError: A client failed: its error. `LayoutError` if clients asked for different things. Also if that
                was in an earlier call, which had returned here.
        """
        with self._polling:
            # Without a record no thread here has waited for long. Then the store is not asked: that costs a round trip.
            if self._record is not None and (error := _error_in(self._record.read())):
                self._record.settle()
                agreements.forget(self._group)
                # Read again, now that others have written, too: the error must be the same on every client.
                raise _error_in(self._record.read()) or error
        returned = self._history.returned[self._group]
        late = [call for call in returned if call._late_error is not None]
        for call in late:
            returned.remove(call)
            _leave_to_watcher(call._register())
        returned.append(self)
        if late:
            agreements.forget(self._group)
            raise next(call._late_error for call in late if call._late_error is not None)

    def poll(self, now: float) -> None:
        """Write this client's request to the record, and join the requests of others as far as that is allowed.

        Args:
            now: Monotonic seconds. Before the next poll is due, nothing happens.
        """
        with self._polling:
            if now < self._next_poll:
                return
            self._next_poll = now + PATIENCE_S * max(1, len(self._group) / _CLIENTS_PER_POLL)
            self._register().join_requests()
        revisit_calls(self._group)

    def revisit(self) -> None:
        """Join the requests of others in this call, which has returned here while others wait for this client."""
        with self._polling:
            record = self._record or CallRecord(self._group, self.count, self._plan)
            state, own = record.read(), _encode(self._changes, self.granted)
            if state["errors"] or state["requests"].keys() - {own}:
                # Note the error before registering. As soon as others see this client registered, they may complete
                # this call and then its present one, in which `validate` must find the error, while this thread is
                # still joining.
                state["requests"].setdefault(own, dist.get_rank())
                self._late_error = _error_in(state)
                self._register().join_requests()

    def _register(self) -> CallRecord:
        """Write this client's request to the record, once, and return the record."""
        with self._registering:
            if self._record is None:
                record = CallRecord(self._group, self.count, self._plan)
                record.add_request(_encode(self._changes, self.granted))
                self._record = record
            return self._record


def revisit_calls(group: Group) -> None:
    """Join the requests of others in calls that have returned here."""
    for call in list(_CallHistory.current().returned[group]):
        call.revisit()


def report_error(error: DtckptError, meshes: Sequence[Mesh], plan: Planner) -> bool:
    """Tell the other clients of an error that keeps this one from a redistribution, and join their requests.

    The error stands for the next call among these clients. The others raise it in that call, however late they come.

    Blocks: Until all clients have registered and this one has joined their requests. If some do not come, for
    `GRACE_S` after the last one that came, or longer if a request cannot be joined before.

    Args:
        error: What went wrong here.
        meshes: All meshes that are known to take part, sources and targets.
        plan: Plans this client's participation in the requests of others.

    Returns:
        Whether others asked for something.
    """
    group = _group(tuple(dict.fromkeys(meshes)))
    if len(group) < 2 or not is_connected(group) or dist.get_rank() not in group:
        return False
    record = CallRecord(group, _CallHistory.current().next(group), plan)
    agreements.forget(group)  # as the others do when they raise the error
    record.add_error(error)
    record.settle()
    return bool(record.read()["requests"])


class CallRecord:
    """The record of one call: the clients' requests and errors, in a few keys of the default group's store.

    No client may take zeros for a result. Two rules see to that:

    1. A client writes its own request or error, and registers, before it joins the request of another.
    2. It joins a request only when all clients that wait for it there have registered (`Participation.prerequisites`).
       A client that has registered reads the record again when its call is complete. So it finds the other request,
       and raises instead of returning.

    Args:
        group: The clients.
        count: The number of the call among them.
        plan: Plans this client's participation in the requests of others.
    """

    def __init__(self, group: Group, count: int, plan: Planner) -> None:
        self._key = f"dtckpt/redistribute/{len(group)}-{zlib.crc32(repr(group).encode())}/{count}"
        self._group, self._count, self._plan = group, count, plan
        self._client = dist.get_rank()
        self._store: Any = torch_private.get_default_store()
        self._world = weakref.ref(dist.group.WORLD)
        # Requests in which this client has taken part, its own included, and its participation in others.
        self._joined: set[str] = set()
        self._participations: dict[str, Participation] = {}

    def read(self) -> dict[str, Any]:
        """Return ``requests``: by request, the client that wrote it; and ``errors``: by client, code and text."""
        return _parse(self._store.get(self._key) if self._store.check([self._key]) else b"")

    def add_request(self, request: str) -> None:
        """Write what this client asks for, and does by itself; register it."""
        self._joined.add(request)
        self._update(lambda state: state["requests"].setdefault(request, self._client) == self._client)
        self._register()

    def add_error(self, error: DtckptError) -> None:
        """Write why this client fails, unless another client has written an error already; register it."""
        # One error is enough: all clients may fail at once, and they may be many.
        self._update(
            lambda state: not state["errors"] and bool(state["errors"].setdefault(str(self._client), to_wire(error)))
        )
        self._register()

    def _update(self, change: Callable[[dict[str, Any]], bool]) -> None:
        """Change the state by compare-and-set, until that succeeds or ``change`` returns False."""
        current = self._store.get(self._key) if self._store.check([self._key]) else b""
        while change(state := _parse(current)):
            changed = json.dumps(state)
            # To a store, an expected value of "" also stands for a key that nobody has written yet.
            stored = self._store.compare_set(self._key, current.decode(), changed)
            if stored.decode() == changed:
                return
            current = stored

    def _register(self) -> None:
        self._store.set(f"{self._key}/{self._client}", "here")
        # The count comes last, so whoever counts this client also finds its key and its request.
        self._store.add(f"{self._key}/here", 1)

    def join_requests(self) -> bool:
        """Take part in the requests of others, in their order, up to the first whose prerequisites are missing.

        Returns:
            Whether this client has taken part in all requests.
        """
        # In the order of the record, of which every client knows a first part. In orders of their own, three clients
        # could each take part in the request that the next one waits for.
        for request in [request for request in self.read()["requests"] if request not in self._joined]:
            if request not in self._participations:
                self._participations[request] = self._plan(partial(_decode, request), self._count, _granted_in(request))
            prerequisites, run = self._participations[request]
            keys = [f"{self._key}/{client}" for client in sorted(prerequisites)]
            if keys and not self._store.check(keys):
                return False
            self._joined.add(request)
            run()
        return True

    def settle(self) -> None:
        """Join the requests of others until all clients have registered; leave late clients to the watcher."""
        num_seen, since = 0, time.monotonic()
        while True:
            num_registered, has_joined_all = self._join()
            if num_registered == len(self._group) and has_joined_all:
                return
            if num_registered != num_seen:
                num_seen, since = num_registered, time.monotonic()
            if time.monotonic() > since + (GRACE_S if has_joined_all else _JOIN_S):
                _leave_to_watcher(self)
                return
            revisit_calls(self._group)
            time.sleep(_POLL_S)

    def is_settled(self) -> bool:
        """Join the requests of others; return whether all have registered, or the process group has ended."""
        world = self._world()
        return world is None or world is not dist.group.WORLD or self._join() == (len(self._group), True)

    def num_registered(self) -> int:
        """Return how many clients have registered."""
        return int(self._store.add(f"{self._key}/here", 0))

    def _join(self) -> tuple[int, bool]:
        # Count first: a client writes its request before it registers, so the requests of all counted ones are read.
        return self.num_registered(), self.join_requests()


def _parse(data: bytes) -> dict[str, Any]:
    return json.loads(data) if data else {"requests": {}, "errors": {}}


def _error_in(state: Mapping[str, Any]) -> DtckptError | None:
    """Return the error that a record's state stands for, if any: a client's, or that requests differ."""
    if state["errors"]:
        client, (code, message) = min(state["errors"].items(), key=lambda item: int(item[0]))
        return from_wire(code, f"client {client}: {message}")
    if len(state["requests"]) < 2:
        return None
    if len({_granted_in(request) for request in state["requests"]}) > 1:
        return LayoutError(agreements.MISMATCH)
    requests = sorted(f"client {client}: {_summary(request)}" for request, client in state["requests"].items())
    return LayoutError(
        f"redistribute: clients want different things; got {capped(requests, 4)}; expected the same on all"
    )


# --- calls are counted alike on all clients ------------------------------------------------------------------------


@lru_cache(maxsize=256)
def _group(meshes: tuple[Mesh, ...]) -> Group:
    """Return all clients of some meshes: they take part in every redistribution between these."""
    if len(meshes) == 1:
        return meshes[0].clients
    return tuple(sorted({client for mesh in meshes for client in mesh.clients}))


# --- requests, as text ---------------------------------------------------------------------------------------------


def _encode(changes: Sequence[LayoutChange], granted: int) -> str:
    """Return changes, and what is taken for granted, as a text, which is the same on every client that agrees."""
    meshes: list[Mesh] = []

    def encode_layout(layout: Layout) -> list[Any]:
        if layout.mesh not in meshes:
            meshes.append(layout.mesh)
        return [meshes.index(layout.mesh), layout.sharding_specs, layout.partial]

    items = [
        [
            encode_layout(change.source),
            encode_layout(change.target),
            change.shape,
            str(change.dtype).removeprefix("torch."),
        ]
        for change in changes
    ]
    # Requests are compared as texts, so nothing in them may depend on the client that wrote them.
    return json.dumps([items, [mesh.portable().as_proto().SerializeToString().hex() for mesh in meshes], granted])


def _granted_in(request: str) -> int:
    granted: int = json.loads(request)[2]
    return granted


def _decode(request: str, client: int) -> list[LayoutChange]:
    """Return the changes that a text describes, as ``client`` sees them."""
    items, texts, _ = json.loads(request)
    meshes = [Mesh.from_proto(layout_pb2.MeshProto.FromString(bytes.fromhex(text))).seen_by(client) for text in texts]

    def decode_layout(number: int, specs: Sequence[Any], partial: dict[str, str]) -> Layout:
        return Layout([spec if isinstance(spec, str) else tuple(spec) for spec in specs], meshes[number], partial)

    return [
        LayoutChange(decode_layout(*source), decode_layout(*target), tuple(shape), getattr(torch, dtype))
        for source, target, shape, dtype in items
    ]


def _summary(request: str) -> str:
    changes = _decode(request, -1)
    if changes[0].source.mesh.mesh_dim_names == (ARGUMENTS_AXIS,):
        return f"an agreement on the arguments of {changes[0].source.mesh.name}"
    texts = [f"{change.shape} of {change.dtype} to {change.target.placements}" for change in changes]
    return capped(texts, 3)


# --- the watcher -----------------------------------------------------------------------------------------------------


def _ensure_watcher() -> None:
    """Start the thread that polls for calls that take long, unless it runs; it ends with the process."""
    global _watcher  # noqa: PLW0603  (one per process)
    if _watcher is None or not _watcher.is_alive():
        with _lock:
            if _watcher is None or not _watcher.is_alive():
                _watcher = threading.Thread(target=_watch_calls, name="dtckpt-disagreement", daemon=True)
                _watcher.start()


def _leave_to_watcher(record: CallRecord) -> None:
    _unsettled.append(record)
    _ensure_watcher()


def _watch_calls() -> None:
    seen: set[int] = set()
    while True:
        time.sleep(PATIENCE_S)
        # A copy, because threads enter and leave calls meanwhile.
        now = dict(_waiting)
        # Only calls that waited at the last look already have waited for `PATIENCE_S`.
        for number in seen & now.keys():
            try:
                now[number].poll(time.monotonic())
            except Exception as error:  # the store or a peer is gone: the wait itself ends with that
                _warn_if_connected("cannot look whether clients want the same: %s", error)
        seen = set(now)
        for record in list(_unsettled):
            try:
                is_over = record.is_settled()
            except Exception as error:  # as above
                _warn_if_connected("cannot look after clients that were late: %s", error)
                is_over = True
            if is_over:
                _unsettled.remove(record)


def _warn_if_connected(text: str, error: Exception) -> None:
    """Log a warning, unless the process group has ended meanwhile: then nobody waits any more."""
    if dist.is_initialized():
        observers.LOG.warning(text, error)
