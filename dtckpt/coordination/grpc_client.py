"""Coordination through the coordinator (gRPC): registration, heartbeats, barriers.

The coordinator decides, and the client repeats its requests until it has the decision. A client may repeat every
request. So an outage or a restart of the coordinator during a barrier costs time, but does not fail the barrier. If the
coordinator does not know the client (NOT_FOUND), the client registers and arrives again. One barrier::

    client                                              coordinator
      | Arrive(call 7), on the heartbeat stream if any    |
      |-------------------------------------------------->|  waits up to FIRST_WAIT_S for the verdict
      |<------------------------------ still open --------|
      | Await(barrier id)                                 |
      |-------------------------------------------------->|  waits up to MAX_WAIT_S
      |<------------------------------ NOT_FOUND ---------|  it was restarted, and has lost its state
      | Register, Arrive(call 7, is_again)                |
      |-------------------------------------------------->|
      |<------------------------------ verdict -----------|

The stubs are synchronous, with one thread for heartbeats: a long call of the training process could block an event
loop. Heartbeats and arrivals go on a stream, which costs the coordinator least. The coordinator also sends notices on
this stream: a barrier has failed, or the client is fenced. Without a stream, heartbeats and arrivals are single calls.
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
from dtckpt.config import DEFAULT_HEARTBEAT_TIMEOUT_S
from dtckpt.coordination import barrier_texts, identity, verdicts
from dtckpt.coordination.api import (
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
"""The coordinator's longest wait in an Arrive; most barriers need no other call."""
GOODBYE_S = 1.0
"""A leaving client's longest wait for each answer; nothing depends on the answers."""
KEPT_FAILURES = 64
"""Number of notices that a client keeps: failures of barriers at which it has not arrived yet."""
MAX_SKIPPED_BEATS = 31
"""After each refused stream, the client sends more single heartbeats before it tries again, up to so many."""


