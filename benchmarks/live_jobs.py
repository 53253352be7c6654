"""The jobs of `benchmarks.live`: processes that do what the benchmark asks, one call at a time.

Every job has a separate process group and place at the coordinator; the benchmark's process only asks.
"""

from __future__ import annotations

import math
import mmap
import multiprocessing
import os
import shutil
import socket
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor import zeros as sharded_zeros

import dtckpt

WAIT_S = 600.0
ADAPTER_ROWS = 64
"""Rows of the adapter, the last layer; the others are square."""
EVERY = 10
"""Of so many training steps one publishes."""


_forks = multiprocessing.get_context("forkserver")
# The modules are imported once, and not by each process.
_forks.set_forkserver_preload(["benchmarks.live_jobs"])


class Crew:
    """The processes of one job. They begin at once; `answers` waits for them.

    Args:
        member: The class whose methods are called; each process has one object.
        size: How many processes.
        job: Name of the job.
        coordinator: ``host:port``.
        arguments: Of the class.
        host: The host that they say they are on.
    """

    def __init__(
        self, member: type, size: int, job: str, coordinator: str, *arguments: Any, host: str | None = None
    ) -> None:
        facts = {
            "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": _free_port(),
            "DTCKPT_JOB": job, "DTCKPT_COORDINATOR": coordinator, **({"DTCKPT_HOST": host} if host else {}),
        }  # fmt: skip
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(size):
            here, there = _forks.Pipe()
            own = {name: str(value) for name, value in {**facts, "RANK": rank, "LOCAL_RANK": rank}.items()}
            process = _forks.Process(target=_serve, args=(there, own, member, arguments), daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    def ask(self, method: str, *arguments: Any) -> None:
        """Let all processes begin a call."""
        for pipe in self._pipes:
            pipe.send((method, arguments))

    def answers(self) -> list[Any]:
        """Return the values of the call, by rank. Raises: RuntimeError: A process failed."""
        found = [pipe.recv() if pipe.poll(WAIT_S) else (False, "it does not answer") for pipe in self._pipes]
        failures = [value for is_well, value in found if not is_well]
        if failures:
            raise RuntimeError("\n".join(failures))
        return [value for _, value in found]

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Make a call in all processes, and return the values."""
        self.ask(method, *arguments)
        return self.answers()

    def close(self) -> None:
        """End the processes."""
        with suppress(OSError, EOFError, RuntimeError):
            for pipe in self._pipes:
                pipe.send(None)
            self.answers()
        for process in self._processes:
            process.kill()


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _serve(pipe: Connection, facts: Mapping[str, str], member: type, arguments: Sequence[Any]) -> None:
    try:
        os.environ.update(facts)
        torch.set_num_threads(1)
        dtckpt.init_process_group("gloo")
        does = member(*arguments)
        pipe.send((True, None))
        while (call := pipe.recv()) is not None:
            method, given = call
            pipe.send((True, getattr(does, method)(*given)))
        does.close()
        pipe.send((True, None))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
    os._exit(0)  # the threads of process groups end late


def seconds_of(work: Callable[[], object]) -> float:
    """Return how long work takes, until the slowest process of the job has done it."""
    dist.barrier()
    start = time.perf_counter()
    work()
    dist.barrier()
    return time.perf_counter() - start


def side_of(mib: int, layers: int) -> int:
    """Return the rows of a layer, so that all layers together have so many MiB in bfloat16."""
    return max(ADAPTER_ROWS, math.isqrt((mib << 20) // (2 * layers)) // ADAPTER_ROWS * ADAPTER_ROWS)


def shapes_of(mib: int, layers: int) -> list[tuple[int, int]]:
    side = side_of(mib, layers)
    return [*[(side, side)] * layers, (ADAPTER_ROWS, side)]


def fill(tensor: DTensor, number: int, version: int) -> None:
    """Fill a client's part of a tensor with bits that tell tensor, element and version."""
    part = tensor.to_local().detach().view(torch.int16)
    part.copy_(_bits(tensor, number, version))


def is_filled(tensor: DTensor, number: int, version: int) -> bool:
    return torch.equal(tensor.to_local().detach().view(torch.int16), _bits(tensor, number, version))


def _bits(tensor: DTensor, number: int, version: int) -> torch.Tensor:
    shape, start = tensor.to_local().shape, [0, 0]
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    for place, placement in zip(coordinate, tensor.placements, strict=True):
        assert isinstance(placement, Shard)
        start[placement.dim] = place * shape[placement.dim]
    rows, columns = (torch.arange(at, at + size, dtype=torch.int32) for at, size in zip(start, shape, strict=True))
    bits = (rows * 31 + 101 * number + 1009 * version)[:, None] + columns * 17
    return bits.to(torch.int16)


class Trainer:
    """A process of a job that trains with FSDP2, and publishes.

    Args:
        feed: Name of the feed.
        mib: Size of the model.
        layers: Its layers.
        memory: A folder for versions, below ``/dev/shm``.
    """

    def __init__(self, feed: str, mib: int, layers: int, memory: str) -> None:
        shapes = shapes_of(mib, layers)
        self.model = nn.Sequential(
            *(nn.Linear(columns, rows, bias=False, dtype=torch.bfloat16) for rows, columns in shapes)
        )
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in self.model:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.parameters: list[DTensor] = [layer.weight for layer in self.model]
        self.parts = [parameter.to_local().detach() for parameter in self.parameters]
        self.ready = [torch.zeros_like(part) for part in self.parts]
        self.version = 0
        self.change("all")
        self.memory = Path(memory)
        self.publisher = dtckpt.Publisher(feed, keep=2, folder=memory, address="127.0.0.1", timeout_s=WAIT_S)
        self.matrix = torch.randn(1000, 1000)
        self._files: list[np.ndarray[Any, Any]] = []

    def change(self, what: str) -> None:
        """Change all elements, 1 % of them, or the adapter."""
        self.version += 1
        for number, (parameter, part) in enumerate(zip(self.parameters, self.parts, strict=True)):
            if what == "all" or (what == "adapter" and number == len(self.parts) - 1):
                fill(parameter, number, self.version)
            elif what == "some":
                generator = torch.Generator().manual_seed(1000 * self.version + 10 * number + dist.get_rank())
                bits = part.view(torch.int16)
                bits[torch.rand(bits.shape, generator=generator) < 0.01] += 1

    def publish(self, wait: bool = True) -> tuple[float, float]:
        """Publish; return the seconds that the call takes, and the seconds until the version is readable."""
        dist.barrier()
        start = time.perf_counter()
        handle = self.publisher.publish({"model": self.model}, step=self.version)
        blocked = time.perf_counter() - start
        if wait:
            handle.result()
        return blocked, time.perf_counter() - start

    def copy(self) -> float:
        """Return the seconds of a copy of the parts to ready memory."""

        def copy() -> None:
            for target, source in zip(self.ready, self.parts, strict=True):
                target.copy_(source)

        return seconds_of(copy)

    def write_mapped(self) -> float:
        """Return the seconds of a copy to files in memory, which are mapped and ready."""
        if not self._files:
            for number, part in enumerate(self.parts):
                self._files.append(_mapped(self.memory / f"plain-{dist.get_rank()}-{number}", part.nbytes))

        def write() -> None:
            for file, part in zip(self._files, self.parts, strict=True):
                np.copyto(file, part.view(torch.uint8).reshape(-1).numpy())

        return seconds_of(write)

    def save_dcp(self, folder: str) -> float:
        """Return the seconds of DCP's save to files in memory."""
        if dist.get_rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)
        return seconds_of(lambda: dcp.save(self.model.state_dict(), checkpoint_id=folder))

    def train(self, steps: int, publishes: bool) -> float:
        """Return the seconds of training steps, each of which takes about half a second."""

        def run() -> None:
            for step in range(steps):
                for _ in range(20):
                    self.matrix @ self.matrix
                dist.barrier()
                if publishes and step % EVERY == 0:
                    self.publish(wait=False)

        return seconds_of(run)

    def save(self, path: str) -> None:
        """Save to files."""
        dtckpt.save(path, {"model": self.model}, options=dtckpt.SaveOptions(fsync=True))

    def current_version(self) -> int:
        """Return the number of the last change."""
        return self.version

    def close(self) -> None:
        self.publisher.close(has_failed=True)


