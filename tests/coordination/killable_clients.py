"""Client processes that tests kill or freeze while they wait at barriers."""

from __future__ import annotations

import os
import secrets
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

from support.client_crew import Crew, serve

# A lost answer of a name server holds a TCPStore for 5 s (see test_default_process_group); these tests wait for less.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

HEARTBEAT_S = 2.0
NUM_CLIENTS = 4


@dataclass(frozen=True)
class Where:
    """How the clients meet: at a coordinator's port, or at a store that the parent or client 0 hosts."""

    port: int
    is_store: bool = False
    is_hosted_by_client_0: bool = False


def _connect(where: Where, client: int) -> Any:
    from dtckpt.coordination.api import Member

    member = Member("job", client, NUM_CLIENTS, secrets.randbits(60))
    if not where.is_store:
        from dtckpt.coordination.grpc_client import GrpcCoordination

        return GrpcCoordination(f"127.0.0.1:{where.port}", member, heartbeat_timeout_s=HEARTBEAT_S)
    import torch.distributed as dist

    from dtckpt.coordination.torch_store import TorchStoreCoordination

    is_host = where.is_hosted_by_client_0 and client == 0
    store = dist.TCPStore("127.0.0.1", where.port, None, is_host, timedelta(seconds=30), wait_for_workers=False)
    host_client = 0 if where.is_hosted_by_client_0 else None
    return TorchStoreCoordination(store, member, heartbeat_timeout_s=HEARTBEAT_S, host_client=host_client)


def work(where: Where, client: int, pipe: Connection) -> None:
    coordination = _connect(where, client)

    def arrive(name: str) -> str:
        coordination.barrier(name, timeout_s=30)
        return "passed"

    serve(pipe, arrive)
    coordination.leave()
    pipe.send("left")


class Workers(Crew):
    """All clients of one job."""

    def __init__(self, where: Where) -> None:
        arguments = [(where, client) for client in range(NUM_CLIENTS)]
        super().__init__(work, arguments)

    def arrive(self, clients: Any, name: str) -> None:
        for client in clients:
            self.send(client, name)

    def kill(self, client: int) -> float:
        self.signal(client, signal.SIGKILL)
        self.join(client)
        return time.monotonic()


@contextmanager
def workers(where: Where) -> Iterator[Workers]:
    started = Workers(where)
    try:
        yield started
    finally:
        started.end()
