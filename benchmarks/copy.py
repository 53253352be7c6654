"""Copy a checkpoint by ``dtckpt.copy``, beside ``cp -r`` with a sync; sign it, and restore it with and without trust.

Run: ``python -m benchmarks.copy [--gigabytes 2] [--rounds 5] [--folder PATH]``. The works take turns, each into a new
folder. A copy by dtckpt verifies all digests of the source, and reads the copy back.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from rich.table import Table

import dtckpt
from benchmarks.results import show

WANTED = 0.9
"""Least speed of a copy beside ``cp`` with a sync."""
ROWS, COLUMNS = 4096, 4096


def copy_by_cp(source: Path, target: Path) -> None:
    subprocess.run(["cp", "-r", source, target], check=True)
    subprocess.run(["sync", *(file for file in target.rglob("*"))], check=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args(arguments)
    count = max(1, int(options.gigabytes * 2**30 / (ROWS * COLUMNS * 4)))
    tree = {f"layers.{number}.w": torch.rand(ROWS, COLUMNS) for number in range(count)}
    key = Ed25519PrivateKey.generate()
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    trusted = dtckpt.RestoreOptions(
        trusted_keys=[key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)]
    )
    seconds: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        target = Path(folder) / "copy"
        sources = {kind: Path(folder) / kind for kind in ("ocdbt", "zarr")}
        for kind, path in sources.items():
            dtckpt.save(path, tree, options=dtckpt.SaveOptions(kvstore=kind))
        works: dict[str, Callable[[], object]] = {}
        for kind, path in sources.items():
            works[f"cp -r and sync, {kind}"] = lambda path=path: copy_by_cp(path, target)
            works[f"dtckpt.copy, {kind}"] = lambda path=path: dtckpt.copy(path, target)
        works["verify"] = lambda: dtckpt.open_checkpoint(sources["ocdbt"]).verify()
        works["sign"] = lambda: dtckpt.sign(sources["ocdbt"], private)
        works["restore"] = lambda: dtckpt.restore(sources["ocdbt"], tree)
        works["restore with trusted keys"] = lambda: dtckpt.restore(sources["ocdbt"], tree, options=trusted)
        for number in range(options.rounds + 1):
            first = number % len(works)  # no work always comes after the same other work
            for name, work in [*works.items()][first:] + [*works.items()][:first]:
                shutil.rmtree(target, ignore_errors=True)
                if name.endswith("keys") and not (sources["ocdbt"] / "dtckpt.signature").exists():
                    dtckpt.sign(sources["ocdbt"], private)
                start = time.perf_counter()
                work()
                if number:  # the first round warms up
                    seconds.setdefault(name, []).append(time.perf_counter() - start)
    show(_table(works, seconds, count * ROWS * COLUMNS * 4), width=100)


def _table(works: dict[str, Callable[[], object]], seconds: dict[str, list[float]], nbytes: int) -> Table:
    rounds = len(seconds["verify"])
    table = Table(title=f"{nbytes / 2**30:.1f} GiB, {os.cpu_count()} cores, median of {rounds}")
    for column in ("work", "s", "GB/s", "beside cp", "wanted"):
        table.add_column(column, justify="left" if column == "work" else "right")
    for name in works:
        median = statistics.median(seconds[name])
        beside = wanted = ""
        if name.startswith("dtckpt.copy"):
            plain = seconds[name.replace("dtckpt.copy", "cp -r and sync")]
            # Round by round, for a disk is not equally fast all the time.
            ratios = [other / own for other, own in zip(plain, seconds[name], strict=True)]
            beside, wanted = f"{statistics.median(ratios):.2f}", f">= {WANTED}"
        table.add_row(name, f"{median:.2f}", f"{nbytes / median / 1e9:.2f}", beside, wanted)
    return table


if __name__ == "__main__":
    main()
