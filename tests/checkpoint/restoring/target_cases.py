"""Training runs that are saved and restored into fresh modules and optimizers: functions that client processes run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from support.states import packed
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor import Partial, Replicate
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor import distribute_tensor as torch_distribute
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

import dtckpt
from dtckpt import Layout, Mesh, interop
from dtckpt.dtensor import DTensor, Shard, distribute_module, distribute_tensor
from dtckpt.errors import DtckptError
from dtckpt.layout import device_mesh

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "foreach": lambda parameters: torch.optim.AdamW(parameters, 0.1, foreach=True),
    "fused": lambda parameters: torch.optim.AdamW(parameters, 0.1, fused=True),
    "momentum": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9),
}


class Net(nn.Module):
    """Two layers of uneven sizes, with a frozen parameter, a scale and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 10)
        self.second = nn.Linear(10, 5, bias=False)
        self.second.weight.requires_grad_(False)
        self.third = nn.Linear(5, 5)
        self.register_buffer("offset", torch.rand(5))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.third(self.second(self.first(rows).relu())) + self.offset


def model_on(kind: str, seed: int, *, is_meta: bool = False) -> nn.Module:
    """Return a model of a kind over all clients."""
    torch.manual_seed(seed)
    size = dist.get_world_size()
    with torch.device("meta" if is_meta else "cpu"):
        model = Net()
    if kind == "fsdp2":
        mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("dp",))
        for layer in (model.first, model.third):
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    if kind == "fsdp2+tp":
        grid = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, grid["tp"], {"first": ColwiseParallel(), "second": RowwiseParallel()})
        parallelize_module(model, grid["tp"], {"third": ColwiseParallel(output_layouts=Replicate())})
        return fully_shard(model, mesh=grid["dp"])
    mesh = dtckpt.create_distributed_mesh({"dp": size})

    def shard(_: str, module: nn.Module, mesh: Any) -> None:
        for name, parameter in list(module.named_parameters(recurse=False)):
            moved = distribute_tensor(parameter, mesh, [Shard(0)])
            module.register_parameter(name, nn.Parameter(moved, parameter.requires_grad))

    return distribute_module(model, mesh, shard)


def optimizer_of(model: nn.Module, name: str) -> torch.optim.Optimizer:
    """Return an optimizer with two groups, whose order differs from the model's."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    biases = [parameter for parameter in trained if parameter.ndim == 1]
    weights = [parameter for parameter in trained if parameter.ndim == 2]
    return OPTIMIZERS[name]([{"params": biases, "weight_decay": 0.0}, {"params": weights[::-1], "lr": 0.05}])


def losses_of(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    """Train, on the same rows on all clients, and return the losses."""
    losses = []
    for step in steps:
        rows = torch.randn(6, 4, generator=torch.Generator().manual_seed(step))
        loss = whole(model(rows).square().mean())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses


def whole(tensor: torch.Tensor) -> torch.Tensor:
    # `full_tensor` of PyTorch 2.9 takes uneven strided shards for even shards.
    tensor = interop.from_torch(tensor) if isinstance(tensor, TorchDTensor) else tensor
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class AppState:
    """An object that holds a module and an optimizer, and returns their raw states."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


def save_run(path: str, kind: str, optimizer: str) -> list[float]:
    """Train two steps, save, train two more; return the losses of these."""
    model = model_on(kind, 0)
    trained = optimizer_of(model, optimizer)
    losses_of(model, trained, range(2))
    dtckpt.save(path, {"run": {"model": model, "optimizer": trained}})
    return losses_of(model, trained, range(2, 4))


def restore_run(path: str, kind: str, optimizer: str, form: str, *, is_meta: bool = False) -> tuple[list[str], Any]:
    """Restore into a fresh run; return its faults, and the losses of two more steps."""
    model = model_on(kind, 1, is_meta=is_meta)
    fresh = optimizer_of(model, optimizer)
    parameters = list(model.parameters())
    if form == "objects":
        dtckpt.restore(path, {"run": {"optimizer": fresh, "model": model}})
    elif form == "app":
        dtckpt.restore(path, {"run": AppState(model, fresh)})
    else:
        state = {"run": AppState(model, fresh).state_dict()}
        assert dtckpt.restore(path, state) is state
        AppState(model, fresh).load_state_dict(state["run"])
    assert all(new is old for new, old in zip(model.parameters(), parameters, strict=True))
    found = [*faults_of_state(fresh), *(f"{name} on meta" for name, each in model.state_dict().items() if each.is_meta)]
    return found, losses_of(model, fresh, range(2, 4))


