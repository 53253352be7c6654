"""Messages between the clients of a mesh, through ``torch.distributed``."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

from dtckpt.dtensor import observing
from dtckpt.groups import group_of, is_connected

__all__ = ["all_gather", "all_gather_object", "is_connected"]

T = TypeVar("T")


def all_gather(message: torch.Tensor, clients: Sequence[int]) -> list[torch.Tensor]:
    """Return every client's message, in the order of ``clients``; all messages have one shape and dtype.

    Collective: Over ``clients``, bounded by the process group's timeout.

    Raises:
        CoordinationError: There is no process group that spans the clients.
    """
    received = [torch.empty_like(message) for _ in clients]
    dist.all_gather(received, message, group=group_of(clients))
    if observing.is_observed():
        observing.report("all_gather", message.nbytes * (len(clients) - 1), clients)
    return received


def all_gather_object(value: T, clients: Sequence[int]) -> list[T]:
    """Return every client's value, in the order of ``clients``. Collective and errors: as `all_gather`."""
    received: list[T | None] = [None for _ in clients]
    dist.all_gather_object(received, value, group=group_of(clients))
    if observing.is_observed():
        nbytes = sum(len(pickle.dumps(item)) for item in received) - len(pickle.dumps(value))
        observing.report("all_gather_object", nbytes, clients)
    return [item for item in received if item is not None]
