"""Feeds through a coordinator: publish, lease, serve on, restart, and what tokens allow."""

import secrets
import threading
import time

import pytest
from dtckpt_server.tokens import Tokens
from support.client_calls import wait_until
from support.coordinators import ServerProcess, running_server, server_process

from dtckpt import errors
from dtckpt._proto import feeds_pb2
from dtckpt.coordination.api import Member
from dtckpt.coordination.feeds.client import FeedClient
from dtckpt.coordination.feeds.events import APPLIED, FAILED, Want
from dtckpt.coordination.feeds.rules import FeedLimitError
from dtckpt.coordination.grpc_client import GrpcCoordination
from dtckpt.coordination.grpc_credentials import Access

TOKENS = """
trainer trainer-token-0123456789
engine engine-token-0123456789 reads=policy
judge judge-token-01234567890
"""
LEASE_S = 8.0
"""Where leases must go on: longer than a coordinator takes to start on a busy machine."""


class Job:
    """The clients of one job, each with its connection to the coordinator."""

    def __init__(self, port, name, num_clients=1, attempt=0, access=None):
        options = {} if access is None else {"access": access}
        self.coordinations = [
            GrpcCoordination(
                f"127.0.0.1:{port}",
                Member(name, client, num_clients, secrets.randbits(60), attempt),
                heartbeat_timeout_s=1.0,
                **options,
            )
            for client in range(num_clients)
        ]
        self.clients = []
        for coordination in self.coordinations:
            coordination.register()
            self.clients.append(FeedClient(coordination, timeout_s=20.0))

    def publish(self, step, feed="policy", number=0):
        """Publish a version whole, and return it."""
        numbers = [client.open(feed) for client in self.clients]
        number = number or numbers[0]
        for client in self.clients:
            tree = b"tree of %d" % step
            client.announce(feed, number, step=step, num_parts=len(self.clients), tree_digest=tree, timeout_s=30.0)
        for rank, client in enumerate(self.clients):
            version = client.put_part(feed, number, endpoint=b"tcp://%d" % rank, digest=b"%d" % rank, nbytes=8)
        return version

    def kill(self):
        """Stop as a killed process does: silently."""
        for client, coordination in zip(self.clients, self.coordinations, strict=True):
            client.close()
            coordination.abandon("killed")

    def close(self):
        for client, coordination in zip(self.clients, self.coordinations, strict=True):
            client.close()
            coordination.leave()


@pytest.fixture
def jobs():
    """Makes jobs, and ends them."""
    made = []

    def make(*args, **options):
        made.append(Job(*args, **options))
        return made[-1]

    yield make
    for job in made:
        job.close()


@pytest.fixture(scope="module")
def port():
    with running_server(heartbeat_timeout_s=1.0) as server:
        yield server.port


@pytest.fixture
def long_port():
    with running_server(heartbeat_timeout_s=LEASE_S) as server:
        yield server.port


@pytest.fixture
def feed():
    return f"feed-{secrets.token_hex(4)}"


def name(kind):
    return f"{kind}-{secrets.token_hex(4)}"


def test_version_is_readable_with_its_last_part(port, jobs, feed):
    trainer, engine = jobs(port, name("trainer"), 2), jobs(port, name("engine"))
    with pytest.raises(errors.VersionTimeoutError, match=f"no job publishes feed '{feed}'"):
        engine.clients[0].subscribe(feed, timeout_s=0.0)
    first, second = trainer.clients
    number = first.open(feed)
    second.open(feed)
    for client in trainer.clients:
        client.announce(feed, number, step=7, num_parts=2, tree_digest=b"t", timeout_s=30.0)
    assert first.put_part(feed, number, endpoint=b"a", digest=b"x", nbytes=3).phase == "PUBLISHING"
    with pytest.raises(errors.VersionTimeoutError, match=rf"version {number} \(step 7\) has 1 of 2 parts"):
        engine.clients[0].subscribe(feed, timeout_s=0.0)
    leases = []
    waiting = threading.Thread(target=lambda: leases.append(engine.clients[0].subscribe(feed, timeout_s=20.0)))
    waiting.start()
    assert second.put_part(feed, number, endpoint=b"b", digest=b"y", nbytes=4).phase == "READABLE"
    waiting.join(5.0)  # far less than the longest wait: the waiting call is woken
    (lease,) = leases
    assert (lease.number, lease.step, lease.tree_digest, lease.is_rewound) == (number, 7, b"t", False)
    assert [(part.client, part.endpoint, part.digest, part.nbytes) for part in lease.parts] == [
        (0, b"a", b"x", 3),
        (1, b"b", b"y", 4),
    ]


