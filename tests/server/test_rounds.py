"""Which round a call joins, and for whom an operation's rounds wait: the rules of barriers in the coordinator."""

import itertools

import pytest
from dtckpt_server import memory
from dtckpt_server.events import Cancel, Heartbeat, Register, TaskReport

from dtckpt import errors
from dtckpt.coordination import barrier_rules

from .test_rules import TICK_S, TIMEOUT_S, World

GRACE_S = barrier_rules.grace_s(TIMEOUT_S)
OLD_S = 2 * GRACE_S
ELSEWHERE = "barrier 'save/written': client 1 (job/1) is not in this operation any more"


class Clients(World):
    """Rules and tasks that do what they are told."""

    def begin(self, *tasks, name="save/begin", **options):
        """Let tasks arrive at an operation's first round; return it, and the number of each task's call."""
        calls = {task: next(self.calls) for task in tasks}
        for task, call in calls.items():
            barrier = self.arrive(task, name, call, operation="", **options)
        return barrier, calls

    def tell(self, task, operation="", num_ended=0):
        """Let a heartbeat say where a task is."""
        return self.happen(Heartbeat(self.who(task), report=TaskReport(operation, num_ended)))


@pytest.fixture
def world():
    world = Clients()
    world.register(0, 1, 2)
    return world


@pytest.fixture
def pair():
    world = Clients(2)
    world.register(0, 1)
    return world


def time_out(world, *tasks, **options):
    """Let a round time out in which these tasks were."""
    for task in tasks:
        failed = world.arrive(task, timeout_s=TICK_S, **options)
    world.pass_time(TICK_S)
    assert failed.failure.missing
    return failed


def cancel(world, *tasks, **options):
    """Let the first of these tasks cancel a round in which they were."""
    for task in tasks:
        failed = world.arrive(task, **options)
    world.happen(Cancel(world.who(tasks[0]), failed.barrier_id, "was interrupted"))
    return failed


def vote_no(world, *tasks, **options):
    """Let a round fail in which these tasks were by the vote of the last."""
    for task in tasks:
        failed = world.arrive(task, ok=task != tasks[-1], **options)
    return failed


def lose(world, *tasks, **options):
    """Let a round fail in which these tasks were, as the others fell silent; they are back then."""
    for task in tasks:
        failed = world.arrive(task, **options)
    world.pass_time(TIMEOUT_S + TICK_S, beating=tasks)
    world.beat(*range(world.num_clients))
    return failed


# --- late or new ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fail", [time_out, cancel, vote_no, lose])
@pytest.mark.parametrize("age_s", [0.0, 1000.0])
def test_late_arrival_whose_position_is_certain_is_told_at_once(world, fail, age_s):
    failed = fail(world, 0, 1, position="step 7")
    world.pass_time(age_s, beating=(0, 1, 2))
    assert world.arrive(2, position="step 7", is_certain=True) is failed


@pytest.mark.parametrize("fail", [cancel, vote_no, lose])
@pytest.mark.parametrize("position", ["#7", ""])
@pytest.mark.parametrize("age_s", [0.0, 1000.0])
def test_late_arrival_at_a_round_that_did_not_time_out_is_told_at_once(world, fail, position, age_s):
    """It had no time to come to that one, or was lost."""
    failed = fail(world, 0, 1, position=position)
    world.pass_time(age_s, beating=(0, 1, 2))
    assert world.arrive(2, position=position) is failed


@pytest.mark.parametrize("position", ["#7", ""])
@pytest.mark.parametrize("cut_off", [{}, {"was_cut_off": True}, {"is_again": True}])
def test_late_arrival_that_was_waited_for_may_be_a_new_one(world, position, cut_off):
    """However young the failure is, and also if the client was cut off."""
    failed = time_out(world, 0, 1, position=position)
    late = world.arrive(2, position=position, **cut_off)
    assert late.is_open
    assert late.missed is failed


