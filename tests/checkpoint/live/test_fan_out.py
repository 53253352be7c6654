"""Which source a relay pulls from: the rules, and a thousand readers by simulation."""

import math

import pytest

from dtckpt.checkpoint.live.fan_out import (
    FIRST_PAUSE_S,
    GAP_S,
    GIVE_UP_S,
    IDLE_S,
    INSIST_S,
    LONELY_S,
    MAX_FAILURES,
    MAX_PULLERS,
    STALL_S,
    Places,
    SourceChoice,
)

from .fan_out_simulation import PUBLISHER, Simulation

COPY_S = 8.0
NUM_PIECES = 24


def started(num_hosts, *, seed=0):
    """Let hosts begin within half a second."""
    simulation = Simulation(num_hosts, num_pieces=NUM_PIECES, copy_s=COPY_S, seed=seed)
    for host in simulation.relays:
        simulation.at(simulation.random.random() / 2, lambda host=host: simulation.begin(host))
    return simulation


def slowest(simulation):
    """Return the time until the last host that lives has all pieces, in copies over one free link."""
    assert not [host.name for host in simulation.relays if host.is_alive and host.ended_at is None]
    return max(host.ended_at for host in simulation.relays if host.is_alive) / COPY_S


# With two relays at each source, pieces flow down a tree of two branches: 2 (1 + log2(hosts) / pieces) copies' time.
# 125 hosts of eight clients each are a thousand readers: the clients of a host share what one of them pulls.
@pytest.mark.parametrize("num_hosts", [8, 125, 1000])
def test_hosts_that_begin_together_take_two_copies_from_the_source(num_hosts):
    simulation = started(num_hosts)
    simulation.run(600.0)
    assert simulation.copies_of_source() <= 2
    assert max(simulation.sent.values()) <= 2 * NUM_PIECES
    assert slowest(simulation) <= 1.25 * 2 * (1 + math.log2(num_hosts) / NUM_PIECES)
    assert simulation.asked[PUBLISHER] <= num_hosts + 100
    assert sum(host.asks_registry for host in simulation.relays) <= 4 * num_hosts


@pytest.mark.parametrize("seed", range(3))
def test_relays_that_die_or_are_slow(seed):
    simulation = started(200, seed=seed)
    random = simulation.random
    for host in random.sample(simulation.relays, 20):
        host.slowness = 4.0
    for host in random.sample(simulation.relays, 40):
        simulation.at(random.uniform(0.5, 2.5 * COPY_S), lambda host=host: simulation.kill(host))
    simulation.run(600.0)
    assert simulation.copies_of_source() <= 3
    # A slow relay serves two others, each at half of its speed.
    assert slowest(simulation) <= 1.25 * 2 * 4
    assert not any(host.has_given_up for host in simulation.relays)


@pytest.mark.parametrize("seed", range(3))
def test_the_relays_that_pull_from_the_source_die_in_the_middle(seed):
    simulation = started(50, seed=seed)
    simulation.run(COPY_S)
    firsts = sorted(simulation.relays, key=lambda host: -len(host.has))[:2]
    for host in firsts:
        simulation.kill(host)
    simulation.run(600.0)
    # What they had, and a copy and a bit for the others.
    assert simulation.copies_of_source() <= 3
    assert slowest(simulation) <= 3 + (IDLE_S + INSIST_S) / COPY_S
    assert not any(host.has_given_up for host in simulation.relays)


def test_later_readers_take_nothing_from_the_source():
    simulation = Simulation(100, num_pieces=NUM_PIECES, copy_s=COPY_S)
    for host in simulation.relays[:8]:
        simulation.begin(host)
    simulation.run(10 * COPY_S)
    before = simulation.sent[PUBLISHER]
    for host in simulation.relays[8:]:
        simulation.begin(host)
    simulation.run(600.0)
    slowest(simulation)
    assert simulation.sent[PUBLISHER] == before <= 2 * NUM_PIECES


def test_without_a_source_nobody_waits_for_ever():
    simulation = started(20)
    simulation.run(COPY_S / 2)
    simulation.hosts[PUBLISHER].is_alive = False
    simulation.run(COPY_S / 2 + 1.5 * GIVE_UP_S)
    assert all(host.has_given_up for host in simulation.relays)
    assert simulation.is_over


