"""Live versions: a trainer with FSDP2 on two processes publishes, other jobs take the version onto their mesh.

Run: ``python -m benchmarks.live [--mib 1024] [--layers 8] [--rounds 5] [--fan-out-mib 128] [--torchstore FOLDERS]``.
The model is bfloat16. Each job is a set of processes, with a coordinator beside them; all are on one machine.

* times: `publish` until the version is readable, and the read until every process has verified it, beside the target
  and in place. Beside them: a plain copy of the same bytes into files in memory, and one from there; ``full_tensor()``
  with a broadcast; DCP's save and load through ``/dev/shm``; torchstore's shared memory, if ``--torchstore``
  names the folders that have it and torchmonarch. These rivals verify no byte.
* bytes: received of the least that is possible; with 1 % of the elements changed, and with the adapter changed alone;
  the copies that the trainer sends to eight hosts that serve the version on.
* cost: the time that `publish` blocks beside a plain copy, and training steps with and without. Eight readers take the
  version from memory, and from files with the page cache dropped (by root; else that is left out).
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.coordinator import coordinator
from benchmarks.live_jobs import EVERY, Crew, Gatherer, Reader, Trainer
from benchmarks.results import show

MESHES: dict[str, tuple[int, ...]] = {"TP on 2": (2,), "2 x 2": (2, 2)}
NUM_HOSTS = 8
WARM_ROUNDS = 2
DROP_CACHES = Path("/proc/sys/vm/drop_caches")
TORCHSTORE = Path(__file__).with_name("live_torchstore.py")
LARGE, SMALL = "large", "small"
"""The feeds."""
Seconds = dict[str, list[float]]


def median(seconds: Seconds, *names: str) -> float | None:
    """Return the sum of the medians; None if one was not measured."""
    if not all(seconds.get(name) for name in names):
        return None
    return sum(statistics.median(seconds[name]) for name in names)


def text(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:.3f}"


def ratio(one: float | None, other: float | None) -> str:
    return "" if one is None or other is None else f"{one / other:.3g}"


class Benchmark:
    """All jobs of one run.

    Args:
        arguments: Of the command.
        address: The coordinator.
        memory: A folder below ``/dev/shm``.
        files: A folder on a disk.
    """

    def __init__(self, arguments: argparse.Namespace, address: str, memory: Path, files: Path) -> None:
        self.arguments, self.address, self.memory, self.files = arguments, address, memory, files
        self.times = Table(
            "onto", "publish s", "fetch s", "apply s", "in place s", "map and copy s", "ratio", "broadcast s",
            "broadcast / dtckpt", "DCP s", "DCP / dtckpt", "torchstore s", "torchstore / dtckpt",
            title=f"{arguments.mib} MiB, FSDP2 on 2, {os.cpu_count()} cores, median of {arguments.rounds}",
        )  # fmt: skip
        self.bytes = Table(
            "bytes", "received MiB", "of MiB", "ratio", "wanted", title="Bytes, over all processes of the readers"
        )
        self.costs = Table("cost", "s", "beside", "its s", "ratio", "wanted", title="Cost, and a cold start")

    @contextmanager
    def crew(self, member: type, size: int, job: str, *arguments: Any, host: str | None = None) -> Iterator[Crew]:
        crew = Crew(member, size, job, self.address, *arguments, host=host)
        try:
            crew.answers()
            yield crew
        finally:
            crew.close()

    def run(self) -> list[Table]:
        mib, layers = self.arguments.mib, self.arguments.layers
        with self.crew(Trainer, 2, "trainer", LARGE, mib, layers, str(self.memory / LARGE), host="here") as trainer:
            for name, mesh in MESHES.items():
                self.measure_mesh(trainer, name, mesh)
            self.measure_changes(trainer)
            self.measure_cost(trainer)
        mib = min(mib, self.arguments.fan_out_mib)
        with self.crew(
            Trainer, 2, "small-trainer", SMALL, mib, layers, str(self.memory / SMALL), host="trainer"
        ) as trainer:
            self.measure_eight(trainer, mib)
        return [self.times, self.bytes, self.costs]

    def _reader(self, name: str, mesh: tuple[int, ...], *, feed: str, mib: int, host: str, **options: Any) -> Any:
        facts = feed, mib, self.arguments.layers, mesh, str(self.memory / feed), options
        return self.crew(Reader, math.prod(mesh), name, *facts, host=host)

    def measure_mesh(self, trainer: Crew, name: str, mesh: tuple[int, ...]) -> None:
        """Measure times and bytes of readers on a mesh; all take turns."""
        mib, layers, rounds = self.arguments.mib, self.arguments.layers, self.arguments.rounds
        seconds: Seconds = {}
        job, size = f"engine-{'x'.join(map(str, mesh))}", math.prod(mesh)
        folder = str(self.memory / "dcp")
        with (
            self._reader(job, mesh, feed=LARGE, mib=mib, host="here") as reader,
            self.crew(Gatherer, 2 + size, f"{job}-gather", mib, layers, mesh) as gatherer,
        ):
            for number in range(rounds + WARM_ROUNDS):
                if number == WARM_ROUNDS:
                    seconds = {}

                def note(what: str, found: float) -> None:
                    seconds.setdefault(what, []).append(found)  # noqa: B023  of this round

                for in_place in (False, True):
                    trainer.call("change", "all")
                    note("publish", max(readable for _, readable in trainer.call("publish")))
                    read, apply = map(max, zip(*reader.call("read", in_place), strict=True))
                    note("in place" if in_place else "fetch", read)
                    if not in_place:
                        note("apply", apply)
                note("write", max(trainer.call("write_mapped")))
                note("read", max(reader.call("read_mapped")))
                note("broadcast", max(gatherer.call("run")))
                note("DCP save", max(trainer.call("save_dcp", folder)))
                note("DCP load", max(reader.call("load_dcp", folder)))
            trainer.call("change", "all")
            trainer.call("publish")
            reader.call("read", False)
            (version,) = {*trainer.call("current_version")}
            assert all(reader.call("is_version", version)), "the readers have other weights than the trainer"
            received, least = map(sum, zip(*reader.call("nbytes"), strict=True))
        shutil.rmtree(folder, ignore_errors=True)
        self._note_bytes(f"all changed, onto {name}", received, least, "1")
        self._note_times(name, mesh, seconds)

    def _note_times(self, name: str, mesh: tuple[int, ...], seconds: Seconds) -> None:
        plain, publish = median(seconds, "write", "read"), median(seconds, "publish")
        reads = [median(seconds, "fetch"), median(seconds, "in place")]
        assert publish is not None
        ours = publish + max(read for read in reads if read is not None)
        peers = median(seconds, "broadcast"), median(seconds, "DCP save", "DCP load"), self.torchstore(mesh)
        cells = [
            text(publish),
            text(reads[0]),
            text(median(seconds, "apply")),
            text(reads[1]),
            text(plain),
            ratio(ours, plain),
        ]
        for peer in peers:
            cells += [text(peer), ratio(peer, ours)]
        self.times.add_row(name, *cells)

    def _note_bytes(self, what: str, received: float, least: float, wanted: str) -> None:
        mib = float(1 << 20)
        self.bytes.add_row(what, f"{received / mib:.2f}", f"{least / mib:.2f}", ratio(received, least), f"<= {wanted}")

    def torchstore(self, mesh: tuple[int, ...]) -> float | None:
        """Return the seconds of torchstore's put and get through shared memory; None if it is not there."""
        folders, sizes = self.arguments.torchstore, (self.arguments.mib, self.arguments.layers, self.arguments.rounds)
        if not folders or len(mesh) > 1:
            return None
        words = [sys.executable, str(TORCHSTORE), *map(str, sizes)]
        environment = {**os.environ, "PYTHONPATH": folders, "OMP_NUM_THREADS": "1"}
        # It aborts at its exit, after its results.
        found = subprocess.run(
            words,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            timeout=600,
            check=False,
            env=environment,
        ).stdout
        lines = [line for line in found.splitlines() if line.startswith("seconds ")]
        if not lines:
            print("torchstore: no figures", file=sys.stderr)
            return None
        return float(lines[-1].split()[1])

    def measure_changes(self, trainer: Crew) -> None:
        """Count the bytes that travel by HTTP when little has changed."""
        with self._reader("engine-http", (2,), feed=LARGE, mib=self.arguments.mib, host="elsewhere") as reader:
            for _ in range(3):  # boxes are announced, and two versions have their digests
                trainer.call("change", "all")
                trainer.call("publish")
                reader.call("read", False)
            for what, title in (("some", "1 % changed, by HTTP"), ("adapter", "adapter changed, by HTTP")):
                trainer.call("change", what)
                trainer.call("publish")
                reader.call("read", False)
                received, whole = map(sum, zip(*reader.call("nbytes"), strict=True))
                of = whole if what == "some" else sum(reader.call("adapter_nbytes"))
                self._note_bytes(title, received, of, "0.05" if what == "some" else "1")

    def measure_cost(self, trainer: Crew) -> None:
        """Measure what publishing costs the trainer."""
        seconds: Seconds = {"copy": [], "blocks": [], "alone": [], "publishing": []}
        steps = self.arguments.steps
        for number in range(self.arguments.rounds + WARM_ROUNDS):
            found = {
                "copy": max(trainer.call("copy")),
                "blocks": max(blocked for blocked, _ in trainer.call("publish")),
            }
            if number >= WARM_ROUNDS:
                found |= {
                    "alone": max(trainer.call("train", steps, False)),
                    "publishing": max(trainer.call("train", steps, True)),
                }
                for name, value in found.items():
                    seconds[name].append(value)
        self._note_cost("publish blocks", "host copy", median(seconds, "blocks"), median(seconds, "copy"), "<= 1.15")
        both = median(seconds, "publishing"), median(seconds, "alone")
        self._note_cost(f"training, {steps} steps, a publish every {EVERY}", "without", *both, "<= 1.05")

    def _note_cost(self, what: str, beside: str, one: float | None, other: float | None, wanted: str) -> None:
        self.costs.add_row(what, text(one), beside, text(other), ratio(one, other), wanted)

    def measure_eight(self, trainer: Crew, mib: int) -> None:
        """Measure eight jobs of one process: as hosts that serve a version on, and as readers that start cold."""
        with ExitStack() as stack:
            readers = []
            for number in range(NUM_HOSTS):
                options = {"serve": True, "folder": str(self.memory / f"host-{number}"), "address": "127.0.0.1"}
                facts = SMALL, mib, self.arguments.layers, (1,), str(self.memory / SMALL), options
                readers.append(Crew(Reader, 1, f"reader-{number}", self.address, *facts, host=f"host-{number}"))
                stack.callback(readers[-1].close)
            for reader in readers:
                reader.answers()
            self.measure_fan_out(trainer, readers)
            self.measure_cold_start(trainer, readers)

    def measure_fan_out(self, trainer: Crew, hosts: Sequence[Crew]) -> None:
        """Count the bytes that the trainer sends when eight hosts begin together, and serve the version on."""
        trainer.call("publish")
        for host in hosts:
            host.ask("read", True)
        for host in hosts:
            host.answers()
        sent = sum(sum(host.call("nbytes_from", "trainer")) for host in hosts)
        whole = hosts[0].call("nbytes")[0][1]
        self._note_bytes(f"{NUM_HOSTS} hosts, sent by the trainer", sent, whole, "2")

    def measure_cold_start(self, trainer: Crew, readers: Sequence[Crew]) -> None:
        """Measure restores of eight jobs at one time, from memory and from files."""
        if not os.access(DROP_CACHES, os.W_OK):
            print(f"cold starts from files are not measured: {DROP_CACHES} cannot be written", file=sys.stderr)
            return
        path = str(self.files / "checkpoint")
        trainer.call("save", path)
        trainer.call("publish")
        seconds: Seconds = {"live": [], "files": []}
        for reader in readers:
            reader.call("be_on", "trainer")
        for _ in range(self.arguments.rounds):
            for name, location in (("live", f"live://{SMALL}"), ("files", path)):
                os.sync()
                DROP_CACHES.write_text("3")
                for reader in readers:
                    reader.ask("restore", location)
                seconds[name].append(max(found for reader in readers for found in reader.answers()))
        live, files = median(seconds, "live"), median(seconds, "files")
        self._note_cost(f"{NUM_HOSTS} readers, from files", "from memory", files, live, ">= 2")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2 * EVERY, help="of the training, of about half a second each")
    parser.add_argument("--fan-out-mib", type=int, default=128, help="size of the model for eight readers")
    parser.add_argument("--torchstore", metavar="FOLDERS", default=os.environ.get("DTCKPT_TORCHSTORE", ""))
    parser.add_argument("--folder", default=None, help="where files are; default the system's temporary folder")
    arguments = parser.parse_args(argv)
    memory, files = Path(tempfile.mkdtemp(dir="/dev/shm")), Path(tempfile.mkdtemp(dir=arguments.folder))
    try:
        with coordinator(10.0) as server:
            tables = Benchmark(arguments, f"127.0.0.1:{server.port}", memory, files).run()
        show(*tables, width=200)
    finally:
        for folder in (memory, files):
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
