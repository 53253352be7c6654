"""Clients that choose a transport and use it; runs in client processes."""

from __future__ import annotations

import gc
import os
import signal
import socket
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

import dtckpt
from dtckpt.comm import point_to_point
from dtckpt.comm.collectives import PairwiseCollectives
from dtckpt.layout.layout import UNSHARDED, Layout
from dtckpt.redistribution import exchange

LARGE = (600, 400)
"""Shape whose pieces are too large to be sent eagerly."""


def transports_in_use() -> set[str]:
    """Return the transports to the clients that this one is connected to: ``host``, ``gloo``."""
    return {"gloo" if end is None else "host" for end in point_to_point._current_connections().endpoints.values()}


def _refuse(*_: object) -> None:
    raise PermissionError


OBSTACLES = {
    "none": {},
    "another host": {1: ("host_id", lambda: b"h" * 16)},
    "turned off": {1: ("host_id", lambda: bytes(16))},
    "turned off everywhere": dict.fromkeys(range(3), ("host_id", lambda: bytes(16))),
    "memory that one may not read": {1: ("read_memory", _refuse)},
    "memory that none may read": dict.fromkeys(range(3), ("read_memory", _refuse)),
    "an address where no process listens": {1: ("_socket_name", lambda address: b"\0dtckpt-elsewhere-" + address)},
}
"""Obstacles to the same-host transport, by client: a name in `point_to_point`, and its replacement."""


def exchange_twice(obstacle: str) -> tuple[set[str], bool]:
    """Exchange tensors twice; return the transports, and whether the tensors arrived."""
    rank, members = dist.get_rank(), range(dist.get_world_size())
    others = [member for member in members if member != rank]
    is_right = True
    with ExitStack() as stack:
        if rank in OBSTACLES[obstacle]:
            name, instead = OBSTACLES[obstacle][rank]
            stack.enter_context(mock.patch(f"dtckpt.comm.point_to_point.{name}", instead))
        for size in (10, 100_000):
            buffers = [(peer, torch.zeros(size)) for peer in others]
            PairwiseCollectives(members, rank).exchange(
                [(peer, torch.full((size,), rank + 0.5)) for peer in others], buffers
            ).wait()
            is_right &= all(bool(buffer.eq(peer + 0.5).all()) for peer, buffer in buffers)
    return transports_in_use(), is_right


def turned_off() -> tuple[set[str], bool]:
    """As `exchange_twice`, where the environment says that messages shall go through the network."""
    os.environ["DTCKPT_HOST_TRANSPORT"] = "0"
    return exchange_twice("none")


def _rows() -> tuple[dtckpt.DTensor, Layout, torch.Tensor]:
    """Return a tensor that is split by rows, the layout by columns, and this client's columns."""
    count, rank = dist.get_world_size(), dist.get_rank()
    mesh = dtckpt.create_distributed_mesh({"a0": count})
    whole = torch.arange(600.0 * 400).view(LARGE)
    rows, columns = Layout(["a0", UNSHARDED], mesh), Layout([UNSHARDED, "a0"], mesh)
    tensor = dtckpt.pack([whole[rows.region(rank, LARGE).slices()].clone()], rows, LARGE)
    return tensor, columns, whole[columns.region(rank, LARGE).slices()]


def cut_into_different_waves() -> bool:
    """Redistribute with so little in flight that clients cut their messages into different waves, at first contact."""
    count, rank = dist.get_world_size(), dist.get_rank()
    mesh = dtckpt.create_distributed_mesh({"a0": count})
    whole = torch.arange(31.0 * 31).view(31, 31)
    rows, columns = Layout(["a0", UNSHARDED], mesh), Layout([UNSHARDED, "a0"], mesh)
    tensor = dtckpt.pack([whole[rows.region(rank, whole.shape).slices()].clone()], rows, whole.shape)
    with mock.patch.object(exchange, "IN_FLIGHT_NBYTES", 400):
        moved = tensor.redistribute(placements=columns.placements)
    return torch.equal(moved.to_local(), whole[columns.region(rank, whole.shape).slices()])


def wait_late() -> bool:
    """Redistribute; client 0 asynchronously, and it does not look at the result before it has met the others."""
    tensor, columns, expected = _rows()
    moved = tensor.redistribute(placements=columns.placements, async_op=dist.get_rank() == 0)
    dist.barrier()
    return torch.equal(moved.to_local(), expected)


def lose_one(*, is_large: bool) -> float:
    """Redistribute; then the last client is killed while the others do it again.

    Returns:
        When the others had their error, by the clock that all processes share.
    """
    tensor, columns, _ = _rows()
    tensor = tensor if is_large else tensor[:, :8]
    tensor.redistribute(placements=columns.placements)
    dist.barrier()
    if dist.get_rank() == dist.get_world_size() - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    try:
        tensor.redistribute(placements=columns.placements)
    except dtckpt.errors.CoordinationError:
        return time.monotonic() - started
    raise AssertionError("no error")


def count_connections() -> tuple[int, set[str]]:
    """Redistribute; return the number of connections left from earlier process groups, and the transports."""
    gc.unfreeze()
    gc.collect()  # what failed before may hold its process group
    rows = [line.split() for line in Path("/proc/net/unix").read_text(errors="replace").splitlines()[1:]]
    connections = {f"socket:[{row[6]}]" for row in rows if int(row[4], 16) == socket.SOCK_SEQPACKET}
    before = 0
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # other threads close theirs
            before += os.readlink(f"/proc/self/fd/{descriptor}") in connections
    tensor, columns, expected = _rows()
    assert torch.equal(tensor.redistribute(placements=columns.placements).to_local(), expected)
    return before, transports_in_use()


def fork_and_end() -> bool:
    """Redistribute; then client 1 forks a process that stays, and ends. Return whether client 0 hears of it."""
    tensor, columns, _ = _rows()
    tensor.redistribute(placements=columns.placements)
    dist.barrier()
    if dist.get_rank() == 1:
        if os.fork() == 0:
            time.sleep(10)  # for as long as it stays; no client waits for it
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        PairwiseCollectives((0, 1), 0).exchange([], [(1, torch.zeros(3))]).wait()
    except dtckpt.errors.CoordinationError as error:
        return "client 1 has ended" in str(error)
    return False
