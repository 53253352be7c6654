"""The coordinator's rules: who is alive, who has arrived, and what the verdict is.

No clock, no I/O, no randomness: every call is given the time, answers from the state, and leaves what must happen in
the world (wake waiters, write a log line) for `Rules.drain`. The same calls give the same answers, so the rules are
tested by the million and the server is a thin adapter. State is changed in place, because copying thousands of tasks
for each heartbeat would be the whole cost; nothing outside this module changes it.

The recovery window after a restart needs no rule: a task is only known once it has registered, and each life of the
coordinator grants it a full heartbeat timeout from then on.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from dtckpt import errors
from dtckpt_server import texts
from dtckpt_server.texts import Failure, Progress, task_name

REGISTERED, SUSPECT, LOST, LEFT, FENCED = "REGISTERED", "SUSPECT", "LOST", "LEFT", "FENCED"
ALIVE = (REGISTERED, SUSPECT)

MAX_NAME_BYTES = 256
MAX_TOPIC_BYTES = 256
MAX_PAYLOAD_BYTES = 4096
MAX_CLIENTS = 100_000
MAX_JOBS = 10_000
MAX_OPEN_BARRIERS = 1000
"""Per job."""
MAX_TIMEOUT_S = 7 * 86400.0
KEPT_VERDICTS = 10_000
KEPT_VERDICTS_S = 3600.0
KEPT_PAYLOAD_BYTES = 256 << 20
"""Payloads of decided barriers; beyond this the oldest are dropped, their verdicts stay."""
MAX_PAUSE_S = 1.0
"""A longer time without `Rules.tick` was spent not listening, and is not held against the tasks."""


class UnknownError(errors.CoordinationError):
    """The coordinator does not know the task or barrier, perhaps because it was restarted."""


class HeldError(errors.FencedError):
    """Another incarnation holds the place, and it is not known yet whether it is alive."""


class LimitError(errors.CoordinationError):
    """A limit of the coordinator is reached."""


@dataclass(frozen=True, slots=True)
class Identity:
    """One life of one task."""

    job: str
    task: int
    incarnation: int


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
    rival: tuple[int, float] = (0, 0.0)  # incarnation that wants this place, and since when


@dataclass(slots=True)
class Barrier:
    """One generation of one barrier name. The verdict is set once."""

    barrier_id: str
    job: str
    name: str
    generation: int
    participants: tuple[int, ...]
    first: int
    topic: bytes
    opened_at: float
    timeout_s: float
    deadline: float
    arrived: dict[int, int] = field(default_factory=dict)  # task -> incarnation
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
    def key(self) -> tuple[str, tuple[int, ...], int]:
        return self.name, self.participants, self.generation

    def missing(self) -> list[int]:
        return [task for task in self.participants if task not in self.arrived]


@dataclass(slots=True)
class Job:
    """One job of one attempt."""

    name: str
    num_clients: int
    attempt: int
    tasks: dict[int, Task] = field(default_factory=dict)
    barriers: dict[tuple[str, tuple[int, ...], int], Barrier] = field(default_factory=dict)
    open: dict[str, Barrier] = field(default_factory=dict)  # by barrier_id
    latest: dict[str, Barrier] = field(default_factory=dict)  # by name


@dataclass(frozen=True, slots=True)
class Arrival:
    """What a task says when it arrives."""

    name: str
    generation: int
    participants: tuple[int, ...]  # empty: all
    timeout_s: float
    ok: bool = True
    payload: bytes = b""
    topic: bytes = b""
    code: str = ""
    reason: str = ""


@dataclass(slots=True)
class Effects:
    """What the world must do."""

    decided: list[str] = field(default_factory=list)  # barrier ids
    log: list[str] = field(default_factory=list)


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

    def drain(self) -> Effects:
        """Return what has to happen since the last call."""
        effects, self._effects = self._effects, Effects()
        return effects

    # --- tasks --------------------------------------------------------------------------------------------------

    def register(self, who: Identity, num_clients: int, attempt: int, host: str, now: float) -> None:
        """Give the task its place, or renew it.

        Raises:
            ConfigError: The numbers make no sense or differ from the job's.
            HeldError: Another incarnation holds the place and may be alive; ask again.
            FencedError: Another incarnation holds the place and is alive, or the attempt is over.
            LimitError: There are too many jobs.
        """
        if not who.job or not who.incarnation or not 0 < num_clients <= MAX_CLIENTS or who.task >= num_clients:
            raise errors.ConfigError(
                f"cannot register {task_name(who.job, who.task)} of {num_clients}: expected a job name, an incarnation "
                f"and a task from 0 to num_clients - 1 (at most {MAX_CLIENTS - 1})"
            )
        job = self._job_for(who, num_clients, attempt, now)
        if num_clients != job.num_clients:
            raise errors.ConfigError(
                f"{task_name(who.job, who.task)} says that the job has {num_clients} clients; got {num_clients}, "
                f"expected {job.num_clients} as the others of attempt {job.attempt} said"
            )
        task = job.tasks.get(who.task)
        if task is not None and task.incarnation == who.incarnation:
            self._revive(job, task, now)
            return
        if task is not None and task.state in ALIVE:
            self._refuse_rival(job, task, who.incarnation, now)
        job.tasks[who.task] = Task(who.task, who.incarnation, attempt, host, now)
        self._log(f"{task_name(job.name, who.task)} registered from {host or 'an unnamed host'}, attempt {attempt}")

    def _job_for(self, who: Identity, num_clients: int, attempt: int, now: float) -> Job:
        job = self.jobs.get(who.job)
        if job is None:
            if len(self.jobs) >= MAX_JOBS:
                raise LimitError(f"no room for job {who.job!r}: the coordinator has {len(self.jobs)} jobs")
            job = self.jobs[who.job] = Job(who.job, num_clients, attempt)
        elif attempt < job.attempt:
            raise errors.FencedError(
                f"{task_name(who.job, who.task)} is of attempt {attempt}, but attempt {job.attempt} has begun"
            )
        elif attempt > job.attempt:
            self._fence(job, attempt, num_clients, now)
        return job

    def _fence(self, job: Job, attempt: int, num_clients: int, now: float) -> None:
        """Begin a new attempt: whatever belongs to the old one is over."""
        self._log(f"job {job.name!r}: attempt {attempt} fences attempt {job.attempt}")
        for barrier in list(job.open.values()):
            self._decide(barrier, texts.fenced(barrier.name, job.name, attempt), now)
        for task in job.tasks.values():
            task.state = FENCED
        job.tasks = {number: task for number, task in job.tasks.items() if number < num_clients}
        job.barriers.clear()
        job.latest.clear()
        job.attempt, job.num_clients = attempt, num_clients

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
            self._log(f"{task_name(job.name, task.number)} is back ({task.state} until now)")
        task.state, task.heard_at = REGISTERED, now

    def _task(self, who: Identity) -> tuple[Job, Task]:
        """Return the task if ``who`` still has its place."""
        job = self.jobs.get(who.job)
        task = job.tasks.get(who.task) if job else None
        if job is None or task is None or (task.incarnation == who.incarnation and task.state == LEFT):
            raise UnknownError(f"{task_name(who.job, who.task)} is not registered")
        if task.state == FENCED:
            raise errors.FencedError(f"{task_name(who.job, who.task)}: attempt {job.attempt} has begun")
        if task.incarnation != who.incarnation:
            raise errors.FencedError(f"another process has taken the place of {task_name(who.job, who.task)}")
        return job, task

    def heartbeat(self, who: Identity, progress: Progress, now: float) -> None:
        """Renew a task's lease. A lost task that is heard again is back; what failed without it stays failed.

        Raises:
            UnknownError: The task is not registered.
            FencedError: The task's place is taken.
        """
        job, task = self._task(who)
        self._revive(job, task, now)
        task.progress = progress

    def leave(self, who: Identity, now: float) -> None:
        """Give up a task's place. No error if it has none."""
        try:
            job, task = self._task(who)
        except (UnknownError, errors.FencedError):
            return
        task.state = LEFT
        self._log(f"{task_name(job.name, task.number)} left")
        self._fail_without(job, {task.number}, now)

    # --- barriers -----------------------------------------------------------------------------------------------

    def arrive(self, who: Identity, arrival: Arrival, now: float) -> Barrier:
        """Note an arrival and return the barrier, decided or not. Idempotent.

        Raises:
            UnknownError: The task is not registered.
            FencedError: The task's place is taken.
            ConfigError: The arrival makes no sense.
            BarrierConflictError: The task is no participant, or an earlier life of it arrived.
            LimitError: The job has too many open barriers.
        """
        job, task = self._task(who)
        participants = _validate(job, who, arrival)
        barrier = job.barriers.get((arrival.name, participants, arrival.generation))
        if barrier is None:
            barrier = self._open(job, who, arrival, participants, now)
        if barrier.failure is None and barrier.arrived.get(who.task, who.incarnation) != who.incarnation:
            failure = texts.restarted(arrival.name, arrival.generation, task_name(job.name, who.task))
            self._decide(barrier, failure, now)
            raise errors.BarrierConflictError(failure.message)
        if not barrier.is_open:
            return barrier
        self._revive(job, task, now)
        if arrival.topic != barrier.topic:
            failure = texts.topics_differ(arrival.name, barrier.first, barrier.topic, who.task, arrival.topic)
            self._decide(barrier, failure, now)
        elif not arrival.ok:
            self._decide(barrier, texts.voted_no(who.task, arrival.code, arrival.reason), now)
        else:
            self._admit(job, barrier, who, arrival, now)
        return barrier

    def _admit(self, job: Job, barrier: Barrier, who: Identity, arrival: Arrival, now: float) -> None:
        barrier.arrived[who.task] = who.incarnation
        barrier.payloads[who.task] = arrival.payload
        if now + arrival.timeout_s < barrier.deadline:
            barrier.deadline, barrier.timeout_s = now + arrival.timeout_s, arrival.timeout_s
        if len(barrier.arrived) == len(barrier.participants):
            self._decide(barrier, None, now)
        elif gone := self._gone(job, barrier.participants, now):
            self._decide(barrier, texts.lost(barrier.name, gone), now)

    def _open(self, job: Job, who: Identity, arrival: Arrival, participants: tuple[int, ...], now: float) -> Barrier:
        """Open a barrier; it is born failed if the name's latest contradicts it."""
        if len(job.open) >= MAX_OPEN_BARRIERS:
            raise LimitError(f"barrier {arrival.name!r}: job {job.name!r} already has {len(job.open)} open barriers")
        self._serial += 1
        deadline = now + arrival.timeout_s
        barrier = Barrier(
            f"{self.incarnation:x}-{self._serial}", job.name, arrival.name, arrival.generation, participants,
            who.task, arrival.topic, now, arrival.timeout_s, deadline,
        )  # fmt: skip
        before = job.latest.get(arrival.name)
        job.barriers[barrier.key] = job.open[barrier.barrier_id] = self._barriers[barrier.barrier_id] = barrier
        is_behind = before and before.participants == participants and before.generation > arrival.generation
        if before is not None and (before.is_open or is_behind):
            failure = _contradiction(before, barrier)
            self._decide(before, failure, now)
            self._decide(barrier, failure, now)
        if not is_behind:
            job.latest[arrival.name] = barrier
        return barrier

    def cancel(self, who: Identity, barrier_id: str, reason: str, now: float) -> None:
        """Fail an open barrier.

        Raises:
            UnknownError: The task is not registered, or there is no such barrier.
            BarrierConflictError: The task is no participant, or the barrier is decided.
        """
        job, task = self._task(who)
        barrier = self.barrier(who.job, barrier_id)
        if who.task not in barrier.participants or not barrier.is_open:
            problem = "is no participant" if barrier.is_open else "came too late, it is decided"
            raise errors.BarrierConflictError(f"cannot cancel barrier {barrier.name!r}: client {who.task} {problem}")
        self._decide(barrier, texts.cancelled(barrier.name, task_name(job.name, task.number), reason), now)

    def barrier(self, job: str, barrier_id: str) -> Barrier:
        """Return a barrier of a job.

        Raises:
            UnknownError: There is none of that id; it was forgotten, or is of an earlier life of the coordinator.
        """
        barrier = self._barriers.get(barrier_id)
        if barrier is None or barrier.job != job:
            raise UnknownError(f"job {job!r} has no barrier {barrier_id!r}")
        return barrier

    def waiting_for(self, barrier: Barrier) -> dict[int, str]:
        """Return how to call each participant that has not arrived."""
        return {number: self._describe(self.jobs[barrier.job], number) for number in barrier.missing()}

    def _describe(self, job: Job, number: int) -> str:
        task = job.tasks.get(number)
        seen = ", which never registered" if task is None or task.state == FENCED else texts.last_seen(task.progress)
        return task_name(job.name, number) + seen

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
        elif nbytes := sum(map(len, barrier.payloads.values())):
            self._payloads[barrier.barrier_id] = nbytes
            self._payload_bytes += nbytes
        self._effects.decided.append(barrier.barrier_id)
        verdict = f"failed: {failure.code}: {failure.message}" if failure else "passed"
        took = f"after {now - barrier.opened_at:.3f} s"
        self._log(f"job {barrier.job!r} barrier {barrier.name!r} generation {barrier.generation} {took} {verdict}")
        self._forget(now)

    # --- time ---------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Judge heartbeats and deadlines. Call it several times a second."""
        pause = now - self._ticked_at if self._ticked_at is not None else 0.0
        self._ticked_at = now
        for job in self.jobs.values():
            lost = set()
            for task in job.tasks.values():
                if task.state not in ALIVE:
                    continue
                if pause > MAX_PAUSE_S:
                    task.heard_at = min(now, task.heard_at + pause)
                silent_s = now - task.heard_at
                if silent_s > self.heartbeat_timeout_s:
                    task.state = LOST
                    lost.add(task.number)
                    seen = texts.last_seen(task.progress)
                    self._log(f"{task_name(job.name, task.number)} is lost: silent for {silent_s:.1f} s{seen}")
                elif task.state == REGISTERED and silent_s > self.heartbeat_timeout_s / 2:
                    task.state = SUSPECT
                    self._log(f"{task_name(job.name, task.number)} is suspect: silent for {silent_s:.1f} s")
            if lost:
                self._fail_without(job, lost, now)
            for barrier in [barrier for barrier in job.open.values() if now >= barrier.deadline]:
                missing = self.waiting_for(barrier)
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
            if job and job.barriers.get(oldest.key) is oldest:
                del job.barriers[oldest.key]
            if job and job.latest.get(oldest.name) is oldest:
                del job.latest[oldest.name]

    def _forget_jobs(self, now: float) -> None:
        """Remove jobs whose tasks have all been gone for as long as verdicts are kept."""
        for job in list(self.jobs.values()):
            is_over = all(
                task.state not in ALIVE and now - task.heard_at > KEPT_VERDICTS_S for task in job.tasks.values()
            )
            if is_over and not job.open and not job.barriers:
                del self.jobs[job.name]
                self._log(f"job {job.name!r} is over")

    def _log(self, line: str) -> None:
        self._effects.log.append(line)


