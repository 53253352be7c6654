"""One job cannot hurt another: what the coordinator remembers, answers and does at one time is bounded.

Work is counted rather than timed: how many barriers and tasks one step touches.
"""

import asyncio
import itertools
import logging
import socket
import tracemalloc
import urllib.request
from contextlib import ExitStack

import grpc
import pytest
from dtckpt_server import answers, chores, descriptions, memory, metrics, rules, status_page
from dtckpt_server.events import Arrive, Identity, Leave, Register, Tick
from dtckpt_server.quotas import Quotas
from dtckpt_server.rules import Rules, apply
from dtckpt_server.tokens import Tokens
from support.client_calls import wait_until
from support.coordinators import running_server, server_in_thread

from dtckpt import errors
from dtckpt._proto import coordinator_pb2 as pb
from dtckpt._proto import coordinator_pb2_grpc as pb_grpc
from dtckpt.coordination.grpc_credentials import PLAINTEXT
from dtckpt.coordination.grpc_status import StatusClient

MIB = 1 << 20
MANY = 100_000


class World:
    """Rules, a clock that the test sets, and a hostile job."""

    def __init__(self, **quotas):
        self.now = 100.0
        self.rules = Rules(60.0, incarnation=0xC0, quotas=Quotas(**quotas))
        self.calls = itertools.count(1)

    def happen(self, event):
        self.rules, effects = apply(self.rules, event, self.now)
        if effects.refusal is not None:
            raise effects.refusal
        return effects

    def register(self, *tasks, job="hostile", num_clients=MANY):
        for task in tasks:
            self.happen(Register(Identity(job, task, task + 1), num_clients))

    def arrive(self, name, task=0, job="hostile", participants=(), timeout_s=60.0, call=0, **vote):
        """Let a task arrive by a new call, unless the number of one is given."""
        who, call = Identity(job, task, task + 1), call or next(self.calls)
        return self.happen(Arrive(who, name, call, participants, timeout_s, **vote)).barrier

    def tick(self):
        return self.happen(Tick())


# --- steps ------------------------------------------------------------------------------------------------------------


def test_deadlines_of_many_barriers_are_judged_bit_by_bit():
    world = World()
    world.register(0)
    barriers = [world.arrive(str(number)) for number in range(1000)]
    world.register(0, 1, job="other", num_clients=2)
    other = world.arrive("b", job="other")
    world.tick()
    world.now += 60
    first = world.tick()
    assert not other.is_open, "the other job's deadline does not wait for the hostile job's"
    assert len(first.decided) <= rules.MAX_JUDGED
    num_ticks = 1
    while (effects := world.tick()).is_unfinished:
        num_ticks += 1
        assert len(effects.decided) <= rules.MAX_DUE
    assert num_ticks > 100
    assert not any(barrier.is_open for barrier in barriers)
    assert all(len(barrier.failure.missing) <= rules.MAX_NAMED for barrier in barriers)
    assert barriers[0].failure.message.endswith("and 99991 more")
    assert world.rules.memory.nbytes < 2 * memory.KEPT_BYTES


def test_silence_of_many_tasks_is_judged_bit_by_bit():
    world = World()
    world.tick()
    world.register(*range(1000))
    for number in range(10):
        world.arrive(str(number))
    while world.now < 170:
        world.now += 1.0
        states = [world.tick()]
        while states[-1].is_unfinished:
            states.append(world.tick())
        assert all(len(effects.log) <= 2 * rules.MAX_LATE + 10 for effects in states)
    assert len(world.rules.jobs["hostile"].tasks.by_state["LOST"]) == 1000


def test_a_goodbye_costs_the_same_however_many_clients_a_job_claims(monkeypatch):
    """Each of the barriers looks the leaver up, and no other client."""
    world = World()
    world.register(0, 1)
    for number in range(1000):
        world.arrive(str(number))
    looks, describe = [], descriptions.fates
    monkeypatch.setattr(descriptions, "fates", lambda job, gone, now: looks.extend(gone) or describe(job, gone, now))
    effects = world.happen(Leave(Identity("hostile", 1, 2)))
    assert len(effects.decided) == 1000
    assert looks == [1]


def test_others_get_turns_between_the_steps_of_much_work():
    async def work():
        order, todo = [], chores.Chores()
        todo.add("hostile", (order.append("hostile") for _ in range(100_000)))
        todo.add("other", (order.append("other") for _ in range(2 * chores.STEPS)))
        await todo.finish()
        assert todo.num_waiting("hostile") == 0
        return order

    order = asyncio.run(work())
    assert len(order) == 100_000 + 2 * chores.STEPS
    assert max(number for number, job in enumerate(order) if job == "other") < 10 * chores.STEPS


