"""Open checkpoints of trainers: ``dtckpt inspect`` of 10 000 tensors in each format, and ZeRO 3 to another mesh.

Run: ``python -m benchmarks.foreign [--tensors 10000] [--gib 4] [--rounds 5] [--folder PATH] [--deepspeed PYTHON]``.

The program makes the files without the trainers: DeepSpeed's files by DeepSpeed's rules, the others by ``dtckpt
convert``. From the time of ``inspect`` it subtracts the time of ``dtckpt inspect --help``. It rewrites the ZeRO 3
checkpoint of 8 ranks for a mesh of 2x2, beside ``cp`` and fsync of the same files. Each measured call runs in a new
process, and its memory counts from the end of the imports. With a Python that has DeepSpeed, the program also measures
``zero_to_fp32`` and ``ds_to_universal``.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from rich.table import Table

import dtckpt
from benchmarks.convert import clear, copy
from benchmarks.results import show
from dtckpt.storage.tensorstore_setup import tensorstore

WANTED_S = 1.0
WANTED_OF_CP = 0.6
WANTED_MIB = 512
RANKS = 8
KINDS = ("fp32", "exp_avg", "exp_avg_sq")
SMALL = (64, 64)
LARGE = ((4096, 4096), (11008, 4096), (4096, 11008), (4096,))
"""Parameters of a layer of Llama 2 7B."""
MODEL, OPTIMIZER = "mp_rank_00_model_states.pt", "zero_pp_rank_{}_mp_rank_00_optim_states.pt"
Shapes = Mapping[str, tuple[int, ...]]


# --- DeepSpeed --------------------------------------------------------------------------------------------------------


def model_file(shapes: Shapes, *, is_cut: bool) -> dict[str, Any]:
    """Return the content of a model file; with ZeRO 3 its parameters are empty."""
    return {
        "module": {name: torch.empty(0 if is_cut else shape, dtype=torch.bfloat16) for name, shape in shapes.items()},
        "buffer_names": [],
        "optimizer": None,
        "param_shapes": [{name: torch.Size(shape) for name, shape in shapes.items()}],
        "frozen_param_shapes": None,
        "frozen_param_fragments": None,
        "shared_params": {},
        "dp_world_size": RANKS,
        "mp_world_size": 1,
        "global_steps": 7,
        "ds_version": "0.19.8",
        "ds_config": {},
    }


def vectors(numel: int) -> dict[str, torch.Tensor]:
    """Return the vectors of a group of one process, by kind."""
    return {kind: torch.rand(numel) for kind in KINDS}


def write_zero_3(run: Path, shapes: Shapes) -> Path:
    folder = run / "global_step7"
    folder.mkdir(parents=True)
    (run / "latest").write_text(folder.name)
    numel = sum(-(-math.prod(shape) // RANKS) for shape in shapes.values())
    for rank in range(RANKS):
        torch.save(model_file(shapes, is_cut=True), folder / f"zero_pp_rank_{rank}_{MODEL}")
        state = vectors(numel)
        fp32 = state.pop("fp32")
        base = {"state": {0: state | {"step": 7}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
        optimizer = {
            "zero_stage": 3,
            "partition_count": RANKS,
            "optimizer_state_dict": base,
            "fp32_flat_groups": [fp32],
        }
        torch.save({"optimizer_state_dict": optimizer, "ds_config": {}}, folder / OPTIMIZER.format(rank))
    return run


def write_zero_2(run: Path, shapes: Shapes) -> Path:
    run.mkdir(parents=True)
    torch.save(model_file(shapes, is_cut=False), run / MODEL)
    size = -(-sum(map(math.prod, shapes.values())) // (2 * RANKS)) * 2
    for rank in range(RANKS):
        state = vectors(size)
        fp32 = state.pop("fp32")
        optimizer = {
            "zero_stage": 2,
            "partition_count": [RANKS],
            "base_optimizer_state": {"state": {0: state | {"step": 7}}, "param_groups": [{"lr": 0.1, "params": [0]}]},
            "single_partition_of_fp32_groups": [fp32],
        }
        torch.save({"optimizer_state_dict": optimizer}, run / OPTIMIZER.format(rank))
    return run


def write_universal(run: Path, shapes: Shapes) -> Path:
    for name, shape in shapes.items():
        folder = run / "zero" / name
        folder.mkdir(parents=True)
        for kind in KINDS:
            torch.save({"param": torch.rand(shape), "cat_dim": 0}, folder / f"{kind}.pt")
    torch.save(model_file(shapes, is_cut=False), run / MODEL)
    torch.save({"optimizer_state_dict": {"param_groups": []}}, run / "zero/optimizer_state.pt")
    return run


# --- others -----------------------------------------------------------------------------------------------------------


def write_megatron(path: Path, source: Path) -> Path:
    dtckpt.convert(source, path, to="dcp")
    (path / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    torch.save({"iteration": 7, "checkpoint_version": 3.0}, path / "common.pt")
    return path


def write_megatron_zarr(path: Path, source: Path) -> Path:
    """Write arrays of Zarr v2, of two chunks each."""
    path.mkdir()
    rows, columns = SMALL
    document = {
        "zarr_format": 2,
        "shape": SMALL,
        "chunks": [rows // 2, columns],
        "dtype": "<f4",
        "order": "C",
        "compressor": None,
        "filters": None,
        "fill_value": None,
    }
    with dtckpt.open_checkpoint(source) as checkpoint:
        for name in checkpoint.tensors:
            elements = checkpoint.read(name).numpy().tobytes()
            (path / name).mkdir()
            (path / name / ".zarray").write_text(json.dumps(document))
            (path / name / "0.0").write_bytes(elements[: len(elements) // 2])
            (path / name / "1.0").write_bytes(elements[len(elements) // 2 :])
    (path / "metadata.json").write_text('{"sharded_backend": "zarr", "sharded_backend_version": 1}')
    torch.save({"iteration": 7}, path / "common.pt")
    return path


def write_orbax_database(path: Path, plain: Path) -> Path:
    """Write the plain files of an Orbax checkpoint as one OCDBT database."""
    ts = tensorstore()
    path.mkdir()
    metadata = json.loads((plain / "_METADATA").read_text()) | {"use_ocdbt": True}
    (path / "_METADATA").write_text(json.dumps(metadata))
    store = ts.KvStore.open({"driver": "ocdbt", "base": f"file://{path}/"}).result()
    with ts.Transaction() as transaction:
        for file in plain.rglob("*"):
            if file.is_file() and file.parent != plain:
                store.with_transaction(transaction)[str(file.relative_to(plain))] = file.read_bytes()
    return path


def write_all(root: Path, count: int) -> dict[str, Path]:
    """Write a checkpoint of about so many tensors in each format; return their paths."""
    names = [f"layers.{number}.w" for number in range(count)]
    source = root / "source.safetensors"
    safetensors.torch.save_file({name: torch.rand(SMALL) for name in names}, source)
    shapes = dict.fromkeys(names[: count // len(KINDS)], SMALL)
    for form in ("orbax", "tensorflow", "torch"):
        dtckpt.convert(source, root / (f"{form}.pt" if form == "torch" else form), to=form)
    return {
        "safetensors": source,
        "torch": root / "torch.pt",
        "Megatron torch_dist": write_megatron(root / "megatron", source),
        "Megatron zarr": write_megatron_zarr(root / "megatron_zarr", source),
        "DeepSpeed ZeRO 2": write_zero_2(root / "zero_2", shapes),
        "DeepSpeed ZeRO 3": write_zero_3(root / "zero_3", shapes),
        "DeepSpeed universal": write_universal(root / "universal", shapes),
        "Orbax, plain files": root / "orbax",
        "Orbax, OCDBT": write_orbax_database(root / "orbax_database", root / "orbax"),
        "TensorFlow": root / "tensorflow" / "ckpt",
    }


def seconds_of(*arguments: str) -> float:
    """Run a command of dtckpt; return its seconds."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-m", "dtckpt", *arguments], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def inspect_all(paths: Mapping[str, Path], rounds: int) -> Table:
    table = Table(title=f"dtckpt inspect, median of {rounds}, {os.cpu_count()} cores")
    for column in ("format", "tensors", "s", "above bare start, s", "wanted"):
        table.add_column(column, justify="left" if column == "format" else "right")
    works: dict[str, tuple[str, ...]] = {"bare start": ("inspect", "--help")}
    works |= {name: ("inspect", str(path)) for name, path in paths.items()}
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, arguments in works.items():
            seconds[name].append(seconds_of(*arguments))
    bare = statistics.median(seconds["bare start"])
    for name, path in paths.items():
        with dtckpt.open_checkpoint(path) as checkpoint:
            count = len(checkpoint.tensors)
        took = statistics.median(seconds[name])
        table.add_row(name, str(count), f"{took:.2f}", f"{took - bare:.2f}", str(WANTED_S))
    return table