def _contradiction(before: Barrier, after: Barrier) -> Failure:
    """Return why two barriers of one name cannot both be."""
    if before.participants != after.participants:
        return texts.participants_differ(after.name, before.first, before.participants, after.first, after.participants)
    old, new = (before.first, before.generation), (after.first, after.generation)
    ahead, behind = (new, old) if after.generation > before.generation else (old, new)
    return texts.generations_differ(after.name, ahead, behind)


def _validate(job: Job, who: Identity, arrival: Arrival) -> tuple[int, ...]:
    """Return the participants, sorted, of an arrival that makes sense."""
    for what, size, limit in (
        ("name", len(arrival.name.encode()), MAX_NAME_BYTES),
        ("topic", len(arrival.topic), MAX_TOPIC_BYTES),
        ("payload", len(arrival.payload), MAX_PAYLOAD_BYTES),
    ):
        if size > limit:
            raise errors.ConfigError(f"barrier's {what} is too long: got {size} bytes, at most {limit} fit")
    if not arrival.name or not 0 < arrival.timeout_s <= MAX_TIMEOUT_S or math.isnan(arrival.timeout_s):
        raise errors.ConfigError(
            f"barrier {arrival.name!r} with timeout {arrival.timeout_s} s: expected a name and a positive number of "
            f"seconds, at most {MAX_TIMEOUT_S:g}"
        )
    participants = tuple(sorted(set(arrival.participants))) or tuple(range(job.num_clients))
    if participants[-1] >= job.num_clients:
        raise errors.ConfigError(
            f"barrier {arrival.name!r}: participant {participants[-1]} is no client of job {job.name!r}; expected ids "
            f"from 0 to {job.num_clients - 1}"
        )
    if who.task not in participants:
        raise errors.BarrierConflictError(
            f"barrier {arrival.name!r}: client {who.task} is not a participant; participants are "
            f"{errors.capped(participants)}"
        )
    return participants
