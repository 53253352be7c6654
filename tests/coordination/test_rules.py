"""The coordinator's rules, without gRPC and with a clock of our own."""

import pytest
from dtckpt_server import rules as server_rules
from dtckpt_server.rules import Arrival, Identity, Rules, UnknownError
from dtckpt_server.texts import Progress
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dtckpt import errors

TIMEOUT_S = 10.0
TICK_S = 0.5


class World:
    """Rules and a clock that ticks."""

    def __init__(self, num_clients=3):
        self.now = 100.0
        self.rules = Rules(TIMEOUT_S, incarnation=0xC0)
        self.num_clients = num_clients

    def who(self, task, incarnation=None, job="job"):
        return Identity(job, task, incarnation or task + 1)

    def register(self, *tasks, attempt=0, **identity):
        for task in tasks:
            self.rules.register(self.who(task, **identity), self.num_clients, attempt, "host", self.now)

    def beat(self, *tasks, phase="", step=0):
        for task in tasks:
            self.rules.heartbeat(self.who(task), Progress(phase, step), self.now)

    def arrive(self, task, name="b", generation=0, participants=(), timeout_s=60.0, incarnation=None, **vote):
        arrival = Arrival(name, generation, tuple(participants), timeout_s, **vote)
        return self.rules.arrive(self.who(task, incarnation), arrival, self.now)

    def pass_time(self, seconds, beating=()):
        end = self.now + seconds
        while self.now < end:
            self.now = min(self.now + TICK_S, end)
            self.beat(*beating)
            self.rules.tick(self.now)


@pytest.fixture
def world():
    world = World()
    world.register(0, 1, 2)
    return world


def test_passes_when_all_have_arrived(world):
    barriers = [world.arrive(task, payload=b"%d" % task) for task in range(3)]
    assert barriers[0] is barriers[1] is barriers[2]
    assert barriers[0].is_passed
    assert barriers[0].payloads == {0: b"0", 1: b"1", 2: b"2"}
    effects = world.rules.drain()
    assert effects.decided == [barriers[0].barrier_id]
    assert effects.log[-1] == "job 'job' barrier 'b' generation 0 after 0.000 s passed"


def test_repeated_arrival_counts_once(world):
    for _ in range(5):
        assert world.arrive(0).is_open


def test_silence_makes_suspect_then_lost(world):
    world.beat(1, phase="write", step=12)
    barrier = world.arrive(0)
    world.pass_time(TIMEOUT_S / 2 + TICK_S, beating=(0, 2))
    assert world.rules.jobs["job"].tasks[1].state == server_rules.SUSPECT
    assert barrier.is_open
    world.pass_time(TIMEOUT_S / 2, beating=(0, 2))
    assert barrier.failure.message == (
        "barrier 'b' failed: client 1 (job/1) sent no heartbeat for 10.5 s; last seen in phase 'write' step 12"
    )
    assert barrier.failure.clients == (1,)


def test_next_barrier_of_a_lost_task_fails_at_once(world):
    world.pass_time(TIMEOUT_S + TICK_S, beating=(0, 2))
    assert world.arrive(0).failure.code == "ClientLostError"


def test_lost_task_that_is_heard_again_is_back(world):
    world.pass_time(TIMEOUT_S + TICK_S, beating=(0, 2))
    world.beat(1)
    barriers = [world.arrive(task) for task in range(3)]
    assert barriers[0].is_passed


def test_time_without_listening_is_not_held_against_tasks(world):
    world.pass_time(TICK_S)
    world.now += 10 * TIMEOUT_S  # the server was stopped, not the tasks
    world.rules.tick(world.now)
    assert {task.state for task in world.rules.jobs["job"].tasks.values()} == {server_rules.REGISTERED}
    world.pass_time(TIMEOUT_S + TICK_S, beating=(0, 2))
    assert world.rules.jobs["job"].tasks[1].state == server_rules.LOST


def test_earliest_deadline_counts(world):
    barrier = world.arrive(0, timeout_s=60)
    world.arrive(1, timeout_s=5)
    world.pass_time(5 + TICK_S, beating=(0, 1, 2))
    assert barrier.failure.message == "barrier 'b' timed out after 5 s: 2/3 arrived, missing client 2 (job/2)"
    assert barrier.failure.missing == (2,)


