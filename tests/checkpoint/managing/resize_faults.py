"""Clients that are killed inside of a resize, that call it in other ways than the others, or with odd states."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor import distribute_tensor as distribute_by_torch

import dtckpt
from dtckpt import CheckpointManager, Layout, LocalTier, PerClient, Shards
from dtckpt.checkpoint.managing import resize
from dtckpt.checkpoint.managing.resize import Resize
from dtckpt.checkpoint.restoring import restore
from dtckpt.checkpoint.restoring.restore import StagedRestore
from dtckpt.coordination import connect
from dtckpt.errors import DtckptError

from .resize_cases import OPTIONS, SAVES, Process, die, is_state, mesh_of_all, state, values

# --- clients that are killed ------------------------------------------------------------------------------------------

POINTS: dict[str, tuple[Any, str]] = {
    "connecting": (connect, "connect"),
    "describing": (resize, "state_of_tree"),
    "lending": (Resize, "_lend"),
    "opening": (Resize, "_open"),
    "reading": (restore, "fill_tensors"),
    "applying": (StagedRestore, "apply"),
    "applied": (StagedRestore, "apply"),
}
"""By point of a resize, the function in which a client is killed; ``applied``: at its end."""
TORN = ("applying", "applied")
"""Points at which the tensors of the other clients may have changed."""


def _killing(point: str) -> Any:
    owner, name = POINTS[point]
    if point != "applied":
        return mock.patch.object(owner, name, side_effect=lambda *_, **__: die())
    apply = StagedRestore.apply

    def apply_and_die(self: StagedRestore) -> None:
        apply(self)
        die()

    return mock.patch.object(owner, name, apply_and_die)


def state_at(step: int, *, is_copied: bool, fill: float | None = None) -> dict[str, Any]:
    """Return a state as `state`; if it is copied, every client has all of it."""
    if not is_copied:
        return state(step, fill=fill)
    tensors = {name: tensor if fill is None else torch.full_like(tensor, fill) for name, tensor in values(step).items()}
    return {"model": tensors, "step": step if fill is None else -1}


def kill(root: Path, tier: Path | None, point: str, victim: int, *, is_copied: bool) -> Any:
    """Save steps 1 and 2, train to step 3, and resize while a process is killed; those that are left resize again.

    Returns:
        The error of the first resize, the facts of the second one, and the facts of a restore at the end.
    """
    process, told = Process(), list[Any]()
    host = f"host{process.number}"
    local = tier and LocalTier(path=tier / host, host=host, every_steps=1, address="127.0.0.1", timeout_s=5)
    manager = CheckpointManager(root, options=SAVES, local=local, save_interval_steps=10**6 if local else None)
    tree = None
    if process.join([0, 1, 2]):
        for step in (1, 2):
            manager.save(step, state_at(step, is_copied=is_copied))
            manager.wait()
        tree = state_at(3, is_copied=is_copied)
    if process.join([1, 0, 2]):
        target = state_at(0, is_copied=is_copied, fill=-1.0)
        options = dtckpt.RestoreOptions(timeout_s=8)
        with _killing(point) if process.number == victim else nullcontext():
            try:
                manager.resize(tree, step=3, target=target, options=options)
            except DtckptError as failure:
                told.append((type(failure).__name__, str(failure)))
    process.join([2, 3, 1 - victim])
    target = state_at(0, is_copied=is_copied, fill=-1.0)
    resized = manager.resize(tree, step=tree and 3, target=target, options=OPTIONS)
    told.append((resized.step, resized.steps_lost, is_state(target, resized.step)))
    restored = manager.restore(target=state_at(0, is_copied=is_copied, fill=-1.0), options=OPTIONS)
    told.append((restored.step, is_state(restored.tree, restored.step)))
    manager.save(4, state_at(4, is_copied=is_copied), force=True)
    manager.close()
    return told


def without_process_group(root: Path) -> Any:
    """Clients of a coordinator, without a process group: four, three, four."""
    process, told = Process(), list[Any]()
    manager, tree = CheckpointManager(root, options=SAVES), None
    for attempt, members in enumerate(([0, 1, 2, 3], [3, 0, 2], [2, 4, 0, 3])):
        if process.number not in members:
            continue
        number, size = members.index(process.number), len(members)
        os.environ.update(RANK=str(number), WORLD_SIZE=str(size), DTCKPT_ATTEMPT=str(attempt))
        if not attempt:
            tree = state_at(3, is_copied=True)
            manager.save(1, state_at(1, is_copied=True))
            manager.wait()
            continue
        target = state_at(0, is_copied=True, fill=-1.0)
        resized = manager.resize(tree, step=tree and 3, target=target, options=OPTIONS)
        told.append((resized.step, resized.steps_lost, is_state(target, resized.step)))
        tree = target
        manager.save(3 + attempt, tree, force=True)
        manager.wait()
    return told


# --- calls that do not fit each other ---------------------------------------------------------------------------------


def attempt(told: list[Any], manager: CheckpointManager, *args: Any, **kwargs: Any) -> Any:
    """Resize; note the error, or the result: step, steps lost, whether the state is right."""
    try:
        resized = manager.resize(*args, **{"options": OPTIONS, **kwargs})
    except DtckptError as error:
        told.append(f"{type(error).__name__}: {error}")
        return None
    told.append((resized.step, resized.steps_lost, is_state(resized.tree, resized.step)))
    return resized


def again(root: Path) -> Any:
    """Resize twice without another process group, onto the same mesh, by target and by mesh."""
    process, told = Process(), list[Any]()
    process.join([0, 1])
    manager = CheckpointManager(root, options=SAVES)
    manager.save(1, state(1))
    manager.wait()
    target = state(2, fill=-1.0)
    attempt(told, manager, state(2), step=2, target=target)
    attempt(told, manager, target, step=2, target=target)
    resized = attempt(told, manager, target, step=2, mesh=mesh_of_all())
    attempt(told, manager, resized.tree, step=2, mesh=mesh_of_all())
    manager.save(3, state(3))
    manager.close()
    return told


def once_only(root: Path, absent: int) -> Any:
    """One client of the process group calls nothing; then all do."""
    process, told = Process(), list[Any]()
    process.join([0, 1, 2])
    manager = CheckpointManager(root, options=SAVES)
    manager.save(1, state(1))
    manager.wait()
    tree, target = state(2), state(2, fill=-1.0)
    if process.number != absent:
        try:
            options = dtckpt.RestoreOptions(timeout_s=1.0)
            manager.resize(tree, step=2, target=target, options=options)
        except DtckptError as error:
            told.append((type(error).__name__, getattr(error, "missing", ()), str(error)))
    process.join([0, 1, 2])
    attempt(told, manager, tree, step=2, target=state(2, fill=-1.0))
    return told


def other_meshes(root: Path) -> Any:
    """The clients ask for different meshes, and for different layouts on one mesh; then for the same."""
    process, told = Process(), list[Any]()
    process.join([0, 1])
    manager = CheckpointManager(root, options=SAVES)
    manager.save(1, state(1))
    manager.wait()
    tree, mesh = state(2), mesh_of_all()
    is_odd = process.number == 1
    named = dtckpt.create_distributed_mesh([("y", 2)], device_type="CPU")
    alone = dtckpt.Mesh.from_string(f"|x=1|{process.number}|{process.number}|{mesh.local_devices()[0]}")
    attempt(told, manager, tree, step=2, mesh=named if is_odd else mesh)
    attempt(told, manager, tree, step=2, mesh=alone if is_odd else mesh)
    columns = {"model/w": Layout([dtckpt.UNSHARDED, "x"], mesh)}
    attempt(told, manager, tree, step=2, mesh=mesh, layouts=columns if is_odd else None)
    attempt(told, manager, tree, step=2, mesh=mesh, layouts=columns)
    return told


# --- all kinds of leaves ----------------------------------------------------------------------------------------------


class Loader:
    """An object with a state."""

    def __init__(self, at: int) -> None:
        self.at, self.order = at, torch.arange(5) * at

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "order": self.order}

    def load_state_dict(self, facts: dict[str, Any]) -> None:
        self.at, self.order = facts["at"], facts["order"]


class Counts(NamedTuple):
    seen: int
    rows: torch.Tensor


@dataclass
class Totals:
    tokens: int
    loss: torch.Tensor


def _trained(seed: int, steps: int) -> dict[str, Any]:
    """Return a module, its optimizer and its schedule, after some steps: the same on all clients."""
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for step in range(steps):
        module(torch.arange(18.0).view(3, 6).sin() * step).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return {"module": module, "optimizer": optimizer, "schedule": schedule}


def all_kinds(step: int) -> dict[str, Any]:
    """Return a state with a leaf of each kind that a save takes, over all present clients; elements tell the step."""
    mesh, parts, number = mesh_of_all(), dist.get_world_size(), dist.get_rank()
    torch_mesh = init_device_mesh("cpu", (parts,), mesh_dim_names=("d",))
    rows = torch.arange(42.0).view(14, 3) + 100 * step
    sharded, copied = Layout(["x", dtckpt.UNSHARDED], mesh), Layout([dtckpt.UNSHARDED] * 2, mesh)
    size = -(-14 // parts)
    return {
        "ours": dtckpt.dtensor.distribute_tensor(rows, mesh, sharded.placements),
        "copied": dtckpt.dtensor.distribute_tensor(rows.neg(), mesh, copied.placements),
        "variable": dtckpt.DVariable(dtckpt.copy_to_mesh(rows * 3, copied)),
        "of torch": distribute_by_torch(rows * 2, torch_mesh, [TorchShard(1)]),
        "experts": Shards(rows[number * size : (number + 1) * size] * 5, dist.group.WORLD, size=14),
        "plain": rows.bfloat16(),
        "bits": (rows % 2).bool(),
        "complex": torch.complex(rows, -rows),
        "eighths": rows.to(torch.float8_e4m3fn),
        "empty": torch.empty(0, 3),
        "array": rows.numpy().astype(np.uint16),
        "numbers": [step, -0.0, float("inf"), 3j, True, None, f"step {step}", b"\0", range(step), np.float64(0.1)],
        "tuple": (step, {"deep": (torch.full((2,), float(step)),)}),
        "named": Counts(step, rows[:2].clone()),
        "data": Totals(step, rows[2:3].clone()),
        "loader": Loader(step),
        "kept": PerClient(torch.full((2,), float(step)), on_resize="keep"),
        **_trained(step, step),
    }


def flat(value: Any) -> Any:
    """Return plain values that two equal states share. Collective."""
    match value:
        case Shards():
            return flat(value.whole("").full_tensor())
        case torch.Tensor():
            whole = value.full_tensor() if hasattr(value, "full_tensor") else value
            return (
                tuple(whole.shape),
                str(whole.dtype),
                whole.detach().contiguous().view(torch.uint8).tolist()
                if (whole.numel() and whole.ndim)
                else whole.tolist(),
            )
        case np.ndarray():
            return value.tolist()
        case PerClient():
            return flat(value.value)
        case dict():
            return {key: flat(each) for key, each in value.items()}
        case list() | tuple():
            return [flat(each) for each in value]
        case Totals():
            return flat(vars(value))
    return flat(value.state_dict()) if hasattr(value, "state_dict") else repr(value)


def move_all_kinds(root: Path) -> Any:
    """Move a state with leaves of all kinds from three clients to four, to other numbers, and save and restore it."""
    process, told = Process(), list[Any]()
    manager, tree = CheckpointManager(root, options=SAVES), None
    for members in ([0, 1, 2], [2, 0, 3, 1], [3, 1, 0, 2]):
        if not process.join(members):
            continue
        if members == [0, 1, 2]:
            tree = all_kinds(2)
            manager.save(1, {"step": 1})
            manager.wait()
            continue
        target = all_kinds(1)
        resized = manager.resize(tree, step=tree and 2, target=target, options=OPTIONS)
        expected, found, others = flat(all_kinds(2)), flat(target), flat(all_kinds(1))
        if process.number == 3:
            expected["kept"] = others["kept"]  # no client saved a value for it, so it keeps the value that it had
        wrong = [name for name in expected if found[name] != expected[name]]
        told.append((resized.steps_lost, resized.reason, wrong))
        tree = target
    manager.save(3, tree)
    restored = manager.restore(target=all_kinds(1))
    found, expected = flat(restored.tree), flat(tree)
    told.append([name for name in expected if found[name] != expected[name]])
    return told


def _unsupported(mesh: dtckpt.Mesh) -> dict[str, Callable[[], Any]]:
    """Return leaves that no save takes, by name."""
    layout = Layout([dtckpt.UNSHARDED], mesh, partial={"x": "sum"})
    return {
        "meta": lambda: torch.empty(2, device="meta"),
        "sparse": lambda: torch.eye(2).to_sparse(),
        "nested": lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]),
        "quantized": lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8),
        "lazy": lambda: nn.LazyLinear(2).weight,
        "pending": lambda: dtckpt.DTensor([torch.ones(2)], layout, (2,), torch.float32),
        "function": lambda: print,
        "class": object,
        "date of numpy": lambda: np.array(["2026-01-01"], dtype="datetime64[D]"),
    }


def refuse_kinds(root: Path) -> Any:
    """Client 1 of three has a leaf that no save takes, in its state, then in its target. Then no client has one."""
    process, told = Process(), list[Any]()
    process.join([0, 1, 2])
    manager = CheckpointManager(root, options=SAVES)
    manager.save(1, state(1))
    manager.wait()
    tree = state(2)
    kinds = _unsupported(mesh_of_all())
    for make in kinds.values():
        odd = {**tree, "odd": make()} if process.number == 1 else tree
        target = state(0, fill=-1.0)
        attempt(told, manager, odd, step=2, target=target)
        whole = target["model"]["w"].full_tensor()
        assert target["step"] == -1
        assert (whole == -1).all(), "something has moved"
    target = state(0, fill=-1.0)
    odd = {"odd": torch.empty(2, device="meta")} if process.number == 1 else {}
    attempt(told, manager, tree, step=2, target={**target, **odd})
    attempt(told, manager, tree, step=2, target=state(0, fill=-1.0))
    assert is_state(tree, 2)
    return told
