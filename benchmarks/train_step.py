"""A training step of a GPT, by our DTensors and by PyTorch's: one program, of which only the imports differ.

Run: ``torchrun --nproc-per-node 2 -m benchmarks.train_step`` (a line of devices: tensor parallel), or
``torchrun --nproc-per-node 4 -m benchmarks.train_step --grid`` (2x2: data parallel by tensor parallel). ``--device
cuda``: each client on another GPU, through NCCL. The two take turns, from the same parameters on the same
batches, and their losses must be equal within 1e-5. Times are medians of the slowest client's; ratios are medians of
the ratios of neighbouring steps.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Iterator
from fnmatch import fnmatch
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor as theirs
from rich.table import Table
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

from benchmarks.results import show
from dtckpt import dtensor as ours
from dtckpt.dtensor import experimental as our_experimental

VOCABULARY, WIDTH, HEADS, LAYERS, LENGTH, BATCH = 512, 256, 8, 2, 64, 8
TOLERANCE = 1e-5
ROWS = ("*.q.weight", "*.k.weight", "*.v.weight", "*.up.weight", "*.head.weight")
"""Weights that are split by rows over the model axis; `COLUMNS` are split by columns, others replicated."""
COLUMNS = ("*.out.weight", "*.down.weight")


BATCH_FIRST, HEADS_FIRST = (0, 2, 1, 3), (2, 0, 1, 3)
"""Orders of batch, position, head and width in attention, as dims of the view of a projection.

For a product of matrices both APIs flatten the first two. PyTorch's does so before 2.13 only if the second is whole,
so a line of devices has the heads first; on a grid both are split, and PyTorch's can do it in this order only.
"""


class Block(nn.Module):
    """Attention and a two-layer network, each beside a residual connection."""

    def __init__(self, width: int = WIDTH, order: tuple[int, ...] = HEADS_FIRST) -> None:
        super().__init__()
        self.order, self.order_back = order, [order.index(dim) for dim in range(len(order))]
        self.size_per_head = width // HEADS
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.before_attention(inputs)
        q, k, v = (
            project(hidden).view(*inputs.shape[:2], HEADS, self.size_per_head).permute(self.order)
            for project in (self.q, self.k, self.v)
        )
        # Spelled out, as PyTorch's DTensor has no rule for the fused operator on the host.
        mixed = torch.softmax(q @ k.transpose(-1, -2) / self.size_per_head**0.5, -1) @ v
        inputs = inputs + self.out(mixed.permute(self.order_back).reshape(inputs.shape))
        return inputs + self.down(functional.gelu(self.up(self.before_mlp(inputs))))


class GPT(nn.Module):
    """Next-token logits of a batch of sequences of embedded tokens."""

    def __init__(self, order: tuple[int, ...] = HEADS_FIRST) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(order=order) for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.blocks(inputs)))


def distributed(model: nn.Module, api: ModuleType, mesh: Any) -> nn.Module:
    """Return a model with its weights split over the last axis of a mesh; arguments as of `trained`."""
    data = [api.Replicate()] * (mesh.ndim - 1)

    def place(prefix: str, module: nn.Module, mesh: Any) -> None:
        for key, parameter in list(module.named_parameters(recurse=False)):
            name = f".{prefix}.{key}"
            rows, columns = (any(fnmatch(name, each) for each in patterns) for patterns in (ROWS, COLUMNS))
            last = api.Shard(0) if rows else api.Shard(1) if columns else api.Replicate()
            placed = api.distribute_tensor(parameter.detach(), mesh, [*data, last])
            module.register_parameter(key, nn.Parameter(placed))

    placed: nn.Module = api.distribute_module(model, mesh, place)
    return placed


def trained(api: ModuleType, mesh: Any) -> Iterator[tuple[float, float]]:
    """Train a model step by step; yield the seconds that each step took on this client, and its loss.

    Args:
        api: `dtckpt.dtensor` or ``torch.distributed.tensor``.
        mesh: A mesh of that API whose last axis is ``model``.
    """
    torch.manual_seed(0)
    split_batch = [api.Shard(0)] * (mesh.ndim - 1) + [api.Replicate()]
    order = BATCH_FIRST if mesh.ndim > 1 else HEADS_FIRST
    model = distributed(GPT(order).to(mesh.device_type), api, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(10**9):
        rng = torch.Generator().manual_seed(step)
        inputs = torch.randn(BATCH, LENGTH, WIDTH, generator=rng)
        targets = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=rng)
        inputs, targets = (
            api.distribute_tensor(batch.to(mesh.device_type), mesh, split_batch) for batch in (inputs, targets)
        )
        dist.barrier()
        start = time.perf_counter()
        logits = model(inputs).redistribute(placements=split_batch)
        loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        value = loss.full_tensor().item()
        seconds = torch.tensor(time.perf_counter() - start)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        yield seconds.item(), value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--grid", action="store_true", help="2x2 devices; else a line of all")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    arguments = parser.parse_args()
    dist.init_process_group({"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}[arguments.device])
    if arguments.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.set_num_threads(1)
    clients = dist.get_world_size()
    shape, names = ((2, clients // 2), ("data", "model")) if arguments.grid else ((clients,), ("model",))
    _train_plainly(arguments.device)
    our_run = trained(ours, ours.init_device_mesh(arguments.device, shape, mesh_dim_names=names))
    their_run = trained(theirs, init_device_mesh(arguments.device, shape, mesh_dim_names=names))
    with our_experimental.implicit_replication():
        our_steps, their_steps = zip(*((next(our_run), next(their_run)) for _ in range(arguments.steps)), strict=True)
    for (_, one), (_, other) in zip(our_steps, their_steps, strict=True):
        if abs(one - other) > TOLERANCE * abs(other):
            raise AssertionError(f"the losses differ; got {one} and {other}, expected a difference below {TOLERANCE:g}")
    if dist.get_rank() == 0:
        show(_table(our_steps, their_steps, " x ".join(map(str, shape))), width=100)
    dist.destroy_process_group()


def _train_plainly(device: str) -> None:
    """Train for one step without DTensors, so that neither first step pays for what PyTorch loads then."""
    model = GPT().to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    logits = model(torch.randn(BATCH, LENGTH, WIDTH, device=device))
    loss = functional.cross_entropy(logits.flatten(0, 1), torch.zeros(BATCH * LENGTH, dtype=torch.long, device=device))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def _table(our_steps: Any, their_steps: Any, shape: str) -> Table:
    table = Table("mesh", "step", "dtckpt", "PyTorch", "ratio")
    one, other = our_steps[0][0], their_steps[0][0]
    table.add_row(shape, "first", f"{one * 1e3:.0f} ms", f"{other * 1e3:.0f} ms", f"{one / other:.2f}")
    warm = slice(len(our_steps) // 3, None)
    one, other = (statistics.median(seconds for seconds, _ in steps[warm]) for steps in (our_steps, their_steps))
    pairs = zip(our_steps[warm], their_steps[warm], strict=True)
    ratio = statistics.median(our_step[0] / their_step[0] for our_step, their_step in pairs)
    table.add_row(shape, "warm", f"{one * 1e3:.1f} ms", f"{other * 1e3:.1f} ms", f"{ratio:.2f}")
    return table


if __name__ == "__main__":
    main()
