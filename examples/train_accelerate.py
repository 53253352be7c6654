"""Accelerate. Start it again on any number of processes:

torchrun --nproc-per-node 4 -m examples.train_accelerate --checkpoints ckpt --stop-after 4
torchrun --nproc-per-node 2 -m examples.train_accelerate --checkpoints ckpt
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
import torch.distributed as dist
from accelerate import Accelerator

import dtckpt
from examples.tiny_training import ShardedLoader, TinyModel, argument_parser, mean_over_clients


def train(args: argparse.Namespace) -> list[float]:
    """Train, from the newest checkpoint on; return the losses of the steps."""
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(accelerator.process_index)
    model = TinyModel(args.dropout)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=args.steps)
    accelerator.register_for_checkpointing(scheduler)  # a prepared one would step once for each process
    loader = ShardedLoader(accelerator.process_index, accelerator.num_processes)
    state = {
        **dtckpt.interop.accelerator_state(accelerator),
        "loader": dtckpt.PerClient(loader, on_resize="modulo"),
    }
    losses = []
    with dtckpt.CheckpointManager(args.checkpoints, keep=2, save_interval_steps=2) as manager:
        start = manager.restore(target=state).step + 1 if manager.latest_step() is not None else 1
        steps = range(start, (args.stop_after or args.steps) + 1)
        for step, (rows, targets) in zip(steps, loader.batches(), strict=False):
            loss = torch.nn.functional.mse_loss(model(rows), targets)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(mean_over_clients(loss))
            manager.save(step, state)
    return losses


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Run one process; return the losses of its steps."""
    args = argument_parser(__doc__).parse_args(argv)
    dtckpt.init_process_group("gloo")  # Accelerate takes it; its own fails when torchrun has restarted
    losses = train(args)
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main()