def test_parts_must_agree(port, jobs, feed):
    trainer = jobs(port, name("trainer"), 2)
    number = trainer.publish(3, feed).number
    first = trainer.clients[0]
    assert first.put_part(feed, number, endpoint=b"tcp://0", digest=b"0", nbytes=8).phase == "READABLE"
    with pytest.raises(errors.FeedConflictError, match=r"part 0 of version \d+ .* was put with another content"):
        first.put_part(feed, number, endpoint=b"tcp://0", digest=b"other", nbytes=8)
    with pytest.raises(errors.FeedConflictError, match=r"was announced differently: client 0 .* says step 4"):
        first.announce(feed, number, step=4, num_parts=2, tree_digest=b"tree of 3", timeout_s=30.0)
    with pytest.raises(errors.ConfigError, match="announce it first"):
        first.put_part(feed, number + 9, endpoint=b"", digest=b"", nbytes=0)


def test_leases_hold_the_memory(long_port, jobs, feed):
    trainer, engine = jobs(long_port, name("trainer"), 2), jobs(long_port, "engine-of-" + feed, 2)
    version = trainer.publish(1, feed)
    lease = engine.clients[0].subscribe(feed, timeout_s=20.0)
    joined = engine.clients[1].subscribe(feed, lease_id=lease.lease_id, want=Want(number=lease.number), timeout_s=20.0)
    assert (joined.number, joined.parts) == (lease.number, lease.parts)
    publisher = trainer.clients[0]
    with pytest.raises(errors.FeedConflictError, match="READABLE; expected to free it after it is retired"):
        publisher.withdraw(feed, version.number)
    assert publisher.retire(feed, version.number).phase == "RETIRING"
    with pytest.raises(errors.VersionGoneError, match="is retired"):
        engine.clients[0].subscribe(feed, want=Want(number=version.number), timeout_s=20.0)
    engine.clients[0].done(lease, APPLIED)
    with pytest.raises(errors.VersionLeasedError, match=f"is leased by 'engine-of-{feed}'; its parts must stay"):
        publisher.withdraw(feed, version.number)
    time.sleep(1.1 * LEASE_S)  # the other client of the group renews it
    with pytest.raises(errors.VersionLeasedError):
        publisher.withdraw(feed, version.number)
    joined.raise_if_over()
    engine.clients[1].done(joined, FAILED)
    for client in trainer.clients:
        phase = client.withdraw(feed, version.number).phase
    assert phase == "RELEASED"
    (status,) = [each for each in publisher.list() if each.feed == feed]
    assert [(each.reader, each.outcome) for each in status.latest] == [(f"engine-of-{feed}", "failed")]


def test_lease_that_is_asked_for_again_is_the_one_that_is_renewed(port, jobs, feed):
    trainer, engine = jobs(port, name("trainer")), jobs(port, name("engine"))
    trainer.publish(1, feed)
    (reader,) = engine.clients
    lease = reader.subscribe(feed, timeout_s=20.0)
    again = [
        reader.subscribe(feed, want=Want(number=lease.number), lease_id=lease.lease_id, timeout_s=20.0) for _ in "12"
    ]
    ends_at = lease.ends_at
    wait_until(lambda: lease.ends_at > ends_at)
    assert all(each is lease for each in again)
    lease.raise_if_over()


def test_lease_of_a_killed_reader_ends(port, jobs, feed):
    trainer, engine = jobs(port, name("trainer")), jobs(port, name("engine"))
    version = trainer.publish(1, feed)
    engine.clients[0].subscribe(feed, timeout_s=20.0)
    trainer.clients[0].retire(feed, version.number)
    with pytest.raises(errors.VersionLeasedError):
        trainer.clients[0].withdraw(feed, version.number)
    engine.kill()

    def is_released():
        try:
            return trainer.clients[0].withdraw(feed, version.number).phase == "RELEASED"
        except errors.VersionLeasedError:
            return False

    wait_until(is_released)


