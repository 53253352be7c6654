"""Filling large DTensors with random numbers beside PyTorch's own filling of plain tensors.

Run: ``python -m benchmarks.randomness [--mib 64] [--rounds 9] [--threads 1]``.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from rich.table import Table

import dtckpt
from benchmarks.results import show

FILLS: dict[str, tuple[torch.dtype, Callable[[torch.Tensor], object]]] = {
    "uniform_": (torch.float32, lambda tensor: tensor.uniform_()),
    "normal_": (torch.float32, lambda tensor: tensor.normal_()),
    "normal_(std=0.02), bfloat16": (torch.bfloat16, lambda tensor: tensor.normal_(std=0.02)),
    "exponential_": (torch.float32, lambda tensor: tensor.exponential_()),
    "random_(0, 50000)": (torch.int64, lambda tensor: tensor.random_(0, 50_000)),
    "random_(0, 2**30)": (torch.int64, lambda tensor: tensor.random_(0, 1 << 30)),
    "bernoulli_(0.1)": (torch.float32, lambda tensor: tensor.bernoulli_(0.1)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1, help="PyTorch draws with one, whatever this is")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    table = Table(title=f"random numbers, {arguments.mib} MiB, {arguments.threads} threads, milliseconds (median)")
    for column in ("filling", "dtckpt", "PyTorch", "dtckpt / PyTorch"):
        table.add_column(column)
    mesh = dtckpt.abstract_mesh({"x": 1})
    for name, (dtype, fill) in FILLS.items():
        plain = torch.empty(arguments.mib * (1 << 20) // dtype.itemsize, dtype=dtype)
        ours = dtckpt.pack([plain.clone()], dtckpt.Layout(["x"], mesh))
        seconds: tuple[list[float], list[float]] = [], []
        for _ in range(arguments.rounds + 2):
            for listed, tensor in zip(seconds, (ours, plain), strict=True):
                start = time.perf_counter()
                fill(tensor)
                listed.append(time.perf_counter() - start)
        mine, peer = (statistics.median(listed[2:]) * 1e3 for listed in seconds)
        table.add_row(name, f"{mine:.1f}", f"{peer:.1f}", f"{mine / peer:.2f}")
    show(table, width=100)


if __name__ == "__main__":
    main()
