"""Compare two checkpoints of 4 GiB by ``dtckpt diff``, beside a loop in Python, and beside reading both with ``cat``.

Run: ``python -m benchmarks.diff [--gigabytes 4] [--rounds 5] [--folder PATH]``. Each work runs in a separate process;
its time is the time of the whole process, with all imports. The checkpoints have the same tensors on two meshes; of one
tensor in eight some elements differ. In the third checkpoint every tensor differs from the first one.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.table import Table

import dtckpt
from benchmarks.results import show
from dtckpt import Layout, abstract_mesh, pack

WANTED_S = 1.0
"""Seconds for the comparison by digests, for checkpoints of any size."""
ROWS, COLUMNS = 4096, 4096
_LOOP = """
import sys, dtckpt, torch
a, b = map(dtckpt.open_checkpoint, sys.argv[1:])
for name in a.tensors:
    one, other = a.read(name), b.read(name)
    if not torch.equal(one, other):
        error = (one - other).abs()
        print(name, int((error != 0).sum()), float(error.max()), int(error.argmax()))
"""


def save(path: Path, count: int, size: int, changed: range) -> None:
    """Save tensors of 64 MiB that follow from their numbers, on a mesh of a size; some have changed elements."""
    layout = Layout(["x", "unsharded"], abstract_mesh({"x": size}))
    tree = {}
    for number in range(count):
        whole = torch.rand(ROWS, COLUMNS, generator=torch.Generator().manual_seed(number))
        if number in changed:
            whole.reshape(-1)[number :: 1 << 16] += 0.5
        tree[f"layers.{number}.w"] = pack(list(whole.chunk(size)), layout)
    dtckpt.save(path, tree)


def run(*command: str, code: int = 0) -> float:
    """Run a process; return its seconds."""
    start = time.perf_counter()
    done = subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
    seconds = time.perf_counter() - start
    assert done.returncode == code, command
    return seconds


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args(arguments)
    count = max(1, int(options.gigabytes * 2**30 / (ROWS * COLUMNS * 4)))
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        paths = [Path(folder) / name for name in "abc"]
        for path, size, changed in zip(paths, (4, 2, 4), (range(0), range(0, count, 8), range(count)), strict=True):
            save(path, count, size, changed)
        a, b, c = map(str, paths)
        diff = (sys.executable, "-m", "dtckpt", "diff", "--ignore", "layout")
        files = [str(file) for path in (a, c) for file in Path(path).rglob("*") if file.is_file()]
        works = {
            "dtckpt diff, some differ": lambda: run(*diff, a, b, code=1),
            "dtckpt diff, all differ": lambda: run(*diff, a, c, code=1),
            "dtckpt diff --values, some differ": lambda: run(*diff, "--values", a, b, code=1),
            "dtckpt diff --values, all differ": lambda: run(*diff, "--values", a, c, code=1),
            "a loop over tensors, with PyTorch": lambda: run(sys.executable, "-c", _LOOP, a, c),
            "cat both": lambda: run("cat", *files),
        }
        results = {name: [work() for _ in range(options.rounds)] for name, work in works.items()}
    table = Table(
        title=f"2 x {count * ROWS * COLUMNS * 4 / 2**30:.1f} GiB, {os.cpu_count()} cores, median of {options.rounds}"
    )
    for column in ("work", "s", "wanted"):
        table.add_column(column, justify="left" if column == "work" else "right")
    for name, seconds in results.items():
        wanted = f"< {WANTED_S}" if name.startswith("dtckpt diff,") else ""
        table.add_row(name, f"{statistics.median(seconds):.2f}", wanted)
    show(table, width=100)


if __name__ == "__main__":
    main()
