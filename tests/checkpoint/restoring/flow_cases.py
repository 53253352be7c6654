"""State of training code beside parameters, saved by some clients and restored by others; runs in client processes."""

from __future__ import annotations

import datetime
import enum
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel

import dtckpt


class Kind(enum.Enum):
    WARM = 1
    COLD = 2


class History:
    """An object whose state grows."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.rows = torch.zeros(0, 2)

    def state_dict(self) -> dict[str, Any]:
        return {"losses": self.losses, "rows": self.rows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.losses, self.rows = state["losses"], state["rows"]


VALUES: dict[str, Any] = {
    "scalar": np.float32(0.5),
    "dtype": torch.bfloat16,
    "device": torch.device("cpu"),
    "size": torch.Size([2, 3]),
    "path": Path("data/train"),
    "kind": Kind.WARM,
    "complex": 1 - 2j,
    "set": {"a", "b"},
    "time": datetime.datetime(2026, 1, 2, 3, 4, tzinfo=datetime.UTC),
}
OTHERS = {**VALUES, "scalar": np.float32(0.0), "kind": Kind.COLD, "complex": 0j, "set": set(), "path": Path("x")}


def model_of(seed: int, *, is_wrapped: bool) -> nn.Module:
    """Return a small model, compiled, checkpointed and within DDP, or plain."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    if is_wrapped:
        wrapped = nn.Sequential(checkpoint_wrapper(model[0]), torch.compile(model[1], backend="eager"))
        return DistributedDataParallel(wrapped)
    return model


def save_flows(path: str) -> None:
    history = History()
    history.losses, history.rows = [3.0, 2.0, 1.0], torch.arange(10.0).view(5, 2)
    tree = {
        "values": VALUES,
        "array": np.arange(6, dtype=np.uint16).reshape(2, 3),
        "history": history,
        "model": model_of(0, is_wrapped=True),
        "position": dtckpt.PerClient(dist.get_rank() * 10),
    }
    dtckpt.save(path, tree)


def restore_flows(path: str) -> list[str]:
    """Restore into other values, a shorter history and a plain model; return the faults."""
    history, model, array = History(), model_of(1, is_wrapped=False), np.zeros((2, 3), np.uint16)
    target = {
        "values": OTHERS,
        "array": array,
        "history": history,
        "model": model,
        "position": dtckpt.PerClient(0, on_resize="modulo"),
    }
    found = dtckpt.restore(path, target)
    wrong = [name for name, value in VALUES.items() if found["values"][name] != value]
    wrong += [name for name, value in VALUES.items() if type(found["values"][name]) is not type(value)]
    saved = model_of(0, is_wrapped=False).state_dict()
    wrong += [name for name, tensor in model.state_dict().items() if not torch.equal(tensor, saved[name])]
    facts = {
        "array": array.tolist() == [[0, 1, 2], [3, 4, 5]],
        "losses": history.losses == [3.0, 2.0, 1.0],
        "rows": history.rows.equal(torch.arange(10.0).view(5, 2)),
        "position": target["position"].value == dist.get_rank() * 10,
    }
    return wrong + [name for name, is_right in facts.items() if not is_right]
