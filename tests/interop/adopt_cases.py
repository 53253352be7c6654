"""The blocks of docs/adopt.md, run in client processes, with the names that the page takes for given."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

Names = dict[str, Any]


def sharded_names() -> Names:
    """Return a model of FSDP2 that has been trained for a step, and all that belongs to it."""
    from examples.train_titan import ModelWrapper, OptimizersContainer, TrainState

    torch.manual_seed(0)
    model = fully_shard(nn.Sequential(fully_shard(nn.Linear(4, 5)), nn.Linear(5, 3)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    states = {
        "model": ModelWrapper(model),
        "optimizer": OptimizersContainer(model, optimizer),
        "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3),
        "train_state": TrainState(),
    }
    return {"model": model, "optimizer": optimizer, "states": states, "step": 10}


def accelerate_names() -> Names:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model, optimizer = nn.Linear(4, 2), None
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator.backward(model(torch.ones(2, 4)).sum())
    optimizer.step()
    return {"accelerator": accelerator, "model": model, "optimizer": optimizer}


def lightning_names(run: int) -> Names:
    from .lightning_cases import Module, loader

    module, sharded_module = Module(is_plugged=False), Module(is_plugged=False, is_sharded=True)
    return {"module": module, "sharded_module": sharded_module, "data": loader(), "epochs": run + 1}


def trainer_names(run: int) -> Names:
    from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

    from .transformers_cases import CONFIG, TOKENS

    torch.manual_seed(0)
    arguments = TrainingArguments(
        "ckpt", max_steps=2 * run + 2, save_steps=2, use_cpu=True, report_to=[], disable_tqdm=True
    )
    data = [{"input_ids": row, "labels": row} for row in TOKENS]
    return {
        "model": LlamaForCausalLM(LlamaConfig(**CONFIG)),
        "arguments": arguments,
        "data": data,
        "is_resumed": run > 0,
    }


def manager_names(run: int) -> Names:
    def train(step: int, state: Names) -> None:
        state["steps"].append(step)

    return {"root": "ckpt", "steps": 3 + 2 * run, "state": {"steps": [], "weight": torch.ones(3)}, "train": train}


@contextlib.contextmanager
def inside(folder: str) -> Iterator[None]:
    """Be in a new folder, where the blocks have their paths."""
    os.environ["LOCAL_RANK"] = os.environ["RANK"]
    if dist.get_rank() == 0:
        Path(folder).mkdir()
    dist.barrier()
    with contextlib.chdir(folder):
        yield


def contents(names: Names) -> list[list[float]]:
    """Return the elements of the state that this client holds."""
    tensors = [*names["model"].parameters()] if "model" in names else [names["weight"]]
    for state in names["optimizer"].state.values() if "optimizer" in names else ():
        tensors.extend(value for value in state.values() if isinstance(value, torch.Tensor))
    return [(each.to_local() if hasattr(each, "to_local") else each).tolist() for each in tensors]


def spoil(names: Names) -> None:
    """Change the saved values."""
    with torch.no_grad():
        for tensor in names["model"].parameters() if "model" in names else [names["weight"]]:
            tensor.zero_()
        for state in names["optimizer"].state.values() if "optimizer" in names else ():
            for value in state.values():
                value.zero_()


def save_and_load(folder: str, make: str, block: str) -> bool:
    """Run a block whose last paragraph loads what it saved; return whether everything is as it was then."""
    with inside(folder):
        names: Names = globals()[make]() if make else {}
        saving, _, loading = block.rpartition("\n\n")
        exec(saving, names)
        if dist.is_initialized():
            dist.barrier()  # one process may save for all
        before = contents(names)
        spoil(names)
        assert contents(names) != before
        exec(loading, names)
        return contents(names) == before


def run_twice(folder: str, make: str, block: str) -> list[Any]:
    """Run a block that goes on from its newest checkpoint, twice; return what it did each time."""
    done = []
    with inside(folder):
        for run in range(2):
            names: Names = globals()[make](run)
            exec(block, names)
            dist.barrier()
            done.append(what_was_done(names))
            dist.barrier()
    return done


def what_was_done(names: Names) -> Any:
    """Return the steps of a loop; of a trainer how many, the last one, and its checkpoints."""
    if "trainer" not in names:
        return names["state"]["steps"]
    trainer = names["trainer"]
    checkpoints = sorted(path.name for path in Path("ckpt").iterdir())
    if hasattr(trainer, "global_step"):
        return len(trainer.lightning_module.seen), trainer.global_step, checkpoints
    return trainer.state.global_step - trainer._initial_global_step, trainer.state.global_step, checkpoints
