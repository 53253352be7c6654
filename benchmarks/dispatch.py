"""The cost of running an operator on a DTensor, beside PyTorch's: warm, and the first call with new shapes.

Run: ``python -m benchmarks.dispatch [--rounds 40] [--axes 1 2 3] [--device cuda]``. One process, tensors of 8x8 on
meshes of one device, so that next to nothing is computed and nothing moves. The host does not wait for a GPU.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor as theirs
from rich.table import Table

import dtckpt
from benchmarks.results import show
from dtckpt import dtensor as ours
from dtckpt.layout.device_mesh import KINDS

CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda x, _: x + x,
    "mm": torch.mm,
    "sum": lambda x, _: x.sum(0),
    "relu": lambda x, _: x.relu(),
    "view": lambda x, _: x.view(-1),
    "cat": lambda x, _: torch.cat([x, x]),
    "layer_norm": lambda x, _: torch.nn.functional.layer_norm(x, x.shape[-1:]),
}
WARM_CALLS = 50
COLD_SHAPES = 12


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--axes", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    arguments = parser.parse_args()
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "0")
    backend = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}[arguments.device]
    dist.init_process_group(backend, rank=0, world_size=1, store=dist.HashStore())
    torch.set_num_threads(1)
    for axes in arguments.axes:
        show(_table(axes, arguments.rounds, arguments.device), width=100)
    dist.destroy_process_group()


def _table(axes: int, rounds: int, device: str) -> Table:
    names = tuple("xyz"[:axes])
    mesh = dtckpt.create_distributed_mesh([(name, 1) for name in names], device_type=KINDS[device])
    their_mesh = theirs.init_device_mesh(device, (1,) * axes, mesh_dim_names=names)
    table = Table(
        title=f"{axes}-D mesh, {device}, microseconds per call: median of the quickest fifth of {rounds} rounds"
    )
    for column in ("operator", "plain", "dtckpt", "PyTorch", "warm ratio", "dtckpt, new", "PyTorch, new", "new ratio"):
        table.add_column(column, justify="right")

    def operands(library: Any, where: Any, rows: int) -> tuple[Any, Any]:
        whole = [library.Replicate()] * axes
        split = [library.Shard(0), *whole[1:]]
        pairs = (torch.ones(rows, 8, device=device), split), (torch.ones(8, 8, device=device), whole)
        one, other = (library.distribute_tensor(value, where, placements) for value, placements in pairs)
        return one, other

    kinds = {"dtckpt": (ours, mesh), "PyTorch": (theirs, their_mesh)}
    for name, call in CALLS.items():
        fixed = {kind: operands(library, where, 8) for kind, (library, where) in kinds.items()}
        fixed["plain"] = torch.ones(8, 8, device=device), torch.ones(8, 8, device=device)
        warm = _compare({kind: _repeat(call, *pair) for kind, pair in fixed.items()}, rounds)
        cold = {
            kind: statistics.median(_first_calls(call, (operands(library, where, 16 + n) for n in range(COLD_SHAPES))))
            for kind, (library, where) in kinds.items()
        }
        table.add_row(
            name,
            *(f"{warm[kind]:.1f}" for kind in ("plain", "dtckpt", "PyTorch")),
            f"{warm['dtckpt'] / warm['PyTorch']:.2f}",
            *(f"{cold[kind]:.0f}" for kind in ("dtckpt", "PyTorch")),
            f"{cold['dtckpt'] / cold['PyTorch']:.2f}",
        )
    return table


def _repeat(call: Callable[[Any, Any], Any], x: Any, y: Any) -> Callable[[], object]:
    def run() -> None:
        for _ in itertools.repeat(None, WARM_CALLS):
            call(x, y)

    return run


def _compare(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Return microseconds per call of each, in turns: what else runs on the machine hits all of them."""
    times: dict[str, list[float]] = {kind: [] for kind in calls}
    for _ in range(rounds):
        for kind, call in calls.items():
            start = time.perf_counter()
            call()
            times[kind].append((time.perf_counter() - start) / WARM_CALLS * 1e6)
    return {kind: statistics.median(sorted(found)[: max(1, rounds // 5)]) for kind, found in times.items()}


def _first_calls(call: Callable[[Any, Any], Any], pairs: Iterator[tuple[Any, Any]]) -> Iterator[float]:
    next_pair = next(pairs)
    call(*next_pair)  # what is made once per operator and mesh
    for x, y in pairs:
        start = time.perf_counter()
        call(x, y)
        yield (time.perf_counter() - start) * 1e6


if __name__ == "__main__":
    main()
