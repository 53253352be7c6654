"""Runs of Hugging Face's ``Trainer``: functions that client processes run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from dtckpt.interop import DtckptTrainer

TOKENS = torch.randint(32, (40, 8), generator=torch.Generator().manual_seed(1))
CONFIG = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


def train(folder: str, steps: int, resume: Any = None, *, is_ours: bool = True, **arguments: Any) -> dict[str, Any]:
    """Train up to a step, and save every second; return facts of the run."""
    os.environ["LOCAL_RANK"] = os.environ["RANK"]
    torch.manual_seed(0)
    training = TrainingArguments(
        folder,
        max_steps=steps,
        per_device_train_batch_size=4,
        learning_rate=0.01,
        save_steps=2,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        **arguments,
    )
    model = LlamaForCausalLM(LlamaConfig(**CONFIG, attention_dropout=0.1))
    data = [{"input_ids": row, "labels": row} for row in TOKENS]
    trainer = (DtckptTrainer if is_ours else Trainer)(model, training, train_dataset=data, eval_dataset=data[:4])
    trainer.train(resume_from_checkpoint=resume)
    return {
        "steps": trainer.state.global_step,
        "weights": {name: tensor.tolist() for name, tensor in model.state_dict().items() if "norm" in name},
        "rate": trainer.lr_scheduler.get_last_lr(),
        "last": Path(get_last_checkpoint(folder)).name,
        "random": torch.rand(1).item(),
    }
