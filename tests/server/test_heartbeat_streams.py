"""Heartbeat streams: notices on them, and how clients do without."""

import asyncio
import itertools
import secrets
import threading
import time

import grpc
import pytest
from coordination.saving_clients import proxy
from dtckpt_server import server as server_module
from dtckpt_server.heartbeat_streams import MAX_UNSENT
from dtckpt_server.service import CoordinatorService
from support.client_calls import (
    FIRST,
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
from support.coordinators import running_server, server_in_thread, server_process

from dtckpt import errors
from dtckpt._proto import coordinator_pb2 as pb
from dtckpt._proto import coordinator_pb2_grpc as pb_grpc
from dtckpt.coordination import grpc_calls, grpc_client
from dtckpt.coordination.api import BEGIN, Member, Progress, Vote
from dtckpt.coordination.grpc_client import GrpcCoordination
from dtckpt.coordination.grpc_heartbeat import HeartbeatStream

LONG_S = 600.0
"""A heartbeat timeout that no test lives to see; a beat is due every 100 s."""


def clients_at(port, num_clients, attempt=0, heartbeat_timeout_s=LONG_S):
    members = [Member("job", client, num_clients, secrets.randbits(60), attempt) for client in range(num_clients)]
    return [
        GrpcCoordination(f"127.0.0.1:{port}", member, heartbeat_timeout_s=heartbeat_timeout_s) for member in members
    ]


def is_streaming(client):
    stream = client._stream
    return stream is not None and stream.num_answers > 0


@pytest.fixture
def server():
    with running_server(heartbeat_timeout_s=LONG_S) as server:
        yield server


@pytest.fixture
def clients(server):
    """Two clients that beat on streams, and will not beat again by themselves."""
    made = clients_at(server.port, 2)
    for client in made:
        client.register()
        wait_until(lambda client=client: is_streaming(client))
    yield made
    leave_all(made)


def test_new_phase_goes_on_the_stream(clients, monkeypatch):
    monkeypatch.setattr(GrpcCoordination, "_send_heartbeat", lambda _: pytest.fail("a single call was made"))
    before = clients[0]._stream.num_answers
    clients[0].heartbeat(Progress("write", 7, 1, 2))
    wait_until(lambda: clients[1].status().tasks[0].progress == Progress("write", 7, 1, 2))
    wait_until(lambda: clients[0]._stream.num_answers == before + 1)


def test_client_that_is_on_its_way_is_told_of_a_failure(server, clients):
    """By an other's no-vote, and by a cancellation; it does not ask the coordinator any more."""
    operations = begin(clients)
    no = inside(operations, "b", vote=Vote(ok=False))
    same_error(together(clients[:1], no), errors.DtckptError, "0")
    wait_until(lambda: len(clients[1]._failures) == 1)
    waiting = Running(clients[:1], inside(operations, "c", participants=[1, 0]))
    wait_until(lambda: clients[0].status().barriers)
    (barrier,) = server._service.rules.jobs["job"].open.values()
    clients[0]._cancel(pb.ArriveRequest(task=clients[0]._identity, name="c", call=barrier.arrived[0], timeout_s=20))
    expected = r"^barrier 'c': client 0 \(job/0\) was interrupted while it waited$"
    same_error(waiting.results(), errors.BarrierCancelledError, expected)
    wait_until(lambda: len(clients[1]._failures) == 2)
    clients[1]._arrive_and_wait = lambda *_: pytest.fail("it asked")
    with pytest.raises(errors.ClientFailedError, match="client 0: voted no"):
        inside(operations, "b")(clients[1])
    with pytest.raises(errors.BarrierCancelledError, match=expected):
        inside(operations, "c")(clients[1])
    del clients[1]._arrive_and_wait
    again = begin(clients)
    assert not any(result.error for result in together(clients, inside(again, "b")).values())


def test_nobody_is_told_of_rounds_that_may_not_be_its_own(clients):
    """A client that comes to a first round, or to a barrier without other rounds, may come for the next round."""
    together(clients[:1], at("alone", vote=Vote(ok=False), position=FIRST))
    together(clients[:1], at("save/begin", vote=Vote(ok=False), operation=BEGIN, position=FIRST))
    operations = begin(clients, position=SECOND)
    together(clients[:1], inside(operations, "save/written", vote=Vote(ok=False)))
    wait_until(lambda: clients[1]._failures)
    assert [name for name, _, _ in clients[1]._failures] == ["save/written"]


def no_calls(monkeypatch, *clients):
    for client in clients:
        monkeypatch.setattr(client, "_call", lambda *_: pytest.fail("a single call was made"))


def test_clients_meet_on_their_streams(clients, monkeypatch):
    """Beats go on while they wait there."""
    no_calls(monkeypatch, *clients)
    waiting = Running(clients[:1], lambda c: c.barrier("b", Vote(payload=b"one"), timeout_s=20, collect=True))
    wait_until(lambda: clients[0]._stream._arrivals)
    before = clients[0]._stream.num_answers
    clients[0].heartbeat(Progress("wait", 1))
    wait_until(lambda: clients[0]._stream.num_answers == before + 1)
    together(clients[1:], lambda c: c.barrier("b", Vote(payload=b"two"), timeout_s=20))
    assert waiting.results()[0].value.payloads == {0: b"one", 1: b"two"}
    assert not clients[0]._stream._arrivals


def test_who_waits_for_long_asks_by_calls(clients, monkeypatch):
    monkeypatch.setattr(grpc_client, "FIRST_WAIT_S", 0.05)
    monkeypatch.setattr(clients[0], "_arrive_on_stream", unless_none(clients[0]._arrive_on_stream))
    waiting = Running(clients[:1], at("b"))
    asking = clients[0]._call
    asked = threading.Event()
    monkeypatch.setattr(clients[0], "_call", lambda *given: (asked.set(), asking(*given))[1])
    assert asked.wait(10)
    together(clients[1:], at("b"))
    assert waiting.results()[0].error is None


def unless_none(call):
    def checked(*arguments):
        found = call(*arguments)
        assert found is not None
        return found

    return checked


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"name": "x" * 257}, errors.ConfigError, "name is too long"),
        ({"timeout_s": float("nan")}, errors.ConfigError, "timeout"),
        ({"participants": [1]}, errors.BarrierConflictError, "client 0 is not a participant"),
    ],
)
def test_refusals_on_a_stream_are_the_same_errors(clients, monkeypatch, change, error, message):
    together(clients, at("b"))
    no_calls(monkeypatch, *clients)
    given = {"task": clients[0]._identity, "name": "b", "call": 7, "timeout_s": 20, "vote": pb.Vote(ok=True)}
    with pytest.raises(error, match=message):
        clients[0]._arrive_on_stream(pb.ArriveRequest(**given | change), 20.0)
    assert is_streaming(clients[0])
    assert not any(result.error for result in together(clients, at("c")).values())  # the streams have gone on


