"""The coordinator's rules, without gRPC and with a clock that the test sets."""

import itertools
import tracemalloc

import pytest
from dtckpt_server import memory
from dtckpt_server import rules as server_rules
from dtckpt_server.events import Arrive, Cancel, Heartbeat, Identity, Leave, Register, TaskProgress, Tick
from dtckpt_server.quotas import Quotas
from dtckpt_server.rules import Rules, UnknownError, apply
from dtckpt_server.tasks import KEPT_CALLS

from dtckpt import errors

TIMEOUT_S = 10.0
TICK_S = 0.5


class World:
    """Rules and a clock that ticks."""

    def __init__(self, num_clients=3):
        self.now = 100.0
        self.rules = Rules(TIMEOUT_S, incarnation=0xC0)
        self.num_clients = num_clients
        self.calls = itertools.count(1)

    def who(self, task, incarnation=None, job="job"):
        return Identity(job, task, incarnation or task + 1)

    def happen(self, event):
        """Return the effects, or raise the refusal."""
        self.rules, effects = apply(self.rules, event, self.now)
        if effects.refusal is not None:
            raise effects.refusal
        return effects

    def register(self, *tasks, attempt=0, **identity):
        for task in tasks:
            self.happen(Register(self.who(task, **identity), self.num_clients, attempt, "host"))

    def beat(self, *tasks, phase="", step=0, done=0, total=0):
        for task in tasks:
            self.happen(Heartbeat(self.who(task), TaskProgress(phase, step, done, total)))

    def leave(self, task):
        return self.happen(Leave(self.who(task)))

    def arrival(self, task, name="b", call=0, participants=(), timeout_s=60.0, incarnation=None, **options):
        """Return an arrival by a new call, unless the number of one is given."""
        call = call or next(self.calls)
        return Arrive(self.who(task, incarnation), name, call, tuple(participants), timeout_s, **options)

    def arrive(self, task, *args, **kwargs):
        return self.happen(self.arrival(task, *args, **kwargs)).barrier

    def tick(self):
        return self.happen(Tick())

    def pass_time(self, seconds, beating=()):
        end = self.now + seconds
        while self.now < end:
            self.now = min(self.now + TICK_S, end)
            self.beat(*beating)
            self.tick()


@pytest.fixture
def world():
    world = World()
    world.register(0, 1, 2)
    return world


def test_passes_when_all_have_arrived(world):
    effects = [world.happen(world.arrival(task, payload=b"%d" % task)) for task in range(3)]
    barriers = [effect.barrier for effect in effects]
    assert barriers[0] is barriers[1] is barriers[2]
    assert barriers[0].is_passed
    assert barriers[0].payloads == {0: b"0", 1: b"1", 2: b"2"}
    assert [effect.decided for effect in effects] == [[], [], [barriers[0].barrier_id]]
    assert effects[-1].log[-1].text == "job 'job' barrier 'b' generation 0 after 0.000 s passed"


def test_repeated_arrival_counts_once(world):
    arrived = [world.arrive(0, call=7) for _ in range(5)]
    assert all(barrier is arrived[0] for barrier in arrived)
    assert arrived[0].is_open


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


def test_late_arrival_of_a_lost_task_brings_it_back(world):
    world.arrive(0)
    world.pass_time(TIMEOUT_S + TICK_S, beating=(0, 2))
    assert world.arrive(1).failure.code == "ClientLostError"
    assert world.arrive(0).is_open


def test_time_without_listening_is_not_held_against_tasks(world):
    world.pass_time(TICK_S)
    world.now += 10 * TIMEOUT_S  # the server was stopped, not the tasks
    world.tick()
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


def test_repeated_call_gets_the_verdict_and_another_life_does_not():
    world = World(2)
    world.register(0, 1)
    passed = [world.arrive(task, call=7 + task) for task in range(2)]
    assert world.arrive(1, call=8) is passed[0]
    world.leave(1)
    world.register(1, incarnation=77)
    again = world.arrive(1, call=8, incarnation=77)
    assert (again.is_open, again.generation) == (True, 1)
    assert world.arrive(0, call=9) is again
    assert again.is_passed


def test_call_whose_round_is_forgotten_is_a_new_one_or_is_over(world, monkeypatch):
    monkeypatch.setattr(memory, "KEPT_VERDICTS", 1)
    for call in (10, 20, 30):
        for task in range(3):
            passed = world.arrive(task, call=call)
    assert passed.generation == 2
    with pytest.raises(errors.BarrierConflictError, match=r"client 1 .* has given up waiting"):
        world.arrive(1, call=20)
    world.arrive(0, name="other", call=31, ok=False)
    again = world.arrive(1, call=30)
    assert (again.is_open, again.generation) == (True, 0)


def test_job_that_all_have_left_begins_anew():
    """Its next run needs no higher attempt, and may have another size."""
    world = World(2)
    world.register(0, 1)
    for task in range(2):
        barrier = world.arrive(task)
    assert barrier.is_passed
    world.leave(0)
    world.register(0, incarnation=7)  # the other one is still there
    begun = world.arrive(0, incarnation=7)
    assert (begun.is_open, begun.generation) == (True, 1)
    world.happen(Leave(world.who(0, 7)))
    world.leave(1)
    world.num_clients = 3
    for task in range(3):
        world.register(task, incarnation=10 + task)
        again = world.arrive(task, incarnation=10 + task)
    assert (again.is_passed, again.generation) == (True, 0)
    assert again.barrier_id != barrier.barrier_id
    world.rules.barrier("job", barrier.barrier_id)  # verdicts of the last run are still kept
    with pytest.raises(server_rules.HeldError):
        world.register(0)


