"""Read strangers' files with every command, each in a separate process, in bounded memory and time.

    python -m storage.untrusted.hostile_runs --mutations 10000 --bombs 200 [--kinds "zero 3" tensorflow]

runs all, and prints the worst cases. A case fails if a command takes more memory than `allowed_nbytes`, more time than
`allowed_s`, reports an internal error, or ends the process.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import random
import resource
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support import forkserver

from dtckpt.checkpoint.foreign.pickle_syntax import FLOOR_NBYTES, MULTIPLE
from dtckpt.checkpoint.reading.pieces import UNEXPANDED_NBYTES
from dtckpt.cli.exit_codes import ExitCode

PATIENCE_S = 30
PATIENCE_S_PER_MB = 60
"""A hundred thousand tensors have a header of some MB, and to write them takes a minute."""
START_S = 600
"""A process may start for so long on a machine that does other things, too."""
WORK_NBYTES = 256 << 20
"""Memory for a sound checkpoint: for the libraries that a command loads, and for its bound on tensors in memory."""
_BATCH = 25
_SLICE = 100
COMMANDS: dict[str, Callable[[Path, Path, Path], list[str]]] = {
    "inspect": lambda path, sound, new: ["inspect", str(path)],
    "inspect --json": lambda path, sound, new: ["inspect", "--json", str(path)],
    "verify": lambda path, sound, new: ["verify", str(path)],
    "diff": lambda path, sound, new: ["diff", str(path), str(sound)],
    "cat": lambda path, sound, new: ["cat", "--stats", "--max-memory", "64MiB", str(path), "w"],
    "convert": lambda path, sound, new: [
        *("convert", str(path), str(new / "converted.safetensors"), "--max-memory", "64MiB")
    ],
    "reshard": lambda path, sound, new: [
        *("reshard", str(path), str(new / "resharded"), "--mesh", "x=2", "--max-memory", "64MiB")
    ],
    "ls": lambda path, sound, new: ["ls", str(path.parent)],
    "gc": lambda path, sound, new: ["gc", str(path.parent), "--keep", "1"],
}
"""The arguments of each command by its name, given the checkpoint, a sound checkpoint, and a folder for the output."""
NAMES = (*COMMANDS, "restore")


@dataclass(frozen=True, slots=True)
class Run:
    """The result of a command on a case.

    Args:
        case: The number of the case.
        kind: ``bomb`` or ``mutation``.
        path: The end of the checkpoint's path.
        file_nbytes: Bytes of its files.
        command: The command.
        code: Its exit code, or the name of an error that no command may raise.
        seconds: Seconds of the processor.
        grown_nbytes: How much the memory of the process grew meanwhile, at most.
    """

    case: int
    kind: str
    path: str
    file_nbytes: int
    command: str
    code: int | str
    seconds: float
    grown_nbytes: int

    @property
    def is_fine(self) -> bool:
        """Whether it kept all bounds."""
        is_known = isinstance(self.code, int) and self.code != ExitCode.INTERNAL
        is_quick = self.seconds < allowed_s(self.file_nbytes)
        return is_known and is_quick and self.grown_nbytes < allowed_nbytes(self.file_nbytes)


def allowed_nbytes(file_nbytes: int) -> int:
    """Return how much memory a command may take for files of this size: for their objects, and a copy as text."""
    return WORK_NBYTES + UNEXPANDED_NBYTES + 2 * (FLOOR_NBYTES + MULTIPLE * file_nbytes)


def allowed_s(file_nbytes: int) -> float:
    """Return how many seconds of processor time a command may take; by the clock, it may take twice as many."""
    return PATIENCE_S + PATIENCE_S_PER_MB * file_nbytes / 1e6


def run_all(
    folder: Path, kind: str, cases: range, commands: int, seed: int, kinds: Sequence[str] = ()
) -> Iterator[Run]:
    """Run commands on hostile files; yield the result of each.

    Args:
        folder: An empty folder.
        kind: ``bomb`` or ``mutation``.
        cases: Numbers of the cases.
        commands: How many commands read each.
        seed: Decides all cases.
        kinds: Kinds of checkpoints that are mutated; none: all.
    """
    prepare = forkserver.start(_prepare, str(folder))
    prepare.join()
    assert prepare.exitcode == 0
    left = list(cases)
    while left:
        reader, writer = forkserver.Pipe(duplex=False)
        child = forkserver.start(_run_batch, writer, str(folder), kind, left[:_BATCH], commands, seed, kinds)
        writer.close()
        begun: tuple[int, str, int] | None = None
        try:
            while reader.poll(2 * allowed_s(begun[2]) if begun else START_S):
                message = reader.recv()
                if isinstance(message, Run):
                    yield message
                elif isinstance(message, int):
                    left.remove(message)
                else:
                    begun = message
        except EOFError:
            if child.join() or child.exitcode == 0:
                continue
        # It hangs or was killed.
        child.kill()
        child.join()
        assert begun is not None
        yield Run(begun[0], kind, "", begun[2], begun[1], f"ended with {child.exitcode}", 0.0, 0)
        left.remove(begun[0])


def _prepare(folder: str) -> None:
    from . import hostile_files

    for kind in hostile_files.KINDS:
        hostile_files.write_honest(Path(folder, "honest", kind), kind)


def _run_batch(
    writer: Any, folder: str, kind: str, cases: list[int], commands: int, seed: int, kinds: Sequence[str]
) -> None:
    """Run the commands on some cases; send each `Run`, before it what begins, and at last the case."""
    from . import hostile_files

    honest = Path(folder, "honest")
    # Far above every bound, so that only the machine is protected by it.
    resource.setrlimit(resource.RLIMIT_AS, (16 << 30, 16 << 30))
    for case in cases:
        draw = random.Random(f"{seed} {kind} {case}")
        with tempfile.TemporaryDirectory(dir=folder) as name:
            root = Path(name, "root")
            if kind == "bomb":
                path = hostile_files.write_bomb(root, honest, draw)
            else:
                path = hostile_files.write_mutation(root, honest, draw, kinds or hostile_files.KINDS)
            nbytes = sum(file.stat().st_size for file in Path(name, "root").rglob("*") if file.is_file())
            for command in draw.sample(NAMES, min(commands, len(NAMES))):
                writer.send((case, command, nbytes))
                new = Path(name, "new")
                new.mkdir()
                code, seconds, grown = _measured(command, path, honest / "ocdbt" / hostile_files.STEP, new)
                writer.send(Run(case, kind, path.name, nbytes, command, code, seconds, grown))
                shutil.rmtree(new)
        writer.send(case)


def _measured(command: str, path: Path, sound: Path, new: Path) -> tuple[int | str, float, int]:
    """Run a command; return its exit code, the seconds, and the growth of memory."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak is now
    # Of the processor, as the machine may do other things, too; a process that waits for ever is killed from outside.
    before, start = _status_nbytes("VmRSS"), time.process_time()
    code: int | str
    with open(os.devnull, "w") as null, contextlib.redirect_stdout(null), contextlib.redirect_stderr(io.StringIO()):
        try:
            code = _run(command, path, sound, new)
        except BaseException as error:
            code = f"{type(error).__name__}: {error}"[:300]
    return code, time.process_time() - start, _status_nbytes("VmHWM") - before