def test_arrival_whose_stream_breaks_is_repeated_by_a_call(clients):
    waiting = Running(clients[:1], at("b"))
    wait_until(lambda: clients[0].status().barriers)
    clients[0]._stream.end(at_once=True)
    wait_until(lambda: not is_streaming(clients[0]))
    passed = together(clients[1:], at("b")) | waiting.results()
    assert [result.value.generation for result in passed.values()] == [0, 0]
    assert not any(result.error for result in together(clients, at("b")).values())


def test_arrival_that_has_no_room_is_repeated_by_a_call(server, clients, monkeypatch):
    arrival = pb.ArriveRequest(task=clients[0]._identity, name="b", call=1, timeout_s=20, vote=pb.Vote(ok=True))
    quota = server._service._turns._calls._quota
    monkeypatch.setattr(server._service._turns._calls, "_quota", 0)
    assert clients[0]._arrive_on_stream(arrival, 20.0) is None
    waiting = Running(clients[:1], at("b"))
    monkeypatch.setattr(server._service._turns._calls, "_quota", quota)
    passed = together(clients[1:], at("b")) | waiting.results()
    assert not any(result.error for result in passed.values())


def test_older_coordinator_takes_arrivals_for_heartbeats(monkeypatch):
    """It answers them at once. That is no verdict."""

    async def only_beats(self, request_iterator, context):
        async for request in request_iterator:
            taken.append(request.HasField("arrival"))
            await context.write(pb.HeartbeatStreamResponse(sequence=request.sequence))

    taken = []
    monkeypatch.setattr(CoordinatorService, "HeartbeatStream", only_beats)
    with server_in_thread(heartbeat_timeout_s=LONG_S) as port:
        clients = clients_at(port, 2)
        for client in clients:
            client.register()
            wait_until(lambda client=client: is_streaming(client))
        same_error(together(clients[:1], at("b", timeout_s=0.5)), errors.BarrierTimeoutError, "1/2 arrived")
        assert any(taken)
        assert not any(result.error for result in together(clients, at("c")).values())
        leave_all(clients)


