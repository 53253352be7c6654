"""Detect that clients ask for different redistributions in one call, so all raise the same error, and no client hangs.

Gloo cannot cancel a wait for a message, and a client with wrong arguments sends no message. So the clients use a record
of the call in the store of the default process group (`dtckpt.redistribution.call_record`). A client that fails writes
its error there; a client that has waited for long writes its request. Each client then takes part in all requests; in
the requests of others its data are zeros:

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
meet: each request has different tags (`dtckpt.redistribution.execute`). `dtckpt.redistribution.call_history` defines
which calls have a number, and when the clients may go on after the error.

While clients agree and are quick, they do not write to the store. Redistributions on NCCL are not covered: the host
does not wait for them.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.distributed as dist

from dtckpt.comm.process_groups import is_connected, is_fake
from dtckpt.config import Config
from dtckpt.errors import CoordinationError, DtckptError
from dtckpt.layout.layout import Layout
from dtckpt.layout.mesh import Mesh
from dtckpt.redistribution import agreements, watcher
from dtckpt.redistribution.agreements import Group
from dtckpt.redistribution.call_history import Failure, GroupHistory, fail, history_of, known_history
from dtckpt.redistribution.call_record import (
    ARGUMENTS_AXIS,
    CallRecord,
    Participation,
    Planner,
    encode,
    error_in,
    last_error,
    subject_of,
)
from dtckpt.redistribution.layout_change import LayoutChange

__all__ = ["ARGUMENTS_AXIS", "Participation", "RedistributionCall", "count_local_call", "report_error"]

_CLIENTS_PER_POLL = 1000
"""Beyond this many clients, each reads the record less often, so that the store can answer all of them."""
Asked = tuple[Layout, Layout, Sequence[int], torch.dtype]
"""The arguments of a `LayoutChange`, which takes longer to make."""
_WENT_ON = "had returned from this call"


class RedistributionCall:
    """One redistribution that this client asks for, together with all clients of its meshes.

    Args:
        changes: The changes that this client asks for.
        plan: Plans this client's participation in the requests of others.

    Attributes:
        count: The number of the call among these clients, equal on all of them.
        digest: Digest of this client's agreements (`dtckpt.redistribution.agreements`) and assumptions
            (`dtckpt.redistribution.call_history`).

    Raises:
        DtckptError: The clients call no more.
    """

    def __init__(self, changes: Sequence[LayoutChange], plan: Planner) -> None:
        self._changes, self._plan = changes, plan
        self._group = _group(tuple({mesh: None for change in changes for mesh in change.meshes}))
        history = history_of(self._group)
        _resolve_doubt(history, self._group, changes)
        self._facts = agreements.digest(self._group), history.assumed
        self.digest = self._facts[0] ^ self._facts[1]
        self._record: CallRecord | None = None
        self._has_failed = self._is_over = False
        self._next_poll = 0.0
        self._polling, self._registering = threading.Lock(), threading.Lock()
        self.count = history.next(self)
        watcher.ensure_running(plan)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Have the watcher thread poll for this call while the body waits for other clients."""
        with watcher.polling(self):
            yield

    def validate(self) -> None:
        """Check after the redistribution, with the facts known here, that all clients asked for the same changes.

        Raises:
            DtckptError: A client failed: its error. `LayoutError` if clients asked for different changes.
        """
        with self._polling:
            self._is_over = True
            # Without a record no thread here has waited for long. Then this client does not ask the store, and saves a
            # round trip.
            if self._record is None:
                return
            if self._record.error() is None:
                self._record.leave()
                return
            self._has_failed = True
            raise settled_error(self._group, self._record)

    def break_off(self, error: BaseException) -> DtckptError | None:
        """Let the clients call no more, because this client leaves the call in the middle.

        Returns:
            The error of the group, if the group called no more already: the reason why others have left.
        """
        self._has_failed = self._is_over = True  # in this order, for the watcher
        if (earlier := history_of(self._group).failure) is not None:
            return earlier.error()
        fail(self._group, Failure(last_error(CoordinationError(f"an earlier call failed: {error!r}"))))
        return None

    def poll(self, now: float) -> None:
        """Write this client's request to the record, and join the requests of others as far as the rules allow.

        Args:
            now: Monotonic seconds. Before the next poll is due, nothing happens.
        """
        with self._polling:
            if not self._is_over and now >= self._next_poll:
                self._next_poll = now + watcher.PATIENCE_S * max(1, len(self._group) / _CLIENTS_PER_POLL)
                self._register().join_requests()

    def is_answered(self, now: float) -> bool:
        """Do this client's part for others that wait in this call; return whether this part is complete."""
        if not self._is_over:
            self.poll(now)
            return False
        # Held while `validate` decides whether the call returns. That thread settles the record, so nothing remains to
        # do here.
        if not self._polling.acquire(blocking=False):
            return False
        try:
            if self._has_failed:
                return self._record is None or self._record.is_settled()
            self._record = record = self._record or CallRecord(self._group, self.count, self._plan)
            is_over = _has_gone_on(record, self._group, encode(self._changes, self._facts))
            return is_over or record.is_left()
        finally:
            self._polling.release()

    def _register(self) -> CallRecord:
        """Write this client's request to the record, once, and return the record."""
        with self._registering:
            if self._record is None:
                record = CallRecord(self._group, self.count, self._plan)
                record.add_request(encode(self._changes, self._facts))
                self._record = record
            return self._record


