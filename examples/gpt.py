"""Train a small GPT on a 2-D mesh: the batch over ``data``, heads, features and the vocabulary over ``model``.

    torchrun --nproc-per-node=4 -m examples.gpt --steps 50
    python -m examples.gpt                                    # four virtual devices in one process
    python -m examples.gpt --device cuda                      # four that share a GPU

The model is ordinary PyTorch. One table, `PLACEMENTS`, has all distributed parameters; random numbers do not depend on
the mesh, so neither do the losses.
"""

from __future__ import annotations

import argparse
import os
from fnmatch import fnmatch

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import dtckpt
from dtckpt import Mesh
from dtckpt.dtensor import Placement, Replicate, Shard, distribute_module, distribute_tensor, init_device_mesh

VOCABULARY, WIDTH, HEADS, LAYERS, LENGTH = 64, 32, 4, 2, 16
BATCH, DROPOUT, SEED = 8, 0.1, 7

PLACEMENTS: dict[str, tuple[Placement, Placement]] = {
    "tokens.weight": (Replicate(), Shard(0)),
    "*.attention.[qkv].*": (Replicate(), Shard(0)),
    "*.attention.out.weight": (Replicate(), Shard(1)),
    "*.mlp.0.*": (Replicate(), Shard(0)),
    "*.mlp.2.weight": (Replicate(), Shard(1)),
    "head.weight": (Replicate(), Shard(0)),
}
"""Placements over ``data`` and ``model`` of the parameters that a pattern names; the others are replicated."""


class Attention(nn.Module):
    """Causal attention; every device has some of the heads."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        batch, length, _ = inputs.shape
        q, k, v = (
            project(inputs).view(batch, length, HEADS, WIDTH // HEADS).transpose(1, 2)
            for project in (self.q, self.k, self.v)
        )
        dropout = DROPOUT if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))


class Block(nn.Module):
    """Attention and a two-layer network, each beside a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        inputs = inputs + self.dropout(self.attention(self.before_attention(inputs)))
        return inputs + self.dropout(self.mlp(self.before_mlp(inputs)))


class GPT(nn.Module):
    """Next-token logits of a batch of sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.02)
        self.dropout = nn.Dropout(DROPOUT)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.dropout(self.tokens(tokens) + self.positions)
        return self.head(self.norm(self.blocks(hidden)))


def distributed(model: nn.Module, mesh: Mesh) -> nn.Module:
    """Place the parameters as `PLACEMENTS` says."""

    def place(prefix: str, module: nn.Module, mesh: Mesh) -> None:
        for key, parameter in list(module.named_parameters(recurse=False)):
            name = f"{prefix}.{key}" if prefix else key
            wanted = next((placed for pattern, placed in PLACEMENTS.items() if fnmatch(name, pattern)), None)
            if wanted:
                module.register_parameter(key, nn.Parameter(distribute_tensor(parameter, mesh, wanted)))

    return distribute_module(model, mesh, place)


def batch_of(step: int) -> torch.Tensor:
    """Return sequences in which each token follows from the token before it, but for some noise."""
    rng = torch.Generator().manual_seed(1000 + step)
    start = torch.randint(VOCABULARY, (BATCH, 1), generator=rng)
    noise = torch.rand(BATCH, LENGTH + 1, generator=rng) < 0.05
    return (start + 5 * torch.arange(LENGTH + 1) + noise) % VOCABULARY


def placed(batch: torch.Tensor, mesh: Mesh) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a batch's inputs and targets, split over ``data``."""
    inputs, targets = (distribute_tensor(each, mesh, [Shard(0), Replicate()]) for each in (batch[:, :-1], batch[:, 1:]))
    return inputs, targets


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor, targets: torch.Tensor
) -> torch.Tensor:
    """Train on one batch; return the loss. Nothing in here waits for a GPU."""
    logits = model(inputs)
    loss = functional.cross_entropy(logits.view(-1, VOCABULARY), targets.reshape(-1))
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.detach()


def train(mesh: Mesh, steps: int) -> list[float]:
    """Train a new model; return the losses.

    Collective: Over the clients of the mesh.

    Args:
        mesh: Has the axes ``data`` and ``model``.
        steps: How many batches.
    """
    torch.manual_seed(SEED)
    model = distributed(GPT(), mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    return [train_step(model, optimizer, *placed(batch_of(step), mesh)).item() for step in range(steps)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="of one process; torchrun's use CPUs")
    options = parser.parse_args()
    if "WORLD_SIZE" in os.environ:
        dtckpt.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("data", "model"))
    else:
        kind = {"cpu": "CPU", "cuda": "GPU"}[options.device]
        dtckpt.configure_virtual_devices(kind, 4)
        mesh = dtckpt.create_mesh({"data": 2, "model": 2}, device_type=kind)
    losses = train(mesh, options.steps)
    if dtckpt.client_id() == 0:
        print(f"loss {losses[0]:.4f} at first, {losses[-1]:.4f} after {len(losses)} steps")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