def test_clients_that_have_all_left_may_come_back():
    """The same processes are the same run."""
    world = World(2)
    world.register(0, 1)
    for task in range(2):
        passed = world.arrive(task, call=7)
    for task in range(2):
        world.leave(task)
    world.register(0, 1)
    assert world.arrive(0, call=7) is passed  # the stored verdict
    assert world.arrive(0, call=8).generation == 1
    assert world.arrive(1, call=8).is_passed


def test_job_of_which_not_all_came_does_not_begin_anew():
    """A late client is told the decision that was made without it."""
    world = World(2)
    world.register(0)
    failed = world.arrive(0, timeout_s=1.0, position="step 1")
    world.pass_time(2.0, beating=(0,))
    world.leave(0)
    world.register(1)
    assert world.arrive(1, position="step 1", is_certain=True) is failed


def test_recovery_window_is_a_full_timeout_for_each_task():
    world = World()
    world.register(0)
    world.pass_time(TIMEOUT_S - TICK_S, beating=(0,))
    world.register(1)
    world.pass_time(TIMEOUT_S - TICK_S, beating=(0,))
    assert world.rules.jobs["job"].tasks[1].state == server_rules.SUSPECT


def test_verdicts_payloads_and_jobs_do_not_pile_up(world, monkeypatch):
    monkeypatch.setattr(memory, "KEPT_VERDICTS", 50)
    monkeypatch.setattr(memory, "KEPT_PAYLOAD_BYTES", 10_000)
    for step in range(1000):
        for task in range(3):
            world.arrive(task, name=f"step {step}", payload=b"x" * 1000)
    job, kept = world.rules.jobs["job"], world.rules._barriers
    assert len(job.latest) == len(job.latest_of_name) == len(kept) == 50
    assert sum(len(payload) for barrier in kept.values() for payload in barrier.payloads.values()) <= 10_000
    for step in range(1000):
        world.arrive(0, position=f"step {step}", ok=False)
    assert len(job.missed) == len(kept) == 50
    assert (len(job.latest), len(job.latest_of_name)) == (1, 1)
    assert max(len(task.calls) for task in job.tasks.values()) == KEPT_CALLS
    assert not job.open
    for task in range(3):
        world.leave(task)
    world.now += server_rules.KEPT_VERDICTS_S + 1
    world.tick()
    assert not world.rules.jobs
    assert not world.rules._barriers
    assert world.rules.memory.nbytes == 0


def test_open_barriers_are_limited(world):
    world.rules = Rules(TIMEOUT_S, 0xC0, Quotas(barriers=10))
    world.register(0, 1, 2)
    for number in range(10):
        world.arrive(0, name=str(number))
    with pytest.raises(
        server_rules.LimitError, match="owner 'job' has 10 open barriers, wants 1 more, and its quota is 10"
    ):
        world.arrive(0, name="one more")


def test_process_that_goes_on_in_a_higher_attempt_is_told_no_verdict_of_the_old_one(world):
    """It left, and joined the attempt that others had begun; it counts its calls anew."""
    assert [world.arrive(task, call=1).is_passed for task in range(3)] == [False, False, True]
    world.register(1, attempt=1, incarnation=51)
    world.register(0, 2, attempt=1)
    assert world.rules.jobs["job"].tasks[0].attempt == 1
    barrier = world.arrive(0, call=1)
    assert barrier.is_open
    world.arrive(1, call=1, incarnation=51)
    assert world.arrive(2, call=1) is barrier
    assert barrier.is_passed


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


def test_a_refusal_changes_nothing_but_is_an_effect(world):
    rules, effects = apply(world.rules, Heartbeat(world.who(1, incarnation=99)), world.now)
    assert rules is world.rules
    assert isinstance(effects.refusal, errors.FencedError)
    assert (effects.barrier, effects.decided, effects.log) == (None, [], [])


def test_who_beats_but_does_nothing_is_shown_as_stuck(world):
    world.beat(2, phase="restore/read", step=12, done=41, total=100)
    barrier = world.arrive(0, participants=(0, 2))
    world.now += 310
    world.beat(2, phase="restore/read", step=12, done=41, total=100)
    seen = "client 2 (job/2); last seen in phase 'restore/read' step 12, 41%"
    assert world.rules.waiting_for(barrier, world.now) == f"{seen}, unchanged for 310 s"
    world.beat(2, phase="restore/read", step=12, done=42, total=100)
    assert world.rules.waiting_for(barrier, world.now) == seen.replace("41", "42")


def test_cancel_is_for_participants_of_open_barriers(world):
    barrier = world.arrive(0, participants=(0, 1))
    with pytest.raises(errors.BarrierConflictError, match="client 2 is no participant"):
        world.happen(Cancel(world.who(2), barrier.barrier_id, "wanted to"))
    world.happen(Cancel(world.who(1), barrier.barrier_id, "wanted to"))
    assert barrier.failure.message == "barrier 'b': client 1 (job/1) wanted to"
    with pytest.raises(errors.BarrierConflictError, match="too late"):
        world.happen(Cancel(world.who(1), barrier.barrier_id, "wanted to"))


def test_memory_does_not_grow_over_ten_thousand_barrier_names(world, monkeypatch):
    monkeypatch.setattr(memory, "KEPT_VERDICTS", 100)

    def use_names(numbers):
        for number in numbers:
            for task in range(3):
                world.arrive(task, name=f"step {number:05}")

    use_names(range(200))
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        use_names(range(200, 10_200))
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 200_000, "bytes; 100 verdicts that were allocated before are replaced by traced ones"
    assert len(world.rules._barriers) == 100
