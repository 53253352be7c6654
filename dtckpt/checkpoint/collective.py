"""Collective work in rounds: each client does its part, then all agree at a barrier whether everyone's went well.

The first round of an operation gives it its identity; the later ones belong to it
(`dtckpt.coordination.barrier_rules`).
An operation inside another one, such as a restore inside a manager's, takes all of its rounds inside that one.
"""

from __future__ import annotations

import functools
import operator
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from time import monotonic
from typing import SupportsIndex, TypeGuard

from dtckpt.checkpoint.timing import BARRIER, Phases
from dtckpt.comm.background_threads import begin
from dtckpt.coordination.api import (
    BEGIN,
    NO_POSITION,
    Coordination,
    Member,
    Operation,
    Position,
    Progress,
    Verdict,
    Vote,
)
from dtckpt.coordination.identity import calls_of
from dtckpt.coordination.operation_ordinals import NBYTES, Ordinal, OrdinalTracker
from dtckpt.errors import ConfigError, CoordinationError, DtckptError, MeshError, SaveDisagreementError
from dtckpt.format.digest import bytes_digest

_running = threading.Lock()
_outer: ContextVar[Rounds | None] = ContextVar("_outer", default=None)
"""The operation that this thread is inside of."""


def is_step(step: object) -> TypeGuard[SupportsIndex]:
    """Whether clients can compare this as a step."""
    return hasattr(step, "__index__") and not isinstance(step, bool) and 0 <= operator.index(step) < 1 << 63


def validate_step(step: object) -> None:
    """Raise `ConfigError` if this is neither a step nor None."""
    if step is not None and not is_step(step):
        raise ConfigError(f"a step must be a whole number from 0 to 2^63 - 1; got {step!r}")


@functools.cache
def tracker_of(member: Member, operation: str, participants: tuple[int, ...]) -> OrdinalTracker:  # noqa: ARG001  its key
    """Return which operation of a kind a client is at, in the life of its process, whatever connections it uses."""
    return OrdinalTracker(operation)


