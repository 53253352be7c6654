"""The coordinator's rules: who is alive, who has arrived, and what the verdict is.

``apply(rules, event, now) -> (rules, effects)`` is the whole interface that changes anything. No clock, no I/O, no
randomness: every event comes with the time, and what must happen in the world (answer, refuse, wake waiters, write log
lines) is returned. The same events give the same effects, so the rules are tested by the million and the server is a
thin adapter.

The recovery window after a restart needs no rule: a task is only known once it has registered, and each life of the
coordinator grants it a full heartbeat timeout from then on.
"""

from __future__ import annotations

import bisect
import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from dtckpt import barriers, errors
from dtckpt_server import texts
from dtckpt_server.events import (
    MAX_NAME_BYTES,
    Arrive,
    Cancel,
    Event,
    Heartbeat,
    Identity,
    Leave,
    Register,
    Report,
    Tick,
)
from dtckpt_server.texts import Failure, Progress, task_name

REGISTERED, SUSPECT, LOST, LEFT, FENCED = "REGISTERED", "SUSPECT", "LOST", "LEFT", "FENCED"
ALIVE = (REGISTERED, SUSPECT)

MAX_CLIENTS = 100_000
MAX_JOBS = 10_000
MAX_OPEN_BARRIERS = 1000
"""Per job."""
KEPT_VERDICTS = 10_000
KEPT_VERDICTS_S = 3600.0
KEPT_PAYLOAD_BYTES = 256 << 20
"""Payloads of decided barriers; beyond this the oldest are dropped, their verdicts stay."""
KEPT_CALLS = 16
"""Of each task: calls that may be repeated and then get the round that they had joined."""
SOME = 8
"""How many tasks a text for people names."""
MAX_PAUSE_S = 1.0
"""A longer time without a `Tick` was spent not listening, and is not held against the tasks."""


class UnknownError(errors.CoordinationError):
    """The coordinator does not know the task or barrier, perhaps because it was restarted."""


class HeldError(errors.FencedError):
    """Another incarnation holds the place, and it is not known yet whether it is alive."""


class LimitError(errors.CoordinationError):
    """A limit of the coordinator is reached."""


@dataclass(slots=True)
class Task:
    """One place in a job and the process that has it."""

    number: int
    incarnation: int
    attempt: int
    host: str
    heard_at: float
    state: str = REGISTERED
    progress: Progress = Progress()  # noqa: RUF009  immutable
    progressed_at: float = 0.0  # when it last reported another progress
    rival: tuple[int, float] = (0, 0.0)  # incarnation that wants this place, and since when
    report: Report = Report()  # noqa: RUF009  immutable
    calls: OrderedDict[int, Barrier] = field(default_factory=OrderedDict)

    def note_call(self, call: int, barrier: Barrier) -> None:
        """Keep which round a call joined."""
        self.calls[call] = barrier
        if len(self.calls) > KEPT_CALLS:
            self.calls.popitem(last=False)


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
    participants: tuple[int, ...]
    first: int
    position: str
    topic: bytes
    opened_at: float
    timeout_s: float
    deadline: float
    last_arrival_at: float
    arrived: dict[int, int] = field(default_factory=dict)  # task -> number of its call
    former: Barrier | None = None  # failed round for which all who are here may be late
    cut_off: set[int] = field(default_factory=set)  # tasks whose arrival got through at a later try only
    is_again: bool = False  # a call is here that had arrived in an earlier life of the coordinator
    payloads: dict[int, bytes] = field(default_factory=dict)
    decided_at: float | None = None
    failure: Failure | None = None
    payloads_dropped: bool = False

    @property
    def is_open(self) -> bool:
        return self.decided_at is None

    @property
    def is_passed(self) -> bool:
        return self.decided_at is not None and self.failure is None

    @property
    def operation(self) -> str | None:
        return self.key[1]

    def missing(self) -> list[int]:
        return [task for task in self.participants if task not in self.arrived]

    def waits_for(self, task: int) -> bool:
        """Whether this round is open and lacks the task."""
        place = bisect.bisect_left(self.participants, task)
        is_participant = place < len(self.participants) and self.participants[place] == task
        return self.is_open and is_participant and task not in self.arrived


