"""Load one coordinator as a large job does: heartbeats, barriers, a client that dies, many barrier names.

Run: ``python -m benchmarks.coordinator [--clients 10000] [--seconds 60] [--rounds 5] [--only PART]``. The coordinator
is a separate process. This process simulates all clients, over 16 connections, so their cost is not part of the
coordinator's cost. Beside its barriers: as many bare calls, torch's store barrier, and etcd (`benchmarks.rivals`).
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from rich.table import Table

from benchmarks.results import show
from benchmarks.rivals import (
    CHANNELS,
    LIMIT_S,
    connect,
    echo_rounds,
    etcd_barriers,
    has_etcd,
    rounds_of,
    store_barriers,
)
from dtckpt._proto import coordinator_pb2 as pb
from dtckpt._proto import coordinator_pb2_grpc as pb_grpc
from dtckpt.checkpoint.gc_pause import gc_paused

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

MAX_IN_VAIN = 3
"""How often in a row a client opens a stream that ends at once."""
CALLS_S = 45.0
"""Heartbeats by single calls are measured for so long at most; clients resort to them where streams are refused."""
STREAM_S = 3600.0
"""Deadline of a simulated client's stream; longer than any part takes."""
SERVER = "from dtckpt_server.main import main; main()"
TICKS = os.sysconf("SC_CLK_TCK")


class Coordinator:
    """A coordinator's process, and its costs."""

    def __init__(self, heartbeat_timeout_s: float, *more: str) -> None:
        arguments = ["serve", "--port", "0", "--insecure", "--heartbeat-timeout-s", str(heartbeat_timeout_s), *more]
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed by coordinator()
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVER, *arguments], stdout=subprocess.PIPE, stderr=self.log, text=True
        )
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline().rpartition(":")[2])

    @property
    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS

    @property
    def lines(self) -> list[str]:
        """Return its log so far."""
        # Not through the file object, whose position is also the process's.
        return Path(f"/proc/self/fd/{self.log.fileno()}").read_text().splitlines()

    @property
    def num_lost(self) -> int:
        """How many clients it has taken for lost, if only for a while."""
        return sum(" is lost: " in line for line in self.lines)

    @property
    def rss_mb(self) -> float:
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:")) / 1000


@contextmanager
def coordinator(heartbeat_timeout_s: float, *more: str) -> Iterator[Coordinator]:
    started = Coordinator(heartbeat_timeout_s, *more)
    try:
        yield started
    except BaseException:
        print("the coordinator's last lines:", *started.lines[-20:], sep="\n", file=sys.stderr)
        raise
    finally:
        started.process.kill()
        started.process.wait()
        assert started.process.stdout is not None
        started.process.stdout.close()
        started.log.close()


@asynccontextmanager
async def stubs(port: int) -> AsyncIterator[list[pb_grpc.CoordinatorAsyncStub]]:
    async with AsyncExitStack() as stack:
        yield [pb_grpc.CoordinatorStub(channel) for channel in await connect(stack, port)]


def who(task: int, job: str = "bench") -> pb.TaskIdentity:
    return pb.TaskIdentity(job=job, task=task, incarnation=task + 1)


async def register(stub: pb_grpc.CoordinatorAsyncStub, task: int, num_clients: int) -> None:
    await stub.Register(pb.RegisterRequest(task=who(task), num_clients=num_clients), timeout=LIMIT_S)


async def register_all(many: list[pb_grpc.CoordinatorAsyncStub], num_clients: int) -> None:
    for first in range(0, num_clients, 500):
        tasks = range(first, min(first + 500, num_clients))
        await asyncio.gather(*(register(many[task % CHANNELS], task, num_clients) for task in tasks))


# --- heartbeats ---------------------------------------------------------------------------------------------


@dataclass
class Beats:
    """What a load of heartbeats came to."""

    took: list[float] = field(default_factory=list)
    num_begun: int = 0
    num_reopened: int = 0

    def note(self, seconds: float, *, is_first: bool) -> None:
        self.took.append(seconds)
        self.num_begun += is_first