def test_newest_versions_stay_and_older_ones_retire(port, jobs, feed):
    trainer, engine = jobs(port, name("trainer")), jobs(port, name("engine"))
    numbers = [trainer.publish(step, feed).number for step in (1, 2, 3)]
    assert numbers == sorted(set(numbers))
    (reader,) = engine.clients
    assert reader.subscribe(feed, timeout_s=20.0).number == numbers[-1]
    assert reader.subscribe(feed, want=Want(step=2), timeout_s=20.0).number == numbers[1]
    with pytest.raises(errors.VersionGoneError):
        reader.subscribe(feed, want=Want(number=numbers[0]), timeout_s=20.0)
    with pytest.raises(errors.VersionTimeoutError, match=f"the newest version after {numbers[-1]}"):
        reader.subscribe(feed, want=Want(newer_than=numbers[-1]), timeout_s=0.0)


def test_step_that_goes_back_is_marked(port, jobs, feed):
    trainer_name = name("trainer")
    trainer, engine = jobs(port, trainer_name), jobs(port, name("engine"))
    before = trainer.publish(100, feed)
    trainer.kill()
    again = jobs(port, trainer_name, attempt=1)
    rewound = again.publish(90, feed)
    assert rewound.number > before.number
    assert rewound.is_rewound
    (reader,) = engine.clients
    lease = reader.subscribe(feed, timeout_s=20.0)
    assert (lease.number, lease.is_rewound, lease.highest_step) == (rewound.number, True, 100)
    with pytest.raises(errors.VersionTimeoutError, match="that does not go back"):
        reader.subscribe(feed, want=Want(allow_rewound=False), timeout_s=0.0)
    trainer.coordinations[0]._abandoned = ""
    with pytest.raises(errors.FencedError):
        trainer.publish(101, feed)


def test_two_publishers_of_one_name(port, jobs, feed):
    trainer, rival = jobs(port, "trainer-of-" + feed), jobs(port, name("rival"))
    version = trainer.publish(1, feed)
    with pytest.raises(errors.FencedError, match=f"is published by job 'trainer-of-{feed}', attempt 0, which is alive"):
        rival.publish(5, feed)
    trainer.close()
    taken = rival.publish(5, feed)
    assert (taken.phase, taken.number > version.number) == ("READABLE", True)


def test_publisher_that_dies_between_two_parts(port, jobs, feed):
    trainer, engine = jobs(port, "trainer-of-" + feed, 2), jobs(port, name("engine"))
    number = trainer.clients[0].open(feed)
    trainer.clients[1].open(feed)
    trainer.clients[0].announce(feed, number, step=1, num_parts=2, tree_digest=b"", timeout_s=60.0)
    trainer.clients[0].put_part(feed, number, endpoint=b"", digest=b"", nbytes=1)
    trainer.clients[1].close()
    trainer.coordinations[1].abandon("killed")
    with pytest.raises(errors.VersionGoneError, match=rf"client 1 \(trainer-of-{feed}/1\): sent no heartbeat for 1 s"):
        engine.clients[0].subscribe(feed, want=Want(number=number), timeout_s=20.0)


