"""What ten hostile tenants do to another one: latency and failures of its barriers, without and with them.

Run: ``python -m benchmarks.noisy_neighbours [--seconds 20] [--clients 8] [--calls 32] [--only NAME ...]``. Each hostile
tenant has its own token and repeats one kind of request without end, with so many calls at one time. One process runs
them, at a lower priority, as a network would keep them from the coordinator's processor. The victim registers a new job
for each row.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import grpc
from rich.table import Table

from benchmarks.coordinator import coordinator
from benchmarks.results import show
from dtckpt._proto import coordinator_pb2 as pb
from dtckpt._proto import coordinator_pb2_grpc as pb_grpc

LIMIT_S = 20.0
"""Deadline of a call, and how long the victim repeats one."""
VICTIM = "victim"
MANY = 100_000
PASSING = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


def token_of(job: str) -> str:
    return f"token-of-{job}-".ljust(24, "x")


class Tenant:
    """A job, its token and a connection."""

    def __init__(self, port: int, job: str, num_at_once: int = 1) -> None:
        self.job, self.num_at_once = job, num_at_once
        self.channel = grpc.aio.insecure_channel(
            f"127.0.0.1:{port}",
            options=[("grpc.max_receive_message_length", -1), ("grpc.use_local_subchannel_pool", 1)],
        )
        self.stub = pb_grpc.CoordinatorStub(self.channel)
        self.numbers = itertools.count(1)
        self.codes: Counter[str] = Counter()

    def who(self, task: int = 0, job: str = "", life: int = 1) -> pb.TaskIdentity:
        return pb.TaskIdentity(job=job or self.job, task=task, incarnation=1000 * task + life)

    async def call(self, method: str, request: Any, token: str = "") -> Any:
        """Make a call; return None if it is refused."""
        metadata = (("authorization", f"Bearer {token or token_of(self.job)}"),)
        try:
            answer = await getattr(self.stub, method)(request, timeout=LIMIT_S, metadata=metadata)
        except grpc.RpcError as error:
            self.codes[error.code().name] += 1
            return None
        self.codes["OK"] += 1
        return answer

    async def register(self, num_clients: int = MANY, task: int = 0, job: str = "", attempt: int = 0) -> None:
        who = self.who(task, job, attempt + 1)
        await self.call(
            "Register", pb.RegisterRequest(task=who, num_clients=num_clients, attempt=attempt, host="h" * 99)
        )

    def arrival(self, name: str, task: int = 0, life: int = 1, **more: Any) -> pb.ArriveRequest:
        vote = pb.Vote(ok=True, payload=more.pop("payload", b""))
        who, call = self.who(task, life=life), next(self.numbers)
        return pb.ArriveRequest(task=who, name=name, call=call, timeout_s=600, vote=vote, **more)

    def stream(self, requests: Any) -> Any:
        return self.stub.HeartbeatStream(requests, metadata=(("authorization", f"Bearer {token_of(self.job)}"),))


# --- hostile tenants: each step is repeated without end ---------------------------------------------------------------


async def job_flood(tenant: Tenant) -> None:
    number = next(tenant.numbers)
    await tenant.register(1, job=f"{tenant.job}#{('x', 'durable-')[number % 2]}{number:x}")


async def barrier_flood(tenant: Tenant) -> None:
    number = next(tenant.numbers)
    if number % 1000 == 1:
        await tenant.register()
    await tenant.call("Arrive", tenant.arrival(f"b{number}"))


async def stream_flood(tenant: Tenant) -> None:
    """Open a stream, and beat on it as fast as it is read."""
    task = next(tenant.numbers)
    await tenant.register(task=task)
    beat = pb.HeartbeatStreamRequest(task=tenant.who(task), sequence=1)
    with suppress(grpc.RpcError, asyncio.InvalidStateError):
        stream = tenant.stream(None)
        for _ in range(2000):
            await stream.write(beat)
            tenant.codes["message"] += 1
        stream.cancel()


async def huge_votes(tenant: Tenant) -> None:
    """Let a thousand clients vote with all that they may, and read what all have said."""
    number = next(tenant.numbers)
    task, name = number % 1000, f"b{number // 1000}"
    await tenant.register(1000, task)
    await tenant.call("Arrive", tenant.arrival(name, task, payload=bytes(4096), collect=True, max_wait_s=5))


async def slow_readers(tenant: Tenant) -> None:
    """Ask on streams for large answers that are never read."""
    task = next(tenant.numbers) % 200
    await tenant.register(200, task)
    with suppress(grpc.RpcError, asyncio.InvalidStateError):
        stream = tenant.stream(None)
        await stream.write(pb.HeartbeatStreamRequest(task=tenant.who(task), sequence=1))
        for number in range(200):
            arrival = tenant.arrival(f"b{number}", task, payload=bytes(4096), collect=True, max_wait_s=5)
            await stream.write(pb.HeartbeatStreamRequest(task=tenant.who(task), sequence=2 + number, arrival=arrival))
            tenant.codes["message"] += 1
        await asyncio.sleep(2)
        stream.cancel()


async def churn(tenant: Tenant) -> None:
    task = next(tenant.numbers) % MANY
    await tenant.register(task=task)
    await tenant.call("Leave", pb.LeaveRequest(task=tenant.who(task)))


async def heartbeats(tenant: Tenant) -> None:
    """Be ten thousand clients that beat all the time."""
    number = next(tenant.numbers)
    if number <= 10_000:
        await tenant.register(task=number)
    report = pb.Report(num_ended=number)
    await tenant.call("Heartbeat", pb.HeartbeatRequest(task=tenant.who(number % 10_000), report=report))


async def status_polls(tenant: Tenant) -> None:
    """Look at a job that claims many clients."""
    number = next(tenant.numbers)
    if number == 1:
        await tenant.register()
    await tenant.call("GetJob", pb.GetJobRequest(job=tenant.job))
    await tenant.call("ListJobs", pb.ListJobsRequest())


async def attempts(tenant: Tenant) -> None:
    """Begin attempt after attempt, each with open barriers to fail."""
    attempt = next(tenant.numbers)
    await tenant.register(attempt=attempt)
    for number in range(20):
        await tenant.call("Arrive", tenant.arrival(f"b{number}", life=attempt + 1))


async def strangers(tenant: Tenant) -> None:
    """Call in the name of the victim, with an unknown token and without a token."""
    beat = pb.HeartbeatRequest(task=tenant.who(job=VICTIM))
    await tenant.call("Heartbeat", beat, "a-token-that-nobody-has")
    await tenant.call("Heartbeat", beat)


HOSTILE: dict[str, Callable[[Tenant], Awaitable[None]]] = {
    step.__name__.replace("_", "-"): step
    for step in (
        job_flood, barrier_flood, stream_flood, huge_votes, slow_readers,
        churn, heartbeats, status_polls, attempts, strangers,
    )
}  # fmt: skip


async def be_hostile(port: int, names: list[str], num_calls: int) -> None:
    tenants = {name: Tenant(port, name) for name in names}

    async def repeat(name: str) -> None:
        while True:
            await HOSTILE[name](tenants[name])

    async def tell() -> None:
        while True:
            await asyncio.sleep(5)
            for name, tenant in tenants.items():
                print(f"  {name}: {dict(tenant.codes)}", file=sys.stderr, flush=True)

    print("begun", flush=True)
    await asyncio.gather(tell(), *(repeat(name) for name in names for _ in range(num_calls)))


@contextmanager
def hostile_process(port: int, names: list[str], num_calls: int) -> Iterator[None]:
    arguments = ["--hostile-to", str(port), "--calls", str(num_calls), "--only", *names]
    process = subprocess.Popen(
        ["nice", "-n", "10", sys.executable, "-m", "benchmarks.noisy_neighbours", *arguments],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        process.stdout.readline()
        yield
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


# --- the victim -------------------------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """What became of the victim's barriers."""

    took: list[float] = field(default_factory=list)
    num_failed: int = 0
    num_repeated: int = 0

    def row(self) -> list[str]:
        percentiles = statistics.quantiles(self.took, n=100) if len(self.took) > 1 else [float("nan")] * 99
        ms = [f"{1000 * seconds:.1f}" for seconds in (percentiles[49], percentiles[98], max(self.took, default=0.0))]
        return [str(len(self.took)), *ms, str(self.num_failed), str(self.num_repeated)]


