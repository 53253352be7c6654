"""Plan a change of layout of all tensors of a 405B-parameter transformer, for one client of 16 384 devices.

From 4 096 devices (dp=512, tp=8) to 16 384 (dp=2048, tp=8), tensor-parallel weights split again over dp. Every row is
measured in a new process, in which nothing has been planned before. Memory is resident memory: the peak, and by
how much it is above what the process held before it built the meshes; it includes the plans, which are kept.

Run: ``python -m benchmarks.planning [--devices-per-client 1 8] [--tensors 275 550 1100 2200 4400]``.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import cycle, islice
from pathlib import Path

import numpy as np
from rich.table import Table

from benchmarks.results import show
from dtckpt import Layout, Mesh
from dtckpt.layout.layout import UNSHARDED, Spec
from dtckpt.redistribution.exchange_plan import plan_exchange

SOURCE, TARGET = {"dp": 512, "tp": 8}, {"dp": 2048, "tp": 8}
LAYERS, HIDDEN, FFN, HEADS, KV_HEADS, VOCAB = 126, 16384, 53248, 128, 8, 128256
"""The published sizes of Llama 3.1 405B."""

CLIENTS = {"both": 800, "target": 5000}
"""The clients planned for, by the meshes they are in: one of their devices in the target."""

Tensor = tuple[tuple[int, ...], tuple[Spec, ...]]
"""Shape and sharding specs."""


def transformer() -> Iterator[Tensor]:
    """Yield the tensors of the model: column-parallel weights, row-parallel ones, and norms."""
    kv = KV_HEADS * (HIDDEN // HEADS)
    columns, rows, norm = (("tp", "dp"), UNSHARDED), ("dp", "tp"), ("dp",)
    yield (VOCAB, HIDDEN), columns
    for _ in range(LAYERS):
        yield from [((out, HIDDEN), columns) for out in (HIDDEN, kv, kv)]
        yield (HIDDEN, HIDDEN), rows
        yield from [((FFN, HIDDEN), columns), ((FFN, HIDDEN), columns), ((HIDDEN, FFN), rows)]
        yield from [((HIDDEN,), norm)] * 2
    yield (HIDDEN,), norm
    yield (VOCAB, HIDDEN), columns


def tensors(count: int, *, distinct: bool) -> Iterator[Tensor]:
    """Yield as many tensors as wanted; distinct ones differ by a few rows, so that no plan serves two of them."""
    for number, ((rows, *others), specs) in enumerate(islice(cycle(transformer()), count)):
        yield (rows + number * distinct, *others), specs


def mesh_of(axes: dict[str, int], devices_per_client: int, client: int) -> Mesh:
    shape = tuple(axes.values())
    ids = np.arange(np.prod(shape)).reshape(shape)
    names = [
        f"/job:worker/replica:0/task:{device // devices_per_client}/device:GPU:{device % devices_per_client}"
        for device in range(ids.size)
    ]
    local = range(ids.size)[client * devices_per_client : (client + 1) * devices_per_client]
    return Mesh(list(axes), ids, local, [names[device] for device in local], "", names)


def measure(count: int, devices_per_client: int, device: int, distinct: bool) -> dict[str, float]:
    """Plan every tensor in this process, which has planned nothing yet, and return time and memory."""
    client = device // devices_per_client
    before = resident()
    started = time.perf_counter()
    source, target = (mesh_of(axes, devices_per_client, client) for axes in (SOURCE, TARGET))
    built = time.perf_counter()
    moves = 0
    for shape, specs in tensors(count, distinct=distinct):
        plan = plan_exchange(Layout(specs, source), Layout(specs, target), shape, client)
        moves += sum(map(len, (plan.copies, *plan.sends.values(), *plan.receives.values(), plan.forwards)))
    done = time.perf_counter()
    return {
        "meshes": built - started,
        "plans": done - built,
        "moves": moves,
        "growth": peak() - before,
        "peak": peak(),
    }


def resident() -> float:
    """Return the MiB that this process holds now (Linux)."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


def peak() -> float:
    """Return the most MiB that this process ever held, or its parent process if the parent held more (Linux)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measured_apart(*arguments: object, rounds: int) -> dict[str, float]:
    """Return the round with the median time; each round runs in a new process."""
    command = [sys.executable, "-m", "benchmarks.planning", "--measure", json.dumps(arguments)]
    found = [
        json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout) for _ in range(rounds)
    ]
    return sorted(found, key=lambda one: one["plans"])[rounds // 2]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices-per-client", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tensors", type=int, nargs="+", default=[275, 550, 1100, 2200, 4400])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.measure:
        print(json.dumps(measure(*json.loads(options.measure))))
        return
    total = sum(1 for _ in transformer())
    table = Table(title=f"planning 4 096 -> 16 384 devices, {os.cpu_count()} cores, median of {options.rounds}")
    names = "devices/client, meshes, tensors, shapes, build meshes s, plan s, us/tensor, moves, RSS +MiB, peak RSS MiB"
    for column in names.split(", "):
        table.add_column(column, justify="right")
    for devices in options.devices_per_client:
        for where, device in CLIENTS.items():
            for count, distinct in [(total, False), *((count, True) for count in options.tensors)]:
                found = measured_apart(count, devices, device, distinct, rounds=options.rounds)
                table.add_row(
                    str(devices),
                    where,
                    str(count),
                    "distinct" if distinct else "as they are",
                    f"{found['meshes']:.3f}",
                    f"{found['plans']:.3f}",
                    f"{found['plans'] / count * 1e6:.0f}",
                    str(found["moves"]),
                    f"{found['growth']:.1f}",
                    f"{found['peak']:.0f}",
                )
    show(table, width=130)


if __name__ == "__main__":
    main()
