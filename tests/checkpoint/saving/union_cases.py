"""Saves whose clients pass different things: slices of meshes, pipeline stages, mistakes; runs in client processes."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from support.states import packed
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import dtckpt
from checkpoint.client_cases import mesh_over_all
from dtckpt import Layout, RestoreOptions, SaveOptions
from dtckpt.checkpoint.collective import Collective
from dtckpt.checkpoint.restoring import unexpected
from dtckpt.checkpoint.saving import agree
from dtckpt.dtensor import torch_interop
from dtckpt.errors import DtckptError
from dtckpt.storage.local_folder import LocalFolder

WIDTH, HIDDEN = 6, 10
"""Neither is a multiple of the numbers of clients."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def stage(layers: Sequence[int], mesh: DeviceMesh | None = None) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return some of the model's layers, as FSDP2 and TP put them on a mesh, and their optimizer.

    Args:
        layers: The layers.
        mesh: A mesh of axes ``dp`` and ``tp``, of which either may be missing; None leaves the layers whole.
    """
    torch.manual_seed(0)
    model = nn.ModuleDict({"layers": nn.ModuleDict({str(layer): Block() for layer in layers})})
    whole = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for block in model["layers"].values():
        if mesh is not None and "tp" in mesh.mesh_dim_names:
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(block, mesh["tp"], plan)
        if mesh is not None and "dp" in mesh.mesh_dim_names:
            fully_shard(block, mesh=mesh["dp"])
    # Every client made the same layers, and PyTorch sharded them: our layouts must say the same of the shards.
    assert all(is_part_of(tensor, whole[name]) for name, tensor in model.state_dict().items())
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the state by parameter names, every tensor filled with what its name says."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    model_state, optimizer_state = get_state_dict(model, optimizer, options=options)
    return {"model": model_state, "optimizer": optimizer_state}


def fill(state: Any, fill_value: float | None = None, name: str = "") -> None:
    """Fill the tensors of a state in place: with the elements that their names say, or with one value."""
    if isinstance(state, Mapping):
        for key, value in state.items():
            fill(value, fill_value, f"{name}/{key}")
    elif isinstance(state, torch.Tensor):
        whole = expected(name, state) if fill_value is None else torch.full(state.shape, fill_value)
        own, part = _parts(state, whole)
        own.detach().copy_(part)


def expected(name: str, like: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(map(ord, name)) * 31 + len(name))
    return torch.rand(like.shape, generator=generator).to(like.dtype)


def _parts(tensor: torch.Tensor, whole: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this client's part of a tensor, and the same part of another whole tensor."""
    if isinstance(tensor, TorchDTensor):
        # By our layouts: PyTorch 2.9 itself gathers strided shards wrongly.
        layout, own = torch_interop.layout_and_local(tensor)
    elif isinstance(tensor, dtckpt.DTensor):
        layout, own = tensor.layout, tensor.to_local()
    else:
        return tensor, whole
    assert own is not None
    (device,) = layout.mesh.local_device_ids()
    return own, whole[layout.region(device, whole.shape).slices()]


def is_part_of(tensor: torch.Tensor, whole: torch.Tensor) -> bool:
    return torch.equal(*_parts(tensor, whole))


def wrong_in(state: Any, name: str = "") -> list[str]:
    """Return the names of the tensors that do not hold what their names say."""
    if isinstance(state, Mapping):
        return [wrong for key, value in state.items() for wrong in wrong_in(value, f"{name}/{key}")]
    is_right = not isinstance(state, torch.Tensor) or is_part_of(state, expected(name, state))
    return [] if is_right else [name]


# --- FSDP2, tensor and pipeline parallelism of PyTorch ---


