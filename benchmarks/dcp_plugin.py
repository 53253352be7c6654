"""DCP's functions with dtckpt's writer and reader, DCP's own ones for file systems, and a pair that does nothing.

Same state dict, same processes, in turns, medians. Run:

    torchrun --standalone --nproc-per-node 2 -m benchmarks.dcp_plugin [--tensors 224] [--shape 1024x1024] [--rounds 5]
    torchrun --standalone --nproc-per-node 2 -m benchmarks.dcp_plugin --tensors 4000 --shape 64x64

Each client holds its part of every tensor, as FSDP2 splits it. Both sync files, as DCP does by default, or both do not.
"DCP alone" has a writer and a reader that do nothing: the rest is DCP's planner and its collectives.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from rich.table import Table
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import dtckpt
from benchmarks.results import show
from benchmarks.save_restore import DCP, OURS, Clock, remove
from dtckpt.interop import DtckptStorageReader, DtckptStorageWriter

ALONE = "DCP alone"


class NullWriter(DtckptStorageWriter):
    """Writes nothing."""

    def prepare_local_plan(self, plan: Any) -> Any:
        return plan

    def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
        return plans

    def write_data(self, plan: Any, planner: Any) -> Any:  # noqa: ARG002
        future: Any = torch.futures.Future()
        future.set_result([])
        return future

    def finish(self, metadata: Any, results: Any) -> None:
        pass


class NullReader(dcp.FileSystemReader):
    """Reads the metadata and no data."""

    def read_data(self, plan: Any, planner: Any) -> Any:  # noqa: ARG002
        future: Any = torch.futures.Future()
        future.set_result(None)
        return future


def state_of(
    shape: tuple[int, int], count: int, dim: int, make: Callable[..., torch.Tensor]
) -> dict[str, dict[str, DTensor]]:
    """Return a state dict of DTensors that are split over all clients."""
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    part = [length // size if dim == each else length for each, length in enumerate(shape)]
    return {
        "model": {
            f"layers.{number}.weight": DTensor.from_local(
                make(part), mesh, [Shard(dim)], run_check=False, shape=torch.Size(shape), stride=(shape[1], 1)
            )
            for number in range(count)
        }
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, default=224)
    parser.add_argument("--shape", default="1024x1024", help="of every tensor, float32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", default=None, help="where to work; default the system's temporary folder")
    arguments = parser.parse_args()
    dtckpt.init_process_group("gloo")
    shared = [tempfile.mkdtemp(dir=arguments.folder)]
    dist.broadcast_object_list(shared, src=0)
    folder = Path(shared[0])
    rows, columns = map(int, arguments.shape.split("x"))
    source = state_of((rows, columns), arguments.tensors, 0, torch.randn)
    targets = [state_of((rows, columns), arguments.tensors, dim, torch.zeros) for dim in (0, 1)]
    clock = Clock()
    for number in range(arguments.rounds + 1):
        if number == 1:
            clock = Clock()  # the first round finds no memory ready
        for label, fsync, cached in (
            ("save", False, False),
            ("save, cached plans", False, True),
            ("save, fsync", True, False),
        ):
            time_saves(clock, label, folder, source, fsync=fsync, cached=cached)
        for label, target in zip(("load, same layout", "load, other layout"), targets, strict=True):
            time_loads(clock, label, folder, target, number)
    if dist.get_rank() == 0:
        mib = arguments.tensors * rows * columns * 4 / (1 << 20)
        clients = dist.get_world_size()
        title = (
            f"{arguments.tensors} tensors of {arguments.shape}, {mib:g} MiB, {clients} clients, {os.cpu_count()} cores"
        )
        show(table_of(clock, title), width=200)
        shutil.rmtree(folder)
    dist.destroy_process_group()


def time_saves(clock: Clock, label: str, folder: Path, state: dict[str, Any], *, fsync: bool, cached: bool) -> None:
    """Save with every writer; remove the last checkpoint of a writer before its next save."""
    options = dtckpt.SaveOptions(fsync=fsync)
    writers: dict[str, Callable[[], dcp.StorageWriter]] = {
        OURS: lambda: DtckptStorageWriter(folder / OURS, options=options),
        DCP: lambda: dcp.FileSystemWriter(folder / DCP, sync_files=fsync),
        ALONE: lambda: NullWriter(folder / ALONE),
    }
    for who, writer in writers.items():
        os.sync()
        dist.barrier()
        remove(folder / who)
        planner = planner_of(who, cached=cached)

        def save(writer: Any = writer, planner: Any = planner) -> None:
            dcp.save(state, storage_writer=writer(), planner=planner)

        clock.time(label, who, save)


def planner_of(who: str, *, cached: bool) -> dcp.DefaultSavePlanner:
    """Return a planner whose cache no other writer's saves share: DCP keeps cached plans by the planner's class."""
    kind = type(f"Planner of {who}", (dcp.DefaultSavePlanner,), {})
    return kind(enable_plan_caching=cached)


def time_loads(clock: Clock, label: str, folder: Path, target: dict[str, Any], number: int) -> None:
    """Load with every reader, in another order each round."""
    readers: list[tuple[str, Callable[[], dcp.StorageReader]]] = [
        (OURS, lambda: DtckptStorageReader(folder / OURS)),
        (DCP, lambda: dcp.FileSystemReader(folder / DCP)),
        (ALONE, lambda: NullReader(folder / DCP)),
    ]
    first = number % len(readers)
    for who, reader in readers[first:] + readers[:first]:
        clock.time(label, who, lambda reader=reader: dcp.load(target, storage_reader=reader()))


def table_of(clock: Clock, title: str) -> Table:
    table = Table(title=title)
    columns = [f"{who} s" for who in (OURS, DCP, ALONE)]
    for column in ("work", *columns, f"{DCP} / {OURS}", *(f"{column} CPU" for column in columns)):
        table.add_column(column)
    for what, by_system in clock.seconds.items():
        median = {who: statistics.median(listed) for who, listed in by_system.items()}
        cpu = {who: statistics.median(listed) for who, listed in clock.cpu_seconds[what].items()}
        table.add_row(
            what,
            *(f"{median[who]:.3f}" for who in (OURS, DCP, ALONE)),
            f"{median[DCP] / median[OURS]:.2f}",
            *(f"{cpu[who]:.3f}" for who in (OURS, DCP, ALONE)),
        )
    return table


if __name__ == "__main__":
    main()