class GrpcCoordination(Caller):
    """Clients that meet at a coordinator.

    Args:
        address: ``host:port``.
        member: Who this client is.
        access: Certificates and token; default: neither.
        heartbeat_timeout_s: How long to look for the coordinator outside of barriers. Once registered, the attribute
            holds the coordinator's heartbeat timeout, after which a silent client is lost.
        clock: Monotonic seconds.

    Attributes:
        task_name: The client's full task name, as the coordinator has registered it.
        max_wait_s: The longest time that one call waits for a verdict.
        on_decision: Called with the end of each barrier of this client.
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
        self.on_decision: Callable[[Decision], None] | None = None
        self._heartbeat_thread: threading.Thread | None = None
        self._leaving = threading.Event()
        self._wake = threading.Event()
        self._stream: HeartbeatStream | None = None
        self._failures: OrderedDict[tuple[str, str, tuple[int, ...]], pb.Failure] = OrderedDict()
        self._calls = identity.calls_of(member)
        self._was_forgotten = False
        """Whether the coordinator has lost its state since this client's last arrival. Then the client does not know
        whether the others went on without it."""

    # --- registration and heartbeats --------------------------------------------------------------------------

    def register(self) -> None:
        fork_guard.claim_process()
        with self._lock:
            if self._heartbeat_thread is None:
                # Twice the timeout: an earlier process of this client holds the place for one timeout.
                self._announce(self._clock() + 2 * self.heartbeat_timeout_s)
                # A new event: the thread of an earlier registration may still be in a call, and must end after that
                # call.
                self._leaving = threading.Event()
                self._heartbeat_thread = threading.Thread(
                    target=self._send_heartbeats, args=(self._leaving,), daemon=True, name="dtckpt-heartbeat"
                )
                self._heartbeat_thread.start()
        self._raise_if_over()

    @property
    def is_registered(self) -> bool:
        """Whether this client has registered, and has not left since."""
        return self._heartbeat_thread is not None

    def register_again(self, within_s: float) -> None:
        """Register once more, because the coordinator has lost its state; heartbeats would do so a moment later.

        Raises:
            CoordinatorUnavailableError: This client has left.
        """
        if not self.is_registered:
            raise errors.CoordinatorUnavailableError(f"{self._who()} has left the job")
        self._was_forgotten = True
        self._announce(self._clock() + within_s)

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
                # Near the deadline, a call may have no time for an answer. Then the last answer counts.
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
                is_good = self._run_stream(leaving)
                # The client tries a failed stream again after 1, 3, 7, 15 and then 31 single heartbeats. So a proxy
                # that refuses streams costs little, and the client notices a repaired proxy.
                num_skipped, num_to_skip = 0, 1 if is_good else min(2 * num_to_skip + 1, MAX_SKIPPED_BEATS)
                if self._is_over(leaving):
                    return
            self._send_heartbeat()
            num_skipped += 1
            identity.wait_for_heartbeat(self._wake, leaving, self._interval_s)

    def _run_stream(self, leaving: threading.Event) -> bool:
        """Send heartbeats on a stream until it ends; return whether the coordinator ever answered on it."""
        stream = HeartbeatStream(self._stream_request, self._interval_s, self._clock)
        self._stream = stream
        try:
            if leaving.is_set():  # `leave` may have come before the stream that it would have ended
                return True
            self._call_once(lambda stub, _: stream.run(stub, self._take_notice), self._interval_s)
        except errors.FencedError as error:
            self._fence(error.message)
        except (grpc.RpcError, errors.DtckptError, UnknownError) as error:
            logger.info("the heartbeat stream of %s ended, single calls go on: %s", self._who(), describe(error))
        finally:
            # A later registration may have begun its own stream meanwhile.
            if self._stream is stream:
                self._stream = None
        return stream.num_answers > 0

    def _stream_request(self, sequence: int) -> pb.HeartbeatStreamRequest:
        progress = _progress_proto(self._progress)
        return pb.HeartbeatStreamRequest(
            task=self._identity, progress=progress, sequence=sequence, report=self._report()
        )

    def _report(self) -> pb.Report:
        report = self._calls.report
        return pb.Report(operation=report.operation, num_ended=report.num_ended)

    def _take_notice(self, response: pb.HeartbeatStreamResponse) -> None:
        """Handle a notice, which the coordinator sends without a request."""
        notice = response.notice
        if notice.name:
            logger.info("barrier %r failed: %s", notice.name, notice.failure.message)
            # Notices concern only later rounds of an operation. Each such round takes place once, so no other round can
            # get this failure.
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

    def _send_heartbeat(self) -> None:
        """Send one heartbeat by a single call, or log its failure."""
        progress = _progress_proto(self._progress)
        request = pb.HeartbeatRequest(task=self._identity, progress=progress, report=self._report())
        try:
            try:
                self._call_once(lambda stub, t: stub.Heartbeat(request, timeout=t), self._interval_s)
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
        """Make no more calls to the coordinator: they raise CoordinatorUnavailableError with this reason.

        Does not say goodbye, because that would fail barriers of clients that do not know the reason yet.
        """
        self._abandoned = reason
        self._wake.set()
        if (stream := self._stream) is not None:
            stream.end(at_once=True)

    def _wake_heartbeats(self) -> None:
        self._wake.set()
        if (stream := self._stream) is not None:
            stream.wake()

    def _stop_heartbeats(self, thread: threading.Thread) -> None:
        self._leaving.set()
        self._wake.set()
        # In order first; the stream is cut off only if it does not end.
        for at_once in (False, True):
            if (stream := self._stream) is not None:
                stream.end(at_once=at_once)
            thread.join(GOODBYE_S)

    def heartbeat(self, progress: Progress) -> None:
        is_new_phase = progress.phase != self._progress.phase
        self._progress = progress
        if is_new_phase:
            self._wake_heartbeats()

    def leave(self) -> None:
        # A forked process inherits this object: it must not say goodbye for its parent.
        if os.getpid() != self._pid:
            return
        with self._lock:
            thread, self._heartbeat_thread = self._heartbeat_thread, None
        if thread is not None:
            self._stop_heartbeats(thread)
        if thread is not None and not self._abandoned:
            try:
                self._call_once(lambda stub, t: stub.Leave(pb.LeaveRequest(task=self._identity), timeout=t), GOODBYE_S)
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
        call: int | None = None,
    ) -> Verdict:
        """Wait at a barrier as `Coordination.barrier` does.

        Args:
            call: Number of the call, if the caller has begun it and will end it.
        """
        members = verdicts.validate_barrier(self.member, name, timeout_s, participants)
        self.register()
        number = self._calls.begin(of_operation=operation is not None) if call is None else call
        request = pb.ArriveRequest(
            task=self._identity,
            name=name,
            # The number makes a repeated request safe: the coordinator gives each call one round, however often the
            # request comes.
            call=number,
            # Empty stands for all clients: else every arrival in a job of thousands would list thousands.
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
        notice = self._failures.get((name, request.operation, tuple(request.participants)))
        begun = ""
        try:
            answer = self._arrive_and_wait(request, self._clock() + timeout_s) if notice is None else _failed(notice)
            if operation is not None and not answer.verdict.HasField("failure"):
                begun = operation.id or answer.barrier_id
        finally:
            if operation is not None and call is None:
                self._calls.end(number, operation.id or begun)
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
            self._send_heartbeat()  # it counted as lost; clients that learn of this failure must find it alive again
        outcome.raise_failure(was_cut_off=request.was_cut_off)
        cut_off = tuple(answer.verdict.cut_off)
        return Verdict(name, answer.generation, payloads, Operation(begun), cut_off)

    def _arrive_and_wait(self, request: pb.ArriveRequest, deadline: float) -> pb.ArriveResponse:
        try:
            return self._arrive_until_decided(request, deadline)
        except KeyboardInterrupt:
            self._cancel(request)
            raise

    def _arrive_until_decided(self, request: pb.ArriveRequest, deadline: float) -> pb.ArriveResponse:
        """Arrive and wait for the verdict; start over whenever the coordinator does not know this client.

        The calls outlast ``deadline`` by `CALL_TIMEOUT_S`, so that the coordinator's verdict, a timeout, comes first.
        """
        next_log = self._clock() + verdicts.STILL_WAITING_S
        request.max_wait_s = min(FIRST_WAIT_S, verdicts.STILL_WAITING_S, self.max_wait_s)
        limit_s = request.max_wait_s + CALL_TIMEOUT_S
        arrived: pb.ArriveResponse | None = None
        for pause_s in backoffs():
            try:
                # Computed anew at each try, like the arrival's timeout: after an outage only the rest of the time
                # remains.
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
        """Cut the timeout of an arrival to the rest of it, and return the arrival.

        The rest is rounded up, so that a first try has the timeout that the caller gave; error texts name it.
        """
        left_s = math.ceil(10 * (deadline - self._clock())) / 10
        request.timeout_s = min(request.timeout_s, max(left_s, 0.1))
        return request

    def _arrive(
        self, stub: pb_grpc.CoordinatorStub, request: pb.ArriveRequest, deadline: float, timeout_s: float
    ) -> pb.ArriveResponse:
        try:
            return stub.Arrive(self._shorten(request, deadline), timeout=timeout_s)
        except grpc.RpcError as error:
            # The message may have arrived nevertheless, at a coordinator that is dead now.
            request.is_again |= error.code() in REPEATED
            request.was_cut_off |= error.code() in REPEATED
            raise

    def _arrive_on_stream(self, request: pb.ArriveRequest, limit_s: float) -> pb.ArriveResponse | None:
        """Arrive on the heartbeat stream, which costs the coordinator least.

        Returns:
            None if there is no stream or no answer on it. The arrival may have succeeded; a repeated arrival is safe.
        """
        stream = self._stream
        answer = stream.arrive(request, limit_s) if stream is not None else None
        if answer is None:
            request.is_again |= stream is not None
            return None
        if answer.HasField("refusal"):
            raise_refusal(answer.refusal)
        # An answer with neither a refusal nor an arrival is no verdict.
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
        """Fail the barrier for all clients, if the coordinator answers quickly."""
        arrival.max_wait_s = 0.0
        cancel = pb.CancelRequest(task=self._identity, reason=barrier_texts.WAS_INTERRUPTED)
        try:
            # The interrupt may have come before the answer with the barrier's id. The same call again returns the id at
            # once.
            cancel.barrier_id = self._call_once(lambda stub, t: stub.Arrive(arrival, timeout=t), 1.0).barrier_id
            self._call_once(lambda stub, t: stub.Cancel(cancel, timeout=t), 1.0)
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
