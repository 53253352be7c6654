"""Training of a model in stages on FSDP2, with its objects saved as they are: functions that client processes run."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import dtckpt
from checkpoint.saving.union_cases import WIDTH, Block

LAYERS = 4
ROWS = 4


class Stage(nn.Module):
    """Some of the layers of the model, under their numbers in the whole."""

    def __init__(self, numbers: Sequence[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleDict()
        for number in numbers:
            torch.manual_seed(number)
            self.layers[str(number)] = Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return x


class Pipeline:
    """A client's stage, its optimizer and its scheduler, and the step that the stages make together.

    Args:
        stages: Number of stages; the other clients are replicas that share each stage's parameters by FSDP2.
    """

    def __init__(self, stages: int) -> None:
        mesh = init_device_mesh("cpu", (stages, dist.get_world_size() // stages), mesh_dim_names=("pp", "dp"))
        self.mesh, self.stages = mesh, stages
        self.number, self.replica = mesh.get_coordinate()
        size = LAYERS // stages
        self.stage = Stage(range(self.number * size, (self.number + 1) * size))
        shard(self.stage, mesh["dp"])
        self.optimizer = torch.optim.AdamW(self.stage.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 0.9**step)

    @property
    def state(self) -> dict[str, object]:
        return {"model": self.stage, "optimizer": self.optimizer, "scheduler": self.scheduler}

    def losses(self, steps: range) -> list[float]:
        """Make steps; return the loss of each."""
        return [self._step(step) for step in steps]

    def _step(self, step: int) -> float:
        replicas = self.mesh.shape[1]
        rows = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step)).chunk(replicas)[self.replica]
        is_first, is_last = self.number == 0, self.number == self.stages - 1
        x = rows if is_first else torch.zeros_like(rows)
        if not is_first:
            dist.recv(x, self._peer(-1))
            x.requires_grad_()
        out = self.stage(x)
        loss = out.square().mean()
        if is_last:
            loss.backward()
        else:
            dist.send(out.detach().contiguous(), self._peer(1))
            gradient = torch.empty_like(out)
            dist.recv(gradient, self._peer(1))
            out.backward(gradient)
        if not is_first:
            dist.send(x.grad, self._peer(-1))
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        whole = loss.detach() / replicas if is_last else torch.zeros(())
        dist.all_reduce(whole)
        return whole.item()

    def _peer(self, offset: int) -> int:
        return int(self.mesh.mesh[self.number + offset, self.replica])


def shard(stage: Stage, mesh: DeviceMesh) -> None:
    for layer in stage.layers.values():
        fully_shard(layer, mesh=mesh)
    fully_shard(stage, mesh=mesh)


def save(path: str, stages: int) -> list[float]:
    """Save after some steps; return the losses of the steps that follow."""
    pipeline = Pipeline(stages)
    pipeline.losses(range(3))
    dtckpt.save(path, pipeline.state)
    return pipeline.losses(range(3, 6))


def resume(path: str, stages: int) -> list[float]:
    """Restore into a new run; return the losses of the steps that follow."""
    pipeline = Pipeline(stages)
    dtckpt.restore(path, pipeline.state, strict="names")
    return pipeline.losses(range(3, 6))
