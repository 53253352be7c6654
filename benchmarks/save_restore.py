"""Save and restore beside PyTorch's DCP, plain reads and writes, and safetensors and Orbax where they are installed.

Same tensors, same processes, in turns (restores in another order each round), medians. Run:

    torchrun --standalone --nproc-per-node 2 -m benchmarks.save_restore [--tensors 64] [--shape 2048x1024] [--rounds 5]
    torchrun --standalone --nproc-per-node 2 -m benchmarks.save_restore --keep FOLDER
    torchrun --standalone --nproc-per-node 4 -m benchmarks.save_restore --restore FOLDER   (on other clients)
    torchrun --standalone --nproc-per-node 2 -m benchmarks.save_restore --fsdp2 [--rounds 9]

Each client holds its part of every tensor (split along dim 0); the others hold the same parts. "Plain" is one file per
client: written and synced, or read into ready memory; as many bytes as the client has. ``--fsdp2`` compares DTensors of
dtckpt with the state dict of a module that PyTorch's ``fully_shard`` has sharded, and nothing else.
"""

from __future__ import annotations

import argparse
import functools
import gc
import importlib.util
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from rich.table import Table
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor import Placement as TorchPlacement
from torch.distributed.tensor import Shard as TorchShard

import dtckpt
from benchmarks.results import show

OURS, FSDP2, DCP, PLAIN, SAFETENSORS, ORBAX = "dtckpt", "FSDP2", "DCP", "plain", "safetensors", "Orbax"
HAS_SAFETENSORS, HAS_ORBAX = (importlib.util.find_spec(name) is not None for name in ("safetensors", "orbax"))


class State:
    """The tensors of one client, in one layout, as each system holds them.

    Args:
        shape: Global shape of every tensor.
        dim: The dim that is split over the clients.
        make: Gives the elements of a part.
        count: How many tensors.
    """

    def __init__(
        self, shape: tuple[int, int], dim: int, make: Callable[[tuple[int, ...]], torch.Tensor], count: int
    ) -> None:
        size = dist.get_world_size()
        mesh = dtckpt.create_distributed_mesh([("x", size)])
        layout = dtckpt.Layout(["x" if dim == each else dtckpt.UNSHARDED for each in range(2)], mesh)
        (device,) = mesh.local_device_ids()
        part_shape = layout.region(device, shape).shape
        self.parts = {f"t{number}": make(part_shape) for number in range(count)}
        self.ours = {name: dtckpt.pack([part], layout, shape) for name, part in self.parts.items()}
        device_mesh = init_device_mesh("cpu", (size,))
        placements: list[TorchPlacement] = [TorchShard(dim)]
        self.theirs = {
            name: TorchDTensor.from_local(
                part, device_mesh, placements, run_check=False, shape=torch.Size(shape), stride=(shape[1], 1)
            )
            for name, part in self.parts.items()
        }
        self._shape, self._dim = shape, dim

    def fsdp2(self) -> dict[str, Any]:
        """Return the state dict of a module of PyTorch's FSDP2 with copies of the same parts."""
        module = nn.Module()
        for name in self.parts:
            module.register_parameter(name, nn.Parameter(torch.empty(self._shape, device="meta")))
        fully_shard(
            module,
            mesh=init_device_mesh("cpu", (dist.get_world_size(),)),
            shard_placement_fn=lambda _: TorchShard(self._dim),
        )
        module.to_empty(device="cpu")
        state: dict[str, Any] = get_model_state_dict(module)
        for name, tensor in state.items():
            tensor.to_local().copy_(self.parts[name])
        return state


