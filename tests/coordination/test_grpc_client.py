"""Clients that meet at a coordinator, which runs in a thread or as the real command."""

import asyncio
import secrets
import signal
import subprocess
import sys
import threading
import time

import grpc
import pytest
from dtckpt_server import server as server_module
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.client_calls import (
    Running,
    at,
    leave_all,
    same_error,
    together,
    wait_until,
)
from support.coordinators import ServerProcess, running_server, server_in_thread, server_process

from dtckpt import errors
from dtckpt._proto import coordinator_pb2 as pb
from dtckpt._proto import coordinator_pb2_grpc as pb_grpc
from dtckpt.coordination import grpc_client
from dtckpt.coordination.api import Member, Vote
from dtckpt.coordination.grpc_calls import UnknownError
from dtckpt.coordination.grpc_client import GrpcCoordination

from .contract import ManyClientsContract
from .saving_clients import proxy


def clients_at(port, num_clients, job="job", attempt=0, kind=GrpcCoordination):
    return [
        kind(
            f"127.0.0.1:{port}",
            Member(job, client, num_clients, secrets.randbits(60), attempt),
            heartbeat_timeout_s=1.0,
        )
        for client in range(num_clients)
    ]


@pytest.fixture(scope="module")
def port():
    with server_in_thread() as port:
        yield port


@pytest.fixture
def stub(port):
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield pb_grpc.CoordinatorStub(channel)


class TestGrpc(ManyClientsContract):
    @pytest.fixture(autouse=True)
    def meeting_point(self, port):
        self.port = port

    def make(self, num_clients, job):
        return clients_at(self.port, num_clients, job)

    def silence(self, client):
        client._stop_heartbeats(client._heartbeat_thread)
        client._leaving.clear()


class OnStream(GrpcCoordination):
    """A client that does not arrive before its stream stands."""

    def _announce(self, deadline):
        super()._announce(deadline)
        self.begun = True

    def barrier(self, *arguments, **options):
        self.register()
        if self.__dict__.pop("begun", False):
            wait_until(lambda: self._fenced or (self._stream and self._stream.num_answers))
        return super().barrier(*arguments, **options)


class TestGrpcOnStreams(TestGrpc):
    def make(self, num_clients, job):
        return clients_at(self.port, num_clients, job, kind=OnStream)


def test_jobs_do_not_mix(port):
    one, two = clients_at(port, 2, "one"), clients_at(port, 2, "two")
    waiting = Running(one, at("b"))
    failed = together(two, lambda c: c.barrier("b", Vote(ok=c.member.client == 0), timeout_s=20))
    same_error(failed, errors.ClientFailedError, "client 1")
    assert not any(result.error for result in waiting.results().values())
    leave_all(one)
    leave_all(two)


def test_address_must_be_one():
    for address in ("", "host", "host:", ":1", "host:port"):
        with pytest.raises(errors.ConfigError, match="host:port"):
            GrpcCoordination(address, Member("j", 0, 1, 1))


def test_unreachable_coordinator_is_reported():
    (client,) = clients_at(1, 1)
    start = time.monotonic()
    with pytest.raises(errors.CoordinatorUnavailableError, match=r"coordinator at 127\.0\.0\.1:1 cannot be reached"):
        client.register()
    assert time.monotonic() - start < 5.0


def test_higher_attempt_fences_the_old_one(port):
    old = clients_at(port, 2, "fenced")
    waiting = Running(old[:1], at("b"))
    wait_until(lambda: old[0].status().barriers)
    old[1].register()
    new = clients_at(port, 2, "fenced", attempt=1)
    new[0].register()
    same_error(waiting.results(), errors.FencedError, "attempt 1 of job 'fenced' has begun")
    # It may have been told of the barrier, or that it is fenced, before it asks.
    with pytest.raises(errors.FencedError, match=r"attempt 1( of job 'fenced')? has begun"):
        old[1].barrier("b", timeout_s=5)
    with pytest.raises(errors.FencedError, match="is of attempt 0, but attempt 1 has begun"):
        clients_at(port, 2, "fenced")[1].register()
    assert not any(result.error for result in together(new, at("b")).values())
    leave_all(old)
    leave_all(new)


