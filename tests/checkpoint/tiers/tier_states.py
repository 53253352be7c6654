"""Kinds of state in a local tier, as client processes save and restore them; each client counts as a separate host."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support.states import bits_of, differences, packed, tensor_of, zeros_of
from torch.distributed.device_mesh import init_device_mesh

import dtckpt
from checkpoint import per_client_cases
from checkpoint.saving import union_cases
from dtckpt import CheckpointManager, Layout, PerClient

from .tier_cases import tier

KINDS = ["bfloat16", "float8_e4m3fn", "float16", "bool", "int8", "uint16", "complex64", "float64"]
SHAPES: list[tuple[int, ...]] = [(7, 5), (0,), (3, 0, 2), (), (1, 1), (130,)]


def whole_tensors() -> dict[str, torch.Tensor]:
    return {
        f"{dtype} {shape}": tensor_of(f"{dtype}{shape}", shape, dtype)
        for number, dtype in enumerate(KINDS)
        for shape in (SHAPES if not number else SHAPES[number % 3 :: 3])
    }


def odd_tensors() -> dict[str, torch.Tensor]:
    """Return tensors whose elements do not lie one after the other, and some of one memory."""
    base = torch.arange(60.0).reshape(12, 5)
    tied = torch.arange(9.0)
    return {
        "transposed": base.t(),
        "strided": base[::2, 1::2],
        "expanded": torch.arange(3.0)[:, None].expand(3, 4),
        "permuted": torch.arange(24.0).reshape(2, 3, 4).permute(2, 0, 1),
        "conjugated": torch.tensor([1 + 2j, 3 - 4j]).conj(),
        "tied": tied,
        "tied too": tied,
        "part of tied": tied[2:5],
    }


def sharded(mesh: dtckpt.Mesh, *, is_target: bool) -> dict[str, Any]:
    made = {}
    for number, (name, whole) in enumerate(whole_tensors().items()):
        specs = ["x" if dim == number % max(1, whole.ndim) else dtckpt.UNSHARDED for dim in range(whole.ndim)]
        made[name] = packed(zeros_of(whole) if is_target else whole, Layout(specs, mesh))
        if not number:
            made["tied"] = made[name]
    return made


def mesh_of_all() -> dtckpt.Mesh:
    return dtckpt.create_distributed_mesh({"x": dtckpt.num_clients()})


def save_kinds(root: Path, folder: Path, hosts: Sequence[str]) -> None:
    """Save tensors of all kinds, sharded and not; the second save fills the files of the first."""
    values = {"a": [1, "two", None], "b": (3.5, True)}
    with CheckpointManager(root, local=tier(folder, hosts), save_interval_steps=10**6) as manager:
        for step in (1, 2):
            tree = {"sharded": sharded(mesh_of_all(), is_target=False), "plain": whole_tensors(), "odd": odd_tensors()}
            manager.save(step, {**tree, "values": values, "step": step, "empty": {}})
        manager.wait()
        dist.barrier()


def restore_kinds(root: Path, folder: Path, hosts: Sequence[str]) -> list[str]:
    """Restore without a target and into one; return the tensors that differ."""
    wrong = []
    with CheckpointManager(root, local=tier(folder, hosts)) as manager:
        restored = manager.restore()
        tree = restored.tree
        plain = {**whole_tensors(), **{f"odd {name}": tensor.resolve_conj() for name, tensor in odd_tensors().items()}}
        found = {**tree["plain"], **{f"odd {name}": tensor for name, tensor in tree["odd"].items()}}
        wrong += [name for name, tensor in plain.items() if bits_of(found[name]) != bits_of(tensor)]
        wrong += [
            f"sharded {name}" for name, t in whole_tensors().items() if bits_of(tree["sharded"][name]) != bits_of(t)
        ]
        first = next(iter(whole_tensors().values()))
        if bits_of(tree["sharded"]["tied"]) != bits_of(first):
            wrong.append("sharded tied")
        if (restored.local is None, tree["step"], tree["values"]["a"], tree["values"]["b"], tree["empty"]) != (
            False, 2, [1, "two", None], (3.5, True), {},
        ):  # fmt: skip
            wrong.append(f"{restored.local} {tree['step']} {tree['values']}")
        odd = {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in odd_tensors().items()}
        odd["strided"] = torch.zeros(12, 5)[::2, 1::2]
        target = {
            "sharded": sharded(mesh_of_all(), is_target=True),
            "plain": {name: zeros_of(tensor) for name, tensor in whole_tensors().items()},
            "odd": odd,
            "values": {"a": None, "b": None},
            "step": 0,
            "empty": {},
        }
        found = manager.restore(target=target).tree
        for name, whole in whole_tensors().items():
            wrong += differences(found["sharded"][name], whole)
            if bits_of(found["plain"][name]) != bits_of(whole):
                wrong.append(f"target {name}")
        for name, tensor in odd_tensors().items():
            if not torch.equal(found["odd"][name], tensor):
                wrong.append(f"target odd {name}")
    return wrong


def save_own_keys(root: Path, folder: Path, hosts: Sequence[str], steps: Sequence[int]) -> None:
    """Save as the stages of a pipeline: each client passes other layers, and in later saves another set of layers."""
    client, clients = dtckpt.client_id(), dtckpt.num_clients()
    with CheckpointManager(root, local=tier(folder, hosts), save_interval_steps=10**6) as manager:
        for step in steps:
            layers = {
                f"layer {client + clients * n}": torch.full((5, 3), float(client + 10 * step)) for n in range(step)
            }
            manager.save(step, {"layers": layers, "step": step, "shared": torch.full((4,), float(step))})
            manager.wait()
        dist.barrier()


def restore_own_keys(root: Path, folder: Path, hosts: Sequence[str]) -> dict[str, Any]:
    """Restore all layers on each client; return their values, and the step."""
    with CheckpointManager(root, local=tier(folder, hosts)) as manager:
        restored = manager.restore()
        layers = {name: tensor.unique().tolist() for name, tensor in restored.tree["layers"].items()}
        return {"layers": layers, "step": restored.tree["step"], "is_local": restored.local is not None}


def save_per_client(root: Path, folder: Path, hosts: Sequence[str]) -> None:
    own = per_client_cases.values_of(dtckpt.client_id())
    with CheckpointManager(root, local=tier(folder, hosts), save_interval_steps=10**6) as manager:
        for step in (1, 2):
            tree = {key: PerClient(value) for key, value in own.items()}
            manager.save(step, {**tree, "w": packed(torch.ones(6), Layout(["x"], mesh_of_all()))})
            manager.wait()
        dist.barrier()


def restore_per_client(root: Path, folder: Path, hosts: Sequence[str], on_resize: Any) -> int:
    """Restore; return the client whose values came."""
    target: dict[str, Any] = dict(per_client_cases.target_of(on_resize))
    with CheckpointManager(root, local=tier(folder, hosts)) as manager:
        manager.restore(target={**target, "w": packed(torch.zeros(6), Layout(["x"], mesh_of_all()))})
    return per_client_cases.client_of(target)


def train_fsdp(root: Path, folder: Path, hosts: Sequence[str], *, is_first: bool) -> bool:
    """Save the state of a model of FSDP2 and its optimizer in the tier; or restore it into another one."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    state = union_cases.state_of(*union_cases.stage([0, 1], mesh))
    with CheckpointManager(root, local=tier(folder, hosts), save_interval_steps=10**6) as manager:
        if is_first:
            union_cases.fill(state)
            for step in (1, 2):
                manager.save(step, state)
                manager.wait()
            dist.barrier()
            return True
        union_cases.fill(state, 0.0)
        restored = manager.restore(target=state)
        found = _are_expected(restored.tree)
        return restored.local is not None and restored.step == 2 and found


