"""Plain tensors that are parts of global ones, as expert parallelism has them; runs in client processes."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor as TorchDTensor

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