# --- answers ----------------------------------------------------------------------------------------------------------


def arrive(stub, who, number):
    """Arrive at a barrier whose name is a number, by a call of that number and one, as there is no call 0."""
    arrival = pb.ArriveRequest(task=who, name=f"{number}", call=number + 1, timeout_s=600, vote=pb.Vote(ok=True))
    stub.Arrive(arrival, timeout=10)


@pytest.fixture
def hostile():
    """A coordinator with a job of few clients that claims to have many, and waits at many barriers."""
    with ExitStack() as stack:
        server = stack.enter_context(running_server(heartbeat_timeout_s=60.0, metrics_port=0))
        channel = stack.enter_context(grpc.insecure_channel(f"127.0.0.1:{server.port}"))
        stub = pb_grpc.CoordinatorStub(channel)
        who = pb.TaskIdentity(job="hostile", task=0, incarnation=1)
        stub.Register(pb.RegisterRequest(task=who, num_clients=MANY, host="h" * 500), timeout=10)
        for number in range(300):
            arrive(stub, who, number)
        yield server, stub, who


def test_answers_about_a_large_job_are_small_and_cost_little(hostile, monkeypatch):
    server, stub, who = hostile
    touched = []
    describe = answers._task_status
    monkeypatch.setattr(answers, "_task_status", lambda job, n, now: touched.append(n) or describe(job, n, now))
    page = stub.GetJob(pb.GetJobRequest(job="hostile"), timeout=10)
    assert page.ByteSize() < MIB
    assert len(touched) <= answers.PAGE_ENTRIES
    end = pb.GetJobRequest(job="hostile", page_token=f"{MANY}.0")
    numbers = []
    while not numbers or end.page_token:
        page = stub.GetJob(end, timeout=10)
        assert page.ByteSize() < MIB
        numbers += [barrier.name for barrier in page.open_barriers]
        assert all(len(barrier.missing) == 1000 for barrier in page.open_barriers)
        assert all(barrier.num_missing == MANY - 1 for barrier in page.open_barriers)
        end.page_token = page.next_page_token
    assert numbers == [str(number) for number in range(300)]
    barrier_id = page.open_barriers[-1].barrier_id
    barrier = stub.GetBarrier(pb.GetBarrierRequest(job="hostile", barrier_id=barrier_id), timeout=10)
    assert list(barrier.barrier.missing) == list(range(1, MANY))
    assert barrier.ByteSize() < MIB
    waited = stub.Await(pb.AwaitRequest(task=who, barrier_id=barrier_id, max_wait_s=0), timeout=10)
    assert waited.ByteSize() < 4096
    assert waited.waiting_for.endswith("and 99991 more")
    for path in ("/", "/metrics"):
        with urllib.request.urlopen(f"http://127.0.0.1:{server.metrics_port}{path}", timeout=20) as answer:
            assert len(answer.read()) < MIB


@pytest.mark.parametrize("token", ["x", "1", "1.", ".1", "-1.0", "1.0.0", "9" * 40 + ".0"])
def test_page_token_of_our_own_making_is_refused(hostile, token):
    with pytest.raises(grpc.RpcError) as caught:
        hostile[1].GetJob(pb.GetJobRequest(job="hostile", page_token=token), timeout=10)
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT


def test_observer_turns_all_pages(monkeypatch):
    monkeypatch.setattr(answers, "PAGE_ENTRIES", 7)
    with server_in_thread() as port, grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = pb_grpc.CoordinatorStub(channel)
        for number in range(20):
            who = pb.TaskIdentity(job=f"job {number:02}", task=3, incarnation=1)
            stub.Register(pb.RegisterRequest(task=who, num_clients=50), timeout=10)
        for number in range(10):
            arrive(stub, who, number)
        client = StatusClient(f"127.0.0.1:{port}", PLAINTEXT)
        assert client.jobs() == [f"job {number:02}" for number in range(20)]
        job = client.job("job 19")
        client.close()
    assert [task.client for task in job.tasks] == list(range(50))
    assert job.tasks[3].state == "registered"
    assert [barrier.name for barrier in job.barriers] == [str(number) for number in range(10)]
    assert {barrier.num_missing for barrier in job.barriers} == {49}


# --- memory -----------------------------------------------------------------------------------------------------------


def traced(work):
    """Return how many bytes of memory some work leaves in use."""
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        kept = work()
        return tracemalloc.get_traced_memory()[0] - before, kept
    finally:
        tracemalloc.stop()


