"""The coordinator's rules under events of any kind in any order, with every promise checked as they happen.

What is checked is known from the events alone and not read off the rules' own books, where that is possible.
"""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict

from dtckpt_server import rules as server_rules
from dtckpt_server.events import Arrive, Cancel, Event, Heartbeat, Identity, Leave, Register, Tick
from dtckpt_server.rules import Barrier, Effects, Rules, apply
from dtckpt_server.texts import Progress

TIMEOUT_S = 10.0
TICK_S = 0.5
NUM_CLIENTS = 3
LIVES = 2
JOBS = ("one", "two")
LONGEST_S = 30.0
"""Of the timeouts of barriers."""


class Simulation:
    """Rules, a clock, and a judge of what the rules do."""

    def __init__(self) -> None:
        self.rules = Rules(TIMEOUT_S, incarnation=0xC0)
        self.now = 100.0
        self.attempts = dict.fromkeys(JOBS, 0)
        self.open: dict[str, Barrier] = {}
        self.outcomes: Counter[str] = Counter()
        self._verdicts: dict[str, tuple[object, ...]] = {}
        self._votes: defaultdict[str, set[tuple[int, int, bytes]]] = defaultdict(set)  # task, incarnation, topic
        self._deadlines: defaultdict[str, float] = defaultdict(lambda: math.inf)
        self._holders: dict[tuple[str, int], int] = {}  # who has the place of (job, task)

    def identity(self, job: str, task: int, life: int, *, attempt: int | None = None) -> Identity:
        attempt = self.attempts[job] if attempt is None else attempt
        return Identity(job, task, 1000 * attempt + 10 * task + life + 1)

    def register(self, who: Identity) -> Effects:
        return self.happen(Register(who, NUM_CLIENTS, who.incarnation // 1000))

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

    # --- what is promised ---------------------------------------------------------------------------------------

    def happen(self, event: Event) -> Effects:
        self.rules, effects = apply(self.rules, event, self.now)
        if not isinstance(event, Tick | Register | Leave):
            self._only_the_holder_is_heard(event.who, effects)
        if effects.refusal is None:
            self._note(event, effects)
        for barrier_id in effects.decided:
            self._decided(self.rules._barriers.get(barrier_id) or self.open[barrier_id])
        if effects.barrier is not None:
            self._answered(effects.barrier)
        if isinstance(event, Tick):
            self._nobody_waits_in_vain()
        return effects

    def _only_the_holder_is_heard(self, who: Identity, effects: Effects) -> None:
        is_holder = self._holders.get((who.job, who.task)) == who.incarnation
        assert is_holder or effects.refusal is not None, f"{who} is fenced or unknown, and is heard"

    def _note(self, event: Event, effects: Effects) -> None:
        match event:
            case Register(who):
                attempt = who.incarnation // 1000
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

    def _decided(self, barrier: Barrier) -> None:
        barrier_id = barrier.barrier_id
        assert not barrier.is_open
        assert barrier_id not in self._verdicts, "decided twice"
        self.open.pop(barrier_id, None)
        self._verdicts[barrier_id] = (barrier.decided_at, barrier.failure)
        self.outcomes["PASSED" if barrier.failure is None else barrier.failure.cause] += 1
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
                assert self._deadlines[barrier_id] > self.now, "someone waits past the deadline"
                assert gone.isdisjoint(barrier.participants), "a barrier waits for someone who is gone"
        assert sum(len(job.open) for job in self.rules.jobs.values()) == len(self.open)


def random_event(simulation: Simulation, draw: random.Random) -> Event:
    """Return some event; most are such that barriers come about."""
    job, task = draw.choice(JOBS), draw.randrange(NUM_CLIENTS)
    attempt = simulation.attempts[job]
    if draw.random() < 0.03:
        attempt = max(0, attempt - 1)
    who = simulation.identity(job, task, int(draw.random() < 0.1), attempt=attempt)
    kind = draw.random()
    if kind < 0.15:
        return Register(who, NUM_CLIENTS, attempt)
    if kind < 0.35:
        return Heartbeat(who, Progress(draw.choice(("", "write")), draw.randrange(3)))
    if kind < 0.36:
        return Leave(who)
    if kind < 0.37 and simulation.open:
        return Cancel(who, draw.choice(sorted(simulation.open)), "was interrupted")
    if kind < 0.45:
        return Tick()
    is_reused = draw.random() < 0.2
    step = int(simulation.now / 4)
    return Arrive(
        who,
        "again" if is_reused else f"step {step}",
        step + draw.choice((0, 0, 0, 0, -1)) if is_reused else 0,
        draw.choice(((),) * 200 + ((0, 1), (1, 2))),
        draw.choice((2.0, LONGEST_S)),
        ok=draw.random() > 0.02,
        topic=b"t" if draw.random() < 0.02 else b"",
        payload=b"x" * draw.randrange(3),
    )


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