def test_places():
    places = Places(max_copies=2)
    assert [places.admit(name, 0.0, insists=False) for name in "abca"] == [True, True, False, True]
    places.done("a")
    # Two copies are sent or under way: one more goes to a relay that insists.
    assert not places.admit("c", 1.0, insists=False)
    assert places.admit("c", 1.0, insists=True)
    assert not places.admit("d", 1.0, insists=True), "all places are taken"
    # b got lost on the way, and so its copy does not count.
    assert not places.admit("d", IDLE_S, insists=False)
    assert places.admit("c", IDLE_S, insists=False)
    assert places.admit("d", IDLE_S, insists=True)
    relay = Places()
    for number in range(20):
        assert relay.admit(str(number), 0.0, insists=False)
        relay.done(str(number))
    assert [relay.admit(name, 0.0, insists=True) for name in "abc"] == [True] * MAX_PULLERS + [False]


def chosen(**known):
    choice = SourceChoice(0.0, lambda: 0.5)
    choice.tell(known.get("relays", ["a", "b"]), "publisher", 0.0)
    return choice


def test_a_relay_stays_with_a_source_that_has_pieces():
    choice = chosen()
    choice.took("b", 1.0)
    assert choice.choose(1.0) == "b"
    choice.has_nothing("b", 1.0)
    assert choice.choose(1.0) is None, "it waits for the next pieces, and takes no other place"
    assert choice.choose(1.0 + choice.pause_s(1.0)) == "b"
    choice.has_nothing("b", 1.0 + STALL_S)
    assert choice.choose(1.0 + STALL_S) == "a"


def test_full_sources_are_left_alone_for_a_while():
    choice = chosen()
    choice.is_full("a", 0.0)
    assert choice.choose(0.0) is None
    assert choice.choose(GAP_S) == "b"
    choice.is_full("b", GAP_S)
    assert choice.choose(2 * GAP_S) == "publisher"
    choice.is_full("publisher", 2 * GAP_S)
    assert choice.choose(FIRST_PAUSE_S + GAP_S) == "a"
    choice.is_full("a", 1.0)
    choice.is_full("b", 1.0)
    assert choice.choose(1.0 + GAP_S) == "publisher"
    assert choice.wants_news(1.0)
    choice.tell(["a", "c"], "publisher", 1.0)
    assert choice.choose(1.0 + GAP_S) == "c"
    assert choice.choose(1.0 + 2 * FIRST_PAUSE_S) == "a", "twice as long as the first time"
    assert not choice.wants_news(1.0 + FIRST_PAUSE_S)


def test_sources_that_fail_are_given_up():
    choice = chosen(relays=["a"])
    choice.failed("publisher", 0.0, is_damaged=False)
    choice.failed("a", 0.0, is_damaged=True)
    assert choice.choose(0.5) is None
    assert choice.choose(2.0) == "publisher"
    for _ in range(MAX_FAILURES):
        choice.failed("publisher", 2.0, is_damaged=False)
    assert choice.choose(GIVE_UP_S - 1.0) is None
    assert not choice.is_over(GIVE_UP_S - 1.0)
    assert choice.is_over(GIVE_UP_S)


def test_a_relay_insists_when_it_waits():
    lonely, choice = chosen(relays=[]), chosen()
    assert not lonely.insists(LONELY_S - 0.1)
    assert lonely.insists(LONELY_S)
    assert not choice.insists(INSIST_S - 0.1)
    choice.has_nothing("a", INSIST_S - 0.1)
    assert choice.insists(INSIST_S)
    assert choice.choose(INSIST_S) == "publisher"


def test_a_relay_that_knows_no_other_asks_once_more_before_it_insists():
    lonely, now = chosen(relays=[]), 0.0
    while now < LONELY_S:
        assert not lonely.insists(now)
        if lonely.wants_news(now):
            lonely.tell([], "publisher", now)
        now += 0.01
    assert lonely.wants_news(LONELY_S)
    lonely.tell(["a"], "publisher", LONELY_S)
    assert not lonely.insists(LONELY_S)
    assert lonely.choose(LONELY_S) == "a"