@dataclass(slots=True)
class Job:
    """One job of one attempt. ``job_name`` is how its tasks' names call it, if one of them said so."""

    name: str
    num_clients: int
    attempt: int
    job_name: str
    tasks: dict[int, Task] = field(default_factory=dict)
    open: dict[str, Barrier] = field(default_factory=dict)  # by barrier_id
    latest: dict[Key, Barrier] = field(default_factory=dict)
    named: dict[str, Barrier] = field(default_factory=dict)  # latest of each name, whoever takes part
    missed: dict[tuple[Key, str], Barrier] = field(default_factory=dict)  # latest failed first round of each position
    broken: dict[tuple[int, ...], Barrier] = field(default_factory=dict)  # of operations that an earlier life began
    num_heartbeats: int = 0

    @property
    def is_left(self) -> bool:
        """Whether every client has come and said goodbye."""
        return len(self.tasks) == self.num_clients and all(task.state == LEFT for task in self.tasks.values())

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
    log: list[Transition] = field(default_factory=list)


def apply(rules: Rules, event: Event, now: float) -> tuple[Rules, Effects]:
    """Let an event happen.

    The rules that are returned replace the given ones, which are used up: state is changed in place, because copying
    thousands of tasks for each heartbeat would be the whole cost. Nothing else changes it.
    """
    effects = rules._effects = Effects()
    try:
        rules._accept(event, now)
    except errors.DtckptError as refusal:
        effects.refusal = refusal
    return rules, effects