# --- ZeRO 3 to another mesh -------------------------------------------------------------------------------------------

_PEAK = """
import json, re, sys, time

def peak_kib():
    return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])

source, target = sys.argv[1:]
{imports}
before, start = peak_kib(), time.perf_counter()
{work}
print(json.dumps([time.perf_counter() - start, (peak_kib() - before) / 1024]))
"""
_RESHARD = _PEAK.format(
    imports="from dtckpt import Layout, abstract_mesh\nfrom dtckpt.checkpoint.resharding.reshard import reshard\n"
    "from dtckpt.cli.options import return_freed_memory\nreturn_freed_memory()",
    work="mesh = abstract_mesh({'data': 2, 'model': 2})\nlayout = Layout(['data', 'model'], mesh)\n"
    "layouts = {'*.w': layout, '*.w/*': layout}\n"
    "reshard(source, target, mesh=mesh, layouts=layouts, max_memory=256 << 20)",
)
_ZERO_TO_FP32 = _PEAK.format(
    imports="from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict as work",
    work="work(source, target)",
)
_TO_UNIVERSAL = _PEAK.format(
    imports="import deepspeed.checkpoint.ds_to_universal as module",
    work="sys.argv[1:] = ['--input_folder', f'{source}/global_step7', '--output_folder', target, "
    "'--inject_missing_state']\nmodule.main(module.parse_arguments())",
)


