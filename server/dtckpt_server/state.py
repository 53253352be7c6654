"""What the coordinator knows of jobs and barriers, and the effects of an event. `dtckpt_server.rules` changes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeVar

from dtckpt import errors
from dtckpt_server.events import Identity
from dtckpt_server.failures import Failure
from dtckpt_server.tasks import LEFT, Tasks

_K = TypeVar("_K")
Key = tuple[str, str | None, tuple[int, ...]]
"""Name, operation and participants; none stand for all clients, as thousands would be hashed at every arrival."""


@dataclass(slots=True)
class Barrier:
    """One round of a barrier's name. The verdict is set once."""

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
    missed: Barrier | None = None  # failed round for which all who are here may be late
    cut_off: set[int] = field(default_factory=set)  # tasks whose arrival got through at a later try only
    is_again: bool = False  # a call is here that had arrived in an earlier life of the coordinator
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
        """Its number among all barriers of this life of the coordinator."""
        return int(self.barrier_id.rpartition("-")[2])

    @property
    def num_missing(self) -> int:
        return len(self.participants) - len(self.arrived)

    def missing(self, limit: int) -> list[int]:
        """Return the first participants that have not arrived. Looks at no others but those that have."""
        return list(islice((task for task in self.participants if task not in self.arrived), limit))

    def waits_for(self, task: int) -> bool:
        """Whether this round is open and lacks the task."""
        return self.is_open and task not in self.arrived and task in self.participants


@dataclass(slots=True)
class Job:
    """One job of one attempt. ``job_name`` is how its tasks' names call it, if one of them said so."""

    name: str
    num_clients: int
    attempt: int
    job_name: str
    tasks: Tasks = field(default_factory=Tasks)
    open: dict[str, Barrier] = field(default_factory=dict)  # by barrier_id
    latest: dict[Key, Barrier] = field(default_factory=dict)
    latest_of_name: dict[str, Barrier] = field(default_factory=dict)  # latest of each name, whoever takes part
    missed: dict[tuple[Key, str], Barrier] = field(default_factory=dict)  # latest failed first round of each position
    broken_operations: dict[tuple[int, ...], Barrier] = field(
        default_factory=dict
    )  # of operations that an earlier life began
    verdicts: dict[str, Barrier] = field(default_factory=dict)  # the decided ones by barrier_id, oldest first
    with_payloads: dict[str, Barrier] = field(default_factory=dict)  # those of them that have payloads
    num_heartbeats: int = 0
    heard_at: float = 0.0  # when any of its tasks was heard last
    nbytes: int = 0
    verdict_nbytes: int = 0  # of them, of verdicts without their payloads
    payload_nbytes: int = 0  # and of verdicts' payloads

    @property
    def is_left(self) -> bool:
        """Whether every client has come and said goodbye."""
        return len(self.tasks.by_state[LEFT]) == self.num_clients

    def begin(self, num_clients: int, attempt: int, job_name: str) -> None:
        """Begin an attempt or a run, to which no earlier barrier belongs; their verdicts stay."""
        self.num_clients, self.attempt, self.job_name = num_clients, attempt, job_name
        for kept in (self.latest, self.latest_of_name, self.missed, self.broken_operations):
            kept.clear()

    def forget(self, barrier: Barrier) -> None:
        """Drop what is kept about a decided barrier, also where tasks still keep it by their calls."""
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
    """One change of the state, as logs and metrics tell it: a kind of event, a line of text, and the ids."""

    event: str
    text: str
    facts: Mapping[str, object]


@dataclass(slots=True)
class Effects:
    """What the world must do about one event."""

    refusal: errors.DtckptError | None = None  # the answer, if the event could not be accepted
    barrier: Barrier | None = None  # where an `Arrive` arrived
    decided: list[str] = field(default_factory=list)  # barrier ids
    failed: list[Barrier] = field(default_factory=list)  # those of them whose participants are to be told
    fenced: list[tuple[Identity, str]] = field(default_factory=list)  # who is to be told that it is over, and why
    superseded: int | None = None  # the attempt by which all tasks of the event's job are fenced
    log: list[Transition] = field(default_factory=list)
    is_unfinished: bool = False  # of a `Tick`: there is more to judge now


def _remove(kept: dict[_K, Barrier], key: _K, barrier: Barrier) -> None:
    if kept.get(key) is barrier:
        del kept[key]
