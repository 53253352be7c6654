"""A simulation of the coordinator's rules: events of any kind in any order, with every promise checked after each.

Where possible, the checks use only the events, and not the state of the rules that they check.
"""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field, replace

from dtckpt_server import rules as server_rules
from dtckpt_server.events import (
    Arrive,
    Cancel,
    Event,
    Heartbeat,
    Identity,
    Leave,
    Register,
    TaskProgress,
    TaskReport,
    Tick,
)
from dtckpt_server.rules import Rules, apply
from dtckpt_server.state import Barrier, Effects
from dtckpt_server.tasks import KEPT_CALLS

from dtckpt.coordination import barrier_rules

TIMEOUT_S = 10.0
TICK_S = 0.5
NUM_CLIENTS = 3
LIVES = 2
JOBS = ("one", "two")
LONGEST_S = 30.0
"""The longest timeout of a barrier."""
ORPHAN = "of an earlier life-1"
"""An operation that another life of the coordinator began."""
Round = tuple[str, str, str | None, tuple[int, ...]]
"""Job, name, operation and participants."""


@dataclass(slots=True)
class Caller:
    """The calls of one life of a client, as it knows them."""

    num_calls: int = 0
    arrivals: deque[Arrive] = field(default_factory=lambda: deque(maxlen=KEPT_CALLS // 2))
    report: TaskReport = field(default_factory=TaskReport)


class Simulation:
    """The rules, a clock, and the checks."""

    def __init__(self) -> None:
        self.rules = Rules(TIMEOUT_S, incarnation=0xC0)
        self.now = 100.0
        self.attempts = dict.fromkeys(JOBS, 0)
        self.open: dict[str, Barrier] = {}
        self.outcomes: Counter[str] = Counter()
        self.passed: Counter[str | None] = Counter()  # by operation: None, "" or later
        self._verdicts: dict[str, tuple[object, ...]] = {}
        self._votes: defaultdict[str, set[tuple[int, int, bytes]]] = defaultdict(set)  # task, incarnation, topic
        self._deadlines: defaultdict[str, float] = defaultdict(lambda: math.inf)
        self._holders: dict[tuple[str, int], int] = {}  # incarnation that has the place of (job, task)
        self._lives: dict[tuple[str, int], int] = {}  # incarnation that had it last
        self.callers: defaultdict[Identity, Caller] = defaultdict(Caller)
        self.operations: dict[str, list[str]] = {job: [ORPHAN] for job in JOBS}
        self._joined: dict[tuple[Identity, int], str] = {}  # call -> barrier
        self._rounds: dict[str, tuple[Round, str]] = {}  # barrier -> what it is a round of, and its position
        self._once: dict[Round, str] = {}  # rounds of operations
        self._present: defaultdict[str, dict[int, int]] = defaultdict(dict)  # barrier -> call by task
        self._reports: dict[Identity, TaskReport] = {}

    def identity(self, job: str, task: int, life: int, *, attempt: int | None = None) -> Identity:
        attempt = self.attempts[job] if attempt is None else attempt
        return Identity(job, task, 1000 * attempt + 10 * task + life + 1)

    def register(self, who: Identity) -> Effects:
        return self.happen(Register(who, NUM_CLIENTS, who.incarnation // 1000, report=self.callers[who].report))

    def arrival(self, who: Identity, name: str, participants: tuple[int, ...], timeout_s: float, **options) -> Arrive:
        """Return an arrival by a new call."""
        caller = self.callers[who]
        caller.num_calls += 1
        event = Arrive(who, name, caller.num_calls, participants, timeout_s, report=caller.report, **options)
        caller.arrivals.append(event)
        return event

    def is_open(self, event: Arrive) -> bool:
        """Whether a call waits for a verdict."""
        return self._joined.get((event.who, event.call)) in self.open

    def go_on(self, who: Identity, *, gives_up: bool) -> None:
        """Let a client take note of the verdict that its latest call of an operation has, or give that call up."""
        caller = self.callers[who]
        event = next((event for event in reversed(caller.arrivals) if event.operation is not None), None)
        barrier_id = None if event is None else self._joined.get((who, event.call))
        if event is None or (barrier_id not in self._verdicts and not gives_up):
            return
        begun = barrier_id if self._verdicts.get(barrier_id, (0, "no verdict"))[1] is None else ""
        operation = "" if gives_up else event.operation or begun or ""
        caller.report = TaskReport(operation, max(event.call, caller.report.num_ended))

    def pass_time(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now += TICK_S
            self.happen(Tick())

    def finish(self) -> None:
        """Let all deadlines pass, then all memory fade."""
        self.pass_time(LONGEST_S + TICK_S)
        assert not self.open, "open barriers do not return to zero"
        self.now += server_rules.KEPT_VERDICTS_S + TIMEOUT_S
        for _ in range(int(TIMEOUT_S / TICK_S) + 2):  # the pause is not held against tasks, further silence is
            self.pass_time(TICK_S)
        self.now += server_rules.KEPT_VERDICTS_S + 1
        self.happen(Tick())
        rules = self.rules
        for kept in (rules.jobs, rules.memory.barriers, rules.memory.decided, rules.memory.nbytes):
            assert not kept, "something is never forgotten"

    # --- promises -----------------------------------------------------------------------------------------------

    def happen(self, event: Event) -> Effects:
        was_decided = set(self._verdicts) if isinstance(event, Arrive) else set()
        self.rules, effects = apply(self.rules, event, self.now)
        if not isinstance(event, Tick | Register | Leave):
            self._only_the_holder_is_heard(event.who, effects)
        if isinstance(event, Heartbeat | Arrive) and self._is_holder(event.who):
            self._told(event.who, event.report)  # also by an arrival that is refused
        if isinstance(event, Arrive) and "given up" in str(effects.refusal):
            later = max((call for who, call in self._joined if who == event.who), default=0)
            ended = self._reports.get(event.who, TaskReport()).num_ended
            assert event.call < max(later, ended + 1), "a call that nothing has overtaken was refused"
        if effects.refusal is None:
            self._note(event, effects)
        for barrier_id in effects.decided:
            self._decided(self.rules._barriers.get(barrier_id) or self.open[barrier_id])
        if effects.barrier is not None:
            self._answered(effects.barrier)
        if isinstance(event, Arrive) and effects.barrier is not None:
            self._right_round(event, effects.barrier, was_decided=effects.barrier.barrier_id in was_decided)
        if isinstance(event, Tick):
            self._nobody_waits_in_vain()
        self._nobody_waits_for_who_is_elsewhere()
        return effects

    def _only_the_holder_is_heard(self, who: Identity, effects: Effects) -> None:
        assert self._is_holder(who) or effects.refusal is not None, f"{who} is fenced or unknown, and is heard"

    def _is_holder(self, who: Identity) -> bool:
        return self._holders.get((who.job, who.task)) == who.incarnation

    def _note(self, event: Event, effects: Effects) -> None:
        match event:
            case Register(who):
                attempt = who.incarnation // 1000
                if {"attempt_begun", "job_begun_anew"} & {transition.event for transition in effects.log}:
                    self._begin_anew(who.job)
                if self._lives.get((who.job, who.task)) != who.incarnation:
                    self._joined = {call: joined for call, joined in self._joined.items() if not same(call[0], who)}
                    self._reports = {other: report for other, report in self._reports.items() if not same(other, who)}
                self._lives[who.job, who.task] = who.incarnation
                self._told(who, event.report)
                kept = {
                    place: holder
                    for place, holder in self._holders.items()
                    if place[0] != who.job or holder // 1000 == attempt
                }
                self._holders = {**kept, (who.job, who.task): who.incarnation}
            case Leave(who) if self._holders.get((who.job, who.task)) == who.incarnation:
                del self._holders[who.job, who.task]
            case Arrive(who):
                barrier_id = effects.barrier.barrier_id
                if event.ok:
                    self._votes[barrier_id].add((who.task, who.incarnation, event.topic))
                if effects.barrier.is_open:
                    self.open[barrier_id] = effects.barrier
                    self._deadlines[barrier_id] = min(self._deadlines[barrier_id], self.now + event.timeout_s)

    def _begin_anew(self, job: str) -> None:
        """Forget the rounds, calls and reports of a job's earlier attempt or run."""
        gone = {barrier_id for barrier_id, (round_, _) in self._rounds.items() if round_[0] == job}
        self._rounds = {barrier_id: found for barrier_id, found in self._rounds.items() if barrier_id not in gone}
        self._lives = {place: life for place, life in self._lives.items() if place[0] != job}
        self._once = {round_: barrier_id for round_, barrier_id in self._once.items() if round_[0] != job}
        self._joined = {call: barrier_id for call, barrier_id in self._joined.items() if call[0].job != job}
        self._reports = {who: report for who, report in self._reports.items() if who.job != job}
        self.operations[job] = [ORPHAN]

    def _told(self, who: Identity, report: TaskReport) -> None:
        if report.num_ended >= self._reports.get(who, TaskReport()).num_ended:
            self._reports[who] = report

    def _right_round(self, event: Arrive, barrier: Barrier, *, was_decided: bool) -> None:
        """Check that a call has joined the round that it belongs to, or is late for the round that it is told."""
        who, barrier_id = event.who, barrier.barrier_id
        joined = self._joined.setdefault((who, event.call), barrier_id)
        if joined != barrier_id:
            raise AssertionError("a call that was repeated got another round")
        everyone = event.participants or tuple(range(NUM_CLIENTS))
        mine: Round = who.job, event.name, event.operation, everyone
        round_, position = self._rounds.setdefault(barrier_id, (mine, event.position))
        present = self._present[barrier_id]
        is_repeated = present.get(who.task) == event.call
        is_broken = event.is_again and round_[2] not in (None, "") and round_[3] == everyone
        assert round_ == mine or is_broken, "a call got a round of something else"
        if event.operation:
            assert self._once.setdefault(mine, barrier_id) == barrier_id, "a round of an operation took place twice"
        elif was_decided and not is_repeated and not is_broken:
            _, failure = self._verdicts[barrier_id]
            assert failure is not None, "a new call passed by an earlier round"
            assert who.task not in present, "a new call got the verdict of another call of its client"
            assert event.position == position, "a client was told to be late for a round at another position"
            assert barrier_rules.is_late(who.task, is_certain=event.is_certain, missing=failure.missing), (
                "a client that may be a new one was told an old failure at once"
            )
        present.setdefault(who.task, event.call)
        if barrier.is_passed and event.operation == "" and barrier_id not in self.operations[who.job]:
            self.operations[who.job].append(barrier_id)

    def _nobody_waits_for_who_is_elsewhere(self) -> None:
        for barrier_id in self.open:
            (job, _, operation, participants), _ = self._rounds[barrier_id]
            if operation is None:
                continue
            present, begun = self._present[barrier_id], self._present.get(operation, {})
            for task in participants:
                who = Identity(job, task, self._holders.get((job, task), 0))
                report = self._reports.get(who)
                if report is None:
                    continue
                if task in present:
                    assert present[task] > report.num_ended, "a round outlasts a call that was given up"
                elif operation:
                    is_elsewhere = report.operation != operation and report.num_ended >= begun.get(task, 0)
                    assert not is_elsewhere, "a round waits for a client that has left its operation"

    def _decided(self, barrier: Barrier) -> None:
        barrier_id = barrier.barrier_id
        assert not barrier.is_open
        assert barrier_id not in self._verdicts, "decided twice"
        self.open.pop(barrier_id, None)
        self._verdicts[barrier_id] = (barrier.decided_at, barrier.failure)
        self.outcomes["PASSED" if barrier.failure is None else barrier.failure.cause] += 1
        self.passed["later" if barrier.operation else barrier.operation] += barrier.is_passed
        if barrier.is_passed:
            votes = self._votes[barrier_id]
            assert {task for task, _, topic in votes if topic == barrier.topic} == set(barrier.participants)
            for task in barrier.participants:
                lives = {incarnation for voter, incarnation, _ in votes if voter == task}
                assert lives == {self._holders[barrier.job, task]}, (
                    "it passed for more or other lives than the holder's"
                )
        else:
            assert barrier.failure.code, "a failure has an error"
            assert barrier.failure.message, "and says why"
        self._votes.pop(barrier_id, None)
        self._deadlines.pop(barrier_id, None)

    def _answered(self, barrier: Barrier) -> None:
        if not barrier.is_open:
            assert self._verdicts[barrier.barrier_id] == (barrier.decided_at, barrier.failure), "a verdict changed"

    def _nobody_waits_in_vain(self) -> None:
        for job in self.rules.jobs.values():
            gone = {n for n, task in job.tasks.items() if task.state in (server_rules.LOST, server_rules.LEFT)}
            for barrier_id, barrier in job.open.items():
                assert self._deadlines[barrier_id] > self.now, "a client waits past the deadline"
                assert gone.isdisjoint(barrier.participants), "a barrier waits for a client that is gone"
        assert sum(len(job.open) for job in self.rules.jobs.values()) == len(self.open)


def same(who: Identity, other: Identity) -> bool:
    """Whether two lives are of one task."""
    return (who.job, who.task) == (other.job, other.task)


def random_event(simulation: Simulation, draw: random.Random) -> Event:
    """Return some event; most are such that barriers come about."""
    job, task = draw.choice(JOBS), draw.randrange(NUM_CLIENTS)
    attempt = simulation.attempts[job]
    if draw.random() < 0.03:
        attempt = max(0, attempt - 1)
    who = simulation.identity(job, task, int(draw.random() < 0.1), attempt=attempt)
    kind = draw.random()
    if draw.random() < 0.5:
        simulation.go_on(who, gives_up=draw.random() < 0.05)
    report = simulation.callers[who].report
    if kind < 0.15:
        return Register(who, NUM_CLIENTS, attempt, report=report)
    if kind < 0.35:
        return Heartbeat(who, TaskProgress(draw.choice(("", "write")), draw.randrange(3)), report)
    if kind < 0.36:
        return Leave(who)
    if kind < 0.37 and simulation.open:
        return Cancel(who, draw.choice(sorted(simulation.open)), "was interrupted")
    if kind < 0.45:
        return Tick()
    arrivals = simulation.callers[who].arrivals
    if kind < 0.55 and arrivals:
        return replace(draw.choice(arrivals), report=report, was_cut_off=draw.random() < 0.5)
    if arrivals and simulation.is_open(arrivals[-1]) and draw.random() < 0.95:
        return Heartbeat(who, report=report)  # most wait until they are told
    return random_arrival(simulation, who, draw)


def random_arrival(simulation: Simulation, who: Identity, draw: random.Random) -> Event:
    """Return an arrival by a new call, most often where the others wait for it or at what they come to about now."""
    step = int(simulation.now / 4)
    operations = simulation.operations[who.job]
    places = [
        (f"step {step}", None),
        ("again", None),
        ("save/begin" if draw.random() < 0.9 else "restore/begin", ""),
        ("save/written", draw.choice(operations)),
    ]
    begun = simulation.callers[who].report.operation
    if begun and draw.random() < 0.8:
        places = [("save/planned", begun), ("save/written", begun)]
    waiting = [
        barrier for barrier in simulation.open.values() if barrier.job == who.job and barrier.waits_for(who.task)
    ]
    if waiting and draw.random() < 0.9:
        places = [(barrier.name, barrier.operation) for barrier in waiting]
    name, operation = draw.choice(places)
    event = simulation.arrival(
        who,
        name,
        draw.choice(((),) * 200 + ((0, 1), (1, 2))),
        draw.choice((2.0, LONGEST_S)),
        ok=draw.random() > 0.02,
        topic=b"t" if draw.random() < 0.02 else b"",
        payload=b"x" * draw.randrange(3),
        operation=operation,
        position=f"step {step + draw.choice((0,) * 9 + (-1,))}",
        is_certain=draw.random() < 0.5,
        is_again=operation == "" and draw.random() < 0.05,
    )
    if draw.random() < 0.02:  # it gets through later than the next one, or never
        return Tick()
    return event


def run_randomly(simulation: Simulation, draw: random.Random, num_events: int) -> None:
    """Let so many events happen while time passes, now and then in jumps."""
    for _ in range(num_events):
        chance = draw.random()
        if chance < 0.2:
            simulation.now += TICK_S * draw.random()
        elif chance < 0.202:
            simulation.pass_time(TIMEOUT_S + 1)
        elif chance < 0.203:
            simulation.now += 100.0  # the server was stopped
        elif chance < 0.205:
            simulation.attempts[draw.choice(JOBS)] += 1
        simulation.happen(random_event(simulation, draw))
