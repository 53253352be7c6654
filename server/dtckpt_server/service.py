# ruff: noqa: ARG002, N802  gRPC gives the handlers' names and arguments
"""The gRPC face of the rules: translates requests, wakes waiters, and drains.

Domain errors become status codes by one table. Two traps of asyncio and gRPC shape the code: a `CancelledError` that
leaves a handler sends no status at all, and a future that several handlers await is cancelled for all by the first
client that goes away. So every waiter has a future of its own, and handlers are only ever cancelled by gRPC itself.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar
from urllib.parse import quote

import grpc

from dtckpt import errors
from dtckpt._proto import coordinator_pb2 as pb
from dtckpt._proto import coordinator_pb2_grpc as pb_grpc
from dtckpt_server import rules
from dtckpt_server.rules import Arrival, Barrier, Identity, Job, Rules
from dtckpt_server.texts import Failure, Progress

logger = logging.getLogger("dtckpt_server")
Response = TypeVar("Response")
Handler = Callable[..., Awaitable[Response]]

MAX_WAIT_S = 30.0
MAX_DETAIL_BYTES = 4096
"""Longest status text, as sent; texts that outgrow the peer's metadata limit of 8 KB are lost with their status."""

STATUS = {
    errors.ConfigError: grpc.StatusCode.INVALID_ARGUMENT,
    rules.UnknownError: grpc.StatusCode.NOT_FOUND,
    rules.HeldError: grpc.StatusCode.ABORTED,
    rules.LimitError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.FencedError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.BarrierConflictError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.CoordinatorUnavailableError: grpc.StatusCode.UNAVAILABLE,
}
"""Most specific class first."""


