"""The rules of feeds without a coordinator, as a publisher may run them for its readers; the test sets the clock."""

import time
from dataclasses import replace

import pytest

from dtckpt import errors
from dtckpt.coordination.feeds import events as feeds
from dtckpt.coordination.feeds import rules as feed_rules
from dtckpt.coordination.feeds.rules import FeedRules, MemoryLimit
from dtckpt.coordination.feeds.state import LOST, READABLE, RETIRING
from dtckpt.coordination.feeds.transitions import told_uses
from dtckpt.coordination.task_identity import Identity

LEASE_S = 10.0
FLOOR = 1000
SECRET = b"s" * 32


class World:
    """Rules, a clock, and a publisher."""

    def __init__(self, nbytes=1 << 30, num_clients=2):
        self.now, self.limit, self.num_clients = 100.0, MemoryLimit(nbytes), num_clients
        self.rules = FeedRules(LEASE_S, self.limit)

    def happen(self, event):
        return self.rules.accept(event, self.now)

    def trainers(self, job="trainer"):
        return [Identity(job, client, client + 1) for client in range(self.num_clients)]

    def open(self, job="trainer", attempt=0, keep=2, feed="f", **options):
        options = {"floor": FLOOR, "secret": SECRET} | options
        first, *_ = [self.happen(feeds.OpenFeed(who, feed, attempt, keep, **options)) for who in self.trainers(job)]
        return first

    def announce(self, number, step=1, job="trainer", attempt=0, who=None, **options):
        options = {"num_parts": self.num_clients, "tree_digest": b"t%d" % number, "timeout_s": 30.0} | options
        return self.happen(feeds.Announce(who or self.trainers(job)[0], "f", attempt, number, step, **options))

    def put(self, number, job="trainer", attempt=0, who=None, digest=b"d"):
        for each in self.trainers(job) if who is None else [who]:
            state = self.happen(feeds.PutPart(each, "f", attempt, number, b"e", digest, 4, f"host{each.task}"))
        return state

    def publish(self, number, step=1, **options):
        self.announce(number, step, **options)
        return self.put(number, **options)

    def subscribe(self, reader, lease=1, want=feeds.NEWEST, host="", **options):
        who = reader if isinstance(reader, Identity) else Identity(reader, 0, 9)
        return self.happen(feeds.Subscribe(who, "f", "", lease, want, host, **options))

    def withdraw(self, number):
        return [self.happen(feeds.Withdraw(who, "f", 0, number)) for who in self.trainers()][-1]

    def state(self, number):
        return self.rules.feeds["f"].versions[number].state


@pytest.fixture
def world():
    world = World()
    assert world.open().next_number == FLOOR
    return world


def test_numbers_are_used_once(world):
    world.publish(FLOOR)
    world.publish(FLOOR + 5)
    for number in (FLOOR + 1, FLOOR + 4):
        with pytest.raises(errors.VersionGoneError, match=f"version {number} of feed 'f' is retired"):
            world.announce(number)
    assert world.open().next_number == FLOOR + 6
    with pytest.raises(errors.FeedConflictError, match="has number 5000; expected 1006, or at most 1000 more"):
        world.announce(5000)


def test_version_that_has_failed_is_not_published_again(world):
    world.announce(FLOOR)
    world.happen(feeds.Abort(world.trainers()[1], "f", 0, FLOOR, "the disk is full"))
    text = r"has failed: client 1 \(trainer/1\) has aborted it: the disk is full; publish again, under a new number"
    for event in (world.announce, world.put):
        with pytest.raises(errors.FeedConflictError, match=text):
            event(FLOOR)
    assert world.publish(FLOOR + 1).state == READABLE


def test_one_version_is_published_at_a_time(world):
    world.announce(FLOOR)
    world.put(FLOOR, who=world.trainers()[0])
    with pytest.raises(errors.FeedConflictError, match=r"announced while version 1000 has 1 of 2 parts"):
        world.announce(FLOOR + 1)
    world.now += 30.0
    world.rules.tick(world.now)
    with pytest.raises(errors.FeedConflictError, match="1 of 2 parts came within 30 s"):
        world.put(FLOOR)
    world.publish(FLOOR + 1)


def test_job_that_takes_a_feed_over_goes_on_with_its_numbers(world):
    world.publish(FLOOR + 500, step=40)
    world.subscribe("engine")
    world.rules.gone("trainer", None, "has left")
    opened = world.open("other", floor=1)
    assert opened.next_number == FLOOR + 501
    assert not world.publish(FLOOR + 501, step=3, job="other").is_rewound
    with pytest.raises(errors.FencedError, match="is published by job 'other', and not by 'trainer'"):
        world.put(FLOOR + 500)


