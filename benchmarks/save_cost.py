"""Processor time that a save takes from training: seconds per GiB of all threads, by kind of work.

Same tensors, same processes, in turns, medians. Run:

    torchrun --standalone --nproc-per-node 2 -m benchmarks.save_cost [--mib 1024] [--tensors 64] [--rounds 5]

All saves are with fsync, and asynchronous ones are measured until they are committed. The kernel's own threads, which
write pages back, belong to no process and are not counted. "System" is what the kernel does for the process: it copies
into the page cache. "Copy" and "digests" are the same work on the same tensors, done alone: copies into memory that is
ready, and both digests of each chunk. "Rest" is the other time in user mode: Python, serialization, further copies.
"""

from __future__ import annotations

import argparse
import functools
import gc
import os
import resource
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from rich.table import Table

import dtckpt
from benchmarks.results import show
from benchmarks.save_restore import State, remove, write_plain
from dtckpt.checkpoint.leaves import host_array
from dtckpt.format.content import content_share
from dtckpt.format.digest import Blocks, digest_chunk
from dtckpt.format.grid import ChunkGrid
from dtckpt.layout.region import Region

SAVE, SAVE_ASYNC, DCP_SAVE, DCP_ASYNC = "dtckpt save", "dtckpt save_async", "DCP save", "DCP async_save"
PLAIN, COPY, DIGESTS = "plain write + fsync", "copy alone", "digests alone"
PEERS = {SAVE: DCP_SAVE, SAVE_ASYNC: DCP_ASYNC}
CHUNK_NBYTES = 16 << 20


@dataclass(frozen=True)
class Cost:
    """What a work costs.

    Args:
        seconds: Until the slowest client has done it.
        user: Processor seconds of all clients in user mode.
        system: In the kernel.
    """

    seconds: float
    user: float
    system: float


def cost_of(work: Callable[[], object]) -> Cost:
    """Do a work on all clients; return its cost."""
    gc.collect()
    os.sync()  # or the save would wait for writes of others
    dist.barrier()
    before, start = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    work()
    after = resource.getrusage(resource.RUSAGE_SELF)
    times = torch.tensor([after.ru_utime - before.ru_utime, after.ru_stime - before.ru_stime], dtype=torch.float64)
    dist.barrier()
    seconds = time.perf_counter() - start
    dist.all_reduce(times)
    return Cost(seconds, *times.tolist())


def digest(state: State) -> None:
    """Digest the client's parts as a save does."""
    for name, part in state.parts.items():
        elements = host_array(part)
        rows = max(1, CHUNK_NBYTES // (elements.nbytes // elements.shape[0]))
        grid = ChunkGrid(elements.shape, (min(rows, elements.shape[0]), elements.shape[1]))
        for number in range(grid.num_chunks):
            index, region = grid.chunk(number)
            chunk = elements[region.slices()]
            digest_chunk(name, index, chunk, Blocks.of(grid, elements.itemsize))
            content_share(chunk, grid.shape, Region(region.offset, chunk.shape))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--tensors", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", default=None, help="where to work; default the system's temporary folder")
    arguments = parser.parse_args()
    dtckpt.init_process_group("gloo")
    shared = [tempfile.mkdtemp(dir=arguments.folder)]
    dist.broadcast_object_list(shared, src=0)
    folder, size = Path(shared[0]), dist.get_world_size()
    rows = max(1, (arguments.mib << 20) // (arguments.tensors * 4096 * size)) * size
    state = State((rows, 1024), 0, torch.randn, arguments.tensors)
    ready = {name: torch.zeros_like(part) for name, part in state.parts.items()}

    def copy() -> None:
        for name, target in ready.items():
            target.copy_(state.parts[name])

    def save_with_dcp(save: Callable[..., Any], name: str) -> Any:
        return save(dict(state.theirs), storage_writer=dcp.FileSystemWriter(folder / name, sync_files=True))

    def save_async_with_dcp() -> None:
        saved = save_with_dcp(dcp.async_save, DCP_ASYNC)
        getattr(saved, "upload_completion", saved).result()

    works: dict[str, Callable[[], object]] = {
        PLAIN: lambda: write_plain(folder, state.parts, fsync=True),
        SAVE: lambda: dtckpt.save(folder / SAVE, state.ours),
        SAVE_ASYNC: lambda: dtckpt.save_async(folder / SAVE_ASYNC, state.ours).result(),
        DCP_SAVE: functools.partial(save_with_dcp, dcp.save, DCP_SAVE),
        DCP_ASYNC: save_async_with_dcp,
        COPY: copy,
        DIGESTS: functools.partial(digest, state),
    }
    costs: dict[str, list[Cost]] = {name: [] for name in works}
    for number in range(arguments.rounds + 1):
        for name, work in works.items():
            # Old files are removed just before new files replace them, so that all saves find as many free pages ready.
            os.sync()
            dist.barrier()
            remove(folder / (f"plain-{dist.get_rank()}" if name == PLAIN else name))
            cost = cost_of(work)
            if number:  # the first round finds no memory ready
                costs[name].append(cost)
    if dist.get_rank() == 0:
        gib = arguments.tensors * rows * 4096 / (1 << 30)
        title = f"{gib:.3g} GiB in {arguments.tensors} tensors, {size} clients, {os.cpu_count()} cores, fsync"
        show(table(title, gib, {name: median(listed) for name, listed in costs.items()}), width=160)
        shutil.rmtree(folder)
    dist.destroy_process_group()


def median(listed: list[Cost]) -> Cost:
    """Return the medians of the parts of costs."""
    return Cost(*(statistics.median(values) for values in zip(*map(astuple, listed), strict=True)))


def table(title: str, gib: float, costs: dict[str, Cost]) -> Table:
    """Return a table of processor seconds per GiB."""
    result = Table(title=title)
    for column in ("work", "s", "CPU s / GiB", "system", "copy", "digests", "rest", "of plain's", "of DCP's"):
        result.add_column(column)
    total = {name: (cost.user + cost.system) / gib for name, cost in costs.items()}
    for name, cost in costs.items():
        copied = total[COPY] if name in (SAVE_ASYNC, DCP_ASYNC, COPY) else 0.0
        digested = total[DIGESTS] if name in (SAVE, SAVE_ASYNC, DIGESTS) else 0.0
        # The parts alone are all there is to them.
        system = 0.0 if name in (COPY, DIGESTS) else cost.system / gib
        parts = system, copied, digested, total[name] - system - copied - digested
        peer = f"{total[name] / total[PEERS[name]]:.2f}" if name in PEERS else ""
        result.add_row(
            name,
            f"{cost.seconds:.3f}",
            f"{total[name]:.3f}",
            *(f"{part:.3f}" for part in parts),
            f"{total[name] / total[PLAIN]:.2f}",
            peer,
        )
    return result


if __name__ == "__main__":
    main()