def stage_state(layers: int, axes: Mapping[str, int]) -> dict[str, Any]:
    """Return the state of this client's stage of a model, on a mesh of axes ``pp``, ``dp`` and ``tp``, or some."""
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes)) if axes else None
    stages = axes.get("pp", 1)
    number = mesh["pp"].get_local_rank() if mesh is not None and "pp" in axes else 0
    own = range(layers * number // stages, layers * (number + 1) // stages)
    inner = tuple(axis for axis in axes if axis != "pp")
    return state_of(*stage(own, mesh[inner] if mesh is not None and inner else None))


def save_stage(path: str, layers: int, axes: Mapping[str, int], saves: int = 1) -> list[list[str]]:
    """Save some steps of a model; return the rounds of each save."""
    agree._kept.clear()  # what an earlier case has planned in this process
    state = stage_state(layers, axes)
    fill(state)
    rounds: list[list[str]] = []
    for step in range(saves):
        for key in state["optimizer"]:
            if key.endswith(".lr"):
                state["optimizer"][key] = 0.5**step
        with noted_rounds() as noted:
            handle = dtckpt.save_async(f"{path}{step}", {**state, "step": step}, options=SaveOptions(timeout_s=20))
            fill(state, -1.0)
            handle.result(20)
        rounds.append(noted)
        fill(state)
    return rounds


@contextmanager
def noted_rounds() -> Iterator[list[str]]:
    """Return a list that gets the names of the rounds that this client goes through in the context."""
    rounds: list[str] = []
    run = Collective._run

    def note(collective: Collective, name: str, *args: Any) -> Any:
        rounds.append(name)
        return run(collective, name, *args)

    with patch.object(Collective, "_run", note):
        yield rounds


def restore_stage(path: str, layers: int, axes: Mapping[str, int], step: int) -> list[str]:
    """Restore this client's stage of a model; return the faults."""
    target = {**stage_state(layers, axes), "step": -1}
    fill(target, 0.0)
    # Without a mesh nothing tells which other clients restore.
    group = dist.group.WORLD if set(axes) == {"pp"} else None
    dtckpt.restore(path, target, options=RestoreOptions(timeout_s=20), group=group)
    rates = {value for key, value in target["optimizer"].items() if key.endswith(".lr")}
    return [*wrong_in(target), *(["step"] if (target["step"], rates) != (step, {0.5**step}) else [])]


def raw_states(axes: Mapping[str, int], *, with_state: bool) -> tuple[dict[str, Any], torch.optim.Optimizer]:
    """Return the states of a model and of its optimizer as their own ``state_dict()`` gives them."""
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes)) if axes else None
    model, optimizer = stage(range(2), mesh)
    if with_state:
        state_of(model, optimizer)
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, optimizer


def save_raw_states(path: str, axes: Mapping[str, int]) -> None:
    tree, _ = raw_states(axes, with_state=True)
    fill(tree)
    dtckpt.save(path, tree, options=SaveOptions(timeout_s=20))


def restore_raw_states(path: str, axes: Mapping[str, int]) -> list[str]:
    """Restore the states into a fresh optimizer, and make a step; return the faults."""
    tree, optimizer = raw_states(axes, with_state=False)
    fill(tree, 0.0)
    dtckpt.restore(path, tree, options=RestoreOptions(timeout_s=20))
    optimizer.load_state_dict(tree["optimizer"])
    (parameters,) = (group["params"] for group in optimizer.param_groups)
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    wrong = wrong_in(tree)
    # PyTorch refuses a step of tensors on different meshes.
    optimizer.step()
    return wrong if len(tree["optimizer"]["state"]) == len(parameters) else ["state"]


# --- mistakes, and what clients may do ---