class Reader:
    """A process of a job that reads: each layer is split over all processes.

    Args:
        feed: Name of the feed.
        mib: Size of the model.
        layers: Its layers.
        mesh: Shape of the mesh: a layer is split along its rows or its columns, in turns; on two axes, along both.
        memory: The folder of the trainer's versions.
        options: Of the subscriber.
    """

    def __init__(
        self, feed: str, mib: int, layers: int, mesh: tuple[int, ...], memory: str, options: dict[str, Any]
    ) -> None:
        devices = init_device_mesh("cpu", mesh)
        self.tensors = {
            f"{number}.weight": sharded_zeros(
                shape,
                dtype=torch.bfloat16,
                device_mesh=devices,
                placements=[Shard(0), Shard(1)] if len(mesh) > 1 else [Shard(number % 2)],
            )
            for number, shape in enumerate(shapes_of(mib, layers))
        }
        self.target: dict[str, Any] = {"model": self.tensors}
        self.parts = [tensor.to_local() for tensor in self.tensors.values()]
        self.memory, self._files = Path(memory), list[np.ndarray[Any, Any]]()
        self.subscriber = dtckpt.Subscriber(feed, self.target, timeout_s=WAIT_S, **options)

    def read(self, in_place: bool) -> tuple[float, float]:
        """Take the newest version; return the seconds of the reads, on the slowest process, and of `apply`."""
        if in_place:
            return seconds_of(lambda: self.subscriber.update(in_place=True, timeout_s=WAIT_S)), 0.0
        staged: list[dtckpt.StagedVersion] = []
        fetched = seconds_of(lambda: staged.append(self.subscriber.fetch(timeout_s=WAIT_S)))
        return fetched, seconds_of(staged[0].apply)

    def is_version(self, version: int) -> bool:
        """Whether the target has a version, all of whose elements changed."""
        return all(is_filled(tensor, number, version) for number, tensor in enumerate(self.tensors.values()))

    def nbytes(self) -> tuple[int, int]:
        """Return the bytes that came, and the bytes of the target."""
        report = self.subscriber.report
        assert report is not None
        return report.nbytes_received, sum(part.nbytes for part in self.parts)

    def be_on(self, host: str) -> None:
        """Say from now on that this is another host."""
        os.environ["DTCKPT_HOST"] = host

    def nbytes_from(self, host: str) -> int:
        """Return the bytes that came from a host, to be served on or not."""
        report = self.subscriber.report
        assert report is not None
        return report.nbytes_pulled_by_host.get(host, 0) + report.nbytes_by_host.get(host, 0)

    def adapter_nbytes(self) -> int:
        return self.parts[-1].nbytes

    def read_mapped(self) -> float:
        """Return the seconds in which as many bytes are copied from the trainer's plain files, mapped."""
        if not self._files:
            self._files = [_mapped(path, path.stat().st_size) for path in sorted(self.memory.glob("plain-*"))]
        own = [part.view(torch.uint8).reshape(-1).numpy() for part in self.parts]

        def read() -> None:
            files, at = iter(self._files), 0
            file = next(files)
            for part in own:
                done = 0
                while done < part.size:
                    if at == file.size:
                        file, at = next(files), 0
                    count = min(part.size - done, file.size - at)
                    np.copyto(part[done : done + count], file[at : at + count])
                    done, at = done + count, at + count

        return seconds_of(read)

    def load_dcp(self, folder: str) -> float:
        """Return the seconds of DCP's load."""
        return seconds_of(lambda: dcp.load(dict(self.tensors), checkpoint_id=folder))

    def restore(self, path: str) -> float:
        """Return the seconds of a restore."""
        return seconds_of(lambda: dtckpt.restore(path, self.target))

    def close(self) -> None:
        self.subscriber.close()