def test_job_without_a_grant_takes_no_feed(world):
    world.rules.gone("trainer", None, "has left")
    with pytest.raises(errors.CoordinatorPermissionError):
        world.open("other", principal="other", is_granted=False)


def test_lease_ends_unless_it_is_renewed(world):
    world.publish(FLOOR)
    world.subscribe("engine", 5)
    world.happen(feeds.Retire(world.trainers()[0], "f", 0, FLOOR))
    for _ in range(3):
        world.now += LEASE_S - 1
        world.rules.tick(world.now)
        world.happen(feeds.Renew(Identity("engine", 0, 9), "f", 5))
        with pytest.raises(errors.VersionLeasedError, match="'engine'"):
            world.withdraw(FLOOR)
    world.now += LEASE_S
    world.rules.tick(world.now)
    assert world.withdraw(FLOOR).state == "RELEASED"
    with pytest.raises(feed_rules.NotKnownError):
        world.happen(feeds.Renew(Identity("engine", 0, 9), "f", 5))


def test_lease_has_a_longest_life(world):
    world.publish(FLOOR)
    world.subscribe("engine", 5)
    renew = feeds.Renew(Identity("engine", 0, 9), "f", 5)
    while world.now < 100.0 + feed_rules.MAX_LEASE_S - LEASE_S / 2:
        world.now += LEASE_S / 2
        world.happen(renew)
    world.now += LEASE_S / 2
    with pytest.raises(errors.VersionGoneError, match="has lasted for 3600 s"):
        world.happen(renew)


def test_pause_of_the_registry_is_not_held_against_readers(world):
    world.publish(FLOOR)
    world.subscribe("engine", 5)
    world.happen(feeds.Retire(world.trainers()[0], "f", 0, FLOOR))
    world.now += 50.0
    world.rules.pause(50.0)
    world.rules.tick(world.now)
    with pytest.raises(errors.VersionLeasedError):
        world.withdraw(FLOOR)


def test_restarted_registry_lets_old_memory_stay_for_a_lease_period():
    world = World()
    world.open(floor=FLOOR + 100)
    for number, step in ((FLOOR, 10), (FLOOR + 1, 20)):  # of its earlier life
        assert world.publish(number, step).state == READABLE
    world.happen(feeds.Retire(world.trainers()[0], "f", 0, FLOOR))
    with pytest.raises(errors.VersionGoneError):
        world.subscribe("late", want=feeds.Want(number=FLOOR))
    again = world.subscribe("engine", want=feeds.Want(number=FLOOR), is_again=True)
    assert again.number == FLOOR
    world.happen(feeds.Done(Identity("engine", 0, 9), "f", 1, feeds.APPLIED))
    world.now += LEASE_S - 1
    with pytest.raises(errors.VersionLeasedError, match=r"may be leased by readers that have not come back .* 1\.0 s"):
        world.withdraw(FLOOR)
    with pytest.raises(errors.VersionLeasedError, match="may be leased"):
        world.withdraw(FLOOR - 1)  # a version that it has not been told of
    world.rules.pause(5.0)  # readers could not come back meanwhile
    world.now += 5.0
    with pytest.raises(errors.VersionLeasedError):
        world.withdraw(FLOOR)
    world.now += 1
    assert world.withdraw(FLOOR).state == "RELEASED"
    assert world.publish(FLOOR + 100, 15).is_rewound


def test_new_version_of_a_restarted_registry_may_go_at_once(world):
    world.publish(FLOOR)
    world.happen(feeds.Retire(world.trainers()[0], "f", 0, FLOOR))
    assert world.withdraw(FLOOR).state == "RELEASED"


def test_a_reader_is_told_that_the_clock_behind_the_numbers_went_back(world):
    """Else a reader would wait for a number that is hours away, and nothing would say why."""
    world.open()
    world.publish(FLOOR)
    later = feeds.Want(newer_than=FLOOR)
    assert "clock" not in world.subscribe("reader", want=later).why
    later = feeds.Want(newer_than=FLOOR + 1)
    assert "clock was ahead" in world.subscribe("reader", want=later).why


def test_parts_that_come_back_make_a_lost_version_readable(world):
    world.publish(FLOOR)
    world.rules.gone("trainer", (1,), "sent no heartbeat")
    assert world.state(FLOOR) == LOST
    with pytest.raises(errors.SourceLostError, match=r"was in the memory of client 1 \(trainer/1\) on host1, lost"):
        world.subscribe("engine", want=feeds.Want(number=FLOOR))
    with pytest.raises(feed_rules.NotKnownError, match="has not opened feed"):
        world.put(FLOOR, who=world.trainers()[1])
    world.open()
    world.put(FLOOR, who=world.trainers()[1])
    assert world.subscribe("engine").number == FLOOR


