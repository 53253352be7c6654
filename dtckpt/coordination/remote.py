"""Coordination through the coordinator service.

The coordinator decides; this client repeats itself until it knows the decision. Every request may be sent again, so an
outage or a restart of the coordinator inside a barrier costs time, not the barrier: a coordinator that does not know
this client (NOT_FOUND) is told again who it is and where it has arrived.

The stubs are synchronous, with one thread for heartbeats: an event loop inside a training process would be one more
thing that a long call can block.
"""

from __future__ import annotations

import logging
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import grpc

from dtckpt import errors
from dtckpt._proto import coordinator_pb2 as pb
from dtckpt._proto import coordinator_pb2_grpc as pb_grpc
from dtckpt.coordination import process, rules
from dtckpt.coordination.protocol import (
    DEFAULT_HEARTBEAT_TIMEOUT_S,
    YES,
    BarrierStatus,
    JobStatus,
    Member,
    Progress,
    TaskStatus,
    Verdict,
    Vote,
)
from dtckpt.coordination.rules import Outcome

logger = logging.getLogger("dtckpt.coordination")
Request = TypeVar("Request")
Response = TypeVar("Response")
T = TypeVar("T")

CALL_TIMEOUT_S = 10.0
"""Of one quick call, and by how much a barrier's calls outlast its deadline, so that the verdict arrives first."""
MAX_WAIT_S = 30.0
FIRST_BACKOFF_S, LAST_BACKOFF_S = 0.05, 2.0
OPTIONS = (
    ("grpc.max_receive_message_length", 256 << 20),  # payloads of thousands of clients
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.enable_http_proxy", 0),  # the coordinator is a neighbour; a proxy variable would send calls astray
)
REPEATED = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED)


class _UnknownError(Exception):
    """The coordinator does not know this task or barrier."""


class _HeldError(Exception):
    """Another process holds this client's place and may be alive."""


@dataclass(frozen=True, slots=True)
class _Connection:
    """A channel and the process that opened it. A channel must not be used after a fork."""

    pid: int
    channel: grpc.Channel
    stub: pb_grpc.CoordinatorStub


