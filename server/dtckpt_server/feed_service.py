# ruff: noqa: ARG002, N802  gRPC gives the handlers' names and arguments
"""The gRPC service of feeds: translate requests into events, answers into messages, and make tickets.

The rules have no clock of the day and no randomness. So this module draws the secret of a feed, takes the lowest number
of a feed's versions from the clock, and says when tickets end.
"""

from __future__ import annotations

import heapq
import math
import secrets
import time
from collections.abc import Callable
from itertools import islice
from typing import Any, TypeVar

from dtckpt._proto import feeds_pb2 as pb
from dtckpt._proto import feeds_pb2_grpc as pb_grpc
from dtckpt.coordination.feeds import events
from dtckpt.coordination.feeds.state import Feed, Version
from dtckpt.coordination.feeds.tickets import Claim, make_ticket
from dtckpt.coordination.feeds.transitions import SOME, told_uses
from dtckpt_server.answers import PAGE_ENTRIES, Page
from dtckpt_server.service import CoordinatorService, answered, authorization, to_identity, waits_for_feed
from dtckpt_server.tokens import ANY_JOB

SECRET_NBYTES = 32
T = TypeVar("T")


class FeedService(pb_grpc.FeedsServicer):
    """Serves the feeds of a coordinator, beside its other calls.

    Args:
        coordinator: Applies events, authorizes and counts calls.
        wall_clock: Seconds since the epoch.
    """

    def __init__(self, coordinator: CoordinatorService, wall_clock: Callable[[], float] = time.time) -> None:
        self._coordinator = coordinator
        self._wall_clock = wall_clock
        self.turn = coordinator.turn
        self.refuse = coordinator.refuse

    @property
    def _incarnation(self) -> int:
        return self._coordinator.rules.incarnation

    def _accept(self, event: events.FeedEvent, kind: type[T]) -> T:
        """Let an event happen, and return its answer, which is of a known kind."""
        answer = self._coordinator.apply(event).feed_answer
        assert isinstance(answer, kind)  # noqa: S101  each kind of event has one kind of answer
        return answer

    def _principal(self, job: str) -> str:
        tokens = self._coordinator.tokens
        return "" if tokens is None else tokens.owner(job)

    def _may_read(self, request: pb.SubscribeRequest | pb.ServeRequest) -> bool:
        tokens = self._coordinator.tokens
        return tokens is None or tokens.may_read(request.task.job, request.feed)

    # --- publishers -------------------------------------------------------------------------------------------------

    @answered
    async def OpenFeed(self, request: pb.OpenFeedRequest, context: Any) -> pb.OpenFeedResponse:
        tokens, job = self._coordinator.tokens, request.task.job
        event = events.OpenFeed(
            to_identity(request.task),
            request.feed,
            request.attempt,
            request.keep,
            # Milliseconds: no feed has a version in each. So numbers grow also over a restart in which all forget them.
            floor=int(1000 * self._wall_clock()),
            secret=request.secret or secrets.token_bytes(SECRET_NBYTES),
            last_number=request.last_number,
            principal=self._principal(job),
            is_granted=tokens is None or tokens.may_publish(job, request.feed),
        )
        opened = self._accept(event, events.FeedOpened)
        return pb.OpenFeedResponse(
            coordinator_incarnation=self._incarnation,
            next_number=opened.next_number,
            secret=opened.secret,
            lease_s=opened.lease_s,
        )

    @answered
    async def Announce(self, request: pb.AnnounceRequest, context: Any) -> pb.VersionResponse:
        event = events.Announce(
            *_publisher(request),
            step=request.step,
            num_parts=request.num_parts,
            tree_digest=request.tree_digest,
            timeout_s=request.timeout_s,
            is_rewound=request.is_rewound,
        )
        return self._version(event)

    @answered
    async def PutPart(self, request: pb.PutPartRequest, context: Any) -> pb.VersionResponse:
        where = request.endpoint, request.digest, request.nbytes, request.host
        return self._version(events.PutPart(*_publisher(request), *where))

    @answered
    async def Abort(self, request: pb.AbortRequest, context: Any) -> pb.AbortResponse:
        self._coordinator.apply(events.Abort(*_publisher(request), reason=request.reason))
        return pb.AbortResponse(coordinator_incarnation=self._incarnation)

    @answered
    async def Retire(self, request: pb.RetireRequest, context: Any) -> pb.VersionResponse:
        return self._version(events.Retire(*_publisher(request)))

    @answered
    async def Withdraw(self, request: pb.WithdrawRequest, context: Any) -> pb.VersionResponse:
        return self._version(events.Withdraw(*_publisher(request)))

    def _version(self, event: events.FeedEvent) -> pb.VersionResponse:
        state = self._accept(event, events.VersionState)
        return pb.VersionResponse(
            coordinator_incarnation=self._incarnation,
            number=state.number,
            phase=_phase(state.state),
            num_parts_put=state.num_parts_put,
            num_leases=state.num_leases,
            lost=state.lost,
            is_rewound=state.is_rewound,
        )

    # --- readers ----------------------------------------------------------------------------------------------------

    @answered
    async def Subscribe(self, request: pb.SubscribeRequest, context: Any) -> pb.SubscribeResponse:
        want = request.want
        event = events.Subscribe(
            to_identity(request.task),
            request.feed,
            request.group,
            request.lease,
            events.Want(
                want.newer_than,
                want.number,
                want.step if want.HasField("step") else None,
                allow_rewound=not want.skip_rewound,
            ),
            request.host,
            is_again=request.is_again,
            principal=self._principal(request.task.job),
            is_granted=self._may_read(request),
        )
        clock = self._coordinator.clock
        deadline = clock() + (request.max_wait_s if math.isfinite(request.max_wait_s) else 0.0)
        while True:
            answer = self._coordinator.apply(event).feed_answer
            left_s = deadline - clock()
            if not isinstance(answer, events.NotYet) or left_s <= 0:
                break
            await self._coordinator.wait_for(waits_for_feed(request.feed), left_s)
            self._coordinator.refuse_if_stopping()
        response = pb.SubscribeResponse(coordinator_incarnation=self._incarnation)
        if isinstance(answer, events.NotYet):
            response.not_yet = answer.why
        elif isinstance(answer, events.Leased):
            self._describe(response.lease, request.feed, answer)
            await self._coordinator.make_room(request.task.job, response.ByteSize(), context)
        return response

    def _describe(self, lease: pb.Lease, feed: str, leased: events.Leased) -> None:
        """Write a lease into a message, with a ticket for each kind of source."""
        claim = Claim(feed, leased.number, leased.reader, math.ceil(self._wall_clock() + leased.cap_in_s))
        lease.number, lease.step, lease.is_rewound = leased.number, leased.step, leased.is_rewound
        lease.highest_step, lease.tree_digest = leased.highest_step, leased.tree_digest
        lease.expires_in_s, lease.cap_in_s = leased.expires_in_s, leased.cap_in_s
        lease.ticket = make_ticket(leased.secret, claim)
        lease.parts.extend(_source(part) for part in leased.parts)
        for holder in leased.holders:
            lease.holders.append(_source(holder, make_ticket(holder.key, claim)))

    @answered
    async def Renew(self, request: pb.RenewRequest, context: Any) -> pb.VersionResponse:
        return self._version(events.Renew(to_identity(request.task), request.feed, request.lease))

    @answered
    async def Done(self, request: pb.DoneRequest, context: Any) -> pb.DoneResponse:
        who = to_identity(request.task)
        self._coordinator.apply(events.Done(who, request.feed, request.lease, request.outcome))
        return pb.DoneResponse(coordinator_incarnation=self._incarnation)

    @answered
    async def Serve(self, request: pb.ServeRequest, context: Any) -> pb.ServeResponse:
        event = events.Serve(
            to_identity(request.task),
            request.feed,
            request.number,
            request.tree_digest,
            request.endpoint,
            request.pieces,
            request.is_whole,
            request.nbytes,
            request.host,
            principal=self._principal(request.task.job),
            is_granted=self._may_read(request),
        )
        served = self._accept(event, events.Served)
        return pb.ServeResponse(coordinator_incarnation=self._incarnation, number=served.number, key=served.key)

    @answered
    async def StopServing(self, request: pb.StopServingRequest, context: Any) -> pb.StopServingResponse:
        self._coordinator.apply(events.StopServing(to_identity(request.task), request.feed, request.number))
        return pb.StopServingResponse(coordinator_incarnation=self._incarnation)

    # --- looking in -------------------------------------------------------------------------------------------------

    @answered
    async def ListFeeds(self, request: pb.ListFeedsRequest, context: Any) -> pb.ListFeedsResponse:
        coordinator, tokens = self._coordinator, self._coordinator.tokens
        visible = {ANY_JOB} if tokens is None else tokens.visible(authorization(context))

        def may_see(feed: Feed) -> bool:
            is_own = ANY_JOB in visible or feed.principal in visible
            return is_own or (tokens is not None and any(tokens.may_read(job, feed.name) for job in visible))

        await coordinator.make_room_for_page(context)
        answer, page, now = pb.ListFeedsResponse(coordinator_incarnation=self._incarnation), Page(), coordinator.clock()
        later = (feed for feed in coordinator.rules.feeds.feeds.values() if feed.name > request.page_token)
        for feed in heapq.nsmallest(PAGE_ENTRIES + 1, filter(may_see, later), key=lambda feed: feed.name):
            if page.is_full:
                answer.next_page_token = answer.feeds[-1].feed
                break
            status = feed_status(feed, now)
            answer.feeds.append(status)
            page.note(status, sum(len(version.parts) for version in feed.versions.values()))
        return answer


