"""The rules of feeds: which versions are readable, which readers hold leases, and which memory must stay.

Pure: no clock, no I/O, no randomness. One object holds the state, and `FeedRules.accept` changes it::

    call of a client  ->  event  ->  accept(event, now)  ->  answer, notes for the log, feeds that have changed

The coordinator calls it from its own ``apply``, for all jobs. A publisher may run the same object in one of its
processes, for readers that are given its address. The process that runs the rules tells them of lost clients
(`FeedRules.gone`) and of the time (`FeedRules.tick`).

Invariants; ``tests/coordination/feed_simulation.py`` checks them after every event:

* A lease is granted only on a version of which all parts were put. The last part makes the version readable in the
  same event.
* Parts of a version never change their digests.
* Numbers of new versions of a feed only grow.
* No part is withdrawn under a live lease. A registry that was restarted does not know the leases that its earlier life
  has granted. So it lets no part of an older version go until a lease period has passed: by then each reader has
  renewed its lease here, or has lost it.
* Memory is bounded: everything that is kept is counted before it is kept.

A restarted registry starts empty. Publishers open their feeds again, and announce and put the versions that they have
in memory, under the old numbers. Readers take their leases again, by the old ids.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import replace

from dtckpt import errors
from dtckpt.coordination.barrier_texts import task_name
from dtckpt.coordination.feeds import events
from dtckpt.coordination.feeds.events import (
    APPLIED,
    FETCHED,
    MAX_TEXT_CHARS,
    Abort,
    Announce,
    Done,
    FeedAnswer,
    FeedEvent,
    FeedOpened,
    Leased,
    NotYet,
    OpenFeed,
    PublisherEvent,
    PutPart,
    Renew,
    Retire,
    Serve,
    Served,
    StopServing,
    Subscribe,
    VersionState,
    Want,
    Withdraw,
)
from dtckpt.coordination.feeds.state import (
    FAILED,
    LOST,
    PUBLISHING,
    READABLE,
    RELEASED,
    RETIRING,
    Feed,
    Lease,
    Version,
    VersionHolder,
    VersionPart,
)
from dtckpt.coordination.feeds.tickets import holder_key
from dtckpt.coordination.feeds.transitions import (
    FEED_NBYTES,
    HOLDER_NBYTES,
    LEASE_NBYTES,
    LEASE_TASK_NBYTES,
    PART_NBYTES,
    PUBLISHER_NBYTES,
    SOME,
    VERSION_NBYTES,
    Transitions,
    progress_of,
)
from dtckpt.coordination.task_identity import Identity

MAX_FEEDS = 16
"""Of one job."""
MAX_VERSIONS = 64
"""Of one feed that have not ended."""
MAX_SKIPPED = 1000
"""How many numbers a publisher may leave out: numbers must not run ahead of the clock that they begin with."""
MAX_LEASES = 16_384
"""Of one feed."""
MAX_LEASES_OF_READER = 4
"""Of one group on one version; a group needs one."""
MAX_HOLDERS = 4096
"""Of one version."""
MAX_HOLDERS_TOLD = 64
"""How many holders a reader is told of."""
MAX_TOLD_BYTES = 4 << 20
"""Endpoints and digests of one version, all of which each reader is told."""
MAX_LEASE_S = 3600.0
"""Longest life of a lease, however often its reader renews it: a reader that hangs must not hold memory for ever."""


class NotKnownError(errors.CoordinationError):
    """The registry does not know the feed, the version or the lease, perhaps because it was restarted."""


class FeedLimitError(errors.CoordinationError):
    """A limit of the registry is reached."""


class MemoryLimit:
    """An `Account` of all jobs together, for a registry that has no quotas.

    Args:
        nbytes: How many bytes there are.
    """

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self.taken = 0

    def __call__(self, job: str, nbytes: int, what: str) -> None:
        """Count more bytes, or fewer.

        Raises:
            FeedLimitError: They do not fit.
        """
        if nbytes > 0 and self.taken + nbytes > self._nbytes:
            raise FeedLimitError(
                f"no room for {what} of job {job!r}: {self.taken} bytes of {self._nbytes} are taken; read or publish "
                "fewer versions at one time"
            )
        self.taken += nbytes


class FeedRules(Transitions):
    """All feeds of one registry; the base class describes the arguments and attributes."""

    def accept(self, event: FeedEvent, now: float) -> FeedAnswer:
        """Let an event happen.

        Raises:
            DtckptError: The event is refused, and has changed nothing; the classes of events name the errors.
        """
        self._start(now)
        match event:
            case OpenFeed():
                return self._open(event, now)
            case Announce():
                return self._announce(event, now)
            case PutPart():
                return self._put(event, now)
            case Abort():
                self._abort(event)
            case Retire():
                return self._take_back(event)
            case Withdraw():
                return self._withdraw(event, now)
            case Subscribe():
                return self._subscribe(event, now)
            case Renew():
                return self._renew(event, now)
            case Done():
                self._done(event)
            case Serve():
                return self._serve(event)
            case StopServing():
                self._stop_serving(event)
        return None

    # --- publishers -----------------------------------------------------------------------------------------------

    def _open(self, event: OpenFeed, now: float) -> FeedOpened:
        who, feed = event.who, self.feeds.get(event.feed)
        if feed is None or feed.owner != who.job:
            feed = self._begin(event, feed, now)
        elif event.attempt < feed.attempt:
            raise errors.FencedError(_superseded(feed, who, event.attempt))
        elif event.attempt > feed.attempt:
            self._fence(feed, event)
        if who not in feed.publishers:
            self._count(who.job, PUBLISHER_NBYTES, f"a publisher of feed {feed.name!r}")
            feed.publishers.add(who)
            feed.members[who.job] += 1
        feed.keep, feed.next = event.keep, max(feed.next, event.last_number + 1)
        return FeedOpened(feed.next, feed.secret, self.lease_s)

    def _begin(self, event: OpenFeed, former: Feed | None, now: float) -> Feed:
        """Make a job the owner of a feed that has no owner, or whose owner is gone."""
        owner, first = event.who.job, max(event.floor, event.last_number + 1)
        if former is not None:
            self._refuse_rival(former, event)
            first = max(first, former.next)
        if sum(feed.owner == owner for feed in self.feeds.values()) >= MAX_FEEDS:
            raise FeedLimitError(f"job {owner!r} has {MAX_FEEDS} feeds; a job has at most so many")
        self._count(owner, FEED_NBYTES, f"feed {event.feed!r}")
        if former is not None:
            self._drop(former)
        taken_at = None if former is None else now
        feed = Feed(event.feed, owner, event.principal, event.attempt, event.secret, event.keep, first, first, taken_at)
        self.feeds[feed.name] = feed
        self._note("feed_opened", feed, f"opened by job {owner!r}, attempt {event.attempt}")
        return feed

    def _refuse_rival(self, feed: Feed, event: OpenFeed) -> None:
        if not event.is_granted and event.principal != feed.principal:
            raise errors.CoordinatorPermissionError(
                f"feed {feed.name!r} is job {feed.owner!r}'s, and the token of job {event.who.job!r} may not publish it"
            )
        if feed.publishers:
            raise errors.FencedError(
                f"feed {feed.name!r} is published by job {feed.owner!r}, attempt {feed.attempt}, which is alive; got "
                f"job {event.who.job!r}; end one of the two, or give the feed another name"
            )

    def _fence(self, feed: Feed, event: OpenFeed) -> None:
        """Begin a new attempt of the owner; its registry hears the clients of the old one no more."""
        self._note("feed_fenced", feed, f"attempt {event.attempt} fences attempt {feed.attempt}")
        self.gone(feed.owner, None, f"attempt {event.attempt} has begun", feeds=[feed])
        feed.attempt, feed.secret, feed.next = event.attempt, event.secret, max(feed.next, event.floor)
        for version in list(feed.versions.values()):
            if version.state == LOST and not version.leases:
                self._finish(feed, version, LOST, "its publisher was restarted")

    def _feed_of(self, event: PublisherEvent) -> Feed:
        """Return the feed of a publisher's event, if the client may still publish it."""
        feed, who = self.feeds.get(event.feed), event.who
        if feed is None:
            raise NotKnownError(f"no feed {event.feed!r} is open")
        if feed.owner != who.job:
            raise errors.FencedError(f"feed {feed.name!r} is published by job {feed.owner!r}, and not by {who.job!r}")
        if event.attempt < feed.attempt:
            raise errors.FencedError(_superseded(feed, who, event.attempt))
        if event.attempt > feed.attempt or who not in feed.publishers:
            raise NotKnownError(f"{task_name(who.job, who.task)} has not opened feed {feed.name!r}")
        return feed

    def _announce(self, event: Announce, now: float) -> VersionState:
        feed = self._feed_of(event)
        number, facts = event.number, (event.step, event.num_parts, event.tree_digest)
        known = feed.versions.get(number) or feed.ended.get(number)
        if known is not None and known.facts != facts:
            raise errors.FeedConflictError(
                f"version {number} of feed {feed.name!r} was announced differently: "
                f"{task_name(feed.owner, event.who.task)} says {_facts(facts)}; expected {_facts(known.facts)} as the "
                "first client said"
            )
        if isinstance(known, Version):
            return _state_of(feed, number)
        is_old = number < feed.first if known is None else known.state == LOST
        if not is_old:
            self._refuse_used(feed, number)
        if len(feed.versions) >= MAX_VERSIONS:
            self._drop_lost(feed)
        self._count(feed.owner, VERSION_NBYTES, f"version {number} of feed {feed.name!r}")
        version = Version(
            number,
            event.step,
            event.num_parts,
            event.tree_digest,
            event.is_rewound if is_old else event.step < feed.highest_step,
            feed.highest_step,
            is_old,
            now,
            now + event.timeout_s,
            counted_nbytes=VERSION_NBYTES,
        )
        feed.ended.pop(number, None)
        feed.versions[number] = self._publishing[feed.name, number] = version
        feed.next, feed.highest_step = max(feed.next, number + 1), max(feed.highest_step, event.step)
        return _state_of(feed, version.number)

    def _refuse_used(self, feed: Feed, number: int) -> None:
        """Refuse a new version whose number was used, or before which another version is not finished."""
        if number > feed.next + MAX_SKIPPED:
            raise errors.FeedConflictError(
                f"version of feed {feed.name!r} has number {number}; expected {feed.next}, or at most {MAX_SKIPPED} "
                "more"
            )
        if number < feed.next or number in feed.ended:
            self._version(feed, number)  # raises, as the version has ended
        other = next(
            (other for other in feed.versions.values() if other.state == PUBLISHING and not other.is_old), None
        )
        if other is not None:
            raise errors.FeedConflictError(
                f"version {number} of feed {feed.name!r} was announced while version {other.number} has "
                f"{len(other.parts)} of {other.num_parts} parts; expected its other parts, or its abort"
            )

    def _drop_lost(self, feed: Feed) -> None:
        for version in list(feed.versions.values()):
            if version.state == LOST and not version.leases:
                self._finish(feed, version, LOST, "too many versions were newer")
        if len(feed.versions) >= MAX_VERSIONS:
            raise FeedLimitError(
                f"feed {feed.name!r} has {MAX_VERSIONS} versions that are not released; "
                f"{_readers(feed.versions.values())} hold them"
            )

    def _version(self, feed: Feed, number: int) -> Version:
        """Return a version that has not ended."""
        version = feed.versions.get(number)
        if version is not None:
            return version
        ended = feed.ended.get(number)
        if ended is not None and ended.state == FAILED:
            raise errors.FeedConflictError(
                f"version {number} of feed {feed.name!r} has failed: {ended.reason}; publish again, under a new number"
            )
        if ended is not None or feed.first <= number < feed.next:
            why = f": {ended.reason}" if ended is not None and ended.reason else ""
            raise errors.VersionGoneError(f"version {number} of feed {feed.name!r} is retired{why}")
        raise NotKnownError(f"feed {feed.name!r} has no version {number}")

    def _put(self, event: PutPart, now: float) -> VersionState:
        feed, client = self._feed_of(event), event.who.task
        version = self._version(feed, event.number)
        what = f"part {client} of version {version.number} of feed {feed.name!r}"
        if client >= version.num_parts:
            raise errors.ConfigError(f"there is no {what}; expected a client from 0 to {version.num_parts - 1}")
        part = version.parts.get(client)
        if part is None and version.state != PUBLISHING:
            raise errors.VersionGoneError(f"{what} was withdrawn")
        if part is not None and (part.digest, part.nbytes) != (event.digest, event.nbytes):
            raise errors.FeedConflictError(
                f"{what} was put with another content: got digest {event.digest.hex()} of {event.nbytes} bytes, "
                f"expected {part.digest.hex()} of {part.nbytes} bytes"
            )
        new = VersionPart(event.who, event.endpoint, event.digest, event.nbytes, event.host[:MAX_TEXT_CHARS])
        told_nbytes = new.told_nbytes - (part.told_nbytes if part is not None else 0)
        if version.told_nbytes + told_nbytes > MAX_TOLD_BYTES:
            raise FeedLimitError(
                f"no room for {what}: endpoints and digests of all parts have more than {MAX_TOLD_BYTES} bytes"
            )
        self._count_version(feed, version, told_nbytes + (PART_NBYTES if part is None else 0), what)
        version.told_nbytes += told_nbytes
        version.parts[client] = new
        was_lost = client in version.lost
        version.lost.discard(client)
        if was_lost:
            self._reassess(feed, version)
        elif version.state == PUBLISHING and len(version.parts) == version.num_parts:
            self._make_readable(feed, version, now)
        return _state_of(feed, version.number)

    def _abort(self, event: Abort) -> None:
        feed = self._feed_of(event)
        ended = feed.ended.get(event.number)
        if ended is not None and ended.state == FAILED:
            return
        version = self._version(feed, event.number)
        if version.state != PUBLISHING:
            raise errors.FeedConflictError(
                f"version {version.number} of feed {feed.name!r} is {version.state} and cannot be aborted; retire it"
            )
        who = task_name(event.who.job, event.who.task)
        self._fail(feed, version, f"{who} has aborted it: {event.reason[:MAX_TEXT_CHARS]}")

    def _take_back(self, event: Retire) -> VersionState:
        feed = self._feed_of(event)
        if event.number in feed.ended:
            return _state_of(feed, event.number)
        version = self._version(feed, event.number)
        if version.state == PUBLISHING:
            raise errors.FeedConflictError(
                f"version {version.number} of feed {feed.name!r} is being published and cannot be retired; abort it"
            )
        if version.state != RETIRING:
            self._retire(feed, version)
        return _state_of(feed, version.number)

    def _withdraw(self, event: Withdraw, now: float) -> VersionState:
        feed, client = self._feed_of(event), event.who.task
        what = f"version {event.number} of feed {feed.name!r}"
        if event.number < feed.first and now < self._unknown_until(feed):
            raise errors.VersionLeasedError(
                f"{what} may be leased by readers that have not come back since the registry was restarted, or since "
                f"another job had the feed; its parts must stay for {self._unknown_until(feed) - now:.1f} s"
            )
        if event.number in feed.ended:
            return _state_of(feed, event.number)
        if event.number not in feed.versions and feed.first <= event.number < feed.next:
            return VersionState(event.number, RELEASED)
        version = self._version(feed, event.number)
        if version.state == PUBLISHING and version.is_old:  # other clients may have withdrawn it before the restart
            self._fail(feed, version, f"{task_name(event.who.job, client)} has withdrawn it")
            return _state_of(feed, event.number)
        if version.state != RETIRING:
            raise errors.FeedConflictError(f"{what} is {version.state}; expected to free it after it is retired")
        if version.leases:
            raise errors.VersionLeasedError(f"{what} is leased by {_readers([version])}; its parts must stay")
        part = version.parts.pop(client, None)
        version.lost.discard(client)
        if part is not None:
            self._count_version(feed, version, -PART_NBYTES - part.told_nbytes)
        self._settle(feed, version)
        return _state_of(feed, version.number)

    # --- readers ----------------------------------------------------------------------------------------------------

    def _subscribe(self, event: Subscribe, now: float) -> Leased | NotYet:
        feed, who = self.feeds.get(event.feed), event.who
        if feed is None:
            return NotYet(f"no job publishes feed {event.feed!r}")
        _refuse_stranger(feed, event)
        lease = self.leases.get((feed.name, event.lease))
        if lease is None:
            version = self._choose(feed, event.want, now, is_again=event.is_again)
            if isinstance(version, NotYet):
                return version
            lease = self._lease(feed, version, event, now)
        elif (lease.job, lease.group) != (who.job, event.group) or event.want.number not in (0, lease.version.number):
            raise errors.FeedConflictError(
                f"lease {event.lease:x} on feed {feed.name!r} is of reader {lease.reader!r} on version "
                f"{lease.version.number}; got job {who.job!r}, group {event.group!r}, which wants {event.want}"
            )
        self._go_on(feed, lease, who, now)
        return self._answer(feed, lease, event.host, now)

    def _choose(self, feed: Feed, want: Want, now: float, *, is_again: bool) -> Version | NotYet:
        """Return the version that a reader gets, or why it waits."""
        if want.number:
            return self._exactly(feed, want.number, now, is_again=is_again)
        fitting = [
            version
            for version in feed.versions.values()
            if version.number > want.newer_than
            and want.step in (None, version.step)
            and (want.allow_rewound or not version.is_rewound)
        ]
        readable = [version for version in fitting if version.state == READABLE]
        if readable:
            return max(readable, key=lambda version: version.number)
        why = "".join(f"; {progress_of(version)}" for version in fitting[-SOME:])
        if want.newer_than >= feed.next:
            # The registry that gave the number has died, and numbers come from a clock.
            why += (
                f"; its numbers begin at {feed.first}, so the reader's version is of an earlier registry whose clock "
                "was ahead; a reader that does not ask for a newer version (newer=False) takes the newest one"
            )
        return NotYet(f"feed {feed.name!r} has no version yet that is {want}{why}")

    def _exactly(self, feed: Feed, number: int, now: float, *, is_again: bool) -> Version | NotYet:
        is_unknown = number not in feed.versions and number not in feed.ended
        if is_unknown and (number >= feed.next or (number < feed.first and now < self._unknown_until(feed))):
            return NotYet(f"feed {feed.name!r} has no version {number} yet")
        try:
            version = self._version(feed, number)
        except (NotKnownError, errors.FeedConflictError) as error:
            raise errors.VersionGoneError(error.message) from None
        if version.state == LOST:
            raise errors.SourceLostError(
                f"version {number} of feed {feed.name!r} cannot be read: {progress_of(version)}"
            )
        may_again = is_again and version.is_old and now < self._unknown_until(feed)
        if version.state == RETIRING and not may_again:
            raise errors.VersionGoneError(f"version {number} of feed {feed.name!r} is retired")
        return NotYet(progress_of(version)) if version.state == PUBLISHING else version

    def _lease(self, feed: Feed, version: Version, event: Subscribe, now: float) -> Lease:
        who = event.who
        lease = Lease(event.lease, feed.name, version, who.job, event.group, now, now + self.lease_s)
        num_leases = sum(len(each.leases) for each in feed.versions.values())
        num_own = sum((each.job, each.group) == (who.job, event.group) for each in version.leases.values())
        if num_leases >= MAX_LEASES or num_own >= MAX_LEASES_OF_READER:
            raise FeedLimitError(
                f"feed {feed.name!r} has {num_leases} leases, and reader {lease.reader!r} has {num_own} on version "
                f"{version.number}; at most {MAX_LEASES} and {MAX_LEASES_OF_READER} are possible"
            )
        lease.counted_nbytes = LEASE_NBYTES + LEASE_TASK_NBYTES
        self._count(who.job, lease.counted_nbytes, f"a lease on feed {feed.name!r}")
        lease.tasks.add(who)
        lease.source = next((holder for holder in _by_nearness(version, event.host) if holder.is_whole), None)
        if lease.source is not None:
            lease.source.num_leases += 1
        version.leases[lease.lease_id] = self.leases[feed.name, lease.lease_id] = lease
        feed.members[who.job] += 1
        return lease

    def _go_on(self, feed: Feed, lease: Lease, who: Identity, now: float) -> None:
        """Renew a lease for one more client of its group, or for a client that has it already."""
        if now >= lease.taken_at + MAX_LEASE_S:
            raise errors.VersionGoneError(
                f"lease of {lease.reader!r} on version {lease.version.number} of feed {feed.name!r} has lasted for "
                f"{MAX_LEASE_S:g} s, the longest time that is possible; take a new one"
            )
        if who not in lease.tasks:
            self._count(who.job, LEASE_TASK_NBYTES, f"a lease on feed {feed.name!r}")
            lease.counted_nbytes += LEASE_TASK_NBYTES
            lease.tasks.add(who)
        lease.deadline = now + self.lease_s
        self.leases.move_to_end((feed.name, lease.lease_id))

    def _answer(self, feed: Feed, lease: Lease, host: str, now: float) -> Leased:
        version = lease.version
        return Leased(
            version.number,
            version.step,
            version.is_rewound,
            version.highest_step,
            version.tree_digest,
            lease.reader,
            feed.secret,
            tuple(part.source(is_lost=client in version.lost) for client, part in sorted(version.parts.items())),
            tuple(holder.source() for holder in _told_holders(lease, host)),
            self.lease_s,
            lease.taken_at + MAX_LEASE_S - now,
        )

    def _own_lease(self, event: Renew) -> Lease:
        lease = self.leases.get((event.feed, event.lease))
        if lease is None:
            raise NotKnownError(f"feed {event.feed!r} has no lease {event.lease:x}")
        if lease.job != event.who.job:
            raise errors.FeedConflictError(
                f"lease {event.lease:x} on feed {event.feed!r} is of reader {lease.reader!r}"
            )
        return lease

    def _renew(self, event: Renew, now: float) -> VersionState:
        lease, feed = self._own_lease(event), self.feeds[event.feed]
        self._go_on(feed, lease, event.who, now)
        return _state_of(feed, lease.version.number)

    def _done(self, event: Done) -> None:
        lease, feed = self.leases.get((event.feed, event.lease)), self.feeds.get(event.feed)
        if feed is not None and lease is not None and event.who in lease.tasks:
            lease.outcome = max(lease.outcome, event.outcome, key=_WEIGHTS.index)
            self._leave_lease(feed, lease, {event.who}, lease.outcome)
        elif feed is not None and lease is None:
            _note_use(feed, event)

    def _serve(self, event: Serve) -> Served:
        feed, who = self.feeds.get(event.feed), event.who
        if feed is None:
            raise NotKnownError(f"no feed {event.feed!r} is open")
        _refuse_stranger(feed, event)
        version, place = self._version(feed, event.number), (who.job, who.task)
        if version.state == PUBLISHING or version.tree_digest != event.tree_digest:
            raise errors.FeedConflictError(
                f"{task_name(who.job, who.task)} cannot serve version {version.number} of feed {feed.name!r}: it is "
                f"{version.state}, with tree {version.tree_digest.hex()}; got tree {event.tree_digest.hex()}"
            )
        before = version.holders.get(place)
        if before is None and len(version.holders) >= MAX_HOLDERS:
            raise FeedLimitError(f"version {version.number} of feed {feed.name!r} has {MAX_HOLDERS} holders already")
        nbytes = HOLDER_NBYTES + len(event.endpoint) + len(event.pieces)
        self._count(who.job, nbytes - (before.counted_nbytes if before else 0), f"a holder for feed {feed.name!r}")
        key = holder_key(feed.secret, feed.name, version.number, who)
        holder = VersionHolder(
            who,
            event.endpoint,
            event.pieces,
            event.is_whole,
            event.nbytes,
            event.host[:MAX_TEXT_CHARS],
            key,
            counted_nbytes=nbytes,
        )
        if before is None:
            feed.members[who.job] += 1
        else:
            holder.num_leases = before.num_leases
            for other in version.leases.values():
                if other.source is before:
                    other.source = holder
        version.holders[place] = holder
        self._reassess(feed, version)
        return Served(version.number, key)

    def _stop_serving(self, event: StopServing) -> None:
        feed = self.feeds.get(event.feed)
        version = feed.versions.get(event.number) if feed is not None else None
        if feed is not None and version is not None and (event.who.job, event.who.task) in version.holders:
            self._remove_holder(feed, version, event.who.job, event.who.task)


