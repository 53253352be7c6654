"""The identity of this process: its random incarnation, and the numbers of its calls to barriers.

Both outlive a connection: a client that leaves and connects again is the same process to the others, so the numbers of
its calls must not begin at 1 again.
"""

from __future__ import annotations

import functools
import os
import secrets
import socket
import threading
from dataclasses import dataclass

from dtckpt.coordination.api import Member

_lock = threading.Lock()
_calls: dict[Member, BarrierCalls] = {}


def host_name() -> str:
    """Return the name of this host: the variable ``DTCKPT_HOST``, else its host name."""
    return os.environ.get("DTCKPT_HOST") or socket.gethostname()


def incarnation(attempt: int | None = None) -> int:
    """Return this process's random id; a forked process has another id.

    Args:
        attempt: An attempt of the job that this process has joined after another one. The process has another id there,
            so that a late message of the earlier attempt cannot count as one of this attempt.
    """
    return _incarnation(os.getpid(), attempt)


@functools.cache
def _incarnation(_pid: int, _attempt: int | None) -> int:
    return secrets.randbits(63) or 1


@dataclass(frozen=True, slots=True)
class OperationReport:
    """The operation of a client, as its heartbeats and arrivals report it.

    Operations of a process come one after the other, so all calls up to ``num_ended`` that belong to one have ended.

    Args:
        operation: Id of the operation that the client is in; "": in none, or in the first round of one.
        num_ended: Number of the latest call of an operation that has ended, with a verdict or without.
        waits_at: Name of the barrier, if the client waits in the first round of an operation.
    """

    operation: str = ""
    num_ended: int = 0
    waits_at: str = ""


class BarrierCalls:
    """Numbers one client's calls to barriers, in the life of its process, and reports its operation. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_calls = 0
        self._latest = 0
        self._report = OperationReport()

    @property
    def report(self) -> OperationReport:
        """The client's current operation and ended calls."""
        return self._report

    def begin(self, *, of_operation: bool) -> int:
        """Return the number of a new call, which is greater than the numbers of all earlier calls."""
        with self._lock:
            self._num_calls += 1
            if of_operation:
                self._latest = self._num_calls
            return self._num_calls

    def wait_at(self, name: str) -> None:
        """Note that the client waits in an operation's first round."""
        with self._lock:
            self._report = OperationReport(self._report.operation, self._report.num_ended, name)

    def end(self, call: int, operation: str) -> None:
        """Note the end of an operation's call, and the client's operation after it ("": none).

        After an interrupt, the thread of the old call may come here when the client is already in the next operation.
        Then ``operation`` is ignored.
        """
        with self._lock:
            operation = operation if call == self._latest else self._report.operation
            self._report = OperationReport(operation, max(call, self._report.num_ended))

    def leave_operation(self) -> None:
        """Note that the client is in no operation any more, and waits for no answer.

        After an interrupt a thread may still wait for an answer, but no caller uses that answer.
        """
        with self._lock:
            self._report = OperationReport("", max(self._latest, self._report.num_ended))
            self._latest = 0


def calls_of(member: Member) -> BarrierCalls:
    """Return the calls of a client; all its connections share them."""
    with _lock:
        return _calls.setdefault(member, BarrierCalls())


def wait_for_heartbeat(wake: threading.Event, leaving: threading.Event, interval_s: float) -> bool:
    """Wait until the next heartbeat is due, or ``wake`` is set; return whether the client is leaving."""
    wake.wait(interval_s)
    wake.clear()
    return leaving.is_set()
