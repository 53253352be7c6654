"""Fault injection for tests: a coordination that loses requests or answers, blocks or raises at chosen calls."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from dtckpt.coordination.api import (
    NO_POSITION,
    YES,
    Coordination,
    JobStatus,
    Member,
    Operation,
    Position,
    Progress,
    Verdict,
    Vote,
)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault at one call.

    Args:
        error: Raised instead of the call.
        before: Called first; may block or raise.
        after_call: Make the call before ``error`` is raised: the answer is lost, not the request.
    """

    error: BaseException | None = None
    before: Callable[[], None] | None = None
    after_call: bool = False


class FaultyCoordination:
    """Wraps any coordination and injects faults.

    Args:
        inner: The coordination that does the work.
        faults: Fault by call. A call is (name of the method, how often it was called before).

    Attributes:
        calls: How often each method was called.
        drop_heartbeats: While this event is set, reported progress is dropped.
    """

    def __init__(self, inner: Coordination, faults: Mapping[tuple[str, int], Fault] | None = None) -> None:
        self.calls: Counter[str] = Counter()
        self.drop_heartbeats = threading.Event()
        self._inner = inner
        self._faults = dict(faults or {})
        self._lock = threading.Lock()

    @property
    def member(self) -> Member:
        return self._inner.member

    @property
    def heartbeat_timeout_s(self) -> float:
        return self._inner.heartbeat_timeout_s

    def _inject(self, method: str, call: Callable[[], T]) -> T:
        with self._lock:
            fault = self._faults.get((method, self.calls[method]), Fault())
            self.calls[method] += 1
        if fault.before is not None:
            fault.before()
        if fault.error is not None and not fault.after_call:
            raise fault.error
        answer = call()
        if fault.error is not None:
            raise fault.error
        return answer

    def register(self) -> None:
        self._inject("register", self._inner.register)

    def heartbeat(self, progress: Progress) -> None:
        if not self.drop_heartbeats.is_set():
            self._inject("heartbeat", lambda: self._inner.heartbeat(progress))

    def barrier(
        self,
        name: str,
        vote: Vote = YES,
        *,
        timeout_s: float,
        participants: Sequence[int] | None = None,
        collect: bool = False,
        operation: Operation | None = None,
        position: Position = NO_POSITION,
    ) -> Verdict:
        return self._inject(
            "barrier",
            lambda: self._inner.barrier(
                name,
                vote,
                timeout_s=timeout_s,
                participants=participants,
                collect=collect,
                operation=operation,
                position=position,
            ),
        )

    def leave(self) -> None:
        self._inject("leave", self._inner.leave)

    def status(self) -> JobStatus:
        return self._inject("status", self._inner.status)
