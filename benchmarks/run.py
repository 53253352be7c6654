"""Run the benchmarks, keep their tables as JSON, and write docs/benchmarks.md from them: ``make bench``.

``python -m benchmarks.run [--quick] [--only NAME ...]``: ``--quick`` measures less of everything, in three minutes, and
leaves the page as it is. Figures mean something on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.page import PAGE, RESULTS, write_page
from benchmarks.results import VARIABLE, Result, shown

QUICK = Path("bench-output")
LIMIT_S = 3600
"""A program that takes longer has failed."""


@dataclass(frozen=True)
class Program:
    """A benchmark.

    Args:
        name: Name of its results.
        module: The module of `benchmarks`.
        arguments: Its arguments.
        quick: Further arguments with ``--quick``; None: it is left out then.
        clients: Number of processes of torchrun; 0: it is a plain program.
    """

    name: str
    module: str
    arguments: str = ""
    quick: str | None = ""
    clients: int = 0

    def command(self, *, is_quick: bool) -> list[str]:
        """Return the words that run it."""
        words = self._arguments(is_quick=is_quick).split()
        if self.clients:
            start = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={self.clients}"]
            return [*start, "-m", f"benchmarks.{self.module}", *words]
        return ["-m", f"benchmarks.{self.module}", *words]

    def _arguments(self, *, is_quick: bool) -> str:
        return f"{self.arguments} {self.quick or ''}" if is_quick else self.arguments

    def as_typed(self, *, is_quick: bool) -> str:
        """Return how people call it."""
        start = f"torchrun --standalone --nproc-per-node {self.clients}" if self.clients else "python"
        return f"{start} -m benchmarks.{self.module} {self._arguments(is_quick=is_quick)}".rstrip()


PROGRAMS = (
    Program("limits", "limits", quick="--mib 64 --rounds 2"),
    Program("save_restore", "save_restore", "--tensors 192 --only-dcp", "--tensors 8 --rounds 1", clients=2),
    Program("save_restore_all", "save_restore", quick=None, clients=2),
    Program("cold", "cold", quick="--tensors 4 --rounds 1", clients=2),
    Program("save_restore_small", "save_restore", "--tensors 4000 --shape 64x64", quick=None, clients=2),
    Program("save_restore_fsdp2", "save_restore", "--fsdp2", quick=None, clients=2),
    Program("async_save", "async_save", "--mib 2048", quick="--mib 64 --rounds 1", clients=2),
    Program("save_cost", "save_cost", quick="--mib 64 --rounds 1", clients=2),
    Program("reuse", "reuse", quick="--mib 64 --steps 3 --rounds 1", clients=2),
    Program("object_store", "object_store", quick="--mib 32 --small 100 --rounds 1", clients=1),
    Program("object_store_2", "object_store", quick=None, clients=2),
    Program("dcp_plugin", "dcp_plugin", quick="--tensors 8 --rounds 1", clients=2),
    Program("dcp_plugin_small", "dcp_plugin", "--tensors 4000 --shape 64x64", quick=None, clients=2),
    Program("reshard", "reshard", quick="--gib 0.1 --rounds 1 --only 4x2:2x3"),
    Program("convert", "convert", quick="--gigabytes 0.1 --rounds 1"),
    Program("foreign", "foreign", quick="--tensors 600 --gib 0.05 --rounds 1"),
    Program("tiers", "tiers", "--mib 2048", "--mib 64 --rounds 1", clients=4),
    Program("tiers_simulation", "tiers_simulation", quick="--days 10"),
    Program("live", "live", quick="--mib 16 --fan-out-mib 4 --rounds 1 --steps 10"),
    Program("redistribute_2", "redistribute", quick="--max-mib 2 --rounds 1", clients=2),
    Program("redistribute_4", "redistribute", quick=None, clients=4),
    Program("two_hosts", "two_hosts", quick="--max-mib 0.1"),
    Program("received_bytes", "received_bytes", quick=None),
    Program("local_redistribute", "local_redistribute", quick="--mib 16 --rounds 2"),
    Program("train_step", "train_step", quick="--steps 5", clients=2),
    Program("train_step_grid", "train_step", "--grid", quick=None, clients=4),
    Program("compiled_step", "compiled_step", "--steps 30", quick="--steps 2 --width 16", clients=2),
    Program("dispatch", "dispatch", quick="--rounds 2 --axes 1"),
    Program("local_conversions", "local_conversions", quick=None, clients=2),
    Program("randomness", "randomness", quick="--mib 4 --rounds 2"),
    Program("planning", "planning", quick="--tensors 275 --devices-per-client 8 --rounds 1"),
    Program("manifest", "manifest", quick="--chunks 20000 --rounds 1"),
    Program("compression", "compression", "--steps 10 --mib 48 --rounds 1", quick="--steps 3 --mib 8"),
    Program("copy", "copy", "--gigabytes 0.5 --rounds 3", quick="--gigabytes 0.1 --rounds 1"),
    Program("diff", "diff", "--rounds 3", quick="--gigabytes 0.1 --rounds 1"),
    Program("coordinator", "coordinator", "--rounds 9", quick="--only detection --rounds 1"),
)


def run(program: Program, folder: Path, *, is_quick: bool) -> bool:
    """Run a program; return whether it ended well. Only then its results replace the old results in the folder."""
    kept = folder / f"{program.name}.tables"
    kept.unlink(missing_ok=True)
    words = program.command(is_quick=is_quick)
    environment = {**os.environ, VARIABLE: str(kept.resolve())}
    start = time.monotonic()
    typed = program.as_typed(is_quick=is_quick)
    print(f"--- {program.name}: {typed}", flush=True)
    try:
        code = subprocess.run([sys.executable, *words], env=environment, timeout=LIMIT_S, check=False).returncode
    except subprocess.TimeoutExpired:
        code = 124  # as the command `timeout` says it
    tables = [*shown(kept)]
    kept.unlink(missing_ok=True)
    print(f"--- {program.name}: {time.monotonic() - start:.0f} s, exit code {code}", flush=True)
    if tables and code == 0:
        result = Result(typed, time.strftime("%Y-%m-%d"), machine(), tables)
        (folder / f"{program.name}.json").write_text(result.to_json())
    return code == 0


def machine() -> str:
    """Return the machine in words."""
    return ", ".join(_facts())


def _facts() -> Iterator[str]:
    info = Path("/proc/cpuinfo").read_text()
    if found := re.search(r"model name\s*: (.*)", info):
        yield found[1]
    yield f"{len(os.sched_getaffinity(0))} cores"
    if found := re.search(r"MemTotal:\s*(\d+)", Path("/proc/meminfo").read_text()):
        yield f"{int(found[1]) / 2**20:.0f} GiB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", nargs="+", choices=[program.name for program in PROGRAMS])
    options = parser.parse_args()
    folder = QUICK if options.quick else RESULTS
    folder.mkdir(exist_ok=True)
    chosen = [program for program in PROGRAMS if program.name in (options.only or [each.name for each in PROGRAMS])]
    chosen = [program for program in chosen if not options.quick or program.quick is not None]
    failed = [program.name for program in chosen if not run(program, folder, is_quick=options.quick)]
    page = folder / "benchmarks.md" if options.quick else PAGE
    write_page(folder, page)
    print(f"wrote {page}")
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
