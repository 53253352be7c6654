"""Messages between the clients of a mesh, through ``torch.distributed``."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

from dtckpt.dtensor import observing
from dtckpt.groups import group_of, is_connected

__all__ = ["REDUCIBLE", "all_gather", "all_gather_object", "all_reduce", "is_connected", "swap"]

T = TypeVar("T")

_OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.SUM,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "product": dist.ReduceOp.PRODUCT,
}
REDUCIBLE = frozenset({torch.float32, torch.float64, torch.int32, torch.int64, torch.uint8, torch.int8})
"""Dtypes that `all_reduce` takes, as gloo does."""


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


def swap(outgoing: Mapping[int, torch.Tensor], incoming: Mapping[int, torch.Tensor], clients: Sequence[int]) -> None:
    """Exchange messages pairwise.

    Collective: Over ``clients``; one that has nothing to give or take comes too.

    Args:
        outgoing: Bytes on the CPU by taking client.
        incoming: Memory on the CPU for the bytes of each giving client; filled.
        clients: All that take part.
    """
    group = group_of(clients)
    operations = [dist.P2POp(dist.irecv, message, peer, group) for peer, message in incoming.items() if message.numel()]
    operations += [
        dist.P2POp(dist.isend, message, peer, group) for peer, message in outgoing.items() if message.numel()
    ]
    for work in dist.batch_isend_irecv(operations) if operations else []:
        work.wait()
    if operations and observing.is_observed():
        observing.report("exchange", sum(message.nbytes for message in incoming.values()), clients)


def all_reduce(tensor: torch.Tensor, reduce_op: str, clients: Sequence[int]) -> None:
    """Reduce a tensor in place over ``clients``, bit for bit alike on all. Collective: Over ``clients``."""
    dist.all_reduce(tensor, _OPS[reduce_op], group=group_of(clients))
    if observing.is_observed():
        observing.report("all_reduce", tensor.nbytes, clients)