def test_arrivals_do_not_put_off_beats():
    """A client that arrives again and again shall not look as if it had stopped."""
    with running_server(heartbeat_timeout_s=1.2) as server:
        (client,) = clients_at(server.port, 1)
        client.register()
        wait_until(lambda: is_streaming(client))
        client.heartbeat(Progress("", 5))  # of the same phase: not worth a beat

        def is_told():
            client.barrier("b", timeout_s=20)
            return client.status().tasks[0].progress == Progress("", 5)

        wait_until(is_told)
        client.leave()


def test_who_leaves_the_coordinator_waits_for_it_no_longer(server):
    """Also where the network swallows everything."""
    with proxy(server.port) as network:
        (client,) = clients_at(network.port, 2)[:1]
        client.register()
        wait_until(lambda: is_streaming(client))
        waiting = Running([client], at("b"))
        wait_until(lambda: client._stream._arrivals)
        network.flowing.clear()
        begin = time.monotonic()
        client.abandon("the reason")
        same_error(waiting.results(), errors.CoordinatorUnavailableError, "^the reason$")
        assert time.monotonic() - begin < grpc_calls.CALL_TIMEOUT_S / 2
        network.flowing.set()
        client.leave()


@pytest.mark.parametrize("on_stream", [True, False])
def test_who_arrives_again_has_what_is_left_of_its_timeout(server, clients, monkeypatch, on_stream):
    """The first time is swallowed by the network."""

    def lose(*_):
        nonlocal passed_s
        if passed_s:
            return once(*_)
        passed_s = 15.0
        if on_stream:
            return None
        raise Swallowed

    once, passed_s = clients[0]._call_once, 0.0
    monkeypatch.setattr(clients[0], "_clock", lambda: time.monotonic() + passed_s)
    if on_stream:
        monkeypatch.setattr(clients[0]._stream, "arrive", lose)
    else:
        monkeypatch.setattr(clients[0], "_arrive_on_stream", lambda *_: None)
        monkeypatch.setattr(clients[0], "_call_once", lose)
    waiting = Running(clients[:1], at("b", timeout_s=20.0))
    wait_until(lambda: server._service.rules.jobs["job"].open)
    (barrier,) = server._service.rules.jobs["job"].open.values()
    assert 4.0 < barrier.timeout_s <= 5.0
    passed = together(clients[1:], at("b")) | waiting.results()
    assert not any(result.error for result in passed.values())


class Swallowed(grpc.RpcError):
    def code(self):
        return grpc.StatusCode.DEADLINE_EXCEEDED

    def details(self):
        return ""

    def trailing_metadata(self):
        return ()


def test_all_are_told_whose_arrival_got_through_at_a_later_try_only(clients, monkeypatch):
    def lose(request, timeout):
        monkeypatch.undo()
        raise Swallowed

    monkeypatch.setattr(clients[0], "_arrive_on_stream", lambda *_: None)
    monkeypatch.setattr(clients[0]._connected().stub, "Arrive", lose)
    passed = together(clients, at("b"))
    assert [result.value.cut_off for result in passed.values()] == [(0,), (0,)], passed
    passed = together(clients, at("b"))
    assert [result.value.cut_off for result in passed.values()] == [(), ()], passed


def raw_stream(stub, task, arrivals):
    """Open a stream that beats once, and then arrives again and again, without asking for more."""
    stub.Register(pb.RegisterRequest(task=identity(task, task + 1), num_clients=2), timeout=5)
    first = pb.HeartbeatStreamRequest(task=identity(task, task + 1), sequence=1)
    return stub.HeartbeatStream(itertools.chain([first], arrivals), timeout=30)


def arrivals_of(task, count):
    who = identity(task, task + 1)
    arrival = pb.ArriveRequest(task=who, name="b", call=1, timeout_s=20, vote=pb.Vote(ok=True), max_wait_s=20)
    return [pb.HeartbeatStreamRequest(task=who, sequence=2 + n, arrival=arrival) for n in range(count)]