async def victim(port: int, job: str, num_clients: int, seconds: float) -> Outcome:
    """Register, and meet at barriers for a while; repeat calls after temporary errors, as clients do."""
    tenants, outcome = [Tenant(port, job) for _ in range(num_clients)], Outcome()

    async def patient(tenant: Tenant, method: str, request: Any) -> Any:
        begin, pause_s = time.monotonic(), 0.05
        metadata = (("authorization", f"Bearer {token_of(VICTIM)}"),)
        while True:
            try:
                return await getattr(tenant.stub, method)(request, timeout=LIMIT_S, metadata=metadata)
            except grpc.RpcError as error:
                if error.code() not in PASSING or time.monotonic() - begin > LIMIT_S:
                    print(f"  the victim's {method}: {error.code().name}: {error.details()}", file=sys.stderr)
                    return None
            outcome.num_repeated += 1
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, 2.0)

    async def come(task: int, request: pb.ArriveRequest) -> bool:
        answer = await patient(tenants[task], "Arrive", request)
        return answer is not None and answer.verdict.state == pb.BARRIER_STATE_PASSED

    for task, tenant in enumerate(tenants):
        request = pb.RegisterRequest(task=tenant.who(task), num_clients=num_clients)
        outcome.num_failed += await patient(tenant, "Register", request) is None
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        begin = time.monotonic()
        calls = [tenant.arrival("b", task, max_wait_s=LIMIT_S) for task, tenant in enumerate(tenants)]
        passed = await asyncio.gather(*(come(task, request) for task, request in enumerate(calls)))
        outcome.took.append(time.monotonic() - begin)
        outcome.num_failed += not all(passed)
        await asyncio.sleep(0.02)
    for tenant in tenants:
        await tenant.channel.close()
    return outcome


