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
from dtckpt.checkpoint.live.announcer import Announcer
from dtckpt.checkpoint.live.feed_client import feed_client
from dtckpt.checkpoint.live.relay import Relay
from dtckpt.checkpoint.live.version_checkpoint import open_version
from dtckpt.checkpoint.live.versions import parse_location, title_of_version
from dtckpt.checkpoint.parts.held_boxes import HeldBoxes
from dtckpt.checkpoint.parts.part_files import PartCheckpoint
from dtckpt.checkpoint.reading.checkpoint import Checkpoint
from dtckpt.checkpoint.reading.checkpoint_files import CheckpointFiles
from dtckpt.checkpoint.timing import BARRIER
from dtckpt.coordination.api import Coordination
from dtckpt.coordination.connect import current_coordination
from dtckpt.coordination.feeds.client import FeedClient
from dtckpt.coordination.feeds.events import APPLIED, FAILED, FETCHED, Want
from dtckpt.coordination.feeds.leases import FeedLease
from dtckpt.errors import CheckpointNotFoundError, DtckptError, VersionGoneError, VersionTimeoutError
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
        held: The boxes that the output memory holds.
        announcer: Announces the boxes that were read, for later versions.
        relay: Keeps the version on this host, and serves it to further readers.
        registry: ``host:port`` of the publisher's registry; empty: the coordinator.
        outcome: The result of a successful read: `APPLIED`, or `FETCHED` if the version is beside its target.

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
    held: HeldBoxes | None = None
    announcer: Announcer | None = None
    relay: Relay | None = None
    registry: str = ""
    outcome: str = APPLIED
    lease: FeedLease | None = None
    opened: list[PartCheckpoint] = field(default_factory=list)
    _feeds: FeedClient | None = field(default=None, init=False, repr=False)
    _is_leader: bool = field(default=False, init=False, repr=False)

    @classmethod
    def of_location(cls, location: object) -> VersionChoice:
        """Return the choice that a location asks for."""
        feed, step, registry = parse_location(location)
        return cls(feed, Want(step=step), registry=registry)

    @contextmanager
    def __call__(self, collective: Collective) -> Iterator[Callable[[], Checkpoint]]:
        """Choose a version; yield the function that opens it. The lease ends with the context.

        Collective: Over the clients of the operation; its round ``lease``.

        Raises:
            VersionTimeoutError: There is no such version in time.
            VersionGoneError: The version has ended.
            SourceLostError: The clients that have it are lost.
        """
        feeds = self._feeds = feed_client(current_coordination(), self.registry)
        self._is_leader = collective.is_leader
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
            if self.relay is not None:
                self.lease = self.relay.hold(self.lease)
            own = None if self.relay is None else self.relay.folder
            checkpoint = open_version(
                self.lease, self.timeout_s, self.held, own=own, layout_tags=self.layout_tags, registry=self.registry
            )
            self.opened = [checkpoint]
            return checkpoint

        self.lease = None
        try:
            payloads = collective.run_round("lease", choose, phase=BARRIER)  # to wait for a version is no work
            lease_id, number = json.loads(payloads[collective.leader])
            yield open_
            outcome = self.outcome
            if self.announcer is not None and self.lease is not None:
                self.announcer.announce(self.lease, self.opened[-1].parts)
        finally:
            _end(feeds, self.lease, outcome)

    def tell_use(self, outcome: str) -> None:
        """Say that the version was applied, or that this client failed to apply it. Local; does not wait.

        The leader speaks for the clients that have applied it.
        """
        if self._feeds is not None and self.lease is not None and (self._is_leader or outcome == FAILED):
            self._feeds.tell_use(self.lease, outcome)


def _end(feeds: FeedClient, lease: FeedLease | None, outcome: str) -> None:
    """Tell the coordinator that a lease is needed no more. If it cannot be told, the lease ends with this process."""
    if lease is not None:
        try:
            feeds.done(lease, outcome)
        except DtckptError as error:  # what was read is read, and an error of the read must not be hidden
            logger.warning("%s stays leased for now: %s", title_of_version(lease.feed, lease.number, lease.step), error)


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
        _end(self._feeds, self.lease, FETCHED)

    def tell_use(self, outcome: str) -> None:
        """Say that the version was applied after it was closed, or that this has failed. Local; does not wait."""
        self._feeds.tell_use(self.lease, outcome)


def open_live(location: object, *, coordination: Coordination | None = None, wait_s: float = 0.0) -> LiveCheckpoint:
    """Open the newest version of a feed, or the newest of a step. Local; the lease lasts until it is closed.

    Args:
        location: ``live://feed``, ``live://feed@step`` or ``live://host:port/feed``.
        coordination: Of the reader; default: of this process.
        wait_s: How long to wait for such a version.

    Raises:
        CheckpointNotFoundError: There is no such version in time.
        SourceLostError: The clients that have it are lost.
        ConfigError: There is no coordinator, or the location is malformed.
    """
    coordination = current_coordination() if coordination is None else coordination
    choice = VersionChoice.of_location(location)
    feeds = feed_client(coordination, choice.registry)
    group = f"client {coordination.member.client}"
    try:
        lease = feeds.subscribe(choice.feed, want=choice.want, group=group, timeout_s=wait_s)
    except (VersionTimeoutError, VersionGoneError) as error:
        raise CheckpointNotFoundError(f"there is no version at {location}: {error}") from None
    try:
        opened = open_version(lease, choice.timeout_s, registry=choice.registry)
    except BaseException:
        _end(feeds, lease, FAILED)
        raise
    return LiveCheckpoint(opened.path, opened.files, feeds, lease)
