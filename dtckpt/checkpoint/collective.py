"""Run collective operations in rounds: every client does its part, then a barrier tells whether all parts went well.

An operation (a save, a restore, a manager's restore) is a fixed sequence of rounds. A save, on two clients::

    client 0, the leader              client 1
    ----------------------------      ----------------------------
    plan, begin an attempt            plan                              work, then the vote
    stage                             stage                             meanwhile, until the verdict comes
    ==== save/begin ==============================================     verdict: the operation has its identity
    write chunks                      write chunks                      work, then the vote
    ==== save/written ============================================     verdict: all chunks are written
    merge, commit                     (nothing)                         work, then the vote
    ==== save/merged =============================================     verdict: the checkpoint is committed

At each barrier a client votes yes with a payload, or no with its error. All clients get all payloads, or all raise the
same error. The barrier of the first round gives the operation its identity; the later rounds belong to that identity
(`dtckpt.coordination.barrier_rules`), so rounds of different operations never mix, even after a fault.

An operation inside another one, such as a restore inside a manager's restore, takes all of its rounds inside the
outer one's identity.
"""

from __future__ import annotations

import functools
import operator
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from time import monotonic
from typing import SupportsIndex, TypeGuard, TypeVar

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
from dtckpt.storage.tensorstore_setup import tensorstore

# Before any process is forked, and before other code imports it, so that its exit handlers are known.
tensorstore()

_Value = TypeVar("_Value")

_process_locks: defaultdict[Member, threading.Lock] = defaultdict(threading.Lock)
"""By client of a job, held by the thread whose operation over several clients of that job is under way."""
_parent: ContextVar[Collective | None] = ContextVar("_parent", default=None)
"""The operation that this thread is inside of."""


def is_step(step: object) -> TypeGuard[SupportsIndex]:
    """Whether clients can compare this as a step."""
    # A step travels as a number of 64 bits. True would pass for step 1, and is a mistake.
    return hasattr(step, "__index__") and not isinstance(step, bool) and 0 <= operator.index(step) < 1 << 63


def validate_step(step: object) -> None:
    """Raise `ConfigError` if this is neither a step nor None."""
    if step is not None and not is_step(step):
        raise ConfigError(f"a step must be a whole number from 0 to 2^63 - 1; got {step!r}")


@functools.cache
def tracker_of(member: Member, operation: str, participants: tuple[int, ...]) -> OrdinalTracker:  # noqa: ARG001  its key
    """Return the count of a client's operations of one kind, kept for the life of its process.

    The count outlives connections: a client that connects again goes on counting where it was.
    """
    return OrdinalTracker(operation)


