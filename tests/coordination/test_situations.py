"""What happens when ...: each awkward situation once, at a real server with real clients.

Those who misbehave are `Raw` clients, which do what they are told and nothing by themselves.
"""

import itertools
import secrets
import threading

import grpc
import pytest
from dtckpt_server import memory
from support.client_calls import (
    AT_ONCE_S,
    FIRST,
    HEARTBEAT_S,
    SECOND,
    Running,
    at,
    begin,
    inside,
    leave_all,
    same_error,
    together,
    wait_until,
)
from support.coordinators import server_in_thread

from dtckpt import errors
from dtckpt._proto import coordinator_pb2 as pb
from dtckpt._proto import coordinator_pb2_grpc as pb_grpc
from dtckpt.coordination import grpc_client
from dtckpt.coordination.api import BEGIN, Member, Progress, Vote
from dtckpt.coordination.grpc_calls import UnknownError
from dtckpt.coordination.grpc_client import GrpcCoordination

NUM_CLIENTS = 3
CODES = grpc.StatusCode


@pytest.fixture(scope="module")
def port():
    with server_in_thread() as port:
        yield port


@pytest.fixture
def job(request):
    return request.node.name


@pytest.fixture
def clients(port, job):
    made = [client_at(port, job, client) for client in range(NUM_CLIENTS)]
    yield made
    leave_all(made)


@pytest.fixture
def raw(port, job):
    with grpc.insecure_channel(f"127.0.0.1:{port}", options=(("grpc.use_local_subchannel_pool", 1),)) as channel:
        yield Raw(channel, job)


def client_at(port, job, client, attempt=0, num_clients=NUM_CLIENTS):
    member = Member(job, client, num_clients, secrets.randbits(60), attempt)
    return GrpcCoordination(f"127.0.0.1:{port}", member, heartbeat_timeout_s=HEARTBEAT_S)


class Raw:
    """Calls as they go over the wire, for any task of one job."""

    def __init__(self, channel, job):
        self.stub = pb_grpc.CoordinatorStub(channel)
        self.job = job
        self.calls = itertools.count(1)

    def who(self, task, incarnation=None):
        return pb.TaskIdentity(job=self.job, task=task, incarnation=incarnation or task + 1)

    def register(self, task, incarnation=None, attempt=0, num_clients=NUM_CLIENTS):
        who = self.who(task, incarnation)
        return self.stub.Register(pb.RegisterRequest(task=who, num_clients=num_clients, attempt=attempt), timeout=5)

    def beat(self, task, incarnation=None, **progress):
        request = pb.HeartbeatRequest(task=self.who(task, incarnation), progress=pb.Progress(**progress))
        return self.stub.Heartbeat(request, timeout=5)

    def arrive(self, task, name="b", call=0, participants=(), timeout_s=20.0, incarnation=None, vote=None, **options):
        """Arrive by a new call, unless the number of one is given."""
        request = pb.ArriveRequest(
            task=self.who(task, incarnation),
            name=name,
            call=call or next(self.calls),
            participants=participants,
            timeout_s=timeout_s,
            vote=vote or pb.Vote(ok=True),
            **options,
        )
        return self.stub.Arrive(request, timeout=5)

    def wait(self, task, barrier_id, max_wait_s=20.0):
        request = pb.AwaitRequest(task=self.who(task), barrier_id=barrier_id, max_wait_s=max_wait_s)
        return self.stub.Await.future(request, timeout=30)

    def tasks(self):
        return self.stub.GetJob(pb.GetJobRequest(job=self.job), timeout=5).tasks

    def refusal(self, call, /, *args, **kwargs):
        """Return the status with which a call is refused."""
        with pytest.raises(grpc.RpcError) as refused:
            call(*args, **kwargs)
        return refused.value.code(), refused.value.details()


