"""The coordinator's rules: which tasks are alive, which have arrived at which barrier, the verdicts, and feeds.

Pure: no clock, no I/O, no randomness. One function changes the state::

    gRPC call or tick  ->  event  ->  apply(rules, event, now)  ->  (rules, effects)  ->  answers, log lines

Every event comes with the time. The effects say what the server must do: answer, refuse, wake waiters, write log lines.
The same events give the same effects, so tests run the rules by the million, and the server is a thin adapter.

Invariants; ``tests/server/coordinator_simulation.py`` checks the first three after every event:

* A barrier (a round of a name) is decided once. A barrier is open while ``decided_at`` is None, and then in
  ``job.open``.
* A round of an operation takes place once.
* A call gets the round that it has joined, however often it is repeated.
* Memory is bounded: everything that is kept is counted in `Memory` before it is kept.

Feeds have their own rules, `dtckpt.coordination.feeds.rules`, which also run without a coordinator. They learn here
which tasks are gone.

A restarted coordinator starts empty and needs no special rule. The coordinator learns of a task when the task
registers, and grants it a full heartbeat timeout from then on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import chain, islice

from dtckpt import errors
from dtckpt.coordination import barrier_rules, barrier_texts
from dtckpt.coordination.barrier_texts import task_name
from dtckpt.coordination.feeds.events import FeedAnswer, FeedEvent
from dtckpt.coordination.feeds.rules import FeedRules
from dtckpt.coordination.task_identity import Identity
from dtckpt_server import descriptions, failures
from dtckpt_server.events import (
    MAX_NAME_BYTES,
    Arrive,
    Cancel,
    Event,
    Heartbeat,
    Leave,
    Members,
    Register,
    TaskReport,
    Tick,
)
from dtckpt_server.failures import Failure
from dtckpt_server.memory import (
    ARRIVAL_NBYTES,
    BARRIER_NBYTES,
    KEPT_VERDICTS_S,
    PARTICIPANT_NBYTES,
    TASK_NBYTES,
    Memory,
)
from dtckpt_server.quotas import DEFAULTS, LimitError, Quotas, owner_by_name
from dtckpt_server.state import Barrier, Effects, Job, Key, Transition
from dtckpt_server.tasks import ALIVE, FENCED, LEFT, LOST, REGISTERED, SUSPECT, Task, Tasks

MAX_CLIENTS = 100_000
SOME = 8
"""How many tasks an error text names."""
MAX_NAMED = 10_000
"""How many tasks a failure lists for programs."""
MAX_JOBS_LOOKED_AT, MAX_JUDGED = 1000, 64
"""How many jobs one `Tick` looks at, and how many tasks and barriers it judges; the rest is for the next one."""
MAX_LATE, MAX_DUE = 32, 8
"""How many tasks of one job a `Tick` judges, and how many of its barriers."""
MAX_PAUSE_S = 1.0
"""In a longer time without a `Tick` the coordinator was not listening, so that is no silence of the tasks."""


class UnknownError(errors.CoordinationError):
    """The coordinator does not know the task or barrier, perhaps because it was restarted."""


class HeldError(errors.FencedError):
    """Another incarnation holds the place, and the coordinator does not know yet whether it is alive."""


def apply(rules: Rules, event: Event, now: float) -> tuple[Rules, Effects]:
    """Let an event happen; return the new state and the effects that the server must carry out.

    Use the returned rules instead of the given ones. The returned rules are the same object, changed in place: to copy
    thousands of tasks for each heartbeat would be the whole cost. No other function changes the state.
    """
    effects = rules._effects = Effects()
    try:
        rules._accept(event, now)
    except errors.DtckptError as refusal:
        effects.refusal = refusal
    rules._take_changes_of_feeds()
    return rules, effects


class Rules:
    """The state of one coordinator: all its jobs. Changed by `apply` only.

    Args:
        heartbeat_timeout_s: Silence after which a task is lost.
        incarnation: Random id of this life of the coordinator; makes barrier ids unique over restarts.
        quotas: Limits for one owner.
    """

    def __init__(self, heartbeat_timeout_s: float, incarnation: int, quotas: Quotas = DEFAULTS) -> None:
        self.heartbeat_timeout_s = heartbeat_timeout_s
        self.incarnation = incarnation
        self.memory = Memory(quotas)
        self.jobs = self.memory.jobs
        self._barriers = self.memory.barriers
        self.feeds = FeedRules(heartbeat_timeout_s, self._account)
        self._unjudged: deque[Job] = deque()
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
            case _:
                self._effects.feed_answer = self._feed(event, now)

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
        if task is not None and task.incarnation == who.incarnation and task.attempt == attempt:
            self._revive(job, task, now)
            self._note_report(job, task, event.report, now)
            return
        # From here on a process that is new here wants the place.
        if task is not None and task.state in ALIVE:
            self._refuse_rival(job, task, who.incarnation, now)
        if task is not None and task.state == LOST:
            self._tell_fenced(job, task, _replaced(job.name, task.number))
        if task is None:
            self.memory.make_room(job, TASK_NBYTES)
            self.memory.resize(job, TASK_NBYTES)
        else:
            self.feeds.gone(job.name, (task.number,), "another process has its place")
        task = Task(who.task, who.incarnation, attempt, event.host, now, progressed_at=now, report=event.report)
        job.heard_at = now
        job.tasks.place(task, REGISTERED)
        self._fail_waits_for(job, task, now)  # the process is in no operation that the old one of this place was in
        self._log_task("registered", job, task, f"registered from {task.host or 'an unnamed host'}, attempt {attempt}")

    def _job_for(self, event: Register, job_name: str, now: float) -> Job:
        who, num_clients, attempt = event.who, event.num_clients, event.attempt
        job = self.jobs.get(who.job)
        if job is None:
            job = Job(who.job, num_clients, attempt, job_name, event.owner or owner_by_name(who.job))
            while (over := self.memory.job_that_is_over(job.owner)) is not None:
                self._end(over)
            self.memory.add_job(job)
        elif attempt < job.attempt:
            raise errors.FencedError(
                f"{task_name(who.job, who.task)} is of attempt {attempt}, but attempt {job.attempt} has begun"
            )
        elif attempt > job.attempt:
            self._fence(job, event, job_name, now)
        elif job.is_left and all(task.incarnation != who.incarnation for task in job.tasks.values()):
            # All tasks of this job have left, and now another process comes: it is the job's next run.
            self._log("job_begun_anew", f"job {job.name!r} is left by all and begins anew", job=job.name)
            self.memory.resize(job, -TASK_NBYTES * len(job.tasks))
            job.tasks = Tasks()
            job.begin(num_clients, attempt, job_name)
        return job

    def _fence(self, job: Job, event: Register, job_name: str, now: float) -> None:
        """Begin a new attempt: fail the open barriers of the old one, and fence its tasks."""
        attempt, num_clients = event.attempt, event.num_clients
        text = f"job {job.name!r}: attempt {attempt} fences attempt {job.attempt}"
        self._log("attempt_begun", text, job=job.name, attempt=attempt)
        for barrier in list(job.open.values()):
            self._decide(barrier, failures.fenced(barrier.name, job.name, attempt), now)
        self._effects.superseded = attempt
        self.feeds.gone(job.name, None, f"attempt {attempt} has begun")
        num_tasks = len(job.tasks)
        job.tasks.fence(num_clients)
        self.memory.resize(job, (len(job.tasks) - num_tasks) * TASK_NBYTES)
        job.begin(num_clients, attempt, job_name)

    def _refuse_rival(self, job: Job, task: Task, incarnation: int, now: float) -> None:
        """Refuse a process that wants the place of a task which counts as alive.

        The holder may have died a moment ago. So the rival is told to ask again (`HeldError`), and is fenced only once
        the holder was heard after the rival first asked.
        """
        if task.rival[0] != incarnation:
            task.rival = (incarnation, now)
        who = task_name(job.name, task.number)
        if task.heard_at > task.rival[1]:
            raise errors.FencedError(barrier_texts.is_rival(who, job.attempt))
        raise HeldError(f"{who} is held by another process until that has been silent for the heartbeat timeout")

    def _revive(self, job: Job, task: Task, now: float) -> None:
        if task.state != REGISTERED:
            self._log_task("back", job, task, f"is back ({task.state} until now)")
        task.heard_at = job.heard_at = now
        job.tasks.place(task, REGISTERED)

    def _task(self, who: Identity) -> tuple[Job, Task]:
        """Return the job and the task, if ``who`` still has its place."""
        job = self.jobs.get(who.job)
        task = job.tasks.get(who.task) if job else None
        if job is None or task is None or (task.incarnation == who.incarnation and task.state == LEFT):
            raise UnknownError(f"{task_name(who.job, who.task)} is not registered")
        if task.state == FENCED:
            raise errors.FencedError(descriptions.superseded(who.job, who.task, job.attempt))
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
        job.tasks.place(task, LEFT)
        self._log_task("left", job, task, "left")
        self.feeds.gone(job.name, (task.number,), "has left")
        for barrier in [barrier for barrier in job.open.values() if barrier.waits_for(task.number)]:
            self._note_known(barrier, [task.number])  # if the task comes back, it comes for another round
        self._fail_without(job, [task.number], now)

    # --- barriers -----------------------------------------------------------------------------------------------

    def _arrive(self, arrival: Arrive, now: float) -> Barrier:
        """Note an arrival and return the barrier, decided or not."""
        who = arrival.who
        job, task = self._task(who)
        self._revive(job, task, now)
        self._note_report(job, task, arrival.report, now)
        barrier = task.calls.get(arrival.call)
        if barrier is not None and barrier.barrier_id in self._barriers:
            return barrier  # a repeated call; the barrier may have been decided meanwhile
        barrier = self._round_for(job, task, arrival, now)
        task.note_call(arrival.call, barrier)
        if barrier.is_open and arrival.topic != barrier.topic:
            failure = failures.topics_differ(arrival.name, barrier.opener, barrier.topic, who.task, arrival.topic)
            self._decide(barrier, failure, now)
        elif barrier.is_open and not arrival.ok:  # one no decides for all, so no task waits for the rest
            self._decide(barrier, failures.voted_no(who.task, arrival.code, arrival.reason), now)
        elif barrier.is_open:
            self._admit(job, barrier, arrival, now)
        if not barrier.is_open:
            barrier.arrived.setdefault(who.task, arrival.call)  # the task is told now, and not again
        return barrier

    def _round_for(self, job: Job, task: Task, arrival: Arrive, now: float) -> Barrier:
        """Return the round that a new call joins, or the round for which it is late.

        The cases come in this order; `dtckpt.coordination.barrier_rules` says why:

        1. a call that its client has given up: refused
        2. a later barrier of an operation: takes place once, so there is one round, open or decided
        3. a call that had arrived before a restart, of an operation that cannot go on: the failure of that operation
        4. a call that is late for a failed round: that round
        5. else: the open round, or a new one. A call that only may be late sets the round's ``missed``
        """
        participants = arrival.members(job.num_clients)
        key: Key = arrival.name, arrival.operation, participants if isinstance(participants, Members) else ()
        latest = job.latest.get(key)
        is_overtaken = any(call > arrival.call and other.key == key for call, other in task.calls.items())
        if is_overtaken or (arrival.operation is not None and arrival.call <= task.report.num_ended):
            # Case 1. The client has gone on (a later call is here, or this call has ended), and waits for no answer.
            raise errors.BarrierConflictError(barrier_texts.gave_up(arrival.name, task_name(job.name, task.number)))
        if arrival.operation:  # case 2
            return latest or self._open(job, arrival, key, participants, now)
        if arrival.is_again and key[2] in job.broken_operations:  # case 3
            return job.broken_operations[key[2]]
        missed = job.missed.get((key, arrival.position)) or job.missed.get((key, barrier_rules.UNKNOWN_POSITION))
        if missed is not None and task.number in missed.arrived:
            missed = None  # it has heard of that failure
        if (  # case 4
            missed is not None
            and missed.failure is not None
            and barrier_rules.is_late(task.number, is_certain=arrival.is_certain, missing=missed.failure.missing)
        ):
            return missed
        if latest is not None and latest.is_open and task.number in latest.arrived:
            # Case 5. The task gave up the call that had arrived there, and now comes anew.
            self._decide(latest, failures.gave_up(latest.name, task_name(job.name, task.number)), now)
        barrier = latest if latest is not None and latest.is_open else None
        if barrier is None:
            barrier = self._open(job, arrival, key, participants, now)
            barrier.missed = missed
        elif missed is None:
            barrier.missed = None  # this client is not late, so this is a new round for all
        barrier.is_again |= arrival.is_again
        return barrier

    def _admit(self, job: Job, barrier: Barrier, arrival: Arrive, now: float) -> None:
        """Note an ok vote at an open barrier, and decide the barrier if that follows."""
        if not self._count_arrival(job, barrier, arrival, now):
            return
        barrier.arrived[arrival.who.task] = arrival.call
        barrier.last_arrival_at = now
        barrier.payloads[arrival.who.task] = arrival.payload
        if arrival.is_again or arrival.was_cut_off:
            barrier.cut_off.add(arrival.who.task)
        if now + arrival.timeout_s < barrier.deadline:
            barrier.deadline, barrier.timeout_s = now + arrival.timeout_s, arrival.timeout_s
        is_first = len(barrier.arrived) == 1
        if len(barrier.arrived) == len(barrier.participants):
            self._decide(barrier, None, now)
        elif is_first and (gone := job.tasks.gone_among(barrier.participants, MAX_NAMED)):
            # Looked up for the first arrival only: a task that is lost or leaves later fails the barrier then.
            self._decide(barrier, failures.lost(barrier.name, gone, descriptions.fates(job, gone[:SOME], now)), now)
        elif is_first and barrier.operation and (task := self._first_elsewhere(job, barrier)):
            self._fail_operation(job, barrier, task, now)  # likewise: a task that goes elsewhere later reports it
        elif barrier.operation is not None:
            self._find_deadlock(job, barrier, arrival.who.task, now)

    def _count_arrival(self, job: Job, barrier: Barrier, arrival: Arrive, now: float) -> bool:
        """Count an arrival in memory; if it does not fit, fail the barrier, as the others would wait in vain.

        Returns:
            Whether it fits.
        """
        task = arrival.who.task
        # A later round of an operation is joined by every call there: a second call of a task replaces its first.
        nbytes = 0 if task in barrier.arrived else ARRIVAL_NBYTES
        payload_nbytes = len(arrival.payload) - len(barrier.payloads.get(task, b""))
        try:
            self.memory.make_room(job, nbytes + payload_nbytes)
        except LimitError as error:
            self._decide(barrier, failures.voted_no(task, errors.CoordinationError.__name__, error.message), now)
            return False
        self.memory.resize_barrier(job, barrier, nbytes, payload_nbytes)
        return True

    def _open(self, job: Job, arrival: Arrive, key: Key, participants: Sequence[int], now: float) -> Barrier:
        """Open a round. If a round of the name is open with other participants, both fail at once."""
        self._serial += 1
        deadline, latest = now + arrival.timeout_s, job.latest.get(key)
        barrier = Barrier(
            f"{self.incarnation:x}-{self._serial}", key, job.name, arrival.name,
            latest.generation + 1 if latest else 0, participants,
            arrival.who.task, arrival.position, arrival.topic, now, arrival.timeout_s, deadline, now,
        )  # fmt: skip
        self.memory.add_barrier(job, barrier, BARRIER_NBYTES + PARTICIPANT_NBYTES * len(key[2]))
        before = job.latest_of_name.get(arrival.name)
        job.latest[key] = job.latest_of_name[arrival.name] = barrier
        if before is not None and before.is_open and before.participants != participants:
            failure = failures.participants_differ(
                barrier.name, before.opener, before.participants, barrier.opener, barrier.participants
            )
            self._decide(before, failure, now)
            self._decide(barrier, failure, now)
        return barrier

    def _end_late(self, barrier: Barrier, now: float) -> None:
        """Fail a round at which, for the grace period, only tasks have arrived that may be late for a missed round.

        These tasks get the failure of the missed round.
        """
        missed = barrier.missed
        assert missed is not None and missed.failure is not None and missed.decided_at is not None  # noqa: S101, PT018  (for mypy)
        if now >= barrier.opened_at + barrier_rules.grace_s(self.heartbeat_timeout_s):
            self._note_known(barrier, missed.arrived)  # the tasks that were in the missed round know its failure
            age_s = barrier.opened_at - missed.decided_at
            self._decide(barrier, failures.came_late(barrier.name, age_s, missed.failure), now)

    def _note_known(self, barrier: Barrier, numbers: Iterable[int]) -> None:
        """Count tasks that know how a round fails as arrived there, so that they are not late for it."""
        arrivals = {number: 0 for number in numbers if number not in barrier.arrived}
        self.memory.resize_barrier(self.jobs[barrier.job], barrier, ARRIVAL_NBYTES * len(arrivals))
        barrier.arrived |= arrivals

    # --- where tasks are ----------------------------------------------------------------------------------------

    def _note_report(self, job: Job, task: Task, report: TaskReport, now: float) -> None:
        if report != task.report and report.num_ended >= task.report.num_ended:
            task.report = report
            self._fail_waits_for(job, task, now)

    def _fail_waits_for(self, job: Job, task: Task, now: float) -> None:
        """Fail the open rounds of operations that wait for a task in vain, as its report shows."""
        for barrier in [barrier for barrier in job.open.values() if barrier.operation is not None]:
            call = barrier.arrived.get(task.number)
            if call is not None and call <= task.report.num_ended:
                self._decide(barrier, failures.gave_up(barrier.name, task_name(job.name, task.number)), now)
            elif barrier.operation and barrier.waits_for(task.number) and self._is_elsewhere(barrier, task):
                self._fail_operation(job, barrier, task, now)

    def _is_elsewhere(self, barrier: Barrier, task: Task) -> bool:
        """Whether a task that a round waits for has left the round's operation, or will never hear that it began.

        If an earlier life of the coordinator began the operation, that life has also told its tasks; a task that is not
        in the operation now will never be.
        """
        begun = self._barriers.get(barrier.operation or "")
        call = begun.arrived.get(task.number, 0) if begun is not None else 0
        return task.report.operation != barrier.operation and task.report.num_ended >= call

    def _fail_operation(self, job: Job, barrier: Barrier, task: Task, now: float) -> None:
        """Fail an operation's round, as ``task`` is not in the operation."""
        failure = failures.is_elsewhere(barrier.name, task_name(job.name, task.number))
        self._decide(barrier, failure, now)
        # If an earlier life of the coordinator began the operation, some calls may never have heard of it. Such calls
        # have come again to its first round, where no other call will join them; so they fail with it.
        if barrier.operation not in self._barriers:
            job.broken_operations[barrier.key[2]] = barrier
            inside = [each.number for each in job.tasks.values() if each.report.operation == barrier.operation]
            for other in [other for other in job.open.values() if other.is_again and other.key[2] == barrier.key[2]]:
                self._note_known(other, inside)
                self._decide(other, failure, now)

    def _first_elsewhere(self, job: Job, barrier: Barrier) -> Task | None:
        """Return a task that an operation's round waits for in vain, None if there is none."""
        absent = (job.tasks.get(number) for number in barrier.participants if number not in barrier.arrived)
        return next((task for task in absent if task and self._is_elsewhere(barrier, task)), None)

    def _find_deadlock(self, job: Job, barrier: Barrier, number: int, now: float) -> None:
        """Fail two rounds, each of which waits for a task that has arrived at the other one.

        A task is in one round of an operation at a time, so neither could pass.

        Args:
            job: The job.
            barrier: An open round of an operation.
            number: The task that has just arrived there.
            now: The time.
        """
        for other in [other for other in job.open.values() if other.operation is not None and other.waits_for(number)]:
            if (waiting := next((task for task in other.arrived if barrier.waits_for(task)), None)) is not None:
                failure = failures.wait_for_each_other(
                    task_name(job.name, number), barrier.name, task_name(job.name, waiting), other.name
                )
                known = {*other.arrived, *barrier.arrived}
                for each in (other, barrier):
                    self._note_known(each, known)
                    self._decide(each, failure, now)
                return

    def _cancel(self, event: Cancel, now: float) -> None:
        who = event.who
        job, task = self._task(who)
        barrier = self.barrier(who.job, event.barrier_id)
        if who.task not in barrier.participants or not barrier.is_open:
            problem = "is no participant" if barrier.is_open else "came too late, it is decided"
            raise errors.BarrierConflictError(f"cannot cancel barrier {barrier.name!r}: client {who.task} {problem}")
        self._decide(barrier, failures.cancelled(barrier.name, task_name(job.name, task.number), event.reason), now)

    def barrier(self, job: str, barrier_id: str) -> Barrier:
        """Return a barrier of a job.

        Raises:
            UnknownError: There is none of that id; it was forgotten, or is of an earlier life of the coordinator.
        """
        barrier = self._barriers.get(barrier_id)
        if barrier is None or barrier.job != job:
            raise UnknownError(f"job {job!r} has no barrier {barrier_id!r}")
        return barrier

    def waiting_for(self, barrier: Barrier, now: float) -> str:
        """Return a description of tasks that have not arrived: names and progress of some, and how many more."""
        job = self.jobs[barrier.job]
        some = [descriptions.missing_task(job, number, now) for number in barrier.missing(SOME)]
        return errors.capped(some, SOME, count=barrier.num_missing)

    def _fail_without(self, job: Job, gone: Sequence[int], now: float) -> None:
        fates = dict(zip(gone, descriptions.fates(job, gone, now), strict=True))
        for barrier in list(job.open.values()):
            if theirs := [number for number in gone if number in barrier.participants]:
                self._decide(barrier, failures.lost(barrier.name, theirs, map(fates.__getitem__, theirs)), now)

    def _decide(self, barrier: Barrier, failure: Failure | None, now: float) -> None:
        """Set the verdict: the failure, or None for passed. Only the first decision counts."""
        if not barrier.is_open:
            return
        job = self.jobs[barrier.job]
        barrier.decided_at, barrier.failure = now, failure
        job.open.pop(barrier.barrier_id, None)
        if failure:
            self.memory.drop_payloads(job, barrier)  # only a barrier that passed hands them out
            self.memory.resize_barrier(job, barrier, failure.nbytes)
            self._effects.failed.append(barrier)
            if not barrier.operation:  # a first round: a task that has not arrived may come late
                job.missed[barrier.key, barrier.position] = barrier
        self.memory.keep(job, barrier)
        self._effects.decided.append(barrier.barrier_id)
        self._effects.log.append(descriptions.verdict_transition(barrier, now))

    # --- feeds --------------------------------------------------------------------------------------------------

    def _feed(self, event: FeedEvent, now: float) -> FeedAnswer:
        job, task = self._task(event.who)
        self._revive(job, task, now)
        return self.feeds.accept(event, now)

    def _account(self, job_name: str, nbytes: int, what: str) -> None:
        """Count memory of feeds for the job that needs it."""
        job = self.jobs[job_name]
        if nbytes > 0:
            self.memory.make_room(job, nbytes, what)
        self.memory.resize(job, nbytes)

    def _take_changes_of_feeds(self) -> None:
        for note in self.feeds.notes:
            self._log(note.event, note.text, **note.facts)
        self._effects.changed_feeds = set(self.feeds.changed)
        self.feeds.notes.clear()
        self.feeds.changed.clear()

    # --- time ---------------------------------------------------------------------------------------------------

    def _tick(self, now: float) -> None:
        pause = now - self._ticked_at if self._ticked_at is not None else 0.0
        self._ticked_at = now
        if pause > MAX_PAUSE_S:
            # In order of silence, so each queue of `Tasks` stays in the order in which its tasks were heard.
            for task in chain.from_iterable(job.tasks.longest_silent() for job in self.jobs.values()):
                task.heard_at = min(now, task.heard_at + pause)
            self.feeds.pause(pause)
        has_more_feeds = self.feeds.tick(now)
        self.memory.forget_old(now)
        if not self._unjudged:
            self._unjudged.extend(self.jobs.values())
        num_judged = 0
        for _ in range(min(len(self._unjudged), MAX_JOBS_LOOKED_AT)):
            job = self._unjudged.popleft()
            num_of_job = self._judge(job, now) if self.jobs.get(job.name) is job else 0
            if num_of_job >= MAX_DUE:
                self._unjudged.append(job)  # there may be more; the other jobs come first
            num_judged += num_of_job
            if num_judged >= MAX_JUDGED:
                break
        self._effects.is_unfinished = bool(self._unjudged) or has_more_feeds

    def _judge(self, job: Job, now: float) -> int:
        """Find silent tasks and passed deadlines of a job, some at a time; return how many were judged."""
        lost_before, suspect_before = now - self.heartbeat_timeout_s, now - self.heartbeat_timeout_s / 2
        late = [
            *job.tasks.silent_since(lost_before, SUSPECT, MAX_LATE),
            *job.tasks.silent_since(suspect_before, REGISTERED, MAX_LATE),
        ]
        lost = []
        for task in late:
            silent_s = now - task.heard_at
            if task.heard_at < lost_before:
                job.tasks.place(task, LOST)
                lost.append(task.number)
                seen = barrier_texts.last_seen(task.progress)
                self._log_task("lost", job, task, f"is lost: silent for {silent_s:.1f} s{seen}")
            else:
                job.tasks.place(task, SUSPECT)
                self._log_task("suspect", job, task, f"is suspect: silent for {silent_s:.1f} s")
        if lost:
            self._fail_without(job, sorted(lost), now)
            self.feeds.gone(job.name, frozenset(lost), f"sent no heartbeat for {self.heartbeat_timeout_s:g} s")
        for barrier in [barrier for barrier in job.open.values() if barrier.missed is not None]:
            self._end_late(barrier, now)
        due = list(islice((barrier for barrier in job.open.values() if now >= barrier.deadline), MAX_DUE))
        for barrier in due:
            counts = len(barrier.arrived), len(barrier.participants)
            waiting_for, missing = self.waiting_for(barrier, now), barrier.missing(MAX_NAMED)
            failure = failures.timed_out(barrier.name, barrier.timeout_s, *counts, waiting_for, missing=missing)
            self._decide(barrier, failure, now)
        is_idle = not job.tasks.num_alive and not job.open and not job.verdicts
        is_over = is_idle and now - job.heard_at > KEPT_VERDICTS_S and not self.feeds.is_needed(job.name)
        if is_over:
            self._end(job)
        return len(late) + len(due) + is_over

    def _end(self, job: Job) -> None:
        self.feeds.forget(job.name)
        self.memory.remove_job(job)
        self._log("job_over", f"job {job.name!r} is over", job=job.name)

    # --- log lines ------------------------------------------------------------------------------------------------

    def _log(self, event: str, text: str, **facts: object) -> None:
        self._effects.log.append(Transition(event, text, facts))

    def _log_task(self, event: str, job: Job, task: Task, text: str) -> None:
        self._effects.log.append(descriptions.task_transition(event, job, task, text))


def _replaced(job: str, number: int) -> str:
    return barrier_texts.was_replaced(task_name(job, number))