class Rounds:
    """The rounds of one collective operation, as one client goes through them.

    Args:
        coordination: The way to the other clients.
        operation: First part of the barriers' names.
        timeout_s: Longest wait for the others, per round.
        participants: Clients that take part; default all clients of the job.

    Raises:
        MeshError: A participant is no client of the job.
    """

    def __init__(
        self, coordination: Coordination, operation: str, timeout_s: float, participants: Sequence[int] | None = None
    ) -> None:
        self._coordination = coordination
        self._name = operation
        self._timeout_s = timeout_s
        self.client = coordination.member.client
        everyone = range(coordination.member.num_clients)
        self.participants = tuple(everyone if participants is None else sorted(participants))
        strangers = sorted(set(self.participants) - set(everyone))
        if strangers or self.client not in self.participants:
            raise MeshError(
                f"{operation} cannot run over clients {list(self.participants)} from client {self.client}; the job "
                f"{coordination.member.job!r} has clients 0 to {len(everyone) - 1}; the mesh must be made of those, "
                "and only its members take part"
            )
        # Groups of clients that share no member may save at the same time; each has barriers of its own.
        is_everyone = self.participants == tuple(everyone)
        self._group = "" if is_everyone else f"#{bytes_digest(repr(self.participants).encode()):016x}"
        self._outer = _outer.get()
        self._operation = BEGIN if self._outer is None else self._outer.operation
        self._used: Counter[str] = Counter() if self._outer is None else self._outer._used
        self._tracker: OrdinalTracker | None = None
        self.phases = Phases(operation, self.client, coordination.heartbeat)

    @property
    def operation(self) -> Operation:
        """The operation that the next round belongs to; `BEGIN` before the first."""
        return self._operation

    @property
    def is_leader(self) -> bool:
        """Whether this client does what only one may do."""
        return self.client == self.leader

    @property
    def leader(self) -> int:
        """The client that does what only one may do: the lowest participant."""
        return min(self.participants)

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Keep other threads' saves and restores over several clients out, and clear the phase at the end.

        Threads that save at the same time must come in the same order on every client: rounds of one name are one.
        It may be left in another thread than the one that entered it.

        Raises:
            CoordinationError: Another thread's did not end in time.
        """
        if len(self.participants) == 1 or self._outer is not None:
            yield
            return
        if not _running.acquire(timeout=self._timeout_s):
            raise CoordinationError(
                f"{self._name} cannot begin: another thread's save or restore did not end in {self._timeout_s:g} s"
            )
        try:
            yield
        finally:
            calls_of(self._coordination.member).leave_operation()
            _running.release()
            self._coordination.heartbeat(Progress())

    @contextmanager
    def around(self) -> Iterator[None]:
        """Have operations that this thread runs inside take place inside this one, which has begun."""
        token = _outer.set(self if len(self.participants) > 1 else None)
        try:
            yield
        finally:
            _outer.reset(token)

    def begin(
        self,
        name: str,
        work: Callable[[], bytes | None],
        *,
        step: int | None = None,
        phase: str = "",
        meanwhile: Callable[[], object] | None = None,
    ) -> Mapping[int, bytes]:
        """Run the first round of an operation that all clients must be at alike; arguments and result as of `run`.

        Args:
            name: Name of the round.
            work: This client's part.
            step: Which operation this is, from 0 on; default: as many as this process has begun.
            phase: What the part is measured as.
            meanwhile: What to do while the others are waited for.

        Raises:
            ConfigError: The step is none; raised on all clients.
            SaveDisagreementError: Clients are at different operations; see `dtckpt.coordination.operation_ordinals`.
        """

        def part() -> bytes:
            validate_step(step)
            return work() or b""

        if len(self.participants) == 1:
            return self.run(name, part, phase=phase, meanwhile=meanwhile)
        tracker = self._tracker = tracker_of(self._coordination.member, self._name, self.participants)
        ordinal = tracker.next_ordinal(operator.index(step)) if is_step(step) else tracker.next_ordinal()
        # Whatever the others are at: that the step is none concerns them.
        ordinal = replace(ordinal, is_unsure=ordinal.is_unsure or not (step is None or is_step(step)))

        def meet(vote: Vote) -> Mapping[int, bytes]:
            def once() -> Verdict:
                self._operation = BEGIN
                calls_of(self._coordination.member).leave_operation()
                return self._meet(name, vote, ordinal.position)

            return meet_alike(once, tracker, self.client)

        return self._round(name, lambda: ordinal.to_bytes() + part(), meet, phase, meanwhile)

    def run(
        self,
        name: str,
        work: Callable[[], bytes | None],
        *,
        phase: str = "",
        meanwhile: Callable[[], object] | None = None,
    ) -> Mapping[int, bytes]:
        """Do this client's part of a round and learn how it went for all.

        Collective: Over the participants, barrier ``<operation>/<name>``. Passes for all or raises the same error
        for all, at once when any client's part fails. With a single participant there is no barrier.

        Args:
            name: Name of the round.
            work: This client's part; what it returns is handed to all participants.
            phase: What the part is measured as; default: the round's name. Waiting is measured as ``barrier``.
            meanwhile: What to do while the others are waited for, if ``work`` went well. The round does not depend on
                it, and what it raises is raised here only.

        Returns:
            What every participant's part returned.
        """
        return self._round(name, work, lambda vote: self._meet(name, vote).payloads, phase, meanwhile)

    def _round(
        self,
        name: str,
        work: Callable[[], bytes | None],
        meet: Callable[[Vote], Mapping[int, bytes]],
        phase: str,
        meanwhile: Callable[[], object] | None,
    ) -> Mapping[int, bytes]:
        self.phases.enter(name)
        failure: BaseException | None = None
        payload = b""
        try:
            with self.phases.measure(phase or name):
                payload = work() or b""
        except BaseException as error:
            if len(self.participants) == 1:
                raise
            failure = error
        try:
            if len(self.participants) == 1:
                if meanwhile is not None:
                    meanwhile()
                return {self.client: payload}
            vote = Vote(payload=payload) if failure is None else Vote.of_error(failure)
            met = None
            if meanwhile is not None and failure is None:
                met = begin(lambda: meet(vote), "dtckpt-round")
                meanwhile()
            with self.phases.measure(BARRIER):
                return meet(vote) if met is None else met.result()
        except DtckptError as verdict:
            if failure is not None and not isinstance(failure, Exception):
                raise failure from verdict
            raise verdict from failure

    def _meet(self, name: str, vote: Vote, position: Position = NO_POSITION) -> Verdict:
        full_name = f"{self._name}/{name}{self._group}"
        if self._operation.id:
            self._used[full_name] += 1  # inside one operation all clients go through the same rounds
            if self._used[full_name] > 1:
                full_name += f".{self._used[full_name]}"
        begun = monotonic()
        try:
            verdict = self._coordination.barrier(
                full_name,
                vote,
                timeout_s=self._timeout_s,
                participants=self.participants,
                collect=True,
                operation=self._operation,
                position=position,
            )
        except BaseException as error:
            if self._tracker is not None:
                self._tracker.note_failure(error, self.client, monotonic() - begun)
            raise
        self._operation = verdict.operation
        return verdict


def meet_alike(
    meet: Callable[[], Verdict],
    tracker: OrdinalTracker,
    client: int,
    error: type[DtckptError] = SaveDisagreementError,
) -> Mapping[int, bytes]:
    """Meet until all clients are at the same operation; return the payloads, without the ordinals in front of them.

    Args:
        meet: Meets once; each client's payload begins with its `Ordinal`.
        tracker: Which operation this client is at.
        client: This client.
        error: Raised where clients are at different operations.
    """
    while True:
        verdict = meet()
        ordinals = {each: Ordinal.from_bytes(data) for each, data in verdict.payloads.items()}
        found = tracker.reconcile(ordinals, client, cut_off=verdict.cut_off)
        if found.is_same:
            return {each: data[NBYTES:] for each, data in verdict.payloads.items()}
        if not found.others_wait or client in found.behind:
            raise error(found.message, is_verdict=True)
