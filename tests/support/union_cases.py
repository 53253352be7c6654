"""Saves whose clients pass different things: slices of meshes, pipeline stages, mistakes; runs in client processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import dtckpt
from dtckpt import RestoreOptions, SaveOptions
from dtckpt.errors import DtckptError

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
    model = nn.ModuleDict({"layers": nn.ModuleDict({str(layer): Block() for layer in layers})})
    for block in model["layers"].values():
        if mesh is not None and "tp" in mesh.mesh_dim_names:
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(block, mesh["tp"], plan)
        if mesh is not None and "dp" in mesh.mesh_dim_names:
            fully_shard(block, mesh=mesh["dp"])
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
        own = state.to_local() if isinstance(state, TorchDTensor) else state
        own.detach().copy_(_local_part(state, whole))


def expected(name: str, like: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(map(ord, name)) * 31 + len(name))
    return torch.rand(like.shape, generator=generator).to(like.dtype)


def _local_part(tensor: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    if not isinstance(tensor, TorchDTensor):
        return whole
    from torch.distributed.tensor import distribute_tensor

    strided = distribute_tensor(whole, tensor.device_mesh, tensor.placements, src_data_rank=None)
    return strided.to_local()


def wrong_in(state: Any, name: str = "") -> list[str]:
    """Return the names of the tensors that do not hold what their names say."""
    if isinstance(state, Mapping):
        return [wrong for key, value in state.items() for wrong in wrong_in(value, f"{name}/{key}")]
    if not isinstance(state, torch.Tensor):
        return []
    whole = state.full_tensor() if isinstance(state, TorchDTensor | dtckpt.DTensor) else state
    return [] if torch.equal(whole, expected(name, whole)) else [name]