def save_differently(path: str, kind: str) -> list[tuple[str, str]]:
    """Save something of which the last client passes another thing; then the same everywhere. Return the errors."""
    client, clients = dtckpt.client_id(), dtckpt.num_clients()
    is_odd = client == clients - 1
    mesh = mesh_over_all({"x": clients})
    rows = packed(torch.arange(12.0).reshape(6, 2), Layout(["x", "unsharded"], mesh))
    tree: dict[str, Any] = {"w": rows, "c": torch.zeros(3), "values": {"lr": 0.5}, "list": [1, 2]}
    options = SaveOptions(timeout_s=20, keys="same" if kind.startswith("same") else "union")
    if kind in ("same: tensor", "union: tensor") and is_odd:
        tree["own"] = torch.ones(2)
    elif kind in ("same: value", "union: value") and is_odd:
        tree["values"]["own"] = 1
    elif kind == "lost" and is_odd:
        del tree["w"]
    elif kind == "shape" and is_odd:
        tree["c"] = torch.zeros(4)
    elif kind == "dtype" and is_odd:
        tree["c"] = torch.zeros(3, dtype=torch.float64)
    elif kind == "overlap" and is_odd:
        tree["w"] = packed(torch.zeros(6, 2), Layout(["unsharded", "unsharded"], mesh))
    elif kind == "value":
        tree = {f"own{client}": torch.ones(2), "lr": 0.25 if is_odd else 0.5}
    elif kind == "kind" and is_odd:
        tree["values"] = torch.zeros(2)
    elif kind == "length" and is_odd:
        tree["list"] = [1, 2, 3]
    elif kind == "copies":
        tree = {f"own{client}": torch.ones(2), "c": torch.full((3,), float(is_odd))}
    elif kind == "describing" and is_odd:
        tree["own"] = object()
    elif kind == "pattern":
        tree = {f"own{client}": torch.ones(2)}
        options = replace(options, stored_dtypes={"own2": "bfloat16", "owm*": "float32"})
    found: list[tuple[str, str]] = []
    for each in (tree, {f"own{client}": torch.ones(2), "w": rows}):
        try:
            dtckpt.save(path, each, options=options)
        except DtckptError as error:
            found.append((type(error).__name__, str(error)))
            options = SaveOptions(timeout_s=20)
    return found


def save_through_a_fault(path: str, fault: str) -> list[tuple[str, str]]:
    """Save different keys while a fault strikes the last client in the extra rounds; then again. Return the errors."""
    client = dtckpt.client_id()
    agree._kept.clear()  # what an earlier case has planned in this process
    tree: dict[str, Any] = {f"own{client}": torch.full((5,), float(client)), "lr": 0.5}
    options = SaveOptions(timeout_s=20, overwrite=True)

    def fail(*_: Any) -> None:
        raise MemoryError("no memory") if fault == "plan" else OSError(errno.EIO, "broken")

    found: list[tuple[str, str]] = []
    struck = {"put": (LocalFolder, "write"), "read": (LocalFolder, "read"), "plan": (agree, "plan_union")}
    for is_struck in (True, False):
        try:
            with ExitStack() as stack:
                if is_struck and fault in struck and client == dtckpt.num_clients() - 1:
                    stack.enter_context(patch.object(*struck[fault], fail))
                elif is_struck and fault == "late value":
                    dtckpt.save(path, tree, options=options)
                    stack.enter_context(patch.dict(tree, lr=0.25 if client == 2 else 0.5, step=1))
                dtckpt.save_async(path, tree, options=options).result(20)
        except DtckptError as error:
            found.append((type(error).__name__, str(error)))
    if fault == "forgotten":
        # As a client that was restarted: it has planned nothing yet.
        if client == 1:
            agree._kept.clear()
        dtckpt.save(path, tree, options=options)
    return found