def test_number_of_clients_must_agree(port):
    two, three = clients_at(port, 2, "size"), clients_at(port, 3, "size")
    two[0].register()
    with pytest.raises(errors.ConfigError, match="got 3, expected 2"):
        three[1].register()
    two[0].leave()


def test_slow_handshake_comes_to_its_end(port):
    """The client uses the first connection, however long the coordinator takes to answer there."""
    with proxy(port) as network:
        network.flowing.clear()
        member = Member("slow", 0, 1, 1)
        client = GrpcCoordination(f"127.0.0.1:{network.port}", member, heartbeat_timeout_s=10.0)
        registering = Running([client], lambda client: client.register())
        wait_until(lambda: network.num_connections == 1)
        time.sleep(1.5)  # for this long nothing comes back
        network.flowing.set()
        assert registering.results()[0].error is None
        assert network.num_connections == 1
        leave_all([client])


def noting(call, codes):
    """Return a call that also notes with which status it failed."""

    def noted(stub, timeout_s):
        try:
            return call(stub, timeout_s)
        except grpc.RpcError as error:
            codes.append(error.code())
            raise

    return noted


def test_calls_that_waited_for_too_long_are_repeated(monkeypatch):
    """gRPC cancels calls to which a server has not come for 30 s, here 1 s; clients are none the wiser."""
    limits = server_module.options()
    limits += (("grpc.server_max_unrequested_time_in_server", 1),)
    monkeypatch.setattr(server_module, "options", lambda: limits)
    codes = []
    with running_server(heartbeat_timeout_s=60.0) as server:
        clients = clients_at(server.port, 3)
        together(clients, lambda client: client.register())

        for client in clients:
            once = client._call_once
            monkeypatch.setattr(client, "_call_once", lambda call, t, once=once: once(noting(call, codes), t))
        server._running[0].get_loop().call_soon_threadsafe(time.sleep, 2.5)  # for this long it comes to nothing
        assert not any(result.error for result in together(clients, at("b")).values())
        leave_all(clients)
    assert grpc.StatusCode.CANCELLED in codes


def test_interrupted_while_it_registers_again(monkeypatch):
    """The others learn of it, although the coordinator had just been restarted."""
    with server_in_thread(heartbeat_timeout_s=60.0) as port:
        clients = clients_at(port, 3)
        together(clients, lambda client: client.register())
        waiting = Running(clients[1:2], at("b"))
        wait_until(lambda: clients[0].status().barriers)

        def be_interrupted(_):
            monkeypatch.undo()
            raise KeyboardInterrupt

        def forget(*_):
            raise UnknownError("who?")

        monkeypatch.setattr(grpc_client, "FIRST_WAIT_S", 0.0)
        monkeypatch.setattr(clients[0], "_await", forget)
        monkeypatch.setattr(clients[0], "_announce", be_interrupted)
        with pytest.raises(KeyboardInterrupt):
            clients[0].barrier("b", timeout_s=20)
        same_error(waiting.results(), errors.BarrierCancelledError, "client 0 .* was interrupted while it waited")
        leave_all(clients)


def test_thread_of_an_earlier_registration_ends(monkeypatch):
    """Also if it was inside a call all the while that its client left and came back."""

    def hang():
        hanging.set()
        assert go_on.wait(20)

    hanging, go_on = threading.Event(), threading.Event()
    monkeypatch.setattr(grpc_client, "GOODBYE_S", 0.05)
    with server_in_thread() as port:
        (client,) = clients_at(port, 1)
        monkeypatch.setattr(client, "_run_stream", lambda *_: False)
        monkeypatch.setattr(client, "_send_heartbeat", hang)
        client.register()
        assert hanging.wait(20)
        first = client._heartbeat_thread
        client.leave()
        monkeypatch.undo()
        client.register()
        go_on.set()
        first.join(20)
        assert not first.is_alive()
        assert client._heartbeat_thread.is_alive()
        client.leave()


# --- the service itself ---------------------------------------------------------------------------------------------