def faults_of_state(optimizer: torch.optim.Optimizer) -> Iterator[str]:
    """Yield the states that are not laid out as their parameter."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            if not state:
                yield f"no state of {parameter.shape}"
            for name, value in state.items():
                if name == "step":
                    if type(value) is not torch.Tensor:
                        yield f"step is a {type(value)}"
                elif (type(value), getattr(value, "placements", None)) != (
                    type(parameter.data),
                    getattr(parameter, "placements", None),
                ):
                    yield f"{name} of {parameter.shape}: {type(value)} {getattr(value, 'placements', None)}"


def contents_of(path: str, kind: str, optimizer: str, *, is_meta: bool = False) -> dict[str, torch.Tensor]:
    """Restore into a fresh run; return whole tensors: of the model, and of the optimizer by the parameter's name."""
    model = model_on(kind, 1, is_meta=is_meta)
    fresh = optimizer_of(model, optimizer)
    dtckpt.restore(path, {"run": {"optimizer": fresh, "model": model}})
    assert not list(faults_of_state(fresh))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    state = {
        f"{names[id(parameter)]} {key}": value
        for parameter, values in fresh.state.items()
        for key, value in values.items()
        if isinstance(value, torch.Tensor)
    }
    return {name: whole(tensor.detach()) for name, tensor in {**model.state_dict(), **state}.items()}


def faults_of_assigned(path: str) -> list[str]:
    """Return the faults with a model on the meta device that gets its state by ``assign``."""
    model = model_on("fsdp2", 1, is_meta=True)
    mesh = model.first.weight.device_mesh
    state = dtckpt.restore(path, mesh=mesh)["run"]["model"]
    plain = dtckpt.restore(path)["run"]["model"]
    model.load_state_dict(state, assign=True)
    model(torch.ones(2, 4)).sum().backward()
    # PyTorch may give what it detaches for a state dict an equal mesh of an earlier case, so `state` is looked at, too.
    return [
        name
        for name, tensor in model.state_dict().items()
        if not torch.equal(whole(tensor), plain[name])
        or isinstance(tensor, TorchDTensor) != (name != "offset")
        or (name != "offset" and (state[name].device_mesh is not mesh or tensor.placements != (TorchShard(0),)))
    ]


def faults_of_torch_layouts(path: str) -> list[str]:
    """Return the faults with tensors that are restored by placements and layouts, ours and PyTorch's."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    tensors = {name: torch.arange(35.0).reshape(5, 7) for name in "abcd"}
    dtckpt.save(path, tensors)
    strided = (_StridedShard(0, split_factor=2), TorchShard(0))
    layouts: dict[str, Any] = {
        "a": strided,
        "b": [Shard(1), Shard(0)],
        "c": Layout(["tp", "unsharded"], Mesh.from_device_mesh(grid["tp"])),
    }
    found = []
    made = dtckpt.restore(path, mesh=grid, layouts=layouts)
    expected = {"a": (grid, strided), "b": (grid, (TorchShard(1), TorchShard(0))), "c": (grid["tp"], (TorchShard(0),))}
    for name, (mesh, placements) in expected.items():
        if (made[name].device_mesh, made[name].placements) != (mesh, placements):
            found.append(f"{name}: {made[name].placements} on {made[name].device_mesh}")
        if not torch.equal(made[name].full_tensor(), tensors[name]):
            found.append(f"{name}: {made[name].full_tensor()}")
    if type(made["d"]) is not torch.Tensor:
        found.append(f"d is a {type(made['d'])}")
    ours = dtckpt.restore(path, mesh=Mesh.from_device_mesh(grid), layouts={"a": strided, "[bc]": (Shard(0), Shard(1))})
    found += [name for name in "abcd" if not torch.equal(ours[name].full_tensor(), tensors[name])]
    found += [name for name in "abcd" if not isinstance(ours[name], DTensor)]
    other = dtckpt.create_distributed_mesh({"x": 4})
    for wrong in ({"mesh": grid, "layouts": {"a": Layout(["x", "unsharded"], other)}}, {"layouts": {"a": strided}}):
        try:
            dtckpt.restore(path, **wrong)
        except DtckptError as error:
            if not any(text in str(error) for text in ("a slice of it", "need mesh=")):
                found.append(str(error))
        else:
            found.append(f"{wrong} was taken")
    return found


def conversions_of_mesh(path: str) -> list[int]:
    """Save and restore many PyTorch DTensors on one mesh; return how often each of the two converted the mesh."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    placements = [[TorchShard(0)], [Replicate()]]
    state = {str(number): torch_distribute(torch.ones(4, 2), mesh, placements[number % 2]) for number in range(100)}
    counts: list[int] = []
    convert = device_mesh.mesh_of
    try:
        for work in (lambda: dtckpt.save(path, state), lambda: dtckpt.restore(path, state)):
            seen: list[Any] = []
            device_mesh.mesh_of = lambda mesh, seen=seen: seen.append(mesh) or convert(mesh)  # type: ignore
            work()
            counts.append(len(seen))
    finally:
        device_mesh.mesh_of = convert
    return counts