def save_in_groups(folder: str) -> list[str]:
    """Save in two groups at one time, twice, in between together; return the faults in this group's checkpoint."""
    client = dtckpt.client_id()
    halves = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pair", "group"))["pair"]
    tensor = TorchDTensor.from_local(torch.full((2,), float(client)), mesh, [TorchShard(0)])
    tree = {"w": tensor, f"own{client}": torch.tensor(client), "step": client % 2}
    options, number = SaveOptions(timeout_s=20, overwrite=True), client % 2
    group: Any = halves[number]
    dtckpt.save(f"{folder}/{number}", tree, options=options, group=group)
    dtckpt.save_async(f"{folder}/{number}", tree, options=options, group=[number + 2, number]).result(20)
    dtckpt.save(f"{folder}/all", {f"own{client}": torch.tensor(client)}, options=options)
    target = {"w": torch.zeros(4), f"own{client}": torch.tensor(-1), "step": -1}
    dtckpt.restore(f"{folder}/{number}", target, group=group)
    expected = torch.tensor([number, number, number + 2, number + 2], dtype=torch.float32)
    is_right = target["w"].equal(expected) and int(target[f"own{client}"]) == client and target["step"] == number
    return [] if is_right else [repr(target)]


def manage_stages(root: str) -> list[str]:
    """Save a pipeline of plain tensors by a manager, and restore it by another one; return the faults."""
    client = dtckpt.client_id()
    state = {f"layer{client}": {"w": torch.zeros(3)}, "common": torch.zeros(2)}
    fill(state)
    with dtckpt.CheckpointManager(root, options=SaveOptions(timeout_s=20)) as manager:
        manager.save(1, state)
    fill(state, 0.0)
    dtckpt.CheckpointManager(root).restore(target=state, options=RestoreOptions(timeout_s=20))
    return wrong_in(state)


def call_with_bad_groups(path: str) -> list[str]:
    """Save and restore with groups that are none; return the errors."""
    other = 1 - dtckpt.client_id()
    found = []
    for group in ([other], [0, 0, 1], "01", [0, 1, 7], 5, [0.0, 1.0], dist.new_group([other])):
        for call in (dtckpt.save, dtckpt.save_async, dtckpt.restore):
            try:
                call(path, {"w": torch.ones(2)}, group=group)
            except DtckptError as error:
                found.append(type(error).__name__)
    return found


# --- slices and parts ---


def slices_tree(axes: Mapping[str, int], filled: bool) -> dict[str, Any]:
    """Return DTensors of ours on a mesh of two axes and on its slices.

    Args:
        axes: The axes of the mesh.
        filled: Whether they hold what their names say; else zeros.
    """
    mesh, (one, other) = dtckpt.create_distributed_mesh(dict(axes)), axes
    layouts = {
        "whole": Layout([one, other], mesh),
        "first": Layout([one, "unsharded"], mesh[one]),
        "second": Layout(["unsharded", other], mesh[other]),
        "copied": Layout(["unsharded", "unsharded"], mesh[other]),
    }
    like = torch.zeros(7, 5)
    return {name: packed(expected(f"/{name}", like) if filled else like, each) for name, each in layouts.items()}


def save_slices(path: str) -> list[list[str]]:
    with noted_rounds() as rounds:
        dtckpt.save(path, slices_tree({"x": 2, "y": 2}, filled=True), options=SaveOptions(timeout_s=20))
    return rounds


def restore_slices(path: str, axes: Mapping[str, int]) -> list[str]:
    """Restore into slices of another mesh; return the faults."""
    target = slices_tree(axes, filled=False)
    dtckpt.restore(path, target, options=RestoreOptions(timeout_s=20))
    return wrong_in(target)


