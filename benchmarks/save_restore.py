"""Save and restore beside PyTorch's DCP: same tensors, same processes, interleaved, medians.

Run: ``torchrun --standalone --nproc-per-node 2 -m benchmarks.save_restore [--mib 512] [--tensors 64] [--rounds 5]``.
Each client holds half of every tensor (split along dim 0); DCP holds the same halves as its own DTensors.
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

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from rich.console import Console
from rich.table import Table
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor import Shard as TorchShard

import dtckpt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--tensors", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", default=None)
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    shared = [tempfile.mkdtemp(dir=arguments.folder)]
    dist.broadcast_object_list(shared, src=0)
    folder = Path(shared[0])
    rows = max(1, (arguments.mib << 20) // (arguments.tensors * 4 * 1024 * size)) * size
    local = [torch.randn(rows // size, 1024) for _ in range(arguments.tensors)]
    mesh = dtckpt.create_distributed_mesh([("x", size)])
    layout = dtckpt.Layout(["x", dtckpt.UNSHARDED], mesh)
    other = dtckpt.Layout([dtckpt.UNSHARDED, "x"], mesh)
    ours = {f"t{i}": dtckpt.pack([part], layout, (rows, 1024)) for i, part in enumerate(local)}
    device_mesh = init_device_mesh("cpu", (size,))
    theirs = {
        f"t{i}": TorchDTensor.from_local(part, device_mesh, [TorchShard(0)], run_check=False)
        for i, part in enumerate(local)
    }
    into = {name: torch.zeros_like(part) for name, part in zip(ours, local, strict=True)}
    our_same = {name: dtckpt.pack([part], layout, (rows, 1024)) for name, part in into.items()}
    across = {name: torch.zeros(rows, 1024 // size) for name in ours}
    our_other = {name: dtckpt.pack([part], other, (rows, 1024)) for name, part in across.items()}
    their_same = {
        name: TorchDTensor.from_local(part, device_mesh, [TorchShard(0)], run_check=False)
        for name, part in into.items()
    }
    their_other = {
        name: TorchDTensor.from_local(part, device_mesh, [TorchShard(1)], run_check=False)
        for name, part in across.items()
    }
    seconds: dict[str, list[float]] = {}

    def timed(what: str, work: Callable[[], object]) -> None:
        dist.barrier()
        start = time.perf_counter()
        work()
        dist.barrier()
        seconds.setdefault(what, []).append(time.perf_counter() - start)

    for _ in range(arguments.rounds):
        for fsync in (True, False):
            options = dtckpt.SaveOptions(fsync=fsync)
            writer = dcp.FileSystemWriter(folder / "dcp", sync_files=fsync)
            label = "save, fsync" if fsync else "save"
            timed(f"{label}|dtckpt", lambda options=options: dtckpt.save(folder / "ours", ours, options=options))
            timed(f"{label}|dcp", lambda writer=writer: dcp.save(theirs, storage_writer=writer))
            timed("restore, same layout|dtckpt", lambda: dtckpt.restore(folder / "ours", our_same))
            timed("restore, same layout|dcp", lambda: dcp.load(their_same, checkpoint_id=folder / "dcp"))
            timed("restore, other layout|dtckpt", lambda: dtckpt.restore(folder / "ours", our_other))
            timed("restore, other layout|dcp", lambda: dcp.load(their_other, checkpoint_id=folder / "dcp"))
            dist.barrier()
            if rank == 0:
                for name in ("ours", "dcp"):
                    shutil.rmtree(folder / name)
            dist.barrier()
    if rank == 0:
        table = Table(title=f"{arguments.tensors} tensors, {arguments.mib} MiB, {size} clients, {os.cpu_count()} cores")
        for column in ("work", "dtckpt s", "DCP s", "DCP / dtckpt"):
            table.add_column(column)
        for what in dict.fromkeys(key.split("|")[0] for key in seconds):
            mine, peer = (statistics.median(seconds[f"{what}|{who}"]) for who in ("dtckpt", "dcp"))
            table.add_row(what, f"{mine:.3f}", f"{peer:.3f}", f"{peer / mine:.2f}")
        Console(width=100).print(table)
        shutil.rmtree(folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
