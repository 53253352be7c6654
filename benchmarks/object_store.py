"""Save to and restore from an object store that answers late, beside DCP and TensorStore alone.

All talk to one server on loopback, `benchmarks.bucket_server`, with 20 ms of latency per request. Run:

    torchrun --standalone --nproc-per-node 2 -m benchmarks.object_store [--mib 256] [--small 1000] [--rounds 5]

DCP writes and reads through ``s3torchconnector``; without it DCP is left out. "TensorStore" writes the parts of
each client as separate Zarr v3 arrays, in chunks that TensorStore chooses. "Plain" writes and reads as many bytes as
objects of 8 MiB, 16 at a time: the limit of the server on this machine. Neither of the two digests, nor commits.
"""

from __future__ import annotations

import argparse
import functools
import http.client
import importlib
import importlib.util
import os
import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import tensorstore
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from rich.table import Table

import dtckpt
from benchmarks.bucket_server import ENVIRONMENT, Counts, bucket_server, clear, take_counts
from benchmarks.results import show
from benchmarks.save_restore import DCP, OURS, PLAIN, State

TENSORSTORE = "TensorStore"
NUM_LARGE, SMALL_SHAPE = 10, (64, 64)
PLAIN_NBYTES, PLAIN_THREADS = 8 << 20, 16


class Ours:
    """dtckpt, with everything that is on by default."""

    name = OURS

    def save(self, url: str, state: State) -> None:
        dtckpt.save(url, state.ours)

    def restore(self, url: str, state: State) -> None:
        dtckpt.restore(url, state.ours)


class Dcp:
    """PyTorch's DCP over Amazon's connector, both with their defaults."""

    name = DCP

    def __init__(self) -> None:
        connector: Any = importlib.import_module("s3torchconnector")
        storage: Any = importlib.import_module("s3torchconnector.dcp")
        config = connector.S3ClientConfig(force_path_style=True)
        region = ENVIRONMENT["AWS_REGION"]
        self._writer = functools.partial(storage.S3StorageWriter, region, s3client_config=config)
        self._reader = functools.partial(storage.S3StorageReader, region, s3client_config=config)

    def save(self, url: str, state: State) -> None:
        dcp.save(dict(state.theirs), storage_writer=self._writer(url))

    def restore(self, url: str, state: State) -> None:
        dcp.load(state.theirs, storage_reader=self._reader(url))


class TensorStore:
    """Arrays of TensorStore, all under way at one time."""

    name = TENSORSTORE

    def save(self, url: str, state: State) -> None:
        opened = {
            name: tensorstore.open(self._spec(url, name), create=True, shape=part.shape, dtype=tensorstore.float32)
            for name, part in state.parts.items()
        }
        for write in [array.result().write(state.parts[name].numpy()) for name, array in opened.items()]:
            write.result()

    def restore(self, url: str, state: State) -> None:
        opened = {name: tensorstore.open(self._spec(url, name), open=True, read=True) for name in state.parts}
        context = tensorstore.Context()
        for read in [
            tensorstore.array(state.parts[name].numpy(), context=context).write(array.result())
            for name, array in opened.items()
        ]:
            read.result()

    def _spec(self, url: str, name: str) -> dict[str, Any]:
        store = {
            "driver": "s3",
            "bucket": url.split("/")[2],
            "path": f"{url.split('/', 3)[3]}/{dist.get_rank()}/{name}/",
            "endpoint": os.environ["AWS_ENDPOINT_URL"],
            "aws_region": ENVIRONMENT["AWS_REGION"],
            "aws_credentials": {"type": "environment"},
        }
        return {"driver": "zarr3", "kvstore": store}


class Plain:
    """As many bytes, as objects without a form."""

    name = PLAIN

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(PLAIN_THREADS)
        self._local = threading.local()

    def save(self, url: str, state: State) -> None:
        self._ask("PUT", url, state)

    def restore(self, url: str, state: State) -> None:
        self._ask("GET", url, state)

    def _ask(self, method: str, url: str, state: State) -> None:
        memory = [part.view(-1).view(torch.uint8).numpy().data for part in state.parts.values()]
        if memory[0].nbytes < PLAIN_NBYTES:
            memory = [memoryview(bytearray(sum(part.nbytes for part in memory)))]
        pieces = [part[at : at + PLAIN_NBYTES] for part in memory for at in range(0, part.nbytes, PLAIN_NBYTES)]
        name = f"/{url.split('/', 2)[2]}/{dist.get_rank()}"
        targets = [f"{name}/{number}" for number in range(len(pieces))]
        list(self._pool.map(functools.partial(self._request, method), targets, pieces))

    def _request(self, method: str, target: str, piece: memoryview) -> None:
        if not hasattr(self._local, "connection"):
            self._local.connection = http.client.HTTPConnection(os.environ["AWS_ENDPOINT_URL"].removeprefix("http://"))
        connection: http.client.HTTPConnection = self._local.connection
        connection.request(method, target, piece if method == "PUT" else None)
        response = connection.getresponse()
        view = piece if method == "GET" else piece[:0]
        while view.nbytes and (count := response.readinto(view)):
            view = view[count:]
        response.read()


