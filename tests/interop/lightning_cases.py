"""Runs of Lightning's ``Trainer`` with everything that its users switch on: functions that client processes run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import FSDPModule, fully_shard

import dtckpt
from dtckpt.interop import DtckptCheckpointIO, DtckptModelParallelStrategy

ROWS = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))


class Module(pl.LightningModule):
    """A model with a metric, hyperparameters, and other state."""

    def __init__(self, width: int = 8, is_sharded: bool = False, is_plugged: bool = True) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.ReLU(), torch.nn.Linear(width, 1))
        self.loaded: Any = None
        self.seen: list[int] = []

    def configure_model(self) -> None:
        if self.hparams.is_sharded and not isinstance(self.net, FSDPModule):
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        self.seen.append(index)
        return self.net(batch).square().mean()

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val", self.net(batch).square().mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 0.02)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["own"] = {"epoch": self.current_epoch, "rng": None}
        if self.hparams.is_plugged:
            checkpoint["clients"] = dtckpt.PerClient(self.global_rank)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.loaded = checkpoint["own"]["epoch"], dict(checkpoint.get("clients", ()))


def trainer_of(
    folder: str, kind: str, epochs: int, *, is_async: bool = False, is_plugged: bool = True, save_last: Any = True
) -> pl.Trainer:
    """Return a trainer over all clients."""
    size = dist.get_world_size()
    if kind == "ddp":
        strategy: Any = "ddp"
    elif is_plugged:
        strategy = DtckptModelParallelStrategy(size, 1, is_async=is_async)
    else:
        strategy = ModelParallelStrategy(size, 1)
    return pl.Trainer(
        accelerator="cpu",
        devices=size,
        strategy=strategy,
        plugins=[DtckptCheckpointIO(is_async=is_async)] if kind == "ddp" and is_plugged else None,
        callbacks=[
            ModelCheckpoint(folder, monitor="val", save_top_k=1, save_last=save_last, filename="{epoch}"),
            EarlyStopping("val", patience=7),
        ],
        max_epochs=epochs,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )


def loader() -> torch.utils.data.DataLoader[torch.Tensor]:
    return torch.utils.data.DataLoader(ROWS, batch_size=4)


def fit(
    folder: str, kind: str, epochs: int, checkpoint: str | None = None, *, is_plugged: bool = True, **options: Any
) -> dict[str, Any]:
    """Fit; return facts of the run, and what validation says of its best checkpoint."""
    os.environ["LOCAL_RANK"] = os.environ["RANK"]
    pl.seed_everything(0, verbose=False)
    trainer = trainer_of(folder, kind, epochs, is_plugged=is_plugged, **options)
    module = Module(is_sharded=kind == "fsdp2", is_plugged=is_plugged)
    trainer.fit(module, loader(), loader(), ckpt_path=checkpoint)
    dist.barrier()  # client 0 alone removes, with DDP, what a save in the background has made superfluous
    early = trainer.early_stopping_callback
    facts = {
        "names": sorted(path.name for path in Path(folder).iterdir()),
        "best": Path(trainer.checkpoint_callback.best_model_path).name,
        "score": float(trainer.checkpoint_callback.best_model_score),
        "steps": trainer.global_step,
        "rate": trainer.optimizers[0].param_groups[0]["lr"],
        "early": (early.wait_count, float(early.best_score)),
        "clients": module.loaded and module.loaded[1],
    }
    best = trainer.validate(module, loader(), ckpt_path="best", verbose=False)
    return {**facts, "best again": best[0]["val"]}


def fit_strictly(folder: str, checkpoint: str) -> list[str]:
    """Return the errors of validating a checkpoint with a weight too many and one too few."""
    os.environ["LOCAL_RANK"] = os.environ["RANK"]
    errors = []
    for change in ("more", "less"):
        module = Module(is_sharded=True)
        if change == "more":
            module.further = torch.nn.Linear(1, 1)
        else:
            module.net = module.net[:1]
        try:
            trainer_of(folder, "fsdp2", 1).validate(module, loader(), ckpt_path=checkpoint, verbose=False)
        except dtckpt.errors.DtckptError as error:
            errors.append(type(error).__name__)
    return errors


def use_fabric(path: str) -> list[Any]:
    """Save by Fabric, change everything, load; return what is there then."""
    os.environ["LOCAL_RANK"] = os.environ["RANK"]
    torch.manual_seed(0)
    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy="ddp", plugins=[DtckptCheckpointIO()])
    fabric.launch()
    module = torch.nn.Linear(4, 1)
    model, optimizer = fabric.setup(module, torch.optim.AdamW(module.parameters()))
    fabric.backward(model(ROWS).sum())
    optimizer.step()
    weight, state = module.weight.tolist(), {"model": model, "optimizer": optimizer, "step": 7}
    fabric.save(path, state)
    torch.nn.init.zeros_(module.weight)
    state["step"] = 0
    fabric.load(path, state)
    return [module.weight.tolist() == weight, state["step"], len(optimizer.state)]
