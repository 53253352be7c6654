"""Translate errors into gRPC statuses: the status code, the text, and ``google.rpc`` details of a refused call.

The reason in the details' ``ErrorInfo`` is for programs and never changes; the text is for people and may change.
"""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import quote

import grpc
from google.protobuf.any_pb2 import Any
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status

from dtckpt import errors
from dtckpt.coordination.feeds.rules import FeedLimitError, NotKnownError
from dtckpt_server import rules
from dtckpt_server.quotas import LimitError
from dtckpt_server.tokens import UnauthenticatedError

DOMAIN = "dtckpt"
DETAILS_KEY = "grpc-status-details-bin"
MAX_TEXT_BYTES = 2800
"""Longest text, as sent. A text travels twice, once in base64; metadata beyond 8 KB is lost."""
RETRY_DELAY = Duration(seconds=1)

_Codes = grpc.StatusCode
KINDS: dict[type[BaseException], tuple[grpc.StatusCode, str]] = {
    UnauthenticatedError: (_Codes.UNAUTHENTICATED, "TOKEN_UNKNOWN"),
    errors.CoordinatorPermissionError: (_Codes.PERMISSION_DENIED, "TOKEN_OF_ANOTHER_JOB"),
    errors.ConfigError: (_Codes.INVALID_ARGUMENT, "REQUEST_INVALID"),
    rules.UnknownError: (_Codes.NOT_FOUND, "NOT_KNOWN"),
    rules.HeldError: (_Codes.ABORTED, "PLACE_HELD"),
    NotKnownError: (_Codes.NOT_FOUND, "FEED_NOT_KNOWN"),
    LimitError: (_Codes.RESOURCE_EXHAUSTED, "LIMIT_REACHED"),
    FeedLimitError: (_Codes.RESOURCE_EXHAUSTED, "FEED_LIMIT_REACHED"),
    errors.FencedError: (_Codes.FAILED_PRECONDITION, "FENCED"),
    errors.BarrierConflictError: (_Codes.FAILED_PRECONDITION, "BARRIER_CONFLICT"),
    errors.FeedConflictError: (_Codes.FAILED_PRECONDITION, "FEED_CONFLICT"),
    errors.VersionGoneError: (_Codes.FAILED_PRECONDITION, "VERSION_GONE"),
    errors.VersionLeasedError: (_Codes.FAILED_PRECONDITION, "VERSION_LEASED"),
    errors.SourceLostError: (_Codes.FAILED_PRECONDITION, "SOURCE_LOST"),
    errors.CoordinatorUnavailableError: (_Codes.UNAVAILABLE, "NOT_NOW"),
    BaseException: (_Codes.INTERNAL, "INTERNAL"),
}
"""Status code and reason by class of error, the most specific class first."""
REPEATABLE = (_Codes.UNAVAILABLE, _Codes.ABORTED)


@dataclass(frozen=True, slots=True)
class Refusal:
    """The end of a call that failed."""

    code: grpc.StatusCode
    reason: str
    text: str
    error: str
    """Name of the class of `dtckpt.errors` that clients raise."""

    @classmethod
    def of(cls, error: BaseException) -> Refusal:
        """Translate an error; an error that the rules do not raise on purpose is INTERNAL."""
        code, reason = next(KINDS[kind] for kind in KINDS if isinstance(error, kind))
        _, text = errors.to_wire(error)
        while len(quote(text)) > MAX_TEXT_BYTES:  # gRPC percent-encodes the text
            text = text[: len(text) // 2]
        ours = (kind.__name__ for kind in type(error).__mro__ if kind.__module__ == errors.__name__)
        return cls(code, reason, text, next(ours, errors.CoordinationError.__name__))

    def trailer(self) -> tuple[tuple[str, bytes], ...]:
        """Return the trailing metadata that carries the details."""
        return ((DETAILS_KEY, self.status().SerializeToString()),)

    def status(self) -> Status:
        """Return the status with its details."""
        details: list[Message] = [ErrorInfo(reason=self.reason, domain=DOMAIN, metadata={"error": self.error})]
        if self.code in REPEATABLE:
            details.append(RetryInfo(retry_delay=RETRY_DELAY))
        status = Status(code=self.code.value[0], message=self.text)
        for detail in details:
            packed = Any()
            packed.Pack(detail)
            status.details.append(packed)
        return status
