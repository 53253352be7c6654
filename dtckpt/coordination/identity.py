"""State that belongs to the life of this process and outlives a connection: its incarnation, and its calls.

A client that leaves and connects again is still the same process to the others, so it must not begin anew.
"""

from __future__ import annotations

import functools
import os
import secrets
import threading
from dataclasses import dataclass

from dtckpt.coordination.api import Member

_lock = threading.Lock()
_calls: dict[Member, BarrierCalls] = {}


def incarnation() -> int:
    """Return this process's random id; a forked process has another one."""
    return _incarnation(os.getpid())


@functools.cache
def _incarnation(_pid: int) -> int:
    return secrets.randbits(63) or 1


@dataclass(frozen=True, slots=True)
class Report:
    """Where a client is, as it tells with heartbeats and arrivals.

    Operations of a process come one after the other, so of their calls all up to ``num_ended`` have ended.

    Args:
        operation: Id of the operation that the client is in; "": in none, or in the first round of one.
        num_ended: Number of the latest of its operations' calls that has ended, with a verdict or without.
        waits_at: Name of the first round in which it waits, if it does.
    """

    operation: str = ""
    num_ended: int = 0
    waits_at: str = ""


class BarrierCalls:
    """The calls of one client to barriers, in this life of its process. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_calls = 0
        self._latest = 0
        self._report = Report()

    @property
    def report(self) -> Report:
        """Where the client is now."""
        return self._report

    def begin(self, *, of_operation: bool) -> int:
        """Return the number of a new call: greater than that of each one before."""
        with self._lock:
            self._num_calls += 1
            if of_operation:
                self._latest = self._num_calls
            return self._num_calls

    def wait_at(self, name: str) -> None:
        """Note that the client waits in an operation's first round."""
        with self._lock:
            self._report = Report(self._report.operation, self._report.num_ended, name)

    def end(self, call: int, operation: str) -> None:
        """Note that a call of an operation has ended, and which operation the client is in then ("": in none).

        The thread of a call that was interrupted may say so when the client is in the next operation already.
        """
        with self._lock:
            operation = operation if call == self._latest else self._report.operation
            self._report = Report(operation, max(call, self._report.num_ended))

    def leave_operation(self) -> None:
        """Note that the client is in no operation any more, and waits for no answer.

        After an interrupt a thread may still wait for one; whatever it hears, nobody goes on with that.
        """
        with self._lock:
            self._report = Report("", max(self._latest, self._report.num_ended))
            self._latest = 0


def calls_of(member: Member) -> BarrierCalls:
    """Return the calls of a client; all its connections share them."""
    with _lock:
        return _calls.setdefault(member, BarrierCalls())


def pause(wake: threading.Event, leaving: threading.Event, interval_s: float) -> bool:
    """Wait until the next heartbeat is due or wanted; return whether there shall be no more."""
    wake.wait(interval_s)
    wake.clear()
    return leaving.is_set()
