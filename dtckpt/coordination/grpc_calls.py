"""gRPC calls to the coordinator: repeat each until the answer, and translate refusals into errors of dtckpt.

Every call is idempotent, so clients may repeat it. A failed call has these consequences:

* The coordinator refuses it with a reason: an error of `dtckpt.errors`, `UnknownError` or `HeldError`
  (`raise_refusal`).
* The failure may pass, as UNAVAILABLE (`REPEATED`): repeated after ever longer, random pauses until the deadline.
* Else, and at the deadline: CoordinatorUnavailableError, or CoordinatorPermissionError if a certificate is wrong.

A process cannot use a channel after a fork, so each process opens its own channel at first use.
"""

from __future__ import annotations

import logging
import math
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import grpc
from google.protobuf.message import DecodeError
from google.rpc import code_pb2
from google.rpc.error_details_pb2 import ErrorInfo
from google.rpc.status_pb2 import Status

from dtckpt import errors
from dtckpt._proto import coordinator_pb2 as pb
from dtckpt._proto import coordinator_pb2_grpc as pb_grpc
from dtckpt._proto import feeds_pb2 as feeds_pb
from dtckpt._proto import feeds_pb2_grpc as feeds_pb_grpc
from dtckpt.coordination import verdicts
from dtckpt.coordination.grpc_credentials import PREFIX, Access

logger = logging.getLogger("dtckpt.coordination")
T = TypeVar("T")

CALL_TIMEOUT_S = 10.0
"""Timeout of one quick call. A barrier's calls outlast its deadline by this time, so that the verdict arrives first."""
DISTRUST_S = 3.0
"""How long a certificate may be wrong before this is an error: the certificate, or an address, may just be changing."""
FIRST_BACKOFF_S, LAST_BACKOFF_S = 0.05, 2.0
OPTIONS = (
    ("grpc.max_receive_message_length", 256 << 20),  # payloads of thousands of clients
    ("grpc.initial_reconnect_backoff_ms", 100),
    # Despite its name, the longest time for an attempt to connect. A handshake over a slow network, or with an
    # overbooked coordinator, must be able to finish.
    ("grpc.min_reconnect_backoff_ms", 10_000),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.dns_min_time_between_resolutions_ms", 1000),  # a pod that comes back has another address; default: 30 s
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.http2.ping_timeout_ms", 10_000),  # gRPC 1.85 ignores grpc.keepalive_timeout_ms; default: 60 s
    ("grpc.enable_http_proxy", 0),  # the coordinator is a neighbour; a proxy variable would send calls astray
)
REPEATED = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED)
_DISTRUST = (
    "CERTIFICATE_VERIFY_FAILED",
    "WRONG_VERSION_NUMBER",
    "Hostname Verification Check failed",
    "is not in peer certificate",  # before gRPC 1.80
)
"""Parts of gRPC's texts when this side ends a handshake. If the other side ends it, gRPC only sees a closed socket."""


class UnknownError(Exception):
    """The coordinator does not know this task, job or barrier."""


class HeldError(Exception):
    """Another process holds this client's place and may be alive."""


@dataclass(frozen=True, slots=True)
class _Connection:
    """A channel and the process that opened it."""

    pid: int
    channel: grpc.Channel
    stub: pb_grpc.CoordinatorStub
    feeds: feeds_pb_grpc.FeedsStub


