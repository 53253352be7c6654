"""Reshard with ``--max-memory 512MiB``, beside ``cp`` and fsync of the same bytes, and beside PyTorch's DCP.

Run: ``python -m benchmarks.reshard [--gib 4] [--rounds 5] [--folder PATH] [--only 4x2:2x3]``. Works come in turns. Each
work is one new process, or two. Its time begins after its imports; the peak of its memory is measured from there. What
the work before wrote is removed, and synced, just before: the host of a virtual machine takes back memory
that was free for some seconds, and to fill such memory takes longer. Sources are in the page cache.

The last rows are 10 000 small tensors, the same bytes loaded and saved with DCP by one process (which cannot shard them
for another mesh), and the plan of a model of 405B parameters, whose checkpoint is a manifest without data. With
``--only`` one change is measured, in two copies of the bytes at a time; all works take five.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from rich.table import Table

import dtckpt
from benchmarks.convert import copy
from benchmarks.manifest import manifest_of
from benchmarks.planning import transformer
from benchmarks.results import show
from dtckpt import Layout, abstract_mesh, pack
from dtckpt.checkpoint.resharding.reshard import reshard
from dtckpt.checkpoint.resharding.workers import Worker
from dtckpt.checkpoint.saving.plan import TensorSpec, holdings_of, plan_save
from dtckpt.cli.options import return_freed_memory
from dtckpt.format.manifest import MANIFEST_NAME
from dtckpt.storage.tensorstore_setup import tensorstore

MAX_MEMORY = 512 << 20
SHAPES = ((4096, 4096), (11008, 4096), (4096, 11008))
"""Matrices of a layer of Llama 2 7B, here in float32."""
NUM_SMALL = 10_000
LAYOUTS: dict[str, tuple[dict[str, int], list[str]]] = {
    "4x2": ({"data": 4, "x": 2}, ["data", "x"]),
    "2x3": ({"data": 2, "x": 3}, ["data", "x"]),
    "rows": ({"x": 4}, ["x", "unsharded"]),
    "columns": ({"x": 4}, ["unsharded", "x"]),
    "whole": ({"x": 1}, ["unsharded", "unsharded"]),
}
"""Mesh and sharding specs."""
CHANGES = (("4x2", "2x3"), ("rows", "columns"), ("columns", "rows"))
Result = dict[str, float]


def layout_of(name: str) -> Layout:
    axes, specs = LAYOUTS[name]
    return Layout(specs, abstract_mesh(axes))


# --- works, each in a process of its own ----------------------------------------------------------------------------


def run_reshard(source: str, target: str, layout: str, index: int, count: int) -> Result:
    new = layout_of(layout)
    worker = Worker(index, count) if count > 1 else None
    report = reshard(source, target, mesh=new.mesh, layouts={"*": new}, max_memory=MAX_MEMORY, worker=worker)
    return {"read as planned": report.read_nbytes}


def run_dcp(source: str, target: str) -> Result:
    metadata = dcp.FileSystemReader(source).read_metadata().state_dict_metadata
    state = {name: torch.empty(item.size) for name, item in metadata.items()}  # type: ignore[union-attr]
    dcp.load(state, checkpoint_id=source, no_dist=True)
    dcp.save(state, checkpoint_id=target, no_dist=True)
    return {}


WORKS: dict[str, Callable[..., Result]] = {"reshard": run_reshard, "dcp": run_dcp}


def memory(field: str) -> int:
    found = re.search(rf"{field}:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) << 10


def read_nbytes() -> int:
    """Return the bytes that this process has read so far, from the page cache or the disk."""
    return int(Path("/proc/self/io").read_text().split()[1])


def measure(work: str, arguments: Sequence[Any]) -> None:
    """Wait for a line on standard input, do the work, and print its costs."""
    return_freed_memory()
    tensorstore()
    print("ready", flush=True)
    sys.stdin.readline()
    Path("/proc/self/clear_refs").write_text("5")  # the peak is that since now
    before, read = memory("VmRSS"), read_nbytes()
    start = time.perf_counter()
    result = WORKS[work](*arguments)
    seconds = time.perf_counter() - start
    taken = {"s": seconds, "peak": memory("VmHWM") - before, "read": read_nbytes() - read}
    print(json.dumps(result | taken), flush=True)


def measured(target: Path, *works: tuple[str, Sequence[Any]]) -> Result:
    """Run works at the same time, once ``target`` is removed; return the sums, and the time of all."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.reshard", "--measure"]
    pipe = subprocess.PIPE
    processes = [subprocess.Popen([*command, json.dumps(work)], stdin=pipe, stdout=pipe, text=True) for work in works]
    for process in processes:
        assert process.stdout
        assert process.stdout.readline() == "ready\n"
    warm(Path(works[0][1][0]))
    remove(target)
    start = time.perf_counter()
    for process in processes:
        assert process.stdin
        print(file=process.stdin, flush=True)
    found = [json.loads(process.communicate()[0].splitlines()[-1]) for process in processes]
    seconds = time.perf_counter() - start if len(found) > 1 else found[0]["s"]
    return {name: sum(each[name] for each in found) for name in found[0]} | {"s": seconds}


def warm(path: Path) -> None:
    """Read all files once: else the first subject alone would read them from the disk."""
    memory = bytearray(8 << 20)
    for file in path.rglob("*"):
        if file.is_file():
            with open(file, "rb", buffering=0) as opened:
                while opened.readinto(memory):
                    pass