class Gatherer:
    """A process of a trainer and of its readers, in one group: `full_tensor`, a broadcast, and a cut.

    Args:
        mib: Size of the model.
        layers: Its layers.
        mesh: Shape of the readers' mesh.
    """

    def __init__(self, mib: int, layers: int, mesh: tuple[int, ...]) -> None:
        self.rank, self.mesh = dist.get_rank(), mesh
        readers = [2 + each for each in range(math.prod(mesh))]
        self.wire = dist.new_group([0, *readers])
        trainers = dist.new_group([0, 1])
        self.shapes = shapes_of(mib, layers)
        if self.rank < 2:
            pair = DeviceMesh.from_group(trainers, "cpu")
            self.tensors = [
                DTensor.from_local(
                    torch.zeros(rows // 2, columns, dtype=torch.bfloat16), pair, [Shard(0)], run_check=False
                )
                for rows, columns in self.shapes
            ]
        else:
            self.buffers = {shape: torch.zeros(shape, dtype=torch.bfloat16) for shape in self.shapes}
            self.own = [
                torch.zeros_like(self._cut(self.buffers[shape], number)) for number, shape in enumerate(self.shapes)
            ]

    def _cut(self, whole: torch.Tensor, number: int) -> torch.Tensor:
        place = self.rank - 2
        if len(self.mesh) > 1:
            row, column = divmod(place, self.mesh[1])
            return whole.chunk(self.mesh[0])[row].chunk(self.mesh[1], dim=1)[column]
        return whole.chunk(self.mesh[0], dim=number % 2)[place]

    def run(self) -> float:
        """Return the seconds until the readers have their parts."""

        def run() -> None:
            for number, shape in enumerate(self.shapes):
                whole = self.tensors[number].full_tensor() if self.rank < 2 else self.buffers[shape]
                if self.rank != 1:
                    dist.broadcast(whole, 0, group=self.wire)
                if self.rank >= 2:
                    self.own[number].copy_(self._cut(whole, number))

        return seconds_of(run)

    def close(self) -> None:
        dist.destroy_process_group()


def _mapped(path: Path, nbytes: int) -> np.ndarray[Any, Any]:
    """Return the bytes of a file in memory, which is made if it is not there, with all its pages."""
    path.touch()
    with path.open("r+b") as file:
        os.posix_fallocate(file.fileno(), 0, nbytes)
        found = mmap.mmap(file.fileno(), nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    return np.frombuffer(found, np.uint8)