class Caller:
    """Makes calls to one coordinator. Thread-safe.

    Args:
        address: ``host:port``.
        access: Certificates and token.
        clock: Monotonic seconds.
    """

    def __init__(self, address: str, access: Access, clock: Callable[[], float] = time.monotonic) -> None:
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal():
            raise errors.ConfigError(f"coordinator address is {address!r}; expected host:port")
        self._address = address
        self._access = access
        self._clock = clock
        self.give_up_s = math.inf
        """Seconds after which calls give up a coordinator that does not answer, even before the deadline."""
        self._lock = threading.RLock()
        self._connection: _Connection | None = None

    @property
    def address(self) -> str:
        """``host:port`` of the coordinator."""
        return self._address

    def close(self) -> None:
        """Close the connection; a later call opens another."""
        with self._lock:
            connection, self._connection = self._connection, None
        if connection is not None:
            connection.channel.close()

    def probe(self, timeout_s: float) -> None:
        """Look whether a server listens at the address, without a call, which would be repeated for longer.

        Raises:
            CoordinatorUnavailableError: None does.
        """
        host, _, port = self._address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout_s).close()
        except OSError as error:
            raise errors.CoordinatorUnavailableError(f"nothing listens at {self._address}: {error}") from None

    def _raise_if_over(self) -> None:
        """Raise if this client must make no more calls. Does nothing here; `GrpcCoordination` overrides it."""

    def _connected(self) -> _Connection:
        with self._lock:
            if self._connection is None or self._connection.pid != os.getpid():
                channel = self._access.open_channel(self._address, OPTIONS)
                self._connection = _Connection(
                    os.getpid(), channel, pb_grpc.CoordinatorStub(channel), feeds_pb_grpc.FeedsStub(channel)
                )
            return self._connection

    def _call_once(self, call: Callable[[pb_grpc.CoordinatorStub, float], T], timeout_s: float) -> T:
        """Make one call, once, and translate the coordinator's refusals; other failures stay RpcError."""
        try:
            return call(self._connected().stub, timeout_s)
        except grpc.RpcError as error:
            raise_refusal(_status(error), error)
            if error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED:  # gRPC's own limit, on the size of a message
                text = (
                    f"the coordinator at {self._address} and this client cannot exchange a message: {error.details()}"
                )
                raise errors.CoordinationError(text) from error
            raise

    def _call(
        self,
        call: Callable[[pb_grpc.CoordinatorStub, float], T],
        deadline: float,
        timeout_s: float = CALL_TIMEOUT_S,
    ) -> T:
        """Repeat a call until the answer or the deadline.

        Args:
            call: Called with the stub and the seconds that it may take.
            deadline: When to give up, in seconds of the clock; `give_up_s` may come first.
            timeout_s: Of one call: the coordinator's longest wait in seconds, and `CALL_TIMEOUT_S`.
        """
        start = self._clock()
        deadline = min(deadline, start + timeout_s - CALL_TIMEOUT_S + self.give_up_s)
        next_log = start + verdicts.STILL_WAITING_S
        for pause_s in backoffs():
            self._raise_if_over()
            remaining_s = deadline - self._clock()
            try:
                return self._call_once(call, max(min(timeout_s, remaining_s), 0.1))
            except grpc.RpcError as error:
                now = self._clock()
                if is_distrust(error) and now + pause_s >= min(deadline, start + DISTRUST_S):
                    raise errors.CoordinatorPermissionError(
                        f"the coordinator at {self._address} is not to be trusted, as {PREFIX}CA says: "
                        f"{describe(error)}"
                    ) from error
                if error.code() not in REPEATED or now + pause_s >= deadline:
                    raise errors.CoordinatorUnavailableError(
                        f"the coordinator at {self._address} cannot be reached: {describe(error)}"
                    ) from error
                if now >= next_log:
                    next_log = now + verdicts.STILL_WAITING_S
                    logger.warning("still trying to reach the coordinator at %s: %s", self._address, describe(error))
            time.sleep(pause_s)
        raise AssertionError("backoffs never end")

    def call_feeds(
        self,
        call: Callable[[feeds_pb_grpc.FeedsStub, float], T],
        within_s: float,
        wait_s: float = 0.0,
    ) -> T:
        """Repeat a call about feeds until the answer, like other calls.

        Args:
            call: Called with the stub and the seconds that it may take.
            within_s: When to give up, in seconds from now.
            wait_s: The coordinator's longest wait in seconds.

        Raises:
            UnknownError: The coordinator does not know the task, feed, version or lease.
            CoordinatorUnavailableError: It has not answered in time.
            DtckptError: It refuses the call.
        """
        deadline = self._clock() + wait_s + within_s
        return self._call(lambda _, seconds: call(self._connected().feeds, seconds), deadline, wait_s + CALL_TIMEOUT_S)

    def feeds(self, timeout_s: float = CALL_TIMEOUT_S) -> list[feeds_pb.FeedStatus]:
        """Return all feeds that the token may see, by name.

        Raises:
            CoordinatorUnavailableError: The coordinator cannot be reached within ``timeout_s``.
            CoordinatorPermissionError: It refuses the token.
        """
        deadline = self._clock() + timeout_s
        request, pages = feeds_pb.ListFeedsRequest(), list[feeds_pb.ListFeedsResponse]()
        while not pages or request.page_token:
            pages.append(self.call_feeds(lambda stub, t: stub.ListFeeds(request, timeout=t), deadline - self._clock()))
            request.page_token = pages[-1].next_page_token
        return [feed for page in pages for feed in page.feeds]

    def _job_pages(self, job: str, deadline: float) -> list[pb.GetJobResponse]:
        """Return all pages of the coordinator's answer about a job.

        Raises:
            UnknownError: The coordinator does not know the job.
        """
        request, pages = pb.GetJobRequest(job=job), list[pb.GetJobResponse]()
        while not pages or request.page_token:
            pages.append(self._call(lambda stub, t: stub.GetJob(request, timeout=t), deadline))
            request.page_token = pages[-1].next_page_token
        return pages


