"""Saves that write only changed chunks: a frozen base with adapters, and a state of which everything changes.

Two clients, with fsync, in turns, medians. Run:

    torchrun --standalone --nproc-per-node 2 -m benchmarks.reuse [--mib 1024] [--steps 20] [--rounds 5]

"Full" saves have no base; they are what the others are measured by. The adapters and their optimizer state are 1/128 of
the frozen base. The disk space of all steps is counted as ``du`` does. Where restic or borg is installed, it backs up
the files of ``torch.save`` of the same state, on client 0 alone.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.table import Table

import dtckpt
from benchmarks.results import show
from dtckpt import Layout, SaveOptions, pack

WIDTH = 1024
ADAPTER_SHARE = 128
"""The adapters, with two moments each, have 1/128 of the bytes of the frozen base."""


class FineTuning:
    """A frozen base of so many MiB over all clients, in tensors of 16 MiB, and adapters that change."""

    def __init__(self, mib: int) -> None:
        self._mesh = dtckpt.create_distributed_mesh({"x": dist.get_world_size()})
        count = max(1, mib // 16)
        self.frozen = {f"layer{number}": self._tensor(4096, number) for number in range(count)}
        rows = max(dist.get_world_size(), 4096 // ADAPTER_SHARE // 4 * 4)
        names = [f"layer{number}.{part}" for number in range(count) for part in ("lora", "exp_avg", "exp_avg_sq")]
        self._rows, self._names = max(2, rows // 3 // 2 * 2), names
        self.adapters: dict[str, Any] = {}
        self.train(0)

    def train(self, step: int) -> None:
        """Change the adapters."""
        self.adapters = {name: self._tensor(self._rows, zlib.crc32(f"{name} {step}".encode())) for name in self._names}

    def change_all(self, step: int) -> None:
        """Change the base, too, in place, as AdamW does."""
        for tensor in self.frozen.values():
            for part in dtckpt.unpack(tensor):
                part.add_(step)

    def _tensor(self, rows: int, seed: int) -> Any:
        generator = torch.Generator().manual_seed(seed % (1 << 31) + dist.get_rank())
        part = torch.randn(rows // dist.get_world_size(), WIDTH, generator=generator)
        return pack([part], Layout(["x", "unsharded"], self._mesh), (rows, WIDTH))

    @property
    def tree(self) -> dict[str, Any]:
        return {"model": self.frozen, "adapters": self.adapters}

    @property
    def changed_nbytes(self) -> int:
        return len(self._names) * self._rows * WIDTH * 4


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Do a work on all clients; return its seconds on the slowest, and its result."""
    os.sync()
    dist.barrier()
    start = time.perf_counter()
    result = work()
    dist.barrier()
    return time.perf_counter() - start, result


def remove(path: Path) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(path, ignore_errors=True)
    dist.barrier()


