"""A loop built as torchtitan's: objects with a state in one dict. One line saves it, and one loads it:

torchrun --nproc-per-node 4 -m examples.train_titan --checkpoints ckpt --stop-after 4
torchrun --nproc-per-node 3 -m examples.train_titan --checkpoints ckpt
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard

import dtckpt
from examples.tiny_training import ShardedLoader, TinyModel, argument_parser, mean_over_clients

BY_NAME = StateDictOptions(flatten_optimizer_state_dict=True)


@dataclass
class ModelWrapper:
    """The state of a model, by names."""

    model: nn.Module

    def state_dict(self) -> dict[str, Any]:
        return get_model_state_dict(self.model)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_model_state_dict(self.model, state)


@dataclass
class OptimizersContainer:
    """The state of an optimizer, by names of parameters."""

    model: nn.Module
    optimizer: torch.optim.Optimizer

    def state_dict(self) -> dict[str, Any]:
        return get_optimizer_state_dict(self.model, self.optimizer, options=BY_NAME)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_optimizer_state_dict(self.model, self.optimizer, state, options=BY_NAME)


class TrainState:
    """What the loop itself counts."""

    step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": torch.tensor(self.step)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = int(state["step"])


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Run one process; return the losses of its steps."""
    args = argument_parser(__doc__).parse_args(argv)
    dtckpt.init_process_group("gloo")
    torch.manual_seed(0)
    model = TinyModel(args.dropout)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    torch.manual_seed(dist.get_rank())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=args.steps)
    loader, train_state = ShardedLoader(dist.get_rank(), dist.get_world_size()), TrainState()
    states = {
        "model": ModelWrapper(model),
        "optimizer": OptimizersContainer(model, optimizer),
        "lr_scheduler": scheduler,
        "dataloader": dtckpt.PerClient(loader, on_resize="modulo"),
        "train_state": train_state,
        "rng": dtckpt.PerClient(dtckpt.RngState(), on_resize="keep"),
    }
    latest, losses = args.checkpoints / "latest", []
    if latest.exists():
        dtckpt.restore(latest, states)  # was: dcp.load(states, checkpoint_id=latest)
    batches = loader.batches()
    while train_state.step < (args.stop_after or args.steps):
        train_state.step += 1
        rows, targets = next(batches)
        loss = nn.functional.mse_loss(model(rows), targets)
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(mean_over_clients(loss))
        if train_state.step % 2 == 0:
            # was: dcp.save(states, checkpoint_id=latest)
            dtckpt.save(latest, states, options=dtckpt.SaveOptions(overwrite=True), step=train_state.step)
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main()
