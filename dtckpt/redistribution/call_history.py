"""Histories of this client's calls, by group of clients; and the rule when a group stops calling.

**Number.** A call that sends messages has a number among its clients. Calls of `DTensor.redistribute`,
`DTensor.from_local`, `relayout`, and of `copy_to_mesh` and `distribute_tensor` with a DTensor have a number even if
they send nothing, because the arguments on another client may differ. Operators and `full_tensor` have no number if
they send nothing, because one client may call them alone. Tags of messages contain the number, so messages of different
calls never meet.

**Rule.** After a disagreement the clients go on if each of them raises in the call of that number, or failed before the
call: then their next calls have the same number. Otherwise no client can know which calls correspond. So from then on,
every call among two or more of these clients raises. Calls no longer correspond if

* a client had returned from the call before it heard of the disagreement, as it needed nothing from the others;
* a client did not come to the call (`dtckpt.redistribution.watcher`);
* a client failed outside of a numbered call, as in an operator, and then asks for the redistribution in which the
  others raised its error: both may be one call;
* the assumptions of clients differ: calls that change a layout without a message, and calls among larger groups, which
  go into a digest;
* a call was broken off: a client is gone, a wait timed out, the program was interrupted.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from dtckpt.errors import DtckptError, from_wire, to_wire
from dtckpt.redistribution.agreements import Group
from dtckpt.redistribution.call_record import CallRecord

MAX_REMEMBERED = 1024
"""Most calls that a client remembers after they have returned."""
_MASK = 2**31 - 1

# By default process group, so that the history of a group that has ended goes with it.
_jobs: WeakKeyDictionary[Any, _JobHistories] = WeakKeyDictionary()


class Failure:
    """The reason why a group of clients calls no more.

    Args:
        error: The error, as far as it is known.
        record: The record that says more when all clients have registered there; None: there is none.
    """

    def __init__(self, error: DtckptError, record: CallRecord | None = None) -> None:
        self._error, self._record = error, record

    def error(self) -> DtckptError:
        """Return the error that every further call raises; the same text on every client, once all have registered."""
        record, self._record = self._record, None
        if record is not None:
            with suppress(RuntimeError):  # the store is gone, and with it the texts of other clients
                record.settle()
                self._error = record.error() or self._error
        return self.error_so_far()

    def error_so_far(self) -> DtckptError:
        """Return the error as it is known now, without waiting for the other clients."""
        return from_wire(*to_wire(self._error))  # a new one each time: each gets its own traceback


class GroupHistory:
    """The calls of this client among one group of clients.

    Args:
        failure: See below.
        larger: Histories of the groups that contain this one and more clients.

    Attributes:
        count: Number of calls so far, equal on all clients of the group.
        caller: The thread that made the last call.
        failure: Why every further call raises; None while calls succeed.
        doubtful: The record of an error that this client had outside of a numbered call, until its next call.
        lock: Held to count a call, and to note that this client did not come to one.
    """

    def __init__(self, failure: Failure | None, larger: list[GroupHistory]) -> None:
        self.count = self._assumed = 0
        self.caller = threading.main_thread()
        self.larger = larger
        self._by_thread = threading.local()
        self.failure = failure
        self.doubtful: CallRecord | None = None
        self.lock = threading.Lock()
        self._calls: deque[Any] = deque(maxlen=MAX_REMEMBERED)

    @property
    def assumed(self) -> int:
        """Digest of this client's assumptions about earlier calls of the others; part of the tags of all messages.

        Assumptions are the changes of layout that needed no messages, and the number of calls among larger groups to
        which all clients of this group belong. Each thread counts these calls by itself, as threads go on at different
        speeds.
        """
        position = sum(history.num_in_thread for history in self.larger)
        return (self._assumed + position * 69_069) & _MASK

    @property
    def num_in_thread(self) -> int:
        """How many calls this thread has made."""
        return getattr(self._by_thread, "count", 0)

    def next(self, call: Any, fingerprint: int = 0) -> int:
        """Count a call, and return its number.

        Args:
            call: What to remember of it.
            fingerprint: Of the change of layout that the call assumes on the others, too; 0: the call changes no
                layout.

        Raises:
            DtckptError: The group calls no more.
        """
        with self.lock:
            if self.failure is None:
                if fingerprint:
                    self._assumed = ((self._assumed * 1_000_003 + self.count) ^ fingerprint) & _MASK
                self._calls.append(call)
                self.count += 1
                self._by_thread.count = self.num_in_thread + 1
                self.caller = threading.current_thread()
                return self.count - 1
        raise self.failure.error()

    def call(self, number: int) -> Any:
        """Return the record of a call; None if the call was not made yet, or was made long ago."""
        position = number - self.count + len(self._calls)
        return self._calls[position] if 0 <= position < len(self._calls) else None


class _JobHistories:
    """The histories of all groups of clients.

    Attributes:
        failures: The groups that call no more, and why.
    """

    def __init__(self) -> None:
        self.histories: dict[Group, GroupHistory] = {}
        self.failures: list[tuple[Group, Failure]] = []

    def history(self, group: Group) -> GroupHistory:
        known = self.histories.get(group)
        if known is None:
            failure = next((each for failed, each in self.failures if _share_a_pair(failed, group)), None)
            members, others = {*group}, list(self.histories.items())
            larger = [history for other, history in others if members < {*other}]
            known = self.histories.setdefault(group, GroupHistory(failure, larger))
            for other, history in others:
                if members > {*other}:
                    history.larger.append(known)
        return known

    def fail(self, group: Group, failure: Failure) -> None:
        self.failures.append((group, failure))
        for other, history in list(self.histories.items()):
            if history.failure is None and _share_a_pair(group, other):
                history.failure = failure


def _share_a_pair(one: Group, other: Group) -> bool:
    """Whether two clients are in both groups: then calls of one group may also correspond wrongly in the other."""
    return len({*one}.intersection(other)) > 1


def _job() -> _JobHistories:
    world = dist.group.WORLD
    return _jobs.get(world) or _jobs.setdefault(world, _JobHistories())


def has_calls() -> bool:
    """Whether this client has made calls under the present default process group."""
    return dist.group.WORLD in _jobs


def known_history(group: Group) -> GroupHistory | None:
    """Return the history of some clients, if they have called under the present default process group."""
    world = dist.group.WORLD
    job = None if world is None else _jobs.get(world)
    return None if job is None else job.histories.get(group)


def history_of(group: Group) -> GroupHistory:
    """Return the history of some clients, under the present default process group."""
    return _job().history(group)


def fail(group: Group, failure: Failure, *, unless: Callable[[], bool] = lambda: False) -> bool:
    """Let a group, and all groups that share two clients with it, call no more.

    Args:
        group: The clients.
        failure: Why.
        unless: Asked while no call of the group can be counted; if it is true, nothing happens.

    Returns:
        Whether the group calls no more.
    """
    job = _job()
    history = job.history(group)
    with history.lock:
        if history.failure is None and not unless():
            job.fail(group, failure)
        return history.failure is not None
