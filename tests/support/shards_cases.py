"""Plain tensors that are parts of global ones, as expert parallelism has them; runs in client processes."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import dtckpt
from dtckpt import SaveOptions, Shards
from dtckpt.errors import DtckptError

EXPERTS, WIDTH, HIDDEN = 8, 4, 6


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
    """Return a tree with parts of three tensors, of the right elements or of one value everywhere."""
    mesh: Any = dist.group.WORLD
    if kind == "torch mesh":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
    elif kind == "mesh":
        mesh = dtckpt.create_distributed_mesh({"ep": dist.get_world_size()})
    parts = {"rows": part_of(whole(8, 3)), "columns": part_of(whole(3, 8), 1), "uneven": part_of(whole(7, 2))}
    for tensor in parts.values():
        if fill is not None:
            tensor.fill_(fill)
    return {
        "rows": Shards(parts["rows"], mesh),
        "columns": Shards(parts["columns"], mesh, -1),
        "uneven": Shards(nn.Parameter(parts["uneven"]), mesh, size=7),
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


def save_wrong_sizes(path: str, size: int | None) -> str:
    """Save parts of 4 rows and of 3, and say what happens."""
    tensor = torch.ones(4 if dist.get_rank() == 0 else 3, 2)
    return failure_of(dtckpt.save, path, {"w": Shards(tensor, dist.group.WORLD, size=size)}, options=SaveOptions())


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
    ep: int, kind: type[Stacked | Named], *, is_sharded: bool, on_meta: bool = False
) -> tuple[Model, torch.optim.Optimizer, DeviceMesh]:
    """Return a model over all clients, and its optimizer.

    Args:
        ep: The size of the axis of experts.
        kind: The class of the experts.
        is_sharded: Whether FSDP2 shards the experts over ``dp``, and the rest over all clients.
        on_meta: Whether the model gets its memory by a restore.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size() // ep, ep), mesh_dim_names=("dp", "ep"))
    model = Model(mesh, kind)
    if on_meta:
        model.to("meta")
    if kind is Stacked:
        Shards.mark(model, "experts.w", mesh["ep"])
    if is_sharded:
        fully_shard(model.experts, mesh=mesh["dp"])
        fully_shard(model.out, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model, torch.optim.AdamW(model.parameters(), lr=0.05), mesh


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


def state_of(model: Model, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the tree: the objects, or where experts have names of their own, the state by these names."""
    if isinstance(model.experts, Stacked):
        return {"model": model, "optimizer": optimizer}
    weights, moments = get_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    return {"model": weights, "optimizer": moments}


def save_training(path: str, ep: int, kind: str, *, is_sharded: bool, is_async: bool = False) -> list[float]:
    """Train for two steps, save, and train on; return the losses after the save."""
    model, optimizer, mesh = training(ep, KINDS[kind], is_sharded=is_sharded)
    train(model, optimizer, mesh, range(2))
    if is_async:
        dtckpt.save_async(path, state_of(model, optimizer)).result(20)
    else:
        dtckpt.save(path, state_of(model, optimizer))
    return train(model, optimizer, mesh, range(2, 5))


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
    state = state_of(model, optimizer)
    dtckpt.restore(path, state)
    if kind == "named":
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        set_state_dict(
            model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"], options=options
        )
    return train(model, optimizer, mesh, range(2, 5))


KINDS: dict[str, type[Stacked | Named]] = {"stacked": Stacked, "named": Named}