def test_what_is_counted_is_no_less_than_what_is_taken():
    def crowd():
        world = World()
        world.register(*range(3000))
        for number in range(300):
            world.arrive(f"barrier {number}", participants=tuple(range(2000)))
        for task in range(3000):
            world.arrive("everyone", task, payload=bytes(100))
        return world

    nbytes, world = traced(crowd)
    assert world.rules.memory.nbytes / 3 < nbytes < world.rules.memory.nbytes


def test_ten_thousand_jobs_are_small():
    def crowd():
        world = World()
        counted = metrics.Metrics(lambda: world.rules, "1", lambda: world.now)
        for number in range(1000):
            effects = world.happen(Register(Identity(f"a job of some name {number}", 0, 1), 1))
            for transition in effects.log:
                counted.note(transition)
        return world, counted

    nbytes, _ = traced(crowd)
    assert nbytes < 5000 * 1000


def test_verdicts_of_one_job_do_not_displace_those_of_another(monkeypatch):
    monkeypatch.setattr(memory, "KEPT_VERDICTS", 100)
    world = World()
    world.register(0, job="other", num_clients=1)
    kept = world.arrive("kept", job="other", call=7)
    world.register(0, num_clients=1)
    for number in range(1000):
        world.arrive(str(number))
    assert len(world.rules.jobs["hostile"].verdicts) == 100
    assert world.arrive("kept", job="other", call=7) is kept


def test_verdicts_are_bounded_in_bytes(monkeypatch):
    monkeypatch.setattr(memory, "KEPT_BYTES", 1 * MIB)
    world = World()
    world.register(0)
    for number in range(1000):
        world.arrive(str(number), participants=tuple(range(1000)), ok=False, reason="r" * 4000)
        assert world.rules.jobs["hostile"].verdict_nbytes <= MIB


def test_what_does_not_fit_is_refused():
    world = World(nbytes=4 * MIB)
    world.register(0, 1)
    named = tuple(range(10_000))
    for number in range(6):
        world.arrive(str(number), participants=named)
    with pytest.raises(
        rules.LimitError, match=r"barrier '7' of job 'hostile' .* has \d+ bytes, .* its quota is 4194304"
    ):
        world.arrive("7", participants=named)
    for number in range(100):
        world.arrive(f"small {number}", ok=False)
    world.register(0, 1, job="other", num_clients=2)
    assert world.arrive("b", 0, job="other").is_open
    assert world.arrive("b", 1, job="other").is_passed


def test_an_arrival_that_does_not_fit_is_told_to_all():
    nbytes = memory.JOB_NBYTES + 100 * memory.TASK_NBYTES + 20_000
    world = World(nbytes=nbytes)
    world.register(*range(100), num_clients=100)
    barrier = world.arrive("b", 0)
    for task in range(1, 100):
        if not barrier.is_open:
            break
        world.arrive("b", task, payload=bytes(4096))
    assert barrier.failure.code == "CoordinationError"
    assert "no room for" in barrier.failure.message
    assert world.rules.jobs["hostile"].nbytes < nbytes


def test_a_call_that_is_repeated_takes_no_more_room():
    """Also if it says something else then; that is not taken."""
    world = World()
    world.register(0)
    first, nbytes = world.arrive("b", call=7, payload=b"x"), world.rules.memory.nbytes
    assert world.arrive("b", call=7, payload=bytes(4096)) is first
    assert world.rules.memory.nbytes == nbytes
    assert first.payloads == {0: b"x"}


def test_all_jobs_together_are_bounded(monkeypatch):
    monkeypatch.setattr(memory, "ALL_BYTES", 1 * MIB)
    world = World()
    num_jobs = MIB // (memory.JOB_NBYTES + memory.TASK_NBYTES)
    for number in range(num_jobs):
        world.register(0, job=f"job {number}", num_clients=1)
        if number < num_jobs / 2:
            world.arrive("b", job=f"job {number}")
    assert world.rules.memory.nbytes <= MIB
    with pytest.raises(errors.CoordinationError, match=r"all have \d+ of 1048576; use fewer clients"):
        world.register(0, job="one more", num_clients=1)
    assert len(world.rules.memory.decided) <= 1, "verdicts make room for all other state"
    assert world.rules.memory.nbytes <= MIB


# --- the log ----------------------------------------------------------------------------------------------------------


def codes_of(calls):
    codes = set()
    for call in calls:
        with pytest.raises(grpc.RpcError) as caught:
            call()
        codes.add(caught.value.code())
    return codes