def test_heartbeat_missing(job):
    """Suspect at half of the timeout, lost at all of it; then every barrier that needs the client fails, naming it."""
    timeout_s, states = 2 * HEARTBEAT_S, []  # a second to see the middle state in

    def is_lost():
        states.append(raw.tasks()[2].state)
        return states[-1] == pb.TASK_STATE_LOST

    with server_in_thread(timeout_s) as port, grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        raw, clients = Raw(channel, job), [client_at(port, job, client) for client in range(2)]
        raw.register(2)
        waiting = Running(clients, at("b"))
        wait_until(is_lost)
        assert list(dict.fromkeys(states)) == [pb.TASK_STATE_REGISTERED, pb.TASK_STATE_SUSPECT, pb.TASK_STATE_LOST]
        error = same_error(waiting.results(), errors.ClientLostError, r"client 2 .* sent no heartbeat for 2\.\d s")
        assert error.clients == (2,)
        leave_all(clients)


def test_heartbeats_but_no_progress(raw, clients):
    """A client that sends heartbeats and does nothing is not lost; the page shows its operation, and since when."""
    raw.register(2)
    done = {"phase": "restore/read", "step": 12, "bytes_done": 41, "bytes_total": 100}
    raw.beat(2, **done)
    waiting = Running(clients[:2], at("b", timeout_s=2.5 * HEARTBEAT_S))

    def is_stuck():
        raw.beat(2, **done)
        return raw.tasks()[2].progress_age_s > 1.2 * HEARTBEAT_S

    wait_until(is_stuck)
    assert raw.tasks()[2].state == pb.TASK_STATE_REGISTERED
    assert raw.tasks()[2].heartbeat_age_s < HEARTBEAT_S / 2

    def is_over():
        raw.beat(2, **done)
        return not clients[0].status().barriers

    wait_until(is_over)
    text = r"2/3 arrived, missing client 2 .*; last seen in phase 'restore/read' step 12, 41%$"
    same_error(waiting.results(), errors.BarrierTimeoutError, text)


def test_client_restarts_while_the_old_one_is_connected(port, job, raw, clients):
    """Its place goes to a higher attempt only, which fences the old one: its barriers fail, its calls are refused."""
    waiting = Running(clients[:2], at("b"))
    wait_until(lambda: clients[0].status().barriers)
    with pytest.raises(errors.FencedError, match="is another live process"):
        client_at(port, job, 0).register()
    assert clients[0].status().barriers, "the refused call disturbs no client"
    reborn = client_at(port, job, 0, attempt=1)
    reborn.register()
    same_error(waiting.results(), errors.FencedError, f"barrier 'b': attempt 1 of job '{job}' has begun")
    old = clients[0].member.incarnation
    assert raw.refusal(raw.beat, 0, old)[0] == CODES.FAILED_PRECONDITION
    assert raw.refusal(raw.arrive, 0, incarnation=old)[0] == CODES.FAILED_PRECONDITION
    with pytest.raises(errors.FencedError):
        clients[0].barrier("b", timeout_s=5)
    reborn.leave()


def test_same_client_registers_again(raw):
    """The lease is renewed, whatever it does otherwise goes on."""
    raw.register(0)
    arrived = raw.arrive(0, call=7)
    raw.register(0)
    assert raw.arrive(0, call=7) == arrived
    assert raw.tasks()[0].incarnation == 1


def test_same_call_arrives_twice(raw, clients):
    """It counts once, however often it arrives and waits, and every time it gets the verdict."""
    raw.register(2)
    ids = {raw.arrive(2, call=7).barrier_id for _ in range(5)}
    assert len(ids) == 1
    calls = [raw.wait(2, *ids) for _ in range(3)]
    assert not any(result.error for result in together(clients[:2], at("b")).values())
    assert {call.result().verdict.state for call in calls} == {pb.BARRIER_STATE_PASSED}


