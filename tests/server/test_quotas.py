"""Tenants: quotas count by owner, and the calls of one owner never change the answers to another owner."""

import asyncio
import random
import time
from dataclasses import dataclass, field

import grpc
import pytest
from dtckpt_server import memory, outgoing_answers, quotas, turns
from dtckpt_server.events import Arrive, Cancel, Heartbeat, Identity, Leave, Register, TaskReport, Tick
from dtckpt_server.outgoing_answers import OutgoingAnswers
from dtckpt_server.quotas import BusyError, Quotas, Rates, Shares
from dtckpt_server.rules import Rules, apply
from dtckpt_server.tokens import Tokens
from dtckpt_server.turns import Turns
from support.client_calls import wait_until
from support.coordinators import running_server, server_in_thread
from support.shares import amount

from dtckpt import errors
from dtckpt._proto import coordinator_pb2 as pb
from dtckpt._proto import coordinator_pb2_grpc as pb_grpc

MIB = 1 << 20
EVIL, GOOD = "e" * 20, "g" * 20
TOKENS = f"evil {EVIL}\ngood {GOOD}\n"


def bearer(token):
    return (("authorization", f"Bearer {token}"),)


def register(stub, job, token=None, task=0, num_clients=1):
    who = pb.TaskIdentity(job=job, task=task, incarnation=task + 1)
    stub.Register(pb.RegisterRequest(task=who, num_clients=num_clients), timeout=20, metadata=token and bearer(token))


def refusal_of(call, *arguments, **options):
    with pytest.raises(grpc.RpcError) as caught:
        call(*arguments, **options)
    return caught.value


# --- names ------------------------------------------------------------------------------------------------------------