def raise_refusal(status: Status, cause: BaseException | None = None) -> None:
    """Raise the error that a refusal names; return if it names none, or allows a repeated call."""
    if status.code == code_pb2.NOT_FOUND:
        raise UnknownError(status.message) from cause
    if status.code == code_pb2.ABORTED:
        raise HeldError(status.message) from cause
    named = _error_class(status)
    if named and status.code != code_pb2.UNAVAILABLE:
        raise errors.from_wire(named, status.message) from cause


def _status(error: grpc.RpcError) -> Status:
    trailer = {item.key: item.value for item in error.trailing_metadata() or ()}
    try:
        status = Status.FromString(trailer.get("grpc-status-details-bin", b""))
    except DecodeError:  # no coordinator sent it; the code is enough
        status = Status()
    status.code, status.message = error.code().value[0], error.details() or ""
    return status


def _error_class(status: Status) -> str:
    """Return the class of `dtckpt.errors` that the status's ``google.rpc.ErrorInfo`` names, "" if there is none."""
    info = ErrorInfo()
    has_info = any(detail.Unpack(info) for detail in status.details)
    return info.metadata.get("error", "") if has_info and info.domain == "dtckpt" else ""


def backoffs() -> Iterator[float]:
    """Yield ever longer, random pauses in seconds, so that clients that failed together do not return together."""
    pause_s = FIRST_BACKOFF_S
    while True:
        yield pause_s * random.uniform(0.5, 1.0)  # noqa: S311  not a secret
        pause_s = min(pause_s * 2, LAST_BACKOFF_S)


def is_distrust(error: grpc.RpcError) -> bool:
    """Whether this side refused the other side's certificate (or lack of one) in the handshake."""
    return any(text in (error.details() or "") for text in _DISTRUST)


def describe(error: BaseException) -> str:
    """Return the text of a failed call's error, with a hint if TLS may be the reason."""
    if not isinstance(error, grpc.RpcError):
        return str(error)
    details = error.details() or ""
    is_hung_up = "failed to connect" in details and "Socket closed" in details
    hint = f"; does it expect TLS ({PREFIX}CA) or a client certificate ({PREFIX}CERT)?" if is_hung_up else ""
    return f"{error.code().name}: {details}{hint}"
