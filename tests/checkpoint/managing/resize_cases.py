"""Jobs whose processes go on with other clients, and the states that they move."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import dtckpt
from dtckpt import CheckpointManager, Layout, PerClient
from dtckpt.comm.torch_private import PrefixStore

WAIT = timedelta(seconds=30)
OPTIONS = dtckpt.RestoreOptions(timeout_s=20)
SAVES = dtckpt.SaveOptions(timeout_s=20)
SHAPES = {"w": (12, 10), "moment": (25, 3), "norm": (7,), "scalar": ()}


@dataclass
class Process:
    """One process of a test, which has one number through all worlds: its rank in the first one."""

    number: int = field(default_factory=lambda: int(os.environ["RANK"]))
    num_worlds: int = 0

    def join(self, members: Sequence[int]) -> bool:
        """Make the process group of the next world; return whether this process is in it."""
        self.num_worlds += 1
        if dist.is_initialized():
            dist.destroy_process_group()
        if self.number not in members:
            return False
        store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False, wait_for_workers=False)
        rank, size = members.index(self.number), len(members)
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(size))
        job = f"{os.environ['TORCHELASTIC_RUN_ID']}/{self.num_worlds}"
        dist.init_process_group("gloo", store=PrefixStore(job, store), rank=rank, world_size=size, timeout=WAIT)
        return True


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def mesh_of_all() -> dtckpt.Mesh:
    return dtckpt.create_distributed_mesh([("x", int(os.environ["WORLD_SIZE"]))], device_type="CPU")


def values(step: int) -> dict[str, torch.Tensor]:
    """Return the tensors of a step, alike everywhere."""
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def state(step: int, *, fill: float | None = None) -> dict[str, Any]:
    """Return the state of a step: matrices are sharded over all clients, and each has a copy of the small tensors."""
    mesh = mesh_of_all()
    sharded = Layout(["x", dtckpt.UNSHARDED], mesh)
    tensors = {}
    for name, tensor in values(step).items():
        if fill is not None:
            tensor = torch.full_like(tensor, fill)
        is_sharded = tensor.ndim == 2
        tensors[name] = dtckpt.dtensor.distribute_tensor(tensor, mesh, sharded.placements) if is_sharded else tensor
    return {"model": tensors, "step": step if fill is None else -1}


def is_state(tree: dict[str, Any], step: int) -> bool:
    """Whether a tree has the values of a step, bit for bit. Collective."""
    whole = {
        name: tensor.full_tensor() if isinstance(tensor, dtckpt.DTensor) else tensor
        for name, tensor in tree["model"].items()
    }
    expected = values(step)
    return tree["step"] == step and all(torch.equal(whole[name], expected[name]) for name in expected)


def move(root: Path, worlds: Sequence[Sequence[int]], *, saved: int | None = 1, at: int = 3, **options: Any) -> Any:
    """Save a step, go on to another, and from world to world; return what each resize told."""
    process, told = Process(), list[Any]()
    first, *others = worlds
    manager = CheckpointManager(root, options=SAVES, **options)
    current = None
    if process.join(first):
        if saved is not None:
            manager.save(saved, state(saved))
            manager.wait()
        current = state(at)
    for members in others:
        if not process.join(members):
            if process.number in first:
                die()
            continue
        target = state(0, fill=-1.0)
        resized = manager.resize(current, step=None if current is None else at, target=target, options=OPTIONS)
        assert resized.tree is target
        told.append((resized.step, resized.steps_lost, resized.reason, is_state(target, resized.step)))
        current, at = target, resized.step
    return told