def test_calls_need_a_deadline(stub):
    with pytest.raises(grpc.RpcError) as refused:
        stub.ListJobs(pb.ListJobsRequest())
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "deadline" in refused.value.details()


def test_health(port):
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for name in ("", "dtckpt.coordinator.v1.Coordinator", "liveness", "readiness"):
            answer = stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=5)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.RpcError) as refused:
            stub.Check(health_pb2.HealthCheckRequest(service="other"), timeout=5)
        assert refused.value.code() == grpc.StatusCode.NOT_FOUND


def identity(job, task=0, incarnation=7):
    return pb.TaskIdentity(job=job, task=task, incarnation=incarnation)


def test_status_codes(stub):
    def code(call, request):
        with pytest.raises(grpc.RpcError) as refused:
            call(request, timeout=5)
        return refused.value.code()

    codes = grpc.StatusCode
    assert code(stub.Heartbeat, pb.HeartbeatRequest(task=identity("nobody"))) == codes.NOT_FOUND
    assert code(stub.GetJob, pb.GetJobRequest(job="nobody")) == codes.NOT_FOUND
    assert code(stub.Await, pb.AwaitRequest(barrier_id="x")) == codes.NOT_FOUND
    assert code(stub.Register, pb.RegisterRequest(task=identity("c", 2), num_clients=2)) == codes.INVALID_ARGUMENT
    stub.Register(pb.RegisterRequest(task=identity("c"), num_clients=2), timeout=5)
    rival = pb.RegisterRequest(task=identity("c", incarnation=8), num_clients=2)
    assert code(stub.Register, rival) == codes.ABORTED
    stub.Heartbeat(pb.HeartbeatRequest(task=identity("c")), timeout=5)
    assert code(stub.Register, rival) == codes.FAILED_PRECONDITION
    too_long = pb.ArriveRequest(task=identity("c"), name="x" * 257, call=1, timeout_s=1)
    assert code(stub.Arrive, too_long) == codes.INVALID_ARGUMENT
    stub.Leave(pb.LeaveRequest(task=identity("c")), timeout=5)


def test_long_texts_keep_their_status(stub):
    """Texts beyond the metadata limit would come as RESOURCE_EXHAUSTED, or not at all."""
    with pytest.raises(grpc.RpcError) as refused:
        stub.GetJob(pb.GetJobRequest(job="ü" * 50_000), timeout=5)
    assert refused.value.code() == grpc.StatusCode.NOT_FOUND


def test_heartbeat_stream(stub):
    stub.Register(pb.RegisterRequest(task=identity("stream"), num_clients=1), timeout=5)
    beats = [pb.HeartbeatStreamRequest(task=identity("stream"), sequence=number) for number in range(100)]
    answers = list(stub.HeartbeatStream(iter(beats), timeout=10))
    assert [answer.sequence for answer in answers] == list(range(100))
    with pytest.raises(grpc.RpcError) as refused:
        list(stub.HeartbeatStream(iter([pb.HeartbeatStreamRequest(task=identity("stream", 0, 9))]), timeout=10))
    assert refused.value.code() == grpc.StatusCode.FAILED_PRECONDITION
    stub.Leave(pb.LeaveRequest(task=identity("stream")), timeout=5)


def test_cancel_and_look_in(stub):
    for task in range(2):
        stub.Register(pb.RegisterRequest(task=identity("look", task), num_clients=2), timeout=5)
    arrival = pb.ArriveRequest(task=identity("look"), name="b", call=1, timeout_s=20, vote=pb.Vote(ok=True))
    barrier_id = stub.Arrive(arrival, timeout=5).barrier_id
    job = stub.GetJob(pb.GetJobRequest(job="look"), timeout=5)
    assert [(barrier.name, list(barrier.missing)) for barrier in job.open_barriers] == [("b", [1])]
    waiting = stub.Await(pb.AwaitRequest(task=identity("look"), barrier_id=barrier_id, max_wait_s=0.1), timeout=5)
    assert waiting.verdict.state == pb.BARRIER_STATE_OPEN
    assert waiting.waiting_for == "client 1 (look/1)"
    cancel = pb.CancelRequest(task=identity("look"), barrier_id=barrier_id, reason="was interrupted")
    stub.Cancel(cancel, timeout=5)
    barrier = stub.GetBarrier(pb.GetBarrierRequest(job="look", barrier_id=barrier_id), timeout=5).barrier
    assert barrier.failure.cause == pb.Failure.CAUSE_CANCELLED
    assert barrier.failure.message == "barrier 'b': client 0 (look/0) was interrupted"
    with pytest.raises(grpc.RpcError) as refused:
        stub.Cancel(cancel, timeout=5)
    assert refused.value.code() == grpc.StatusCode.FAILED_PRECONDITION
    assert "look" in [job.job for job in stub.ListJobs(pb.ListJobsRequest(), timeout=5).jobs]