async def _abort(context: Any, error: BaseException) -> None:
    code = next((STATUS[cls] for cls in STATUS if isinstance(error, cls)), grpc.StatusCode.INTERNAL)
    _, message = errors.to_wire(error)
    name = next((cls.__name__ for cls in type(error).__mro__ if cls.__module__ == errors.__name__), "CoordinationError")
    while len(quote(message)) > MAX_DETAIL_BYTES:  # gRPC percent-encodes the text
        message = message[: len(message) // 2]
    await context.abort(code, message, (("dtckpt-error", name),))


def _answers(handler: Handler[Response]) -> Handler[Response]:
    """Make a handler refuse calls without a deadline, and answer errors of the rules with a status."""

    @functools.wraps(handler)
    async def answer(self: CoordinatorService, request: Any, context: Any) -> Response:
        error: BaseException
        try:
            if context.time_remaining() is None:
                raise errors.ConfigError("the call has no deadline; set one, so that nothing can wait for ever")
            return await handler(self, request, context)
        except errors.DtckptError as refused:
            error = refused
        except Exception as bug:  # a bug of ours: INTERNAL for this caller, and the server goes on
            logger.exception("%s failed", handler.__name__)
            error = bug
        finally:
            self.settle()
        await _abort(context, error)
        raise error

    return answer


class CoordinatorService(pb_grpc.CoordinatorServicer):
    """Serves one `Rules`. All methods run on one event loop."""

    def __init__(self, state: Rules, clock: Callable[[], float] = time.monotonic) -> None:
        self.rules = state
        self._clock = clock
        self._waiters: dict[str, set[asyncio.Future[None]]] = {}
        self._is_draining = False

    # --- for the server -----------------------------------------------------------------------------------------

    def tick(self) -> None:
        self.rules.tick(self._clock())
        self.settle()

    def settle(self) -> None:
        """Do what the rules decided."""
        effects = self.rules.drain()
        for line in effects.log:
            logger.info("%s", line)
        for barrier_id in effects.decided:
            self._wake(barrier_id)

    def drain(self) -> None:
        """Refuse new work and send everyone who waits away with UNAVAILABLE, which clients repeat."""
        self._is_draining = True
        for barrier_id in list(self._waiters):
            self._wake(barrier_id)

    def _wake(self, barrier_id: str) -> None:
        for waiter in self._waiters.pop(barrier_id, ()):
            if not waiter.done():
                waiter.set_result(None)

    def _refuse_while_draining(self) -> None:
        if self._is_draining:
            raise errors.CoordinatorUnavailableError("the coordinator is shutting down")

    # --- tasks --------------------------------------------------------------------------------------------------

    @_answers
    async def Register(self, request: pb.RegisterRequest, context: Any) -> pb.RegisterResponse:
        self._refuse_while_draining()
        who = _identity(request.task)
        self.rules.register(who, request.num_clients, request.attempt, request.host[:256], self._clock())
        return pb.RegisterResponse(
            coordinator_incarnation=self.rules.incarnation,
            heartbeat_timeout_s=self.rules.heartbeat_timeout_s,
            heartbeat_interval_s=self.rules.heartbeat_timeout_s / 6,
        )

    @_answers
    async def Heartbeat(self, request: pb.HeartbeatRequest, context: Any) -> pb.HeartbeatResponse:
        self.rules.heartbeat(_identity(request.task), _progress(request.progress), self._clock())
        return pb.HeartbeatResponse(coordinator_incarnation=self.rules.incarnation, draining=self._is_draining)

    async def HeartbeatStream(
        self, request_iterator: AsyncIterator[pb.HeartbeatStreamRequest], context: Any
    ) -> AsyncIterator[pb.HeartbeatStreamResponse]:
        async for request in request_iterator:
            try:
                self.rules.heartbeat(_identity(request.task), _progress(request.progress), self._clock())
            except errors.DtckptError as error:
                await _abort(context, error)
            finally:
                self.settle()
            yield pb.HeartbeatStreamResponse(
                coordinator_incarnation=self.rules.incarnation, draining=self._is_draining, sequence=request.sequence
            )

    @_answers
    async def Leave(self, request: pb.LeaveRequest, context: Any) -> pb.LeaveResponse:
        self.rules.leave(_identity(request.task), self._clock())
        return pb.LeaveResponse(coordinator_incarnation=self.rules.incarnation)

    # --- barriers -----------------------------------------------------------------------------------------------

    @_answers
    async def Arrive(self, request: pb.ArriveRequest, context: Any) -> pb.ArriveResponse:
        self._refuse_while_draining()
        vote = request.vote
        arrival = Arrival(
            name=request.name,
            generation=request.generation,
            participants=tuple(request.participants),
            timeout_s=request.timeout_s,
            ok=vote.ok,
            payload=vote.payload,
            topic=vote.topic,
            code=vote.code,
            reason=vote.reason,
        )
        barrier = self.rules.arrive(_identity(request.task), arrival, self._clock())
        return pb.ArriveResponse(
            coordinator_incarnation=self.rules.incarnation,
            barrier_id=barrier.barrier_id,
            verdict=_verdict(barrier, collect=request.collect),
        )

    @_answers
    async def Await(self, request: pb.AwaitRequest, context: Any) -> pb.AwaitResponse:
        barrier = self.rules.barrier(request.task.job, request.barrier_id)
        if barrier.is_open:
            self._refuse_while_draining()
            waiter = asyncio.get_running_loop().create_future()
            waiters = self._waiters.setdefault(barrier.barrier_id, set())
            waiters.add(waiter)
            try:
                await asyncio.wait([waiter], timeout=min(max(request.max_wait_s, 0.0), MAX_WAIT_S))
            finally:
                waiters.discard(waiter)
        if barrier.is_open:
            self._refuse_while_draining()
        return pb.AwaitResponse(
            coordinator_incarnation=self.rules.incarnation,
            verdict=_verdict(barrier, collect=request.collect),
            waiting_for=errors.capped(self.rules.waiting_for(barrier).values()) if barrier.is_open else "",
        )

    @_answers
    async def Cancel(self, request: pb.CancelRequest, context: Any) -> pb.CancelResponse:
        self.rules.cancel(_identity(request.task), request.barrier_id, request.reason, self._clock())
        return pb.CancelResponse(coordinator_incarnation=self.rules.incarnation)

    # --- looking in ---------------------------------------------------------------------------------------------

    @_answers
    async def GetJob(self, request: pb.GetJobRequest, context: Any) -> pb.GetJobResponse:
        job = self.rules.jobs.get(request.job)
        if job is None:
            raise rules.UnknownError(f"no job {request.job!r} has registered")
        now = self._clock()
        return pb.GetJobResponse(
            coordinator_incarnation=self.rules.incarnation,
            num_clients=job.num_clients,
            attempt=job.attempt,
            tasks=[_task_status(job, number, now) for number in range(job.num_clients)],
            open_barriers=[_barrier_status(barrier, now) for barrier in job.open.values()],
        )

    @_answers
    async def GetBarrier(self, request: pb.GetBarrierRequest, context: Any) -> pb.GetBarrierResponse:
        barrier = self.rules.barrier(request.job, request.barrier_id)
        return pb.GetBarrierResponse(
            coordinator_incarnation=self.rules.incarnation, barrier=_barrier_status(barrier, self._clock())
        )

    @_answers
    async def ListJobs(self, request: pb.ListJobsRequest, context: Any) -> pb.ListJobsResponse:
        jobs = [
            pb.JobSummary(
                job=job.name,
                num_clients=job.num_clients,
                attempt=job.attempt,
                num_alive=sum(task.state in rules.ALIVE for task in job.tasks.values()),
                num_open_barriers=len(job.open),
            )
            for job in self.rules.jobs.values()
        ]
        return pb.ListJobsResponse(coordinator_incarnation=self.rules.incarnation, jobs=jobs)


def _identity(task: pb.TaskIdentity) -> Identity:
    return Identity(task.job, task.task, task.incarnation)


def _progress(progress: pb.Progress) -> Progress:
    return Progress(progress.phase[:256], progress.step, progress.bytes_done, progress.bytes_total)


def _failure(failure: Failure) -> pb.Failure:
    return pb.Failure(
        cause=pb.Failure.Cause.Value(f"CAUSE_{failure.cause}"),
        code=failure.code,
        message=failure.message,
        clients=failure.clients,
        missing=failure.missing,
    )


def _state(barrier: Barrier) -> pb.BarrierState.ValueType:
    if barrier.is_open:
        return pb.BARRIER_STATE_OPEN
    return pb.BARRIER_STATE_PASSED if barrier.is_passed else pb.BARRIER_STATE_FAILED


def _verdict(barrier: Barrier, *, collect: bool) -> pb.Verdict:
    if collect and barrier.payloads_dropped:
        raise errors.BarrierConflictError(f"barrier {barrier.name!r} passed, but its payloads are no longer kept")
    return pb.Verdict(
        state=_state(barrier),
        failure=_failure(barrier.failure) if barrier.failure else None,
        payloads=barrier.payloads if collect and barrier.is_passed else {},
    )


def _barrier_status(barrier: Barrier, now: float) -> pb.BarrierStatus:
    return pb.BarrierStatus(
        barrier_id=barrier.barrier_id,
        name=barrier.name,
        generation=barrier.generation,
        num_participants=len(barrier.participants),
        missing=barrier.missing(),
        state=_state(barrier),
        failure=_failure(barrier.failure) if barrier.failure else None,
        age_s=now - barrier.opened_at,
    )


def _task_status(job: Job, number: int, now: float) -> pb.TaskStatus:
    task = job.tasks.get(number)
    if task is None:
        return pb.TaskStatus(task=number)
    progress = task.progress
    return pb.TaskStatus(
        task=number,
        state=pb.TaskState.Value(f"TASK_STATE_{task.state}"),
        incarnation=task.incarnation,
        attempt=task.attempt,
        host=task.host,
        heartbeat_age_s=now - task.heard_at,
        progress=pb.Progress(
            phase=progress.phase,
            step=progress.step,
            bytes_done=progress.bytes_done,
            bytes_total=progress.bytes_total,
        ),
    )
