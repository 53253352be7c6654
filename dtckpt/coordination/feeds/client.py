"""Publish and read feeds through a coordinator: `FeedClient`, one for each process.

Every call may be repeated, and is repeated until the coordinator answers. A coordinator that was restarted knows no
feeds. So the client keeps the open feeds, versions, parts and leases of this process, and tells the coordinator of them
again: when a call finds that the coordinator does not know them, and with each renewal::

    thread of this client   renews leases, puts parts and serves again; after a restart: opens, announces, subscribes
    threads of callers      publish, subscribe, withdraw

Callers give the number of a version and its digests. So all clients of a publisher say the same, and the coordinator
finds a disagreement.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from dtckpt import errors
from dtckpt._proto import coordinator_pb2
from dtckpt._proto import feeds_pb2 as pb
from dtckpt._proto import feeds_pb2_grpc as pb_grpc
from dtckpt.coordination.feeds import events
from dtckpt.coordination.feeds.events import NEWEST, Want
from dtckpt.coordination.feeds.leases import FeedLease
from dtckpt.coordination.feeds.state import READABLE
from dtckpt.coordination.feeds.tickets import Claim, check_ticket
from dtckpt.coordination.grpc_calls import CALL_TIMEOUT_S, UnknownError, backoffs
from dtckpt.coordination.grpc_client import MAX_WAIT_S, GrpcCoordination
from dtckpt.coordination.identity import host_name

logger = logging.getLogger("dtckpt.coordination")
T = TypeVar("T")
Call = Callable[[pb_grpc.FeedsStub, float], T]

KEPT_SECRETS = 4
"""Secrets of a feed that tickets are checked with: after a restart of the coordinator readers have tickets of the
secret before."""
CLOSE_S = 1.0
"""How long `FeedClient.close` waits for a renewal that is under way; nothing depends on it."""
PROBE_S = 1.0
"""How long a reader looks whether a publisher's registry listens, before it makes a call."""
RENEWALS = 3
"""How often leases are renewed within their period."""


@dataclass(slots=True)
class _KeptVersion:
    """A version in this process's memory: what the coordinator was told of it."""

    announcement: pb.AnnounceRequest
    part: pb.PutPartRequest | None = None
    is_retired: bool = False
    is_freed: bool = False


@dataclass(slots=True)
class _Feed:
    """A feed that this process publishes."""

    request: pb.OpenFeedRequest
    keys: list[bytes] = field(default_factory=list)
    versions: dict[int, _KeptVersion] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PublishedVersion:
    """A version as the coordinator sees it.

    Args:
        number: Its number.
        phase: PUBLISHING, READABLE, RETIRING, LOST, RELEASED or FAILED.
        num_parts_put: How many clients have put their parts.
        num_leases: How many groups read it.
        lost: Clients of the publisher that are lost with their parts.
        is_rewound: Whether the feed had a version of a later step before.
    """

    number: int
    phase: str
    num_parts_put: int
    num_leases: int
    lost: tuple[int, ...]
    is_rewound: bool


