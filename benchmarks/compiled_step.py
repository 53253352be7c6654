"""A training step under `torch.compile` beside the same step in eager, both on our DTensors.

Run: ``torchrun --nproc-per-node 2 -m benchmarks.compiled_step``. Two copies of a program take turns on the same batch,
and one of them is compiled; their losses must be equal within 1e-5. Times are medians of the slowest client's; ratios
are medians of the ratios of neighbouring steps. Wanted: at most 1.1.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from rich.table import Table
from torch import nn
from torch.nn import functional

from benchmarks.results import show
from benchmarks.train_step import BATCH, LENGTH, Block, distributed
from dtckpt import dtensor

TOLERANCE = 1e-5
STEPS_BEFORE = 5
"""Steps that are not measured; the compiler works in the first of them."""


class MLP(nn.Module):
    """Two layers, the first one split by rows, the other one by columns."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.down(functional.gelu(self.up(inputs)))


class Centred(MLP):
    """Two layers, less a running mean; buffers hold the mean and the number of steps."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs = super().forward(inputs)
        with torch.no_grad():
            self.steps += 1
            self.mean.mul_(0.9).add_(outputs.mean((0, 1)), alpha=0.1)
        return outputs - self.mean


PROGRAMS: tuple[tuple[str, Callable[[int], nn.Module], str], ...] = (
    ("two layers", MLP, "module"),
    ("GPT block", Block, "module"),
    ("with buffers", Centred, "module"),
    ("two layers", MLP, "optimizer"),
    ("two layers", MLP, "step"),
    ("GPT block", Block, "step"),
)
"""Name, module and compiled part of each program."""


def make_step(make: Callable[[int], nn.Module], width: int, mesh: Any, compiled: str, backend: str) -> Any:
    """Return a function that trains a model on a batch and returns the loss.

    Args:
        make: Makes the model.
        width: Number of features.
        mesh: The mesh.
        compiled: The compiled part: ``module``, ``optimizer``, the whole ``step``, or nothing.
        backend: Of `torch.compile`.
    """
    torch.manual_seed(0)
    model = distributed(make(width), dtensor, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    call: Any = torch.compile(model, backend=backend) if compiled == "module" else model
    update: Any = torch.compile(optimizer.step, backend=backend) if compiled == "optimizer" else optimizer.step

    def step(inputs: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = call(inputs).square().mean()
        optimizer.zero_grad()
        loss.backward()
        update()
        return loss

    return torch.compile(step, backend=backend) if compiled == "step" else step


def measure(eager: Any, compiled: Any, inputs: torch.Tensor, num_steps: int) -> tuple[float, float, float]:
    """Return the seconds of a step in eager and compiled, and the ratio of the second to the first.

    Raises:
        AssertionError: The losses differ.
    """
    for _ in range(STEPS_BEFORE):
        one, other = (step(inputs).full_tensor().item() for step in (eager, compiled))
        if abs(one - other) > TOLERANCE * abs(one):
            raise AssertionError(f"the losses differ; eager {one}, compiled {other}, expected within {TOLERANCE:g}")
    pairs = [(_time(eager, inputs), _time(compiled, inputs)) for _ in range(num_steps)]
    one, other = (statistics.median(seconds) for seconds in zip(*pairs, strict=True))
    return one, other, statistics.median(second / first for first, second in pairs)


def _time(step: Any, inputs: torch.Tensor) -> float:
    dist.barrier()
    start = time.perf_counter()
    step(inputs)
    seconds = torch.tensor(time.perf_counter() - start)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return seconds.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--width", type=int, action="append", help="number of features; default 256 and 16")
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    mesh = dtensor.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("model",))
    table = Table("features", "program", "compiled", "backend", "eager", "compiled", "ratio")
    for width in arguments.width or (256, 16):
        inputs = dtensor.distribute_tensor(torch.randn(BATCH, LENGTH, width), mesh, [dtensor.Replicate()])
        for name, make, what in PROGRAMS:
            for backend in ("eager", "inductor"):
                torch.compiler.reset()
                eager, compiled = (make_step(make, width, mesh, part, backend) for part in ("nothing", what))
                one, other, ratio = measure(eager, compiled, inputs, arguments.steps)
                table.add_row(
                    str(width), name, what, backend, f"{one * 1e3:.2f} ms", f"{other * 1e3:.2f} ms", f"{ratio:.2f}"
                )
    if dist.get_rank() == 0:
        show(table, width=100)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