def test_two_calls_of_one_task_arrive(raw, clients):
    """The earlier one is given up, and told so; the later one counts."""
    raw.register(2)
    earlier, later = raw.arrive(2), raw.arrive(2)
    given_up = raw.wait(2, earlier.barrier_id).result().verdict.failure
    assert given_up.cause == pb.Failure.CAUSE_CANCELLED
    assert given_up.message.startswith(f"barrier 'b': client 2 ({raw.job}/2) has given up waiting")
    waiting = raw.wait(2, later.barrier_id)
    # At another position the others are not late for the round that failed without them.
    assert not any(result.error for result in together(clients[:2], at("b", position=SECOND)).values())
    assert waiting.result().verdict.state == pb.BARRIER_STATE_PASSED


@pytest.mark.parametrize("max_wait_s", [0.0, -1.0, float("nan"), 0.1])
def test_wait_without_a_verdict(raw, max_wait_s):
    """It ends when it was asked to, at once if that makes no sense."""
    raw.register(0)
    waited = raw.wait(0, raw.arrive(0).barrier_id, max_wait_s).result(timeout=5)
    assert waited.verdict.state == pb.BARRIER_STATE_OPEN
    assert waited.waiting_for == ", ".join(f"client {n} ({raw.job}/{n}), which never registered" for n in (1, 2))


def test_client_dies_inside_a_barrier(raw, clients):
    """Its arrival does not count any more once it is lost."""
    raw.register(2)
    raw.arrive(2)
    same_error(together(clients[:1], at("b")), errors.ClientLostError, "client 2 .* sent no heartbeat")


def test_connection_breaks_inside_a_barrier(port, job, raw, clients):
    """The arrival stays; a client that comes back in time waits on."""
    with grpc.insecure_channel(f"127.0.0.1:{port}", options=(("grpc.use_local_subchannel_pool", 1),)) as channel:
        first = Raw(channel, job)
        first.register(2)
        barrier_id = first.arrive(2).barrier_id
        broken = first.wait(2, barrier_id)
    with pytest.raises((grpc.RpcError, grpc.FutureCancelledError)):
        broken.result()
    again = raw.wait(2, barrier_id)
    assert not any(result.error for result in together(clients[:2], at("b")).values())
    assert again.result().verdict.state == pb.BARRIER_STATE_PASSED


def test_barrier_times_out(clients):
    """All clients get the same verdict: clients that arrived, clients that are missing, and their last operations."""
    clients[2].register()
    clients[2].heartbeat(Progress("train", 7))
    wait_until(lambda: clients[0].status().tasks[2].progress.step == 7)
    results = together(clients[:2], at("b", timeout_s=0.5))
    text = r"^barrier 'b' timed out after 0.5 s: 2/3 arrived, missing client 2 .*; last seen in phase 'train' step 7$"
    assert same_error(results, errors.BarrierTimeoutError, text).missing == (2,)


def test_participants_conflict(clients):
    """All waiting clients get the difference, at once."""
    one = Running(clients[:1], at("b", participants=[0, 1]))
    wait_until(lambda: clients[0].status().barriers)
    other = together(clients[2:], at("b", participants=[1, 2]))
    text = "participants differ: client 0 also expects 0, client 2 also expects 2"
    same_error({**one.results(), **other}, errors.BarrierConflictError, text)


def test_caller_is_no_participant(raw, clients):
    """The stranger is refused; the others do not notice."""
    waiting = Running(clients[:1], at("b", participants=[0, 1]))
    wait_until(lambda: clients[0].status().barriers)
    raw.register(2)
    code, text = raw.refusal(raw.arrive, 2, participants=[0, 1])
    assert code == CODES.FAILED_PRECONDITION
    assert text == "barrier 'b': client 2 is not a participant; participants are 0, 1"
    (barrier,) = clients[0].status().barriers
    assert barrier.missing == (1,)
    together(clients[1:2], at("b", participants=[0, 1]))
    assert waiting.results()[0].error is None