def test_one_client_cannot_take_all_room(server):
    """A client that arrives without end on one stream waits a bounded number of times."""
    over = threading.Event()

    def arrivals():
        yield from arrivals_of(0, 3 * MAX_UNSENT)
        over.wait(20)

    with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        stub = pb_grpc.CoordinatorStub(channel)
        answers = raw_stream(stub, 0, arrivals())
        assert next(answers).sequence == 1
        refused = [next(answers) for _ in range(2 * MAX_UNSENT)]
        assert {answer.refusal.code for answer in refused} == {grpc.StatusCode.UNAVAILABLE.value[0]}
        assert server._service._turns._calls.taken == MAX_UNSENT
        stub.Register(pb.RegisterRequest(task=identity(1, 2), num_clients=2), timeout=5)
        stub.Arrive(arrivals_of(1, 1)[0].arrival, timeout=5)
        told = [pb.ArriveResponse.FromString(next(answers).arrived) for _ in range(MAX_UNSENT)]
        assert {arrived.verdict.state for arrived in told} == {pb.BARRIER_STATE_PASSED}
        over.set()


def tasks_of_streams(server):
    running = asyncio.all_tasks(server._running[0].get_loop())
    return {task for task in running if task.get_coro().__name__ in {"_answer_arrival", "send_owed_if_open"}}


@pytest.mark.parametrize("how", ["half-closed", "cancelled"])
def test_stream_that_ends_leaves_no_arrival_behind(server, how):
    service = server._service
    over = threading.Event()

    def arrivals():
        yield from arrivals_of(0, 3)
        over.wait(20)

    with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        stub = pb_grpc.CoordinatorStub(channel)
        answers = raw_stream(stub, 0, arrivals())
        wait_until(lambda: service._turns._calls.taken == 3)
        assert len(tasks_of_streams(server)) >= 3
        if how == "cancelled":
            answers.cancel()
        over.set()
        wait_until(lambda: not service._turns._calls.taken and not service._turns._streams.taken)
        wait_until(lambda: not tasks_of_streams(server))
        assert not any(service._waiters.values())
        barrier = stub.GetJob(pb.GetJobRequest(job="job"), timeout=5).open_barriers[0]
        assert list(barrier.missing) == [1]  # it has arrived all the same


def test_arrival_is_of_the_streams_task(server):
    """A stream that may speak for a job's task may not speak for another job's task in its arrivals."""
    beat = pb.HeartbeatStreamRequest(task=identity(0, 1), sequence=1)
    foreign = pb.ArriveRequest(task=identity(1, 2), name="b", call=1, timeout_s=5, vote=pb.Vote(ok=True))
    with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        stub = pb_grpc.CoordinatorStub(channel)
        for task in range(2):
            stub.Register(pb.RegisterRequest(task=identity(task, task + 1), num_clients=2), timeout=5)
        second = pb.HeartbeatStreamRequest(task=identity(0, 1), sequence=2, arrival=foreign)
        answers = stub.HeartbeatStream(iter([beat, second]), timeout=5)
        assert next(answers).sequence == 1
        with pytest.raises(grpc.RpcError) as refused:
            next(answers)
        assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert not stub.GetJob(pb.GetJobRequest(job="job"), timeout=5).open_barriers


def test_subset_is_told_and_nobody_else(server):
    clients = clients_at(server.port, 3)
    for client in clients:
        client.register()
        wait_until(lambda client=client: is_streaming(client))
    operations = begin([clients[0], clients[2]], participants=[0, 2])
    together(clients[:1], inside(operations, "b", vote=Vote(ok=False), participants=[0, 2]))
    wait_until(lambda: clients[2]._failures)
    assert list(clients[2]._failures) == [("b", operations[0].id, (0, 2))]
    assert not clients[1]._failures
    leave_all(clients)


def test_higher_attempt_is_told_at_once(server, clients):
    """A beat is not due for minutes."""
    (new, _) = clients_at(server.port, 2, attempt=1)
    new.register()
    wait_until(lambda: all(client._fenced for client in clients))
    for number, client in enumerate(clients):
        with pytest.raises(errors.FencedError, match=rf"client {number} \(job/{number}\): attempt 1 has begun"):
            client.barrier("b", timeout_s=20)
        client._heartbeat_thread.join(10)
        assert not client._heartbeat_thread.is_alive()
    new.leave()


