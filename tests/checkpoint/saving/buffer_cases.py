"""Modules whose buffers differ between clients, as with BatchNorm and data parallelism; in client processes."""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import dtckpt
from dtckpt import SaveOptions
from dtckpt.errors import DtckptError


class Net(nn.Module):
    """A network with a BatchNorm, and a large buffer of another kind."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)
        self.register_buffer("seen", torch.zeros(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x))


def trained(kind: str) -> nn.Module:
    """Return a network that has seen another batch on each client, but made no step."""
    torch.manual_seed(0)
    net = Net()
    model: nn.Module = net
    if kind == "ddp":
        # By default the buffers of the first client are sent to the others before a step, and differ after it.
        model = DistributedDataParallel(net)
    elif kind == "fsdp2":
        model = fully_shard(net)
    elif kind == "inner fsdp2":
        model = nn.ModuleDict({"tower": fully_shard(net)})
    elif kind == "inner ddp":
        model = nn.ModuleDict({"tower": DistributedDataParallel(net)})
    torch.manual_seed(dist.get_rank())
    call = model["tower"] if isinstance(model, nn.ModuleDict) else model
    call(torch.rand(3, 4)).sum().backward()
    net.seen.fill_(dist.get_rank() + 1)
    return model


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def save(
    path: str, kind: str, *, is_async: bool = False, flip: str = "", seen_equal: bool = False, **options: Any
) -> tuple[str, list[str], dict[str, torch.Tensor]]:
    """Save a network twice; return the error, what the library logged, and this client's buffers.

    Args:
        path: Prefix of both checkpoints.
        kind: What is wrapped around the network.
        is_async: Whether to save in the background.
        flip: The parameter of which client 1 changes a bit.
        seen_equal: Whether the buffer that is no BatchNorm's is equal on all clients.
        options: Options of the saves.
    """
    model = trained(kind)
    if seen_equal:
        next(tensor for name, tensor in model.named_buffers() if name.endswith("seen")).zero_()
    if flip and dist.get_rank() == 1:
        with torch.no_grad():
            next(tensor for name, tensor in model.named_parameters() if name.endswith(flip)).view(-1)[0] += 1
    state: Any = {"model": model.state_dict() if kind == "dict" else model}
    lines, logger = _Lines(), logging.getLogger("dtckpt.checkpoint")
    logger.addHandler(lines)
    error = "none"
    try:
        for step in range(2):
            if is_async:
                dtckpt.save_async(f"{path}_{step}", state, options=SaveOptions(**options)).result(20)
            else:
                dtckpt.save(f"{path}_{step}", state, options=SaveOptions(**options))
    except DtckptError as found:
        error = f"{type(found).__name__}: {found}"
    finally:
        logger.removeHandler(lines)
    return error, lines.lines, {name: tensor.clone() for name, tensor in model.named_buffers()}