def du(path: Path) -> int:
    return int(subprocess.run(["du", "-sB1", path], check=True, capture_output=True, text=True).stdout.split()[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", default=None, help="where to work; default the system's temporary folder")
    arguments = parser.parse_args()
    dtckpt.init_process_group("gloo")
    shared = [tempfile.mkdtemp(dir=arguments.folder)]
    dist.broadcast_object_list(shared, src=0)
    folder = Path(shared[0])
    state = FineTuning(arguments.mib)
    table = Table(title=f"{arguments.mib} MiB frozen, {dist.get_world_size()} clients, {os.cpu_count()} cores, fsync")
    for column in ("work", "s", "ratio", "of"):
        table.add_column(column, justify="left" if column in ("work", "of") else "right")
    for kvstore in ("ocdbt", "zarr"):
        for row in measure(state, folder / kvstore, kvstore, arguments.steps, arguments.rounds):
            table.add_row(*row)
    for row in backups(state, folder):
        table.add_row(*row)
    if dist.get_rank() == 0:
        show(table)
        shutil.rmtree(folder)
    dist.destroy_process_group()


def measure(state: FineTuning, folder: Path, kvstore: str, steps: int, rounds: int) -> list[tuple[str, ...]]:
    """Measure one kind of key-value store; return the rows."""
    options, overwrite = SaveOptions(kvstore=kvstore), SaveOptions(kvstore=kvstore, overwrite=True)
    times: dict[str, list[float]] = {
        name: [] for name in ("full", "base", "dense full", "dense base", "whole", "linked")
    }
    written: list[float] = []

    def save(name: str, options: SaveOptions = options, base: str | None = None) -> Any:
        return dtckpt.save(folder / name, state.tree, options=options, base=None if base is None else folder / base)

    for number in range(rounds + 1):
        own: dict[str, float] = {}
        remove(folder)
        own["full"], _ = timed(lambda: save("full"))
        state.train(number + 1)
        own["base"], report = timed(lambda: save("linked", base="full"))
        state.change_all(1)
        # Each is first in every other round: the disk remembers who came before.
        dense: list[tuple[str, str | None]] = [("dense full", None), ("dense base", "linked")]
        for name, base in dense if number % 2 else dense[::-1]:
            own[name], _ = timed(lambda name=name, base=base: save(name, overwrite, base))
        own["whole"], _ = timed(lambda: dtckpt.restore(folder / "full", state.tree))
        own["linked"], _ = timed(lambda: dtckpt.restore(folder / "linked", state.tree))
        if number:  # the first round finds no memory ready
            written.append(report.nbytes_written / state.changed_nbytes)
            for name, seconds in own.items():
                times[name].append(seconds)
    s = {name: statistics.median(listed) for name, listed in times.items()}

    def ratio(name: str, other: str) -> str:
        # Of pairs that were measured one after the other: so what else the machine does counts for both.
        return f"{statistics.median(a / b for a, b in zip(times[name], times[other], strict=True)):.3f}"

    remove(folder)
    save("0")
    nbytes = du(folder / "0")
    for step in range(1, steps):
        state.train(100 + step)
        save(f"{step}", base=f"{step - 1}")
    wanted = nbytes + (steps - 1) * state.changed_nbytes
    space = [du(folder)]
    dist.broadcast_object_list(space, src=0)
    remove(folder)
    return [
        (f"{kvstore}: full save", f"{s['full']:.3f}", "", ""),
        (f"{kvstore}: save, adapters changed", f"{s['base']:.3f}", ratio("base", "full"), "a full save"),
        (f"{kvstore}: its bytes", "", f"{statistics.median(written):.3f}", "the bytes that changed"),
        (f"{kvstore}: full save, all changed", f"{s['dense full']:.3f}", "", ""),
        (f"{kvstore}: save, all changed", f"{s['dense base']:.3f}", ratio("dense base", "dense full"), "a full save"),
        (f"{kvstore}: restore of linked files", f"{s['linked']:.3f}", ratio("linked", "whole"), "whole ones"),
        (f"{kvstore}: {steps} steps on disk", "", f"{space[0] / wanted:.3f}", "base + adapters of each step"),
    ]


def backups(state: FineTuning, folder: Path) -> list[tuple[str, ...]]:
    """Let client 0 back up two steps of its part, saved by ``torch.save``, with each tool that is installed."""
    rows: list[tuple[str, ...]] = []
    for tool in ("restic", "borg"):
        if dist.get_rank() == 0 and shutil.which(tool):
            rows.append(backup(state, folder / tool, tool))
        dist.barrier()
    return rows


def backup(state: FineTuning, folder: Path, tool: str) -> tuple[str, ...]:
    """Return the row of a tool: the second backup, after the adapters changed, beside the first."""
    source, repository = folder / "source", folder / "repository"
    source.mkdir(parents=True)
    environment = {**os.environ, "RESTIC_PASSWORD": "x", "BORG_UNKNOWN_UNENCRYPTED_REPO_ACCESS_IS_OK": "yes"}
    commands = {
        "restic": (
            ["restic", "init", "-r", str(repository)],
            ["restic", "backup", "-q", "-r", str(repository), str(source)],
        ),
        "borg": (
            ["borg", "init", "-e", "none", str(repository)],
            ["borg", "create", f"{repository}::{{now:%f}}", str(source)],
        ),
    }
    begin, create = commands[tool]
    subprocess.run(begin, env=environment, check=True, capture_output=True)
    seconds, sizes = [], []
    for step in range(2):
        state.train(1000 + step)
        parts = {name: dtckpt.unpack(tensor)[0] for part in state.tree.values() for name, tensor in part.items()}
        start = time.perf_counter()
        torch.save(parts, source / "state.pt")
        subprocess.run(create, env=environment, check=True, capture_output=True)
        os.sync()
        seconds.append(time.perf_counter() - start)
        sizes.append(du(repository))
    shutil.rmtree(folder)
    ratio = (sizes[1] - sizes[0]) / (state.changed_nbytes / dist.get_world_size())
    return f"{tool} of torch.save, one client", f"{seconds[1]:.3f}", f"{ratio:.3f}", "the bytes that changed"


if __name__ == "__main__":
    main()