def identity(task, incarnation):
    return pb.TaskIdentity(job="job", task=task, incarnation=incarnation)


def test_process_whose_place_is_taken_is_told():
    """It fell silent, and its connection stayed."""

    def one_beat():
        yield pb.HeartbeatStreamRequest(task=identity(0, 7), sequence=1)
        told.wait(20)

    told = threading.Event()
    with (
        running_server(heartbeat_timeout_s=0.3) as server,
        grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel,
    ):
        stub = pb_grpc.CoordinatorStub(channel)
        stub.Register(pb.RegisterRequest(task=identity(0, 7), num_clients=1), timeout=5)
        answers = stub.HeartbeatStream(one_beat(), timeout=20)
        assert next(answers).sequence == 1
        (new,) = clients_at(server.port, 1)
        wait_until(lambda: new.status().tasks[0].state == "lost")
        new.register()
        notice = next(answers).notice
        assert notice.failure.message == "another process has taken the place of client 0 (job/0)"
        assert (notice.name, notice.failure.cause) == ("", pb.Failure.CAUSE_FENCED)
        told.set()
        new.leave()


@pytest.mark.processes
def test_verdict_arrives_although_the_coordinator_died_of_it():
    with server_process(heartbeat_timeout_s=LONG_S) as server:
        clients = clients_at(server.port, 2)
        clients[1].register()
        wait_until(lambda: is_streaming(clients[1]))
        operations = begin(clients)
        together(clients[:1], inside(operations, "save/written", vote=Vote(ok=False, reason="disk full")))
        wait_until(lambda: clients[1]._failures)
        server.kill()
        late = together(clients[1:], inside(operations, "save/written"))
        same_error(late, errors.ClientFailedError, "^client 0: disk full$")
        assert late[1].seconds < 5.0
        leave_all(clients)


def test_open_streams_do_not_hold_up_the_end(clients, server):
    """Otherwise it would wait for them for as long as calls may take."""
    loop = server._running[0].get_loop()
    begin = time.monotonic()
    asyncio.run_coroutine_threadsafe(server.stop(60.0), loop).result(30)
    assert time.monotonic() - begin < 20.0


@pytest.mark.parametrize("refusal", [grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.UNAVAILABLE])
def test_single_calls_where_streams_are_refused(monkeypatch, refusal):
    async def refuse(self, request_iterator, context):
        tried.append(1)
        await context.abort(refusal, "no streams here")

    tried = []
    monkeypatch.setattr(CoordinatorService, "HeartbeatStream", refuse)
    with server_in_thread(heartbeat_timeout_s=0.6) as port:
        clients = clients_at(port, 2)
        beats = []
        clients[0]._send_heartbeat = lambda beat=clients[0]._send_heartbeat: (beats.append(1), beat())
        together(clients, lambda client: client.register())
        wait_until(lambda: len(beats) >= 10)  # 0.9 s and more
        assert [task.state for task in clients[1].status().tasks] == ["registered"] * 2
        assert 1 < len(tried) < 12  # of both clients; ever more rarely
        leave_all(clients)


def test_stream_of_a_machine_that_vanished_ends(monkeypatch):
    """No message says so: the connection just becomes silent."""
    monkeypatch.setattr(server_module, "KEEPALIVE_S", 1.0)
    with running_server(heartbeat_timeout_s=LONG_S) as server, proxy(server.port) as network:
        (client,) = clients_at(network.port, 1)
        client.register()
        wait_until(lambda: is_streaming(client))
        network.flowing.clear()
        wait_until(lambda: not server._service._streams._streams)
        network.flowing.set()
        client.leave()


def test_call_to_a_machine_that_vanished_ends(server, monkeypatch):
    """Long before the time that it was given."""
    named = {"grpc.keepalive_time_ms": 1000, "grpc.http2.ping_timeout_ms": 500}
    assert named.keys() < dict(grpc_calls.OPTIONS).keys()
    monkeypatch.setattr(grpc_calls, "OPTIONS", tuple((dict(grpc_calls.OPTIONS) | named).items()))
    with proxy(server.port) as network:
        (client,) = clients_at(network.port, 1)
        client._run_stream = lambda *_: False
        client.register()
        network.flowing.clear()
        begin = time.monotonic()
        with pytest.raises(grpc.RpcError, match="ping timeout"):
            client._call_once(lambda stub, t: stub.ListJobs(pb.ListJobsRequest(), timeout=t), 20.0)
        assert time.monotonic() - begin < 10.0
        network.flowing.set()
        client.leave()


