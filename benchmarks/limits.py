"""Measure the limits of the machine: copies in memory, files, the loopback network, digests.

Run: ``python -m benchmarks.limits [--mib 512]``. Every other figure is to be read beside these, from the same run.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing.synchronize import Barrier
from pathlib import Path

import numpy as np
import xxhash
from rich.table import Table

from benchmarks.results import show

STEP = 4 << 20


def median(work: Callable[[], object], rounds: int) -> float:
    """Return the median of the seconds that a work takes, after a first time."""
    seconds = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


def copy(nbytes: int, rounds: int) -> float:
    """Copy between two arrays that are there."""
    source, target = np.ones(nbytes, np.uint8), np.empty(nbytes, np.uint8)
    return median(lambda: np.copyto(target, source), rounds)


def copies_at_once(nbytes: int, rounds: int, processes: int) -> float:
    """The same in several processes at one time; return the seconds until all are done."""
    barrier = multiprocessing.Barrier(processes + 1)
    started = [multiprocessing.Process(target=_copies, args=(nbytes, rounds, barrier)) for _ in range(processes)]
    for process in started:
        process.start()

    def together() -> None:
        barrier.wait()
        barrier.wait()

    barrier.wait()
    seconds = median(together, rounds)
    for process in started:
        process.join()
    return seconds


def _copies(nbytes: int, rounds: int, barrier: Barrier) -> None:
    source, target = np.ones(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
    barrier.wait()
    for _ in range(rounds + 1):
        barrier.wait()
        np.copyto(target, source)
        barrier.wait()


def write(path: Path, data: memoryview, *, synced: bool) -> None:
    """Write a new file."""
    path.unlink(missing_ok=True)
    with path.open("wb", buffering=0) as file:
        for start in range(0, len(data), STEP):
            file.write(data[start : start + STEP])
        if synced:
            os.fsync(file.fileno())


def read(path: Path, memory: memoryview) -> None:
    """Read a file into memory that is there."""
    with path.open("rb", buffering=0) as file:
        for start in range(0, len(memory), STEP):
            file.readinto(memory[start : start + STEP])


def send(data: memoryview) -> None:
    """Send over loopback, and receive into memory that is there."""
    memory = memoryview(bytearray(STEP))
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = threading.Thread(target=_send, args=(server.getsockname(), data))
        sender.start()
        connection, _ = server.accept()
        with connection:
            while connection.recv_into(memory):
                pass
        sender.join()


def _send(address: tuple[str, int], data: memoryview) -> None:
    with socket.create_connection(address) as connection:
        connection.sendall(data)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    nbytes, rounds = options.mib << 20, options.rounds
    memory = np.ones(nbytes, np.uint8)
    data = memory.data
    cores = len(os.sched_getaffinity(0))
    table = Table("limit", "s", "GB/s", title=f"{options.mib} MiB, {cores} cores, median of {rounds}")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        for name, seconds, total in (
            ("copy in memory, one process", copy(nbytes, rounds), nbytes),
            (f"copy in memory, {cores} processes", copies_at_once(nbytes, rounds, cores), cores * nbytes),
            ("write a file", median(lambda: write(path, data, synced=False), rounds), nbytes),
            ("write a file, fsync", median(lambda: write(path, data, synced=True), rounds), nbytes),
            ("read a file from the page cache", median(lambda: read(path, data), rounds), nbytes),
            ("loopback", median(lambda: send(data), rounds), nbytes),
            ("digest (XXH3)", median(lambda: xxhash.xxh3_64_intdigest(data), rounds), nbytes),
        ):
            table.add_row(name, f"{seconds:.3f}", f"{total / seconds / 1e9:.1f}")
    show(table, width=80)


if __name__ == "__main__":
    main()