def _are_expected(state: Any, name: str = "") -> bool:
    if isinstance(state, dict):
        return all(_are_expected(value, f"{name}/{key}") for key, value in state.items())
    return not isinstance(state, torch.Tensor) or union_cases.is_part_of(state, union_cases.expected(name, state))


def restore_more(root: Path, folder: Path, hosts: Sequence[str], kind: str) -> list[Any]:
    """Restore into a target that asks for other things than the saved ones; return the error, or the values."""
    with CheckpointManager(root, local=tier(folder, hosts)) as manager:
        target: dict[str, Any] = {"w": torch.zeros(4), "step": 0}
        options = dtckpt.RestoreOptions()
        if kind in ("missing", "allowed"):
            target["new"] = torch.full((3,), 7.0)
            options = dtckpt.RestoreOptions(allow_missing=kind == "allowed")
        if kind == "unexpected":
            del target["w"]
        if kind == "shape":
            target["w"] = torch.zeros(5)
        if kind == "dtype":
            target["w"] = torch.zeros(4, dtype=torch.int32)
        try:
            restored = manager.restore(target=target, options=options)
            return [restored.step, restored.tree["w"].tolist(), target.get("new", torch.zeros(0)).tolist()]
        except dtckpt.errors.DtckptError as error:
            return [type(error).__name__, str(error)]