@pytest.mark.parametrize("ok", [True, False], ids=["passed", "failed"])
def test_late_arrival(raw, ok):
    """It gets the stored verdict; the same call gets it again and again."""
    for task in range(NUM_CLIENTS):
        raw.register(task)
        raw.beat(task)
    where = {"position": "step 7", "is_certain": True}
    if not ok:
        raw.arrive(0, call=100, vote=pb.Vote(code="StorageFullError", reason="full"), **where)
    for task in range(NUM_CLIENTS):
        raw.arrive(task, call=100 + task, **where)
    verdicts = [raw.arrive(task, call=100 + task, **where).verdict for task in (2, 1, 0, 2)]
    assert all(verdict == verdicts[0] for verdict in verdicts)
    assert verdicts[0].state == (pb.BARRIER_STATE_PASSED if ok else pb.BARRIER_STATE_FAILED)
    assert verdicts[0].failure.message == ("" if ok else "client 0: full")


def test_late_arrival_when_the_verdict_is_forgotten(raw, monkeypatch):
    """A call that its client has left behind is refused; another one meets the others in their next round."""
    monkeypatch.setattr(memory, "KEPT_VERDICTS", 1)
    for task in range(NUM_CLIENTS):
        raw.register(task)
    for call in (10, 20, 30):
        for task in range(NUM_CLIENTS):
            raw.arrive(task, call=call)
    code, text = raw.refusal(raw.arrive, 1, call=10)
    assert code == CODES.FAILED_PRECONDITION
    assert "client 1" in text
    assert "has given up waiting" in text
    raw.arrive(0, "other", call=31, vote=pb.Vote())
    late = [raw.arrive(1, call=30) for _ in range(2)]
    assert late[0] == late[1]
    assert late[0].verdict.state == pb.BARRIER_STATE_OPEN
    for task in (0, 2):
        raw.arrive(task, call=32)
    assert raw.arrive(1, call=30).verdict.state == pb.BARRIER_STATE_PASSED


def test_job_runs_again(port, job, clients):
    """When all have left, the next run of a job begins anew, with another number of clients and the same attempt."""
    assert not any(result.error for result in together(clients, at("b")).values())
    leave_all(clients)
    again = [client_at(port, job, client, num_clients=2) for client in range(2)]
    results = together(again, at("b"))
    assert [result.value.generation for result in results.values()] == [0, 0]
    leave_all(again)


def test_operations_wait_for_each_other(raw):
    """Both sides learn who waits where; the answer is a verdict, not an error of the server."""
    raw.register(0)
    raw.register(1)
    waiting = raw.wait(0, raw.arrive(0, "save/begin", operation="").barrier_id)
    second = raw.arrive(1, "restore/begin", operation="").verdict
    assert waiting.result().verdict.failure == second.failure
    assert second.failure.cause == pb.Failure.CAUSE_CONFLICT
    assert second.failure.message.startswith(
        f"client 1 ({raw.job}/1) waits at 'restore/begin', client 0 ({raw.job}/0) at 'save/begin', each for the other"
    )


def test_coordinator_restarts(job):
    """A client inside a barrier registers and arrives again by itself; no client is lost by the restart."""
    with server_in_thread() as port:
        clients = [client_at(port, job, client) for client in range(NUM_CLIENTS)]
        waiting = Running(clients[:2], at("b"))
        wait_until(lambda: [barrier.missing for barrier in clients[0].status().barriers] == [(2,)])
    with server_in_thread(port=port):
        wait_until(lambda: [barrier.missing for barrier in clients[0].status().barriers] == [(2,)])
        states = {task.state for task in clients[0].status().tasks[:2]}
        assert states == {"registered"}
        last = together(clients[2:], at("b"))
        assert not any(result.error for result in {**waiting.results(), **last}.values())
        leave_all(clients)