def _state_of(feed: Feed, number: int) -> VersionState:
    if (ended := feed.ended.get(number)) is not None:
        return VersionState(number, ended.state)
    version, lost = feed.versions[number], tuple(sorted(feed.versions[number].lost))
    return VersionState(number, version.state, len(version.parts), len(version.leases), lost, version.is_rewound)


_WEIGHTS = ("", events.FETCHED, events.APPLIED, events.SKIPPED, events.FAILED)
"""Of the outcomes of a group's clients, the last one here counts. A group applies a version together: so if a client
has applied it, the group has, and that client's second `Done` changes nothing."""


def _note_use(feed: Feed, event: Done) -> None:
    """Note what became of a version whose lease has ended: it was applied, or a client failed to apply it."""
    for reader, use in feed.latest.items():
        if (use.lease_id, use.job) == (event.lease, event.who.job):
            if event.outcome == APPLIED and use.outcome == FETCHED:
                feed.latest[reader] = replace(use, outcome=APPLIED, applied=use.number)
            elif event.outcome == events.FAILED and use.outcome in (FETCHED, APPLIED):
                feed.latest[reader] = replace(use, outcome=events.FAILED, applied=0)
            return


def _refuse_stranger(feed: Feed, event: Subscribe | Serve) -> None:
    if not event.is_granted and event.principal != feed.principal:
        raise errors.CoordinatorPermissionError(
            f"the token of job {event.who.job!r} may not read feed {feed.name!r} of job {feed.owner!r}"
        )