def test_late_arrival_alone_is_told_after_the_grace(world):
    time_out(world, 0, 1, position="#7")
    world.pass_time(OLD_S, beating=(0, 1, 2))
    late = world.arrive(2, position="#7")
    world.now += GRACE_S * 0.9
    world.tick()
    assert late.is_open
    world.now += GRACE_S * 0.2
    world.tick()
    assert late.failure.code == "BarrierTimeoutError"
    assert late.failure.message == (
        f"barrier 'b': the others had given up {OLD_S:.1f} s before this client came; that round failed: "
        "barrier 'b' timed out after 0.5 s: 2/3 arrived, missing client 2 (job/2)"
    )
    assert late.failure.missing == (2,)


def test_late_arrivals_that_only_meet_each_other_are_told_after_the_grace(world):
    time_out(world, 0, position="#7")
    late = [world.arrive(task, position="#7") for task in (1, 2)]
    assert late[0] is late[1]
    world.pass_time(GRACE_S, beating=(0, 1, 2))
    assert late[0].failure.code == "BarrierTimeoutError"


def test_nobody_is_late_for_a_round_that_told_of_an_earlier_one(world):
    """Clients of the earlier round come for the next round, and meet the client that was told."""
    time_out(world, 0, 2, position="#7")
    told = world.arrive(1, position="#7")
    world.pass_time(GRACE_S, beating=(0, 1, 2))
    assert not told.is_open
    new = world.arrive(0, position="#7")
    for task in (1, 2):
        assert world.arrive(task, position="#7") is new
    assert new.is_passed


def test_whoever_missed_both_rounds_is_late_for_the_one_that_told(world):
    time_out(world, 0, position="#7")
    told = world.arrive(1, position="#7")
    world.pass_time(GRACE_S, beating=(0, 1, 2))
    assert not told.is_open
    assert world.arrive(2, position="#7", is_certain=True) is told


@pytest.mark.parametrize("position", ["#7", "#8"])
def test_late_arrival_that_others_join_takes_part(world, position):
    """Those who were in the failed round come for the next one."""
    time_out(world, 0, 1, position="#7")
    world.pass_time(OLD_S, beating=(0, 1, 2))
    late = world.arrive(2, position="#7")
    world.arrive(0, position=position)
    world.pass_time(2 * GRACE_S, beating=(0, 1, 2))
    assert late.is_open
    assert world.arrive(1, position=position) is late
    assert late.is_passed


def test_arrival_with_another_position_is_not_late(world):
    cancel(world, 0, 1, position="step 7")
    new = world.arrive(2, position="step 8", is_certain=True)
    world.pass_time(2 * GRACE_S, beating=(0, 1, 2))
    assert new.is_open


def test_late_arrival_is_told_of_each_round_that_it_missed(world):
    failed = [time_out(world, 0, 1, position=f"step {step}") for step in range(3)]
    for step in range(3):
        assert world.arrive(2, position=f"step {step}", is_certain=True) is failed[step]
    waiting = world.arrive(0, position="step 3", is_certain=True)
    world.arrive(1, position="step 3", is_certain=True)
    assert world.arrive(2, position="step 3", is_certain=True) is waiting
    assert waiting.is_passed


def test_late_arrival_is_told_once(world):
    """Its next call with the same position is a new one: it is known not to be late."""
    failed = cancel(world, 0, 1)
    assert world.arrive(2) is failed
    assert world.arrive(2).is_open


def test_verdict_of_a_passed_round_is_for_its_calls_only(pair):
    passed = [pair.arrive(task, position="step 7", is_certain=True) for task in range(2)]
    again = pair.arrive(0, position="step 7", is_certain=True)
    assert passed[0].is_passed
    assert (again.is_open, again.generation) == (True, 1)