def test_reader_that_serves_on_outlives_the_publisher(port, jobs, feed):
    trainer = jobs(port, "trainer-of-" + feed)
    first, second = jobs(port, name("engine")), jobs(port, name("engine"))
    version = trainer.publish(1, feed)
    lease = first.clients[0].subscribe(feed, timeout_s=20.0)
    first.clients[0].serve(lease, endpoint=b"tcp://holder", is_whole=True, nbytes=8)
    first.clients[0].done(lease, APPLIED)
    trainer.kill()
    lost_by = time.monotonic() + 20.0
    while not (late := second.clients[0].subscribe(feed, timeout_s=20.0)).lost and time.monotonic() < lost_by:
        second.clients[0].done(late, APPLIED)
        time.sleep(0.1)
    assert late.lost == (0,)
    (holder,) = late.holders
    assert (holder.endpoint, holder.is_whole) == (b"tcp://holder", True)
    claim = first.clients[0].check(feed, version.number, holder.ticket, time.time())
    assert claim.reader == second.coordinations[0].member.job
    with pytest.raises(errors.TicketError, match="is not of the feed's publisher"):
        first.clients[0].check(feed, version.number, late.parts[0].ticket, time.time())
    first.clients[0].stop_serving(feed, version.number)
    third = jobs(port, name("engine"))
    with pytest.raises(
        errors.SourceLostError, match=rf"was in the memory of client 0 \(trainer-of-{feed}/0\) on .*, lost"
    ):
        third.clients[0].subscribe(feed, want=Want(number=version.number), timeout_s=20.0)


def test_tickets_are_checked_offline(port, jobs, feed):
    trainer, engine = jobs(port, name("trainer")), jobs(port, name("engine"))
    number = trainer.publish(1, feed).number
    (publisher,), (reader,) = trainer.clients, engine.clients
    ticket = reader.subscribe(feed, group="left", timeout_s=20.0).parts[0].ticket
    claim = publisher.check(feed, number, ticket, time.time())
    assert (claim.feed, claim.number) == (feed, number)
    assert claim.reader == f"{engine.coordinations[0].member.job}/left"
    for forged, seen_at, text in (
        (b"", 0, "is not of the feed's publisher"),
        (ticket[:-1], 0, "is not of the feed's publisher"),
        (ticket[:40] + bytes([ticket[40] ^ 1]) + ticket[41:], 0, "is not of the feed's publisher"),
        (ticket, 2 * 3600, "take a new lease"),
    ):
        with pytest.raises(errors.TicketError, match=text):
            publisher.check(feed, number, forged, time.time() + seen_at)
    with pytest.raises(errors.TicketError, match=rf"expected version {number + 1}"):
        publisher.check(feed, number + 1, ticket, time.time())


# --- restarts of the coordinator --------------------------------------------------------------------------------------


@pytest.mark.processes
def test_coordinator_is_killed_and_started_again(jobs):
    with server_process(heartbeat_timeout_s=LEASE_S) as server:
        trainer, engine = jobs(server.port, "trainer", 2), jobs(server.port, "engine")
        versions = [trainer.publish(step) for step in (10, 20)]
        (reader,) = engine.clients
        lease = reader.subscribe("policy", want=Want(step=10), timeout_s=20.0)
        ticket = lease.parts[0].ticket
        trainer.clients[0].retire("policy", versions[0].number)
        judge = jobs(server.port, "judge")
        verified = judge.clients[0].subscribe("policy", timeout_s=20.0)
        judge.clients[0].serve(verified, endpoint=b"tcp://judge", is_whole=True, nbytes=16)
        judge.clients[0].done(verified, APPLIED)
        server.kill()
        started_at = time.monotonic()
        again = ServerProcess(port=server.port, heartbeat_timeout_s=LEASE_S)
        try:
            with pytest.raises(errors.VersionLeasedError):
                trainer.clients[0].withdraw("policy", versions[0].number)
            wait_until(lambda: [len(feed.versions) for feed in reader.list()] == [2])
            wait_until(lambda: any(each.num_leases for feed in reader.list() for each in feed.versions))
            while time.monotonic() < started_at + 1.3 * LEASE_S:
                lease.raise_if_over()
                with pytest.raises(errors.VersionLeasedError):
                    trainer.clients[0].withdraw("policy", versions[0].number)
                time.sleep(0.5)
            assert trainer.clients[1].check("policy", versions[0].number, ticket, time.time()).reader == "engine"
            newest = reader.subscribe("policy", timeout_s=20.0)
            assert (newest.number, newest.step) == (versions[1].number, 20)
            assert [holder.endpoint for holder in newest.holders] == [b"tcp://judge"]
            third = trainer.publish(15)
            assert third.number > versions[1].number
            assert third.is_rewound
            reader.done(lease, APPLIED)
            for client in trainer.clients:
                # On a slow machine the feed is told to the new coordinator late, and its lease period begins then.
                wait_until(lambda client=client: has_withdrawn(client, versions[0]))
        finally:
            again.kill()


