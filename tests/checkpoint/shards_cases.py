"""Plain tensors that are parts of global ones, as expert parallelism has them; runs in client processes."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor import distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import dtckpt
from dtckpt import Shards
from dtckpt.checkpoint.per_client import ClientNumber
from dtckpt.checkpoint.saving.state import flatten_state
from dtckpt.errors import DtckptError

EXPERTS, WIDTH, HIDDEN = 8, 4, 6
SHAPES = {"rows": (8, 3), "columns": (3, 8), "uneven": (7, 2), "few": (5, 2)}


def whole(*shape: int) -> torch.Tensor:
    """Return a global tensor, with elements that tell their places."""
    return torch.arange(float(torch.Size(shape).numel())).view(shape)


def part_of(tensor: torch.Tensor, dim: int = 0, *, number: int | None = None, parts: int | None = None) -> torch.Tensor:
    """Return this client's part of a global tensor, as `torch.chunk` divides it; perhaps an empty one."""
    number, parts = dist.get_rank() if number is None else number, dist.get_world_size() if parts is None else parts
    size = -(-tensor.shape[dim] // parts)
    start = min(number * size, tensor.shape[dim])
    return tensor.narrow(dim, start, min(size, tensor.shape[dim] - start)).clone()


def failure_of(call: Any, *args: Any, **kwargs: Any) -> str:
    """Return class and text of the error of a call."""
    try:
        call(*args, **kwargs)
    except DtckptError as error:
        return f"{type(error).__name__}: {error}"
    return "none"


# --- tensors of a tree ---


def tree_of(fill: float | None, kind: str) -> dict[str, Any]:
    """Return a tree with parts of some tensors, of the right elements or of one value everywhere.

    Args:
        fill: The value.
        kind: Over which kind of mesh or group; with ``half``, each half of the clients has all parts.
    """
    mesh: Any = dist.group.WORLD
    number, parts = dist.get_rank(), dist.get_world_size()
    if kind == "torch mesh":
        mesh = init_device_mesh("cpu", (parts,), mesh_dim_names=("ep",))
    elif kind == "mesh":
        mesh = dtckpt.create_distributed_mesh({"ep": parts})
    elif kind == "half" and parts > 1:
        mesh, _ = dist.new_subgroups(parts // 2)
        number, parts = dist.get_rank(mesh), dist.get_world_size(mesh)
    own = {
        name: part_of(whole(*shape), 1 if name == "columns" else 0, number=number, parts=parts)
        for name, shape in SHAPES.items()
    }
    for tensor in own.values():
        if fill is not None:
            tensor.fill_(fill)
    return {
        "rows": Shards(own["rows"], mesh),
        "columns": Shards(own["columns"], mesh, -1),
        "uneven": Shards(nn.Parameter(own["uneven"]), mesh, size=7),
        "few": Shards(own["few"], mesh, size=5),
        "norm": torch.ones(3) if fill is None else torch.full((3,), fill),
    }


def save_tree(path: str, kind: str, *, is_async: bool = False) -> None:
    tree = tree_of(None, kind)
    if is_async:
        handle = dtckpt.save_async(path, tree)
        for value in tree.values():
            (value.tensor if isinstance(value, Shards) else value).detach().zero_()
        handle.result(20)
    else:
        dtckpt.save(path, tree)


def restore_tree(path: str, kind: str) -> list[str]:
    """Restore into other values; return the names of the tensors that are wrong, or are no longer the same."""
    target, expected = tree_of(-1.0, kind), tree_of(None, kind)
    before = {name: value.tensor for name, value in target.items() if isinstance(value, Shards)}
    assert dtckpt.restore(path, target) is target
    wrong = [name for name, tensor in before.items() if target[name].tensor is not tensor]
    wrong += [name for name, tensor in before.items() if not tensor.equal(expected[name].tensor)]
    return wrong + ["norm"] * (not target["norm"].equal(torch.ones(3)))


def save_sizes(path: str, sizes: tuple[int, ...], size: int | None) -> str:
    """Save parts of the given numbers of rows; return the error."""
    return failure_of(
        dtckpt.save, path, {"w": Shards(torch.ones(sizes[dist.get_rank()], 2), dist.group.WORLD, size=size)}
    )


def restore_sizes(path: str, sizes: tuple[int, ...], size: int | None) -> str:
    """Restore into parts of the given numbers of rows; return the error."""
    target = {"w": Shards(torch.ones(sizes[dist.get_rank()], 2), dist.group.WORLD, size=size)}
    return failure_of(dtckpt.restore, path, target)


def save_unmarked(path: str, *, is_module: bool, has_own_shapes: bool) -> str:
    """Save other values, or tensors of other shapes, under one name on each client; return the error."""
    tensor = torch.full((2 + dist.get_rank() * has_own_shapes, 3), float(dist.get_rank()))
    if not is_module:
        return failure_of(dtckpt.save, path, {"w": tensor})
    module = nn.Module()
    module.w = nn.Parameter(tensor)
    return failure_of(dtckpt.save, path, {"model": module})


def nested(rows: int, dim: int) -> tuple[dict[str, Any], torch.Tensor]:
    """Return a tree with this client's part of a tensor, itself sharded over other clients, and the part's elements."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "ep"))
    number, parts = mesh["ep"].get_local_rank(), mesh["ep"].size()
    own = part_of(whole(rows, 6), dim, number=number, parts=parts)
    part = distribute_tensor(own, mesh["dp"], [TorchShard(0)])
    return {"w": Shards(part, mesh["ep"], dim, size=(rows, 6)[dim])}, part.to_local().clone()


def save_nested(path: str, rows: int, dim: int) -> None:
    dtckpt.save(path, nested(rows, dim)[0])


def restore_nested(path: str, rows: int, dim: int) -> bool:
    tree, expected = nested(rows, dim)
    local = tree["w"].tensor.to_local()
    local.zero_()
    dtckpt.restore(path, tree)
    return local.equal(expected)


def refused_meshes() -> list[str]:
    """Return the errors of meshes that Shards cannot be on."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    lower = dist.new_group([0, 1])
    part = distribute_tensor(torch.ones(4, 2), mesh["ep"], [TorchShard(0)])
    apart = DeviceMesh("cpu", [0, 2, 1, 3])
    return [
        failure_of(Shards, torch.ones(2), mesh),
        failure_of(Shards, torch.ones(2), lower),
        failure_of(Shards, torch.ones(2), "ep"),
        failure_of(Shards, [1.0], mesh["ep"]),
        failure_of(Shards(part, mesh["ep"]).whole, "w"),
        failure_of(Shards(part, apart).whole, "w"),
        failure_of(Shards(torch.ones(2), mesh["ep"], 1).whole, "w"),
    ]


class Factored(torch.optim.Optimizer):
    """An optimizer whose state has fewer elements than its parameters, as Adafactor's."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            own = self.state[parameter]
            own["step"] = own.get("step", torch.zeros(())) + 1
            own["rows"] = parameter.detach().mean(-1, keepdim=True)
            own["columns"] = torch.ones(7)


def factored(fill: float | None) -> tuple[dict[str, Any], nn.Module]:
    model = nn.Module()
    model.w = nn.Parameter(part_of(whole(4, 2, 3)) if fill is None else torch.full_like(part_of(whole(4, 2, 3)), fill))
    Shards.mark(model, "w", dist.group.WORLD)
    return {"model": model, "optimizer": Factored(model.parameters())}, model


def save_factored(path: str) -> None:
    tree, _ = factored(None)
    tree["optimizer"].step()
    dtckpt.save(path, tree)


def restore_factored(path: str) -> bool:
    tree, model = factored(-1.0)
    dtckpt.restore(path, tree)
    own = tree["optimizer"].state[model.w]
    is_right = own["rows"].equal(part_of(whole(4, 2, 3).mean(-1, keepdim=True))) and own["step"] == 1
    return is_right and own["columns"].equal(torch.ones(7)) and model.w.equal(part_of(whole(4, 2, 3)))


def managed(root: str, *, is_first: bool) -> list[int]:
    """Save two steps with a manager, or restore the newest; return the steps."""
    tree = tree_of(None if is_first else -1.0, "group")
    with dtckpt.CheckpointManager(root) as manager:
        if not is_first:
            step = manager.restore(target=tree).step
            assert tree["rows"].tensor.equal(part_of(whole(8, 3)))
            return [step]
        for step in range(2):
            manager.save(step, tree)
        manager.wait()
        return list(manager.all_steps())


def wrapped_marks() -> list[str]:
    """Return the names of marked parameters in the states of wrappers and parts of a module."""
    model = nn.ModuleDict({"moe": nn.ModuleDict({"experts": nn.Linear(2, 3)}), "out": nn.Linear(3, 3)})
    Shards.mark(model, "moe.experts.*", dist.group.WORLD)
    held = {
        "model": model,
        "ddp": DistributedDataParallel(model),
        "compiled": torch.compile(model, backend="eager"),
        "part": model["moe"],
    }
    leaves, _, _ = flatten_state(held, ClientNumber(0, 1))
    return sorted(name for name, leaf in leaves.items() if isinstance(leaf, Shards))


# --- an expert-parallel model, within FSDP2 or alone ---


class _SumOver(torch.autograd.Function):
    """A sum over a group whose clients all go on with it: its gradient is the gradient of each summand."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


class Stacked(nn.Module):
    """Some experts as one parameter: (experts here, in, out)."""

    def __init__(self, own: range) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.stack([expert(number) for number in own]))

    def forward(self, x: torch.Tensor, own: range) -> torch.Tensor:
        return torch.einsum("bi,eio,e->bo", x, self.w, gates()[own.start : own.stop])


class Named(nn.Module):
    """Some experts as a parameter each, with the expert's global number in its name."""

    def __init__(self, own: range) -> None:
        super().__init__()
        self.by_number = nn.ParameterDict({str(number): expert(number) for number in own})

    def forward(self, x: torch.Tensor, own: range) -> torch.Tensor:
        return sum(gates()[number] * (x @ self.by_number[str(number)]) for number in own)


def expert(number: int) -> torch.Tensor:
    return torch.rand(WIDTH, HIDDEN, generator=torch.Generator().manual_seed(100 + number))


def gates() -> torch.Tensor:
    return torch.linspace(0.5, 1.5, EXPERTS)


class Model(nn.Module):
    """Experts, whose outputs are summed over the clients that have them, and a linear layer.

    Args:
        mesh: Axes ``dp`` and ``ep``.
        kind: The class of the experts.
    """

    def __init__(self, mesh: DeviceMesh, kind: type[Stacked | Named]) -> None:
        super().__init__()
        each = EXPERTS // mesh["ep"].size()
        first = each * mesh["ep"].get_local_rank()
        self.own, self.group = range(first, first + each), mesh["ep"].get_group()
        torch.manual_seed(0)
        self.experts, self.out = kind(self.own), nn.Linear(HIDDEN, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(_SumOver.apply(self.experts(x, self.own), self.group))


def training(
    ep: int, kind: type[Stacked | Named], *, is_sharded: bool, on_meta: bool = False, is_marked: bool = True
) -> tuple[Model, torch.optim.Optimizer, DeviceMesh]:
    """Return a model over all clients, and its optimizer.

    Args:
        ep: The size of the axis of experts.
        kind: The class of the experts.
        is_sharded: Whether FSDP2 shards the experts over ``dp``, and the rest over all clients.
        on_meta: Whether the model gets its memory by a restore.
        is_marked: Whether stacked experts are marked.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size() // ep, ep), mesh_dim_names=("dp", "ep"))
    model = Model(mesh, kind)
    if on_meta:
        model.to("meta")
    if kind is Stacked and is_marked:
        Shards.mark(model, "experts.w", mesh["ep"])
    if is_sharded:
        fully_shard(model.experts, mesh=mesh["dp"])
        fully_shard(model.out, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model, torch.optim.AdamW(model.parameters(), lr=0.05, fused=True), mesh


def train(model: Model, optimizer: torch.optim.Optimizer, mesh: DeviceMesh, steps: range) -> list[float]:
    """Train for some steps; return the losses of all clients' batches."""
    losses: list[float] = []
    for step in steps:
        x = torch.rand(8, WIDTH, generator=torch.Generator().manual_seed(step))
        own = x.chunk(mesh["dp"].size())[mesh["dp"].get_local_rank()]
        loss = (model(own) - own[:, :3]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item() / dist.get_world_size())
    return losses


def save_training(path: str, ep: int, kind: str, *, is_sharded: bool, is_async: bool = False) -> list[float]:
    """Train for two steps, save, and train on; return the losses after the save."""
    model, optimizer, mesh = training(ep, KINDS[kind], is_sharded=is_sharded)
    train(model, optimizer, mesh, range(2))
    if is_async:
        dtckpt.save_async(path, {"model": model, "optimizer": optimizer}).result(20)
    else:
        dtckpt.save(path, {"model": model, "optimizer": optimizer})
    return train(model, optimizer, mesh, range(2, 5))


def save_unmarked_experts(path: str, *, is_sharded: bool) -> str:
    """Save stacked experts that are not marked; return the error."""
    model, optimizer, _ = training(2, Stacked, is_sharded=is_sharded, is_marked=False)
    return failure_of(dtckpt.save, path, {"model": model, "optimizer": optimizer})


def resume_training(
    path: str, ep: int, kind: str, *, is_sharded: bool, is_fresh: bool = True, on_meta: bool = False
) -> list[float]:
    """Restore a model that has other values, and an optimizer with or without state; return the next losses."""
    model, optimizer, mesh = training(ep, KINDS[kind], is_sharded=is_sharded, on_meta=on_meta)
    if not is_fresh:
        train(model, optimizer, mesh, range(10, 13))
    elif not on_meta:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
    dtckpt.restore(path, {"model": model, "optimizer": optimizer})
    return train(model, optimizer, mesh, range(2, 5))


KINDS: dict[str, type[Stacked | Named]] = {"stacked": Stacked, "named": Named}