class Clock:
    """Seconds of the slowest client, and processor seconds of all clients, by operation and system."""

    def __init__(self) -> None:
        self.seconds: dict[str, dict[str, list[float]]] = {}
        self.cpu_seconds: dict[str, dict[str, list[float]]] = {}

    def time(self, what: str, who: str, work: Callable[[], object]) -> None:
        gc.collect()
        os.sync()  # or the save would wait for writes of others
        dist.barrier()
        start, cpu_start = time.perf_counter(), time.process_time()
        work()
        cpu = torch.tensor(time.process_time() - cpu_start, dtype=torch.float64)
        dist.barrier()
        self.seconds.setdefault(what, {}).setdefault(who, []).append(time.perf_counter() - start)
        dist.all_reduce(cpu)
        self.cpu_seconds.setdefault(what, {}).setdefault(who, []).append(float(cpu))

    def table(self, title: str) -> Table:
        table = Table(title=title)
        peers = [
            who for who in (FSDP2, DCP, PLAIN, SAFETENSORS, ORBAX) if any(who in each for each in self.seconds.values())
        ]
        units = [f"{who} s" for who in (OURS, *peers)]
        for column in ("work", *units, *(f"{who} / {OURS}" for who in peers), *(f"{unit} CPU" for unit in units)):
            table.add_column(column)
        for what, by_system in self.seconds.items():
            median = {who: statistics.median(listed) for who, listed in by_system.items()}
            seconds = [f"{median[who]:.3f}" if who in median else "" for who in (OURS, *peers)]
            ratios = [f"{median[who] / median[OURS]:.2f}" if who in median else "" for who in peers]
            cpu = {who: f"{statistics.median(listed):.3f}" for who, listed in self.cpu_seconds[what].items()}
            table.add_row(what, *seconds, *ratios, *(cpu.get(who, "") for who in (OURS, *peers)))
        return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, default=64)
    parser.add_argument("--shape", default="2048x1024", help="of every tensor, float32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", default=None, help="where to work; default the system's temporary folder")
    parser.add_argument("--keep", default=None, help="only save, there")
    parser.add_argument("--restore", default=None, help="only restore what was kept there")
    parser.add_argument("--only-dcp", action="store_true", help="beside DCP and plain files, and nobody else")
    parser.add_argument("--fsdp2", action="store_true", help="beside a state dict of FSDP2, and nothing else")
    arguments = parser.parse_args()
    dtckpt.init_process_group("gloo")
    shared = [arguments.keep or arguments.restore or tempfile.mkdtemp(dir=arguments.folder)]
    dist.broadcast_object_list(shared, src=0)
    folder = Path(shared[0])
    folder.mkdir(parents=True, exist_ok=True)
    rows, columns = map(int, arguments.shape.split("x"))
    source = State((rows, columns), 0, torch.randn, arguments.tensors)
    mib = arguments.tensors * rows * columns * 4 / (1 << 20)
    clients = dist.get_world_size()
    title = f"{arguments.tensors} tensors of {arguments.shape}, {mib:g} MiB, {clients} clients, {os.cpu_count()} cores"
    if arguments.fsdp2:
        compare_fsdp2(
            folder, source, State((rows, columns), 1, torch.zeros, arguments.tensors), arguments.rounds, title
        )
        return
    orbax = None if arguments.only_dcp else open_orbax(folder)
    with_safetensors = HAS_SAFETENSORS and not arguments.only_dcp
    arrays = orbax.arrays(source.parts, (rows, columns)) if orbax else None
    same, other = (State((rows, columns), dim, torch.zeros, arguments.tensors) for dim in (0, 1))
    clock = Clock()
    for number in range(arguments.rounds + 1):
        if number == 1:
            clock = Clock()  # the first round finds no memory ready
        if not arguments.restore:
            for fsync in (False, True):
                save_all(clock, folder, source, fsync=fsync, with_safetensors=with_safetensors)
            if orbax:
                remove(folder / ORBAX)
                clock.time("save, fsync", ORBAX, lambda: orbax.save(arrays))
        elif number == 0:
            write_plain(folder, source.parts, fsync=False)
        if not arguments.keep:
            for dim, (what, state) in enumerate((("same layout", same), ("other layout", other))):
                restores: list[tuple[str, Callable[[], object]]] = [
                    (OURS, lambda state=state: dtckpt.restore(folder / OURS, state.ours)),
                    (DCP, lambda state=state: dcp.load(state.theirs, checkpoint_id=folder / DCP)),
                    (PLAIN, lambda state=state: read_plain(folder, state.parts)),
                ]
                if orbax:
                    work = functools.partial(orbax.restore, source.parts, (rows, columns), dim)
                    restores.append((ORBAX, work))
                if with_safetensors and not arguments.restore and dim == 0:
                    restores.append((SAFETENSORS, lambda: load_safetensors(folder, same.parts)))
                first = number % len(restores)  # no system always comes after the same other system
                for who, work in restores[first:] + restores[:first]:
                    clock.time(f"restore, {what}", who, work)
    if dist.get_rank() == 0:
        show(clock.table(title), width=200)
        if not arguments.keep and not arguments.restore:
            shutil.rmtree(folder)
    if orbax:
        orbax.close()
    dist.destroy_process_group()