def test_thousands_of_missing_names_fit_a_message():
    world = World(num_clients=5000)
    world.register(0)
    barrier = world.arrive(0, timeout_s=1)
    world.pass_time(2)
    assert len(barrier.failure.missing) == 4999
    assert "and 4991 more" in barrier.failure.message
    assert len(barrier.failure.message) < 4000


def test_late_arrival_gets_the_verdict_unless_it_is_another_life(world):
    for task in range(3):
        world.arrive(task)
    assert world.arrive(1).is_passed
    world.rules.leave(world.who(1), world.now)
    world.register(1, incarnation=77)
    with pytest.raises(errors.BarrierConflictError, match="was restarted and is behind"):
        world.arrive(1, incarnation=77)


def test_forgotten_generation_is_behind(world, monkeypatch):
    monkeypatch.setattr(server_rules, "KEPT_VERDICTS", 1)
    for generation in range(3):
        for task in range(3):
            world.arrive(task, generation=generation)
    behind = world.arrive(1, generation=0)
    assert "client 0 is ahead: it is at generation 2, client 1 at generation 0" in behind.failure.message


def test_open_generation_behind_fails_both(world):
    ahead = world.arrive(0, generation=5)
    behind = world.arrive(1, generation=0)
    assert ahead.failure == behind.failure
    assert "client 0 is ahead: it is at generation 5, client 1 at generation 0" in ahead.failure.message


def test_recovery_window_is_a_full_timeout_for_each_task():
    world = World()
    world.register(0)
    world.pass_time(TIMEOUT_S - TICK_S, beating=(0,))
    world.register(1)
    world.pass_time(TIMEOUT_S - TICK_S, beating=(0,))
    assert world.rules.jobs["job"].tasks[1].state == server_rules.SUSPECT


def test_verdicts_payloads_and_jobs_do_not_pile_up(world, monkeypatch):
    monkeypatch.setattr(server_rules, "KEPT_VERDICTS", 50)
    monkeypatch.setattr(server_rules, "KEPT_PAYLOAD_BYTES", 10_000)
    for step in range(1000):
        for task in range(3):
            world.arrive(task, name=f"step {step}", payload=b"x" * 1000)
    job = world.rules.jobs["job"]
    assert len(job.barriers) == len(job.latest) == len(world.rules._barriers) == 50
    assert sum(len(payload) for b in job.barriers.values() for payload in b.payloads.values()) <= 10_000
    assert not job.open
    for task in range(3):
        world.rules.leave(world.who(task), world.now)
    world.now += server_rules.KEPT_VERDICTS_S + 1
    world.rules.tick(world.now)
    assert not world.rules.jobs
    assert not world.rules._barriers
    assert world.rules._payload_bytes == 0


def test_open_barriers_are_limited(world, monkeypatch):
    monkeypatch.setattr(server_rules, "MAX_OPEN_BARRIERS", 10)
    for number in range(10):
        world.arrive(0, name=str(number))
    with pytest.raises(server_rules.LimitError, match="already has 10 open barriers"):
        world.arrive(0, name="one more")


def test_higher_attempt_may_have_another_size(world):
    barrier = world.arrive(0)
    world.num_clients = 2
    world.register(0, attempt=1, incarnation=50)
    assert barrier.failure.code == "FencedError"
    with pytest.raises(errors.FencedError, match="attempt 1 has begun"):
        world.arrive(1)
    with pytest.raises(UnknownError):
        world.arrive(2)
    world.register(1, attempt=1, incarnation=51)
    assert world.arrive(0, incarnation=50).is_open
    assert world.arrive(1, incarnation=51).is_passed


