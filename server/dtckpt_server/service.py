# ruff: noqa: ARG002, N802  gRPC gives the handlers' names and arguments
"""The gRPC service of the coordinator: translate requests into events, wake waiting calls, send notices, drain.

A call becomes an event; `dtckpt_server.rules` decides; the effects are carried out. Errors of the rules become status
codes by the table of `dtckpt_server.grpc_errors`.

Two traps of asyncio and gRPC shape the code. A `CancelledError` that leaves a handler sends no status at all. And a
future that several handlers await is cancelled for all by the first client that goes away. So every waiter has its own
future, and only gRPC itself, or the end of the server, cancels handlers.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager, suppress
from itertools import chain
from typing import Any, Protocol, TypeVar

import grpc
from google.rpc.status_pb2 import Status

from dtckpt import __version__, errors
from dtckpt._proto import coordinator_pb2 as pb
from dtckpt._proto import coordinator_pb2_grpc as pb_grpc
from dtckpt._proto import feeds_pb2 as feeds_pb
from dtckpt.coordination.task_identity import Identity
from dtckpt_server import descriptions, rules
from dtckpt_server.answers import MAX_PAGE_NBYTES, Answers, barrier_status, failure_message, job_page, jobs_page
from dtckpt_server.chores import Chores
from dtckpt_server.events import (
    MAX_NAME_BYTES,
    Arrive,
    Cancel,
    Event,
    Heartbeat,
    Leave,
    Register,
    TaskProgress,
    TaskReport,
    Tick,
)
from dtckpt_server.grpc_errors import Refusal
from dtckpt_server.heartbeat_streams import GATHER_S, MAX_UNSENT, Stream, Streams
from dtckpt_server.metrics import Metrics
from dtckpt_server.outgoing_answers import OutgoingAnswers
from dtckpt_server.quotas import DEFAULTS, Quotas, owner_by_name
from dtckpt_server.rules import Rules
from dtckpt_server.state import Barrier, Effects, Transition
from dtckpt_server.tokens import ANY_JOB, Tokens
from dtckpt_server.turns import MAX_CALLS, NOBODY, Turns

logger = logging.getLogger("dtckpt_server")
Response = TypeVar("Response")
Handler = Callable[..., Awaitable[Response]]

MAX_WAIT_S = 30.0
ROUTINE = frozenset((grpc.StatusCode.NOT_FOUND, grpc.StatusCode.ABORTED, grpc.StatusCode.UNAVAILABLE))
"""Refusals that clients handle by themselves; they are not logged."""
MAX_TOLD_PARTICIPANTS = 1024
"""Longest list of participants that a notice carries; where all tasks of a job take part, it carries none."""
MAX_NOTICES = 64
"""Bound on the pieces of work that wait for one job. Beyond it clients get no notices; their next calls tell them."""
MAX_HOST_CHARS, MAX_PHASE_CHARS = 128, 64
REFUSAL_LOG_S = 1.0
"""Least time between two log lines about calls that were refused with the same code."""


class Service(Protocol):
    """A service whose handlers `answered` wraps."""

    def turn(self, request: Any, context: Any) -> AbstractAsyncContextManager[None]: ...

    async def refuse(self, method: str, error: BaseException, context: Any) -> None: ...


def answered(handler: Handler[Response]) -> Handler[Response]:
    """Make a handler refuse calls that may not be made, and answer errors of the rules with a status."""

    @functools.wraps(handler)
    async def answer(self: Service, request: Any, context: Any) -> Response:
        error: BaseException
        try:
            if context.time_remaining() is None:
                raise errors.ConfigError("the call has no deadline; set one, so that nothing can wait for ever")
            async with self.turn(request, context):
                return await handler(self, request, context)
        except errors.DtckptError as refused:
            error = refused
        except Exception as bug:  # a bug of ours: INTERNAL for this caller, and the server goes on
            logger.exception("%s failed", handler.__name__)
            error = bug
        await self.refuse(handler.__name__, error, context)
        raise error

    return answer


class CoordinatorService(pb_grpc.CoordinatorServicer):
    """Serves one `Rules`. All methods run on one event loop.

    Args:
        tokens: The tokens of each job; None: no call needs one. May be replaced at any time.
        max_calls: Calls under way at one time, and as many heartbeat streams; more are refused with UNAVAILABLE, which
            clients repeat.
        quotas: Limits for one owner; here of its calls, streams and requests, which the rules do not count.
    """

    def __init__(
        self,
        state: Rules,
        clock: Callable[[], float] = time.monotonic,
        *,
        tokens: Tokens | None = None,
        max_calls: int = MAX_CALLS,
        quotas: Quotas = DEFAULTS,
    ) -> None:
        self.rules = state
        self.metrics = Metrics(lambda: self.rules, __version__, clock)
        self.clock = clock
        self._turns = Turns(quotas, max_calls, clock)
        self.use_tokens(tokens)
        self._outgoing = OutgoingAnswers()
        self._answers = Answers()
        self._chores = Chores()
        self._waiters: dict[str, set[asyncio.Future[None]]] = {}
        self._streams = Streams(min(GATHER_S, state.heartbeat_timeout_s / 60))
        self._is_draining = False  # nothing new is begun
        self._is_stopping = False  # no handler waits any more
        self._is_idle = asyncio.Event()
        self._logged_at: dict[grpc.StatusCode, float] = {}

    # --- for the server -----------------------------------------------------------------------------------------

    async def tick(self) -> None:
        """Let the rules judge heartbeats and deadlines, in steps between which other calls get their turns."""
        while self.apply(Tick()).is_unfinished:
            await asyncio.sleep(0)

    def apply(self, event: Event) -> Effects:
        """Let an event happen and begin to carry out its effects.

        Raises:
            DtckptError: The rules refuse the event.
        """
        self.rules, effects = rules.apply(self.rules, event, self.clock())
        if effects.log:  # no effect on tasks and barriers comes without a log entry
            self._begin_to_tell(event, effects)
        if effects.changed_feeds:
            self._chores.add("", self._wake([waits_for_feed(name) for name in effects.changed_feeds]))
        if self._is_draining and not self.rules.memory.num_open_barriers:
            self._is_idle.set()
        if effects.refusal is not None:
            self.metrics.note_refused_event(effects.refusal)
            raise effects.refusal
        return effects

    def _begin_to_tell(self, event: Event, effects: Effects) -> None:
        """Begin to log, to wake waiting calls and to send notices; apart for each job, so no job delays another."""
        if isinstance(event, Tick):
            self._chores.add("", self._tell_log(effects.log))
            for job, failed in _by_job(effects.failed).items():
                decided = [barrier.barrier_id for barrier in failed]
                self._chores.add(job, chain(self._wake(decided), self._notify(job, failed, self._streams.of(job))))
            return
        job, failed, attempt = event.who.job, effects.failed, effects.superseded
        # The streams as they are now: a client that connects during a later step must not get this notice.
        streams = self._streams.of(job) if failed or attempt is not None else {}
        lives = [(stream, text) for who, text in effects.fenced if (stream := self._streams.stream_of(who))]
        superseded = streams.items() if attempt is not None else ()
        over = ((stream, descriptions.superseded(job, number, attempt or 0)) for number, stream in superseded)
        steps = self._tell_log(effects.log), self._wake(effects.decided), _fence(chain(lives, over))
        self._chores.add(job, chain(*steps, self._notify(job, failed, streams)))

    def _tell_log(self, log: Iterable[Transition]) -> Iterator[None]:
        for transition in log:
            self.metrics.note(transition)
            logger.info("%s", transition.text, extra={"facts": {"event": transition.event, **transition.facts}})
            yield

    def _wake(self, barrier_ids: Iterable[str]) -> Iterator[None]:
        for barrier_id in barrier_ids:
            for waiter in list(self._waiters.pop(barrier_id, ())):
                _release(waiter)
                yield

    def _notify(self, job: str, failed: Sequence[Barrier], streams: Mapping[int, Stream]) -> Iterator[None]:
        """Send notices to the participants of operations whose barriers have failed, also to those not there yet.

        Not of an operation's first barrier, or a barrier outside of operations: a client that comes there may mean the
        next round.
        """
        inside = [barrier for barrier in failed if barrier.operation] if streams else []
        for barrier in inside[:MAX_UNSENT]:
            is_everyone = isinstance(barrier.participants, range)
            is_small = len(barrier.participants) <= MAX_TOLD_PARTICIPANTS
            if barrier.failure is None or not (is_everyone or is_small) or self._chores.num_waiting(job) > MAX_NOTICES:
                continue
            notice = pb.Notice(
                name=barrier.name,
                operation=barrier.operation or "",
                participants=() if is_everyone else barrier.participants,
                failure=failure_message(barrier.failure),
            )
            response = pb.HeartbeatStreamResponse(notice=notice)
            for number in streams if is_everyone else barrier.participants:
                if number in streams:
                    streams[number].tell(response)
                    yield

    async def drain(self, timeout_s: float) -> None:
        """Open no more barriers, let the open ones end, then end the calls that still wait with UNAVAILABLE."""
        self._is_draining = True
        await self.tick()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._is_idle.wait(), timeout_s)
        self._is_stopping = True
        self._chores.add("", self._wake(list(self._waiters)))
        await self._chores.finish()
        await self._streams.end()

    def _refuse_if(self, is_ending: bool) -> None:
        if is_ending:
            raise _stopping()

    def refuse_if_stopping(self) -> None:
        """Refuse a call that would wait, if no call waits any more.

        Raises:
            CoordinatorUnavailableError: The coordinator stops.
        """
        self._refuse_if(self._is_stopping)

    # --- for every call -----------------------------------------------------------------------------------------

    def use_tokens(self, tokens: Tokens | None) -> None:
        """Use other tokens from now on."""
        self.tokens = tokens
        num_owners = tokens.num_owners if tokens else 0
        self.rules.memory.reserve_for(num_owners)
        self._turns.reserve_for(num_owners)

    def authorize(self, request: Any, context: Any) -> str:
        """Check the call's token against the job that the call is about, and return whose quotas it counts for.

        Raises:
            CoordinatorPermissionError: The token does not fit.
        """
        if isinstance(request, pb.ListJobsRequest | feeds_pb.ListFeedsRequest):
            return self.opener(context)
        only_looks = isinstance(request, pb.GetJobRequest | pb.GetBarrierRequest)
        job = request.job if only_looks else request.task.job
        if self.tokens is not None:
            self.tokens.authorize(authorization(context), job, only_looks=only_looks)
        return self.owner(job)

    def owner(self, job: str) -> str:
        """Return whose quotas a job counts for."""
        return owner_by_name(job) if self.tokens is None else self.tokens.owner(job)

    def opener(self, context: Any) -> str:
        """Return whose quotas a call counts for of which only the metadata is known."""
        return NOBODY if self.tokens is None else min(self.tokens.visible(authorization(context)))

    @asynccontextmanager
    async def turn(self, request: Any, context: Any) -> AsyncIterator[None]:
        """Authorize a call, count it while it is under way, and wait for its turn."""
        refusal, owner = None, NOBODY
        try:
            owner = self.authorize(request, context)
        except errors.DtckptError as error:
            refusal = error  # also a refusal waits for its turn
        with self._turns.call(owner):
            await self._turns.take(owner)
            if refusal is not None:
                raise refusal
            yield

    async def refuse(self, method: str, error: BaseException, context: Any) -> None:
        """End a call with an error, and raise out of the handler."""
        refusal = self._refusal(method, error, context)
        await context.abort(refusal.code, refusal.text, refusal.trailer())

    def _refusal(self, method: str, error: BaseException, context: Any) -> Refusal:
        """Translate an error; count it and log it."""
        refusal = Refusal.of(error)
        code = refusal.code
        self.metrics.note_refusal(code.name, getattr(error, "quota", None))
        # A client that floods the coordinator must not flood the log, too.
        if code not in ROUTINE and self.clock() - self._logged_at.get(code, -math.inf) >= REFUSAL_LOG_S:
            self._logged_at[code] = self.clock()
            facts = {"event": "call_refused", "method": method, "peer": context.peer(), "code": code.name}
            text = f"refused {method} of {context.peer()}: {code.name}: {refusal.text}"
            logger.warning("%s", text, extra={"facts": {**facts, "reason": refusal.reason}})
        return refusal

    # --- tasks --------------------------------------------------------------------------------------------------

    @answered
    async def Register(self, request: pb.RegisterRequest, context: Any) -> pb.RegisterResponse:
        self._refuse_if(self._is_draining)
        who = to_identity(request.task)
        self.apply(
            Register(
                who,
                request.num_clients,
                request.attempt,
                request.host[:MAX_HOST_CHARS],
                request.job_name,
                _report(request.report),
                self.owner(who.job),
            )
        )
        return pb.RegisterResponse(
            coordinator_incarnation=self.rules.incarnation,
            heartbeat_timeout_s=self.rules.heartbeat_timeout_s,
            heartbeat_interval_s=self.rules.heartbeat_timeout_s / 6,
            task_name=self.rules.jobs[who.job].full_task_name(who.task),
        )

    @answered
    async def Heartbeat(self, request: pb.HeartbeatRequest, context: Any) -> pb.HeartbeatResponse:
        self.apply(Heartbeat(to_identity(request.task), _progress(request.progress), _report(request.report)))
        return pb.HeartbeatResponse(coordinator_incarnation=self.rules.incarnation, draining=self._is_draining)

    async def HeartbeatStream(  # type: ignore[override]  # it writes to its stream itself, which the stubs do not know
        self, request_iterator: AsyncIterator[pb.HeartbeatStreamRequest], context: Any
    ) -> None:
        stream, who = Stream(context), None
        try:
            with ExitStack() as counted:
                counted.enter_context(self._turns.stream(self.opener(context)))
                # While the first message is on its way with them, gRPC takes no status: the client would hang.
                await context.send_initial_metadata(())
                async for request in request_iterator:
                    owner = self.authorize(request, context)
                    speaker, has_arrival = _speaker(request, who), request.HasField("arrival")
                    if who is None:
                        counted.close()
                        counted.enter_context(self._turns.stream(owner))
                        stream.owner = owner
                    await self._turns.take(owner)
                    if who is None or not has_arrival:  # an arrival is a sign of life, too
                        self.apply(Heartbeat(speaker, _progress(request.progress), _report(request.report)))
                    if who is None:
                        who = speaker
                        self._streams.add(who, stream)
                    if not has_arrival:
                        await self._streams.answer(stream, self._stream_response(request.sequence))
                    elif not stream.is_full:
                        stream.spawn(self._answer_arrival(request, stream, context))
                    else:  # read no more of them before this is sent
                        refusal = self._refusal("HeartbeatStream", _crowded(), context).status()
                        stream.owe(self._stream_response(request.sequence, refusal=refusal))
                        await stream.send_owed()
                await stream.send_owed()
        except errors.DtckptError as error:
            await stream.send_owed_if_open()
            await self.refuse("HeartbeatStream", error, context)
        except asyncio.CancelledError:
            if not self._is_stopping:
                raise  # the client is gone
            await self.refuse("HeartbeatStream", _stopping(), context)
        finally:
            stream.end()
            if who is not None:
                self._streams.remove(who, stream)

    async def _answer_arrival(self, request: pb.HeartbeatStreamRequest, stream: Stream, context: Any) -> None:
        arrived, refusal = b"", None
        try:
            with self._turns.call(stream.owner):
                barrier = await self._arrive(request.arrival)
                if stream.is_loaded:
                    raise _crowded()
                arrived = self._answers.packed(barrier, self.rules.incarnation, collect=request.arrival.collect)
        except Exception as error:
            if not isinstance(error, errors.DtckptError):
                logger.exception("an arrival failed")
            refusal = self._refusal("HeartbeatStream", error, context).status()
        async with self._outgoing.room(stream.owner, len(arrived)):
            stream.owe(self._stream_response(request.sequence, arrived=arrived, refusal=refusal))
            await stream.send_owed_if_open()

    def _stream_response(
        self, sequence: int, *, arrived: bytes = b"", refusal: Status | None = None
    ) -> pb.HeartbeatStreamResponse:
        return pb.HeartbeatStreamResponse(
            coordinator_incarnation=self.rules.incarnation,
            draining=self._is_draining,
            sequence=sequence,
            arrived=arrived,
            refusal=refusal,
        )

    @answered
    async def Leave(self, request: pb.LeaveRequest, context: Any) -> pb.LeaveResponse:
        self.apply(Leave(to_identity(request.task)))
        return pb.LeaveResponse(coordinator_incarnation=self.rules.incarnation)

    # --- barriers -----------------------------------------------------------------------------------------------

    @answered
    async def Arrive(self, request: pb.ArriveRequest, context: Any) -> pb.ArriveResponse:
        barrier = await self._arrive(request)
        await self.make_room(request.task.job, barrier.payload_nbytes if request.collect else 0, context)
        return self._answers.of(barrier, self.rules.incarnation, collect=request.collect)

    async def _arrive(self, request: pb.ArriveRequest) -> Barrier:
        """Let a task arrive, and wait for the verdict as long as the request says."""
        self._refuse_if(self._is_draining and not self._has_begun(request))
        vote = request.vote
        arrival = Arrive(
            who=to_identity(request.task),
            name=request.name,
            call=request.call,
            participants=tuple(request.participants),
            timeout_s=request.timeout_s,
            ok=vote.ok,
            payload=vote.payload,
            topic=vote.topic,
            code=vote.code,
            reason=vote.reason,
            operation=request.operation if request.HasField("operation") else None,
            position=request.position,
            is_certain=request.is_certain,
            is_again=request.is_again,
            was_cut_off=request.was_cut_off,
            report=_report(request.report),
        )
        barrier = self.apply(arrival).barrier
        assert barrier is not None  # noqa: S101  an arrival that is not refused has one
        if request.max_wait_s > 0:
            await self._decision(barrier, request.max_wait_s)
        return barrier

    def _has_begun(self, request: pb.ArriveRequest) -> bool:
        job = self.rules.jobs.get(request.task.job)
        latest = job.latest_of_name.get(request.name) if job else None
        return bool(request.operation) or (latest is not None and latest.is_open)

    @answered
    async def Await(self, request: pb.AwaitRequest, context: Any) -> pb.AwaitResponse:
        barrier = self.rules.barrier(request.task.job, request.barrier_id)
        await self._decision(barrier, request.max_wait_s)
        await self.make_room(request.task.job, barrier.payload_nbytes if request.collect else 0, context)
        return pb.AwaitResponse(
            coordinator_incarnation=self.rules.incarnation,
            verdict=self._answers.of(barrier, self.rules.incarnation, collect=request.collect).verdict,
            waiting_for=self._answers.waiting_for(self.rules, barrier, self.clock()),
        )

    async def _decision(self, barrier: Barrier, max_wait_s: float) -> None:
        """Wait until the barrier is decided, at most ``max_wait_s`` and `MAX_WAIT_S`."""
        if barrier.is_open:
            await self.wait_for(barrier.barrier_id, max_wait_s)
        if barrier.is_open:
            self.refuse_if_stopping()

    async def wait_for(self, what: str, max_wait_s: float) -> None:
        """Wait until a barrier is decided or a feed changes, at most ``max_wait_s`` and `MAX_WAIT_S`.

        Args:
            what: Id of a barrier, or `waits_for_feed`.
            max_wait_s: Seconds.
        """
        self.refuse_if_stopping()
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()
        # 0.0 comes first, for max() keeps its first argument beside a NaN, which would disorder the loop's timers.
        timer = loop.call_later(min(max(0.0, max_wait_s), MAX_WAIT_S), _release, waiter)
        waiters = self._waiters.setdefault(what, set())
        waiters.add(waiter)
        try:
            await waiter
        finally:
            timer.cancel()
            waiters.discard(waiter)
            if not waiters and self._waiters.get(what) is waiters:
                del self._waiters[what]  # a feed may never change, and clients may ask for any name

    async def make_room(self, job: str, nbytes: int, context: Any) -> None:
        """Wait until a large answer may be made; clients of the job's owner may have many to read."""
        if nbytes:
            await self._outgoing.begin_call(self.owner(job), nbytes, context)

    async def make_room_for_page(self, context: Any) -> None:
        """Wait until a page may be made for a client of which only the metadata is known."""
        await self._outgoing.begin_call(self.opener(context), MAX_PAGE_NBYTES, context)

    @answered
    async def Cancel(self, request: pb.CancelRequest, context: Any) -> pb.CancelResponse:
        self.apply(Cancel(to_identity(request.task), request.barrier_id, request.reason))
        return pb.CancelResponse(coordinator_incarnation=self.rules.incarnation)

    # --- looking in ---------------------------------------------------------------------------------------------

    @answered
    async def GetJob(self, request: pb.GetJobRequest, context: Any) -> pb.GetJobResponse:
        job = self.rules.jobs.get(request.job)
        if job is None:
            raise rules.UnknownError(f"no job {request.job!r} has registered")
        await self.make_room(request.job, MAX_PAGE_NBYTES, context)
        answer = job_page(job, request.page_token, self.clock())
        answer.coordinator_incarnation = self.rules.incarnation
        return answer

    @answered
    async def GetBarrier(self, request: pb.GetBarrierRequest, context: Any) -> pb.GetBarrierResponse:
        barrier = self.rules.barrier(request.job, request.barrier_id)
        await self.make_room(request.job, MAX_PAGE_NBYTES, context)
        status = barrier_status(barrier, self.clock(), rules.MAX_CLIENTS)
        return pb.GetBarrierResponse(coordinator_incarnation=self.rules.incarnation, barrier=status)

    @answered
    async def ListJobs(self, request: pb.ListJobsRequest, context: Any) -> pb.ListJobsResponse:
        visible = {ANY_JOB} if self.tokens is None else self.tokens.visible(authorization(context))
        jobs = (job for job in self.rules.jobs.values() if ANY_JOB in visible or job.name in visible)
        await self.make_room_for_page(context)
        answer = jobs_page(jobs, request.page_token)
        answer.coordinator_incarnation = self.rules.incarnation
        return answer


