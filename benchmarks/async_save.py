"""How long an asynchronous save blocks, beside a plain host copy and PyTorch's DCP: same tensors, interleaved, medians.

Run: ``torchrun --standalone --nproc-per-node 2 -m benchmarks.async_save [--mib 512] [--tensors 64] [--rounds 5]``.
Each client holds half of every tensor (split along dim 0). DCP stages through its default stager, which keeps its
buffers between saves, as ours are. The first round, which finds no buffers, is shown but not counted. Other processes
share the memory bandwidth, so each save is compared with a copy made just before it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from rich.table import Table
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor import Shard as TorchShard

import dtckpt
from benchmarks.results import show

SUBJECTS = {
    "dtckpt.save_async": "ours",
    "dcp.async_save": "dcp",
    "dcp.async_save, kept buffers": "dcp kept",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--tensors", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", default=None)
    arguments = parser.parse_args()
    dtckpt.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    shared = [tempfile.mkdtemp(dir=arguments.folder)]
    dist.broadcast_object_list(shared, src=0)
    folder = Path(shared[0])
    rows = max(1, (arguments.mib << 20) // (arguments.tensors * 4 * 1024 * size)) * size
    local = [torch.randn(rows // size, 1024) for _ in range(arguments.tensors)]
    layout = dtckpt.Layout(["x", dtckpt.UNSHARDED], dtckpt.create_distributed_mesh([("x", size)]))
    ours = {f"t{i}": dtckpt.pack([part], layout, (rows, 1024)) for i, part in enumerate(local)}
    device_mesh = init_device_mesh("cpu", (size,))
    theirs = {
        f"t{i}": TorchDTensor.from_local(part, device_mesh, [TorchShard(0)], run_check=False)
        for i, part in enumerate(local)
    }
    ready = [torch.zeros_like(part) for part in local]
    stager = DefaultStager(
        StagingOptions(
            use_pinned_memory=False, use_shared_memory=True, use_async_staging=False, use_non_blocking_copy=False
        )
    )
    path = folder / "save"

    def copy() -> None:
        for target, source in zip(ready, local, strict=True):
            target.copy_(source)

    def save_with_dcp(**more: Any) -> Callable[[], object]:
        saved = dcp.async_save(theirs, storage_writer=dcp.FileSystemWriter(path, sync_files=True), **more)
        return lambda: getattr(saved, "upload_completion", saved).result()

    starts: dict[str, Callable[[], Callable[[], object]]] = {
        "ours": lambda: dtckpt.save_async(path, ours).result,
        "dcp": save_with_dcp,
        "dcp kept": lambda: save_with_dcp(async_stager=stager),
    }
    seconds: dict[str, list[list[float]]] = {name: [] for name in starts}
    for _ in range(arguments.rounds + 1):
        for name, start_save in starts.items():
            dist.barrier()
            start = time.perf_counter()
            copy()
            copied = time.perf_counter() - start
            dist.barrier()
            start = time.perf_counter()
            finish = start_save()
            blocked = time.perf_counter() - start
            finish()
            # The slower client of the two: the job goes on when both do.
            slowest = torch.tensor([copied, blocked, time.perf_counter() - start])
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            seconds[name].append(slowest.tolist())
            if rank == 0:
                shutil.rmtree(path, ignore_errors=True)
    if rank == 0:
        print_results(arguments, size, seconds)
        shutil.rmtree(folder)
    stager.close()
    dist.destroy_process_group()


def print_results(arguments: argparse.Namespace, size: int, seconds: dict[str, list[list[float]]]) -> None:
    title = (
        f"{arguments.tensors} tensors, {arguments.mib} MiB, {size} clients, {os.cpu_count()} cores, fsync, "
        f"median of {arguments.rounds}"
    )
    table = Table(title=title)
    for column in (
        "what",
        "blocks, first save (s)",
        "host copy (s)",
        "blocks (s)",
        "/ host copy",
        "until committed (s)",
    ):
        table.add_column(column)
    for label, name in SUBJECTS.items():
        first, *rounds = seconds[name]
        copied, blocked, ended = (statistics.median(values) for values in zip(*rounds, strict=True))
        ratio = statistics.median(block / copy for copy, block, _ in rounds)
        table.add_row(label, f"{first[1]:.3f}", f"{copied:.4f}", f"{blocked:.4f}", f"{ratio:.2f}", f"{ended:.3f}")
    show(table, width=120)


if __name__ == "__main__":
    main()