def remove(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
    os.sync()


def copied(source: Path, target: Path) -> Result:
    """Copy and sync; return the seconds."""
    warm(source)
    remove(target)
    seconds, _ = copy(source, target)
    return {"s": seconds}


# --- checkpoints ----------------------------------------------------------------------------------------------------


def make_sources(root: Path, nbytes: int, changes: Sequence[tuple[str, str]], *, with_dcp: bool) -> int:
    """Write the checkpoints to be resharded, and one of DCP; return the bytes of each."""
    state: dict[str, torch.Tensor] = {}
    while (total := sum(tensor.nbytes for tensor in state.values())) < nbytes:
        state[f"layers.{len(state)}.w"] = torch.rand(SHAPES[len(state) % len(SHAPES)])
    dtckpt.save(root / "whole", state)
    if with_dcp:
        dcp.save(state, checkpoint_id=str(root / "dcp"), no_dist=True)
    del state
    for name in {old for old, _ in changes}:
        run_reshard(str(root / "whole"), str(root / name), name, 0, 1)
    shutil.rmtree(root / "whole")
    return total


def make_small(path: Path) -> None:
    """Write 10 000 tensors of 64x64, each in four shards."""
    layout = layout_of("rows")
    whole = torch.rand(NUM_SMALL, 64, 64)
    dtckpt.save(path, {f"layers.{i}.w": pack(list(tensor.chunk(4)), layout) for i, tensor in enumerate(whole)})


def make_large(path: Path) -> int:
    """Write the manifest of a model of 405B parameters; return the number of chunks."""
    mesh = abstract_mesh({"dp": 64, "tp": 8})
    specs = []
    for number, (shape, spec) in enumerate(transformer()):
        layout = Layout(spec, mesh)
        specs.append(
            TensorSpec(f"layers.{number}.w", shape, "bfloat16", "bfloat16", holdings_of(layout, shape), layout)
        )
    plan = plan_save(specs, 16 << 20)
    path.mkdir()
    (path / MANIFEST_NAME).write_bytes(manifest_of(plan).to_bytes())
    return plan.owners.size


def planned(source: Path) -> Result:
    """Return the seconds of a dry run, as a whole process and without its imports."""
    command = "reshard", str(source), f"{source}_new", "--mesh", "dp=32,tp=16", "--dry-run", "--json"
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", "dtckpt", *command], check=True, capture_output=True, text=True)
    seconds = time.perf_counter() - start
    return {"s": seconds, "plan": json.loads(done.stdout.splitlines()[-1])["seconds"]}


# --- the table ------------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--only", help="one change, as 4x2:2x3")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.measure:
        measure(*json.loads(options.measure))
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        root = Path(folder)
        changes = [tuple(options.only.split(":"))] if options.only else list(CHANGES)
        nbytes = make_sources(root, int(options.gib * 2**30), changes, with_dcp=not options.only)
        target = root / "target"

        def worker(old: str, new: str, index: int = 0, count: int = 1) -> tuple[str, Sequence[Any]]:
            return "reshard", (str(root / old), str(target), new, index, count)

        works: dict[str, Callable[[], Result]] = {"cp + fsync": partial(copied, root / changes[0][0], target)}
        for old, new in changes:
            works[f"{old} to {new}"] = partial(measured, target, worker(old, new))
        if not options.only:
            workers = [worker("4x2", "2x3", index, 2) for index in range(2)]
            works["4x2 to 2x3, 2 workers"] = partial(measured, target, *workers)
            works["DCP, load and save"] = partial(measured, target, ("dcp", (str(root / "dcp"), str(target))))
            make_small(root / "small")
            works[f"{NUM_SMALL} small tensors"] = partial(measured, target, worker("small", "columns"))
            chunks = make_large(root / "large")
            works[f"plan {chunks} chunks"] = partial(planned, root / "large")
        results: dict[str, list[Result]] = {name: [] for name in works}
        for _ in range(options.rounds):
            for name, work in works.items():
                results[name].append(work())
        remove(target)
    print_results(results, nbytes, options.rounds)


def print_results(results: dict[str, list[Result]], nbytes: int, rounds: int) -> None:
    middle = {
        name: {field: statistics.median(each[field] for each in found) for field in found[0]}
        for name, found in results.items()
    }
    base, one = middle["cp + fsync"]["s"], middle.get("4x2 to 2x3", {})
    table = Table(title=f"{nbytes / 2**30:.2f} GiB, {os.cpu_count()} cores, median of {rounds}")
    for column in ("work", "s", "of cp", "peak MiB", "read / planned", "bar", "met"):
        table.add_column(column, justify="left" if column in ("work", "bar") else "right")
    for name, found in middle.items():
        speed, peak = base / found["s"], found.get("peak", 0.0)
        bar, is_met = "", None
        if " to " in name:
            bar, is_met = "0.7 of cp, 512 MiB", speed >= 0.7 and peak <= MAX_MEMORY
        if name.endswith("workers"):
            bar, is_met = f"1.6 x one: {one['s'] / found['s']:.2f}", one["s"] / found["s"] >= 1.6
        if name.endswith("small tensors"):
            bar, is_met = "5 s", found["s"] < 5
        if name.startswith("DCP"):
            bar = f"slower: {found['s'] / one['s']:.2f}, 10 x memory: {peak / one['peak']:.1f}"
            is_met = found["s"] > one["s"] and peak > 10 * one["peak"]
        if name.startswith("plan "):
            bar, is_met = f"2 s; without imports {found['plan']:.2f}", found["s"] < 2
        # Each of several workers plans for all.
        is_alone = "read as planned" in found and not name.endswith("workers")
        forecast = f"{found['read'] / found['read as planned']:.3f}" if is_alone else ""
        table.add_row(
            name,
            f"{found['s']:.2f}",
            f"{speed:.2f}" if " to " in name else "",
            f"{peak / 2**20:.0f}" if peak else "",
            forecast,
            bar,
            "" if is_met is None else "yes" if is_met else "no",
        )
    show(table, width=130)


if __name__ == "__main__":
    main()
