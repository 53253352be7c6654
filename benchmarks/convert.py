"""Convert a model of 4 GB from safetensors to dtckpt and back, beside ``cp`` and fsync of the same files.

Run: ``python -m benchmarks.convert [--gigabytes 4] [--rounds 5] [--folder PATH]``. Each conversion is a process of its
own: the peak of its memory is measured from the start of the conversion. Works come in turns, and what one of
them wrote is removed, and synced, before the next one begins.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import safetensors.torch
import torch
from rich.table import Table

from benchmarks.results import show

WANTED = 0.6
"""Of the speed of ``cp`` and fsync."""
WANTED_MIB = 512
HIDDEN, INNER, VOCABULARY = 4096, 11008, 32000
"""Sizes of Llama 2 7B."""
SHARD_NBYTES = 1_000_000_000


def make_model(folder: Path, nbytes: int) -> None:
    """Write layers of a Llama in bfloat16 to safetensors files of a gigabyte, with an index."""
    shapes = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
    layer = 0
    while sum(2 * rows * columns for rows, columns in shapes.values()) < nbytes:
        prefix = f"model.layers.{layer}"
        shapes |= {f"{prefix}.self_attn.{name}_proj.weight": (HIDDEN, HIDDEN) for name in "qkvo"}
        shapes |= {f"{prefix}.mlp.{name}_proj.weight": (INNER, HIDDEN) for name in ("gate", "up")}
        shapes |= {f"{prefix}.mlp.down_proj.weight": (HIDDEN, INNER), f"{prefix}.input_layernorm.weight": (1, HIDDEN)}
        layer += 1
    files: list[dict[str, torch.Tensor]] = [{}]
    for name, shape in shapes.items():
        if sum(each.nbytes for each in files[-1].values()) > SHARD_NBYTES:
            files.append({})
        files[-1][name] = torch.randint(0, 1 << 15, shape, dtype=torch.int16).view(torch.bfloat16)
    weight_map = {}
    for number, tensors in enumerate(files, start=1):
        file = f"model-{number:05}-of-{len(files):05}.safetensors"
        safetensors.torch.save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def copy(source: Path, target: Path) -> tuple[float, float]:
    """Copy and sync; return the seconds."""
    start = time.perf_counter()
    subprocess.run(["cp", "-r", str(source), str(target)], check=True)
    for path in (*target.rglob("*"), target):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    return time.perf_counter() - start, 0.0


_PROGRAM = """
import json, re, sys, time
from dtckpt import convert

def peak_kib():
    return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])

source, target, form = sys.argv[1:]
convert  # imports
before, start = peak_kib(), time.perf_counter()
convert(source, target, to=form, max_shard_size=1_000_000_000)
print(json.dumps([time.perf_counter() - start, (peak_kib() - before) / 1024]))
"""


def convert(source: Path, target: Path, form: str) -> tuple[float, float]:
    """Convert in a new process; return the seconds and the MiB above the start."""
    command = [sys.executable, "-c", _PROGRAM, str(source), str(target), form]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    seconds, peak = json.loads(done.stdout)
    return seconds, peak


def clear(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
    os.sync()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        root = Path(folder)
        model, saved = root / "model", root / "saved"
        model.mkdir()
        make_model(model, int(options.gigabytes * 1e9))
        convert(model, saved, "dtckpt")
        works = {
            "cp + fsync": lambda target: copy(model, target),
            "safetensors to dtckpt": lambda target: convert(model, target, "dtckpt"),
            "dtckpt to safetensors": lambda target: convert(saved, target, "safetensors"),
            "safetensors to safetensors": lambda target: convert(model, target, "safetensors"),
        }
        results: dict[str, list[tuple[float, float]]] = {name: [] for name in works}
        for _ in range(options.rounds):
            for name, work in works.items():
                clear(root / "target")
                results[name].append(work(root / "target"))
        nbytes = sum(file.stat().st_size for file in model.iterdir())
    table = Table(title=f"{nbytes / 1e9:.2f} GB, {os.cpu_count()} cores, median of {options.rounds}")
    for column in ("work", "s", "GB/s", "of cp + fsync", "wanted", "MiB above start", "wanted"):
        table.add_column(column, justify="left" if column == "work" else "right")
    base = statistics.median(seconds for seconds, _ in results["cp + fsync"])
    for name, rounds in results.items():
        seconds, peak = statistics.median(each for each, _ in rounds), max(each for _, each in rounds)
        row = [name, f"{seconds:.2f}", f"{nbytes / seconds / 1e9:.2f}", f"{base / seconds:.2f}"]
        table.add_row(*row, *([str(WANTED), f"{peak:.0f}", str(WANTED_MIB)] if peak else ["", "", ""]))
    show(table, width=110)


if __name__ == "__main__":
    main()
