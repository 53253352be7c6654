"""Small models with optimizers, whose gradients tell the names of the parameters; some run in client processes."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer

import dtckpt
from dtckpt import RestoreOptions, SaveOptions


class Net(nn.ModuleDict):
    """Layers of one shape."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.values():
            x = layer(x)
        return x


def net(layers: Iterable[str]) -> Net:
    """Return a model of layers in an order."""
    torch.manual_seed(0)
    return Net({layer: nn.Linear(3, 3) for layer in layers})


def gradients(model: nn.Module) -> float:
    """Give each parameter a gradient that its name tells."""
    for name, parameter in model.named_parameters():
        parameter.grad = torch.zeros_like(parameter) + zlib.crc32(name.encode()) % 97
    return 1.0


def stepped(optimizer: Any, model: nn.Module) -> Any:
    """Return an optimizer after a step."""
    gradients(model)
    optimizer.step()
    return optimizer


def state_by_name(optimizer: Optimizer, model: nn.Module) -> dict[str, Any]:
    """Return the state of an optimizer by the names of its parameters, as lists."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {
        names[parameter]: {key: _listed(value) for key, value in state.items()}
        for parameter, state in optimizer.state.items()
    }


def _listed(value: Any) -> Any:
    value = value.full_tensor() if isinstance(value, DTensor) else value
    return value.tolist() if isinstance(value, torch.Tensor) else value


def _sharded(layers: str) -> tuple[Net, AdamW]:
    model = net(layers)
    mesh = init_device_mesh("cpu", (dtckpt.num_clients(),))
    for layer in (*model.children(), model):
        fully_shard(layer, mesh=mesh)
    return model, AdamW(model.parameters())


def _stage(layers: str) -> tuple[Net, AdamW]:
    """Return this client's part of the layers, as plain tensors."""
    client, clients = dtckpt.client_id(), dtckpt.num_clients()
    model = net(layers[len(layers) * client // clients : len(layers) * (client + 1) // clients])
    return model, AdamW(model.parameters())


_PARTS = {"fsdp": _sharded, "stages": _stage}
"""Each client's part of a model: shards of all layers, or some layers whole."""


def save(path: str, parts: str, layers: str) -> dict[str, Any]:
    """Save this client's part of a model, with its optimizer; return the state by name."""
    model, optimizer = _PARTS[parts](layers)
    stepped(optimizer, model)
    dtckpt.save(path, {"model": model, "optimizer": optimizer}, options=SaveOptions(timeout_s=20))
    return state_by_name(optimizer, model)


def restore(path: str, parts: str, layers: str) -> dict[str, Any]:
    """Restore what `save` saved, into layers in another order or on another number of clients; return as `save`."""
    model, optimizer = _PARTS[parts](layers)
    group = range(dtckpt.num_clients())
    dtckpt.restore(path, {"model": model, "optimizer": optimizer}, options=RestoreOptions(timeout_s=20), group=group)
    return state_by_name(optimizer, model)