def test_one_waiter_that_goes_away_leaves_the_others_waiting(port, stub):
    for task in range(3):
        stub.Register(pb.RegisterRequest(task=identity("gone", task), num_clients=3), timeout=5)
    barrier_id = ""
    for task in range(2):
        arrival = pb.ArriveRequest(task=identity("gone", task), name="b", call=1, timeout_s=20, vote=pb.Vote(ok=True))
        barrier_id = stub.Arrive(arrival, timeout=5).barrier_id
    request = pb.AwaitRequest(barrier_id=barrier_id, task=identity("gone"), max_wait_s=20)
    with grpc.insecure_channel(f"127.0.0.1:{port}", options=(("grpc.use_local_subchannel_pool", 1),)) as short_lived:
        leaving = pb_grpc.CoordinatorStub(short_lived).Await.future(request, timeout=20)
        staying = stub.Await.future(request, timeout=20)
        stub.ListJobs(pb.ListJobsRequest(), timeout=5)
        leaving.cancel()
    last = pb.ArriveRequest(task=identity("gone", 2), name="b", call=1, timeout_s=20, vote=pb.Vote(ok=True))
    assert stub.Arrive(last, timeout=5).verdict.state == pb.BARRIER_STATE_PASSED
    assert staying.result().verdict.state == pb.BARRIER_STATE_PASSED


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.mark.processes
@pytest.mark.parametrize("how", ["kill", "terminate"])
def test_barrier_survives_a_restart_of_the_coordinator(how):
    with server_process() as server:
        clients = clients_at(server.port, 3)
        waiting = Running(clients[:2], at("b", collect=True))
        wait_until(lambda: [barrier.missing for barrier in clients[0].status().barriers] == [(2,)])
        getattr(server, how)()
        with server_process(port=server.port):
            last = together(clients[2:], lambda c: c.barrier("b", Vote(payload=b"last"), timeout_s=20, collect=True))
            for result in {**waiting.results(), **last}.values():
                assert result.error is None
                assert result.value.payloads == {0: b"", 1: b"", 2: b"last"}
            leave_all(clients)


@pytest.mark.processes
def test_command(tmp_path):
    with server_process() as server:
        assert server.first_line == f"listening on 127.0.0.1:{server.port}\n"
        with pytest.raises(AssertionError, match="dtckpt-coordinator: error: cannot listen on"):
            ServerProcess(port=server.port)
        (client,) = clients_at(server.port, 1)
        client.register()
        client.leave()
        log = server.terminate()
        assert server.process.returncode == 143
        assert "SERVING IN PLAINTEXT" in log
        assert "SERVING WITHOUT AUTHENTICATION" in log
        assert "client 0 (job/0) registered" in log
        assert "client 0 (job/0) left" in log