@dataclass(slots=True)
class LocalCall:
    """A call in which this client needed no messages and sent none.

    Args:
        group: The clients.
        number: Its number among them.
        asked: The changes that it asked for.
        plan: As for `RedistributionCall`.
    """

    group: Group
    number: int
    asked: Sequence[Asked]
    plan: Planner
    _record: CallRecord | None = None

    def is_answered(self, now: float) -> bool:
        """Tell clients that disagree in this call that this client has gone on; return whether its part is complete."""
        del now
        # The same record always: it knows the requests in which this client has taken part.
        self._record = self._record or CallRecord(self.group, self.number, self.plan)
        return (
            _has_gone_on(self._record, self.group, encode(_changes(self.asked), (None, None))) or self._record.is_left()
        )


def _has_gone_on(record: CallRecord, group: Group, request: str) -> bool:
    """Report to the others, if they disagree in a call that has returned here, that this client has gone on.

    Args:
        record: Of the call.
        group: Its clients.
        request: This client's request.

    Returns:
        Whether they disagree.
    """
    state = record.read()
    if not state["errors"] and not state["requests"].keys() - {request}:
        return False
    # First this client calls no more. As soon as others see its registration, they may raise and call again.
    state["requests"].setdefault(request, dist.get_rank())
    state["astray"][str(dist.get_rank())] = _WENT_ON
    error = error_in(state)
    assert error is not None  # noqa: S101  (they disagree)
    fail(group, Failure(error, record))
    record.add_request(request, astray=_WENT_ON)
    watcher.settle_later(record)
    return True


def settled_error(group: Group, record: CallRecord) -> DtckptError:
    """Wait for the requests of all clients, and return the error that all of them raise."""
    if not record.settle():
        watcher.settle_later(record)
    agreements.forget(group)
    error = record.error()
    assert error is not None  # noqa: S101  (the caller has found one, and no record loses any)
    if record.is_last():
        fail(group, Failure(error))
    return error