def test_stream_that_breaks_is_opened_again(clients):
    broken = clients[0]._stream
    broken.end(at_once=True)
    clients[0]._interval_s = 0.05
    wait_until(lambda: clients[0]._stream not in (None, broken) and is_streaming(clients[0]))


class SilentStub:
    """A coordinator behind a network that swallows everything."""

    def __init__(self):
        self.over = threading.Event()

    def HeartbeatStream(self, beats):
        self.drawing = threading.Thread(target=lambda: [None for _ in beats], daemon=True)
        self.drawing.start()
        return self

    def add_callback(self, callback):
        self.callback = callback

    def cancel(self):
        self.over.set()

    def __iter__(self):
        assert self.over.wait(20)
        self.callback()
        return iter(())


def test_silent_stream_is_given_up():
    stub = SilentStub()
    stream = HeartbeatStream(lambda number: pb.HeartbeatStreamRequest(sequence=number), 0.1, time.monotonic)
    stream.run(stub, lambda _: None)
    assert stub.over.is_set()
    stub.drawing.join(20)
    assert not stub.drawing.is_alive()


def test_beats_are_due_among_arrivals_too():
    """They carry the progress, and show whether the other end answers."""
    now = 0.0
    stream = HeartbeatStream(lambda number: pb.HeartbeatStreamRequest(sequence=number), 10.0, lambda: now)
    drawn = stream._messages()
    assert next(drawn).sequence == 1
    stream.num_answers, stream._unanswered_since = 1, None
    for at_s, is_arrival in ((6.0, True), (12.0, False)):
        now = at_s
        assert stream.arrive(pb.ArriveRequest(), 0.0) is None
        assert next(drawn).HasField("arrival") == is_arrival
    assert next(drawn).HasField("arrival")


def test_arrival_that_nobody_answers():
    stub = SilentStub()
    stream = HeartbeatStream(lambda number: pb.HeartbeatStreamRequest(sequence=number), 60.0, time.monotonic)
    assert stream.arrive(pb.ArriveRequest(), 20.0) is None  # nothing has come on it
    running = threading.Thread(target=stream.run, args=(stub, lambda _: None), daemon=True)
    running.start()
    stream.num_answers = 1
    assert stream.arrive(pb.ArriveRequest(), 0.05) is None
    waiting = Running(clients_at(1, 1), lambda _: stream.arrive(pb.ArriveRequest(), 20.0))
    wait_until(lambda: stream._arrivals)
    stream.end(at_once=True)
    assert waiting.results()[0].value is None
    running.join(20)
    assert stream.arrive(pb.ArriveRequest(), 20.0) is None  # it is over


def test_stream_is_for_one_task(server):
    def beat(task, number):
        return pb.HeartbeatStreamRequest(task=identity(task, task + 1), sequence=number)

    with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        stub = pb_grpc.CoordinatorStub(channel)
        for task in range(2):
            stub.Register(pb.RegisterRequest(task=identity(task, task + 1), num_clients=2), timeout=5)
        answers = stub.HeartbeatStream(iter([beat(0, 1), beat(1, 2)]), timeout=5)
        assert next(answers).sequence == 1
        with pytest.raises(grpc.RpcError) as refused:
            next(answers)
        assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT


def test_stream_says_why_it_ends_also_while_it_answers(server):
    """The client would wait for the end for ever: gRPC sends no status while the first message is on its way."""
    (first,) = arrivals_of(0, 1)
    first.arrival.max_wait_s = 0.0
    foreign = pb.HeartbeatStreamRequest(task=identity(1, 2), sequence=3)
    with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        stub = pb_grpc.CoordinatorStub(channel)
        stub.Register(pb.RegisterRequest(task=identity(0, 1), num_clients=2), timeout=5)
        for _ in range(20):
            with pytest.raises(grpc.RpcError) as refused:
                list(stub.HeartbeatStream(iter([first, foreign]), timeout=5))
            assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