def test_client_that_comes_anew_fails_the_round_of_its_earlier_call(pair):
    """Its earlier call may still be waiting in another thread; nothing passes by one client's two calls."""
    earlier = pair.arrive(0)
    later = pair.arrive(0)
    assert earlier.failure.code == "BarrierCancelledError"
    assert earlier.failure.message == (
        "barrier 'b': client 0 (job/0) has given up waiting: it was cut off, interrupted, or its own time was over"
    )
    assert later.is_open
    assert pair.arrive(1) is earlier, "it is late for the round that failed without it"
    assert pair.arrive(1) is later
    assert later.is_passed


def test_call_that_was_overtaken_disturbs_nobody(pair):
    """The network may deliver it when its client has long come anew."""
    later = pair.arrive(0, call=8)
    with pytest.raises(errors.BarrierConflictError, match="has given up waiting"):
        pair.arrive(0, call=7)
    assert pair.arrive(1) is later
    assert later.is_passed
    with pytest.raises(errors.BarrierConflictError, match="has given up waiting"):
        pair.arrive(0, call=7)


def test_calls_of_another_life_overtake_nobody(pair):
    for task in range(2):
        pair.arrive(task, call=100)
    pair.leave(1)
    pair.register(1, incarnation=77)
    waiting = pair.arrive(1, call=1, incarnation=77)
    assert pair.arrive(0, call=101) is waiting
    assert waiting.is_passed


@pytest.mark.parametrize("operation", ["", "old-1"])
def test_call_that_has_ended_does_not_arrive(pair, operation):
    """Else an operation would begin, or go on, with a client that is not there."""
    pair.tell(0, "", 7)
    with pytest.raises(errors.BarrierConflictError, match="has given up waiting"):
        pair.arrive(0, call=7, operation=operation)
    assert pair.arrive(0, call=8, operation="").is_open


def test_rounds_of_different_participants_are_numbered_apart(world):
    for _ in range(2):
        for task in (0, 1):
            pair = world.arrive(task, participants=(0, 1))
    assert (pair.is_passed, pair.generation) == (True, 1)
    assert world.arrive(2).generation == 0


# --- operations -------------------------------------------------------------------------------------------------------


def test_first_round_of_an_operation_is_its_identity(world):
    begun, _ = world.begin(0, 1, 2)
    rounds = [world.arrive(task, "save/written", operation=begun.barrier_id) for task in range(3)]
    assert rounds[0].is_passed
    again, _ = world.begin(0, 1, 2)
    assert again.barrier_id != begun.barrier_id
    other = world.arrive(0, "save/written", operation=again.barrier_id)
    assert other.is_open
    assert other is not rounds[0]


@pytest.mark.parametrize("age_s", [0.0, 1000.0])
def test_round_of_an_operation_takes_place_once(world, age_s):
    """Also a new call gets its verdict, whenever it comes."""
    begun, _ = world.begin(0, 1, 2)
    failed = world.arrive(0, "save/written", operation=begun.barrier_id, ok=False, reason="full")
    world.pass_time(age_s, beating=(0, 1, 2))
    for task in (1, 2, 0, 0):
        assert world.arrive(task, "save/written", operation=begun.barrier_id) is failed


@pytest.mark.parametrize("is_told_first", [True, False])
def test_round_fails_at_once_when_a_participant_has_left_the_operation(world, is_told_first):
    begun, calls = world.begin(0, 1, 2)
    world.tell(1, begun.barrier_id, calls[1])
    if is_told_first:
        world.tell(1, "", calls[1])
    waiting = world.arrive(0, "save/written", operation=begun.barrier_id)
    if not is_told_first:
        assert waiting.is_open
        world.tell(1, "", calls[1])
    assert waiting.failure.code == "BarrierConflictError"
    assert waiting.failure.message.startswith(ELSEWHERE)


def test_round_fails_at_once_when_a_participant_has_begun_another_operation(pair):
    begun, calls = pair.begin(0, 1)
    waiting = pair.arrive(0, "save/written", operation=begun.barrier_id)
    pair.begin(1, name="restore/begin", report=TaskReport("", calls[1]))
    assert waiting.failure.message.startswith(ELSEWHERE)