def libraries() -> list[Ours | Dcp | TensorStore | Plain]:
    """Return the libraries that are installed."""
    if importlib.util.find_spec("s3torchconnector") is not None:
        return [Ours(), Dcp(), TensorStore(), Plain()]
    if dist.get_rank() == 0:
        print("without DCP: s3torchconnector, through which it reaches S3, is not installed")
    return [Ours(), TensorStore(), Plain()]


class Measurements:
    """Seconds of the slowest client, and what the server counted, by work and library.

    Args:
        url: The server's.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self.nbytes: dict[str, int] = {}
        self.seconds: dict[str, dict[str, list[float]]] = {}
        self.counts: dict[str, dict[str, Counts]] = {}

    def time(self, what: str, who: str, work: Callable[[], object]) -> None:
        dist.barrier()
        if dist.get_rank() == 0:
            take_counts(self._url)
        dist.barrier()
        start = time.perf_counter()
        work()
        dist.barrier()
        self.seconds.setdefault(what, {}).setdefault(who, []).append(time.perf_counter() - start)
        if dist.get_rank() == 0:
            self.counts.setdefault(what, {})[who] = take_counts(self._url)

    def times(self, title: str, names: list[str]) -> Table:
        """Return a table of seconds."""
        table = Table(title=title)
        peers = [who for who in names if who != OURS]
        for column in ("work", *(f"{who} s" for who in names), *(f"{who} / {OURS}" for who in peers)):
            table.add_column(column)
        for what, by_name in self.seconds.items():
            median = {who: statistics.median(listed) for who, listed in by_name.items()}
            ratios = [f"{median[who] / median[OURS]:.2f}" for who in peers]
            table.add_row(what, *(f"{median[who]:.3f}" for who in names), *ratios)
        return table

    def requests(self, names: list[str]) -> Table:
        """Return a table of speeds and requests."""
        table = Table(title="Speeds and requests")
        for column in ("work", "library", "GB/s", "requests", "requests / GB", "most in flight"):
            table.add_column(column)
        for what, by_name in self.counts.items():
            gigabytes = self.nbytes[what] / 1e9
            for who in names:
                counts, speed = by_name[who], gigabytes / statistics.median(self.seconds[what][who])
                number = str(counts.requests)
                per_gb = f"{counts.requests / gigabytes:.0f}"
                table.add_row(what, who, f"{speed:.3f}", number, per_gb, str(counts.most_in_flight))
        return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=256, help=f"of {NUM_LARGE} tensors together")
    parser.add_argument("--small", type=int, default=1000, help="number of small tensors, of 16 KiB each")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--latency-ms", type=float, default=20)
    arguments = parser.parse_args()
    dtckpt.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    with ExitStack() as stack:
        shared = [stack.enter_context(bucket_server(arguments.latency_ms)) if rank == 0 else ""]
        dist.broadcast_object_list(shared, src=0)
        os.environ.update(ENVIRONMENT, AWS_ENDPOINT_URL=shared[0])
        rows = max(1, (arguments.mib << 20) // (NUM_LARGE * 4096 * size)) * size
        measurements, found = Measurements(shared[0]), libraries()
        for label, shape, count in (
            (f"{NUM_LARGE} tensors", (rows, 1024), NUM_LARGE),
            (f"{arguments.small} small tensors", SMALL_SHAPE, arguments.small),
        ):
            measure(measurements, found, shared[0], label, shape, count, arguments.rounds)
        if rank == 0:
            title = (
                f"{arguments.mib} MiB in {NUM_LARGE} tensors, and {arguments.small} of 16 KiB; "
                f"{arguments.latency_ms:g} ms a request, {size} clients, {os.cpu_count()} cores"
            )
            names = [library.name for library in found]
            show(measurements.times(title, names), measurements.requests(names), width=160)
        dist.barrier()
    dist.destroy_process_group()


def measure(
    measurements: Measurements,
    found: list[Ours | Dcp | TensorStore | Plain],
    server: str,
    label: str,
    shape: tuple[int, int],
    count: int,
    rounds: int,
) -> None:
    """Save and restore tensors with all libraries, in turns."""
    source, target = State(shape, 0, torch.randn, count), State(shape, 0, torch.zeros, count)
    unmeasured = Measurements(server)  # the first round finds no connections, and no memory ready
    for number in range(rounds + 1):
        clock = measurements if number else unmeasured
        for library in found:
            url = f"s3://bucket/{library.name}-{number}"
            for what, work, state in (("save", library.save, source), ("restore", library.restore, target)):
                row = f"{what}, {label}"
                clock.nbytes[row] = count * shape[0] * shape[1] * 4
                clock.time(row, library.name, functools.partial(work, url, state))
            for name, part in target.parts.items():
                if library.name != PLAIN and not torch.equal(part, source.parts[name]):
                    raise SystemExit(f"{library.name} did not restore {name}")
                part.zero_()
            dist.barrier()
            if dist.get_rank() == 0:
                clear(server)


if __name__ == "__main__":
    main()
