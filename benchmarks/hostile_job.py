"""What one job can do to another: a job that claims 100 000 clients opens many barriers, and asks, leaves and returns.

Run: ``python -m benchmarks.hostile_job [--barriers 1000] [--seconds 5]``. Beside it another job's client beats all the
time; shown is, for each thing the hostile job does, the longest that a heartbeat took, and the coordinator's memory.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import threading
import time
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress

import grpc
from rich.console import Console
from rich.table import Table

from benchmarks.coordinator import Coordinator, coordinator
from dtckpt._proto import coordinator_pb2 as pb
from dtckpt._proto import coordinator_pb2_grpc as pb_grpc

NUM_CLIENTS = 100_000
BEAT_S = 0.005
LIMIT_S = 120.0
"""Deadline of each call; the longest heartbeat that can be seen."""


class Victim:
    """A client of another job, which beats without end and notes how long it takes."""

    def __init__(self, port: int) -> None:
        self._channel = grpc.insecure_channel(f"127.0.0.1:{port}")
        self._stub = pb_grpc.CoordinatorStub(self._channel)
        self._who = pb.TaskIdentity(job="victim", task=0, incarnation=1)
        self._stub.Register(pb.RegisterRequest(task=self._who, num_clients=1), timeout=LIMIT_S)
        self._is_over = threading.Event()
        self._since: float | None = None
        self._longest_s = 0.0
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self._thread.start()

    def _beat(self) -> None:
        request = pb.HeartbeatRequest(task=self._who)
        while not self._is_over.wait(BEAT_S):
            self._since = time.monotonic()
            self._stub.Heartbeat(request, timeout=LIMIT_S)
            self._longest_s = max(self._longest_s, time.monotonic() - self._since)
            self._since = None

    def longest_s(self) -> float:
        """Return the longest heartbeat since this was asked last."""
        while self._since is not None and time.monotonic() - self._since > BEAT_S:
            time.sleep(BEAT_S)  # one is under way, and is as long as it will be
        longest_s, self._longest_s = self._longest_s, 0.0
        return longest_s

    def close(self) -> None:
        self._is_over.set()
        self._thread.join()
        self._channel.close()


@contextmanager
def victim_of(port: int) -> Iterator[Victim]:
    victim = Victim(port)
    try:
        yield victim
    finally:
        victim.close()


class Hostile:
    """A job that claims many clients, of which few are there."""

    def __init__(self, stub: pb_grpc.CoordinatorAsyncStub, num_barriers: int) -> None:
        self._stub = stub
        self._num_barriers = num_barriers
        self._calls = itertools.count(1)
        self._attempt = 0

    def _who(self, task: int = 0) -> pb.TaskIdentity:
        return pb.TaskIdentity(job="hostile", task=task, incarnation=1000 * self._attempt + task + 1)

    async def register(self, task: int = 0) -> None:
        request = pb.RegisterRequest(
            task=self._who(task), num_clients=NUM_CLIENTS, attempt=self._attempt, host="h" * 256
        )
        await self._stub.Register(request, timeout=LIMIT_S)

    async def open_barriers(self, timeout_s: float = 600.0) -> None:
        for number in range(self._num_barriers):
            vote = pb.Vote(ok=True, payload=bytes(4096))
            name, call = f"{timeout_s}/{number}", next(self._calls)
            arrival = pb.ArriveRequest(task=self._who(), name=name, call=call, timeout_s=timeout_s, vote=vote)
            await self._stub.Arrive(arrival, timeout=LIMIT_S)

    async def get_job(self) -> None:
        with suppress(grpc.RpcError):
            answer = await self._stub.GetJob(pb.GetJobRequest(job="hostile"), timeout=LIMIT_S)
            print(f"  an answer of {answer.ByteSize() / 2**20:.1f} MiB")

    async def timeouts(self) -> None:
        await self.open_barriers(2.0)
        await asyncio.sleep(4)

    async def leave(self) -> None:
        await self._stub.Leave(pb.LeaveRequest(task=self._who()), timeout=LIMIT_S)

    async def next_attempt(self) -> None:
        self._attempt += 1
        await self.register()

    async def crowd(self) -> None:
        """Have 20 000 clients, that fall silent."""
        for first in range(0, 20_000, 200):
            await asyncio.gather(*(self.register(task) for task in range(first, first + 200)))


async def attack(server: Coordinator, options: argparse.Namespace, pages: str) -> Table:
    table = Table("the hostile job", "took s", "longest heartbeat ms", "RSS MB", title=f"{options.barriers} barriers")
    async with grpc.aio.insecure_channel(
        f"127.0.0.1:{server.port}", options=[("grpc.max_receive_message_length", -1)]
    ) as channel:
        with victim_of(server.port) as victim:
            job = Hostile(pb_grpc.CoordinatorStub(channel), options.barriers)

            def page(path: str) -> Callable[[], Awaitable[object]]:
                return lambda: asyncio.to_thread(lambda: _length(pages + path))

            for name, act in (
                ("nothing", lambda: asyncio.sleep(1)),
                ("registers", job.register),
                ("opens barriers", job.open_barriers),
                ("GetJob", job.get_job),
                ("GetJob, 20 at once", lambda: asyncio.gather(*(job.get_job() for _ in range(20)))),
                ("status page", page("/")),
                ("metrics", page("/metrics")),
                ("leaves", job.leave),
                ("begins again", job.next_attempt),
                ("opens barriers that time out", job.timeouts),
                ("opens barriers", job.open_barriers),
                ("begins another attempt", job.next_attempt),
                ("registers 20 000 clients", job.crowd),
                ("opens barriers", job.open_barriers),
                ("status page", page("/")),
                ("is lost", lambda: asyncio.sleep(1.2 * options.heartbeat_timeout)),
            ):
                print(name, flush=True)
                victim.longest_s()
                begin = time.monotonic()
                try:
                    await act()
                except grpc.RpcError as error:
                    print("  refused:", str(error.details())[:120])
                took_s = time.monotonic() - begin
                longest_s = await asyncio.to_thread(victim.longest_s)
                table.add_row(name, f"{took_s:.1f}", f"{1000 * longest_s:.0f}", f"{server.rss_mb:.0f}")
    return table


def _length(url: str) -> None:
    with suppress(OSError):
        print(f"  a page of {len(urllib.request.urlopen(url, timeout=LIMIT_S).read()) / 2**20:.2f} MiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--barriers", type=int, default=1000)
    parser.add_argument("--heartbeat-timeout", type=float, default=40.0)
    options = parser.parse_args()
    with coordinator(options.heartbeat_timeout, "--metrics-port", "0") as server:
        assert server.process.stdout is not None
        pages = server.process.stdout.readline().strip().partition(" on ")[2].removesuffix("/metrics")
        Console().print(asyncio.run(attack(server, options, pages)))


if __name__ == "__main__":
    main()