class Rules:
    """All jobs of one coordinator.

    Args:
        heartbeat_timeout_s: Silence after which a task is lost.
        incarnation: Random id of this life of the coordinator; makes barrier ids unique over restarts.
    """

    def __init__(self, heartbeat_timeout_s: float, incarnation: int) -> None:
        self.heartbeat_timeout_s = heartbeat_timeout_s
        self.incarnation = incarnation
        self.jobs: dict[str, Job] = {}
        self._barriers: dict[str, Barrier] = {}
        self._decided: OrderedDict[str, Barrier] = OrderedDict()
        self._payloads: OrderedDict[str, int] = OrderedDict()  # decided barriers that have payloads -> their bytes
        self._payload_bytes = 0
        self._serial = 0
        self._ticked_at: float | None = None
        self._effects = Effects()

    def _accept(self, event: Event, now: float) -> None:
        match event:
            case Heartbeat():
                self._heartbeat(event, now)
            case Arrive():
                self._effects.barrier = self._arrive(event, now)
            case Register():
                self._register(event, now)
            case Leave():
                self._leave(event, now)
            case Cancel():
                self._cancel(event, now)
            case Tick():
                self._tick(now)

    # --- tasks --------------------------------------------------------------------------------------------------

    def _register(self, event: Register, now: float) -> None:
        """Give the task its place, or renew it."""
        who, num_clients, attempt = event.who, event.num_clients, event.attempt
        if not who.job or not who.incarnation or not 0 < num_clients <= MAX_CLIENTS or who.task >= num_clients:
            raise errors.ConfigError(
                f"cannot register {task_name(who.job, who.task)} of {num_clients}: expected a job name, an incarnation "
                f"and a task from 0 to num_clients - 1 (at most {MAX_CLIENTS - 1})"
            )
        job_name = event.job_name
        if len(job_name.encode()) > MAX_NAME_BYTES:
            raise errors.ConfigError(f"name of the job is too long: at most {MAX_NAME_BYTES} bytes fit")
        job = self._job_for(event, job_name, now)
        if num_clients != job.num_clients:
            raise errors.ConfigError(
                f"{task_name(who.job, who.task)} says that the job has {num_clients} clients; got {num_clients}, "
                f"expected {job.num_clients} as the others of attempt {job.attempt} said"
            )
        job.job_name = job.job_name or job_name
        if job_name and job_name != job.job_name:
            raise errors.ConfigError(
                f"{task_name(who.job, who.task)} calls the job {job_name!r}; expected {job.job_name!r} as the others "
                f"of attempt {job.attempt} said; DTENSOR_JOB_NAME and DTCKPT_JOB must be the same for all clients"
            )
        task = job.tasks.get(who.task)
        if task is not None and task.incarnation == who.incarnation:
            self._revive(job, task, now)
            self._note_report(job, task, event.report, now)
            return
        if task is not None and task.state in ALIVE:
            self._refuse_rival(job, task, who.incarnation, now)
        if task is not None and task.state == LOST:
            self._tell_fenced(job, task, _replaced(job.name, task.number))
        task = Task(who.task, who.incarnation, attempt, event.host, now, progressed_at=now, report=event.report)
        job.tasks[who.task] = task
        self._fail_waits_for(job, task, now)
        self._log_task("registered", job, task, f"registered from {task.host or 'an unnamed host'}, attempt {attempt}")

    def _job_for(self, event: Register, job_name: str, now: float) -> Job:
        who, num_clients, attempt = event.who, event.num_clients, event.attempt
        job = self.jobs.get(who.job)
        if job is None:
            if len(self.jobs) >= MAX_JOBS:
                raise LimitError(f"no room for job {who.job!r}: the coordinator has {len(self.jobs)} jobs")
            job = self.jobs[who.job] = Job(who.job, num_clients, attempt, job_name)
        elif attempt < job.attempt:
            raise errors.FencedError(
                f"{task_name(who.job, who.task)} is of attempt {attempt}, but attempt {job.attempt} has begun"
            )
        elif attempt > job.attempt:
            self._fence(job, event, job_name, now)
        elif job.is_left and all(task.incarnation != who.incarnation for task in job.tasks.values()):
            # The next run of a job that has ended: nobody is left whom the verdicts of the last one concern.
            self._log("job_begun_anew", f"job {job.name!r} is left by all and begins anew", job=job.name)
            job = self.jobs[who.job] = Job(who.job, num_clients, attempt, job_name)
        return job

    def _fence(self, job: Job, event: Register, job_name: str, now: float) -> None:
        """Begin a new attempt: whatever belongs to the old one is over."""
        attempt, num_clients = event.attempt, event.num_clients
        text = f"job {job.name!r}: attempt {attempt} fences attempt {job.attempt}"
        self._log("attempt_begun", text, job=job.name, attempt=attempt)
        for barrier in list(job.open.values()):
            self._decide(barrier, texts.fenced(barrier.name, job.name, attempt), now)
        for task in job.tasks.values():
            task.state = FENCED
            self._tell_fenced(job, task, _superseded(job.name, task.number, attempt))
        job.tasks = {number: task for number, task in job.tasks.items() if number < num_clients}
        for kept in (job.latest, job.named, job.missed, job.broken):
            kept.clear()
        job.attempt, job.num_clients, job.job_name = attempt, num_clients, job_name

    def _refuse_rival(self, job: Job, task: Task, incarnation: int, now: float) -> None:
        if task.rival[0] != incarnation:
            task.rival = (incarnation, now)
        who = task_name(job.name, task.number)
        if task.heard_at > task.rival[1]:
            raise errors.FencedError(
                f"{who} of attempt {job.attempt} is another live process; every client needs an id of its own, and a "
                "restarted job a higher attempt"
            )
        raise HeldError(f"{who} is held by another process until that has been silent for the heartbeat timeout")

    def _revive(self, job: Job, task: Task, now: float) -> None:
        if task.state != REGISTERED:
            self._log_task("back", job, task, f"is back ({task.state} until now)")
        task.state, task.heard_at = REGISTERED, now

    def _task(self, who: Identity) -> tuple[Job, Task]:
        """Return the task if ``who`` still has its place."""
        job = self.jobs.get(who.job)
        task = job.tasks.get(who.task) if job else None
        if job is None or task is None or (task.incarnation == who.incarnation and task.state == LEFT):
            raise UnknownError(f"{task_name(who.job, who.task)} is not registered")
        if task.state == FENCED:
            raise errors.FencedError(_superseded(who.job, who.task, job.attempt))
        if task.incarnation != who.incarnation:
            raise errors.FencedError(_replaced(who.job, who.task))
        return job, task

    def _tell_fenced(self, job: Job, task: Task, text: str) -> None:
        self._effects.fenced.append((Identity(job.name, task.number, task.incarnation), text))

    def _heartbeat(self, event: Heartbeat, now: float) -> None:
        job, task = self._task(event.who)
        self._revive(job, task, now)
        self._note_report(job, task, event.report, now)
        job.num_heartbeats += 1
        if event.progress != task.progress:
            task.progress, task.progressed_at = event.progress, now

    def _leave(self, event: Leave, now: float) -> None:
        try:
            job, task = self._task(event.who)
        except (UnknownError, errors.FencedError):
            return
        task.state = LEFT
        self._log_task("left", job, task, "left")
        self._fail_without(job, {task.number}, now)

    # --- barriers -----------------------------------------------------------------------------------------------

    def _arrive(self, arrival: Arrive, now: float) -> Barrier:
        """Note an arrival and return the barrier, decided or not."""
        who = arrival.who
        job, task = self._task(who)
        self._revive(job, task, now)
        self._note_report(job, task, arrival.report, now)
        barrier = task.calls.get(arrival.call)
        if barrier is not None and barrier.barrier_id in self._barriers:
            return barrier
        barrier = self._round_for(job, task, arrival, now)
        task.note_call(arrival.call, barrier)
        if barrier.is_open and arrival.topic != barrier.topic:
            failure = texts.topics_differ(arrival.name, barrier.first, barrier.topic, who.task, arrival.topic)
            self._decide(barrier, failure, now)
        elif barrier.is_open and not arrival.ok:
            self._decide(barrier, texts.voted_no(who.task, arrival.code, arrival.reason), now)
        elif barrier.is_open:
            self._admit(job, barrier, arrival, now)
        if not barrier.is_open:
            barrier.arrived.setdefault(who.task, arrival.call)  # so it is not told again
        return barrier

    def _round_for(self, job: Job, task: Task, arrival: Arrive, now: float) -> Barrier:
        """Return the round that a new call joins, or that it is late for; see `dtckpt.barriers`."""
        participants = arrival.members(job.num_clients)
        key = arrival.name, arrival.operation, participants if len(participants) < job.num_clients else ()
        latest = job.latest.get(key)
        is_overtaken = any(call > arrival.call and other.key == key for call, other in task.calls.items())
        if is_overtaken or (arrival.operation is not None and arrival.call <= task.report.num_ended):
            # Its client has gone on, and waits for no answer.
            raise errors.BarrierConflictError(barriers.gave_up(arrival.name, task_name(job.name, task.number)))
        if arrival.operation:
            return latest or self._open(job, arrival, key, participants, now)
        if arrival.is_again and key[2] in job.broken:
            return job.broken[key[2]]
        missed = job.missed.get((key, arrival.position))
        if missed is not None and task.number in missed.arrived:
            missed = None
        if missed is not None and missed.decided_at is not None:
            is_certain = arrival.is_certain or arrival.is_again or arrival.was_cut_off
            age_s = now - missed.decided_at
            if barriers.is_late(is_certain=is_certain, age_s=age_s, heartbeat_timeout_s=self.heartbeat_timeout_s):
                return missed
        if latest is not None and latest.is_open and task.number in latest.arrived:
            # The call that had arrived was given up by the task, which now comes anew.
            self._decide(latest, texts.gave_up(latest.name, task_name(job.name, task.number)), now)
        barrier = latest if latest is not None and latest.is_open else None
        if barrier is None:
            barrier = self._open(job, arrival, key, participants, now)
            barrier.former = missed
        elif missed is None:
            barrier.former = None
        barrier.is_again |= arrival.is_again
        return barrier

    def _admit(self, job: Job, barrier: Barrier, arrival: Arrive, now: float) -> None:
        barrier.arrived[arrival.who.task] = arrival.call
        barrier.last_arrival_at = now
        barrier.payloads[arrival.who.task] = arrival.payload
        if arrival.is_again or arrival.was_cut_off:
            barrier.cut_off.add(arrival.who.task)
        if now + arrival.timeout_s < barrier.deadline:
            barrier.deadline, barrier.timeout_s = now + arrival.timeout_s, arrival.timeout_s
        if len(barrier.arrived) == len(barrier.participants):
            self._decide(barrier, None, now)
        elif len(barrier.arrived) == 1 and (gone := self._gone(job, barrier.participants, now)):
            # Looked up for the first arrival only: whoever goes later fails the barrier by going.
            self._decide(barrier, texts.lost(barrier.name, gone), now)
        elif barrier.operation is not None:
            self._find_deadlock(job, barrier, arrival.who.task, now)

    def _open(self, job: Job, arrival: Arrive, key: Key, participants: tuple[int, ...], now: float) -> Barrier:
        """Open a round; it is born failed if the name is open with other participants."""
        if len(job.open) >= MAX_OPEN_BARRIERS:
            raise LimitError(f"barrier {arrival.name!r}: job {job.name!r} already has {len(job.open)} open barriers")
        self._serial += 1
        deadline, latest = now + arrival.timeout_s, job.latest.get(key)
        barrier = Barrier(
            f"{self.incarnation:x}-{self._serial}", key, job.name, arrival.name,
            latest.generation + 1 if latest else 0, participants,
            arrival.who.task, arrival.position, arrival.topic, now, arrival.timeout_s, deadline, now,
        )  # fmt: skip
        before = job.named.get(arrival.name)
        job.open[barrier.barrier_id] = self._barriers[barrier.barrier_id] = barrier
        job.latest[key] = job.named[arrival.name] = barrier
        if before is not None and before.is_open and before.participants != participants:
            failure = texts.participants_differ(
                barrier.name, before.first, before.participants, barrier.first, barrier.participants
            )
            self._decide(before, failure, now)
            self._decide(barrier, failure, now)
        return barrier

    def _end_late(self, barrier: Barrier, now: float) -> None:
        """Tell tasks that nobody has joined of the round that they had missed."""
        former = barrier.former
        assert former is not None and former.failure is not None and former.decided_at is not None  # noqa: S101, PT018
        if now >= barrier.opened_at + barriers.grace_s(self.heartbeat_timeout_s):
            age_s = barrier.opened_at - former.decided_at
            self._decide(barrier, texts.came_late(barrier.name, age_s, former.failure), now)

    # --- where tasks are ----------------------------------------------------------------------------------------

    def _note_report(self, job: Job, task: Task, report: Report, now: float) -> None:
        if report != task.report and report.num_ended >= task.report.num_ended:
            task.report = report
            self._fail_waits_for(job, task, now)

    def _fail_waits_for(self, job: Job, task: Task, now: float) -> None:
        """Fail what waits for a task in vain, as it is known to be elsewhere."""
        for barrier in [barrier for barrier in job.open.values() if barrier.operation is not None]:
            call = barrier.arrived.get(task.number)
            if call is not None and call <= task.report.num_ended:
                self._decide(barrier, texts.gave_up(barrier.name, task_name(job.name, task.number)), now)
            elif barrier.operation and barrier.waits_for(task.number) and self._is_elsewhere(barrier, task):
                self._fail_operation(job, barrier, task, now)

    def _is_elsewhere(self, barrier: Barrier, task: Task) -> bool:
        """Whether a task that a round waits for has left the round's operation, or will never hear that it began.

        What an earlier life of the coordinator began, it also told; a task that is not in it then will never be.
        """
        begun = self._barriers.get(barrier.operation or "")
        call = begun.arrived.get(task.number, 0) if begun is not None else 0
        return task.report.operation != barrier.operation and task.report.num_ended >= call

    def _fail_operation(self, job: Job, barrier: Barrier, task: Task, now: float) -> None:
        failure = texts.is_elsewhere(barrier.name, task_name(job.name, task.number))
        self._decide(barrier, failure, now)
        if barrier.operation not in self._barriers:  # then calls of the same operation may still wait to begin it
            job.broken[barrier.key[2]] = barrier
            for other in [other for other in job.open.values() if other.is_again and other.key[2] == barrier.key[2]]:
                self._decide(other, failure, now)

    def _find_deadlock(self, job: Job, barrier: Barrier, number: int, now: float) -> None:
        """Fail a round that waits for a task which waits elsewhere for this one, or which is elsewhere for good."""
        if barrier.operation:
            for absent in barrier.missing():
                task = job.tasks.get(absent)
                if task is not None and task.state in ALIVE and self._is_elsewhere(barrier, task):
                    self._fail_operation(job, barrier, task, now)
                    return
        for other in [other for other in job.open.values() if other.operation == "" and other.waits_for(number)]:
            if (waiting := next((task for task in other.arrived if barrier.waits_for(task)), None)) is not None:
                failure = texts.wait_for_each_other(
                    task_name(job.name, number), barrier.name, task_name(job.name, waiting), other.name
                )
                self._decide(other, failure, now)
                self._decide(barrier, failure, now)
                return

    def _cancel(self, event: Cancel, now: float) -> None:
        who = event.who
        job, task = self._task(who)
        barrier = self.barrier(who.job, event.barrier_id)
        if who.task not in barrier.participants or not barrier.is_open:
            problem = "is no participant" if barrier.is_open else "came too late, it is decided"
            raise errors.BarrierConflictError(f"cannot cancel barrier {barrier.name!r}: client {who.task} {problem}")
        self._decide(barrier, texts.cancelled(barrier.name, task_name(job.name, task.number), event.reason), now)

    def barrier(self, job: str, barrier_id: str) -> Barrier:
        """Return a barrier of a job.

        Raises:
            UnknownError: There is none of that id; it was forgotten, or is of an earlier life of the coordinator.
        """
        barrier = self._barriers.get(barrier_id)
        if barrier is None or barrier.job != job:
            raise UnknownError(f"job {job!r} has no barrier {barrier_id!r}")
        return barrier

    def waiting_for(self, barrier: Barrier, now: float) -> dict[int, str]:
        """Return how to call each participant that has not arrived, and what it did last."""
        return {number: self._describe(self.jobs[barrier.job], number, now) for number in barrier.missing()}

    def waiting_text(self, barrier: Barrier, now: float) -> str:
        """Return some of `waiting_for` as text, and how many more there are, at little cost however many it is."""
        job, missing = self.jobs[barrier.job], barrier.missing()
        some = [self._describe(job, number, now) for number in missing[:SOME]]
        return errors.capped([*some, *missing[SOME:]], SOME)

    def _describe(self, job: Job, number: int, now: float) -> str:
        task = job.tasks.get(number)
        if task is None or task.state == FENCED:
            return task_name(job.name, number) + ", which never registered"
        return task_name(job.name, number) + texts.last_seen(task.progress, now - task.progressed_at)

    def _gone(self, job: Job, participants: Sequence[int], now: float) -> dict[int, str]:
        """Return what became of each participant that is lost or has left."""
        gone = {}
        for number in participants:
            task = job.tasks.get(number)
            if task is None or task.state not in (LOST, LEFT):
                continue
            silent = f"sent no heartbeat for {now - task.heard_at:.1f} s"
            fate = "has left" if task.state == LEFT else silent
            gone[number] = f"{task_name(job.name, number)} {fate}{texts.last_seen(task.progress)}"
        return gone

    def _fail_without(self, job: Job, numbers: set[int], now: float) -> None:
        for barrier in list(job.open.values()):
            if not numbers.isdisjoint(barrier.participants):
                self._decide(barrier, texts.lost(barrier.name, self._gone(job, barrier.participants, now)), now)

    def _decide(self, barrier: Barrier, failure: Failure | None, now: float) -> None:
        """Set the verdict. The first decision stands."""
        if not barrier.is_open:
            return
        barrier.decided_at, barrier.failure = now, failure
        self.jobs[barrier.job].open.pop(barrier.barrier_id, None)
        self._decided[barrier.barrier_id] = barrier
        if failure:
            barrier.payloads.clear()
            self._effects.failed.append(barrier)
            if not barrier.operation:
                self.jobs[barrier.job].missed[barrier.key, barrier.position] = barrier
        elif nbytes := sum(map(len, barrier.payloads.values())):
            self._payloads[barrier.barrier_id] = nbytes
            self._payload_bytes += nbytes
        self._effects.decided.append(barrier.barrier_id)
        self._log_verdict(barrier, now)
        self._forget(now)

    # --- time ---------------------------------------------------------------------------------------------------

    def _tick(self, now: float) -> None:
        pause = now - self._ticked_at if self._ticked_at is not None else 0.0
        self._ticked_at = now
        quiet_since = math.inf if pause > MAX_PAUSE_S else now - self.heartbeat_timeout_s / 2
        for job in self.jobs.values():
            lost = set()
            for task in job.tasks.values():
                if task.heard_at >= quiet_since or task.state not in ALIVE:  # most are heard, and there are many
                    continue
                if pause > MAX_PAUSE_S:
                    task.heard_at = min(now, task.heard_at + pause)
                silent_s = now - task.heard_at
                if silent_s > self.heartbeat_timeout_s:
                    task.state = LOST
                    lost.add(task.number)
                    seen = texts.last_seen(task.progress)
                    self._log_task("lost", job, task, f"is lost: silent for {silent_s:.1f} s{seen}")
                elif task.state == REGISTERED and silent_s > self.heartbeat_timeout_s / 2:
                    task.state = SUSPECT
                    self._log_task("suspect", job, task, f"is suspect: silent for {silent_s:.1f} s")
            if lost:
                self._fail_without(job, lost, now)
            for barrier in [barrier for barrier in job.open.values() if barrier.former is not None]:
                self._end_late(barrier, now)
            for barrier in [barrier for barrier in job.open.values() if now >= barrier.deadline]:
                missing = self.waiting_for(barrier, now)
                late = texts.timed_out(barrier.name, barrier.timeout_s, len(barrier.participants), missing)
                self._decide(barrier, late, now)
        self._forget(now)
        self._forget_jobs(now)

    def _forget(self, now: float) -> None:
        while self._payload_bytes > KEPT_PAYLOAD_BYTES:
            barrier_id, nbytes = self._payloads.popitem(last=False)
            self._payload_bytes -= nbytes
            self._barriers[barrier_id].payloads.clear()
            self._barriers[barrier_id].payloads_dropped = True
        while self._decided:
            oldest = next(iter(self._decided.values()))
            assert oldest.decided_at is not None  # noqa: S101  it is in _decided
            if len(self._decided) <= KEPT_VERDICTS and now - oldest.decided_at <= KEPT_VERDICTS_S:
                return
            del self._decided[oldest.barrier_id], self._barriers[oldest.barrier_id]
            self._payload_bytes -= self._payloads.pop(oldest.barrier_id, 0)
            job = self.jobs.get(oldest.job)
            if job is not None:
                _remove(job.latest, oldest.key, oldest)
                _remove(job.named, oldest.name, oldest)
                _remove(job.missed, (oldest.key, oldest.position), oldest)
                _remove(job.broken, oldest.key[2], oldest)
            oldest.arrived.clear()  # tasks may still keep it, by its calls
            oldest.payloads.clear()
            oldest.former = None

    def _forget_jobs(self, now: float) -> None:
        """Remove jobs whose tasks have all been gone for as long as verdicts are kept."""
        for job in list(self.jobs.values()):
            is_over = all(
                task.state not in ALIVE and now - task.heard_at > KEPT_VERDICTS_S for task in job.tasks.values()
            )
            if is_over and not job.open and not job.named:
                del self.jobs[job.name]
                self._log("job_over", f"job {job.name!r} is over", job=job.name)

    # --- what is told about it ------------------------------------------------------------------------------------

    def _log(self, event: str, text: str, **facts: object) -> None:
        self._effects.log.append(Transition(event, text, facts))

    def _log_task(self, event: str, job: Job, task: Task, text: str) -> None:
        facts = {"job": job.name, "task": task.number, "incarnation": f"{task.incarnation:x}", "attempt": task.attempt}
        self._log(f"task_{event}", f"{task_name(job.name, task.number)} {text}", **facts)

    def _log_verdict(self, barrier: Barrier, now: float) -> None:
        failure, duration_s = barrier.failure, now - barrier.opened_at
        verdict = f"failed: {failure.code}: {failure.message}" if failure else "passed"
        self._log(
            "barrier_failed" if failure else "barrier_passed",
            f"job {barrier.job!r} barrier {barrier.name!r} generation {barrier.generation} after {duration_s:.3f} s "
            f"{verdict}",
            job=barrier.job,
            barrier=barrier.name,
            generation=barrier.generation,
            outcome=failure.cause.lower() if failure else "passed",
            duration_s=round(duration_s, 6),
            skew_s=round(barrier.last_arrival_at - barrier.opened_at, 6),
        )


def _superseded(job: str, number: int, attempt: int) -> str:
    return f"{task_name(job, number)}: attempt {attempt} has begun"


def _replaced(job: str, number: int) -> str:
    return f"another process has taken the place of {task_name(job, number)}"


def _remove(kept: dict[_K, Barrier], key: _K, barrier: Barrier) -> None:
    if kept.get(key) is barrier:
        del kept[key]
