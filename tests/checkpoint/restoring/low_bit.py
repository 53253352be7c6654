"""An optimizer whose state is in tensors of a wrapper subclass, as torchao's low-bit optimizers have it."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

import dtckpt
from dtckpt.errors import DtckptError

BLOCK = 8
"""Elements that share a scale."""


class LowBit(torch.Tensor):
    """A tensor of 8 bits: codes, and a scale for each block of elements."""

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor) -> LowBit:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor) -> None:
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale"], ["blocks", BLOCK]

    @classmethod
    def __tensor_unflatten__(cls, parts: dict[str, torch.Tensor], context: Any, shape: Any, stride: Any) -> LowBit:
        return cls(parts["codes"], parts["scale"])

    @classmethod
    def of(cls, tensor: torch.Tensor) -> LowBit:
        """Return a tensor in 8 bits."""
        blocks = tensor.reshape(-1, BLOCK)
        scale = blocks.abs().amax(1).clamp(min=1e-12)
        return cls((blocks / scale[:, None] * 127).round().to(torch.int8).reshape(tensor.shape), scale)

    def whole(self) -> torch.Tensor:
        """Return the elements in 32 bits."""
        return (self.codes.reshape(-1, BLOCK).float() / 127 * self.scale[:, None]).reshape(self.shape)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten._to_copy.default, torch.ops.aten.clone.default):
            return cls(args[0].codes.clone(), args[0].scale.clone())
        # Of `view_as`, by which DTensor.from_local takes a tensor.
        if func is torch.ops.aten.view.default and tuple(args[1]) == tuple(args[0].shape):
            return cls(args[0].codes, args[0].scale)
        return func(*tree_map_only(LowBit, LowBit.whole, args), **(kwargs or {}))


class LowBitMomentum(Optimizer):
    """Gradient descent with momentum in 8 bits where the elements fill blocks."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                self._update(parameter, group["lr"])

    def _update(self, parameter: torch.Tensor, lr: float) -> None:
        is_shard = isinstance(parameter, TorchDTensor)
        gradient = parameter.grad.to_local() if is_shard else parameter.grad
        state = self.state[parameter]
        old = state.get("momentum")
        old = old.to_local() if isinstance(old, TorchDTensor) else old
        whole = 0.0 if old is None else old.whole() if isinstance(old, LowBit) else old
        new = 0.9 * whole + gradient
        kept: Any = new if new.numel() % BLOCK else LowBit.of(new)
        if is_shard:
            facts = {"shape": parameter.shape, "stride": parameter.stride()}
            kept = TorchDTensor.from_local(kept, parameter.device_mesh, parameter.placements, run_check=False, **facts)
        state["momentum"] = kept
        (parameter.to_local() if is_shard else parameter).sub_(lr * new)


def model_and_optimizer(*, is_sharded: bool = False) -> tuple[nn.Module, Optimizer]:
    """Return a model, of whose tensors some fill blocks, and its optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 3))
    if is_sharded:
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model, LowBitMomentum(model.parameters())


def train(model: nn.Module, optimizer: Optimizer, first: int, last: int) -> list[float]:
    """Make some steps; return their losses."""
    losses = []
    for step in range(first, last):
        rows = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss = model(rows).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def resumes(path: str, *, is_sharded: bool = False) -> list[bool]:
    """Save a run; return whether runs go on equally that were restored into a fresh and a used optimizer."""
    model, optimizer = model_and_optimizer(is_sharded=is_sharded)
    train(model, optimizer, 0, 2)
    dtckpt.save(path, {"model": model, "optimizer": optimizer})
    expected = train(model, optimizer, 2, 5)
    assert all(map(math.isfinite, expected))
    found = []
    for steps in (0, 1):
        model, optimizer = model_and_optimizer(is_sharded=is_sharded)
        train(model, optimizer, 7, 7 + steps)
        dtckpt.restore(path, {"model": model, "optimizer": optimizer})
        found.append(train(model, optimizer, 2, 5) == expected)
    return found


def refusal(path: str, *, is_sharded: bool) -> tuple[str, str, bool]:
    """Restore into a fresh optimizer; return the error, and whether the model is as it was."""
    model, optimizer = model_and_optimizer(is_sharded=is_sharded)
    before = [each.detach().clone() for each in model.parameters()]
    try:
        dtckpt.restore(path, {"model": model, "optimizer": optimizer})
    except DtckptError as error:
        same = all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))
        return type(error).__name__, error.message, same
    return "", "", False