def count_local_call(asked: Sequence[Asked], plan: Planner, *, is_assumed: bool = False) -> None:
    """Count a public call that sends nothing, so that later calls have the same number on all clients.

    Args:
        asked: The changes; a tensor that stays as it is changes to its own layout.
        plan: As for `RedistributionCall`.
        is_assumed: Whether this client assumes the same change on the others even if the layout stays.

    Raises:
        DtckptError: The clients call no more.
    """
    first = asked[0][0].mesh
    # By identity, because a comparison of meshes takes longer than all other work here.
    if all(source.mesh is first and target.mesh is first for source, target, *_ in asked):
        group = first.clients
    else:
        group = _group(tuple({mesh: None for source, target, *_ in asked for mesh in (source.mesh, target.mesh)}))
    # Most calls are of a known group, and cost a look into a table and a count.
    history = known_history(group)
    if history is None:
        if not _is_watched(group):
            return
        history = history_of(group)
        watcher.ensure_running(plan)
    if history.doubtful is not None:
        _resolve_doubt(history, group, _changes(asked))
    moved = [each for each in asked if is_assumed or (each[0] is not each[1] and each[0] != each[1])]
    fingerprint = zlib.crc32(repr([_fingerprint(change) for change in _changes(moved)]).encode()) if moved else 0
    history.next(LocalCall(group, history.count, asked, plan), fingerprint)


def _changes(asked: Sequence[Asked]) -> list[LayoutChange]:
    return [LayoutChange(source, target, tuple(shape), dtype) for source, target, shape, dtype in asked]


def _resolve_doubt(history: GroupHistory, group: Group, changes: Sequence[LayoutChange]) -> None:
    """Let the clients call no more if the others may have raised this client's last error in this call.

    The error had no number here, so it took the number of the others' next call. If this client continues after that
    call, all clients have the same number. If it makes that call now, it is one call behind.
    """
    record, history.doubtful = history.doubtful, None
    if record is None or history.failure is not None:
        return
    deadline = time.monotonic() + Config.from_environ().heartbeat_timeout_s
    while not (is_settled := record.settle()) and time.monotonic() < deadline:
        pass  # `settle` waits
    own = subject_of(encode(changes, (None, None)))
    if is_settled and own not in map(subject_of, record.read()["requests"]):
        return
    error = record.error()
    assert error is not None  # noqa: S101  (this client has written one)
    reason = f"client {dist.get_rank()} may make the call now in which the others raised this"
    fail(group, Failure(last_error(error, [reason])))


def report_error(error: DtckptError, meshes: Sequence[Mesh], plan: Planner, *, is_numbered: bool = False) -> bool:
    """Report to the other clients an error that keeps this client from a redistribution, and join their requests.

    The error stands for the next call among these clients. The others raise it in that call, however late they come.

    Blocks: Until all clients have registered and this client has joined their requests. If some do not come, until
    `GRACE_S` after the last client that came, or longer if this client cannot join a request before.

    Args:
        error: The error of this client.
        meshes: All known meshes of the redistribution, sources and targets.
        plan: Plans this client's participation in the requests of others.
        is_numbered: Whether the failed call has a number on every client, with any arguments.

    Returns:
        Whether others asked for a redistribution.
    """
    group = _group(tuple(dict.fromkeys(meshes)))
    if not _is_watched(group):
        return False
    history = history_of(group)
    if history.failure is not None:
        return False  # the others raise without this error
    failed = FailedCall(CallRecord(group, history.count, plan))
    history.next(failed)
    history.doubtful = None if is_numbered else failed.record
    failed.record.add_error(error)
    settled_error(group, failed.record)
    return bool(failed.record.read()["requests"])


class FailedCall(NamedTuple):
    """A call that this client could not make.

    Args:
        record: Holds its error.
    """

    record: CallRecord

    def is_answered(self, now: float) -> bool:
        """Join the requests of others; return whether all clients have registered in this call."""
        del now
        return self.record.is_settled()


def _is_watched(group: Group) -> bool:
    return len(group) > 1 and is_connected(group) and not is_fake() and dist.get_rank() in group


@lru_cache(maxsize=1024)
def _fingerprint(change: LayoutChange) -> int:
    return change.fingerprint


@lru_cache(maxsize=256)
def _group(meshes: tuple[Mesh, ...]) -> Group:
    """Return all clients of some meshes: they take part in every redistribution between these."""
    if len(meshes) == 1:
        return meshes[0].clients
    return tuple(sorted({client for mesh in meshes for client in mesh.clients}))