def measure(options: argparse.Namespace) -> Table:
    names = options.only or list(HOSTILE)
    os.environ["DTCKPT_COORDINATOR_SERVE_TOKENS"] = "".join(f"{job} {token_of(job)}\n" for job in (VICTIM, *names))
    title = f"{options.clients} clients at a barrier; each neighbour has {options.calls} calls at one time"
    table = Table(
        "neighbours", "barriers", "p50 ms", "p99 ms", "longest ms", "failed", "repeated", "RSS MB", title=title
    )
    rows = [[], *([[name] for name in names] if options.each else []), names]
    with coordinator(60.0) as server:
        for number, beside in enumerate(rows):
            label = "none" if not beside else beside[0] if len(beside) == 1 else f"all {len(beside)}"
            print(label, file=sys.stderr, flush=True)
            with hostile_process(server.port, beside, options.calls):
                asyncio.run(asyncio.sleep(options.warm_up if beside else 0))
                job = f"{VICTIM}#durable-{number}"
                outcome = asyncio.run(victim(server.port, job, options.clients, options.seconds))
            table.add_row(label, *outcome.row(), f"{server.rss_mb:.0f}")
            time.sleep(1)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="of barriers, for each row")
    parser.add_argument(
        "--warm-up", type=float, default=10.0, help="seconds that neighbours have before the victim comes"
    )
    parser.add_argument("--clients", type=int, default=8, help="of the victim")
    parser.add_argument("--calls", type=int, default=32, help="of each neighbour at one time")
    parser.add_argument("--each", action="store_true", help="also each neighbour alone")
    parser.add_argument("--only", nargs="*", choices=list(HOSTILE), help="these neighbours; default: all")
    parser.add_argument("--hostile-to", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.hostile_to is not None:
        asyncio.run(be_hostile(options.hostile_to, options.only, options.calls))
    else:
        show(measure(options))


if __name__ == "__main__":
    main()
