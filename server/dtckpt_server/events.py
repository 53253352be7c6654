"""The events of the coordinator's rules: each is one call of a client, or a tick of the clock."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from dtckpt import errors
from dtckpt.coordination import barrier_texts
from dtckpt.coordination.feeds.events import FeedEvent
from dtckpt.coordination.task_identity import Identity

MAX_NAME_BYTES = 256
MAX_TOPIC_BYTES = 256
MAX_PAYLOAD_BYTES = 4096
MAX_TIMEOUT_S = 7 * 86400.0


@dataclass(frozen=True, slots=True)
class TaskProgress:
    """The last progress that a task reported."""

    phase: str = ""
    step: int = 0
    bytes_done: int = 0
    bytes_total: int = 0


@dataclass(frozen=True, slots=True)
class TaskReport:
    """Which operation a task is in, as it reports. Its operations come one after the other.

    Args:
        operation: Id of the operation; empty: none, or the task is at the first barrier of one.
        num_ended: Number of the latest call of an operation that has ended, with a verdict or without.
    """

    operation: str = ""
    num_ended: int = 0


NOWHERE = TaskReport()


@dataclass(frozen=True, slots=True)
class Register:
    """A task wants its place in its job, or renews it.

    Args:
        job_name: Name of the job in full task names; empty: the name that other tasks gave, else ``who.job``.
        owner: Whose quotas the job counts for; empty: told by its name.

    Refused with:
        ConfigError: The numbers make no sense or differ from the job's.
        HeldError: Another incarnation holds the place and may be alive; the client asks again.
        FencedError: Another incarnation holds the place and is alive, or the attempt is over.
        LimitError: The owner has too many jobs, or too large ones.
    """

    who: Identity
    num_clients: int
    attempt: int = 0
    host: str = ""
    job_name: str = ""
    report: TaskReport = NOWHERE
    owner: str = ""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A task is alive. A lost task becomes registered again, but barriers that failed without it stay failed.

    Refused with:
        UnknownError: The task is not registered.
        FencedError: The task's place is taken.
    """

    who: Identity
    progress: TaskProgress = TaskProgress()
    report: TaskReport = NOWHERE


@dataclass(frozen=True, slots=True)
class Leave:
    """A task gives its place up. Never refused; nothing happens if it has none."""

    who: Identity


class Members(tuple[int, ...]):
    """Sorted numbers of tasks, so that `in` is a binary search."""

    __slots__ = ()

    def __contains__(self, number: object) -> bool:
        index = bisect_left(self, number) if isinstance(number, int) else len(self)
        return self[index : index + 1] == (number,)


@dataclass(frozen=True, slots=True)
class Arrive:
    """A task arrives at a barrier, with its vote. Idempotent by the number of its call.

    Args:
        call: Number of the task's call, above 0; a new call has a greater one.
        participants: Empty for all tasks of the job.
        operation: The operation that the barrier belongs to; empty: this is its first one. None: it stands alone.
        position: Which round of the name the task comes for, as far as it can tell.
        is_certain: Whether a task that skipped rounds would have another position.
        is_again: Whether the call has arrived at an earlier life of the coordinator.
        was_cut_off: Whether an earlier try of the call was not answered.
        report: Which operation the task is in.

    Refused with:
        UnknownError: The task is not registered.
        FencedError: The task's place is taken.
        ConfigError: The arrival makes no sense.
        BarrierConflictError: The task is no participant.
        LimitError: The owner has too many open barriers, or too large ones.
    """

    who: Identity
    name: str
    call: int
    participants: tuple[int, ...]
    timeout_s: float
    ok: bool = True
    payload: bytes = b""
    topic: bytes = b""
    code: str = ""
    reason: str = ""
    operation: str | None = None
    position: str = ""
    is_certain: bool = False
    is_again: bool = False
    was_cut_off: bool = False
    report: TaskReport = NOWHERE

    def members(self, num_clients: int) -> Sequence[int]:
        """Check the arrival and return the participants, sorted: a range if they are all tasks of the job.

        Raises:
            ConfigError: The arrival makes no sense in a job of this many clients.
            BarrierConflictError: The task is no participant.
        """
        for what, size, limit in (
            ("name", len(self.name.encode()), MAX_NAME_BYTES),
            ("operation", len((self.operation or "").encode()), MAX_NAME_BYTES),
            ("position", len(self.position.encode()), MAX_NAME_BYTES),
            ("topic", len(self.topic), MAX_TOPIC_BYTES),
            ("payload", len(self.payload), MAX_PAYLOAD_BYTES),
        ):
            if size > limit:
                raise errors.ConfigError(f"barrier's {what} is too long: got {size} bytes, at most {limit} fit")
        if not self.call:
            raise errors.ConfigError(f"barrier {self.name!r}: the call has no number; got 0, expected one above it")
        if not self.name or not 0 < self.timeout_s <= MAX_TIMEOUT_S or math.isnan(self.timeout_s):
            raise errors.ConfigError(
                f"barrier {self.name!r} with timeout {self.timeout_s} s: expected a name and a positive number of "
                f"seconds, at most {MAX_TIMEOUT_S:g}"
            )
        named = Members(sorted(set(self.participants)))
        if named and named[-1] >= num_clients:
            raise errors.ConfigError(
                f"barrier {self.name!r}: participant {named[-1]} is no client of job {self.who.job!r}; expected ids "
                f"from 0 to {num_clients - 1}"
            )
        members = named if 0 < len(named) < num_clients else range(num_clients)
        if self.who.task not in members:
            raise errors.BarrierConflictError(barrier_texts.is_no_participant(self.name, self.who.task, members))
        return members


@dataclass(frozen=True, slots=True)
class Cancel:
    """A participant fails an open barrier.

    Refused with:
        UnknownError: The task is not registered, or there is no such barrier.
        FencedError: The task's place is taken.
        BarrierConflictError: The task is no participant, or the barrier is decided.
    """

    who: Identity
    barrier_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed: judge heartbeats and deadlines. Happens several times a second."""


Event = Register | Heartbeat | Leave | Arrive | Cancel | Tick | FeedEvent
