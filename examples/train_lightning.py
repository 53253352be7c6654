"""Lightning, with DDP or FSDP2. Start it again on any number of processes, also with the other strategy:

torchrun --nproc-per-node 4 -m examples.train_lightning --checkpoints ckpt --strategy fsdp2 --stop-after 4
torchrun --nproc-per-node 3 -m examples.train_lightning --checkpoints ckpt --strategy ddp
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.distributed.fsdp import fully_shard

import dtckpt
from examples.tiny_training import ShardedLoader, TinyModel, argument_parser, mean_over_clients


class Module(pl.LightningModule):
    """The tiny model, as Lightning wants it."""

    def __init__(self, steps: int, dropout: float, strategy: str) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = TinyModel(dropout)
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if self.hparams.strategy == "fsdp2":
            for block in self.model.blocks:
                fully_shard(block, mesh=self.device_mesh["data_parallel"])
            fully_shard(self.model, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        # Lightning saves no random states, and with DDP one process alone saves.
        torch.manual_seed(self.global_step * self.trainer.world_size + self.global_rank)
        loss = torch.nn.functional.mse_loss(self.model(batch[0]), batch[1])
        self.losses.append(mean_over_clients(loss))
        return loss

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=self.hparams.steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Run one process; return the losses of its steps."""
    parser = argument_parser(__doc__)
    parser.add_argument("--strategy", choices=["ddp", "fsdp2"], default="fsdp2")
    args = parser.parse_args(argv)
    dtckpt.init_process_group("gloo")  # Lightning takes it; its own fails when torchrun has restarted
    rank, clients = dist.get_rank(), dist.get_world_size()
    is_ddp = args.strategy == "ddp"
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=clients,
        strategy="ddp" if is_ddp else dtckpt.interop.DtckptModelParallelStrategy(clients, 1),
        plugins=[dtckpt.interop.DtckptCheckpointIO()] if is_ddp else None,
        callbacks=[ModelCheckpoint(args.checkpoints, every_n_train_steps=2, save_last=True)],
        max_steps=args.stop_after or args.steps,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    pl.seed_everything(0, verbose=False)
    module = Module(args.steps, args.dropout, args.strategy)
    trainer.fit(module, ShardedLoader(rank, clients), ckpt_path="last")
    dist.destroy_process_group()
    return module.losses


if __name__ == "__main__":
    main()
