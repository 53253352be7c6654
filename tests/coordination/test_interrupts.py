"""Ctrl-C while a client waits in the first round of a save: its call goes on in a separate thread."""

from __future__ import annotations

import secrets
import time

import pytest
from support.client_calls import AT_ONCE_S, HEARTBEAT_S, TIMEOUT_S, leave_all, wait_until
from support.coordinators import server_in_thread
from torch.distributed import HashStore

from dtckpt import errors
from dtckpt.checkpoint.collective import Collective
from dtckpt.coordination.api import Member
from dtckpt.coordination.grpc_client import GrpcCoordination
from dtckpt.coordination.identity import calls_of
from dtckpt.coordination.torch_store import TorchStoreCoordination


@pytest.fixture(params=["grpc", "process_group"])
def pair(request):
    members = [Member(f"job{secrets.randbits(40)}", client, 2, secrets.randbits(60)) for client in range(2)]
    members = [Member(members[0].job, each.client, 2, each.incarnation) for each in members]
    if request.param == "grpc":
        with server_in_thread() as port:
            pair = [GrpcCoordination(f"127.0.0.1:{port}", each, heartbeat_timeout_s=HEARTBEAT_S) for each in members]
            yield pair
            leave_all(pair)
    else:
        store = HashStore()
        pair = [TorchStoreCoordination(store, each, heartbeat_timeout_s=HEARTBEAT_S) for each in members]
        yield pair
        leave_all(pair)


def test_nobody_waits_for_a_client_that_was_interrupted(pair):
    first, second = pair
    second.register()

    def interrupt(_):
        wait_until(lambda: second.status().barriers or calls_of(first.member).report.waits_at)
        raise KeyboardInterrupt

    interrupted = Collective(first, "save", TIMEOUT_S)
    with pytest.raises(KeyboardInterrupt), interrupted.process_lock():
        interrupted.run_first_round("begin", lambda: (None, b""), meanwhile=interrupt)
    start = time.monotonic()
    other = Collective(second, "save", TIMEOUT_S)

    def go_on():
        other.run_first_round("begin", lambda: (None, b""))
        other.run_round("written", lambda: b"")

    with pytest.raises(errors.CoordinationError, match=r"has given up waiting|is not in this operation any more"):
        go_on()
    assert time.monotonic() - start < AT_ONCE_S