class GrpcCoordination:
    """Clients that meet at a coordinator.

    Args:
        address: ``host:port``.
        member: Who this client is.
        heartbeat_timeout_s: How long to look for the coordinator outside of barriers. The silence after which a client
            is lost is the coordinator's to say; the attribute holds it once registered.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        address: str,
        member: Member,
        *,
        heartbeat_timeout_s: float = DEFAULT_HEARTBEAT_TIMEOUT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal():
            raise errors.ConfigError(f"coordinator address is {address!r}; expected host:port")
        self.member = member
        self.heartbeat_timeout_s = heartbeat_timeout_s
        self._address = address
        self._clock = clock
        self._identity = pb.TaskIdentity(job=member.job, task=member.client, incarnation=member.incarnation)
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._connection: _Connection | None = None
        self._progress = Progress()
        self._interval_s = heartbeat_timeout_s / 6
        self._fenced = ""
        self._beating: threading.Thread | None = None
        self._leaving = threading.Event()
        self._wake = threading.Event()

    # --- registration and heartbeats --------------------------------------------------------------------------

    def register(self) -> None:
        if os.getpid() != self._pid:
            raise errors.FencedError(f"this process was forked from {self._who()} and is not that client")
        with self._lock:
            if self._beating is None:
                # Twice the timeout: an earlier process of this client holds the place for one.
                self._announce(self._clock() + 2 * self.heartbeat_timeout_s)
                self._leaving.clear()
                self._beating = threading.Thread(target=self._send_heartbeats, daemon=True, name="dtckpt-heartbeat")
                self._beating.start()
        self._raise_if_fenced()

    def _announce(self, deadline: float) -> None:
        request = pb.RegisterRequest(
            task=self._identity,
            num_clients=self.member.num_clients,
            attempt=self.member.attempt,
            host=socket.gethostname(),
        )
        for pause_s in _backoffs():
            try:
                response = self._call(lambda stub, t: stub.Register(request, timeout=t), deadline)
                break
            except _HeldError as error:
                if self._clock() > deadline:
                    raise errors.FencedError(str(error)) from None
                time.sleep(pause_s)
        self.heartbeat_timeout_s = response.heartbeat_timeout_s
        self._interval_s = response.heartbeat_interval_s

    def _send_heartbeats(self) -> None:
        while not process.pause(self._wake, self._leaving, self._interval_s):
            request = pb.HeartbeatRequest(task=self._identity, progress=_progress_proto(self._progress))
            try:
                try:
                    self._once(lambda stub, t: stub.Heartbeat(request, timeout=t), self._interval_s)  # noqa: B023
                except _UnknownError:
                    logger.warning(
                        "the coordinator at %s does not know %s; registering again", self._address, self._who()
                    )
                    self._announce(self._clock() + self._interval_s)
            except errors.FencedError as error:
                self._fenced = error.message
                logger.error("%s", error)
                return
            except (grpc.RpcError, errors.DtckptError) as error:
                logger.warning("no heartbeat of %s got through: %s", self._who(), _describe(error))

    def heartbeat(self, progress: Progress) -> None:
        is_new_phase = progress.phase != self._progress.phase
        self._progress = progress
        if is_new_phase:
            self._wake.set()

    def leave(self) -> None:
        if os.getpid() != self._pid:
            return
        with self._lock:
            beating, self._beating = self._beating, None
        if beating is not None:
            self._leaving.set()
            self._wake.set()
            beating.join(CALL_TIMEOUT_S)
            try:
                self._once(lambda stub, t: stub.Leave(pb.LeaveRequest(task=self._identity), timeout=t), 1.0)
            except (grpc.RpcError, errors.DtckptError, _UnknownError) as error:
                logger.info("%s left without goodbye: %s", self._who(), _describe(error))
        with self._lock:
            connection, self._connection = self._connection, None
        if connection is not None:
            connection.channel.close()

    # --- barrier ------------------------------------------------------------------------------------------------

    def barrier(
        self,
        name: str,
        vote: Vote = YES,
        *,
        timeout_s: float,
        participants: Sequence[int] | None = None,
        collect: bool = False,
    ) -> Verdict:
        members = rules.validate_barrier(self.member, name, timeout_s, participants)
        self.register()
        generation = process.generation(self.member, name, members)
        request = pb.ArriveRequest(
            task=self._identity,
            name=name,
            generation=generation,
            participants=() if len(members) == self.member.num_clients else members,
            timeout_s=timeout_s,
            vote=pb.Vote(ok=vote.ok, payload=vote.payload, topic=vote.topic, code=vote.code, reason=vote.reason),
            collect=collect,
        )
        verdict = self._meet(request, self._clock() + timeout_s)
        # Only a known verdict ends the generation: a call that raised before may be repeated and is the same barrier.
        process.end_generation(self.member, name, members, generation)
        failure = verdict.failure
        Outcome(failure.code, failure.message, tuple(failure.clients), tuple(failure.missing)).raise_failure()
        return Verdict(name, generation, dict(verdict.payloads))

    def _meet(self, request: pb.ArriveRequest, deadline: float) -> pb.Verdict:
        """Arrive and wait, again and again if the coordinator forgets us, until there is a verdict."""
        for pause_s in _backoffs():
            try:
                arrived = self._call(lambda stub, t: stub.Arrive(request, timeout=t), deadline + CALL_TIMEOUT_S)
                if arrived.verdict.state != pb.BARRIER_STATE_OPEN:
                    return arrived.verdict
                return self._await(request, arrived.barrier_id, deadline)
            except _UnknownError:
                time.sleep(pause_s)
                self._announce(deadline + CALL_TIMEOUT_S)
                request.timeout_s = max(deadline - self._clock(), 0.001)
        raise AssertionError("backoffs never end")

    def _await(self, arrival: pb.ArriveRequest, barrier_id: str, deadline: float) -> pb.Verdict:
        next_log = self._clock() + rules.STILL_WAITING_S
        wait_s = min(MAX_WAIT_S, rules.STILL_WAITING_S)
        request = pb.AwaitRequest(
            task=self._identity, barrier_id=barrier_id, collect=arrival.collect, max_wait_s=wait_s
        )
        try:
            while True:
                self._raise_if_fenced()
                response = self._call(
                    lambda stub, t: stub.Await(request, timeout=t), deadline + CALL_TIMEOUT_S, wait_s + CALL_TIMEOUT_S
                )
                if response.verdict.state != pb.BARRIER_STATE_OPEN:
                    return response.verdict
                if self._clock() >= next_log:
                    next_log = self._clock() + rules.STILL_WAITING_S
                    logger.warning("barrier %r: still waiting for %s", arrival.name, response.waiting_for)
        except KeyboardInterrupt:
            cancel = pb.CancelRequest(
                task=self._identity, barrier_id=barrier_id, reason="was interrupted while it waited"
            )
            try:
                self._once(lambda stub, t: stub.Cancel(cancel, timeout=t), 1.0)
            except (grpc.RpcError, errors.DtckptError, _UnknownError) as error:
                logger.warning("barrier %r could not be cancelled: %s", arrival.name, _describe(error))
            raise

    def status(self) -> JobStatus:
        request = pb.GetJobRequest(job=self.member.job)
        try:
            job = self._call(lambda stub, t: stub.GetJob(request, timeout=t), self._clock() + self.heartbeat_timeout_s)
        except _UnknownError:
            return JobStatus(self.member.job, self.member.num_clients, (), ())
        barriers = [
            BarrierStatus(barrier.name, barrier.generation, barrier.num_participants, tuple(barrier.missing))
            for barrier in job.open_barriers
        ]
        return JobStatus(self.member.job, job.num_clients, tuple(map(_task_status, job.tasks)), tuple(barriers))

    # --- calls --------------------------------------------------------------------------------------------------

    def _stub(self) -> pb_grpc.CoordinatorStub:
        with self._lock:
            if self._connection is None or self._connection.pid != os.getpid():
                channel = grpc.insecure_channel(self._address, options=OPTIONS)
                self._connection = _Connection(os.getpid(), channel, pb_grpc.CoordinatorStub(channel))
            return self._connection.stub

    def _once(self, call: Callable[[pb_grpc.CoordinatorStub, float], T], timeout_s: float) -> T:
        """Make one call and translate the coordinator's refusals; other failures stay RpcError."""
        try:
            return call(self._stub(), timeout_s)
        except grpc.RpcError as error:
            code, message = error.code(), error.details() or ""
            if code == grpc.StatusCode.NOT_FOUND:
                raise _UnknownError(message) from error
            if code == grpc.StatusCode.ABORTED:
                raise _HeldError(message) from error
            named = {item.key: item.value for item in error.trailing_metadata() or ()}.get("dtckpt-error")
            if named and code != grpc.StatusCode.UNAVAILABLE:
                raise errors.from_wire(str(named), message) from error
            raise

    def _call(
        self,
        call: Callable[[pb_grpc.CoordinatorStub, float], T],
        deadline: float,
        timeout_s: float = CALL_TIMEOUT_S,
    ) -> T:
        """Repeat a call until it is answered or the deadline has passed."""
        next_log = self._clock() + rules.STILL_WAITING_S
        for pause_s in _backoffs():
            remaining_s = deadline - self._clock()
            try:
                return self._once(call, max(min(timeout_s, remaining_s), 0.1))
            except grpc.RpcError as error:
                if error.code() not in REPEATED or self._clock() + pause_s >= deadline:
                    raise errors.CoordinatorUnavailableError(
                        f"the coordinator at {self._address} cannot be reached: {_describe(error)}"
                    ) from error
                if self._clock() >= next_log:
                    next_log = self._clock() + rules.STILL_WAITING_S
                    logger.warning("still trying to reach the coordinator at %s: %s", self._address, _describe(error))
            time.sleep(pause_s)
        raise AssertionError("backoffs never end")

    def _raise_if_fenced(self) -> None:
        if self._fenced:
            raise errors.FencedError(self._fenced)

    def _who(self) -> str:
        return rules.task_name(self.member.job, self.member.client)


def _backoffs() -> Iterator[float]:
    """Yield ever longer pauses, each random, so that clients which failed together do not return together."""
    pause_s = FIRST_BACKOFF_S
    while True:
        yield pause_s * random.uniform(0.5, 1.0)  # noqa: S311  not a secret
        pause_s = min(pause_s * 2, LAST_BACKOFF_S)


def _describe(error: BaseException) -> str:
    if isinstance(error, grpc.RpcError):
        return f"{error.code().name}: {error.details()}"
    return str(error)


def _progress_proto(progress: Progress) -> pb.Progress:
    return pb.Progress(
        phase=progress.phase, step=progress.step, bytes_done=progress.bytes_done, bytes_total=progress.bytes_total
    )


def _task_status(task: pb.TaskStatus) -> TaskStatus:
    if task.state == pb.TASK_STATE_UNSPECIFIED:
        return TaskStatus(task.task, "unknown")
    state = pb.TaskState.Name(task.state).removeprefix("TASK_STATE_").lower()
    seen = task.progress
    progress = Progress(seen.phase, seen.step, seen.bytes_done, seen.bytes_total)
    return TaskStatus(task.task, state, task.incarnation, task.heartbeat_age_s, progress)
