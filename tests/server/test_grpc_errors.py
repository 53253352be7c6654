"""How calls that are refused end, for programs in any language."""

import grpc
import pytest
from dtckpt_server import rules
from dtckpt_server.grpc_errors import KINDS, Refusal
from dtckpt_server.tokens import UnauthenticatedError
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status
from grpc_status import rpc_status
from support.coordinators import server_in_thread

from dtckpt import errors
from dtckpt._proto import coordinator_pb2 as pb
from dtckpt._proto import coordinator_pb2_grpc as pb_grpc
from dtckpt.coordination import grpc_calls
from dtckpt.coordination.feeds import rules as feed_rules


@pytest.fixture(scope="module")
def stub():
    with server_in_thread() as port, grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield pb_grpc.CoordinatorStub(channel)


def details_of(error):
    """Return the details as any gRPC library reads them, by type."""
    status = rpc_status.from_call(error)
    assert status.message == error.details()
    found = {}
    for detail in status.details:
        for kind in (ErrorInfo, RetryInfo):
            if detail.Is(kind.DESCRIPTOR):
                found[kind] = kind.FromString(detail.value)
    assert len(found) == len(status.details)
    return found


def test_details(stub):
    task = pb.TaskIdentity(job="a", task=0, incarnation=7)
    stub.Register(pb.RegisterRequest(task=task, num_clients=2), timeout=5)
    rival = pb.TaskIdentity(job="a", task=0, incarnation=8)
    for call, request, reason, error, is_repeatable in (
        (stub.GetJob, pb.GetJobRequest(job="b"), "NOT_KNOWN", "CoordinationError", False),
        (stub.Heartbeat, pb.HeartbeatRequest(task=rival), "FENCED", "FencedError", False),
        (stub.Register, pb.RegisterRequest(task=task, num_clients=3), "REQUEST_INVALID", "ConfigError", False),
        (stub.Register, pb.RegisterRequest(task=rival, num_clients=2), "PLACE_HELD", "FencedError", True),
    ):
        with pytest.raises(grpc.RpcError) as caught:
            call(request, timeout=5)
        details = details_of(caught.value)
        info = details[ErrorInfo]
        assert (info.domain, info.reason, dict(info.metadata)) == ("dtckpt", reason, {"error": error})
        assert (RetryInfo in details) == is_repeatable


@pytest.mark.parametrize("text", ["x", "ü", "\0", "\U0001f5ff"])
def test_long_texts_keep_code_and_details(stub, text):
    with pytest.raises(grpc.RpcError) as caught:
        stub.GetJob(pb.GetJobRequest(job=text * 60_000), timeout=5)
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND
    assert details_of(caught.value)[ErrorInfo].reason == "NOT_KNOWN"


def test_every_error_has_the_nearest_kind():
    for error, code, reason, name in (
        (UnauthenticatedError("x"), "UNAUTHENTICATED", "TOKEN_UNKNOWN", "CoordinatorPermissionError"),
        (errors.CoordinatorPermissionError("x"), "PERMISSION_DENIED", "TOKEN_OF_ANOTHER_JOB", None),
        (errors.ConfigError("x"), "INVALID_ARGUMENT", "REQUEST_INVALID", None),
        (rules.UnknownError("x"), "NOT_FOUND", "NOT_KNOWN", "CoordinationError"),
        (rules.HeldError("x"), "ABORTED", "PLACE_HELD", "FencedError"),
        (rules.LimitError("x"), "RESOURCE_EXHAUSTED", "LIMIT_REACHED", "CoordinationError"),
        (errors.FencedError("x"), "FAILED_PRECONDITION", "FENCED", None),
        (errors.BarrierConflictError("x"), "FAILED_PRECONDITION", "BARRIER_CONFLICT", None),
        (feed_rules.NotKnownError("x"), "NOT_FOUND", "FEED_NOT_KNOWN", "CoordinationError"),
        (feed_rules.FeedLimitError("x"), "RESOURCE_EXHAUSTED", "FEED_LIMIT_REACHED", "CoordinationError"),
        (errors.FeedConflictError("x"), "FAILED_PRECONDITION", "FEED_CONFLICT", None),
        (errors.VersionGoneError("x"), "FAILED_PRECONDITION", "VERSION_GONE", None),
        (errors.VersionLeasedError("x"), "FAILED_PRECONDITION", "VERSION_LEASED", None),
        (errors.SourceLostError("x"), "FAILED_PRECONDITION", "SOURCE_LOST", None),
        (errors.CoordinatorUnavailableError("x"), "UNAVAILABLE", "NOT_NOW", None),
        (ZeroDivisionError("x"), "INTERNAL", "INTERNAL", "CoordinationError"),
    ):
        refusal = Refusal.of(error)
        found = (refusal.code.name, refusal.reason, refusal.error)
        assert found == (code, reason, name or type(error).__name__)
    reasons = [reason for _, reason in KINDS.values()]
    assert len(set(reasons)) == len(reasons) == 16


class Ended(grpc.RpcError):
    """A call that ended with some trailing metadata."""

    def __init__(self, data):
        self._data = data

    def code(self):
        return grpc.StatusCode.UNKNOWN

    def details(self):
        return "over"

    def trailing_metadata(self):
        return None if self._data is None else [_Item("grpc-status-details-bin", self._data)]


class _Item:
    def __init__(self, key, value):
        self.key, self.value = key, value


def test_details_of_others_name_no_class():
    foreign = Status()
    foreign.details.add().Pack(ErrorInfo(domain="other", metadata={"error": "FencedError"}))
    ours = Status()
    ours.details.add().Pack(RetryInfo())
    ours.details.add().Pack(ErrorInfo(domain="dtckpt", metadata={"error": "FencedError"}))
    for data, name in (
        (None, ""),
        (b"", ""),
        (b"\xff\xff", ""),
        (foreign.SerializeToString(), ""),
        (ours.SerializeToString(), "FencedError"),
    ):
        assert grpc_calls._error_class(grpc_calls._status(Ended(data))) == name