def feed_status(feed: Feed, now: float) -> pb.FeedStatus:
    """Describe a feed and its versions, in at most 64 KiB."""
    return pb.FeedStatus(
        feed=feed.name,
        job=feed.owner,
        attempt=feed.attempt,
        keep=feed.keep,
        num_publishers=len(feed.publishers),
        versions=[_version_status(version, now) for version in feed.versions.values()],
        latest=[
            pb.ReaderStatus(reader=reader, number=number, outcome=outcome)
            for reader, use in list(feed.latest.items())[-SOME:]
            for number, outcome in told_uses(use)
        ],
    )


def _version_status(version: Version, now: float) -> pb.VersionStatus:
    since = version.announced_at if version.readable_at is None else version.readable_at
    return pb.VersionStatus(
        number=version.number,
        step=version.step,
        phase=_phase(version.state),
        is_rewound=version.is_rewound,
        num_parts=version.num_parts,
        num_parts_put=len(version.parts),
        nbytes=version.nbytes,
        age_s=now - since,
        num_leases=len(version.leases),
        num_holders=len(version.holders),
        readers=[
            pb.ReaderStatus(reader=lease.reader, number=version.number, age_s=now - lease.taken_at)
            for lease in islice(version.leases.values(), SOME)
        ],
        holders=[
            pb.Source(
                job=holder.who.job,
                client=holder.who.task,
                nbytes=holder.nbytes,
                host=holder.host,
                is_whole=holder.is_whole,
            )
            for holder in islice(version.holders.values(), SOME)
        ],
    )


def _publisher(request: Any) -> tuple[Any, str, int, int]:
    """Return the fields with which the events of a publisher begin."""
    return to_identity(request.task), request.feed, request.attempt, request.number


def _phase(state: str) -> pb.VersionPhase.ValueType:
    return pb.VersionPhase.Value(f"VERSION_PHASE_{state}")


def _source(source: events.VersionSource, ticket: bytes = b"") -> pb.Source:
    return pb.Source(
        job=source.job,
        client=source.client,
        endpoint=source.endpoint,
        digest=source.digest,
        nbytes=source.nbytes,
        host=source.host,
        is_whole=source.is_whole,
        is_lost=source.is_lost,
        ticket=ticket,
    )