class Collective:
    """One collective operation over several clients, as one of them goes through its rounds.

    With a single participant nothing is communicated.

    Args:
        coordination: The connection to the other clients.
        operation: Name of the operation; first part of the barriers' names.
        timeout_s: Longest wait for the others, in seconds, per round.
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
        # Groups of clients that share no member may save at the same time, each at separate barriers.
        is_everyone = self.participants == tuple(everyone)
        self._name_suffix = "" if is_everyone else f"#{bytes_digest(repr(self.participants).encode()):016x}"
        self._parent = _parent.get()
        self._operation = BEGIN if self._parent is None else self._parent.operation
        # By barrier name, how many rounds of that name the operation has had; shared with the parent.
        self._num_rounds: Counter[str] = Counter() if self._parent is None else self._parent._num_rounds
        self._tracker: OrdinalTracker | None = None
        self.phases = Phases(operation, self.client, coordination.heartbeat)

    @property
    def operation(self) -> Operation:
        """The identity of the operation that the next round belongs to; `BEGIN` before the first round."""
        return self._operation

    @property
    def is_leader(self) -> bool:
        """Whether this client is the `leader`."""
        return self.client == self.leader

    @property
    def leader(self) -> int:
        """The client that alone does steps such as the commit: the lowest participant."""
        return min(self.participants)

    @contextmanager
    def process_lock(self) -> Iterator[None]:
        """Keep other threads of this process from running operations over several clients; end the phase at exit.

        Barriers are met by name, so two threads at the same barrier of two saves would be one round. One thread at a
        time runs an operation; threads that save at the same time must come in the same order on every client.
        An operation inside another one, or with one participant, takes no lock. Another thread may
        leave the context: a background save releases the lock in its own thread.

        Raises:
            CoordinationError: Another thread's operation did not end in time.
        """
        if len(self.participants) == 1 or self._parent is not None:
            yield
            return
        process_lock = _process_locks[self._coordination.member]
        if not process_lock.acquire(timeout=self._timeout_s):
            raise CoordinationError(
                f"{self._name} cannot begin: another thread's save or restore did not end in {self._timeout_s:g} s"
            )
        try:
            yield
        finally:
            calls_of(self._coordination.member).leave_operation()
            # Only now: else the next operation, in another thread, could be reported as left, too.
            process_lock.release()
            self._coordination.heartbeat(Progress())

    @contextmanager
    def as_parent(self) -> Iterator[None]:
        """Run operations that this thread starts in the context inside this operation, whose first round is over."""
        # Alone, this operation has no identity that an inner one could take.
        token = _parent.set(self if len(self.participants) > 1 else None)
        try:
            yield
        finally:
            _parent.reset(token)

    def run_first_round(
        self,
        name: str,
        work: Callable[[], tuple[_Value, bytes]],
        *,
        step: int | None = None,
        phase: str = "",
        meanwhile: Callable[[_Value], _Value] | None = None,
    ) -> tuple[_Value, Mapping[int, bytes]]:
        """Run the first round of an operation, and check that all clients are at the same operation of its kind.

        Every vote begins with the client's ordinal: the step, or how many operations of the kind its process has
        begun. The ordinals are compared before the payloads count (`dtckpt.coordination.operation_ordinals`).

        Collective: As `run_round`.

        Args:
            name: Name of the round.
            work: This client's part; returns a value for this client and the payload for all participants.
            step: The step of the training run that tells which operation this is, from 0 on; default: the count of
                operations that this process has begun.
            phase: Name of the phase that the part is measured as; default: the round's name.
            meanwhile: Called with the value while the others are waited for, if ``work`` went well; its result
                replaces the value. The round does not depend on it: its error is raised on this client only.

        Returns:
            The value, and every participant's payload.

        Raises:
            ConfigError: The step is none; raised on all clients.
            SaveDisagreementError: Clients are at different operations.
        """

        def part() -> tuple[_Value, bytes]:
            validate_step(step)
            return work()

        if len(self.participants) == 1:
            return self._run(name, part, lambda vote: self._barrier(name, vote).payloads, phase, meanwhile)
        # Kept for `_barrier`: how a round fails tells whether this client was cut off.
        tracker = self._tracker = tracker_of(self._coordination.member, self._name, self.participants)
        ordinal = tracker.next_ordinal(operator.index(step)) if is_step(step) else tracker.next_ordinal()
        # A client with a bad step says no. The others must learn that at whatever operation they are.
        ordinal = replace(ordinal, is_unsure=ordinal.is_unsure or not (step is None or is_step(step)))

        def part_at_ordinal() -> tuple[_Value, bytes]:
            prefix = ordinal.to_bytes()
            value, payload = part()
            return value, prefix + payload

        def meet(vote: Vote) -> Mapping[int, bytes]:
            def meet_once() -> Verdict:
                # The identity that a former try gave belongs to an operation that was given up.
                self._operation = BEGIN
                calls_of(self._coordination.member).leave_operation()
                return self._barrier(name, vote, ordinal.position)

            return meet_at_same_operation(meet_once, tracker, self.client)

        return self._run(name, part_at_ordinal, meet, phase, meanwhile)

    def run_round(self, name: str, work: Callable[[], bytes | None], *, phase: str = "") -> Mapping[int, bytes]:
        """Do this client's part of a round, and learn how the round went for all.

        Collective: Over the participants, barrier ``<operation>/<name>``. Passes for all or raises the same error
        for all, at once when any client's part fails. With a single participant there is no barrier.

        Args:
            name: Name of the round.
            work: This client's part; returns the payload for all participants.
            phase: Name of the phase that the part is measured as; default: the round's name. The wait at the barrier
                is measured as ``barrier``.

        Returns:
            Every participant's payload.
        """
        return self.run_round_with_value(name, lambda: (None, work() or b""), phase=phase)[1]

    def run_round_with_value(
        self, name: str, work: Callable[[], tuple[_Value, bytes]], *, phase: str = ""
    ) -> tuple[_Value, Mapping[int, bytes]]:
        """Run a round whose part also returns a value for this client. Otherwise as `run_round`.

        Args:
            name: Name of the round.
            work: This client's part; returns a value for this client and the payload for all participants.
            phase: As for `run_round`.

        Returns:
            The value, and every participant's payload.
        """
        return self._run(name, work, lambda vote: self._barrier(name, vote).payloads, phase, None)

    def _run(
        self,
        name: str,
        work: Callable[[], tuple[_Value, bytes]],
        meet: Callable[[Vote], Mapping[int, bytes]],
        phase: str,
        meanwhile: Callable[[_Value], _Value] | None,
    ) -> tuple[_Value, Mapping[int, bytes]]:
        """Do the part, vote on it at the barrier that ``meet`` waits at, and return the value and the payloads.

        Invariant: with several participants, this client votes exactly once per meeting, whether its part went well
        or not. A client that raised without a vote would leave the others to their timeout.
        """
        self.phases.enter(name)
        failure: BaseException | None = None
        payload = b""
        try:
            with self.phases.measure(phase or name):
                value, payload = work()
        except BaseException as error:
            if len(self.participants) == 1:
                raise
            failure = error
        try:
            if len(self.participants) == 1:
                return value if meanwhile is None else meanwhile(value), {self.client: payload}
            vote = Vote(payload=payload) if failure is None else Vote.of_error(failure)
            met = None
            if meanwhile is not None and failure is None:
                # The others need this client's vote now, and not when its ``meanwhile`` is over.
                met = begin(lambda: meet(vote), "dtckpt-round")
                value = meanwhile(value)
            with self.phases.measure(BARRIER):
                payloads = meet(vote) if met is None else met.result()
        except DtckptError as verdict:
            # An interrupt of this client (KeyboardInterrupt, SystemExit) stays one; the others get the verdict on it.
            if failure is not None and not isinstance(failure, Exception):
                raise failure from verdict
            raise verdict from failure
        if failure is not None:
            raise failure  # not reached: no barrier passes with a vote that says no
        return value, payloads

    def _barrier(self, name: str, vote: Vote, position: Position = NO_POSITION) -> Verdict:
        """Wait once at the barrier of a round; the operation takes the identity in the verdict."""
        full_name = f"{self._name}/{name}{self._name_suffix}"
        # First rounds are not counted: a client that waits for others meets several times before the identity is given.
        if self._operation.id:
            # Inside one operation all clients go through the same rounds, so they count them alike.
            self._num_rounds[full_name] += 1
            if self._num_rounds[full_name] > 1:
                full_name += f".{self._num_rounds[full_name]}"
        start = monotonic()
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
                self._tracker.note_failure(error, self.client, monotonic() - start)
            raise
        # From the verdict, not made here: all participants get the same identity, or none.
        self._operation = verdict.operation
        return verdict


def meet_at_same_operation(
    meet: Callable[[], Verdict],
    tracker: OrdinalTracker,
    client: int,
    error: type[DtckptError] = SaveDisagreementError,
) -> Mapping[int, bytes]:
    """Meet until all clients are at the same operation; return the payloads, without the ordinals in front of them.

    A client may be ahead of clients that were cut off. This client meets again and again: each meeting fails one
    operation that the others are behind by, until they have caught up. Every other difference is an error for all.

    Args:
        meet: Meets once; each client's payload begins with its `Ordinal`.
        tracker: Which operation this client is at.
        client: This client.
        error: Raised where clients are at different operations.
    """
    while True:
        verdict = meet()
        ordinals = {each: Ordinal.from_bytes(data) for each, data in verdict.payloads.items()}
        comparison = tracker.reconcile(ordinals, client, cut_off=verdict.cut_off)
        if comparison.is_same:
            return {each: data[NBYTES:] for each, data in verdict.payloads.items()}
        if not comparison.others_wait or client in comparison.behind:
            raise error(comparison.message, is_verdict=True)
