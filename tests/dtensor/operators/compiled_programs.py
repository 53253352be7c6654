"""Modules and training steps for `torch.compile`, and how a compiled program differs from the same one in eager.

They are apart from the tests as client processes run them, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from support.states import cluster_mesh
from torch import nn
from torch.utils.checkpoint import checkpoint

import dtckpt
from dtckpt import DTensor, Replicate, Shard
from dtckpt.dtensor import distribute_module, distribute_tensor
from dtckpt.dtensor.experimental import local_map

MESHES = {"line": ({"x": 4}, [Shard(0)]), "square": ({"x": 2, "y": 2}, [Shard(0), Replicate()])}
"""Axes of a mesh, and the placements of batches on it."""


class Layers(nn.Module):
    """Two linear layers; programs derive from it."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8)


class CountedSteps(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, rows):
        self.steps += 1
        made = self.one(rows)
        with torch.no_grad():
            self.mean.mul_(0.9).add_(made.mean(0), alpha=0.1)
            self.mean = self.mean * 1.0
        return made * self.steps - self.mean


class InPlace(Layers):
    def forward(self, rows):
        flat = self.one(rows).view(-1) * 1
        flat += 1
        flat[::2] = 0
        flat /= 2
        return F.relu(self.other(flat.view(rows.shape)), inplace=True)


class BesidePlain(Layers):
    def forward(self, rows):
        scale = torch.linspace(0, 1, 8).sin().cumsum(0) + 1
        return self.one(rows) * (scale * 2).tanh() + scale


class Dropout(Layers):
    def forward(self, rows):
        halves = F.dropout(self.one(rows), 0.5, self.training).view(-1, 4, 2).split(2, dim=1)
        return self.other(torch.cat(halves, 1).reshape(rows.shape))


class Checkpointed(Layers):
    def forward(self, rows):
        rows = checkpoint(lambda one: F.dropout(F.gelu(self.one(one)), 0.3, self.training), rows, use_reentrant=False)
        return checkpoint(self.other, rows, use_reentrant=False)


class Autocast(Layers):
    def forward(self, rows):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            made = self.other(F.silu(self.one(rows)))
        return made.float()


class Mapped(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.wave = local_map(wave, [Shard(0)])

    def forward(self, rows):
        if rows.device_mesh.ndim > 1:
            return wave(self.one(rows))
        return self.wave(self.one(rows))


def wave(rows: torch.Tensor) -> torch.Tensor:
    return rows.sin() * 2 + rows.cos()


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(2, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)

    def forward(self, rows):
        return self.layer(self.embedding((rows > 0).long()))


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))


def batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.LayerNorm(8))


PROGRAMS: dict[str, Callable[[], nn.Module]] = {
    make.__name__: make
    for make in (
        *(CountedSteps, InPlace, BesidePlain, Dropout, Checkpointed, Autocast, Mapped, Attention),
        *(perceptron, batch_norm),
    )
}


def trained(name: str, mesh: Any, placements: Any, compile_options: dict[str, Any] | None) -> list[torch.Tensor]:
    """Train a program for some steps on batches of two sizes; return its outputs, its state and its gradients.

    Args:
        name: Of the program.
        mesh: The mesh.
        placements: Of the batches.
        compile_options: Arguments of `torch.compile`; None runs the program in eager.
    """
    torch.manual_seed(3)
    model = distribute_module(PROGRAMS[name](), mesh)
    called = model if compile_options is None else torch.compile(model, **compile_options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    results = []
    for sizes in (8, 8, 12, 8, 12):
        rows = distribute_tensor(torch.randn(sizes, 8), mesh, placements)
        optimizer.zero_grad()
        made = called(rows)
        made.pow(2).mean().backward()
        optimizer.step()
        results.append(made.detach())
    model.eval()
    with torch.no_grad():
        results.append(called(rows))
    if "steps" not in model.state_dict():  # Inference mode may not write to buffers that were made outside of it.
        with torch.inference_mode():
            results.append(called(rows).clone())
    return [*results, *model.state_dict().values(), *(one.grad for one in model.parameters() if one.grad is not None)]


def differences(name: str, mesh: Any, placements: Any, **compile_options: Any) -> list[int]:
    """Return which results of a compiled program differ from eager results, in values or in layout."""
    plain = trained(name, mesh, placements, None)
    compiled = trained(name, mesh, placements, compile_options)
    assert len(plain) == len(compiled)
    return [number for number, (one, other) in enumerate(zip(plain, compiled, strict=True)) if not _is_same(one, other)]


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    assert isinstance(one, DTensor)
    assert isinstance(other, DTensor)
    return one.placements == other.placements and torch.equal(one.full_tensor(), other.full_tensor())


def differences_on_clients(names: list[str]) -> dict[str, list[int]]:
    """Return `differences` of some programs, on a mesh over all clients."""
    count = dtckpt.num_clients()
    mesh = cluster_mesh({"x": count}, count, dtckpt.client_id())
    return {name: differences(name, mesh, [Shard(0)], backend="eager") for name in names}