class FeedClient:
    """Publishes and reads feeds for one process. Thread-safe.

    Methods raise `CoordinatorUnavailableError` if the coordinator does not answer within ``timeout_s``, and
    `FencedError` once another process or a newer attempt has the place of this client. The events in
    ``dtckpt.coordination.feeds.events`` say how each call is refused.

    Args:
        coordination: The connection to the coordinator; it stays the caller's.
        timeout_s: How long a call waits for the coordinator; default: two heartbeat timeouts.
        clock: Monotonic seconds.
        is_publishers: Whether a publisher runs the registry: to wait for a version is to wait for the registry, too.

    Attributes:
        address: ``host:port`` of the coordinator.
    """

    def __init__(
        self,
        coordination: GrpcCoordination,
        timeout_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        is_publishers: bool = False,
    ) -> None:
        self.address = coordination.address
        self._coordination = coordination
        self._timeout_s = 2 * coordination.heartbeat_timeout_s if timeout_s is None else timeout_s
        self._clock = clock
        self._is_publishers = is_publishers
        member = coordination.member
        self._task = coordinator_pb2.TaskIdentity(job=member.job, task=member.client, incarnation=member.incarnation)
        self._host = host_name()
        self._lock = threading.RLock()
        self._feeds: dict[str, _Feed] = {}
        self._leases: dict[tuple[str, int], FeedLease] = {}
        self._served: dict[tuple[str, int], pb.ServeRequest] = {}
        self._holder_keys: dict[tuple[str, int], bytes] = {}
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()
        self._wake = threading.Event()
        self._uses: dict[tuple[str, str], pb.DoneRequest] = {}
        """What became of fetched versions, by feed and group, until the registry knows."""
        self._renewing = threading.Lock()

    # --- publishing -------------------------------------------------------------------------------------------------

    def open(self, feed: str, *, keep: int = 2) -> int:
        """Open a feed for this client, and return the number of its next version.

        Every client of the publisher opens it. A feed that is open stays so; the answer then has the number for the
        next version that is announced.
        """
        events.validate_feed(feed)
        self._coordination.register()
        with self._lock:
            known = self._feeds.get(feed)
            attempt = self._coordination.member.attempt
            request = pb.OpenFeedRequest(task=self._task, feed=feed, attempt=attempt, keep=keep)
            opened = _Feed(request) if known is None else known
            opened.request.keep = keep
        number = self._again_if_unknown(lambda: self._open(opened))
        with self._lock:
            self._feeds[feed] = opened
        self._start()
        return number

    def _open(self, opened: _Feed) -> int:
        response = self._call(lambda stub, t: stub.OpenFeed(opened.request, timeout=t))
        with self._lock:
            if response.secret not in opened.keys:
                opened.keys = [response.secret, *opened.keys][:KEPT_SECRETS]
            opened.request.secret = response.secret
        return response.next_number

    def announce(
        self, feed: str, number: int, *, step: int, num_parts: int, tree_digest: bytes, timeout_s: float
    ) -> PublishedVersion:
        """Say that a version is coming: all clients may, alike.

        Args:
            feed: An open feed.
            number: As `open` returned it to one of the clients, or a higher one.
            step: Training step.
            num_parts: How many clients put a part: the clients 0 to ``num_parts`` - 1.
            tree_digest: Of the published tree.
            timeout_s: The version fails if it lacks parts after so many seconds.
        """
        request = pb.AnnounceRequest(
            task=self._task,
            feed=feed,
            attempt=self._coordination.member.attempt,
            number=number,
            step=step,
            num_parts=num_parts,
            tree_digest=tree_digest,
            timeout_s=timeout_s,
        )
        answer = self._publish(feed, lambda stub, t: stub.Announce(request, timeout=t))
        with self._lock:
            request.is_rewound = answer.is_rewound
            opened = self._opened(feed)
            opened.versions.setdefault(number, _KeptVersion(request))
            opened.request.last_number = max(opened.request.last_number, number)
        return answer

    def put_part(self, feed: str, number: int, *, endpoint: bytes, digest: bytes, nbytes: int) -> PublishedVersion:
        """Say that this client's part of an announced version is in memory and served.

        Returns:
            The version; ``phase`` is READABLE if this was the last part.
        """
        version = self._version(feed, number)
        request = pb.PutPartRequest(
            task=self._task,
            feed=feed,
            attempt=version.announcement.attempt,
            number=number,
            endpoint=endpoint,
            digest=digest,
            nbytes=nbytes,
            host=self._host,
        )
        answer = self._publish(feed, lambda stub, t: stub.PutPart(request, timeout=t))
        version.part = request
        return answer

    def abort(self, feed: str, number: int, reason: str) -> None:
        """Let a version fail that is not readable yet."""
        request = pb.AbortRequest(
            task=self._task,
            feed=feed,
            attempt=self._version(feed, number).announcement.attempt,
            number=number,
            reason=reason[: events.MAX_TEXT_CHARS],
        )
        self._asked(feed, lambda stub, t: stub.Abort(request, timeout=t))
        self._forget(feed, number)

    def retire(self, feed: str, number: int) -> PublishedVersion:
        """Let a version have no more leases."""
        version = self._version(feed, number)
        request = pb.RetireRequest(task=self._task, feed=feed, attempt=version.announcement.attempt, number=number)
        answer = self._publish(feed, lambda stub, t: stub.Retire(request, timeout=t))
        version.is_retired = True
        return answer

    def withdraw(self, feed: str, number: int) -> PublishedVersion:
        """Ask to free this client's part of a retired version. After this returns, no reader has a lease on it.

        Raises:
            VersionLeasedError: The part must stay for now; ask again later.
        """
        version = self._version(feed, number)
        attempt = version.announcement.attempt
        request = pb.WithdrawRequest(task=self._task, feed=feed, attempt=attempt, number=number)
        try:
            answer = self._publish(feed, lambda stub, t: stub.Withdraw(request, timeout=t))
        except errors.FeedConflictError:
            if not version.is_retired:
                raise
            self.retire(feed, number)  # a coordinator that was restarted does not know that it was retired
            answer = self._publish(feed, lambda stub, t: stub.Withdraw(request, timeout=t))
        self._forget(feed, number)
        return answer

    def abandon(self, feed: str, number: int | None = None) -> None:
        """Say that the memory of a version is freed, or of all; the thread of this client tells it when it can."""
        with self._lock:
            if feed in self._feeds:
                for each, version in self._feeds[feed].versions.items():
                    version.is_freed |= number in (None, each)

    def _take_back(self, feed: str, number: int) -> None:
        """Let a version end whose memory is freed already. Its last readers have leases, and find no source."""
        attempt = self._version(feed, number).announcement.attempt
        retire = pb.RetireRequest(task=self._task, feed=feed, attempt=attempt, number=number)
        withdraw = pb.WithdrawRequest(task=self._task, feed=feed, attempt=attempt, number=number)
        try:
            self._call(lambda stub, t: stub.Retire(retire, timeout=t))
            self._call(lambda stub, t: stub.Withdraw(withdraw, timeout=t))
        except errors.VersionLeasedError:
            return
        except (errors.VersionGoneError, errors.FeedConflictError, errors.FencedError, UnknownError):
            pass  # the coordinator offers it to no reader
        self._forget(feed, number)

    def _forget(self, feed: str, number: int) -> None:
        with self._lock:
            self._opened(feed).versions.pop(number, None)

    def check(self, feed: str, number: int, ticket: bytes, now_s: float) -> Claim:
        """Check a reader's ticket for a version that this client publishes or serves on, without asking.

        Args:
            feed: Name of the feed.
            number: Number of the version.
            ticket: Any bytes.
            now_s: Seconds since the epoch.

        Raises:
            TicketError: The ticket does not let its bearer read the version.
        """
        with self._lock:
            opened = self._feeds.get(feed)
            keys = list(opened.keys) if opened is not None else []
            keys += [key for place, key in self._holder_keys.items() if place == (feed, number)]
        refusal = errors.TicketError(f"this client has no feed {feed!r}, so no ticket for it is valid")
        for key in keys:
            try:
                return check_ticket(key, ticket, feed=feed, number=number, now_s=now_s)
            except errors.TicketError as error:
                refusal = error
        raise refusal

    # --- reading ----------------------------------------------------------------------------------------------------

    def subscribe(
        self, feed: str, *, want: Want = NEWEST, group: str = "", lease_id: int = 0, timeout_s: float
    ) -> FeedLease:
        """Take a lease on a version, or join the lease of the group's other clients; wait until there is one.

        This client renews the lease until `done`, or until the coordinator refuses it (`FeedLease.raise_if_over`).

        Args:
            feed: Name of the feed.
            want: Which version.
            group: Name of the clients of this job that read together.
            lease_id: Id of the group's lease, to join it; 0: take a new lease.
            timeout_s: How long to wait for such a version.

        Raises:
            VersionTimeoutError: There was no such version in time; says why.
            VersionGoneError: The wanted version is retired or has failed.
            SourceLostError: The clients that have the wanted version are lost.
            CoordinatorPermissionError: This job may not read the feed.
        """
        lease_id = lease_id or secrets.randbits(63) or 1
        deadline = self._clock() + timeout_s
        request = self._subscription(feed, group, lease_id, want)
        while True:
            left_s = deadline - self._clock()
            request.max_wait_s = min(max(left_s, 0.0), MAX_WAIT_S)
            try:
                if self._is_publishers:
                    self._coordination.probe(PROBE_S)
                self._coordination.register()
                asked_at, response = self._ask(request)
            except errors.CoordinatorUnavailableError as error:
                if not self._is_publishers:
                    raise
                if left_s <= 0:
                    raise errors.VersionTimeoutError(
                        f"no lease within {timeout_s:g} s: no publisher has begun, or it has ended: {error.message}"
                    ) from None
                time.sleep(min(left_s, PROBE_S / 4))
                continue
            if response.HasField("lease"):
                ends_at = asked_at + response.lease.expires_in_s
                lease = FeedLease.from_proto(request, response.lease, ends_at)
                lease.clock = self._clock
                with self._lock:
                    lease = self._leases.setdefault((feed, lease_id), lease).brought_up(lease)
                self._start()
                return lease
            if left_s <= 0:
                raise errors.VersionTimeoutError(f"no lease within {timeout_s:g} s: {response.not_yet}")

    def _subscription(self, feed: str, group: str, lease_id: int, want: Want) -> pb.SubscribeRequest:
        return pb.SubscribeRequest(
            task=self._task,
            feed=feed,
            group=group,
            lease=lease_id,
            want=pb.Want(
                newer_than=want.newer_than,
                number=want.number,
                step=want.step,
                skip_rewound=not want.allow_rewound,
            ),
            host=self._host,
        )

    def _ask(self, request: pb.SubscribeRequest) -> tuple[float, pb.SubscribeResponse]:
        """Ask for a lease; return when the last try began, and the answer."""
        wait_s = request.max_wait_s

        def ask(stub: pb_grpc.FeedsStub, seconds: float) -> pb.SubscribeResponse:
            # After tries that failed less time is left: the coordinator must answer within it that there is no version.
            request.max_wait_s = min(wait_s, max(0.0, seconds - CALL_TIMEOUT_S))
            return stub.Subscribe(request, timeout=seconds)

        return self._again_if_unknown(lambda: self._timed(ask, self._timeout_s, wait_s))

    def done(self, lease: FeedLease, outcome: str) -> None:
        """Need a lease no more; it ends with the last client of the group.

        Args:
            lease: The lease.
            outcome: One of `events.OUTCOMES`.
        """
        self._tell_uses()  # of the version before: this lease takes its place
        with self._renewing:  # a renewal that came later would take the lease again
            self._forget_lease(lease)
            request = pb.DoneRequest(task=self._task, feed=lease.feed, lease=lease.lease_id, outcome=outcome)
            self._again_if_unknown(lambda: self._call(lambda stub, t: stub.Done(request, timeout=t)))

    def tell_use(self, lease: FeedLease, outcome: str) -> None:
        """Say what became of a version whose lease has ended with `events.FETCHED`. Does not wait for the coordinator.

        Args:
            lease: The lease.
            outcome: `events.APPLIED` or `events.FAILED`.
        """
        request = pb.DoneRequest(task=self._task, feed=lease.feed, lease=lease.lease_id, outcome=outcome)
        with self._lock:
            self._uses[lease.feed, lease.group] = request
        self._start()
        self._wake.set()

    def _tell_uses(self) -> None:
        with self._lock:
            uses = dict(self._uses)
        for key, request in uses.items():
            try:
                self._timed(lambda stub, t, it=request: stub.Done(it, timeout=t), self._period_s())  # type: ignore[misc]
            except UnknownError:
                pass  # a coordinator that was restarted does not know the lease
            except errors.DtckptError as error:
                logger.info("the registry does not know yet that feed %r is %s: %s", key[0], request.outcome, error)
                continue
            with self._lock:
                if self._uses.get(key) is request:
                    del self._uses[key]

    def serve(self, lease: FeedLease, *, endpoint: bytes, pieces: bytes = b"", is_whole: bool, nbytes: int) -> None:
        """Offer a version that this client has verified to further readers, as long as the process lives.

        Args:
            lease: The lease under which the version was read; it need not last.
            endpoint: Where readers reach it.
            pieces: Which pieces it has; for readers.
            is_whole: Whether it has all bytes of the version.
            nbytes: How many it has.
        """
        request = pb.ServeRequest(
            task=self._task,
            feed=lease.feed,
            number=lease.number,
            tree_digest=lease.tree_digest,
            endpoint=endpoint,
            pieces=pieces,
            is_whole=is_whole,
            nbytes=nbytes,
            host=self._host,
        )
        self._again_if_unknown(lambda: self._serve(request))
        with self._lock:
            self._served[lease.feed, lease.number] = request
        self._start()

    def _serve(self, request: pb.ServeRequest) -> None:
        response = self._call(lambda stub, t: stub.Serve(request, timeout=t))
        with self._lock:
            self._holder_keys[request.feed, request.number] = response.key

    def stop_serving(self, feed: str, number: int) -> None:
        """Offer a version no more."""
        with self._lock:
            self._served.pop((feed, number), None)
            self._holder_keys.pop((feed, number), None)
        request = pb.StopServingRequest(task=self._task, feed=feed, number=number)
        self._again_if_unknown(lambda: self._call(lambda stub, t: stub.StopServing(request, timeout=t)))

    def list(self) -> list[pb.FeedStatus]:
        """Return all feeds that this client's token may see."""
        return self._coordination.feeds(self._timeout_s)

    def has_other_publishers(self) -> bool:
        """Whether other clients of this job publish a feed."""
        own = self._coordination.member.job
        return any(feed.job == own and feed.num_publishers > 1 for feed in self.list())

    # --- renewals ---------------------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Renew all leases, put all parts and serve all versions again; so a restarted coordinator learns of them.

        The thread of this client calls this several times in each lease period.
        """
        with self._lock:
            leases, feeds, served = list(self._leases.values()), list(self._feeds), list(self._served.values())
        for lease in leases:
            with self._renewing:
                if self._leases.get((lease.feed, lease.lease_id)) is lease:
                    self._renew(lease)
        for feed in feeds:
            self._put_again(feed)
        for request in served:
            self._serve_again(request)

    def _renew(self, lease: FeedLease) -> None:
        request = pb.RenewRequest(task=self._task, feed=lease.feed, lease=lease.lease_id)
        try:
            lease.raise_if_over()  # the publisher may have freed its memory since
            try:
                asked_at, answer = self._timed(lambda stub, t: stub.Renew(request, timeout=t), self._period_s())
                lease.lost, lease.ends_at = tuple(answer.lost), asked_at + self._coordination.heartbeat_timeout_s
            except UnknownError:
                self._take_again(lease)
        except (errors.VersionGoneError, errors.SourceLostError, errors.FencedError) as error:
            lease.error = error
            self._forget_lease(lease)
        except (errors.DtckptError, UnknownError) as error:
            logger.warning("the lease on version %d of feed %r was not renewed: %s", lease.number, lease.feed, error)

    def _take_again(self, lease: FeedLease) -> None:
        """Take a lease again that the coordinator does not know."""
        request = self._subscription(lease.feed, lease.group, lease.lease_id, Want(number=lease.number))
        request.is_again = True
        asked_at, response = self._ask(request)
        if response.HasField("lease"):
            lease.ends_at = asked_at + response.lease.expires_in_s
            lease.lost = tuple(part.client for part in response.lease.parts if part.is_lost)

    def _forget_lease(self, lease: FeedLease) -> None:
        with self._lock:
            self._leases.pop((lease.feed, lease.lease_id), None)

    def _period_s(self) -> float:
        """Return how often leases are renewed; leases of a coordinator last for its heartbeat timeout."""
        return self._coordination.heartbeat_timeout_s / RENEWALS

    def _put_again(self, feed: str) -> None:
        with self._lock:
            versions = list(self._opened(feed).versions.items())
        for number, version in versions:
            if version.is_freed:
                try:
                    self._take_back(feed, number)
                except errors.DtckptError as error:
                    logger.warning("version %d of feed %r was not taken back: %s", number, feed, error)
                    return
                continue
            if version.part is None:
                continue
            part = version.part
            try:
                answer = self._publish(feed, lambda stub, t, it=part: stub.PutPart(it, timeout=t))  # type: ignore[misc]
                if version.is_retired and answer.phase == READABLE:
                    self.retire(feed, number)
            except (errors.VersionGoneError, errors.FeedConflictError):
                pass  # the caller learns it from its next call about the version
            except errors.DtckptError as error:
                logger.warning("version %d of feed %r was not confirmed: %s", number, feed, error)
                return

    def _serve_again(self, request: pb.ServeRequest) -> None:
        try:
            self._serve(request)
        except errors.VersionGoneError:
            with self._lock:
                self._served.pop((request.feed, request.number), None)
        except (errors.DtckptError, UnknownError) as error:  # the publisher may not have told a restarted one yet
            logger.info("version %d of feed %r is not served on now: %s", request.number, request.feed, error)

    def _start(self) -> None:
        with self._lock:
            if self._thread is None and not self._closing.is_set():
                self._thread = threading.Thread(target=self._refresh_for_ever, daemon=True, name="dtckpt-feeds")
                self._thread.start()

    def _refresh_for_ever(self) -> None:
        while True:
            self._wake.wait(self._period_s())
            self._wake.clear()
            if self._closing.is_set():
                return
            with self._lock:
                if not self._coordination.is_registered:  # it has left; to go on would bring it back
                    self._thread = None
                    return
            try:
                self._tell_uses()
                self.refresh()
            except errors.DtckptError as error:
                logger.warning("feeds were not refreshed: %s", error)

    def leave(self) -> None:
        """Leave the registry, whose connection is this client's."""
        self._coordination.leave()

    def close(self) -> None:
        """End renewals. Leases and parts of this process end as the coordinator hears it no more, or by ``leave``."""
        self._closing.set()
        self._wake.set()
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join(CLOSE_S)

    # --- calls ------------------------------------------------------------------------------------------------------

    def _version(self, feed: str, number: int) -> _KeptVersion:
        with self._lock:
            version = self._opened(feed).versions.get(number)
        if version is None:
            raise errors.ConfigError(
                f"this client has no version {number} of feed {feed!r}; announce it first, and withdraw it once"
            )
        return version

    def _opened(self, feed: str) -> _Feed:
        if (opened := self._feeds.get(feed)) is None:
            raise errors.ConfigError(f"feed {feed!r} is not open at this client; call open({feed!r}) first")
        return opened

    def _call(self, call: Call[T]) -> T:
        return self._coordination.call_feeds(call, self._timeout_s)

    def _timed(self, call: Call[T], within_s: float, wait_s: float = 0.0) -> tuple[float, T]:
        """Make a call, and return when its last try began, and the answer."""
        asked_at = self._clock()

        def ask(stub: pb_grpc.FeedsStub, seconds: float) -> T:
            nonlocal asked_at
            asked_at = self._clock()
            return call(stub, seconds)

        answer = self._coordination.call_feeds(ask, within_s, wait_s)
        return asked_at, answer

    def _again_if_unknown(self, call: Callable[[], T]) -> T:
        """Make a call; if the coordinator does not know this client, register it and make the call again."""
        deadline = self._clock() + self._timeout_s
        for pause_s in backoffs():
            try:
                return call()
            except UnknownError as error:
                if self._clock() + pause_s > deadline:
                    raise errors.CoordinatorUnavailableError(
                        f"the coordinator forgets this client again and again: {error}"
                    ) from None
                self._coordination.register_again(self._timeout_s)
            time.sleep(pause_s)
        raise AssertionError("backoffs never end")

    def _publish(self, feed: str, call: Call[pb.VersionResponse]) -> PublishedVersion:
        answer = self._asked(feed, call)
        phase = pb.VersionPhase.Name(answer.phase).removeprefix("VERSION_PHASE_")
        return PublishedVersion(
            answer.number, phase, answer.num_parts_put, answer.num_leases, tuple(answer.lost), answer.is_rewound
        )

    def _asked(self, feed: str, call: Call[T]) -> T:
        """Make a publisher's call; if the coordinator does not know the feed or version, tell it and call again."""
        with self._lock:
            opened = self._opened(feed)
        deadline = self._clock() + self._timeout_s
        for pause_s in backoffs():
            try:
                return self._call(call)
            except UnknownError as error:
                if self._clock() + pause_s > deadline:
                    raise errors.FeedConflictError(f"{error}; announce the version first") from None
            self._tell_again(opened)
            time.sleep(pause_s)
        raise AssertionError("backoffs never end")

    def _tell_again(self, opened: _Feed) -> None:
        """Open a feed again, and announce and put the versions that this process has in memory."""
        self._again_if_unknown(lambda: self._open(opened))
        with self._lock:
            versions = [version for version in opened.versions.values() if not version.is_freed]
        for version in versions:
            announcement, part = version.announcement, version.part
            try:
                self._call(lambda stub, t, it=announcement: stub.Announce(it, timeout=t))  # type: ignore[misc]
                if part is not None:
                    self._call(lambda stub, t, it=part: stub.PutPart(it, timeout=t))  # type: ignore[misc]
                if version.is_retired:
                    number, name = announcement.number, opened.request.feed
                    retire = pb.RetireRequest(task=self._task, feed=name, attempt=announcement.attempt, number=number)
                    self._call(lambda stub, t, it=retire: stub.Retire(it, timeout=t))  # type: ignore[misc]
            except (errors.VersionGoneError, errors.FeedConflictError, UnknownError) as error:
                logger.info("version %d was not told again: %s", announcement.number, error)
