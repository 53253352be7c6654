"""Redistribute within one process beside the plain copy of as many bytes: 8 mesh devices on one GPU, or on the host.

Run: ``python -m benchmarks.local_redistribute [--device cuda] [--mib 256] [--rounds 9]``.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from rich.table import Table

import dtckpt
from benchmarks.results import show
from dtckpt import Layout, Partial, Placement, Replicate, Shard

DEVICES = 8
CHANGES: dict[str, tuple[list[Placement], list[Placement]]] = {
    "S0 -> S1": ([Shard(0)], [Shard(1)]),
    "S1 -> S0": ([Shard(1)], [Shard(0)]),
    "S0 -> R": ([Shard(0)], [Replicate()]),
    "P -> S0": ([Partial()], [Shard(0)]),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    where = torch.cuda.get_device_name() if arguments.device == "cuda" else "host memory"
    table = Table(title=f"{DEVICES} mesh devices, {where}, GB/s read and written (median)")
    for column in ("change", "MiB", "dtckpt", "plain copy", "dtckpt / copy"):
        table.add_column(column)
    mesh = _mesh(arguments.device)
    for name, (source, target) in CHANGES.items():
        columns = 4096
        rows = arguments.mib * (1 << 20) // (4 * columns)
        layout = Layout.from_placements(mesh, source, 2)
        parts = [
            torch.ones(layout.region(device, (rows, columns)).shape, device=arguments.device)
            for device in mesh.local_device_ids()
        ]
        tensor = dtckpt.pack(parts, layout, (rows, columns))
        moved = tensor.redistribute(placements=target)
        new = sum(part.nbytes for part in moved.components)
        flat = torch.ones(new // 4, device=arguments.device)
        ours, plain = _compare(partial(tensor.redistribute, placements=target), flat.clone, arguments)
        # A copy reads and writes once; terms are added one by one, which reads two and writes one each time.
        touched = 3 * (DEVICES - 1) if layout.partial else 2
        rates = touched * new / ours / 1e9, 2 * new / plain / 1e9
        table.add_row(name, str(arguments.mib), f"{rates[0]:.1f}", f"{rates[1]:.1f}", f"{rates[0] / rates[1]:.2f}")
    show(table, width=100)


def _mesh(device: str) -> dtckpt.Mesh:
    if device == "cpu":
        return dtckpt.abstract_mesh({"x": DEVICES})
    dtckpt.configure_virtual_devices("GPU", DEVICES)
    return dtckpt.create_mesh([("x", DEVICES)], device_type="GPU")


def _compare(
    one: Callable[[], object], other: Callable[[], object], arguments: argparse.Namespace
) -> tuple[float, float]:
    """Return median seconds of both, measured in turns."""
    seconds: tuple[list[float], list[float]] = [], []
    for _ in range(arguments.rounds + 2):
        for listed, work in zip(seconds, (one, other), strict=True):
            start = time.perf_counter()
            work()
            if arguments.device == "cuda":
                torch.cuda.synchronize()
            listed.append(time.perf_counter() - start)
    return statistics.median(seconds[0][2:]), statistics.median(seconds[1][2:])


if __name__ == "__main__":
    main()