def test_old_versions_retire_when_a_newer_one_is_readable(world):
    for number in range(FLOOR, FLOOR + 4):
        world.publish(number)
    states = [world.state(number) for number in range(FLOOR, FLOOR + 4)]
    assert states == [RETIRING, RETIRING, READABLE, READABLE]


def test_readers_are_sent_to_near_holders_with_few_readers(world):
    world.publish(FLOOR)
    for number, host in enumerate(("a", "b", "b"), start=1):
        who = Identity(f"holder{number}", 0, 9)
        world.subscribe(who, number, host=host)
        world.happen(feeds.Serve(who, "f", FLOOR, b"t1000", b"h%d" % number, b"", True, 8, host))
    firsts = [world.subscribe(f"reader{number}", 100 + number, host="c").holders[0].job for number in range(6)]
    assert sorted(firsts) == sorted(["holder1", "holder2", "holder3"] * 2)
    near = world.subscribe("near", 200, host="b")
    assert [holder.host for holder in near.holders] == ["b", "b", "a"]
    assert len({holder.key for holder in near.holders} | {SECRET}) == 4


def test_readers_are_told_of_different_holders_first(world):
    world.publish(FLOOR)
    for number in range(100):
        who = Identity(f"holder{number}", 0, 9)
        world.subscribe(who, number + 1)
        world.happen(feeds.Serve(who, "f", FLOOR, b"t1000", b"h", b"", False, 0))
    told = [[each.job for each in world.subscribe(f"reader{number}", 200 + number).holders] for number in range(20)]
    assert len({jobs[0] for jobs in told}) > 10, "else all would ask one holder"
    assert set().union(*told) == {f"holder{number}" for number in range(100)}
    assert [each.job for each in world.subscribe("reader0", 200).holders] == told[0], (
        "the same when the call is repeated"
    )


def test_holders_show_that_they_have_the_version(world):
    world.publish(FLOOR)
    holder = feeds.Serve(Identity("engine", 0, 9), "f", FLOOR, b"other tree", b"h", b"", True, 8)
    with pytest.raises(errors.FeedConflictError, match="cannot serve version 1000 of feed 'f'"):
        world.happen(holder)
    stranger = replace(holder, tree_digest=b"t1000", principal="engine", is_granted=False)
    with pytest.raises(errors.CoordinatorPermissionError, match="may not read feed 'f' of job 'trainer'"):
        world.happen(stranger)
    world.happen(replace(stranger, is_granted=True))
    world.happen(feeds.Retire(world.trainers()[0], "f", 0, FLOOR))
    world.withdraw(FLOOR)
    with pytest.raises(errors.VersionGoneError):
        world.happen(replace(stranger, is_granted=True))


def test_a_thousand_readers_are_spread_over_the_holders_at_a_bounded_cost(world):
    world.publish(FLOOR)
    begin = time.process_time()
    for number in range(1, 1001):
        who = Identity(f"job{number}", 0, 9)
        world.subscribe(who, number)
        world.happen(feeds.Serve(who, "f", FLOOR, b"t1000", b"h", b"", True, 8))
    version = world.rules.feeds["f"].versions[FLOOR]
    loads = [holder.num_leases for holder in version.holders.values()]
    assert sum(loads) == 999, "only the first reader reads from the publisher"
    assert max(loads) <= 2
    assert time.process_time() - begin < 20.0


def test_everything_is_bounded(monkeypatch):
    world = World(nbytes=200_000)
    world.open()
    taken = world.limit.taken
    world.publish(FLOOR)
    readers, text = 0, ""
    while not text:
        try:
            world.subscribe(f"r{readers}", readers + 1)
            readers += 1
        except feed_rules.FeedLimitError as error:
            text = str(error)
    assert text.startswith(f"no room for a lease on feed 'f' of job 'r{readers}'")
    assert 50 < readers < 150
    for number in range(readers):
        world.happen(feeds.Done(Identity(f"r{number}", 0, 9), "f", number + 1, feeds.APPLIED))
    world.happen(feeds.Retire(world.trainers()[0], "f", 0, FLOOR))
    world.withdraw(FLOOR)
    assert world.limit.taken == taken
    monkeypatch.setattr(feed_rules, "MAX_VERSIONS", 3)
    for number in range(FLOOR + 1, FLOOR + 4):
        world.publish(number)
    with pytest.raises(feed_rules.FeedLimitError, match="has 3 versions that are not released; no readers hold them"):
        world.publish(FLOOR + 4)
    world.rules.forget("trainer")
    assert world.limit.taken == 0