def test_round_fails_at_once_when_a_participant_never_heard_that_the_operation_began(pair):
    """Its call has ended without the verdict that it had."""
    begun, calls = pair.begin(0, 1)
    waiting = pair.arrive(0, "save/written", operation=begun.barrier_id)
    pair.tell(1, "", calls[1] - 1)
    assert waiting.is_open
    pair.tell(1, "", calls[1])
    assert waiting.failure.message.startswith(ELSEWHERE)


def test_round_waits_for_a_participant_that_is_on_its_way(world):
    begun, calls = world.begin(0, 1, 2)
    waiting = world.arrive(0, "save/written", operation=begun.barrier_id)
    world.tell(1, "", 0)  # sent before it heard that the operation had begun
    world.tell(1, begun.barrier_id, calls[1])
    world.tell(1, "", 0)  # was overtaken
    assert waiting.is_open
    assert world.rules.jobs["job"].tasks[1].report == TaskReport(begun.barrier_id, calls[1])


@pytest.mark.parametrize("is_first", [True, False])
def test_round_of_an_operation_fails_at_once_when_a_call_in_it_has_ended(world, is_first):
    begun, _ = world.begin(0, 1, 2)
    call, name = next(world.calls), "restore/begin" if is_first else "save/written"
    waiting = world.arrive(1, name, call, operation="" if is_first else begun.barrier_id)
    world.tell(1, "", call - 1)
    assert waiting.is_open
    world.tell(1, "", call)
    assert waiting.failure.code == "BarrierCancelledError"
    assert waiting.failure.message.startswith(f"barrier {name!r}: client 1 (job/1) has given up waiting")


def test_barriers_that_stand_alone_are_not_judged_by_reports(pair):
    alone = pair.arrive(0, call=5)
    pair.tell(0, "", 5)
    pair.tell(1, "", 50)
    assert alone.is_open


def test_operations_that_wait_for_each_other_fail_at_once(world):
    save, _ = world.begin(0, 2)
    assert save.is_open
    restore, _ = world.begin(1, name="restore/begin")
    assert save.failure == restore.failure
    assert save.failure.code == "BarrierConflictError"
    assert save.failure.message == (
        "client 1 (job/1) waits at 'restore/begin', client 0 (job/0) at 'save/begin', each for the other; all clients "
        "must call the same operations in the same order"
    )


def test_operations_that_waited_for_each_other_are_told_once(pair):
    """Each task knows how both rounds failed, so its next call is a new one, wherever that is."""
    pair.begin(0)
    assert not pair.begin(1, name="restore/begin")[0].is_open
    for name in ("save/begin", "restore/begin"):
        assert pair.begin(1, name=name)[0].is_open
        assert pair.begin(0, name=name)[0].is_passed


def test_clients_of_one_operation_that_are_in_different_rounds_of_it_fail_at_once(pair):
    """One of them went on without a round that the other still waits in, as when it failed before it got there."""
    begun, calls = pair.begin(0, 1, name="manager/chosen")
    operation = begun.barrier_id
    early, late = (
        pair.arrive(task, name, operation=operation, report=TaskReport(operation, calls[task]))
        for task, name in enumerate(["restore/planned", "manager/restored"])
    )
    assert early.failure == late.failure
    assert "each for the other" in early.failure.message


def test_round_that_failed_at_a_position_that_nobody_knows_is_told_to_all(pair):
    """As where the step of one client is none."""
    failed = pair.arrive(0, position=barrier_rules.UNKNOWN_POSITION, ok=False, code="ConfigError", reason="no step")
    assert pair.arrive(1, position="step 5", is_certain=True) is failed
    assert pair.arrive(1, position="step 5", is_certain=True).is_open, "it is told once"


def test_client_that_left_is_not_told_of_the_round_that_its_going_failed(pair):
    failed, _ = pair.begin(0, position="#3")
    pair.leave(1)
    assert failed.failure.clients == (1,)
    pair.register(1)
    again, _ = pair.begin(1, position="#3")
    assert again.is_open
    assert pair.begin(0, position="#4")[0] is again