def test_coordinator_restarts_outside_of_barriers(job):
    """What became of a client that was forgotten is forgotten, too: its next round says that it was cut off."""
    with server_in_thread() as port:
        clients = [client_at(port, job, client) for client in range(NUM_CLIENTS)]
        together(clients, at("b"))
    with server_in_thread(port=port):
        wait_until(lambda: {task.state for task in clients[0].status().tasks} == {"registered"})
        for cut_off in ((0, 1, 2), ()):
            results = together(clients, at("b"))
            assert [result.value.cut_off for result in results.values()] == [cut_off] * NUM_CLIENTS, results
        leave_all(clients)


def test_coordinator_restarts_when_one_client_knows_that_an_operation_has_begun(job, monkeypatch):
    """The other one never will: both fail at once with the same error, and the next operation begins."""
    monkeypatch.setattr(grpc_client, "FIRST_WAIT_S", 0.0)
    is_restarted = threading.Event()

    def wait_in_vain(*_):
        assert is_restarted.wait(20)
        raise UnknownError("who?")

    with server_in_thread(60.0) as port:
        clients = [client_at(port, job, client, num_clients=2) for client in range(2)]
        with monkeypatch.context() as patch:
            patch.setattr(clients[1], "_await", wait_in_vain)
            untold = Running(clients[1:], at("save/begin", operation=BEGIN, position=FIRST))
            wait_until(lambda: [barrier.missing for barrier in clients[1].status().barriers] == [(0,)])
            operations = begin(clients[:1], position=FIRST)
    with server_in_thread(60.0, port=port):
        told = Running(clients[:1], inside(operations, "save/written"))
        wait_until(lambda: [barrier.missing for barrier in clients[0].status().barriers] in ([(1,)], []))
        is_restarted.set()
        results = {**told.results(), **untold.results()}
        expected = "barrier 'save/written': client 1 .* is not in this operation any more"
        same_error(results, errors.BarrierConflictError, expected)
        assert told.results()[0].seconds < AT_ONCE_S
        again = begin(clients, position=SECOND)
        assert not any(result.error for result in together(clients, inside(again, "save/written")).values())
        leave_all(clients)


def test_coordinator_shuts_down(job):
    """Those who wait are sent away with UNAVAILABLE, which says: repeat."""
    with server_in_thread() as port:
        channel = grpc.insecure_channel(f"127.0.0.1:{port}")
        raw = Raw(channel, job)
        raw.register(0)
        waiting = raw.wait(0, raw.arrive(0).barrier_id)
        raw.beat(0)  # the wait came before it
    with channel, pytest.raises(grpc.RpcError) as refused:
        waiting.result()
    assert refused.value.code() == CODES.UNAVAILABLE
    assert refused.value.details() == "the coordinator is shutting down"


def test_one_task_leaves_early(clients):
    """The others need not wait for it, nor for a timeout."""
    together(clients, lambda client: client.register())
    waiting = Running(clients[:1], at("b"))
    wait_until(lambda: clients[0].status().barriers)
    clients[2].leave()
    same_error(waiting.results(), errors.ClientLostError, "client 2 .* has left")
    assert not any(result.error for result in together(clients[:2], at("c", participants=[0, 1])).values())


def test_unknown_task_or_wrong_number_of_clients(port, job, raw, clients):
    """Refused for the caller, and the others do not notice."""
    waiting = Running(clients[:2], at("b"))
    wait_until(lambda: [barrier.missing for barrier in clients[0].status().barriers] == [(2,)])
    assert raw.refusal(raw.arrive, 2)[0] == CODES.NOT_FOUND
    assert raw.refusal(raw.register, 3)[0] == CODES.INVALID_ARGUMENT
    with pytest.raises(errors.ConfigError, match="got 4, expected 3"):
        client_at(port, job, 2, num_clients=4).register()
    last = together(clients[2:], lambda client: client.barrier("b", Vote(), timeout_s=20))
    assert not any(result.error for result in {**waiting.results(), **last}.values())