def _run(command: str, path: Path, sound: Path, new: Path) -> int:
    import dtckpt
    from dtckpt.cli.main import main

    if command != "restore":
        return main(COMMANDS[command](path, sound, new))
    try:
        dtckpt.restore(path)
    except dtckpt.errors.DtckptError:
        return int(ExitCode.FAILED)
    return int(ExitCode.OK)


def _status_nbytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith(name)))


def report(runs: list[Run]) -> str:
    """Return the figures of some runs as text."""
    bad = [run for run in runs if not run.is_fine]
    slowest = sorted(runs, key=lambda run: -run.seconds)[:5]
    largest = sorted(runs, key=lambda run: -run.grown_nbytes / allowed_nbytes(run.file_nbytes))[:5]
    lines = [f"{len(runs)} runs of {len({(run.kind, run.case) for run in runs})} cases, {len(bad)} beyond the bounds"]
    for title, some in (("beyond", bad[:40]), ("slowest", slowest), ("largest", largest)):
        lines += [
            f"{title}: {run.kind} {run.case} {run.path} of {run.file_nbytes} bytes, {run.command}: {run.code}, "
            f"{run.seconds:.2f} s, {run.grown_nbytes >> 20} MiB of {allowed_nbytes(run.file_nbytes) >> 20}"
            for run in some
        ]
    return "\n".join(lines)


def main() -> None:
    """Run as many cases as the arguments say."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mutations", type=int, default=10_000)
    parser.add_argument("--bombs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kinds", nargs="*", default=(), help="mutate only such checkpoints")
    options = parser.parse_args()
    for kind, count, commands in (("bomb", options.bombs, len(NAMES)), ("mutation", options.mutations, 1)):
        for first in range(0, count, _SLICE):
            cases = range(first, min(first + _SLICE, count))
            with tempfile.TemporaryDirectory() as folder:
                print(
                    report(list(run_all(Path(folder), kind, cases, commands, options.seed, options.kinds))), flush=True
                )


if __name__ == "__main__":
    main()
