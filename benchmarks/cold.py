"""Reads from the disk: restores, verify, diff, reshard and convert, after the page cache was dropped.

Every restore after a failure is such a read. Before each work, client 0 drops the page cache of the machine (Linux, by
root); without the right to do so there is nothing to measure, and the program says so. Run:

    torchrun --standalone --nproc-per-node 2 -m benchmarks.cold [--tensors 64] [--shape 2048x2048] [--rounds 5]

"Plain" reads one file per client with ``readinto``, into memory that is ready; as many bytes as the client restores.
Verify and diff, by one process, are compared with one process that reads the same files; reshard and convert with one
that copies them, with fsync.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from typing_extensions import override

import dtckpt
from benchmarks.results import show
from benchmarks.save_restore import (
    DCP,
    HAS_SAFETENSORS,
    OURS,
    PLAIN,
    SAFETENSORS,
    Clock,
    State,
    load_safetensors,
    read_plain,
    remove,
    save_safetensors,
    write_plain,
)
from dtckpt.checkpoint.inspecting.compare import plan_comparison
from dtckpt.checkpoint.open import open_checkpoint

DROP_CACHES = Path("/proc/sys/vm/drop_caches")
ZARR, COLUMNS = "zarr", "columns"


class ColdClock(Clock):
    """A clock of works that find nothing in the page cache."""

    @override
    def time(self, what: str, who: str, work: Callable[[], object]) -> None:
        dist.barrier()
        if dist.get_rank() == 0:
            os.sync()  # pages that were not written yet stay
            DROP_CACHES.write_text("3")
        super().time(what, who, work)


def by_first_client(work: Callable[[], object]) -> Callable[[], object]:
    """Return a work that client 0 does, and no other client."""
    return work if dist.get_rank() == 0 else lambda: None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, default=64)
    parser.add_argument("--shape", default="2048x2048", help="of every tensor, float32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", default=None, help="where to work; default the system's temporary folder")
    arguments = parser.parse_args()
    if not os.access(DROP_CACHES, os.W_OK):
        print(f"cold reads are not measured: {DROP_CACHES} cannot be written")
        return
    dtckpt.init_process_group("gloo")
    shared = [tempfile.mkdtemp(dir=arguments.folder)]
    dist.broadcast_object_list(shared, src=0)
    folder = Path(shared[0])
    rows, columns = map(int, arguments.shape.split("x"))
    source = State((rows, columns), 0, torch.randn, arguments.tensors)
    same, other = (State((rows, columns), dim, torch.zeros, arguments.tensors) for dim in (0, 1))
    save(folder, source, other)
    clock = ColdClock()
    for number in range(arguments.rounds + 1):
        if number == 1:
            clock = ColdClock()  # the first round finds no memory ready
        works = [*restores(folder, same, other), *works_of_one_process(folder)]
        first = number % len(works)  # no work always comes after the same other work
        for what, who, work in works[first:] + works[:first]:
            clock.time(what, who, work)
    if dist.get_rank() == 0:
        mib = arguments.tensors * rows * columns * 4 / (1 << 20)
        clock.seconds = {what: clock.seconds[what] for what in dict.fromkeys(what for what, _, _ in works)}
        show(
            clock.table(f"{mib:g} MiB from the disk, {dist.get_world_size()} clients, {os.cpu_count()} cores"),
            width=200,
        )
        shutil.rmtree(folder)
    dist.destroy_process_group()


def save(folder: Path, source: State, other: State) -> None:
    """Write the checkpoints and files that the works read.

    One of the checkpoints has other chunks and no content digests, so that `dtckpt diff` must read the elements.
    """
    dtckpt.save(folder / OURS, source.ours)
    dtckpt.save(folder / ZARR, source.ours, options=dtckpt.SaveOptions(kvstore="zarr"))
    dtckpt.restore(folder / OURS, other.ours)
    dtckpt.save(folder / COLUMNS, other.ours, options=dtckpt.SaveOptions(content_digest=False))
    dcp.save(dict(source.theirs), storage_writer=dcp.FileSystemWriter(folder / DCP))
    write_plain(folder, source.parts, fsync=True)
    if HAS_SAFETENSORS:
        save_safetensors(folder, source.parts, fsync=True)
        if dist.get_rank() == 0:
            dtckpt.convert(folder / OURS, folder / "model.safetensors")
    dist.barrier()


def restores(folder: Path, same: State, other: State) -> list[tuple[str, str, Callable[[], object]]]:
    """Return the restores of all clients: label, library, and the function that restores."""
    works: list[tuple[str, str, Callable[[], object]]] = []
    for what, state in (("restore, same layout", same), ("restore, other layout", other)):
        works += [
            (what, OURS, lambda state=state: dtckpt.restore(folder / OURS, state.ours)),
            (what, DCP, lambda state=state: dcp.load(state.theirs, checkpoint_id=folder / DCP)),
            (what, PLAIN, lambda: read_plain(folder, same.parts)),
        ]
    works.append(("restore, kind zarr", OURS, lambda: dtckpt.restore(folder / ZARR, same.ours)))
    works.append(("restore, kind zarr", PLAIN, lambda: read_plain(folder, same.parts)))
    if HAS_SAFETENSORS:
        what = "restore of safetensors"
        works += [
            (what, OURS, lambda: dtckpt.restore(folder / "model.safetensors", same.ours)),
            (what, SAFETENSORS, lambda: load_safetensors(folder, same.parts)),
            (what, PLAIN, lambda: read_plain(folder, same.parts)),
        ]
    return works


def works_of_one_process(folder: Path) -> list[tuple[str, str, Callable[[], object]]]:
    """Return the works of client 0, each beside a plain read of the bytes that it reads."""

    def verify() -> None:
        with open_checkpoint(folder / OURS) as checkpoint:
            assert checkpoint.verify().is_sound

    def reshard() -> None:
        remove(folder / "resharded")
        dtckpt.reshard(folder / OURS, folder / "resharded", mesh=dtckpt.abstract_mesh({"x": 3}))

    def convert() -> None:
        remove(folder / "converted.safetensors")
        dtckpt.convert(folder / OURS, folder / "converted.safetensors")

    def diff() -> None:
        with open_checkpoint(folder / OURS) as one, open_checkpoint(folder / COLUMNS) as other:
            report = plan_comparison(one, other).run()
            assert report.num_read == report.num_tensors

    def read(*roots: str) -> None:
        buffer = bytearray(1 << 20)
        for path in (path for root in roots for path in (folder / root).rglob("*") if path.is_file()):
            with open(path, "rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass

    def copy() -> None:
        subprocess.run(["cp", "-r", "--reflink=never", folder / OURS, folder / "copy"], check=True)
        subprocess.run(["sync", "-f", folder / "copy"], check=True)
        shutil.rmtree(folder / "copy")

    works: list[tuple[str, str, Callable[[], object]]] = []
    for what, work, plain in (
        ("verify", verify, lambda: read(OURS)),
        ("diff of two checkpoints", diff, lambda: read(OURS, COLUMNS)),
        ("reshard", reshard, copy),
        ("convert to safetensors", convert, copy),
    ):
        works += [(what, OURS, by_first_client(work)), (what, PLAIN, by_first_client(plain))]
    return works


if __name__ == "__main__":
    main()