def save_little(root: Path, folder: Path, hosts: Sequence[str]) -> None:
    with CheckpointManager(root, local=tier(folder, hosts), save_interval_steps=10**6) as manager:
        for step in (1, 2):
            manager.save(step, {"w": torch.full((4,), float(step)), "step": step})
            manager.wait()
        dist.barrier()


def save_changed(root: Path, folder: Path, hosts: Sequence[str]) -> None:
    """Save tensors that training changes as soon as `save` has returned, also while a write to the root goes on."""
    weight = packed(torch.zeros(1 << 18), Layout(["x"], mesh_of_all()))
    plain = torch.zeros(1 << 16)
    with CheckpointManager(root, local=tier(folder, hosts), save_interval_steps=1) as manager:
        for step in range(1, 6):
            for tensor in (*dtckpt.unpack(weight), plain):
                tensor.fill_(step)
            manager.save(step, {"weight": weight, "plain": plain, "step": step})
            for tensor in (*dtckpt.unpack(weight), plain):
                tensor.fill_(-1)
        manager.wait()
        dist.barrier()


def changed_values(root: Path, folder: Path, hosts: Sequence[str]) -> list[Any]:
    with CheckpointManager(root, local=tier(folder, hosts)) as manager:
        tree = manager.restore().tree
        return [tree["step"], tree["weight"].unique().tolist(), tree["plain"].unique().tolist()]


def preempt(root: Path, folder: Path, hosts: Sequence[str], at: int) -> dict[str, Any]:
    """Train until a signal to one client is known to all, while a write to the root is slow; then end as one does."""
    import os
    import signal
    import threading
    from unittest import mock

    from dtckpt.checkpoint.saving.write import ClientWriter

    may_write, real = threading.Event(), ClientWriter.write

    def write(self: ClientWriter) -> int:
        assert may_write.wait(30)
        return real(self)

    mesh, last = mesh_of_all(), 0
    with (
        mock.patch.object(ClientWriter, "write", write),
        CheckpointManager(root, local=tier(folder, hosts, every_steps=2), save_interval_steps=10**6) as manager,
        manager.preemption(),
    ):
        for step in range(1, 20):
            last = step
            if step == at:
                may_write.set()
                if dtckpt.client_id() == 1:
                    os.kill(os.getpid(), signal.SIGTERM)
                dist.barrier()
            if manager.should_save(step):
                manager.save(step, {"w": packed(torch.full((6,), float(step)), Layout(["x"], mesh))})
            if manager.reached_preemption:
                break
    return {"last": last, "steps": manager.all_steps()}