def test_a_token_does_not_fill_the_table_of_jobs():
    with (
        server_in_thread(tokens=Tokens.parse(TOKENS)) as port,
        grpc.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        stub = pb_grpc.CoordinatorStub(channel)
        codes = set()
        for number in range(amount(1_000, 10_000)):
            try:
                register(stub, f"evil#x{number}", EVIL)
            except grpc.RpcError as error:
                codes.add(error.code())
        register(stub, "good", GOOD)
        assert codes == {grpc.StatusCode.PERMISSION_DENIED}
        register(stub, "evil", EVIL)
        register(stub, "evil#durable-0123456789abcdef", EVIL)
        for name in ("#", "#durable-", "#durable-xyz", "#durable-" + 17 * "0", "#loader", "#durable-1#durable-2"):
            error = refusal_of(register, stub, "evil" + name, EVIL)
            assert error.code() == grpc.StatusCode.PERMISSION_DENIED
            assert "#durable- or #command- and a hexadecimal number behind it" in error.details()


def test_jobs_of_one_owner_do_not_fill_the_table():
    world = World()
    refusals = [world.tell(Register(Identity(f"evil#x{number}", 0, 1), 1)).refusal for number in range(10_000)]
    assert world.tell(Register(Identity("good", 0, 1), 1)).refusal is None
    told = str(refusals[-1])
    assert "owner 'evil' has 64 jobs, wants 1 more, and its quota is 64 (--max-owner-jobs" in told
    assert "let clients of jobs that have ended say goodbye" in told
    assert sum(refusal is None for refusal in refusals) == 64


def test_jobs_that_are_over_make_room_for_those_of_their_owner():
    """A job that restarts every minute makes a new job beside it each time."""
    world = World(jobs=3)
    for number in range(20):
        assert world.tell(Register(Identity(f"good#durable-{number}", 0, 1), 1)).refusal is None
        world.tell(Leave(Identity(f"good#durable-{number}", 0, 1)))
    assert len(world.rules.jobs) == 3
    assert list(world.rules.memory.owners) == ["good"]


# --- shares -----------------------------------------------------------------------------------------------------------


def taken(shares, owner):
    """Let an owner take all that it gets."""
    room = shares.room(owner)
    shares.note(owner, room)
    return room


def test_an_owner_always_gets_its_share():
    shares = Shares("things", 1000, 1000, "--option", cure="take fewer")
    shares.reserve_for(20)
    assert shares.share == 25
    assert taken(shares, "first") == 525
    assert [taken(shares, f"owner {number}") for number in range(19)] == 19 * [25]
    with pytest.raises(quotas.LimitError, match=r"owner 'first' has 525 things, wants 1 more, and more would be taken"):
        shares.check("first", 1, "a thing")
    shares.note("first", -525)
    assert taken(shares, "owner 3") == 500


def test_an_owner_never_has_more_than_its_quota():
    shares = Shares("things", 7, 1000, "--option", cure="take fewer")
    assert taken(shares, "only") == 7
    with pytest.raises(quotas.LimitError, match=r"its quota is 7 \(--option of dtckpt-coordinator serve\); take fewer"):
        shares.check("only", 1, "a thing")


def test_requests_a_second():
    rates = Rates(8)
    assert [rates.wait_s("evil", 0.0) for _ in range(25)] == 25 * [0.0]
    assert rates.wait_s("evil", 0.0) == 0.125
    assert rates.wait_s("good", 0.0) == 0.0
    assert rates.wait_s("evil", 0.125) == 0.0
    for number in range(1000):
        rates.wait_s(f"somebody {number}", float(number))
    assert len(rates._due) < 10


def test_verdicts_of_who_has_most_make_room(monkeypatch):
    monkeypatch.setattr(memory, "ALL_BYTES", MIB)
    world = World()
    for number in range(10):
        world.meet("good", number)
    for number in range(1000):
        world.meet("evil", number)
    assert len(world.rules.jobs["good"].verdicts) == 10
    assert 100 < len(world.rules.jobs["evil"].verdicts) < 400
    assert world.rules.memory.nbytes <= MIB


# --- histories --------------------------------------------------------------------------------------------------------


class World:
    """Rules and a clock that the test sets."""

    def __init__(self, **limits):
        self.now = 100.0
        self.rules = Rules(10.0, 0xC0, Quotas(**limits))
        self.num_calls = 0

    def tell(self, event):
        self.rules, effects = apply(self.rules, event, self.now)
        return effects

    def tick(self):
        while self.tell(Tick()).is_unfinished:
            pass

    def meet(self, job, number):
        """Let the only client of a job pass a barrier."""
        who = Identity(job, 0, 1)
        self.tell(Register(who, 1))
        self.num_calls += 1
        assert self.tell(Arrive(who, f"b{number}", self.num_calls, (), 60.0)).barrier.is_passed


@dataclass
class Victim:
    """A job in one world, and the answers that its clients get; barriers are told apart by their order."""

    world: World
    known: dict = field(default_factory=dict)
    answers: list = field(default_factory=list)

    def tell(self, event):
        effects = self.world.tell(event)
        barrier = effects.barrier
        self.answers.append(
            (
                repr(effects.refusal),
                barrier and self.known.setdefault(barrier.barrier_id, len(self.known)),
                barrier and (barrier.generation, barrier.is_open, barrier.failure, sorted(barrier.payloads.items())),
                [transition.text for transition in effects.log],
            )
        )

    def id_of(self, index):
        return next((barrier_id for barrier_id, at in self.known.items() if at == index), "")

    def look(self):
        """Note what its clients would be told if they asked."""
        self.world.tick()
        kept = self.world.rules.memory.barriers
        found = [(at, kept.get(barrier_id)) for barrier_id, at in self.known.items()]
        self.answers.append([(at, each and (each.is_open, each.failure, len(each.payloads))) for at, each in found])
        job = self.world.rules.jobs.get("good")
        self.answers.append(job and [(task.number, task.state) for task in job.tasks.values()])


def peaceful(draw, calls):
    """Return a step of the victim: a function of its clients' view of one world."""
    task, life = draw.randrange(3), draw.choice((1, 1, 1, 1, 2))
    who = Identity("good", task, 10 * task + life)
    kind, name, size = draw.random(), draw.choice("ab"), draw.randrange(100)
    if kind < 0.3:
        return lambda victim: victim.tell(Register(who, 3))
    if kind < 0.45:
        return lambda victim: victim.tell(Heartbeat(who))
    if kind < 0.5:
        return lambda victim: victim.tell(Leave(who))
    operation = draw.choice((None, None, "", draw.randrange(4)))
    calls[who] = call = calls.get(who, 0) + (draw.random() < 0.9)
    ok, timeout_s = draw.random() < 0.9, draw.choice((2.0, 30.0))

    def arrive(victim):
        began = victim.id_of(operation) if isinstance(operation, int) else operation
        victim.tell(Arrive(who, name, call, (), timeout_s, ok=ok, payload=bytes(size), operation=began))

    return arrive


def hostile(draw, world, seen):
    """Let the hostile owner do something, often many times."""
    job = draw.choice(("evil", f"evil#durable-{draw.randrange(100):x}", f"evil#x{draw.randrange(1000)}"))
    who = Identity(job, draw.randrange(5), draw.randrange(1, 4))
    many, kind = draw.choice((1, 10, 300)), draw.random()
    if kind < 0.2:
        for _ in range(many):
            world.tell(Register(Identity(f"evil#x{draw.randrange(100_000)}", 0, 1), draw.choice((1, 100_000))))
    elif kind < 0.4:
        world.tell(Register(who, 5, draw.randrange(3), "h" * 100))
        for number in range(many):
            world.tell(Register(Identity(job, number, 1), 100_000))
    elif kind < 0.7:
        world.tell(Register(who, 5))
        named = tuple(range(draw.choice((0, 5, 2000))))
        for _ in range(many):
            world.num_calls += 1
            options = {"payload": bytes(draw.choice((0, 4096))), "operation": draw.choice((None, "", *seen))}
            world.tell(Arrive(who, f"b{draw.randrange(10_000)}", world.num_calls, named, 6e5, **options))
    elif kind < 0.8:
        world.tell(Leave(who))
    elif kind < 0.9:
        for barrier_id in seen:
            world.tell(Cancel(who, barrier_id, "because"))
    else:
        for number in range(many):
            world.tell(Heartbeat(who, report=TaskReport(draw.choice(("", *seen)), number)))


def history(seed):
    """Run one history of the victim in two worlds, in one of which there is a neighbour; return both's answers."""
    draw, calls = random.Random(seed), {}
    alone, beside = Victim(World()), Victim(World(jobs=1000, barriers=10_000, nbytes=64 * MIB))
    refused = False
    for _ in range(60):
        if draw.random() < 0.6:
            hostile(draw, beside.world, list(beside.known))
        refused |= beside.world.rules.memory._needed.room("evil") < 5000
        step = peaceful(draw, calls)
        for victim in (alone, beside):
            step(victim)
        if draw.random() < 0.5:
            pause_s = draw.choice((0.1, 0.5, 3.0, 6.0))
            for victim in (alone, beside):
                victim.look()
                victim.world.now += pause_s
                victim.look()
        assert beside.world.rules.memory.nbytes <= memory.ALL_BYTES + 100_000
    return alone.answers, beside.answers, refused


def test_no_history_of_one_owner_changes_the_answers_of_another(monkeypatch):
    """The victim stays within its share; the neighbour, which has no quota, takes all that it gets."""
    for limit, value in (("ALL_BYTES", 4 * MIB), ("MAX_JOBS", 40), ("MAX_BARRIERS", 1000)):
        monkeypatch.setattr(memory, limit, value)
    num_full = 0
    for seed in range(amount(20, 3000)):
        alone, beside, is_full = history(seed)
        assert beside == alone, f"seed {seed}"
        num_full += is_full
    assert num_full > 1, "the neighbour hardly ever took all"


# --- turns ------------------------------------------------------------------------------------------------------------


def test_calls_of_owners_take_turns():
    async def work():
        order = []
        queue = Turns(Quotas(), 60_000, time.monotonic)

        async def call(owner):
            await queue.take(owner)
            order.append(owner)

        with queue.stream("good"):
            evil = [asyncio.ensure_future(call("evil")) for _ in range(1000)]
            await asyncio.sleep(0)
            await asyncio.gather(*(call("good") for _ in range(5)), *evil)
        return order

    order = asyncio.run(work())
    last = max(at for at, owner in enumerate(order) if owner == "good")
    assert last < 12
    assert len(order) == 1005


def test_calls_that_end_while_they_wait_are_passed_over():
    async def work():
        queue = Turns(Quotas(), 60_000, time.monotonic)
        with queue.stream("good"):
            waiting = [asyncio.ensure_future(queue.take("evil")) for _ in range(100)]
            await asyncio.sleep(0)
            for call in waiting[50:]:
                call.cancel()
            await asyncio.wait_for(asyncio.gather(*waiting[:50]), 10)
            await asyncio.wait_for(queue.take("good"), 10)
        return len(queue._queues)

    assert asyncio.run(work()) == 0


def test_requests_beyond_the_rate_are_held_back_and_refused(monkeypatch):
    monkeypatch.setattr(turns, "MAX_LATE_S", 0.02)
    monkeypatch.setattr(quotas, "BURST_S", 1.0)

    async def work():
        queue = Turns(Quotas(requests_per_s=8), 60_000, lambda: 0.0)
        for _ in range(9):
            await queue.take("evil")
        await queue.take("good")
        with pytest.raises(BusyError, match=r"owner 'evil' makes too many .* its quota is 8 a second .*; repeat later"):
            await queue.take("evil")

    asyncio.run(work())


# --- at the server ----------------------------------------------------------------------------------------------------


@pytest.fixture
def small():
    """A coordinator with small quotas, and a way to call it."""
    limits = Quotas(jobs=2, barriers=3, nbytes=MIB, streams=2, calls=2, requests_per_s=10_000)
    with (
        running_server(heartbeat_timeout_s=60.0, quotas=limits) as server,
        grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel,
    ):
        yield server, pb_grpc.CoordinatorStub(channel)


def arrival(job, name, max_wait_s=0.0, payload=b"", call=None):
    who = pb.TaskIdentity(job=job, task=0, incarnation=1)
    vote = pb.Vote(ok=True, payload=payload)
    call = call or 1 + int(name)
    return pb.ArriveRequest(task=who, name=name, call=call, timeout_s=600, vote=vote, max_wait_s=max_wait_s)


def counted(server, quota):
    name, labels = "dtckpt_coordinator_quota_refusals_total", {"quota": quota}
    return server._service.metrics.registry.get_sample_value(name, labels) or 0


def test_each_quota_refuses_and_is_counted(small):
    server, stub = small
    register(stub, "evil", num_clients=2)
    register(stub, "evil#durable-1")
    error = refusal_of(register, stub, "evil#durable-2")
    assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "owner 'evil' has 2 jobs, wants 1 more, and its quota is 2 (--max-owner-jobs" in error.details()
    for number in range(3):
        stub.Arrive(arrival("evil", str(number)), timeout=10)
    error = refusal_of(stub.Arrive, arrival("evil", "3"), timeout=10)
    assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "owner 'evil' has 3 open barriers" in error.details()
    waiting = [stub.Arrive.future(arrival("evil", str(number), 20.0), timeout=30) for number in range(2)]
    while server._service._turns._calls.of("evil") < 2:
        time.sleep(0.01)
    error = refusal_of(stub.Arrive, arrival("evil", "2"), timeout=10)
    assert error.code() == grpc.StatusCode.UNAVAILABLE, "clients repeat the call"
    assert "owner 'evil' has 2 calls under way" in error.details()
    register(stub, "good")
    for call in waiting:
        call.cancel()
    assert [counted(server, quota) for quota in ("jobs", "open_barriers", "calls_under_way", "bytes")] == [1, 1, 1, 0]


def test_streams_of_one_owner_are_limited(small):
    server, stub = small
    for job in ("evil", "good"):
        register(stub, job, num_clients=5)
    for task in range(1, 5):
        register(stub, "evil", task=task, num_clients=5)

    def stream(job, task):
        over = asyncio.Event()
        who = pb.TaskIdentity(job=job, task=task, incarnation=task + 1)

        def beats():
            yield pb.HeartbeatStreamRequest(task=who, sequence=1)
            while not over.is_set():
                time.sleep(0.01)

        answers = stub.HeartbeatStream(beats(), timeout=30)
        answers.add_callback(over.set)
        return answers

    open_streams = [stream("evil", task) for task in range(2)]
    assert [next(answers).sequence for answers in open_streams] == [1, 1]
    error = refusal_of(next, stream("evil", 2))
    assert error.code() == grpc.StatusCode.UNAVAILABLE
    assert "owner 'evil' has 2 heartbeat streams, wants 1 more, and its quota is 2" in error.details()
    good = stream("good", 0)
    assert next(good).sequence == 1
    assert counted(server, "heartbeat_streams") == 1
    for answers in (*open_streams, good):
        answers.cancel()


def test_answers_that_nobody_reads_are_bounded_for_each_owner(monkeypatch):
    monkeypatch.setattr(outgoing_answers, "MAX_NBYTES", 100)

    async def work():
        sending = OutgoingAnswers()
        await sending.begin("evil", 80)
        later = [asyncio.ensure_future(sending.begin("evil", nbytes)) for nbytes in (80, 10, 500)]
        await asyncio.wait_for(sending.begin("good", 80), 10)
        await asyncio.sleep(0)
        assert sending.nbytes_of("evil") == 80, "a small one does not overtake"
        later[0].cancel()
        await asyncio.sleep(0.01)
        assert later[1].done()
        assert sending.nbytes_of("evil") == 90
        sending.end("evil", 80)
        sending.end("evil", 10)
        await asyncio.wait_for(later[2], 10)
        assert sending.nbytes_of("evil") == 500, "a large one goes alone"
        sending.end("evil", 500)
        sending.end("good", 80)
        return sending._nbytes, sending._waiting

    assert asyncio.run(work()) == ({}, {})


@pytest.mark.parametrize("how", ["Arrive", "Await", "GetJob", "GetBarrier", "ListJobs"])
def test_large_answers_wait_for_those_before(how, monkeypatch):
    """A client that does not read its answers takes room from its own owner only."""
    monkeypatch.setattr(outgoing_answers, "MAX_NBYTES", 1)
    with (
        running_server(heartbeat_timeout_s=60.0, tokens=Tokens.parse(TOKENS)) as server,
        grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel,
    ):
        stub = pb_grpc.CoordinatorStub(channel)
        for job, token in (("evil", EVIL), ("good", GOOD)):
            register(stub, job, token)
        server._service._outgoing._nbytes["evil"] = 10  # as if a client did not read

        def ask(job, token, timeout):
            who = pb.TaskIdentity(job=job, task=0, incarnation=1)
            metadata, vote = bearer(token), pb.Vote(ok=True, payload=b"x")
            arrive = pb.ArriveRequest(task=who, name="b", call=1, timeout_s=60, vote=vote, collect=how == "Arrive")
            found = stub.Arrive(arrive, timeout=timeout, metadata=metadata).barrier_id
            request = {
                "Await": pb.AwaitRequest(task=who, barrier_id=found, collect=True),
                "GetJob": pb.GetJobRequest(job=job),
                "GetBarrier": pb.GetBarrierRequest(job=job, barrier_id=found),
                "ListJobs": pb.ListJobsRequest(),
            }
            if how != "Arrive":
                getattr(stub, how)(request[how], timeout=timeout, metadata=metadata)

        ask("good", GOOD, 10)
        assert refusal_of(ask, "evil", EVIL, 0.5).code() == grpc.StatusCode.DEADLINE_EXCEEDED
        ask("good", GOOD, 10)
        wait_until(lambda: not server._service._outgoing.nbytes_of("good"))


def test_errors_of_quotas_reach_clients_as_classes():
    assert issubclass(quotas.LimitError, errors.CoordinationError)
    assert issubclass(BusyError, errors.CoordinatorUnavailableError)
