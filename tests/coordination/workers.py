"""Clients in processes of their own, to be killed."""

from __future__ import annotations

import multiprocessing
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

# A lost answer of a name server holds a TCPStore for 5 s (see test_process_group); these tests wait for less.
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
    from dtckpt.coordination import Member

    member = Member("job", client, NUM_CLIENTS, secrets.randbits(60))
    if not where.is_store:
        from dtckpt.coordination.remote import GrpcCoordination

        return GrpcCoordination(f"127.0.0.1:{where.port}", member, heartbeat_timeout_s=HEARTBEAT_S)
    import torch.distributed as dist

    from dtckpt.coordination.process_group import ProcessGroupCoordination

    is_host = where.is_hosted_by_client_0 and client == 0
    store = dist.TCPStore("127.0.0.1", where.port, None, is_host, timedelta(seconds=30), wait_for_workers=False)
    host_client = 0 if where.is_hosted_by_client_0 else None
    return ProcessGroupCoordination(store, member, heartbeat_timeout_s=HEARTBEAT_S, host_client=host_client)


def work(where: Where, client: int, pipe: Connection) -> None:
    coordination = _connect(where, client)
    pipe.send("ready")
    while (name := pipe.recv()) is not None:
        try:
            coordination.barrier(name, timeout_s=30)
            pipe.send(("passed", "", (), time.monotonic()))
        except Exception as error:
            pipe.send((type(error).__name__, str(error), getattr(error, "clients", ()), time.monotonic()))
    coordination.leave()
    pipe.send("left")


class Workers:
    """All clients of one job. `time.monotonic` is one clock for all processes of a machine."""

    def __init__(self, where: Where) -> None:
        context = multiprocessing.get_context("forkserver")
        self.processes, self.pipes = [], []
        for client in range(NUM_CLIENTS):
            ours, theirs = context.Pipe()
            process = context.Process(target=work, args=(where, client, theirs), daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self.pipes.append(ours)
        for client in range(NUM_CLIENTS):
            assert self.answer(client) == "ready"

    def arrive(self, clients: Any, name: str) -> None:
        for client in clients:
            self.pipes[client].send(name)

    def answer(self, client: int, within_s: float = 60.0) -> Any:
        assert self.pipes[client].poll(within_s), f"client {client} hangs"
        return self.pipes[client].recv()

    def kill(self, client: int) -> float:
        os.kill(self.processes[client].pid, signal.SIGKILL)
        self.processes[client].join(10)
        return time.monotonic()


@contextmanager
def workers(where: Where) -> Iterator[Workers]:
    multiprocessing.get_context("forkserver").set_forkserver_preload(
        ["dtckpt.coordination.process_group", "grpc", "dtckpt._proto.coordinator_pb2"]
    )
    started = Workers(where)
    try:
        yield started
    finally:
        for process in started.processes:
            if process.is_alive():
                process.kill()
            process.join(10)
            process.close()
        for pipe in started.pipes:
            pipe.close()
