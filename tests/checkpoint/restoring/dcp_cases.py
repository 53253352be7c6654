"""Cases for client processes: checkpoints that PyTorch's own ``torch.distributed.checkpoint`` saves and loads."""

from __future__ import annotations

import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.distributed.tensor import Shard as TorchShard

import dtckpt

from .target_cases import losses_of, model_on, optimizer_of, whole

VALUES = {
    "step": 3,
    "name": "run",
    "betas": (0.9, 0.95),
    "losses": [0.5, float("inf")],
    "random": {"python": random.Random(1).getstate(), "numpy": np.random.RandomState(2).get_state()},
    "nested": [{"a": {0: None}}, torch.arange(3)],
    "pair": (torch.ones(2, 3), "text"),
}
"""What a training job has beside its parameters."""


def fresh_state(kind: str, seed: int, *, is_trained: bool = False) -> tuple[Any, Any, dict[str, Any]]:
    """Return a model, its optimizer, and their state dicts as PyTorch's functions return them."""
    model = model_on(kind, seed)
    optimizer = optimizer_of(model, "foreach")
    if is_trained:
        losses_of(model, optimizer, range(2))
    states = get_state_dict(model, optimizer)
    return model, optimizer, dict(zip(("model", "optim"), states, strict=True))


def save_dcp(path: str, kind: str) -> list[float]:
    """Train two steps, save with PyTorch; save the same state with this library; train on, and return the losses."""
    warnings.simplefilter("ignore")
    model, optimizer, state = fresh_state(kind, 0, is_trained=True)
    state |= VALUES
    dcp.save(state, checkpoint_id=f"{path}/dcp")
    dtckpt.save(f"{path}/ours", state)
    return losses_of(model, optimizer, range(2, 4))


def restore_run(path: str, kind: str) -> list[float]:
    """Restore into the state dict of a fresh run, and train on; return the losses."""
    warnings.simplefilter("ignore")
    model, optimizer, state = fresh_state(kind, 1)
    dtckpt.restore(path, state, options=dtckpt.RestoreOptions(allow_unexpected=True))
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    return losses_of(model, optimizer, range(2, 4))


def contents_of(path: str, kind: str) -> dict[str, torch.Tensor]:
    """Restore into the state dict of a fresh run; return its whole tensors."""
    warnings.simplefilter("ignore")
    _, _, state = fresh_state(kind, 1)
    dtckpt.restore(path, state, options=dtckpt.RestoreOptions(allow_unexpected=True))
    flat, _ = dcp._nested_dict.flatten_state_dict(state)
    return {name: whole(value) for name, value in flat.items() if isinstance(value, torch.Tensor)}


def loaded_by_torch(path: str, kind: str) -> dict[str, torch.Tensor]:
    """Load with PyTorch into the state dict of a fresh run; return its whole tensors."""
    warnings.simplefilter("ignore")
    _, _, state = fresh_state(kind, 1)
    dcp.load(state, checkpoint_id=path)
    flat, _ = dcp._nested_dict.flatten_state_dict(state)
    return {name: whole(value) for name, value in flat.items() if isinstance(value, torch.Tensor)}


def save_large(path: str, rows: int, columns: int) -> None:
    """Save one tensor with PyTorch, in rows."""
    warnings.simplefilter("ignore")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    tensor = torch.arange(rows * columns, dtype=torch.float32).reshape(rows, columns)
    dcp.save({"w": distribute_tensor(tensor, mesh, [TorchShard(0)])}, checkpoint_id=path)


