"""Clients that call `from_local` again and again, with local shapes that change; runs in client processes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from support.states import cluster_mesh

import dtckpt
from dtckpt import DTensor, Partial, Replicate, Shard
from dtckpt.comm.observers import observed_by
from dtckpt.dtensor import distribute_tensor
from dtckpt.dtensor.experimental import local_map
from dtckpt.errors import DtckptError

BAD = -1
"""Stands for rows that `from_local` refuses on this client."""


def mesh_of_all():
    return cluster_mesh({"x": dtckpt.num_clients()}, dtckpt.num_clients(), dtckpt.client_id())


def means(rows: Sequence[int], *, run_check: bool = False) -> list[float | tuple[str, str]]:
    """Return, per step, the mean over all clients of this client's rows of ones and the others'; or the error.

    The mean divides by the global size, so a client with a wrong idea of that would get a wrong one, without any
    difference in the messages.

    Args:
        rows: Per step, how many rows this client has; `BAD` for a tensor that no mesh can hold.
        run_check: See `DTensor.from_local`.
    """
    mesh = mesh_of_all()
    found: list[float | tuple[str, str]] = []
    for count in rows:
        local = torch.ones(3).to_sparse() if count == BAD else torch.ones(count)
        try:
            found.append(DTensor.from_local(local, mesh, [Shard(0)], run_check=run_check).mean().full_tensor().item())
        except DtckptError as error:
            found.append((type(error).__name__, str(error)))
    return found


def communications_of_steps() -> list[list[str]]:
    """Return what clients communicate in the first and in the second of two equal steps, for several ways."""
    mesh = mesh_of_all()
    plain = torch.ones(2, 2)
    row = DTensor.from_local(plain, mesh, [Shard(0)])
    doubled = local_map(lambda one, other: torch.cat([one, other]), out_placements=[Shard(0)])
    checked = local_map(torch.mul, out_placements=[Shard(0)], in_placements=([Shard(0)], [Shard(0)]))
    steps = [
        lambda: DTensor.from_local(plain, mesh, [Shard(1)]),
        lambda: DTensor.from_local(plain, mesh, [Replicate()]),
        lambda: DTensor.from_local(plain.clone().requires_grad_(), mesh, [Partial()]),
        lambda: doubled(row, row),
        lambda: dtckpt.pack([torch.ones(5)], dtckpt.Layout(["x"], mesh)),
        # The components are as in the very first call, but their inputs are new.
        lambda: checked(row, row),
        # Agreed on by the very first call, for other tensors.
        lambda: dtckpt.pack([plain], row.layout),
    ]
    found = []
    for step in steps:
        for _ in range(2):
            kinds: list[str] = []
            with observed_by(lambda event, kinds=kinds: kinds.append(event.kind)):
                step()
            found.append(kinds)
    return found


def distributed_in_turn(shapes: Sequence[Sequence[int]]) -> list[tuple[int, ...] | tuple[str, str]]:
    """Distribute tensors of these shapes one after the other; return the shapes of the results, or the errors."""
    mesh = mesh_of_all()
    found: list[tuple[int, ...] | tuple[str, str]] = []
    for shape in shapes:
        try:
            found.append(tuple(distribute_tensor(torch.ones(shape), mesh, [Shard(0)]).full_tensor().shape))
        except DtckptError as error:
            found.append((type(error).__name__, str(error)))
    return found


def anew_in_another_group(path: str) -> list[float | tuple[str, str]]:
    """Agree, end the process group, make another one, and see that nothing is taken for granted there."""
    first = means([4])
    dist.destroy_process_group()
    rank, size = dtckpt.client_id(), dtckpt.num_clients()
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=size)
    return [*first, *means([4 - rank])]


def one_asks_while_others_redistribute() -> tuple[str, str]:
    """Return the error of a step in which client 1 calls `from_local` and the others redistribute."""
    mesh = mesh_of_all()
    row = DTensor.from_local(torch.ones(2), mesh, [Shard(0)], shape=(2 * dtckpt.num_clients(),))
    try:
        if dtckpt.client_id() == 1:
            DTensor.from_local(torch.ones(3), mesh, [Shard(0)])
        else:
            row.full_tensor()
    except DtckptError as error:
        return type(error).__name__, str(error)
    return "", ""
