"""Plan a save of 400 000 chunks as one of 256 clients; write its manifest, and open it.

Run: ``python -m benchmarks.manifest [--chunks 400000] [--rounds 3]``. Every tensor is split over 32x8 devices; rows
differ in how many tensors there are, and so in how many chunks each has.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from rich.table import Table

from benchmarks.results import show
from dtckpt import Layout
from dtckpt.checkpoint.saving.plan import SavePlan, TensorSpec, holdings_of, plan_save
from dtckpt.format.content import content_share
from dtckpt.format.digest import digest_chunk
from dtckpt.format.manifest import ArrayEntry, ArrayKind, Manifest
from dtckpt.layout.create_mesh import abstract_mesh
from dtckpt.layout.region import Region

MESH = abstract_mesh({"dp": 32, "tp": 8})
ROWS, COLUMNS = 32768, 8192


def specs_of(count: int) -> list[TensorSpec]:
    layout, shape = Layout(["dp", "tp"], MESH), (ROWS, COLUMNS)
    holdings = holdings_of(layout, shape)
    return [TensorSpec(f"model/layers/{i}/mlp/w", shape, "float32", "float32", holdings, layout) for i in range(count)]


def manifest_of(plan: SavePlan) -> Manifest:
    draw = np.random.default_rng(0)
    entries = {}
    for item in plan.tensors:
        digests = draw.integers(0, 2**64, item.grid.num_chunks, np.uint64)
        kind = ArrayKind(item.spec.dtype, item.spec.stored_dtype, item.grid, item.owners, item.spec.layout)
        entries[item.spec.name] = ArrayEntry(item.spec.name, item.path, kind, digests, int(digests[0]))
    return Manifest(kvstore="ocdbt", arrays=entries)


def timed(work: Callable[[], Any], rounds: int) -> tuple[float, Any]:
    seconds = []
    result = None
    for _ in range(rounds):
        start = time.perf_counter()
        result = work()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds), result


def speeds(rounds: int) -> list[tuple[str, float]]:
    """Return GB/s of one core for the digests of 64 MiB."""
    elements = np.random.default_rng(0).random((4096, 4096), np.float32)
    region = Region.full(elements.shape)
    entry = manifest_of(plan_save(specs_of(1), 16 << 20)).arrays["model/layers/0/mlp/w"]
    work: dict[str, Callable[[], Any]] = {
        "chunk digest": lambda: digest_chunk("w", (0, 0), elements, entry.blocks),
        "content": lambda: content_share(elements, elements.shape, region),
        "content, columns": lambda: content_share(elements, (4096, 8192), Region((0, 8), (4096, 4096))),
        "content, unaligned": lambda: content_share(elements, (4096, 8192), Region((0, 1), (4096, 4096))),
    }
    return [(name, elements.nbytes / timed(each, rounds)[0] / 1e9) for name, each in work.items()]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chunks", type=int, default=400_000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(arguments)
    table = Table(title=f"{os.cpu_count()} cores, median of {options.rounds}")
    for column in ("tensors", "chunks", "plan s", "write s", "open s", "bytes/chunk"):
        table.add_column(column, justify="right")
    for per_tensor in (256, 1024, 4096):
        count = -(-options.chunks // per_tensor)
        specs = specs_of(count)
        plan_s, plan = timed(lambda specs=specs, per=per_tensor: plan_save(specs, 4 * ROWS * COLUMNS // per), 1)
        write_s, data = timed(manifest_of(plan).to_bytes, options.rounds)
        open_s, manifest = timed(lambda data=data: Manifest.from_bytes(data, "here"), options.rounds)
        chunks = sum(entry.grid.num_chunks for entry in manifest.arrays.values())
        row = [f"{plan_s:.2f}", f"{write_s:.3f}", f"{open_s:.3f}", f"{len(data) / chunks:.1f}"]
        table.add_row(str(count), str(chunks), *row)
    show(table, width=100)
    for name, speed in speeds(5 * options.rounds):
        print(f"{name}: {speed:.1f} GB/s")


if __name__ == "__main__":
    main()
