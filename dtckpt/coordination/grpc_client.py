"""Coordination through the coordinator service.

The coordinator decides; this client repeats itself until it knows the decision. Every request may be sent again, so an
outage or a restart of the coordinator inside a barrier costs time, not the barrier: a coordinator that does not know
this client (NOT_FOUND) is told again who it is and where it has arrived.

The stubs are synchronous, with one thread for heartbeats: an event loop inside a training process would be one more
thing that a long call can block. Heartbeats and arrivals go on a stream, which costs the coordinator least and on which
it tells of failed barriers and of fencing unasked; by single calls while there is no stream.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

import grpc

from dtckpt import errors
from dtckpt._proto import coordinator_pb2 as pb
from dtckpt._proto import coordinator_pb2_grpc as pb_grpc
from dtckpt.comm import fork_guard
from dtckpt.coordination import barrier_texts, identity, verdicts
from dtckpt.coordination.api import (
    DEFAULT_HEARTBEAT_TIMEOUT_S,
    NO_POSITION,
    YES,
    JobStatus,
    Member,
    Operation,
    Position,
    Progress,
    Verdict,
    Vote,
)
from dtckpt.coordination.grpc_calls import (
    CALL_TIMEOUT_S,
    LAST_BACKOFF_S,
    REPEATED,
    Caller,
    HeldError,
    UnknownError,
    backoffs,
    describe,
    raise_refusal,
)
from dtckpt.coordination.grpc_credentials import PLAINTEXT, Access
from dtckpt.coordination.grpc_heartbeat import HeartbeatStream
from dtckpt.coordination.grpc_status import job_status
from dtckpt.coordination.verdicts import Decision, Outcome

logger = logging.getLogger("dtckpt.coordination")

MAX_WAIT_S = 30.0
FIRST_WAIT_S = 5.0
"""How long an arrival itself waits; most barriers need no other call."""
GOODBYE_S = 1.0
"""How long a client that leaves waits for each answer; nothing depends on them."""
KEPT_FAILURES = 64
"""Barriers of operations that failed before this client arrived there, as far as it was told."""
MAX_SKIPPED_BEATS = 31
"""A stream that is refused again and again is tried after ever more beats, up to so many."""


class GrpcCoordination(Caller):
    """Clients that meet at a coordinator.

    Args:
        address: ``host:port``.
        member: Who this client is.
        access: Certificates and token; default: neither.
        heartbeat_timeout_s: How long to look for the coordinator outside of barriers. The silence after which a client
            is lost is the coordinator's to say; the attribute holds it once registered.
        clock: Monotonic seconds.

    Attributes:
        task_name: The client's full name, as the coordinator has registered it.
    """

    def __init__(
        self,
        address: str,
        member: Member,
        *,
        access: Access = PLAINTEXT,
        heartbeat_timeout_s: float = DEFAULT_HEARTBEAT_TIMEOUT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(address, access, clock)
        self.member = member
        self.heartbeat_timeout_s = heartbeat_timeout_s
        self.task_name = member.full_task_name()
        self._identity = pb.TaskIdentity(job=member.job, task=member.client, incarnation=member.incarnation)
        self._pid = os.getpid()
        self._progress = Progress()
        self._interval_s = heartbeat_timeout_s / 6
        self._fenced = ""
        self._abandoned = ""
        self.max_wait_s = MAX_WAIT_S
        """How long one call waits for a verdict, at most."""
        self.on_decision: Callable[[Decision], None] | None = None
        """Told how each barrier of this client ended."""
        self._beating: threading.Thread | None = None
        self._leaving = threading.Event()
        self._wake = threading.Event()
        self._stream: HeartbeatStream | None = None
        self._failures: OrderedDict[tuple[str, str, tuple[int, ...]], pb.Failure] = OrderedDict()
        self._calls = identity.calls_of(member)
        self._was_forgotten = False
        """Whether the coordinator has lost its state since the last arrival, and with it what became of this client."""

    # --- registration and heartbeats --------------------------------------------------------------------------

    def register(self) -> None:
        fork_guard.claim_process()
        with self._lock:
            if self._beating is None:
                # Twice the timeout: an earlier process of this client holds the place for one.
                self._announce(self._clock() + 2 * self.heartbeat_timeout_s)
                # A new event: the thread of an earlier registration may still be inside a call, and must end after it.
                self._leaving = threading.Event()
                self._beating = threading.Thread(
                    target=self._send_heartbeats, args=(self._leaving,), daemon=True, name="dtckpt-heartbeat"
                )
                self._beating.start()
        self._raise_if_over()

    def _announce(self, deadline: float) -> None:
        request = pb.RegisterRequest(
            task=self._identity,
            num_clients=self.member.num_clients,
            attempt=self.member.attempt,
            host=socket.gethostname(),
            job_name=self.member.job_name,
            report=self._report(),
        )
        held: HeldError | None = None
        for pause_s in backoffs():
            try:
                response = self._call(lambda stub, t: stub.Register(request, timeout=t), deadline)
                break
            except HeldError as error:
                held = error
            except errors.CoordinatorUnavailableError:
                # Near the deadline, a call may have had no time to be answered.
                if held is None or self._abandoned or self._clock() + LAST_BACKOFF_S < deadline:
                    raise
                raise errors.FencedError(str(held)) from None
            if self._clock() > deadline:
                raise errors.FencedError(str(held))
            time.sleep(pause_s)
        self.heartbeat_timeout_s = response.heartbeat_timeout_s
        self.task_name = response.task_name
        self._interval_s = response.heartbeat_interval_s

    def _send_heartbeats(self, leaving: threading.Event) -> None:
        num_skipped = num_to_skip = 0
        while not self._is_over(leaving):
            if num_skipped >= num_to_skip:
                is_good = self._beat_on_stream(leaving)
                num_skipped, num_to_skip = 0, 1 if is_good else min(2 * num_to_skip + 1, MAX_SKIPPED_BEATS)
                if self._is_over(leaving):
                    return
            self._beat()
            num_skipped += 1
            identity.pause(self._wake, leaving, self._interval_s)

    def _beat_on_stream(self, leaving: threading.Event) -> bool:
        """Beat on a stream until it ends; return whether it was any good."""
        stream = HeartbeatStream(self._stream_beat, self._interval_s, self._clock)
        self._stream = stream
        try:
            if leaving.is_set():  # whoever said so may have seen no stream
                return True
            self._once(lambda stub, _: stream.run(stub, self._hear), self._interval_s)
        except errors.FencedError as error:
            self._fence(error.message)
        except (grpc.RpcError, errors.DtckptError, UnknownError) as error:
            logger.info("the heartbeat stream of %s ended, single calls go on: %s", self._who(), describe(error))
        finally:
            if self._stream is stream:
                self._stream = None
        return stream.num_answers > 0

    def _stream_beat(self, sequence: int) -> pb.HeartbeatStreamRequest:
        progress = _progress_proto(self._progress)
        return pb.HeartbeatStreamRequest(
            task=self._identity, progress=progress, sequence=sequence, report=self._report()
        )

    def _report(self) -> pb.Report:
        report = self._calls.report
        return pb.Report(operation=report.operation, num_ended=report.num_ended)

    def _hear(self, response: pb.HeartbeatStreamResponse) -> None:
        """Note what the coordinator tells unasked."""
        notice = response.notice
        if notice.name:
            logger.info("barrier %r failed: %s", notice.name, notice.failure.message)
            self._failures[notice.name, notice.operation, tuple(notice.participants)] = notice.failure
            while len(self._failures) > KEPT_FAILURES:
                self._failures.popitem(last=False)
        elif response.HasField("notice"):
            self._fence(notice.failure.message)

    def _fence(self, text: str) -> None:
        self._fenced = text
        logger.error("%s", text)
        if self._stream is not None:
            self._stream.end()

    def _beat(self) -> None:
        """Send one heartbeat by a call of its own, or say why it did not get through."""
        progress = _progress_proto(self._progress)
        request = pb.HeartbeatRequest(task=self._identity, progress=progress, report=self._report())
        try:
            try:
                self._once(lambda stub, t: stub.Heartbeat(request, timeout=t), self._interval_s)
            except UnknownError:
                logger.warning("the coordinator at %s does not know %s; registering again", self._address, self._who())
                self._was_forgotten = True
                self._announce(self._clock() + self._interval_s)
        except errors.FencedError as error:
            self._fence(error.message)
        except (grpc.RpcError, errors.DtckptError) as error:
            logger.warning("no heartbeat of %s got through: %s", self._who(), describe(error))

    def _is_over(self, leaving: threading.Event) -> bool:
        return bool(self._fenced or self._abandoned) or leaving.is_set()

    def abandon(self, reason: str) -> None:
        """Speak to the coordinator no more: calls raise CoordinatorUnavailableError with this reason.

        It is not told, as that would fail barriers of clients that have not heard the reason yet.
        """
        self._abandoned = reason
        self._wake.set()
        if (stream := self._stream) is not None:
            stream.end(at_once=True)

    def _wake_beating(self) -> None:
        self._wake.set()
        if (stream := self._stream) is not None:
            stream.wake()

    def _stop_beating(self, beating: threading.Thread) -> None:
        self._leaving.set()
        self._wake.set()
        for at_once in (False, True):
            if (stream := self._stream) is not None:
                stream.end(at_once=at_once)
            beating.join(GOODBYE_S)

    def heartbeat(self, progress: Progress) -> None:
        is_new_phase = progress.phase != self._progress.phase
        self._progress = progress
        if is_new_phase:
            self._wake_beating()

    def leave(self) -> None:
        if os.getpid() != self._pid:
            return
        with self._lock:
            beating, self._beating = self._beating, None
        if beating is not None:
            self._stop_beating(beating)
        if beating is not None and not self._abandoned:
            try:
                self._once(lambda stub, t: stub.Leave(pb.LeaveRequest(task=self._identity), timeout=t), GOODBYE_S)
            except (grpc.RpcError, errors.DtckptError, UnknownError) as error:
                logger.info("%s left without goodbye: %s", self._who(), describe(error))
        self.close()

    # --- barrier ------------------------------------------------------------------------------------------------

    def barrier(
        self,
        name: str,
        vote: Vote = YES,
        *,
        timeout_s: float,
        participants: Sequence[int] | None = None,
        collect: bool = False,
        operation: Operation | None = None,
        position: Position = NO_POSITION,
    ) -> Verdict:
        members = verdicts.validate_barrier(self.member, name, timeout_s, participants)
        self.register()
        call = self._calls.begin(of_operation=operation is not None)
        request = pb.ArriveRequest(
            task=self._identity,
            name=name,
            call=call,
            participants=() if len(members) == self.member.num_clients else members,
            timeout_s=timeout_s,
            vote=pb.Vote(ok=vote.ok, payload=vote.payload, topic=vote.topic, code=vote.code, reason=vote.reason),
            collect=collect,
            operation=None if operation is None else operation.id,
            position=position.text,
            is_certain=position.is_certain,
            was_cut_off=self._was_forgotten,
        )
        self._was_forgotten = False
        told = self._failures.get((name, request.operation, tuple(request.participants)))
        begun = ""
        try:
            answer = self._meet(request, self._clock() + timeout_s) if told is None else _failed(told)
            if operation is not None and not answer.verdict.HasField("failure"):
                begun = operation.id or answer.barrier_id
        finally:
            if operation is not None:
                self._calls.end(call, operation.id or begun)
        failure = answer.verdict.failure
        is_retold = failure.cause == pb.Failure.CAUSE_LATE
        outcome = Outcome(
            failure.code, failure.message, tuple(failure.clients), tuple(failure.missing), is_retold=is_retold
        )
        payloads = dict(answer.verdict.payloads)
        if self.on_decision is not None:
            of = None if operation is None else operation.id
            kept = payloads if collect else None
            self.on_decision(Decision(name, of, members, answer.barrier_id, outcome, kept))
        if self.member.client in failure.clients:
            self._beat()  # it was taken for lost: whoever hears of that shall find it alive again
        outcome.raise_failure(was_cut_off=request.was_cut_off)
        cut_off = tuple(answer.verdict.cut_off)
        return Verdict(name, answer.generation, payloads, Operation(begun), cut_off)

    def _meet(self, request: pb.ArriveRequest, deadline: float) -> pb.ArriveResponse:
        try:
            return self._meet_until_decided(request, deadline)
        except KeyboardInterrupt:
            self._cancel(request)
            raise

    def _meet_until_decided(self, request: pb.ArriveRequest, deadline: float) -> pb.ArriveResponse:
        """Arrive and wait, again and again if the coordinator forgets us, until there is a verdict."""
        next_log = self._clock() + verdicts.STILL_WAITING_S
        request.max_wait_s = min(FIRST_WAIT_S, verdicts.STILL_WAITING_S, self.max_wait_s)
        limit_s = request.max_wait_s + CALL_TIMEOUT_S
        arrived: pb.ArriveResponse | None = None
        for pause_s in backoffs():
            try:
                until = deadline + CALL_TIMEOUT_S
                self._shorten(request, deadline)
                arrived = self._arrive_on_stream(request, min(limit_s, until - self._clock())) or self._call(
                    lambda stub, t: self._arrive(stub, request, deadline, t), until, limit_s
                )
                if arrived.verdict.state == pb.BARRIER_STATE_OPEN:
                    arrived.verdict.CopyFrom(self._await(request, arrived.barrier_id, deadline, next_log))
                return arrived
            except UnknownError:
                request.is_again |= arrived is not None
                request.was_cut_off = True
                time.sleep(pause_s)
                self._announce(deadline + CALL_TIMEOUT_S)
        raise AssertionError("backoffs never end")

    def _shorten(self, request: pb.ArriveRequest, deadline: float) -> pb.ArriveRequest:
        """Return an arrival with what is left of its timeout, rounded up: texts tell what was asked for."""
        left_s = math.ceil(10 * (deadline - self._clock())) / 10
        request.timeout_s = min(request.timeout_s, max(left_s, 0.1))
        return request

    def _arrive(
        self, stub: pb_grpc.CoordinatorStub, request: pb.ArriveRequest, deadline: float, timeout_s: float
    ) -> pb.ArriveResponse:
        try:
            return stub.Arrive(self._shorten(request, deadline), timeout=timeout_s)
        except grpc.RpcError as error:
            request.was_cut_off |= error.code() in REPEATED
            raise

    def _arrive_on_stream(self, request: pb.ArriveRequest, limit_s: float) -> pb.ArriveResponse | None:
        """Arrive as it costs the coordinator least; return None if that cannot be done, or may not have been."""
        stream = self._stream
        answer = stream.arrive(request, limit_s) if stream is not None else None
        if answer is None:
            return None
        if answer.HasField("refusal"):
            raise_refusal(answer.refusal)
        # Neither would pass for a verdict.
        return pb.ArriveResponse.FromString(answer.arrived) if answer.arrived else None

    def _await(self, arrival: pb.ArriveRequest, barrier_id: str, deadline: float, next_log: float) -> pb.Verdict:
        request = pb.AwaitRequest(task=self._identity, barrier_id=barrier_id, collect=arrival.collect)
        while True:
            request.max_wait_s = min(max(next_log - self._clock(), 0.1), self.max_wait_s)
            limit_s = request.max_wait_s + CALL_TIMEOUT_S
            response = self._call(lambda stub, t: stub.Await(request, timeout=t), deadline + CALL_TIMEOUT_S, limit_s)
            if response.verdict.state != pb.BARRIER_STATE_OPEN:
                return response.verdict
            if self._clock() >= next_log:
                next_log = self._clock() + verdicts.STILL_WAITING_S
                logger.warning("barrier %r: still waiting for %s", arrival.name, response.waiting_for)

    def _cancel(self, arrival: pb.ArriveRequest) -> None:
        """Fail the barrier for everyone, if that can be done quickly."""
        arrival.max_wait_s = 0.0
        cancel = pb.CancelRequest(task=self._identity, reason=barrier_texts.WAS_INTERRUPTED)
        try:
            cancel.barrier_id = self._once(lambda stub, t: stub.Arrive(arrival, timeout=t), 1.0).barrier_id
            self._once(lambda stub, t: stub.Cancel(cancel, timeout=t), 1.0)
        except (grpc.RpcError, errors.DtckptError, UnknownError) as error:
            logger.warning("barrier %r could not be cancelled: %s", arrival.name, describe(error))

    def status(self) -> JobStatus:
        try:
            return job_status(
                self.member.job, self._job_pages(self.member.job, self._clock() + self.heartbeat_timeout_s)
            )
        except UnknownError:
            return JobStatus(self.member.job, self.member.num_clients, (), ())

    def _raise_if_over(self) -> None:
        if self._fenced:
            raise errors.FencedError(self._fenced)
        if self._abandoned:
            raise errors.CoordinatorUnavailableError(self._abandoned)

    def _who(self) -> str:
        return barrier_texts.task_name(self.member.job, self.member.client)


def _failed(failure: pb.Failure) -> pb.ArriveResponse:
    return pb.ArriveResponse(verdict=pb.Verdict(state=pb.BARRIER_STATE_FAILED, failure=failure))


def _progress_proto(progress: Progress) -> pb.Progress:
    return pb.Progress(
        phase=progress.phase, step=progress.step, bytes_done=progress.bytes_done, bytes_total=progress.bytes_total
    )
