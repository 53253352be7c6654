"""The coordinator's state: jobs and barriers; and the effects of one event. Only `dtckpt_server.rules` changes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeVar

from dtckpt import errors
from dtckpt.coordination.feeds.events import FeedAnswer
from dtckpt.coordination.task_identity import Identity
from dtckpt_server.failures import Failure
from dtckpt_server.tasks import LEFT, Tasks

_K = TypeVar("_K")
Key = tuple[str, str | None, tuple[int, ...]]
"""Name, operation and participants of a barrier. An empty tuple stands for all clients: to hash thousands of numbers at
every arrival would be slow."""


@dataclass(slots=True)
class Barrier:
    """One round of a barrier's name. ``decided_at`` and ``failure`` are its verdict, which is set once.

    Args:
        opener: The task whose arrival opened the round.
        position: Position of that arrival.
        topic: Topic of that arrival.
        missed: A failed round; all tasks that are here may be late for it. None: at least one came for this round.
        cut_off: The tasks whose arrival got through only at a later try.
        is_again: Whether a call is here that had arrived in an earlier life of the coordinator.
        failure: Why the barrier failed; None: it passed, or is open.
    """

    barrier_id: str
    key: Key
    job: str
    name: str
    generation: int
    participants: Sequence[int]
    opener: int
    position: str
    topic: bytes
    opened_at: float
    timeout_s: float
    deadline: float
    last_arrival_at: float
    arrived: dict[int, int] = field(default_factory=dict)  # task -> number of its call
    missed: Barrier | None = None
    cut_off: set[int] = field(default_factory=set)
    is_again: bool = False
    payloads: dict[int, bytes] = field(default_factory=dict)
    decided_at: float | None = None
    failure: Failure | None = None
    payloads_dropped: bool = False
    nbytes: int = 0  # as counted, without the payloads
    payload_nbytes: int = 0

    @property
    def is_open(self) -> bool:
        return self.decided_at is None

    @property
    def is_passed(self) -> bool:
        return self.decided_at is not None and self.failure is None

    @property
    def operation(self) -> str | None:
        return self.key[1]

    @property
    def serial(self) -> int:
        """The number of the barrier among all barriers of this life of the coordinator."""
        return int(self.barrier_id.rpartition("-")[2])

    @property
    def num_missing(self) -> int:
        return len(self.participants) - len(self.arrived)

    def missing(self, limit: int) -> list[int]:
        """Return the first participants that have not arrived, at most ``limit``.

        Takes time for these and for the participants that have arrived, but not for the others.
        """
        return list(islice((task for task in self.participants if task not in self.arrived), limit))

    def waits_for(self, task: int) -> bool:
        """Whether this round is open and the task is a participant that has not arrived."""
        return self.is_open and task not in self.arrived and task in self.participants


@dataclass(slots=True)
class Job:
    """One attempt of one job.

    Args:
        job_name: Name of the job in full task names, if one of the tasks gave it.
        owner: Whose quotas it counts for.
    """

    name: str
    num_clients: int
    attempt: int
    job_name: str
    owner: str
    tasks: Tasks = field(default_factory=Tasks)
    open: dict[str, Barrier] = field(default_factory=dict)  # by barrier_id
    latest: dict[Key, Barrier] = field(default_factory=dict)
    latest_of_name: dict[str, Barrier] = field(default_factory=dict)  # latest of each name, with any participants
    missed: dict[tuple[Key, str], Barrier] = field(default_factory=dict)  # latest failed round by position
    broken_operations: dict[tuple[int, ...], Barrier] = field(
        default_factory=dict
    )  # by participants: an operation of an earlier life that cannot go on
    verdicts: dict[str, Barrier] = field(default_factory=dict)  # the decided ones by barrier_id, oldest first
    with_payloads: dict[str, Barrier] = field(default_factory=dict)  # decided barriers that have payloads
    num_heartbeats: int = 0
    heard_at: float = 0.0  # when any of its tasks was heard last
    nbytes: int = 0  # all bytes that count for the job
    verdict_nbytes: int = 0  # the part of it that verdicts take, without their payloads
    payload_nbytes: int = 0  # the part of it that payloads of decided barriers take

    @property
    def is_left(self) -> bool:
        """Whether every client has come and said goodbye."""
        return len(self.tasks.by_state[LEFT]) == self.num_clients

    def begin(self, num_clients: int, attempt: int, job_name: str) -> None:
        """Begin an attempt or a run. No earlier barrier belongs to it, but their verdicts stay."""
        self.num_clients, self.attempt, self.job_name = num_clients, attempt, job_name
        for kept in (self.latest, self.latest_of_name, self.missed, self.broken_operations):
            kept.clear()

    def forget(self, barrier: Barrier) -> None:
        """Drop a decided barrier. Tasks may still refer to it by their calls, so empty it, too."""
        _remove(self.latest, barrier.key, barrier)
        _remove(self.latest_of_name, barrier.name, barrier)
        _remove(self.missed, (barrier.key, barrier.position), barrier)
        _remove(self.broken_operations, barrier.key[2], barrier)
        barrier.arrived.clear()
        barrier.missed = None

    def full_task_name(self, number: int) -> str:
        return f"{self.job_name or self.name}/replica:0/task:{number}"


@dataclass(frozen=True, slots=True)
class Transition:
    """One change of the state, for logs and metrics: the kind of event, a line of text, and the ids."""

    event: str
    text: str
    facts: Mapping[str, object]


@dataclass(slots=True)
class Effects:
    """The effects of one event, for the server to carry out."""

    refusal: errors.DtckptError | None = None  # the answer, if the event could not be accepted
    barrier: Barrier | None = None  # where an `Arrive` arrived
    feed_answer: FeedAnswer = None  # the answer to an event about a feed
    changed_feeds: set[str] = field(default_factory=set)  # feeds whose waiting readers should ask again
    decided: list[str] = field(default_factory=list)  # barrier ids
    failed: list[Barrier] = field(default_factory=list)  # the decided ones whose participants need a notice
    fenced: list[tuple[Identity, str]] = field(default_factory=list)  # processes to tell that they are fenced, and why
    superseded: int | None = None  # the attempt by which all tasks of the event's job are fenced
    log: list[Transition] = field(default_factory=list)
    is_unfinished: bool = False  # of a `Tick`: there is more to judge, so send another `Tick`


def _remove(kept: dict[_K, Barrier], key: _K, barrier: Barrier) -> None:
    if kept.get(key) is barrier:
        del kept[key]