def _by_nearness(version: Version, host: str) -> list[VersionHolder]:
    """Return the holders of a version: holders on the same host first, then the holders with fewest leases."""
    return sorted(
        version.holders.values(),
        key=lambda holder: (not host or holder.host != host, holder.num_leases, holder.who.job, holder.who.task),
    )


def _told_holders(lease: Lease, host: str) -> list[VersionHolder]:
    """Return the holders that a reader is told of: on its host, then its source, then by the number of leases.

    Each reader is told of the last ones in another order: holders that have no leases yet are not all asked in turn.
    """

    def order(holder: VersionHolder) -> tuple[bool, bool, int, int]:
        at_random = zlib.crc32(f"{lease.lease_id} {holder.who.job} {holder.who.task}".encode())
        return not host or holder.host != host, holder is not lease.source, holder.num_leases, at_random

    return sorted(lease.version.holders.values(), key=order)[:MAX_HOLDERS_TOLD]


def _readers(versions: Iterable[Version]) -> str:
    names = sorted({lease.reader for version in versions for lease in version.leases.values()})
    return errors.capped(map(repr, names), SOME) or "no readers"


def _facts(facts: tuple[int, int, bytes]) -> str:
    step, num_parts, tree_digest = facts
    return f"step {step}, {num_parts} parts, tree {tree_digest.hex()}"


def _superseded(feed: Feed, who: Identity, attempt: int) -> str:
    return (
        f"{task_name(who.job, who.task)} is of attempt {attempt}, but attempt {feed.attempt} publishes feed "
        f"{feed.name!r}"
    )
