"""Redistribute beside PyTorch's DTensor: same tensors, same gloo processes, interleaved, medians.

Run: ``torchrun --standalone --nproc-per-node 4 -m benchmarks.redistribute [--max-mib 256] [--rounds 7]``.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
import timeit
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from rich.table import Table
from torch.distributed import tensor as theirs
from torch.distributed.device_mesh import init_device_mesh

import dtckpt
from benchmarks.results import show
from dtckpt.redistribution.execute import plan_redistribution

CHANGES = {
    "S0 -> S1": (["S0"], ["S1"]),
    "S0 -> R": (["S0"], ["R"]),
    "R -> S0": (["R"], ["S0"]),
    "P -> R": (["P"], ["R"]),
    "P -> S0": (["P"], ["S0"]),
    "(R,S0) -> (S0,R)": (["R", "S0"], ["S0", "R"]),
    "(S0,R) -> (R,S0)": (["S0", "R"], ["R", "S0"]),
}
SIZES_MIB = (1 / 16, 2, 64, 256)
OURS = {"S0": dtckpt.Shard(0), "S1": dtckpt.Shard(1), "R": dtckpt.Replicate(), "P": dtckpt.Partial()}
THEIRS = {"S0": theirs.Shard(0), "S1": theirs.Shard(1), "R": theirs.Replicate(), "P": theirs.Partial()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--max-mib", type=float, default=256)
    parser.add_argument(
        "--rounds", type=int, default=7, help="of the largest size; smaller ones get up to ten times more"
    )
    parser.add_argument("--changes", default="", help="only those whose name contains this")
    arguments = parser.parse_args()
    dtckpt.init_process_group("gloo")
    size = dist.get_world_size()
    table = Table(title=f"redistribute, {size} gloo clients, {os.cpu_count()} cores, milliseconds (median)")
    for column in ("change", "MiB", "dtckpt", "PyTorch", "PyTorch / dtckpt"):
        table.add_column(column)
    for name, (source, target) in CHANGES.items():
        axes = (size,) if len(source) == 1 else (2, size // 2)
        if 0 in axes or arguments.changes not in name:
            continue
        for mib in SIZES_MIB:
            if mib > arguments.max_mib:
                continue
            rounds = int(arguments.rounds * min(10, max(1, 16 / mib)))
            mine, peer = compare(axes, source, target, int(mib * (1 << 20)), rounds)
            table.add_row(name, f"{mib:g}", f"{mine * 1e3:.2f}", f"{peer * 1e3:.2f}", f"{peer / mine:.2f}")
    costs = overheads()
    if dist.get_rank() == 0:
        show(table, width=100)
        show(costs, width=100)
    dist.destroy_process_group()


def overheads() -> Table:
    """Return a table of what calls cost that move nothing, measured on this client alone."""
    size = dist.get_world_size()
    ours_mesh, their_mesh = dtckpt.create_distributed_mesh([("a", size)]), init_device_mesh("cpu", (size,))
    local = torch.ones(8, 8)
    ours = dtckpt.DTensor.from_local(local, ours_mesh, [dtckpt.Shard(0)])
    peer = theirs.DTensor.from_local(local, their_mesh, [theirs.Shard(0)], run_check=False)
    target = dtckpt.Layout.from_placements(ours_mesh, [dtckpt.Shard(1)], 2)
    plan_redistribution(ours.layout, target, ours.shape, ours.dtype)
    mine, other = [dtckpt.Shard(0)], [theirs.Shard(0)]
    calls: dict[str, tuple[Callable[[], object], Callable[[], object] | None]] = {
        "redistribute to the same": (
            lambda: ours.redistribute(placements=mine),
            lambda: peer.redistribute(placements=other),
        ),
        "to_local": (ours.to_local, peer.to_local),
        "cached plan look-up": (lambda: plan_redistribution(ours.layout, target, ours.shape, ours.dtype), None),
    }
    table = Table(title="calls that move nothing, microseconds (best of 9)")
    for column in ("call", "dtckpt", "PyTorch"):
        table.add_column(column)
    for name, (mine_call, their_call) in calls.items():
        table.add_row(name, f"{each(mine_call):.2f}", f"{each(their_call):.2f}" if their_call else "")
    return table


def each(work: Callable[[], object], count: int = 2000) -> float:
    """Return the microseconds of one call, in the best of nine runs."""
    return min(timeit.repeat(work, number=count, repeat=9)) / count * 1e6


def compare(
    axes: tuple[int, ...], source: Sequence[str], target: Sequence[str], nbytes: int, rounds: int
) -> tuple[float, float]:
    """Return median seconds of our redistribute and of PyTorch's, measured in turns."""
    columns = 1024
    rows = max(dist.get_world_size(), nbytes // (4 * columns))
    mesh = dtckpt.create_distributed_mesh([(f"a{axis}", count) for axis, count in enumerate(axes)])
    layout = dtckpt.Layout.from_placements(mesh, [OURS[item] for item in source], 2)
    (device,) = mesh.local_device_ids()
    local = torch.randn(layout.region(device, (rows, columns)).shape)
    ours = dtckpt.pack([local], layout, (rows, columns))
    device_mesh = init_device_mesh("cpu", axes)
    peer = theirs.DTensor.from_local(local, device_mesh, [THEIRS[item] for item in source], run_check=False)
    our_target, their_target = [OURS[item] for item in target], [THEIRS[item] for item in target]
    seconds: tuple[list[float], list[float]] = [], []
    for _ in range(rounds + 2):
        for listed, work in zip(
            seconds,
            (
                lambda: ours.redistribute(placements=our_target).to_local(),
                lambda: peer.redistribute(placements=their_target).to_local(),
            ),
            strict=True,
        ):
            listed.append(timed(work))
    return statistics.median(seconds[0][2:]), statistics.median(seconds[1][2:])


def timed(work: Callable[[], torch.Tensor]) -> float:
    """Return the seconds of the slowest client."""
    dist.barrier()
    start = time.perf_counter()
    work()
    took = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return float(took)


if __name__ == "__main__":
    main()
