"""Jobs whose processes go on with other clients, and the states that they move."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

import dtckpt
from dtckpt import CheckpointManager, Layout, LocalTier, PerClient
from dtckpt.checkpoint.managing import resize
from dtckpt.checkpoint.managing.resize import Resize
from dtckpt.checkpoint.reading.verified_reads import RegionReader
from dtckpt.checkpoint.restoring.restore import StagedRestore
from dtckpt.comm.default_process_group import make_default_group
from dtckpt.comm.torch_private import PrefixStore
from dtckpt.config import Config
from dtckpt.coordination.connect import shutdown_multi_client
from dtckpt.errors import DtckptError

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
        os.environ.update(RANK=str(members.index(self.number)), WORLD_SIZE=str(len(members)))
        # A separate place for each world: processes of the next world may be waiting already.
        store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False, wait_for_workers=False)
        own = PrefixStore(f"{os.environ['TORCHELASTIC_RUN_ID']}/{self.num_worlds}", store)
        make_default_group(own, 0, Config.from_environ(), "gloo", timeout=WAIT)
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
    for name, of_step in values(step).items():
        tensor = of_step if fill is None else torch.full_like(of_step, fill)
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


# --- moved states -----------------------------------------------------------------------------------------------------


def replicated_pairs(root: Path) -> Any:
    """Four clients, of which pairs have the same rows; one is lost: the other of its pair has all."""
    process = Process()
    process.join([0, 1, 2, 3])
    mesh = dtckpt.create_distributed_mesh([("r", 2), ("x", 2)], device_type="CPU")
    layout = Layout(["x", dtckpt.UNSHARDED], mesh)
    rows = values(3)["w"]
    tree = {"w": dtckpt.dtensor.distribute_tensor(rows, mesh, layout.placements), "step": 3}
    manager = CheckpointManager(root, options=SAVES)
    manager.save(1, tree)
    manager.wait()
    if not process.join([3, 0, 2]):
        die()
    mesh = mesh_of_all()
    resized = manager.resize(
        tree, step=3, mesh=mesh, layouts={"w": Layout(["x", dtckpt.UNSHARDED], mesh)}, options=OPTIONS
    )
    whole = resized.tree["w"].full_tensor()
    return resized.step, resized.steps_lost, resized.tree["step"], torch.equal(whole, rows), resized.received_nbytes > 0


def into_itself(root: Path) -> Any:
    """A module and its optimizer, alike on all clients, go on in place: the target is the state."""
    process = Process()
    torch.manual_seed(process.number if process.number == 2 else 0)
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    tree = {"model": module, "optimizer": optimizer, "schedule": schedule, "step": 0}

    def train(*steps: int) -> None:
        for step in steps:
            rows = torch.arange(12.0).view(3, 4).sin() * step
            module(rows).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            tree["step"] = step

    manager = CheckpointManager(root, options=SAVES)
    if process.join([0, 1]):
        train(1, 2, 3)
        manager.save(3, tree)
        manager.wait()
        train(4)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    pointers = [parameter.data_ptr() for parameter in module.parameters()]
    if process.join([1, 2]):
        is_new = process.number == 2
        resized = manager.resize(None if is_new else tree, step=None if is_new else 4, target=tree, options=OPTIONS)
        assert resized.steps_lost == 0, resized.reason
        assert pointers == [parameter.data_ptr() for parameter in module.parameters()]
        assert is_new or all(torch.equal(before[name], now) for name, now in module.state_dict().items())
        train(5)
        manager.save(5, tree)
    else:  # the reference: it never stops
        manager.close()
        train(5)
    manager.close()
    return [tensor.tolist() for tensor in module.state_dict().values()], schedule.get_last_lr(), tree["step"]


def into_each_other(root: Path) -> Any:
    """Each tensor of the target lies in the memory of another tensor of the old state."""
    process = Process()
    process.join([0, 1])
    tree = {"a": torch.arange(600_000.0), "b": torch.arange(600_000.0).neg()}
    manager = CheckpointManager(root, options=SAVES)
    manager.save(1, {"step": 1})
    manager.wait()
    process.join([1, 0])
    target = {"a": tree["b"], "b": tree["a"]}
    resized = manager.resize(tree, step=1, target=target, options=OPTIONS)
    assert resized.reason == ""
    return [target[name].sum().item() for name in ("a", "b")]


def sharded_by_torch(root: Path) -> Any:
    """A module under FSDP2 with its optimizer: the old process group is gone when it is described."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    process = Process()

    def made(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        module = nn.Sequential(nn.Linear(6, 9), nn.Linear(9, 5))
        fully_shard(module, mesh=init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",)))
        return module, torch.optim.AdamW(module.parameters(), lr=0.01)

    def train(module: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        module(torch.full((2, 6), float(step))).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    def whole(module: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        moments = [each["exp_avg"] for each in optimizer.state.values()]
        return [tensor.full_tensor().clone() for tensor in (*module.state_dict().values(), *moments)]

    manager = CheckpointManager(root, options=SAVES)
    tree = None
    if process.join([0, 1, 2]):
        module, optimizer = made(1)
        for step in (1, 2):
            train(module, optimizer, step)
        expected = whole(module, optimizer)
        manager.save(1, {"step": 1})
        manager.wait()
        tree = {"model": module, "optimizer": optimizer, "step": 2}
    for members in ([2, 0, 1], [1, 3, 0, 2]):
        if not process.join(members):
            continue
        module, optimizer = made(5)
        target = {"model": module, "optimizer": optimizer, "step": -1}
        resized = manager.resize(tree, step=None if tree is None else 2, target=target, options=OPTIONS)
        found = whole(module, optimizer)
        assert (resized.steps_lost, target["step"]) == (0, 2), resized
        assert tree is None or all(map(torch.equal, found, expected))
        tree, expected = target, found
    train(module, optimizer, 3)
    return [tensor.sum().item() for tensor in whole(module, optimizer)]


def values_of_clients(root: Path) -> Any:
    """Each client keeps its random state; a function makes the rest from the remaining clients' states."""
    process = Process()

    def at_all(values: Any, _: int, __: int) -> dict[str, Any]:
        return {"at": sorted(each["at"] for each in values.values())}

    def mine(fill: int) -> dict[str, Any]:
        return {
            "kept": PerClient(torch.tensor([fill]), on_resize="keep"),
            "made": PerClient({"at": fill}, on_resize=at_all),
        }

    manager, tree = CheckpointManager(root, options=SAVES), None
    if process.join([0, 1, 2]):
        tree = mine(process.number)
        manager.save(1, tree)
        manager.wait()
    if not process.join([2, 3, 0]):
        die()
    target = mine(process.number * 10)
    resized = manager.resize(tree, step=None if tree is None else 1, target=target, options=OPTIONS)
    return resized.steps_lost, target["kept"].value.item(), target["made"].value


# --- histories of managers --------------------------------------------------------------------------------------------


def leader_moves(root: Path, tier: Path | None) -> Any:
    """Client 0 becomes another client, and another process client 0; saves go on, in one lineage."""
    process, told = Process(), []

    def local() -> LocalTier | None:
        host = f"host{process.number}"
        return tier and LocalTier(path=tier / host, host=host, every_steps=1, address="127.0.0.1", timeout_s=5)

    manager = CheckpointManager(
        root, options=SAVES, local=local(), reuse=True, every="auto", mirror=root.with_name("mirror")
    )
    tree = None
    if process.join([0, 1, 2]):
        for step in (1, 2, 3):
            manager.save(step, state(step), force=True)
            manager.wait()
        manager.restore(2, target=state(0, fill=0.0))
        tree = state(4)
    for members, step in (([2, 1, 0], 4), ([1, 3, 0, 2], 5)):
        if not process.join(members):
            continue
        target = state(0, fill=-1.0)
        resized = manager.resize(tree, step=None if tree is None else step, target=target, options=OPTIONS)
        told.append((resized.steps_lost, is_state(target, step), manager.should_save(step)))
        tree = state(step + 1)
        manager.save(step + 1, tree, force=True)
        manager.wait()
    manager.close()
    return told


def failures(root: Path) -> Any:
    """A client fails at different points of resizes; its state is whole then, or is never lent again."""
    process, told = Process(), list[Any]()
    manager = CheckpointManager(root, options=SAVES)
    process.join([0, 1, 2])
    manager.save(1, state(1))
    manager.wait()
    tree = target = state(3)

    def attempt(members: Sequence[int], step: int, owner: Any = None, point: str = "") -> None:
        nonlocal target
        process.join(members)
        target = state(0, fill=-1.0)
        is_victim = owner is not None and process.number == 1
        with mock.patch.object(owner, point, side_effect=OSError("injected")) if is_victim else nullcontext():
            try:
                resized = manager.resize(tree, step=step, target=target, options=OPTIONS)
                told.append((resized.step, resized.steps_lost, is_state(target, resized.step)))
            except DtckptError as failure:
                told.append("injected" in str(failure))

    attempt([1, 2, 0], 3, resize, "state_of_tree")
    attempt([2, 0, 1], 3, Resize, "_open")
    attempt([1, 2, 0], 3)  # from memory all the same
    tree = target
    attempt([0, 1, 2], 3, StagedRestore, "apply")
    attempt([2, 1, 0], 3)  # some had changed their targets
    tree = target
    attempt([0, 1, 2], 3 + process.number, RegionReader, "read")  # they go back, and one cannot read
    attempt([1, 0, 2], 4)
    return told


def wrong(root: Path) -> list[str]:
    """Refused arguments, on all clients."""
    process, told = Process(), []
    manager = CheckpointManager(root, options=SAVES)
    process.join([0, 1])
    manager.save(1, state(1))
    manager.wait()
    tree = state(1)

    def attempt(**arguments: Any) -> None:
        try:
            manager.resize(**{"state": tree, "step": 1, "options": OPTIONS, **arguments})
        except DtckptError as error:
            told.append(f"{type(error).__name__}: {error}")

    attempt(step=None if process.number else 1)
    attempt(step=-1 if process.number else 1)
    own = manager._origin.member
    manager._origin.member = replace(own, client=0)
    attempt()
    manager._origin.member = replace(own, attempt=own.attempt + process.number)
    attempt()
    manager._origin.member = None
    shutdown_multi_client()
    attempt()
    manager._origin.member = own
    attempt(state={**tree, "step": process.number})
    resized = manager.resize(tree, step=1, mesh=mesh_of_all(), options=OPTIONS)
    told.append(str(is_state(resized.tree, 1)))
    return told