class Jobs(RuleBasedStateMachine):
    """Anything may happen in any order; what must never happen is in the invariants."""

    num_clients = 3
    tasks = st.integers(0, 2)
    lives = st.integers(1, 2)

    @initialize()
    def begin(self):
        self.world = World(self.num_clients)
        self.verdicts = {}
        self.ok_votes = {}  # (barrier id, task) -> set of (incarnation, topic)
        self.deadlines = {}  # barrier id -> earliest
        self.attempt = 0
        self.barriers = {}

    def identity(self, task, life):
        return Identity("job", task, 10 * self.attempt + 100 * task + life)

    def attempt_call(self, call):
        try:
            return call()
        except (errors.CoordinationError, errors.ConfigError):
            return None

    @rule(task=tasks, life=lives)
    def register(self, task, life):
        who = self.identity(task, life)
        self.attempt_call(lambda: self.world.rules.register(who, 3, self.attempt, "", self.world.now))

    @rule(task=tasks, life=lives)
    def heartbeat(self, task, life):
        who = self.identity(task, life)
        self.attempt_call(lambda: self.world.rules.heartbeat(who, Progress(), self.world.now))

    @rule(task=tasks, life=lives)
    def leave(self, task, life):
        self.world.rules.leave(self.identity(task, life), self.world.now)

    @rule()
    @precondition(lambda self: self.attempt < 3)
    def next_attempt(self):
        self.attempt += 1

    @rule(
        task=tasks,
        life=lives,
        name=st.sampled_from("ab"),
        generation=st.integers(0, 1),
        participants=st.sampled_from([(), (), (0, 1), (1, 2)]),
        ok=st.sampled_from([True, True, True, False]),
        topic=st.sampled_from([b"", b"", b"", b"t"]),
        timeout_s=st.sampled_from([2.0, 30.0]),
    )
    def arrive(self, task, life, name, generation, participants, ok, topic, timeout_s):
        who = self.identity(task, life)
        arrival = Arrival(name, generation, participants, timeout_s, ok=ok, topic=topic)
        barrier = self.attempt_call(lambda: self.world.rules.arrive(who, arrival, self.world.now))
        if barrier is None:
            return
        self.barriers[barrier.barrier_id] = barrier
        if ok:
            self.ok_votes.setdefault((barrier.barrier_id, task), set()).add((who.incarnation, topic))
        if barrier.is_open:
            before = self.deadlines.get(barrier.barrier_id, float("inf"))
            self.deadlines[barrier.barrier_id] = min(before, self.world.now + timeout_s)

    @rule(task=tasks, life=lives, choice=st.integers(0, 3))
    def cancel(self, task, life, choice):
        open_ids = [key for key, barrier in self.barriers.items() if barrier.is_open]
        if open_ids:
            barrier_id = open_ids[choice % len(open_ids)]
            who = self.identity(task, life)
            self.attempt_call(lambda: self.world.rules.cancel(who, barrier_id, "cancelled", self.world.now))

    @rule(seconds=st.sampled_from([TICK_S, 3.0, TIMEOUT_S + 1]))
    def pass_time(self, seconds):
        self.world.pass_time(seconds)
        for barrier_id, deadline in self.deadlines.items():
            if deadline <= self.world.now:
                assert not self.barriers[barrier_id].is_open, "someone waits past the deadline"
        for job in self.world.rules.jobs.values():
            gone = {n for n, task in job.tasks.items() if task.state in (server_rules.LOST, server_rules.LEFT)}
            for barrier in job.open.values():
                assert gone.isdisjoint(barrier.participants), "a barrier waits for someone who is gone"

    @invariant()
    def verdicts_are_sound_and_final(self):
        for barrier_id, barrier in self.barriers.items():
            if barrier.is_open:
                continue
            verdict = (barrier.decided_at, barrier.failure)
            assert self.verdicts.setdefault(barrier_id, verdict) == verdict, "a verdict changed"
            if barrier.is_passed:
                assert set(barrier.arrived) == set(barrier.participants)
                for task, incarnation in barrier.arrived.items():
                    assert (incarnation, barrier.topic) in self.ok_votes[barrier_id, task]

    @invariant()
    def effects_name_each_decision_once(self):
        decided = self.world.rules.drain().decided
        assert len(decided) == len(set(decided))
        assert set(decided) <= set(self.world.rules._barriers)


TestJobs = Jobs.TestCase
TestJobs.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