async def heartbeats(num_clients: int, interval_s: float, seconds: float, *, streams: bool) -> list[str]:
    """Let all clients send heartbeats, evenly spread; return a table's row.

    Counted is what follows one interval after all have begun: to open 10 000 streams within one interval takes more
    than two cores have, and a separate column shows how long that takes.
    """
    beats = Beats()
    # To collect the garbage of 10 000 clients in one process takes as long as 500 heartbeats.
    with gc_paused(), coordinator(6 * interval_s) as server:
        async with stubs(server.port) as many:
            await register_all(many, num_clients)
            start = time.monotonic() + 1.0
            end = start + seconds
            beat = beat_on_a_stream if streams else beat_alone

            async def client(task: int) -> None:
                begin = start + interval_s * task / num_clients
                await beat(many[task % CHANNELS], task, begin, end, interval_s, beats)

            beating = asyncio.gather(*(client(task) for task in range(num_clients)))
            while beats.num_begun < num_clients and time.monotonic() < end:
                await finish_or_wait(beating, time.monotonic() + 0.1)
            begun_s = time.monotonic() - start
            await finish_or_wait(beating, time.monotonic() + interval_s)
            cpu_s, since = server.cpu_s, time.monotonic()
            beats.took.clear()
            await finish_or_wait(beating, end)
            load = (server.cpu_s - cpu_s) / (time.monotonic() - since)
            counted = sorted(beats.took)
            rss_mb, num_lost = server.rss_mb, server.num_lost
            await beating
    if not counted:
        raise RuntimeError(
            f"no heartbeat to count: after {begun_s:.1f} s {beats.num_begun} clients had begun; take longer"
        )
    rate = len(counted) / (end - since)
    p50, p99 = counted[len(counted) // 2], counted[int(len(counted) * 0.99)]
    name = "one stream each" if streams else "one call each"
    times = [f"{1e3 * each:.1f}" for each in (p50, p99)]
    ends = [str(each) for each in (num_lost, beats.num_reopened)]
    return [name, f"{begun_s:.1f}", f"{end - since:.0f}", f"{rate:.0f}", f"{load:.0%}", *times, f"{rss_mb:.0f}", *ends]


async def finish_or_wait(beating: asyncio.Future[list[None]], until: float) -> None:
    """Wait until then; not if a client has failed, which is raised."""
    await asyncio.wait([beating], timeout=max(until - time.monotonic(), 0))
    if beating.done():
        beating.result()


async def beat_alone(
    stub: pb_grpc.CoordinatorAsyncStub, task: int, due: float, end: float, interval_s: float, beats: Beats
) -> None:
    request, is_first = pb.HeartbeatRequest(task=who(task), progress=pb.Progress(phase="write", step=task)), True
    while due < end:
        await asyncio.sleep(max(due - time.monotonic(), 0))
        begin = time.monotonic()
        await stub.Heartbeat(request, timeout=LIMIT_S)
        beats.note(time.monotonic() - begin, is_first=is_first)
        is_first = False
        due += interval_s


async def beat_on_a_stream(
    stub: pb_grpc.CoordinatorAsyncStub, task: int, due: float, end: float, interval_s: float, beats: Beats
) -> None:
    """Beat as the library does: open the stream with the first beat, and another one if it ends."""
    request = pb.HeartbeatStreamRequest(task=who(task), progress=pb.Progress(phase="write", step=task))
    stream, num_in_vain, is_first = None, 0, True
    while due < end:
        await asyncio.sleep(max(due - time.monotonic(), 0))
        begin = time.monotonic()
        try:
            stream = stream or stub.HeartbeatStream(timeout=LIMIT_S + end - begin)
            await stream.write(request)
            await stream.read()
        except (grpc.RpcError, asyncio.CancelledError):  # gRPC raises both for a stream that the other side has ended
            # A server that has not come to a call for 30 s cancels it.
            if stream is None or not stream.done() or num_in_vain == MAX_IN_VAIN:
                raise
            stream, num_in_vain = None, num_in_vain + 1
            beats.num_reopened += 1
            continue
        beats.note(time.monotonic() - begin, is_first=is_first)
        num_in_vain, is_first = 0, False
        due += interval_s
    if stream is not None:
        await stream.done_writing()


# --- barriers -----------------------------------------------------------------------------------------------


class Client:
    """One client, with a heartbeat stream on which it arrives, as the library does."""

    def __init__(self, stub: pb_grpc.CoordinatorAsyncStub, task: int) -> None:
        self._stub = stub
        self._who = who(task)
        self._calls = itertools.count(1)
        self._stream = stub.HeartbeatStream(timeout=STREAM_S)

    async def begin(self) -> None:
        await self._stream.write(pb.HeartbeatStreamRequest(task=self._who, sequence=1))
        await self._stream.read()

    async def meet(self, name: str, *, collect: bool = False) -> float:
        """Arrive and wait; return when the verdict came."""
        arrival = pb.ArriveRequest(
            task=self._who,
            name=name,
            call=next(self._calls),
            timeout_s=LIMIT_S,
            vote=pb.Vote(ok=True, payload=bytes(64) if collect else b""),
            collect=collect,
            max_wait_s=5,
        )
        await self._stream.write(pb.HeartbeatStreamRequest(task=self._who, sequence=2, arrival=arrival))
        while not (answer := await self._stream.read()).arrived:
            if answer.HasField("refusal"):
                raise RuntimeError(answer.refusal.message)
        arrived = pb.ArriveResponse.FromString(answer.arrived)
        state = arrived.verdict.state
        while state == pb.BARRIER_STATE_OPEN:
            request = pb.AwaitRequest(task=self._who, barrier_id=arrived.barrier_id, max_wait_s=30, collect=collect)
            state = (await self._stub.Await(request, timeout=LIMIT_S)).verdict.state
        return time.monotonic()


async def begin_all(many: list[pb_grpc.CoordinatorAsyncStub], num_clients: int) -> list[Client]:
    """Open the streams of clients that are registered."""
    clients = [Client(many[task % CHANNELS], task) for task in range(num_clients)]
    await asyncio.gather(*(client.begin() for client in clients))
    return clients


async def barriers(num_clients: int, rounds: int, *, collect: bool) -> float:
    """Return the median of the seconds from the first arrival to the last client's verdict."""
    with coordinator(600.0) as server:
        async with stubs(server.port) as many:
            await register_all(many, num_clients)
            clients = await begin_all(many, num_clients)
            return await rounds_of(rounds, num_clients, lambda task, _: clients[task].meet("b", collect=collect))


# --- a client that dies, and memory -------------------------------------------------------------------------


async def detection(num_waiters: int, timeout_s: float, rounds: int) -> tuple[list[float], list[float]]:
    """Return, per round: silence until the first waiter knows; from the first waiter to the last."""
    known, spread = [], []
    dead = num_waiters
    with coordinator(timeout_s) as server:
        async with stubs(server.port) as many:
            await register_all(many, num_waiters + 1)
            clients = await begin_all(many, num_waiters)
            for _ in range(rounds):
                await register_all(many, num_waiters + 1)

                async def keep_beating() -> None:
                    request = [pb.HeartbeatRequest(task=who(task)) for task in range(num_waiters)]
                    while True:
                        await asyncio.gather(
                            *(many[task % CHANNELS].Heartbeat(request[task], timeout=5) for task in range(num_waiters))
                        )
                        await asyncio.sleep(timeout_s / 6)

                beating = asyncio.create_task(keep_beating())
                silent_since = time.monotonic()
                await many[0].Heartbeat(pb.HeartbeatRequest(task=who(dead)), timeout=5)
                told = await asyncio.gather(*(client.meet("b") for client in clients))
                beating.cancel()
                known.append(min(told) - silent_since)
                spread.append(max(told) - min(told))
    return known, spread


async def names(count: int) -> list[float]:
    """Return the coordinator's MB after none, one and two times as many barrier names as it keeps, and three times."""
    rss = []
    with coordinator(600.0) as server:
        async with stubs(server.port) as many:
            await register_all(many, 1)
            (client,) = await begin_all(many, 1)
            rss.append(server.rss_mb)
            for lap in range(3):
                for number in range(count):
                    await client.meet(f"step {lap * count + number}")
                rss.append(server.rss_mb)
    return rss


def heartbeat_table(options: argparse.Namespace) -> Table:
    table = Table(title=f"{options.clients} clients, a heartbeat every {options.interval:g} s each")
    for column in (
        "heartbeats",
        "all begun s",
        "seconds",
        "a second",
        "of one core",
        "p50 ms",
        "p99 ms",
        "RSS MB",
        "LOST",
        "reopened",
    ):
        table.add_column(column, justify="right")
    for streams in (True, False):
        seconds = options.seconds if streams else min(options.seconds, CALLS_S)
        row = asyncio.run(heartbeats(options.clients, options.interval, seconds, streams=streams))
        table.add_row(*row)
    return table


def barrier_table(options: argparse.Namespace) -> Table:
    table = Table(title=f"barrier, ms from the first arrival to the last verdict, median of {options.rounds}")
    for column in ("arrivals", "coordinator", "all get all payloads", "bare calls", "torch's store barrier", "etcd"):
        table.add_column(column, justify="right")
    for num_clients in (512, 2048):
        ours, collected = (asyncio.run(barriers(num_clients, options.rounds, collect=each)) for each in (False, True))
        bare = asyncio.run(echo_rounds(num_clients, options.rounds))
        store = store_barriers(num_clients, options.rounds)
        etcd = f"{1e3 * asyncio.run(etcd_barriers(num_clients, options.rounds)):.0f}" if has_etcd() else "not installed"
        ms = [f"{1e3 * seconds:.0f}" for seconds in (ours, collected, bare, store)]
        table.add_row(str(num_clients), *ms, etcd)
    return table


def detection_table(options: argparse.Namespace) -> Table:
    timeout_s, waiters = 2.0, 256
    known, spread = asyncio.run(detection(waiters, timeout_s, options.rounds))
    title = f"a client falls silent, timeout {timeout_s:g} s: when {waiters} waiters know"
    table = Table("", "first s", "last s", "spread ms", title=title)
    table.add_row("silent client", f"{min(known):.2f}", f"{max(known):.2f}", f"{1e3 * max(spread):.0f}")
    return table


def memory_table(options: argparse.Namespace) -> Table:  # noqa: ARG001  as the others
    rss = asyncio.run(names(10_000))
    table = Table("names of barriers", *(f"{10 * count} 000" for count in range(len(rss))), title="memory")
    table.add_row("RSS MB", *(f"{mb:.0f}" for mb in rss))
    return table


PARTS = {
    "heartbeats": heartbeat_table,
    "barriers": barrier_table,
    "detection": detection_table,
    "memory": memory_table,
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=10_000)
    parser.add_argument("--interval", type=float, default=5.0, help="seconds between a client's heartbeats")
    parser.add_argument("--seconds", type=float, default=60.0, help="of heartbeats")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=list(PARTS), help="one part; default: all")
    options = parser.parse_args(arguments)
    for part in [options.only] if options.only else PARTS:
        show(PARTS[part](options))


if __name__ == "__main__":
    main()