def measured(python: str, program: str, source: Path, target: Path) -> tuple[float, float]:
    """Run a program in a new process; return its seconds, and the MiB above the start."""
    done = subprocess.run(
        [python, "-c", program, str(source), str(target)], check=True, stdout=subprocess.PIPE, text=True
    )
    seconds, peak = json.loads(done.stdout.splitlines()[-1])
    return seconds, peak


def convert_zero_3(root: Path, gib: float, rounds: int, deepspeed: str | None) -> Table:
    shapes: dict[str, tuple[int, ...]] = {}
    while 4 * len(KINDS) * sum(map(math.prod, shapes.values())) < gib * 2**30:
        number = len(shapes)
        shape = LARGE[number % len(LARGE)]
        scale = 1 if gib >= 1 else 8  # a small checkpoint has the same parameters, smaller
        shapes[f"layers.{number}.{'w' if len(shape) > 1 else 'b'}"] = tuple(size // scale for size in shape)
    source = write_zero_3(root / "source", shapes)
    works: dict[str, Callable[[Path], tuple[float, float]]] = {
        "cp + fsync": lambda target: copy(source, target),
        "dtckpt to 2x2": lambda target: measured(sys.executable, _RESHARD, source, target),
    }
    if deepspeed is not None:
        works |= {
            "zero_to_fp32": lambda target: measured(deepspeed, _ZERO_TO_FP32, source, target),
            "ds_to_universal": lambda target: measured(deepspeed, _TO_UNIVERSAL, source, target),
        }
    results: dict[str, list[tuple[float, float]]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            clear(root / "target")
            results[name].append(work(root / "target"))
    nbytes = sum(file.stat().st_size for file in source.rglob("*") if file.is_file())
    table = Table(title=f"ZeRO 3 of {RANKS} ranks, {nbytes / 2**30:.2f} GiB, median of {rounds}")
    for column in ("work", "s", "of cp + fsync", "wanted", "MiB above start", "wanted MiB"):
        table.add_column(column, justify="left" if column == "work" else "right")
    base = statistics.median(seconds for seconds, _ in results["cp + fsync"])
    for name, each in results.items():
        seconds, peak = statistics.median(took for took, _ in each), max(mib for _, mib in each)
        wanted = (str(WANTED_OF_CP), str(WANTED_MIB)) if name.startswith("dtckpt") else ("", "")
        row = [name, f"{seconds:.2f}", f"{base / seconds:.2f}", wanted[0], f"{peak:.0f}" if peak else "", wanted[1]]
        table.add_row(*row)
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tensors", type=int, default=10_000)
    parser.add_argument("--gib", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--deepspeed", help="a Python with DeepSpeed")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        root = Path(folder)
        tables = []
        if options.tensors:
            (root / "many").mkdir()
            tables.append(inspect_all(write_all(root / "many", options.tensors), options.rounds))
            shutil.rmtree(root / "many")
        if options.gib:
            (root / "zero").mkdir()
            tables.append(convert_zero_3(root / "zero", options.gib, options.rounds, options.deepspeed))
    show(*tables, width=110)
    if options.deepspeed is None:
        print("DeepSpeed's own tools are left out: --deepspeed names a Python that has it")


if __name__ == "__main__":
    main()
