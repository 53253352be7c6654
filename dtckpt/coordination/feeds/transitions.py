"""The transitions of versions and leases, each with the memory that it frees and the line that it logs.

Events begin them (``rules``), and so do clients that are gone, and time. Pure: no clock, no I/O.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container

from dtckpt import errors
from dtckpt.coordination.barrier_texts import task_name
from dtckpt.coordination.feeds.events import APPLIED, MAX_TEXT_CHARS
from dtckpt.coordination.feeds.state import (
    FAILED,
    KEPT_ENDED,
    KEPT_READERS,
    LOST,
    PUBLISHING,
    READABLE,
    RELEASED,
    RETIRING,
    Ended,
    Feed,
    LastUse,
    Lease,
    Note,
    Version,
)
from dtckpt.coordination.task_identity import Identity

MAX_JUDGED = 256
"""How many deadlines one `Transitions.tick` judges."""
SOME = 8
"""How many readers, clients or versions an error text names."""
FEED_NBYTES, VERSION_NBYTES, PART_NBYTES, PUBLISHER_NBYTES = 45_056, 2048, 640, 320
LEASE_NBYTES, LEASE_TASK_NBYTES, HOLDER_NBYTES = 1536, 320, 1024
"""Upper estimates of the memory that Python takes, without endpoints and digests."""
EXPIRED, GONE = "expired", "lost"
"""How a lease ended without a word of its reader."""

Account = Callable[[str, int, str], None]
"""Counts more bytes of a job, or fewer: job, bytes, and the object that needs them; raises if they do not fit."""


class Transitions:
    """All feeds of one registry.

    Args:
        lease_s: How long a lease lasts after it was taken or renewed.
        account: Counts memory.

    Attributes:
        notes: Changes since the caller last took them.
        changed: Names of feeds whose waiting readers should ask again, since the caller last took them.
    """

    def __init__(self, lease_s: float, account: Account) -> None:
        self.lease_s = lease_s
        self.feeds: dict[str, Feed] = {}
        self.leases: OrderedDict[tuple[str, int], Lease] = OrderedDict()  # in the order of their deadlines
        self.notes: list[Note] = []
        self.changed: set[str] = set()
        self._account = account
        self._publishing: dict[tuple[str, int], Version] = {}
        self._started_at: float | None = None

    def _start(self, now: float) -> None:
        if self._started_at is None:
            self._started_at = now

    def _unknown_until(self, feed: Feed) -> float:
        """Return when each lease that an earlier life of the registry, or of the feed, granted is renewed or has ended.

        A former owner may come back with versions in its memory; here their leases ended with its ownership.
        """
        return max(self._started_at or 0.0, feed.taken_at or 0.0) + self.lease_s

    # --- versions ---------------------------------------------------------------------------------------------------

    def _make_readable(self, feed: Feed, version: Version, now: float) -> None:
        del self._publishing[feed.name, version.number]
        version.state, version.readable_at = READABLE, now
        self._note("version_readable", feed, f"version {version.number} (step {version.step}) is readable", version)
        self.changed.add(feed.name)
        current = [each for each in feed.versions.values() if each.state in (READABLE, LOST)]
        for surplus in sorted(current, key=lambda each: each.number)[: -feed.keep]:
            self._retire(feed, surplus)

    def _retire(self, feed: Feed, version: Version) -> None:
        version.state = RETIRING
        self._note("version_retired", feed, f"version {version.number} retires", version)
        self.changed.add(feed.name)
        self._settle(feed, version)

    def _reassess(self, feed: Feed, version: Version) -> None:
        """Note whether a readable version can be read from clients that are alive."""
        if version.state == READABLE and not version.is_served:
            version.state = LOST
            self._note("version_lost", feed, f"version {version.number} is lost: {progress_of(version)}", version)
            self.changed.add(feed.name)
        elif version.state == LOST and version.is_served:
            version.state = READABLE
            self._note("version_readable", feed, f"version {version.number} is readable again", version)
            self.changed.add(feed.name)
        self._settle(feed, version)

    def _settle(self, feed: Feed, version: Version) -> None:
        """Release a retired version that no reader and no client needs."""
        if version.state == RETIRING and not version.leases and len(version.lost) == len(version.parts):
            self._finish(feed, version, RELEASED, "")

    def _fail(self, feed: Feed, version: Version, reason: str) -> None:
        self._note("version_failed", feed, f"version {version.number} has failed: {reason}", version)
        self._finish(feed, version, FAILED, reason)

    def _finish(self, feed: Feed, version: Version, state: str, reason: str) -> None:
        """End a version without leases; keep only how it ended."""
        for job, task in list(version.holders):
            holder = version.holders.pop((job, task))
            self._count(job, -holder.counted_nbytes)
            feed.leave(job)
        version.state = state
        del feed.versions[version.number]
        self._publishing.pop((feed.name, version.number), None)
        self._count(feed.owner, -version.counted_nbytes)
        feed.ended[version.number] = Ended(state, version.facts, reason[: 2 * MAX_TEXT_CHARS])
        while len(feed.ended) > KEPT_ENDED:
            del feed.ended[next(iter(feed.ended))]
        self.changed.add(feed.name)

    def _drop(self, feed: Feed) -> None:
        """Forget a feed with its versions, leases and holders."""
        for version in list(feed.versions.values()):
            for lease in list(version.leases.values()):
                self._end(feed, lease, GONE)
            if version.number in feed.versions:
                self._finish(feed, version, LOST, "the feed was given up")
        self._count(feed.owner, -FEED_NBYTES - PUBLISHER_NBYTES * len(feed.publishers))
        del self.feeds[feed.name]
        self.changed.add(feed.name)

    # --- leases and holders -----------------------------------------------------------------------------------------

    def _end(self, feed: Feed, lease: Lease, outcome: str) -> None:
        version = lease.version
        del version.leases[lease.lease_id], self.leases[feed.name, lease.lease_id]
        self._count(lease.job, -lease.counted_nbytes)
        feed.leave(lease.job)
        if lease.source is not None:
            lease.source.num_leases -= 1
        feed.outcomes[outcome] += 1
        before = feed.latest.pop(lease.reader, None)
        applied = version.number if outcome == APPLIED else before.applied if before is not None else 0
        feed.latest[lease.reader] = LastUse(version.number, outcome, lease.lease_id, lease.job, applied)
        while len(feed.latest) > KEPT_READERS:
            del feed.latest[next(iter(feed.latest))]
        if outcome in (EXPIRED, GONE):
            text = f"lease of {lease.reader!r} on version {version.number} has ended: the reader is {outcome}"
            self._note("lease_ended", feed, text, version, outcome=outcome, reader=lease.reader)
        self._settle(feed, version)

    def _remove_holder(self, feed: Feed, version: Version, job: str, task: int) -> None:
        holder = version.holders.pop((job, task))
        self._count(job, -holder.counted_nbytes)
        feed.leave(job)
        for lease in version.leases.values():
            if lease.source is holder:
                lease.source = None
        self._reassess(feed, version)

    # --- clients and time -------------------------------------------------------------------------------------------

    def gone(self, job: str, tasks: Container[int] | None, why: str, *, feeds: list[Feed] | None = None) -> None:
        """Note that clients of a job are lost, have left, or are replaced by other processes.

        Args:
            job: The job.
            tasks: Their numbers; None: all.
            why: For people: the end of a sentence about such a client.
            feeds: Only these; default: all.
        """
        for feed in list(self.feeds.values()) if feeds is None else feeds:
            if job in feed.members:
                self._without(feed, job, tasks, why)

    def _without(self, feed: Feed, job: str, tasks: Container[int] | None, why: str) -> None:
        def is_gone(who: Identity) -> bool:
            return who.job == job and (tasks is None or who.task in tasks)

        left = sorted((who for who in feed.publishers if is_gone(who)), key=lambda who: who.task)
        for who in left:
            feed.publishers.discard(who)
            feed.leave(job)
        self._count(feed.owner, -PUBLISHER_NBYTES * len(left))
        for version in list(feed.versions.values()):
            missing = next((who for who in left if who.task < version.num_parts), None)
            if version.state == PUBLISHING and missing is not None:
                self._fail(feed, version, f"{task_name(job, missing.task)}: {why}")
                continue
            for place, holder in list(version.holders.items()):
                if is_gone(holder.who):
                    self._remove_holder(feed, version, *place)
            for lease in list(version.leases.values()):
                if lease.job == job:
                    self._leave_lease(feed, lease, {who for who in lease.tasks if is_gone(who)}, lease.outcome or GONE)
            if version.number in feed.versions:
                version.lost |= {client for client, part in version.parts.items() if is_gone(part.who)}
                self._reassess(feed, version)

    def _leave_lease(self, feed: Feed, lease: Lease, left: set[Identity], outcome: str) -> None:
        """Let clients of a group need its lease no more; the last one ends it."""
        lease.tasks -= left
        lease.counted_nbytes -= LEASE_TASK_NBYTES * len(left)
        self._count(lease.job, -LEASE_TASK_NBYTES * len(left))
        if not lease.tasks:
            self._end(feed, lease, outcome)

    def is_needed(self, job: str) -> bool:
        """Whether other jobs read a feed of this job, or serve it on."""
        return any(
            feed.owner == job and any(version.leases or version.holders for version in feed.versions.values())
            for feed in self.feeds.values()
        )

    def forget(self, job: str) -> None:
        """Forget a job: its feeds, leases and holders."""
        self.gone(job, None, "the job is over")
        for feed in [feed for feed in self.feeds.values() if feed.owner == job]:
            self._drop(feed)

    def tick(self, now: float) -> bool:
        """End leases and versions whose deadline has passed, some at a time; return whether there may be more."""
        self._start(now)
        num_judged = 0
        while self.leases and num_judged < MAX_JUDGED:
            lease = next(iter(self.leases.values()))
            if now < lease.deadline:
                break
            self._end(self.feeds[lease.feed], lease, EXPIRED)
            num_judged += 1
        late = [key for key, version in self._publishing.items() if now >= version.deadline][: MAX_JUDGED - num_judged]
        for name, number in late:
            version = self._publishing[name, number]
            reason = f"{len(version.parts)} of {version.num_parts} parts came within "
            self._fail(self.feeds[name], version, f"{reason}{version.deadline - version.announced_at:g} s")
        return num_judged + len(late) >= MAX_JUDGED

    def pause(self, pause_s: float) -> None:
        """Note that the registry did not listen for a while, so that its clients could not be heard."""
        for lease in self.leases.values():
            lease.deadline += pause_s
        for version in self._publishing.values():
            version.deadline += pause_s
        self._started_at = (self._started_at or 0.0) + pause_s

    # --- memory and log ---------------------------------------------------------------------------------------------

    def _count(self, job: str, nbytes: int, what: str = "") -> None:
        if nbytes:
            self._account(job, nbytes, what)

    def _count_version(self, feed: Feed, version: Version, nbytes: int, what: str = "") -> None:
        self._count(feed.owner, nbytes, what)
        version.counted_nbytes += nbytes

    def _note(self, event: str, feed: Feed, text: str, version: Version | None = None, **more: object) -> None:
        facts: dict[str, object] = {"job": feed.owner, "feed": feed.name, "attempt": feed.attempt, **more}
        if version is not None:
            facts |= {"version": version.number, "step": version.step}
        self.notes.append(Note(event, f"feed {feed.name!r}: {text}", facts))


def told_uses(use: LastUse) -> list[tuple[int, str]]:
    """Return two versions of a reader, each with its outcome: the version that it uses, and its last version."""
    in_use = [(use.applied, APPLIED)] if use.applied not in (0, use.number) else []
    return [*in_use, (use.number, use.outcome)]


def progress_of(version: Version) -> str:
    """Describe a version that is not readable."""
    what = f"version {version.number} (step {version.step})"
    if version.state == PUBLISHING:
        return f"{what} has {len(version.parts)} of {version.num_parts} parts"
    if lost := sorted(version.lost):
        hosts = errors.capped(sorted({version.parts[client].host for client in lost} - {""}), SOME)
        clients = errors.capped([task_name(version.parts[client].who.job, client) for client in lost], SOME)
        return f"{what} was in the memory of {clients}{f' on {hosts}' if hosts else ''}, lost"
    return f"{what} is {version.state}"