@pytest.mark.processes
def test_command_line(tmp_path):
    from click.testing import CliRunner
    from dtckpt_server.main import main

    assert CliRunner().invoke(main, ["serve", "--port", "x"]).exit_code == 2
    assert CliRunner().invoke(main, ["serve", "--insecure", "--host", "192.0.2.1", "--port", "0"]).exit_code == 69
    command = "from dtckpt_server.main import main; main()"
    port_file = tmp_path / "port"
    options = ["--insecure", "--port", "0", "--port-file", str(port_file)]
    process = subprocess.Popen(
        [sys.executable, "-c", command, "serve", *options], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        line = process.stdout.readline()
        assert line == f"listening on 127.0.0.1:{int(port_file.read_text())}\n"
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 143
        process.stdout.close()


FORK = """
import os, secrets, signal, sys, time
from dtckpt.coordination.api import Member
from dtckpt.coordination.grpc_client import GrpcCoordination
from dtckpt import errors
client = GrpcCoordination(f"127.0.0.1:{sys.argv[1]}", Member("fork", 0, 1, secrets.randbits(60)))
client.register()
client.barrier("b", timeout_s=10)
signal.alarm(50)
while not client._stream or not client._stream.num_answers:
    time.sleep(0.01)
child = os.fork()
if child == 0:
    signal.alarm(20)
    try:
        client.barrier("b", timeout_s=10)
    except errors.ForkedProcessError as error:
        os._exit(0 if f"forked from process {os.getppid()}" in str(error) else 2)
    os._exit(3)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert client.barrier("b", timeout_s=10).generation == 1
client.leave()
"""


@pytest.mark.processes
def test_fork_after_the_client_was_made(port):
    """The child itself must not use gRPC, which crashes there now and then: docs/coordinator.md."""
    subprocess.run([sys.executable, "-c", FORK, str(port)], timeout=180, check=True)


FORK_WHILE_CONNECTING = """
import os, signal, threading, time
import dtckpt.layout.clients, dtckpt.coordination.grpc_credentials  # no import may be under way either
import dtckpt.coordination.grpc_client
from dtckpt import errors
from dtckpt.coordination import connect
threading.Thread(target=connect.initialize_multi_client, args=("127.0.0.1:1",), daemon=True).start()
signal.alarm(50)
while connect._lock.acquire(blocking=False):
    connect._lock.release()
    time.sleep(0.001)
child = os.fork()
if child == 0:
    signal.alarm(20)
    try:
        connect.current_coordination()
    except errors.ForkedProcessError:
        os._exit(0)
    os._exit(1)
code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
os._exit(0 if code == 0 else 1)
"""


@pytest.mark.processes
def test_fork_while_another_thread_connects():
    """The child does not wait for a lock that no thread will release."""
    subprocess.run([sys.executable, "-c", FORK_WHILE_CONNECTING], timeout=180, check=True)


@pytest.mark.processes
def test_arrival_that_may_have_got_through_is_repeated_as_such(port):
    """A coordinator that was killed may have told others of its round, so the next life must know that it had begun."""

    class Unavailable(grpc.RpcError):
        def code(self):
            return grpc.StatusCode.UNAVAILABLE

    class DyingCoordinator:
        def Arrive(self, request, timeout):
            raise Unavailable

    (client,) = clients_at(port, 1)
    request = pb.ArriveRequest(timeout_s=5)
    with pytest.raises(Unavailable):
        client._arrive(DyingCoordinator(), request, time.monotonic() + 5, 5)
    assert (request.is_again, request.was_cut_off) == (True, True)


def test_burst_of_arrivals():
    """All arrive at once: more calls than gRPC keeps pending by default."""
    num_clients = 1500

    async def client(stub, task):
        who = identity("burst", task, task + 1)
        await stub.Register(pb.RegisterRequest(task=who, num_clients=num_clients), timeout=180)
        ready.append(task)
        while len(ready) < num_clients:
            await asyncio.sleep(0.01)
        arrival = pb.ArriveRequest(task=who, name="b", call=1, timeout_s=60, vote=pb.Vote(ok=True))
        arrived = await stub.Arrive(arrival, timeout=180)
        if arrived.verdict.state != pb.BARRIER_STATE_OPEN:
            return arrived.verdict.state
        request = pb.AwaitRequest(task=who, barrier_id=arrived.barrier_id, max_wait_s=30)
        return (await stub.Await(request, timeout=180)).verdict.state

    async def burst(port):
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = pb_grpc.CoordinatorStub(channel)
            return await asyncio.gather(*(client(stub, task) for task in range(num_clients)))

    ready = []
    with server_process(heartbeat_timeout_s=60) as server:
        assert set(asyncio.run(burst(server.port))) == {pb.BARRIER_STATE_PASSED}
