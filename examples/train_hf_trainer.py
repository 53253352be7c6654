"""Hugging Face's Trainer. Start it again on any number of processes:

torchrun --nproc-per-node 4 -m examples.train_hf_trainer --checkpoints ckpt --stop-after 4
torchrun --nproc-per-node 2 -m examples.train_hf_trainer --checkpoints ckpt
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

import dtckpt
from examples.tiny_training import BATCH, ROWS, argument_parser, mean_over_clients


class Trainer(dtckpt.interop.DtckptTrainer):
    """A Trainer that notes its losses."""

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)
        self.losses = [*getattr(self, "losses", ()), mean_over_clients(loss)]
        return loss


class StopAfter(TrainerCallback):
    """Ends the training after a step, as if it were interrupted."""

    def __init__(self, step: int | None) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop |= state.global_step == self.step


def train(args: argparse.Namespace) -> list[float]:
    """Train, from the newest checkpoint on; return the losses of the steps."""
    config = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**config, num_attention_heads=2, attention_dropout=args.dropout))
    tokens = torch.randint(32, (ROWS, 8), generator=torch.Generator().manual_seed(1))
    training = TrainingArguments(
        output_dir=str(args.checkpoints),
        per_device_train_batch_size=BATCH // dist.get_world_size(),
        max_steps=args.steps,
        learning_rate=0.01,
        save_steps=2,
        save_total_limit=2,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(model, training, train_dataset=[{"input_ids": row, "labels": row} for row in tokens])
    trainer.add_callback(StopAfter(args.stop_after))
    args.checkpoints.mkdir(parents=True, exist_ok=True)
    trainer.train(resume_from_checkpoint=get_last_checkpoint(args.checkpoints) is not None)
    return trainer.losses


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Run one process; return the losses of its steps."""
    args = argument_parser(__doc__).parse_args(argv)
    dtckpt.init_process_group("gloo")  # Trainer takes it; its own fails when torchrun has restarted
    losses = train(args)
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main()