def test_operations_of_clients_that_do_not_wait_for_each_other_go_on(world):
    save, _ = world.begin(0, participants=(0, 2))
    restore, _ = world.begin(1, name="restore/begin", participants=(1, 2))
    assert save.is_open
    assert restore.is_open


def test_operation_that_waits_for_a_client_in_another_ones_later_round_fails_at_once(pair):
    """Client 1 has given the operation up, in which client 0 waits for it, and begins another."""
    begun, calls = pair.begin(0, 1)
    waiting = pair.arrive(0, "save/written", operation=begun.barrier_id)
    next_save, _ = pair.begin(1, report=TaskReport("", calls[1]))
    assert waiting.failure.message.startswith(ELSEWHERE)
    assert next_save.is_open


# --- a coordinator that was restarted ---------------------------------------------------------------------------------


def restarted(*reports):
    """Return the rules of a new life of the coordinator, to which tasks say where they are."""
    world = Clients(len(reports))
    world.calls = itertools.count(100)
    for task, report in enumerate(reports):
        if report is not None:
            world.happen(Register(world.who(task), world.num_clients, 0, "host", report=report))
    return world


def test_operation_goes_on_although_the_coordinator_was_restarted():
    world = restarted(TaskReport("old-1", 7), TaskReport("old-1", 8))
    for task in range(2):
        barrier = world.arrive(task, "save/written", operation="old-1")
    assert barrier.is_passed


def test_operation_waits_for_a_client_that_has_not_registered_again():
    world = restarted(TaskReport("old-1", 7), None)
    assert world.arrive(0, "save/written", operation="old-1").is_open


def test_call_that_had_arrived_before_the_restart_meets_the_others():
    """They have not been told the verdict either; all clients are told which client was cut off."""
    world = restarted(TaskReport("", 7), TaskReport("", 8))
    for task, is_again in enumerate((True, False)):
        barrier = world.arrive(task, "save/begin", operation="", is_again=is_again)
    assert barrier.is_passed
    assert barrier.cut_off == {0}


@pytest.mark.parametrize("first", ["begin", "later round", "registration"])
def test_call_that_never_heard_that_its_operation_began_fails_with_it(first):
    """Client 0 was told by the earlier life of the coordinator that the save had begun, client 1 was not."""
    world = restarted(TaskReport("old-1", 7), None if first == "registration" else TaskReport("", 0))

    def go_on():
        return world.arrive(0, "save/written", operation="old-1")

    def begin_again():
        return world.arrive(1, "save/begin", operation="", is_again=True, **at_step)

    at_step = {"position": "step 7", "is_certain": True}
    if first == "begin":
        begin, later = begin_again(), go_on()
    else:
        later = go_on()
        if first == "registration":
            world.happen(Register(world.who(1), 2, 0, "host"))
        begin = begin_again()
    assert later.failure.message.startswith(ELSEWHERE)
    assert begin.failure == later.failure
    again = [world.arrive(task, "save/begin", operation="", **at_step) for task in range(2)]
    assert again[0] is again[1], "both know, and may try the step again"
    assert again[0].is_passed


def test_operations_of_other_participants_are_not_broken_with_it():
    world = restarted(TaskReport("old-1", 7), TaskReport("", 0), TaskReport("", 0))
    mine = world.arrive(2, "save/begin", operation="", is_again=True, participants=(1, 2))
    assert not world.arrive(0, "save/written", operation="old-1", participants=(0, 1)).is_open
    assert mine.is_open


def test_broken_operations_are_forgotten(monkeypatch):
    monkeypatch.setattr(memory, "KEPT_VERDICTS", 1)
    world = restarted(TaskReport("old-1", 7), TaskReport("", 0))
    assert not world.arrive(0, "save/written", operation="old-1").is_open
    job = world.rules.jobs["job"]
    assert len(job.broken_operations) == 1
    world.arrive(0, ok=False)
    assert not job.broken_operations