def compare_fsdp2(folder: Path, source: State, other: State, rounds: int, title: str) -> None:
    """Save and restore DTensors of dtckpt and a state dict of FSDP2, in turns."""
    states = {OURS: (source.ours, other.ours), FSDP2: (source.fsdp2(), other.fsdp2())}
    clock = Clock()
    for number in range(rounds + 1):
        if number == 1:
            clock = Clock()
        for fsync in (False, True):
            options = dtckpt.SaveOptions(fsync=fsync)
            for who in (OURS, FSDP2) if number % 2 else (FSDP2, OURS):
                os.sync()
                dist.barrier()
                remove(folder / who)
                work = functools.partial(dtckpt.save, folder / who, states[who][0], options=options)
                clock.time("save, fsync" if fsync else "save", who, work)
        for index, what in enumerate(("same layout", "other layout")):
            for who in (OURS, FSDP2) if number % 2 else (FSDP2, OURS):
                clock.time(f"restore, {what}", who, functools.partial(dtckpt.restore, folder / who, states[who][index]))
    if dist.get_rank() == 0:
        show(clock.table(title), width=200)
        shutil.rmtree(folder)
    dist.destroy_process_group()


def open_orbax(folder: Path) -> Any:
    """Return how Orbax is asked, or None."""
    if dist.get_rank() == 0:
        for who, is_there in ((SAFETENSORS, HAS_SAFETENSORS), (ORBAX, HAS_ORBAX)):
            if not is_there:
                print(f"without {who}, which is not installed")
    return importlib.import_module("benchmarks.orbax_peer").Orbax(folder / ORBAX) if HAS_ORBAX else None


def save_all(clock: Clock, folder: Path, source: State, *, fsync: bool, with_safetensors: bool) -> None:
    """Save with every system, after its last checkpoint was removed, so that all find the same pages free."""
    label, ours = "save, fsync" if fsync else "save", source.ours
    options = dtckpt.SaveOptions(fsync=fsync)
    bare = dtckpt.SaveOptions(fsync=fsync, content_digest=False)
    writer = dcp.FileSystemWriter(folder / DCP, sync_files=fsync)
    saves: list[tuple[str, str, Path, Callable[[], object]]] = [
        (f"{label}, no content digest", OURS, folder / OURS, lambda: dtckpt.save(folder / OURS, ours, options=bare)),
        (label, OURS, folder / OURS, lambda: dtckpt.save(folder / OURS, ours, options=options)),
        (label, DCP, folder / DCP, lambda: dcp.save(dict(source.theirs), storage_writer=writer)),
        (label, PLAIN, _plain(folder), lambda: write_plain(folder, source.parts, fsync=fsync)),
    ]
    if with_safetensors:
        path = _safetensors(folder)
        saves.append((label, SAFETENSORS, path, lambda: save_safetensors(folder, source.parts, fsync=fsync)))
    for what, who, path, work in saves:
        # Before pages are freed, or the machine may take them back while writes of others go to the disk.
        os.sync()
        dist.barrier()
        remove(path)
        clock.time(what, who, work)
    for who in (DCP, PLAIN):
        for seconds in (clock.seconds, clock.cpu_seconds):
            seconds[f"{label}, no content digest"].setdefault(who, []).append(seconds[label][who][-1])


def remove(path: Path) -> None:
    """Remove what one client wrote to a file, or all to a directory."""
    if path.is_dir() and dist.get_rank() == 0:
        shutil.rmtree(path)
    elif path.is_file():
        path.unlink()


def write_plain(folder: Path, parts: Mapping[str, torch.Tensor], *, fsync: bool) -> None:
    with open(_plain(folder), "wb", buffering=0) as file:
        for part in parts.values():
            file.write(part.numpy().data)
        if fsync:
            os.fsync(file.fileno())


def read_plain(folder: Path, parts: Mapping[str, torch.Tensor]) -> None:
    with open(_plain(folder), "rb", buffering=0) as file:
        for part in parts.values():
            file.readinto(part.view(-1).view(torch.uint8).numpy().data)


def save_safetensors(folder: Path, parts: Mapping[str, torch.Tensor], *, fsync: bool) -> None:
    module: Any = importlib.import_module("safetensors.torch")
    module.save_file(dict(parts), _safetensors(folder))
    if fsync:
        with open(_safetensors(folder), "rb") as file:
            os.fsync(file.fileno())


def load_safetensors(folder: Path, parts: Mapping[str, torch.Tensor]) -> None:
    module: Any = importlib.import_module("safetensors.torch")
    for name, found in module.load_file(_safetensors(folder)).items():
        parts[name].copy_(found)


def _plain(folder: Path) -> Path:
    return folder / f"plain-{dist.get_rank()}"


def _safetensors(folder: Path) -> Path:
    return folder / f"{dist.get_rank()}.safetensors"


if __name__ == "__main__":
    main()
