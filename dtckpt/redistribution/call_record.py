"""The record of one call of redistribution in the default group's store: requests, errors, and astray clients.

A record exists only for a call that goes wrong or takes long. Its first writer sets an *alarm*, which names the record.
Every client looks for alarms (`dtckpt.redistribution.watcher`), so a client learns of a record whatever its threads do.

    dtckpt/redistribute/<clients>/<number>            requests, errors, clients that are astray
    dtckpt/redistribute/<clients>/<number>/<client>   the client has registered: it has written all that it has to say
    dtckpt/redistribute/<clients>/<number>/here       how many have registered
    dtckpt/redistribute/<clients>/<number>/gone       how many of these have returned without an error
    dtckpt/redistribute/alarm/<number>                clients and number of a record
    dtckpt/redistribute/alarms                        how many alarms there are, at least
"""

from __future__ import annotations

import json
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from dtckpt._proto import layout_pb2
from dtckpt.comm import torch_private
from dtckpt.errors import CoordinationError, DtckptError, LayoutError, capped, from_wire, to_wire
from dtckpt.layout.layout import Layout
from dtckpt.layout.mesh import Mesh
from dtckpt.redistribution import agreements
from dtckpt.redistribution.agreements import Group
from dtckpt.redistribution.layout_change import LayoutChange

GRACE_S = 2.0
"""How long a client that settles a call waits for others to register; the watcher waits for later clients."""
_POLL_S = 0.01
_JOIN_S = 60.0
"""How long a client that settles a call waits for the clients that must register before it may join a request."""

ARGUMENTS_AXIS = "arguments"
"""The axis of meshes on which clients exchange the arguments of a call (`dtckpt.dtensor.gather_objects`)."""
_LAST_CALL = (
    "from now on every redistribution among two or more of these clients raises, because their calls no longer "
    "correspond; restart the clients, or end the process group on all of them and make another"
)
"""End of the text of an error after which a group of clients calls no more (`dtckpt.redistribution.call_history`)."""
_PREFIX = "dtckpt/redistribute"


class Participation(NamedTuple):
    """How this client takes part, with zeros, in a redistribution that others ask for.

    Args:
        prerequisites: Other clients that cannot complete the redistribution before this client takes part.
        run: Takes part, and waits until that is done.
    """

    prerequisites: frozenset[int]
    run: Callable[[], None]


Planner = Callable[[Callable[[int], Sequence[LayoutChange]], int, int], Participation]
"""Returns a participation.

The first argument returns the requested changes, as a client sees them. The others are the number of the call among its
clients, and a digest of the agreements and assumptions of the requesting clients.
"""

# By default process group. A clone has a separate connection, so a program's own wait for a key does not block it.
_stores: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def _store() -> Any:
    world = dist.group.WORLD
    if world not in _stores:
        _stores[world] = torch_private.get_default_store().clone()
    return _stores[world]


def next_alarm(number: int) -> tuple[Group, int] | None:
    """Return the clients and the number of the record that an alarm names; None if there is no such alarm yet."""
    store, key = _store(), f"{_PREFIX}/alarm/{number}"
    if not store.check([key]):
        return None
    group, count = json.loads(store.get(key))
    return tuple(group), count