def bytes_read(path: str, rows: int, columns: int, dim: int) -> int:
    """Restore the tensor of `save_large` sharded by a dim; return the bytes that this process read meanwhile."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    target = {"w": distribute_tensor(torch.zeros(rows, columns), mesh, [TorchShard(dim)])}
    dtckpt.restore(path, target)  # whatever is imported and read once is
    before = _bytes_read()
    dtckpt.restore(path, target)
    read = _bytes_read() - before
    expected = torch.arange(rows * columns, dtype=torch.float32).reshape(rows, columns)
    assert torch.equal(target["w"].full_tensor(), expected)
    return read


def _bytes_read() -> int:
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])


def save_alone(path: str) -> None:
    """Save without collectives: each process for itself, some of it not the same everywhere."""
    warnings.simplefilter("ignore")
    rank, line = dist.get_rank(), init_device_mesh("cpu", (2,))
    state = {
        "w": distribute_tensor(torch.arange(14.0).reshape(7, 2), line, [TorchShard(0)]),
        "same": distribute_tensor(torch.arange(4.0), line, [Replicate()]),
        "plain": torch.ones(2),
        "step": 5,
        "loader": {"position": 10 * rank},
        "random": torch.full((3,), float(rank)),
        "pair": (torch.full((2,), float(rank)), rank),
        "bad": torch.ones(3, 2),
    }
    if rank:
        part = TorchDTensor.from_local(torch.zeros(1, 2), line, [TorchShard(0)], shape=(3, 2), stride=(2, 1))
        state |= {"only": "here", "bad": part}
    dcp.save(state, checkpoint_id=path, use_collectives=False)


def save_odd_shapes(path: str) -> None:
    """Save tensors that divide badly: fewer rows than clients, none at all, scalars, on grids, in any memory format."""
    warnings.simplefilter("ignore")
    line = init_device_mesh("cpu", (4,))
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dcp.save(_odd_shapes(line, grid, 0), checkpoint_id=path)


def faults_of_odd_shapes(path: str) -> list[str]:
    """Return which tensors of `save_odd_shapes` do not come back, as plain tensors or in other layouts."""
    expected = _plain_shapes(0)
    restored = dtckpt.restore(path)
    found = [name for name, tensor in expected.items() if not _is_same(restored[name], tensor)]
    line = init_device_mesh("cpu", (dist.get_world_size(),))
    made = dtckpt.restore(path, mesh=line, layouts={"row|wide|cube": [TorchShard(1)]})
    return found + [name for name, tensor in expected.items() if not _is_same(whole(made[name]), tensor)]


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.to(torch.float64), other.to(torch.float64))


def _plain_shapes(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "row": (1, 7),
        "few": (3, 2),
        "wide": (5, 11),
        "none": (0, 3),
        "scalar": (),
        "cube": (5, 3, 4),
        "strided": (6, 5),
    }
    dtypes = {"few": torch.bfloat16, "wide": torch.float64, "strided": torch.int64}
    return {
        name: (torch.rand(shape, generator=generator) * 100).to(dtypes.get(name, torch.float32))
        for name, shape in shapes.items()
    }


def _odd_shapes(line: Any, grid: Any, seed: int) -> dict[str, torch.Tensor]:
    placements: dict[str, tuple[Any, list[Any]]] = {
        "row": (line, [TorchShard(0)]),
        "few": (line, [TorchShard(0)]),
        "wide": (grid, [TorchShard(0), TorchShard(1)]),
        "none": (line, [TorchShard(0)]),
        "cube": (grid, [TorchShard(0), TorchShard(0)]),
        "strided": (grid["tp"], [TorchShard(1)]),
        "scalar": (grid, [Replicate(), Replicate()]),
    }
    plain = _plain_shapes(seed)
    # The local part of a column shard has the strides of the whole.
    local = plain["strided"].t().contiguous().t()
    made = {name: distribute_tensor(plain[name], *where) for name, where in placements.items() if name != "strided"}
    columns = TorchDTensor.from_local(
        torch.chunk(local, 2, dim=1)[grid["tp"].get_local_rank()].clone(memory_format=torch.preserve_format),
        grid["tp"],
        [TorchShard(1)],
        shape=local.shape,
        stride=local.stride(),
    )
    return made | {"strided": columns}
