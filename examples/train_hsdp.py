"""HSDP: FSDP2 shards the model within a group of processes, and every group has a copy. Start it again on any number:

torchrun --nproc-per-node 4 -m examples.train_hsdp --checkpoints ckpt --stop-after 4
torchrun --nproc-per-node 2 -m examples.train_hsdp --checkpoints ckpt
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import dtckpt
from examples.tiny_training import ShardedLoader, TinyModel, argument_parser, mean_over_clients


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Run one process; return the losses of its steps."""
    args = argument_parser(__doc__).parse_args(argv)
    dtckpt.init_process_group("gloo")
    torch.manual_seed(0)
    model = TinyModel(args.dropout)
    clients = dist.get_world_size()
    copies = 2 if clients % 2 == 0 else 1
    mesh = init_device_mesh("cpu", (copies, clients // copies), mesh_dim_names=("replicate", "shard"))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    torch.manual_seed(dist.get_rank())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=args.steps)
    loader = ShardedLoader(dist.get_rank(), dist.get_world_size())
    state = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "loader": dtckpt.PerClient(loader, on_resize="modulo"),
        "rng": dtckpt.PerClient(dtckpt.RngState(), on_resize="keep"),
    }
    losses = []
    with dtckpt.CheckpointManager(args.checkpoints, keep=2, save_interval_steps=2) as manager:
        start = manager.restore(target=state).step + 1 if manager.latest_step() is not None else 1
        steps = range(start, (args.stop_after or args.steps) + 1)
        for step, (rows, targets) in zip(steps, loader.batches(), strict=False):
            loss = torch.nn.functional.mse_loss(model(rows), targets)
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(mean_over_clients(loss))
            manager.save(step, state)
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main()