class CallRecord:
    """The record of one call.

    No client may take zeros for a result. Two rules prevent it:

    1. A client writes its own request or error, and registers, before it joins the request of another.
    2. A client joins a request only when all clients that wait for this client there have registered
       (`Participation.prerequisites`). A registered client reads the record again when its call is complete. So it
       finds the other request, and raises instead of returning.

    Args:
        group: The clients.
        count: The number of the call among them.
        plan: Plans this client's participation in the requests of others.
    """

    def __init__(self, group: Group, count: int, plan: Planner) -> None:
        self._key = f"{_PREFIX}/{len(group)}-{zlib.crc32(repr(group).encode())}/{count}"
        self._group, self._count = group, count
        self.plan = plan
        self._client = dist.get_rank()
        self._store = _store()
        self._world = weakref.ref(dist.group.WORLD)
        self._has_registered = False
        self._joining = threading.Lock()
        # Requests in which this client has taken part, including its own request, and its participation in others.
        self._joined: set[str] = set()
        self._participations: dict[str, Participation] = {}

    def read(self) -> dict[str, Any]:
        """Return the texts that clients have written.

        Returns:
            ``requests``: by request, the client that wrote it first. ``errors``: by client, code and text. ``astray``:
            by client, why its calls no longer correspond to the calls of the others.
        """
        return _parse(self._store.get(self._key) if self._store.check([self._key]) else b"")

    def error(self) -> DtckptError | None:
        """Return the error that all clients raise, if there is any yet."""
        return error_in(self.read())

    def is_last(self) -> bool:
        """Whether the clients call no more after this call."""
        return _is_last(self.read())

    def add_request(self, request: str, astray: str = "") -> None:
        """Write this client's request and, if it went astray, the reason; register this client.

        Args:
            request: See `encode`.
            astray: See `read`; empty for a client that waits in the call.
        """
        self._joined.add(request)

        def change(state: dict[str, Any]) -> bool:
            is_new = state["requests"].setdefault(request, self._client) == self._client
            return bool(astray and state["astray"].setdefault(str(self._client), astray)) or is_new

        self._update(change)
        self._register()

    def add_error(self, error: DtckptError) -> None:
        """Write this client's error, unless another client has written an error already; register this client."""
        # One error is enough: all clients may fail at once, and they may be many.
        self._update(
            lambda state: not state["errors"] and bool(state["errors"].setdefault(str(self._client), to_wire(error)))
        )
        self._register()

    def add_astray(self, reason: str) -> None:
        """Write why this client, which did not make the call, no longer corresponds to the others; register it."""
        self._update(lambda state: bool(state["astray"].setdefault(str(self._client), reason)))
        self._register()

    def _update(self, change: Callable[[dict[str, Any]], bool]) -> None:
        """Change the state by compare-and-set, until that succeeds or ``change`` changes nothing."""
        current = self._store.get(self._key) if self._store.check([self._key]) else b""
        while change(state := _parse(current)) and (changed := json.dumps(state)) != current.decode():
            # To a store, an expected value of "" also stands for a key that no client has written yet.
            stored = self._store.compare_set(self._key, current.decode(), changed)
            if stored.decode() == changed:
                break
            current = stored

    def _register(self) -> None:
        if self._has_registered:
            return
        self._has_registered = True
        self._store.set(f"{self._key}/{self._client}", "here")
        # The count comes last, so a client that counts this one also finds its key and its request.
        num_here = self._store.add(f"{self._key}/here", 1)
        # If all earlier clients have returned, they no longer look at this record.
        if num_here - 1 == self._store.add(f"{self._key}/gone", 0):
            self._set_alarm()

    def _set_alarm(self) -> None:
        text = json.dumps([self._group, self._count])
        number = self._store.add(f"{_PREFIX}/alarms", 0)
        # The count may lag, and two clients may set one alarm. No count is too high, so there is no gap.
        while self._store.compare_set(f"{_PREFIX}/alarm/{number}", "", text).decode() != text:
            number += 1
        self._store.add(f"{_PREFIX}/alarms", 1)

    def leave(self) -> None:
        """Note that this client, which has registered, returns without an error."""
        self._store.add(f"{self._key}/gone", 1)

    def is_left(self) -> bool:
        """Whether no client waits here any more, because all registered clients have returned without an error."""
        num_gone = self._store.add(f"{self._key}/gone", 0)  # first; see `_register`
        return bool(num_gone >= self.num_registered())

    def join_requests(self) -> bool:
        """Take part in the requests of others, in their order, up to the first whose prerequisites are missing.

        Returns:
            Whether this client has taken part in all requests. False also while another thread joins them.
        """
        if not self._joining.acquire(blocking=False):
            return False
        try:
            return self._join_requests()
        finally:
            self._joining.release()

    def _join_requests(self) -> bool:
        # In the order of the record, of which every client knows a first part. In different orders, each of three
        # clients could take part in the request of the next client, and all would wait.
        for request in [request for request in self.read()["requests"] if request not in self._joined]:
            if request not in self._participations:
                self._participations[request] = self.plan(partial(_decode, request), self._count, _digest_in(request))
            prerequisites, run = self._participations[request]
            keys = [f"{self._key}/{client}" for client in sorted(prerequisites)]
            if keys and not self._store.check(keys):
                return False
            self._joined.add(request)
            run()
        return True

    def settle(self) -> bool:
        """Join the requests of others until all clients have registered.

        Returns:
            Whether all have registered. If not, none came for `GRACE_S`, or this client could not join requests for
            longer.
        """
        num_seen, since = 0, time.monotonic()
        while True:
            num_registered, has_joined_all = self._join()
            if num_registered == len(self._group) and has_joined_all:
                return True
            if num_registered != num_seen:
                num_seen, since = num_registered, time.monotonic()
            if time.monotonic() > since + (GRACE_S if has_joined_all else _JOIN_S):
                return False
            time.sleep(_POLL_S)

    def is_settled(self) -> bool:
        """Join the requests of others; return whether all have registered, or the process group has ended."""
        world = self._world()
        return world is None or world is not dist.group.WORLD or self._join() == (len(self._group), True)

    def num_registered(self) -> int:
        """Return how many clients have registered."""
        return int(self._store.add(f"{self._key}/here", 0))

    def _join(self) -> tuple[int, bool]:
        # Count first: a client writes its request before it registers, so this read finds the requests of all counted
        # clients.
        return self.num_registered(), self.join_requests()