def save_families(path: str) -> list[list[str]]:
    """Save PyTorch's DTensors on meshes of which each client knows its own only, twice."""
    client = dtckpt.client_id()
    pair = DeviceMesh("cpu", [client % 2, client % 2 + 2], mesh_dim_names=("dp",), _init_backend=False)
    world = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    flat = world["dp", "tp"]._flatten("all")
    w, v = expected("/w", torch.zeros(5, 3)), expected("/v", torch.zeros(7))
    tree = {
        "w": TorchDTensor.from_local(w.chunk(2)[client // 2], pair, [TorchShard(0)], shape=w.shape, stride=w.stride()),
        "v": TorchDTensor.from_local(
            torch.cat([v, v[:0]]).tensor_split([2, 4, 6])[client], flat, [TorchShard(0)], shape=v.shape, stride=(1,)
        ),
    }
    with noted_rounds() as rounds:
        for number in range(2):
            rounds.append("|")
            dtckpt.save(f"{path}{number}", tree, options=SaveOptions(timeout_s=20))
    return rounds


def restore_families(path: str, families: Sequence[Sequence[int]]) -> list[str]:
    """Restore into PyTorch's DTensors on meshes of which each client knows its own only; return the faults.

    Args:
        path: What `save_families` has saved.
        families: The clients of the meshes of one tensor.
    """
    client, clients = dtckpt.client_id(), dtckpt.num_clients()
    (own,) = (family for family in families if client in family)
    meshes = {
        "w": DeviceMesh("cpu", list(own), mesh_dim_names=("dp",), _init_backend=False),
        "v": init_device_mesh("cpu", (clients,), mesh_dim_names=("all",)),
    }
    target = {}
    for name, shape in (("w", (5, 3)), ("v", (7,))):
        whole, mesh = torch.zeros(shape), meshes[name]
        part = torch.tensor_split(whole, _starts(shape[0], mesh.size()))[mesh.mesh.tolist().index(client)]
        target[name] = TorchDTensor.from_local(
            part, mesh, [TorchShard(0)], shape=whole.shape, stride=whole.stride(), run_check=False
        )
    dtckpt.restore(path, target, options=RestoreOptions(timeout_s=20))
    return wrong_in(target)


def _starts(length: int, count: int) -> list[int]:
    """Return where PyTorch's shards begin, but for the first."""
    return [min(length, -(-length // count) * number) for number in range(1, count)]


def restore_in_parts(path: str, kind: str) -> tuple[str, list[float], tuple[str, ...]]:
    """Restore a part of a checkpoint on each client; return the error, what came, and what is reported unexpected."""
    client, clients = dtckpt.client_id(), dtckpt.num_clients()
    names = [f"w{number}" for number in range(client, 40, clients)]
    if kind == "rest" and client == 1:
        names.append("extra")
    if kind == "missing" and client == 1:
        names.append("more")
    target: dict[str, Any] = {name: torch.zeros(()) for name in names}
    if client == 0:
        target["step"] = 0
    reports: list[Any] = []
    allows = kind == "allowed" or (kind == "allowed by some" and client != 1)
    options = RestoreOptions(timeout_s=20, allow_unexpected=allows, report=reports.append)
    error = ""
    with patch.object(unexpected, "MAX_PAYLOAD_BYTES", 2):
        try:
            dtckpt.restore(path, target, options=options, group=range(clients))
        except DtckptError as caught:
            error = f"{type(caught).__name__}: {caught}"
    values = [float(target[name]) for name in names[:3]]
    return error, values, reports[-1].unexpected if reports else ()


class RankLoader:
    """A loader whose state has a key for each rank, as torchtitan's."""

    def __init__(self, rank: int, position: int) -> None:
        self.key, self.position = f"dp_rank_{rank}", position

    def state_dict(self) -> dict[str, Any]:
        return {self.key: {"position": self.position}, "world_size": 0}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert self.key in state
        assert len(state) == 2
        self.position = state[self.key]["position"]


def save_rank_loader(path: str) -> None:
    """Save the position of a loader of each client."""
    dtckpt.save(path, {"loader": RankLoader(dist.get_rank(), dist.get_rank() + 10)}, group=list(range(4)))


def restore_rank_loader(path: str) -> tuple[str, int]:
    """Restore it; return the error, and the position."""
    loader, error = RankLoader(dist.get_rank(), -1), ""
    try:
        dtckpt.restore(path, {"loader": loader}, group=list(range(dist.get_world_size())))
    except DtckptError as raised:
        error = f"{type(raised).__name__}: {raised.message}"
    return error, loader.position
