"""A run of Accelerate with FSDP2: functions that client processes run."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch.distributed.tensor import DTensor

import dtckpt
from examples.tiny_training import ShardedLoader, TinyModel, mean_over_clients


def accelerator_on_cpu() -> Accelerator:
    """Return an ``Accelerator`` that shards by FSDP2, which it would turn on by itself only where there are GPUs."""
    accelerator = Accelerator(cpu=True)
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Block"]
    )
    return accelerator


def losses_with_fsdp2(path: str, *, is_saved: bool) -> list[float]:
    """Train three steps and save, or restore; return the losses of two more steps."""
    accelerator = accelerator_on_cpu()
    torch.manual_seed(0 if is_saved else 1)
    model = TinyModel(0.0)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    loader = ShardedLoader(accelerator.process_index, accelerator.num_processes)
    state = {
        **dtckpt.interop.accelerator_state(accelerator),
        "loader": dtckpt.PerClient(loader, on_resize="modulo"),
    }

    def train(steps: int) -> list[float]:
        losses = []
        for _, (rows, targets) in zip(range(steps), loader.batches(), strict=False):
            loss = torch.nn.functional.mse_loss(model(rows), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(mean_over_clients(loss))
        return losses

    if is_saved:
        train(3)
        dtckpt.save(path, state)
    else:
        dtckpt.restore(path, state)
    return train(2)
