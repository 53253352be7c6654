"""Messages between the clients of a mesh, through ``torch.distributed``."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

from dtckpt.errors import CoordinationError

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


def is_connected(clients: Sequence[int]) -> bool:
    """Whether a process group is there that spans ``clients``."""
    return dist.is_available() and dist.is_initialized() and max(clients) < dist.get_world_size()


def all_gather(message: torch.Tensor, clients: Sequence[int]) -> list[torch.Tensor]:
    """Return every client's message, in the order of ``clients``; all messages have one shape and dtype.

    Collective: Over ``clients``, bounded by the process group's timeout.

    Raises:
        CoordinationError: There is no process group that spans the clients.
    """
    received = [torch.empty_like(message) for _ in clients]
    dist.all_gather(received, message, group=_group(tuple(clients)))
    return received


def all_gather_object(value: T, clients: Sequence[int]) -> list[T]:
    """Return every client's value, in the order of ``clients``. Collective and errors: as `all_gather`."""
    received: list[T | None] = [None for _ in clients]
    dist.all_gather_object(received, value, group=_group(tuple(clients)))
    return [item for item in received if item is not None]


def swap(outgoing: Mapping[int, torch.Tensor], incoming: Mapping[int, torch.Tensor], clients: Sequence[int]) -> None:
    """Exchange messages pairwise.

    Collective: Over ``clients``; one that has nothing to give or take comes too.

    Args:
        outgoing: Bytes on the CPU by taking client.
        incoming: Memory on the CPU for the bytes of each giving client; filled.
        clients: All that take part.
    """
    group = _group(tuple(clients))
    operations = [dist.P2POp(dist.irecv, message, peer, group) for peer, message in incoming.items() if message.numel()]
    operations += [
        dist.P2POp(dist.isend, message, peer, group) for peer, message in outgoing.items() if message.numel()
    ]
    for work in dist.batch_isend_irecv(operations) if operations else []:
        work.wait()


def all_reduce(tensor: torch.Tensor, reduce_op: str, clients: Sequence[int]) -> None:
    """Reduce a tensor in place over ``clients``, bit for bit alike on all. Collective: Over ``clients``."""
    dist.all_reduce(tensor, _OPS[reduce_op], group=_group(tuple(clients)))


@functools.lru_cache(maxsize=256)
def _group(clients: tuple[int, ...]) -> dist.ProcessGroup | None:
    """Return the gloo group of some clients, made once; members alone take part in making it."""
    if not is_connected(clients):
        raise CoordinationError(
            f"clients {list(clients)} cannot exchange tensors: no process group spans them; "
            "call torch.distributed.init_process_group on every client first"
        )
    if clients == tuple(range(dist.get_world_size())) and dist.get_backend() == "gloo":
        return dist.group.WORLD
    group: dist.ProcessGroup = dist.new_group(list(clients), backend="gloo", use_local_synchronization=True)
    return group