def faults_of_sharing(rank_count: int = 4) -> list[str]:
    """Return which tensors do not share their memory, values and gradients with their counterparts."""
    found = []
    grid = init_device_mesh("cpu", (2, rank_count // 2), mesh_dim_names=("dp", "tp"))
    for mesh, shape, placements in (
        (grid, (5, 7), (TorchShard(0), TorchShard(1))),
        (grid, (9, 2), (_StridedShard(0, split_factor=2), TorchShard(0))),
        (grid, (9, 2), (TorchShard(0), TorchShard(0))),
        (grid, (1, 3), (Replicate(), TorchShard(0))),
        (grid["tp"], (0, 3), (TorchShard(1),)),
        (grid["dp"], (), (Replicate(),)),
    ):
        values = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        local = packed(values, Layout.from_placements(Mesh.from_device_mesh(mesh), placements, len(shape)))
        given = interop.to_torch(local)
        back = interop.from_torch(given)
        facts = given.device_mesh is mesh, given.placements == placements, back.layout == local.layout
        memory = {tensor.to_local().untyped_storage().data_ptr() for tensor in (local, given, back)}
        if facts != (True, True, True) or len(memory) != 1:
            found.append(f"{shape} {placements}: {facts} {given.placements} {memory}")
        if not torch.equal(given.full_tensor(), values) or not torch.equal(back.full_tensor(), values):
            found.append(f"{shape} {placements}: {given.full_tensor()}")
        leaf = given.detach().requires_grad_()
        interop.to_torch(interop.from_torch(leaf) * 3).full_tensor().square().sum().backward()
        if leaf.grad is None or not torch.allclose(leaf.grad.full_tensor(), 18 * values):
            found.append(f"{shape} {placements}: gradient {leaf.grad}")
    pending = TorchDTensor.from_local(torch.ones(3), grid["tp"], [Partial()])
    if interop.to_torch(interop.from_torch(pending)).placements != (Partial(),):
        found.append("pending")
    for call in (lambda: interop.to_torch(torch.ones(2)), lambda: interop.from_torch(torch.ones(2))):
        try:
            call()
            found.append("a plain tensor was taken")
        except DtckptError:
            pass
    return found


def errors_of_mixed_libraries(path: str) -> list[str]:
    """Return the errors of PyTorch's functions that get what is ours, and of a save of what they would make."""
    mesh = dtckpt.create_distributed_mesh({"dp": dist.get_world_size()})
    device_mesh = mesh.to_device_mesh()
    inner = distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)])
    mixed = TorchDTensor.from_local(inner, device_mesh, [TorchShard(0)], run_check=False)
    errors = []
    for call in (
        lambda: fully_shard(nn.Linear(4, 4), mesh=mesh),
        lambda: parallelize_module(nn.Linear(4, 4), mesh, ColwiseParallel()),
        lambda: TorchDTensor.from_local(torch.ones(4), mesh, [TorchShard(0)]),
        lambda: fully_shard(model_on("ours", 0), mesh=device_mesh),
        lambda: dtckpt.save(path, {"inner": {"w": mixed}}),
    ):
        try:
            call()
            errors.append("")
        except DtckptError as error:
            errors.append(f"{type(error).__name__}: {error}")
    return errors


def error_of_stale_values(path: str) -> str:
    """Return the error of a backward pass after a restore in place, which needs the values of before."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    weight = nn.Parameter(
        interop.to_torch(packed(torch.ones(4, 3), Layout.from_placements(Mesh.from_device_mesh(mesh), [Shard(0)], 2)))
    )
    dtckpt.save(path, {"w": torch.zeros(4, 3)})
    loss = (weight * weight).sum()
    dtckpt.restore(path, {"w": weight.detach()})
    try:
        loss.backward()
    except RuntimeError as error:
        return str(error)
    return ""
