"""A simulation of feeds at a coordinator that restarts: events in any order, with every promise checked after each.

The checks use what clients know (which parts they have put, which leases they believe in), and not the leases and parts
in the rules that they check. Memory, and the liveness of sources, are checked against a look at the rules' state.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field, replace

from dtckpt_server.events import Event, Heartbeat, Leave, Register, Tick
from dtckpt_server.memory import JOB_NBYTES, TASK_NBYTES
from dtckpt_server.rules import KEPT_VERDICTS_S, Rules, apply
from dtckpt_server.state import Effects
from dtckpt_server.tasks import ALIVE

from dtckpt import errors
from dtckpt.coordination.feeds import events as feeds
from dtckpt.coordination.feeds import state, transitions
from dtckpt.coordination.task_identity import Identity

TIMEOUT_S = 10.0
TICK_S = 0.5
NUM_CLIENTS = 2
PUBLISHERS, READERS = ("trainer", "rival"), ("engine", "judge")
JOBS = PUBLISHERS + READERS
FEED = "policy"


@dataclass(slots=True)
class Belief:
    """A lease as its reader knows it."""

    number: int
    until: float
    processes: set[Identity]


@dataclass(slots=True)
class Life:
    """One life of the coordinator: the events that it got, and the parts that were put in it."""

    events: list[tuple[Event, float]] = field(default_factory=list)
    parts: dict[int, set[int]] = field(default_factory=dict)
    expected: dict[int, int] = field(default_factory=dict)
    feed: state.Feed | None = None
    steps: list[int] = field(default_factory=list)


class Simulation:
    """The coordinator's rules, a clock, the beliefs of clients, and the checks."""

    def __init__(self) -> None:
        self.now = 100.0
        self.attempts = dict.fromkeys(JOBS, 0)
        self.lives = {(job, task): 0 for job in JOBS for task in range(NUM_CLIENTS)}
        self.outcomes: Counter[str] = Counter()
        self.announced: dict[int, tuple[object, ...]] = {}  # by number, over all lives: what a client said first
        self.order: list[int] = []  # numbers of new versions, as they were announced
        self.rewound: dict[int, bool] = {}
        self.secret = b""
        self.beliefs: dict[tuple[str, int], Belief] = {}  # by job and lease
        self.restart()

    def restart(self) -> None:
        """Lose the coordinator's state, and all leases of processes that do not know it."""
        self.rules = Rules(TIMEOUT_S, incarnation=0xC0)
        self.life = Life()

    def identity(self, job: str, task: int) -> Identity:
        return Identity(job, task, 1000 * self.attempts[job] + 10 * self.lives[job, task] + task + 1)

    def register(self, who: Identity) -> Effects:
        return self.happen(Register(who, NUM_CLIENTS, who.incarnation // 1000, "host"))

    def open(self, who: Identity, keep: int = 2) -> feeds.OpenFeed:
        return feeds.OpenFeed(
            who,
            FEED,
            who.incarnation // 1000,
            keep,
            floor=int(1000 * self.now),
            secret=self.secret or b"%016d" % who.incarnation,
            last_number=max(self.announced, default=0) if self.attempts[who.job] % 2 else 0,
        )

    def announcement(self, who: Identity, number: int, step: int, timeout_s: float = 30.0) -> feeds.Announce:
        attempt, digest = who.incarnation // 1000, b"tree %d" % number
        is_rewound = self.rewound.get(number, False)
        return feeds.Announce(who, FEED, attempt, number, step, NUM_CLIENTS, digest, timeout_s, is_rewound)

    def part(self, who: Identity, number: int) -> feeds.PutPart:
        digest = b"%d/%d" % (number, who.task)
        return feeds.PutPart(who, FEED, who.incarnation // 1000, number, b"tcp://x", digest, 7, "host")

    def pass_time(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now += TICK_S
            self.happen(Tick())

    def finish(self) -> None:
        """Replay all events, then let all memory fade."""
        again = Rules(TIMEOUT_S, incarnation=0xC0)
        for event, now in self.life.events:
            again, _ = apply(again, event, now)
        assert snapshot(again) == snapshot(self.rules), "the same events gave another state"
        for job in JOBS:
            for task in range(NUM_CLIENTS):
                self.happen(Leave(self.identity(job, task)))
        for _ in range(2):
            self.pass_time(TIMEOUT_S + TICK_S)
            self.now += KEPT_VERDICTS_S + 1
            self.happen(Tick())
        rules = self.rules
        for kept in (rules.jobs, rules.feeds.feeds, rules.feeds.leases, rules.memory.nbytes):
            assert not kept, "something is never forgotten"

    # --- promises ---------------------------------------------------------------------------------------------------

    def happen(self, event: Event) -> Effects:
        feed = self.rules.feeds.feeds.get(FEED)
        before = feed and dict(feed.versions)
        self.life.events.append((event, self.now))
        self.rules, effects = apply(self.rules, event, self.now)
        if isinstance(event, feeds.FeedEvent):
            self._a_second_time(event, effects)
            self.outcomes[f"{type(event).__name__} {_outcome(effects)}"] += 1
        if effects.refusal is None:
            self._note(event, effects, before or {})
        self._sources_of_readable_versions_are_alive()
        self._memory_is_counted()
        return effects

    def _a_second_time(self, event: feeds.FeedEvent, effects: Effects) -> None:
        was = snapshot(self.rules)
        self.life.events.append((event, self.now))
        self.rules, again = apply(self.rules, event, self.now)
        assert snapshot(self.rules) == was, "the second event changed something"
        assert (type(again.refusal), str(again.refusal)) == (type(effects.refusal), str(effects.refusal))
        assert again.feed_answer == effects.feed_answer, "the second event had another answer"
        assert not again.changed_feeds
        assert not again.log

    def _note(self, event: Event, effects: Effects, before: dict[int, state.Version]) -> None:
        answer = effects.feed_answer
        match event:
            case feeds.OpenFeed():
                self.secret = answer.secret
                assert answer.next_number not in self.announced, "the next number was used"
            case feeds.Announce():
                self._announced(event, answer)
            case feeds.PutPart():
                self.life.parts.setdefault(event.number, set()).add(event.who.task)
            case feeds.Withdraw():
                assert not self._believers(event.number), "a part was withdrawn under a live lease"
            case feeds.Subscribe() if isinstance(answer, feeds.Leased):
                self._leased(event, answer)
            case feeds.Renew():
                belief = self.beliefs.setdefault(
                    (event.who.job, event.lease), Belief(answer.number, self.now, {event.who})
                )
                assert belief.number == answer.number, "a lease moved to another version"
                belief.until = self.now + TIMEOUT_S
                belief.processes.add(event.who)
            case feeds.Done():
                if (belief := self.beliefs.get((event.who.job, event.lease))) is not None:
                    belief.processes.discard(event.who)
                    if not belief.processes:
                        del self.beliefs[event.who.job, event.lease]
            case Register(who) | Leave(who):
                self._process_changed(event, who)

    def _announced(self, event: feeds.Announce, answer: feeds.VersionState) -> None:
        facts = event.step, event.num_parts, event.tree_digest
        if event.number not in self.announced:
            assert event.number > max(self.order, default=0), "a number of a new version did not grow"
            self.order.append(event.number)
            highest = max(self._steps_of_owner(), default=-1)
            assert answer.is_rewound == (event.step < highest), "a step back is not marked, or another step is"
            self.rewound[event.number] = answer.is_rewound
        assert self.announced.setdefault(event.number, facts) == facts, "a version changed"
        self._steps_of_owner().append(event.step)
        self.life.expected[event.number] = event.num_parts

    def _steps_of_owner(self) -> list[int]:
        """Return the steps that the feed's owner has announced in this life of the coordinator."""
        feed = self.rules.feeds.feeds[FEED]
        if self.life.feed is not feed:
            self.life.feed, self.life.steps = feed, []
        return self.life.steps

    def _leased(self, event: feeds.Subscribe, answer: feeds.Leased) -> None:
        number = answer.number
        put = self.life.parts.get(number, set())
        assert put == set(range(self.life.expected[number])), "a lease on a version without all parts"
        assert {part.digest for part in answer.parts} <= {b"%d/%d" % (number, client) for client in put}
        assert (answer.step, NUM_CLIENTS, answer.tree_digest) == self.announced[number]
        assert number > event.want.newer_than
        assert event.want.number in (0, number)
        belief = self.beliefs.get((event.who.job, event.lease))
        if belief is None or belief.number != number or belief.until < self.now:
            belief = self.beliefs[event.who.job, event.lease] = Belief(number, 0.0, set())
        belief.until = max(belief.until, self.now + answer.expires_in_s)
        assert answer.expires_in_s <= TIMEOUT_S, "a restarted coordinator would not wait so long"
        belief.processes.add(event.who)

    def _believers(self, number: int) -> list[Belief]:
        return [belief for belief in self.beliefs.values() if belief.number == number and belief.until > self.now]

    def _process_changed(self, event: Event, who: Identity) -> None:
        """Let processes that have left or were replaced believe in nothing more."""
        attempt = who.incarnation // 1000
        for key, belief in list(self.beliefs.items()):
            belief.processes = {
                process
                for process in belief.processes
                if process.job != who.job
                or (
                    process.incarnation // 1000 >= attempt
                    and (process.task != who.task or (isinstance(event, Register) and process == who))
                )
            }
            if not belief.processes:
                del self.beliefs[key]

    def _sources_of_readable_versions_are_alive(self) -> None:
        rules = self.rules

        def is_alive(who: Identity) -> bool:
            task = rules.jobs[who.job].tasks.get(who.task) if who.job in rules.jobs else None
            return task is not None and task.state in ALIVE and task.incarnation == who.incarnation

        for feed in rules.feeds.feeds.values():
            assert all(map(is_alive, feed.publishers)), "a publisher is gone and still counted"
            for version in feed.versions.values():
                assert all(is_alive(holder.who) for holder in version.holders.values())
                assert all(lease.tasks and all(map(is_alive, lease.tasks)) for lease in version.leases.values())
                assert all(is_alive(part.who) or client in version.lost for client, part in version.parts.items())
                has_whole = any(holder.is_whole for holder in version.holders.values())
                if version.state == state.READABLE and not has_whole:
                    assert len(version.parts) == version.num_parts
                    assert not version.lost
            readable = [version for version in feed.versions.values() if version.state == state.READABLE]
            assert len(readable) <= max(feed.keep, 3), "more versions stay readable than the feed keeps"

    def _memory_is_counted(self) -> None:
        counted = Counter({name: JOB_NBYTES + TASK_NBYTES * len(job.tasks) for name, job in self.rules.jobs.items()})
        for feed in self.rules.feeds.feeds.values():
            counted[feed.owner] += transitions.FEED_NBYTES + transitions.PUBLISHER_NBYTES * len(feed.publishers)
            members = Counter(who.job for who in feed.publishers)
            for version in feed.versions.values():
                told = [len(part.endpoint) + len(part.digest) + len(part.host) for part in version.parts.values()]
                counted[feed.owner] += transitions.VERSION_NBYTES + transitions.PART_NBYTES * len(told) + sum(told)
                for lease in version.leases.values():
                    counted[lease.job] += transitions.LEASE_NBYTES + transitions.LEASE_TASK_NBYTES * len(lease.tasks)
                    members[lease.job] += 1
                for holder in version.holders.values():
                    nbytes = len(holder.endpoint) + len(holder.pieces)
                    counted[holder.who.job] += transitions.HOLDER_NBYTES + nbytes
                    members[holder.who.job] += 1
                loads = Counter(id(lease.source) for lease in version.leases.values() if lease.source is not None)
                assert all(holder.num_leases == loads[id(holder)] for holder in version.holders.values())
            assert members == feed.members
        assert counted == {name: job.nbytes for name, job in self.rules.jobs.items()}
        assert sum(counted.values()) == self.rules.memory.nbytes


def _outcome(effects: Effects) -> str:
    if effects.refusal is not None:
        return type(effects.refusal).__name__
    return type(effects.feed_answer).__name__


def snapshot(rules: Rules) -> tuple[object, ...]:
    """Return the state of all feeds as values that can be compared; versions and leases refer to each other."""
    known = (
        (
            feed.name,
            (feed.owner, feed.attempt, feed.secret, feed.keep, feed.first, feed.next, feed.highest_step),
            frozenset(feed.publishers),
            tuple(map(_version, feed.versions.values())),
            tuple(feed.ended.items()),
            frozenset(feed.members.items()),
            frozenset(feed.outcomes.items()),
            tuple(feed.latest.items()),
        )
        for feed in rules.feeds.feeds.values()
    )
    leases = tuple((lease.lease_id, lease.deadline, lease.outcome) for lease in rules.feeds.leases.values())
    return (*known, leases, rules.memory.nbytes)


def _version(version: state.Version) -> tuple[object, ...]:
    return (
        (version.number, version.state, version.facts, version.is_rewound, version.is_old, version.deadline),
        tuple(repr(part) for part in version.parts.values()),
        tuple(repr(holder) for holder in version.holders.values()),
        tuple(
            (lease.lease_id, lease.reader, frozenset(lease.tasks), lease.deadline) for lease in version.leases.values()
        ),
        (version.counted_nbytes, version.told_nbytes, frozenset(version.lost)),
    )


# --- random events ----------------------------------------------------------------------------------------------------


def random_event(simulation: Simulation, draw: random.Random) -> Event:
    """Return some event; most are such that versions become readable and are read."""
    kind = draw.random()
    if kind < 0.12:
        who = simulation.identity(draw.choice(JOBS), draw.randrange(NUM_CLIENTS))
        return Register(who, NUM_CLIENTS, who.incarnation // 1000, "host") if kind < 0.05 else Heartbeat(who)
    if kind < 0.13:
        return Leave(simulation.identity(draw.choice(JOBS), draw.randrange(NUM_CLIENTS)))
    if kind < 0.2:
        return Tick()
    if kind < 0.65:
        job = "trainer" if draw.random() < 0.97 else "rival"
        return random_publisher_event(simulation, simulation.identity(job, draw.randrange(NUM_CLIENTS)), draw)
    return random_reader_event(simulation, draw)


def random_publisher_event(simulation: Simulation, who: Identity, draw: random.Random) -> Event:
    feed = simulation.rules.feeds.feeds.get(FEED)
    is_open = feed is not None and who in feed.publishers
    if draw.random() < (0.03 if is_open else 0.8):
        return simulation.open(who)
    feed = feed or state.Feed(FEED, who.job, "", 0, b"", 1, 9, 9)
    numbers = [
        *sorted(simulation.announced)[-6:],
        feed.next,
        draw.choice((feed.first, max(feed.first, feed.next - 1), feed.next + 2)),
    ]
    open_ = [version for version in feed.versions.values() if version.state == state.PUBLISHING]
    number = open_[-1].number if open_ and draw.random() < 0.7 else draw.choice(numbers)
    kind, attempt = draw.random(), who.incarnation // 1000
    if kind < 0.3:
        said = simulation.announced.get(number)
        step = draw.choice((int(simulation.now), 3)) if said is None else said[0]
        event = simulation.announcement(who, number, step, draw.choice((3.0, 30.0)))
        is_known = number in feed.versions or number in feed.ended
        return replace(event, step=step + 1) if is_known and draw.random() < 0.05 else event
    if kind < 0.75:
        event = simulation.part(who, number)
        return replace(event, digest=b"other") if draw.random() < 0.03 and _has_part(feed, who, number) else event
    if kind < 0.78:
        return feeds.Abort(who, FEED, attempt, number, "cannot")
    if kind < 0.85:
        return feeds.Retire(who, FEED, attempt, number)
    return feeds.Withdraw(who, FEED, attempt, number)


def _has_part(feed: state.Feed, who: Identity, number: int) -> bool:
    version = feed.versions.get(number)
    return version is not None and who.task in version.parts


def random_reader_event(simulation: Simulation, draw: random.Random) -> Event:
    who = simulation.identity(draw.choice(READERS), draw.randrange(NUM_CLIENTS))
    believed = [(lease, belief) for (job, lease), belief in simulation.beliefs.items() if job == who.job]
    if not believed or draw.random() < 0.3:
        newest = max(simulation.announced, default=0)
        want = draw.choice(
            (feeds.NEWEST, feeds.NEWEST, feeds.Want(newer_than=max(newest - 1, 0)), feeds.Want(number=newest))
        )
        return feeds.Subscribe(who, FEED, "", draw.randrange(1, 1 << 30), want, "host")
    lease, belief = draw.choice(believed)
    kind = draw.random()
    if kind < 0.3:
        is_again = belief.until > simulation.now
        return feeds.Subscribe(who, FEED, "", lease, feeds.Want(number=belief.number), "host", is_again=is_again)
    if kind < 0.6:
        return feeds.Renew(who, FEED, lease)
    if kind < 0.75:
        return feeds.Done(who, FEED, lease, draw.choice(feeds.OUTCOMES))
    if kind < 0.92:
        digest = b"tree %d" % belief.number if draw.random() < 0.95 else b"other"
        return feeds.Serve(who, FEED, belief.number, digest, b"tcp://y", b"", draw.random() < 0.6, 7, "host")
    return feeds.StopServing(who, FEED, belief.number)


def run_randomly(simulation: Simulation, draw: random.Random, num_events: int) -> None:
    """Let so many events happen while time passes, now and then in jumps, and processes and the coordinator restart."""
    for job in JOBS:
        for task in range(NUM_CLIENTS):
            simulation.register(simulation.identity(job, task))
    for _ in range(num_events):
        chance = draw.random()
        simulation.now += 0.005  # numbers of versions, of which there are at most three here, begin with milliseconds
        if chance < 0.2:
            simulation.now += TICK_S * draw.random()
        elif chance < 0.204:
            simulation.pass_time(TIMEOUT_S + 1)
        elif chance < 0.206:
            simulation.now += 100.0  # the coordinator was stopped
        elif chance < 0.210:
            simulation.attempts[draw.choice(JOBS)] += 1
        elif chance < 0.214:
            simulation.lives[draw.choice(JOBS), draw.randrange(NUM_CLIENTS)] += 1
        elif chance < 0.219:
            simulation.restart()
        effects = simulation.happen(random_event(simulation, draw))
        if "not registered" in str(effects.refusal) or isinstance(effects.refusal, errors.FencedError):
            who = simulation.life.events[-1][0].who
            simulation.register(simulation.identity(who.job, who.task))