def has_withdrawn(client, version):
    try:
        return client.withdraw("policy", version.number).phase in ("RETIRING", "RELEASED")
    except errors.VersionLeasedError:
        return False


@pytest.mark.processes
def test_numbers_grow_when_coordinator_and_publisher_are_restarted(jobs):
    with server_process(heartbeat_timeout_s=LEASE_S) as server:
        trainer = jobs(server.port, "trainer")
        before = trainer.publish(10)
        trainer.kill()
        server.kill()
        again = ServerProcess(port=server.port, heartbeat_timeout_s=LEASE_S)
        try:
            after = jobs(again.port, "trainer").publish(10)
            assert after.number > before.number
        finally:
            again.kill()


def test_wait_after_tries_that_failed_ends_in_time(port, jobs, feed):
    """The coordinator is asked to answer before the call ends, however much of its time earlier tries have taken."""
    client = jobs(port, name("engine")).clients[0]
    waits = []

    class Stub:
        def Subscribe(self, request, timeout):
            waits.append(request.max_wait_s)

    def timed(ask, *_):
        for left_s in (40.0, 25.0, 12.0, 3.0):
            ask(Stub(), left_s)
        return 0.0, feeds_pb2.SubscribeResponse()

    client._timed = timed
    with pytest.raises(errors.VersionTimeoutError):
        client.subscribe(feed, timeout_s=0.0)
    assert waits == [0.0] * 4
    waits.clear()
    request = client._subscription(feed, "", 1, Want())
    request.max_wait_s = 30.0
    client._ask(request)
    assert waits == [30.0, 15.0, 2.0, 0.0]


# --- tokens -----------------------------------------------------------------------------------------------------------


def with_token(token):
    return Access(token=token)


def test_tokens_say_who_reads_and_publishes(jobs):
    with running_server(heartbeat_timeout_s=1.0, tokens=Tokens.parse(TOKENS)) as server:
        trainer = jobs(server.port, "trainer", access=with_token("trainer-token-0123456789"))
        engine = jobs(server.port, "engine", access=with_token("engine-token-0123456789"))
        judge = jobs(server.port, "judge", access=with_token("judge-token-01234567890"))
        number = trainer.publish(1).number
        trainer.publish(1, "secret")
        assert engine.clients[0].subscribe("policy", timeout_s=20.0).number == number
        for job, feed in ((engine, "secret"), (judge, "policy")):
            with pytest.raises(errors.CoordinatorPermissionError, match=f"may not read feed '{feed}' of job 'trainer'"):
                job.clients[0].subscribe(feed, timeout_s=20.0)
        assert [each.feed for each in engine.clients[0].list()] == ["policy"]
        assert judge.clients[0].list() == []
        assert [each.feed for each in trainer.clients[0].list()] == ["policy", "secret"]
        trainer.close()
        with pytest.raises(errors.CoordinatorPermissionError, match="token of job 'judge' may not publish it"):
            judge.publish(1, "policy")


def test_feeds_are_reserved_for_jobs_that_the_tokens_name():
    tokens = Tokens.parse(TOKENS + "next next-token-0123456789abc publishes=policy,other reads=*\n")
    assert tokens.may_publish("next", "policy")
    assert not tokens.may_publish("trainer", "third")
    with pytest.raises(errors.CoordinatorPermissionError, match="reserves for others"):
        tokens.may_publish("trainer", "policy")
    assert tokens.may_read("next", "anything")
    assert not tokens.may_read("trainer", "policy")
    with pytest.raises(errors.ConfigError, match="line 1 of the tokens, column reads: name of a feed is 'a:b'"):
        Tokens.parse("job job-token-0123456789 reads=a:b")


def test_limits_reach_the_client(port, jobs):
    trainer = jobs(port, name("trainer"))
    for number in range(16):
        trainer.clients[0].open(f"{name('feed')}-{number}")
    with pytest.raises(errors.CoordinationError, match="has 16 feeds"):
        trainer.clients[0].open(name("feed"))
    assert not issubclass(FeedLimitError, errors.ConfigError)