def _by_job(barriers: Iterable[Barrier]) -> dict[str, list[Barrier]]:
    found: dict[str, list[Barrier]] = {}
    for barrier in barriers:
        found.setdefault(barrier.job, []).append(barrier)
    return found


def _fence(streams: Iterable[tuple[Stream, str]]) -> Iterator[None]:
    """Tell clients that they are fenced, and why."""
    for stream, text in streams:
        failure = pb.Failure(cause=pb.Failure.CAUSE_FENCED, code=errors.FencedError.__name__, message=text)
        stream.tell(pb.HeartbeatStreamResponse(notice=pb.Notice(failure=failure)))
        yield


def _stopping() -> errors.CoordinatorUnavailableError:
    return errors.CoordinatorUnavailableError("the coordinator is shutting down")


def _crowded() -> errors.CoordinatorUnavailableError:
    return errors.CoordinatorUnavailableError("too much waits on this heartbeat stream; read it, and repeat")


def authorization(context: Any) -> str:
    """Return the call's ``authorization`` metadata, "" if it has none."""
    return str(next((value for key, value in context.invocation_metadata() or () if key == "authorization"), ""))


def waits_for_feed(name: str) -> str:
    """Return the key of the calls that wait for a change of a feed; ids of barriers have no blanks."""
    return f"feed {name}"


def _release(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


def to_identity(task: pb.TaskIdentity) -> Identity:
    """Return the identity in a message.

    Raises:
        ConfigError: The name of the job is too long.
    """
    if len(task.job.encode()) > MAX_NAME_BYTES:
        raise errors.ConfigError(f"job name is too long: at most {MAX_NAME_BYTES} bytes fit")
    return Identity(task.job, task.task, task.incarnation)


def _progress(progress: pb.Progress) -> TaskProgress:
    return TaskProgress(progress.phase[:MAX_PHASE_CHARS], progress.step, progress.bytes_done, progress.bytes_total)


def _speaker(request: pb.HeartbeatStreamRequest, who: Identity | None) -> Identity:
    """Return the task that sent a message on a stream; it must have sent the earlier messages, too."""
    speaker = to_identity(request.task)
    if who not in (None, speaker) or (request.HasField("arrival") and request.arrival.task != request.task):
        raise errors.ConfigError("a heartbeat stream is for one task; open another for another task")
    return speaker


def _report(report: pb.Report) -> TaskReport:
    return TaskReport(report.operation, report.num_ended)
