"""The state of a registry: feeds, versions, parts, holders and leases. Only ``rules`` changes them.

How a version changes its state::

    PUBLISHING --the last part is put--> READABLE --a newer one is readable, or Retire--> RETIRING --> RELEASED
        |                                   |  ^                                             ^
        +--Abort, a lost client,--> FAILED  |  +--the clients are back, or a holder has all  |
           a deadline                       +--the clients with the bytes are lost--> LOST --+

Readers get leases on READABLE versions only. A version in RETIRING is RELEASED when its last lease has ended and all
clients have withdrawn their parts, or are lost.
Pure: no clock, no I/O.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from dtckpt.coordination.feeds.events import VersionSource
from dtckpt.coordination.task_identity import Identity

PUBLISHING, READABLE, RETIRING, LOST = "PUBLISHING", "READABLE", "RETIRING", "LOST"
RELEASED, FAILED = "RELEASED", "FAILED"
VERSION_STATES = (PUBLISHING, READABLE, RETIRING, LOST)
"""States of versions that have not ended."""
KEPT_ENDED = 32
"""How many ended versions of a feed are kept, to answer calls that come late."""
KEPT_READERS = 32
"""How many readers of a feed are remembered whose leases have ended."""


@dataclass(slots=True)
class VersionPart:
    """The part of a version that one client of the publisher has in its memory."""

    who: Identity
    endpoint: bytes
    digest: bytes
    nbytes: int
    host: str

    @property
    def told_nbytes(self) -> int:
        """How much of it goes into each answer to a reader."""
        return len(self.endpoint) + len(self.digest) + len(self.host)

    def source(self, *, is_lost: bool) -> VersionSource:
        return VersionSource(
            self.who.job,
            self.who.task,
            self.endpoint,
            self.digest,
            self.nbytes,
            self.host,
            is_whole=False,
            is_holder=False,
            is_lost=is_lost,
        )


@dataclass(slots=True)
class VersionHolder:
    """A client of a reader that serves a version on.

    Args:
        key: The key that signs tickets for it.
        num_leases: Live leases whose first source it is.
        counted_nbytes: Memory that the registry counts for it.
    """

    who: Identity
    endpoint: bytes
    pieces: bytes
    is_whole: bool
    nbytes: int
    host: str
    key: bytes = field(repr=False)
    num_leases: int = 0
    counted_nbytes: int = 0

    def source(self) -> VersionSource:
        return VersionSource(
            self.who.job,
            self.who.task,
            self.endpoint,
            self.pieces,
            self.nbytes,
            self.host,
            is_whole=self.is_whole,
            is_holder=True,
            key=self.key,
        )


@dataclass(slots=True)
class Lease:
    """A group of clients of one job reads a version.

    Args:
        tasks: The clients of the group that need it; it ends when the last of them is done or gone.
        outcome: The worst that a client has said when it was done; "": none has said anything.
        source: The holder that the group reads from first; None: the publisher.
        counted_nbytes: Memory that the registry counts for it.
    """

    lease_id: int
    feed: str
    version: Version
    job: str
    group: str
    taken_at: float
    deadline: float
    tasks: set[Identity] = field(default_factory=set)
    source: VersionHolder | None = None
    outcome: str = ""
    counted_nbytes: int = 0

    @property
    def reader(self) -> str:
        return f"{self.job}/{self.group}" if self.group else self.job


@dataclass(slots=True)
class Version:
    """One version of a feed.

    Args:
        deadline: When it fails unless it is readable.
        is_old: Whether the publisher had announced it before a restart of the registry.
        lost: The clients of the publisher that are lost, with their parts.
        counted_nbytes: Memory that the registry counts for it and its parts.
        told_nbytes: The part of it that goes into each answer to a reader.
    """

    number: int
    step: int
    num_parts: int
    tree_digest: bytes
    is_rewound: bool
    highest_step: int
    is_old: bool
    announced_at: float
    deadline: float
    state: str = PUBLISHING
    readable_at: float | None = None
    parts: dict[int, VersionPart] = field(default_factory=dict)
    lost: set[int] = field(default_factory=set)
    holders: dict[tuple[str, int], VersionHolder] = field(default_factory=dict)
    leases: dict[int, Lease] = field(default_factory=dict)
    counted_nbytes: int = 0
    told_nbytes: int = 0

    @property
    def facts(self) -> tuple[int, int, bytes]:
        """The facts that all clients of the publisher must agree on."""
        return self.step, self.num_parts, self.tree_digest

    @property
    def nbytes(self) -> int:
        """The size of all parts that were put."""
        return sum(part.nbytes for part in self.parts.values())

    @property
    def is_served(self) -> bool:
        """Whether all bytes are in the memory of clients that are alive."""
        is_complete = len(self.parts) == self.num_parts and not self.lost
        return is_complete or any(holder.is_whole for holder in self.holders.values())


@dataclass(frozen=True, slots=True)
class Ended:
    """A version that has ended."""

    state: str
    facts: tuple[int, int, bytes]
    reason: str


@dataclass(frozen=True, slots=True)
class LastUse:
    """The version that a reader leased last, and the version that it uses.

    Args:
        number: The version that it leased last.
        outcome: How that lease ended, or the reader's last report.
        lease_id: Id of the lease.
        job: Job of the reader.
        applied: The version that it applied last; 0: none is known, or one was applied in part.
    """

    number: int
    outcome: str
    lease_id: int
    job: str
    applied: int


@dataclass(slots=True)
class Feed:
    """One feed and its owner, the job that publishes it.

    Args:
        principal: Whose job the owner is, by its token.
        first: Numbers below it belong to an earlier life of the registry, or to a former owner.
        next: Lowest number that no version has had.
        taken_at: When the owner took the feed over from another job; None: it did not.
        highest_step: Of all versions; -1: there was none.
        publishers: The clients of the owner that have opened the feed and are alive.
        members: How many records (of any kind) of the feed each job has.
        outcomes: How many leases have ended in which way.
        latest: The readers whose leases ended last.
    """

    name: str
    owner: str
    principal: str
    attempt: int
    secret: bytes = field(repr=False)
    keep: int
    first: int
    next: int
    taken_at: float | None = None
    highest_step: int = -1
    publishers: set[Identity] = field(default_factory=set)
    versions: dict[int, Version] = field(default_factory=dict)
    ended: dict[int, Ended] = field(default_factory=dict)
    members: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    latest: dict[str, LastUse] = field(default_factory=dict)

    @property
    def newest(self) -> Version | None:
        """The readable version of the highest number."""
        readable = [version for version in self.versions.values() if version.state == READABLE]
        return max(readable, key=lambda version: version.number, default=None)

    def leave(self, job: str) -> None:
        """Count one record of a job less."""
        self.members[job] -= 1
        if not self.members[job]:
            del self.members[job]


@dataclass(frozen=True, slots=True)
class Note:
    """One change of the state, for logs and metrics: the kind of event, a line of text, and the ids."""

    event: str
    text: str
    facts: Mapping[str, object]