def test_uses_of_versions(world):
    """A version that was fetched is in use when its reader says so, and only for the lease that the reader had."""
    engine = Identity("engine", 0, 9)

    def say(lease, outcome, who=engine):
        world.happen(feeds.Done(who, "f", lease, outcome))
        use = world.rules.feeds["f"].latest["engine"]
        return use.number - FLOOR, use.outcome, max(use.applied - FLOOR, -1)

    for number in range(4):
        world.publish(FLOOR + number)
        world.subscribe(engine, number + 1)
        if number == 0:
            assert say(1, feeds.FETCHED) == (0, "fetched", -1)
            assert say(1, feeds.APPLIED, Identity("stranger", 0, 9)) == (0, "fetched", -1)
            assert say(99, feeds.APPLIED) == (0, "fetched", -1)
            for _ in range(2):  # it may come twice
                assert say(1, feeds.APPLIED) == (0, "applied", 0)
            assert say(1, feeds.FETCHED) == (0, "applied", 0)
        elif number == 1:
            assert say(2, feeds.FETCHED) == (1, "fetched", 0)
            assert say(1, feeds.APPLIED) == (1, "fetched", 0)  # late
            assert told_uses(world.rules.feeds["f"].latest["engine"]) == [(FLOOR, "applied"), (FLOOR + 1, "fetched")]
        elif number == 2:
            assert say(3, feeds.FETCHED) == (2, "fetched", 0)
            assert say(3, feeds.APPLIED) == (2, "applied", 2)
            assert say(3, feeds.FAILED) == (2, "failed", -1)  # another client: it has no whole version
            assert say(3, feeds.APPLIED) == (2, "failed", -1)
        else:
            assert say(4, feeds.FAILED) == (3, "failed", -1)
            assert say(4, feeds.APPLIED) == (3, "failed", -1)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda who: feeds.OpenFeed(who, "a b", 0, 1, 0, SECRET), "name of a feed is 'a b'"),
        (lambda who: feeds.OpenFeed(who, "a" * 129, 0, 1, 0, SECRET), "expected 1 to 128 letters"),
        (lambda who: feeds.OpenFeed(who, "a", 0, 0, 0, SECRET), "keep is 0; expected 1 to 32"),
        (lambda who: feeds.OpenFeed(who, "a", 0, 1, 0, b"short"), "secret has 5 bytes; expected 16 to 64"),
        (lambda who: feeds.Announce(who, "a", 0, 0, 1, 1, b"", 1.0), "number is 0; expected 1 to"),
        (lambda who: feeds.Announce(who, "a", 0, 1, 1, 1, b"x" * 65, 1.0), "tree_digest is too long: got 65"),
        (lambda who: feeds.Announce(who, "a", 0, 1, 1, 99_999, b"", 1.0), "99999 parts within 1.0 s"),
        (lambda who: feeds.Announce(who, "a", 0, 1, 1, 1, b"", float("nan")), "parts within nan s"),
        (lambda who: feeds.PutPart(who, "a", 0, 1, b"x" * 1025, b"", 1), "endpoint is too long: got 1025"),
        (lambda who: feeds.Subscribe(who, "a", "g" * 129, 1), "group is too long"),
        (lambda who: feeds.Subscribe(who, "a", "", 0), "has no id"),
        (lambda who: feeds.Done(who, "a", 1, "fine"), "expected applied, fetched, skipped, failed"),
        (lambda who: feeds.Serve(who, "a", 1, b"", b"", b"x" * 4097, True, 1), "pieces is too long"),
    ],
)
def test_events_are_bounded(make, text):
    with pytest.raises(errors.ConfigError, match=text):
        make(Identity("job", 0, 1))


def test_a_former_owner_that_comes_back_frees_nothing_under_a_lease(world):
    world.publish(FLOOR)
    world.subscribe("reader")
    # The trainer was silent, so the feed was free; but its process lives, and has the version in its memory.
    world.rules.gone("trainer", None, "sent no heartbeat")
    world.open("rival")
    world.rules.gone("rival", None, "sent no heartbeat")
    world.now += LEASE_S / 2
    world.open(secret=SECRET)
    world.announce(FLOOR)
    with pytest.raises(errors.VersionLeasedError, match="since another job had the feed; its parts must stay"):
        world.withdraw(FLOOR)
    world.now += LEASE_S
    world.withdraw(FLOOR)