def _parse(data: bytes) -> dict[str, Any]:
    return json.loads(data) if data else {"requests": {}, "errors": {}, "astray": {}}


def _is_last(state: Mapping[str, Any]) -> bool:
    has_heard = any(text.endswith(_LAST_CALL) for _, text in state["errors"].values())
    return has_heard or bool(state["astray"]) or len(_assumed_in(state)) > 1


def error_in(state: Mapping[str, Any]) -> DtckptError | None:
    """Return the error that a record's state stands for, if any."""
    error = _cause_in(state)
    if not _is_last(state) or (error is not None and error.message.endswith(_LAST_CALL)):
        return error
    reasons = [f"client {client} {reason}" for client, reason in sorted(state["astray"].items())]
    return last_error(error or CoordinationError("redistribute: clients wait in vain"), reasons)


def last_error(cause: DtckptError, reasons: Sequence[str] = ()) -> DtckptError:
    """Return the error after which a group of clients calls no more.

    Args:
        cause: The first error.
        reasons: Why the clients' calls no longer correspond.
    """
    code, text = to_wire(cause)
    return from_wire(code, "; ".join(filter(None, (text, capped(reasons, 4), _LAST_CALL))))


def _cause_in(state: Mapping[str, Any]) -> DtckptError | None:
    """Return a client's own error, else an error about the difference of requests, if they differ."""
    if state["errors"]:
        client, (code, message) = min(state["errors"].items(), key=lambda item: int(item[0]))
        # An error with this end concerns all clients. This client only passes the error on, so the text does not name
        # it.
        return from_wire(code, message if message.endswith(_LAST_CALL) else f"client {client}: {message}")
    if len(state["requests"]) < 2:
        return None
    if len(_assumed_in(state)) > 1:
        return LayoutError(
            "redistribute, relayout or from_local: clients made different calls before, on a larger mesh or without "
            "messages"
        )
    if len({_facts_in(request)[0] for request in state["requests"]} - {None}) > 1:
        return LayoutError(agreements.MISMATCH)
    requests = sorted(f"client {client}: {_summary(request)}" for request, client in state["requests"].items())
    return LayoutError(
        f"redistribute: clients want different things; got {capped(requests, 4)}; expected the same on all"
    )


# --- requests, as text ---------------------------------------------------------------------------------------------

Facts = tuple[int | None, int | None]
"""The digests of a client's agreements and of its assumptions; None: the client needs no messages."""


def encode(changes: Sequence[LayoutChange], facts: Facts) -> str:
    """Return changes and digests as a text, which is the same on every client that agrees."""
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
    return json.dumps([items, [mesh.portable().as_proto().SerializeToString().hex() for mesh in meshes], facts])


def subject_of(request: str) -> Any:
    """Return the changes that a request asks for, without its client's digests."""
    return json.loads(request)[:2]


def _facts_in(request: str) -> Facts:
    granted, assumed = json.loads(request)[2]
    return granted, assumed


def _digest_in(request: str) -> int:
    granted, assumed = _facts_in(request)
    return (granted or 0) ^ (assumed or 0)


def _assumed_in(state: Mapping[str, Any]) -> set[int | None]:
    return {_facts_in(request)[1] for request in state["requests"]} - {None}


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
    return capped(map(_described, changes), 3)


def _described(change: LayoutChange) -> str:
    """Describe a change with all facts that may differ between requests, so that an error shows the difference."""
    what, source, target = f"{change.shape} of {change.dtype}", change.source, change.target
    if source == target:
        return f"{what} as it is, {target.placements} on {target.mesh.label}"
    if source.mesh == target.mesh:
        return f"{what} from {source.placements} to {target.placements} on {target.mesh.label}"
    return f"{what} from {source.placements} on {source.mesh.label} to {target.placements} on {target.mesh.label}"
