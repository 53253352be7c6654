"""`VersionChoice`: the clients of a reader choose one version of a feed, and keep a lease on it while they read.

The leader waits for the version, takes the lease, and tells the others, in round ``restore/lease``. The others join the
lease. So all clients read the same version, whatever is published meanwhile.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from dtckpt.checkpoint.collective import Collective
from dtckpt.checkpoint.live.feed_client import feed_client
from dtckpt.checkpoint.live.version_checkpoint import open_version
from dtckpt.checkpoint.live.versions import parse_location
from dtckpt.checkpoint.parts.part_files import PartCheckpoint
from dtckpt.checkpoint.reading.checkpoint import Checkpoint
from dtckpt.checkpoint.reading.checkpoint_files import CheckpointFiles
from dtckpt.checkpoint.timing import BARRIER
from dtckpt.coordination.connect import current_coordination
from dtckpt.coordination.feeds.client import FeedClient
from dtckpt.coordination.feeds.events import APPLIED, FAILED, Want
from dtckpt.coordination.feeds.leases import FeedLease
from dtckpt.errors import CoordinationError
from dtckpt.format.digest import bytes_digest
from dtckpt.storage.location import Location

logger = logging.getLogger("dtckpt.live")

TIMEOUT_S = 60.0
"""How long a restore of ``live://feed`` waits for a version, and for each answer of the publisher."""


@dataclass(slots=True)
class VersionChoice:
    """How the clients of a reader choose a version.

    Args:
        feed: Name of the feed.
        want: Which version.
        wait_s: How long the leader waits for such a version.
        timeout_s: Longest wait for each answer of the publisher.
        layout_tags: The layout tags that the reader expects; see `dtckpt.Subscriber`.
        group: Name of these clients among all readers of their job; default: made of their numbers.

    Attributes:
        lease: The lease on the version that was chosen last.
        opened: That version, open.
    """

    feed: str
    want: Want
    wait_s: float = TIMEOUT_S
    timeout_s: float = TIMEOUT_S
    layout_tags: Mapping[str, str] = field(default_factory=dict)
    group: str = ""
    lease: FeedLease | None = None
    opened: list[PartCheckpoint] = field(default_factory=list)

    @classmethod
    def of_location(cls, location: object) -> VersionChoice:
        """Return the choice that a location asks for."""
        feed, step = parse_location(location)
        return cls(feed, Want(step=step))

    @contextmanager
    def __call__(self, collective: Collective) -> Iterator[Callable[[], Checkpoint]]:
        """Choose a version; yield the function that opens it. The lease ends with the context.

        Collective: Over the clients of the operation; its round ``lease``.

        Raises:
            VersionTimeoutError: There is no such version in time.
            VersionGoneError: The version has ended.
            SourceLostError: The clients that have it are lost.
        """
        feeds = feed_client(current_coordination())
        group = self.group or _group_of(collective)
        outcome = FAILED

        def choose() -> bytes:
            if not collective.is_leader:
                return b""
            self.lease = feeds.subscribe(self.feed, want=self.want, group=group, timeout_s=self.wait_s)
            return json.dumps([self.lease.lease_id, self.lease.number]).encode()

        def open_() -> Checkpoint:
            if self.lease is None:
                self.lease = feeds.subscribe(
                    self.feed, want=Want(number=number), group=group, lease_id=lease_id, timeout_s=self.timeout_s
                )
            checkpoint = open_version(self.lease, self.timeout_s, self.layout_tags)
            self.opened = [checkpoint]
            return checkpoint

        self.lease = None
        try:
            payloads = collective.run_round("lease", choose, phase=BARRIER)  # to wait for a version is no work
            lease_id, number = json.loads(payloads[collective.leader])
            yield open_
            outcome = APPLIED
        finally:
            _end(feeds, self.lease, outcome)


def _end(feeds: FeedClient, lease: FeedLease | None, outcome: str) -> None:
    """Let a lease end. If the coordinator does not hear it, it ends by itself: what was read stays what it is."""
    if lease is not None:
        try:
            feeds.done(lease, outcome)
        except CoordinationError as error:
            logger.warning("the lease on version %d of feed %r was not given back: %s", lease.number, lease.feed, error)


def _group_of(collective: Collective) -> str:
    return f"{bytes_digest(repr(collective.participants).encode()):016x}"


class LiveCheckpoint(Checkpoint):
    """A live version, open for reading; the lease on it ends when it is closed.

    Args:
        path: Its location.
        files: Its parts.
        feeds: The client that has the lease.
        lease: The lease.
    """

    def __init__(self, path: Location, files: CheckpointFiles, feeds: FeedClient, lease: FeedLease) -> None:
        super().__init__(path, files)
        self._feeds = feeds
        self.lease = lease

    def close(self) -> None:
        """End the lease, and close the parts."""
        super().close()
        _end(self._feeds, self.lease, APPLIED)


def open_live(location: object) -> LiveCheckpoint:
    """Open the newest version of a feed, or the newest of a step. Local; the lease lasts until it is closed.

    Raises: as `VersionChoice`.
    """
    choice, feeds = VersionChoice.of_location(location), feed_client(current_coordination())
    lease = feeds.subscribe(
        choice.feed, want=choice.want, group=f"client {current_coordination().member.client}", timeout_s=choice.wait_s
    )
    try:
        opened = open_version(lease, choice.timeout_s)
    except BaseException:
        _end(feeds, lease, FAILED)
        raise
    return LiveCheckpoint(opened.path, opened.files, feeds, lease)