def test_nonsense_costs_little_log(caplog):
    caplog.set_level(logging.INFO)
    nonsense, service = b"\xff\xff\xff", "/dtckpt.coordinator.v1.Coordinator"
    with server_in_thread(reflection=True) as port, grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        single = [channel.unary_unary(f"{service}/{name}") for name in ("Heartbeat", "GetJob", "ListJobs")]
        single.append(channel.unary_unary("/grpc.health.v1.Health/Check"))
        watch = channel.unary_stream("/grpc.health.v1.Health/Watch")
        talks = [
            channel.stream_stream(name)
            for name in (f"{service}/HeartbeatStream", "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")
        ]
        caplog.clear()
        codes = codes_of(
            [
                *(lambda call=call: call(nonsense, timeout=10) for call in single * 10),
                *(lambda: list(watch(nonsense, timeout=10)) for _ in range(10)),
                *(lambda call=call: list(call(iter([nonsense]), timeout=10)) for call in talks * 10),
            ]
        )
        assert codes == {grpc.StatusCode.INVALID_ARGUMENT}
        assert len(caplog.records) <= 5, "one a second"
        unknown = channel.unary_unary("/grpc.health.v1.Health/List")
        assert codes_of([lambda: unknown(b"", timeout=10)] * 10) == {grpc.StatusCode.UNIMPLEMENTED}
        assert len(caplog.records) <= 5


def test_calls_without_a_token_cost_little_log(caplog):
    tokens = Tokens.parse("job " + 20 * "t")
    with server_in_thread(tokens=tokens) as port, grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = pb_grpc.CoordinatorStub(channel)
        caplog.clear()
        calls = [lambda: stub.GetJob(pb.GetJobRequest(job="job"), timeout=10)] * 50
        assert codes_of(calls) == {grpc.StatusCode.UNAUTHENTICATED}
        assert len(caplog.records) <= 5


# --- pages ------------------------------------------------------------------------------------------------------------


def connect(server):
    return socket.create_connection(("127.0.0.1", server.metrics_port), timeout=20)


def scrape(server):
    with urllib.request.urlopen(f"http://127.0.0.1:{server.metrics_port}/metrics", timeout=20) as answer:
        return answer.read()


def test_slow_clients_do_not_keep_others_from_the_metrics():
    with running_server(metrics_port=0) as server:
        slow = [connect(server) for _ in range(2 * status_page.MAX_CONNECTIONS)]
        for connection in slow:
            connection.settimeout(20)
            connection.send(b"GET /metrics HTTP/1.0\r\nX: ")
        for _ in range(20):
            assert scrape(server)
        assert slow[0].recv(1) == b"", "the oldest are cut off"
        for connection in slow:
            connection.close()


def test_a_request_has_one_deadline_however_it_trickles(monkeypatch):
    monkeypatch.setattr(status_page, "REQUEST_TIMEOUT_S", 0.2)
    with running_server(metrics_port=0) as server, connect(server) as slow:

        def is_cut_off():
            try:
                slow.send(b"x")
            except OSError:
                return True
            return False

        wait_until(is_cut_off)
        assert scrape(server)


def test_metrics_of_many_jobs_are_small():
    world = World()
    counted = metrics.Metrics(lambda: world.rules, "1", lambda: world.now)
    for number in range(2000):
        job = f"{number}" + '"' * 200
        for event in (
            Register(Identity(job, 0, 1), 1),
            *(
                Arrive(Identity(job, 0, 1), name, call, (), 60.0)
                for call, name in enumerate(("save/begin", "save/written", "x"), 1)
            ),
        ):
            for transition in world.happen(event).log:
                counted.note(transition)
    text = metrics.prometheus.generate_latest(asyncio.run(counted.snapshot()))
    assert len(text) < MIB
    values = [line.rpartition(" ") for line in text.decode().splitlines() if "_barriers_total{" in line]
    assert sum(float(value) for _, _, value in values) == 3 * 2000, "what has no room is counted together"
    states = [line.rpartition(" ") for line in text.decode().splitlines() if 'state="REGISTERED"' in line]
    assert sum(float(value) for _, _, value in states) == 2000


def test_status_page_of_long_names_is_small():
    world = World()
    for number in range(60):
        job = f"{number}" + "<" * 250
        for task in range(60):
            world.happen(Register(Identity(job, task, task + 1), MANY, host='"' * 128))
            world.arrive(f"{task}" + "&" * 250, task, job=job)
    page = status_page.status_page(world.rules, world.now).encode()
    assert MIB / 2 < len(page) < MIB
    assert b"more jobs" in page
