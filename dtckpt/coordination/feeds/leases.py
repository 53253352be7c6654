"""Leases and their sources as a reader has them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from dtckpt._proto import feeds_pb2 as pb
from dtckpt.errors import DtckptError, VersionGoneError


@dataclass(frozen=True, slots=True)
class FeedSource:
    """A client to read from.

    Args:
        job: Its job.
        client: Its id in the job.
        endpoint: Where it is reached, as it said.
        digest: Of the part's manifest; of a holder: which pieces it has, as it said.
        nbytes: Of the part; of a holder: how many bytes it has.
        host: Name of its host.
        is_whole: Whether it is a holder that has all bytes of the version.
        is_lost: Whether the coordinator hears it no more.
        ticket: Shows it that a lease lets this reader in.
    """

    job: str
    client: int
    endpoint: bytes
    digest: bytes
    nbytes: int
    host: str
    is_whole: bool
    is_lost: bool
    ticket: bytes = field(repr=False)


@dataclass(slots=True)
class FeedLease:
    """A lease on one version of a feed, which a group of clients of this job has.

    Args:
        feed: Name of the feed.
        lease_id: Drawn by the client that took it; the group's other clients join by it.
        group: Name of the group within the job.
        number: Of the version.
        step: Of the version.
        is_rewound: Whether the feed had a version of a later step before.
        highest_step: That step, if ``is_rewound``.
        tree_digest: Digest of the published tree.
        parts: The publisher's clients, by id.
        holders: Readers that serve the version on: on this host first, then the relays with fewest readers.
        ends_at: When it ends unless it is renewed, in seconds of the client's clock.
        lost: Publisher's clients that are lost since.
        error: Why it is over, as the coordinator said; None: it is not.
        clock: Monotonic seconds.
    """

    feed: str
    lease_id: int
    group: str
    number: int
    step: int
    is_rewound: bool
    highest_step: int
    tree_digest: bytes
    parts: tuple[FeedSource, ...]
    holders: tuple[FeedSource, ...]
    ends_at: float
    lost: tuple[int, ...] = ()
    error: DtckptError | None = None
    clock: Callable[[], float] = field(default=time.monotonic, repr=False)

    def raise_if_over(self) -> None:
        """Raise if the publisher may free its memory.

        Raises:
            VersionGoneError: The lease could not be renewed in time, or has lasted too long.
            SourceLostError: The clients that have the version are lost.
        """
        if self.error is None and self.clock() >= self.ends_at:
            self.error = VersionGoneError(
                f"lease on version {self.number} of feed {self.feed!r} could not be renewed in time; take a new one"
            )
        if self.error is not None:
            raise self.error

    def brought_up(self, told: FeedLease) -> FeedLease:
        """Take over the last facts of the registry, and return this lease, which all its users share."""
        self.parts, self.holders, self.lost = told.parts, told.holders, told.lost
        self.ends_at = max(self.ends_at, told.ends_at)
        return self

    @classmethod
    def from_proto(cls, request: pb.SubscribeRequest, lease: pb.Lease, ends_at: float) -> FeedLease:
        """Return the lease in the answer to a request."""
        return cls(
            request.feed,
            request.lease,
            request.group,
            lease.number,
            lease.step,
            lease.is_rewound,
            lease.highest_step,
            lease.tree_digest,
            tuple(_source(part, lease.ticket) for part in lease.parts),
            tuple(_source(holder, holder.ticket) for holder in lease.holders),
            ends_at,
            tuple(part.client for part in lease.parts if part.is_lost),
        )


def _source(source: pb.Source, ticket: bytes) -> FeedSource:
    return FeedSource(
        source.job,
        source.client,
        source.endpoint,
        source.digest,
        source.nbytes,
        source.host,
        source.is_whole,
        source.is_lost,
        ticket,
    )
