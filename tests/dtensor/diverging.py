"""Redistributions that clients do not agree about; runs in client processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from states import cluster_mesh

import dtckpt
from dtckpt import DTensor, Mesh, Partial, Replicate, Shard
from dtckpt.errors import DtckptError

WHOLE = torch.arange(60.0).reshape(10, 6)

WISHES: dict[str, Any] = {
    "columns": [Shard(1)],
    "rows": [Shard(0)],
    "whole": [Replicate()],
    "dim too large": [Shard(5)],
    "too many": [Shard(0), Shard(1)],
    "no placements": 3,
    "terms": [Partial()],
}


def rows(mesh: Mesh) -> DTensor:
    layout = dtckpt.Layout(["x", dtckpt.UNSHARDED], mesh)
    (device,) = mesh.local_device_ids()
    return DTensor.from_local(WHOLE[layout.region(device, WHOLE.shape).slices()].clone(), mesh, [Shard(0)])


def ask(wish: str, times: int = 1) -> list[tuple[str, str] | bool]:
    """Ask for something, per client; then, several times, for what all ask for. Return what became of each."""
    client, clients = dtckpt.client_id(), dtckpt.num_clients()
    tensor = rows(cluster_mesh({"x": clients}, clients, client))
    return _results(tensor, [WISHES[wish], *[[Shard(1)], [Replicate()]] * times])


def ask_on_grid(wish: str = "columns") -> list[tuple[str, str] | bool]:
    """As `ask`, on a grid of clients."""
    client = dtckpt.client_id()
    mesh = cluster_mesh({"a0": 2, "a1": 2}, 4, client)
    layout = dtckpt.Layout(["a0", "a1"], mesh)
    local = WHOLE[layout.region(client, WHOLE.shape).slices()].clone()
    tensor = DTensor.from_local(local, mesh, layout.placements)
    columns, whole = [Replicate(), Shard(1)], [Replicate(), Replicate()]
    wishes = {"columns": columns, "everything": whole, "dim too large": [Shard(5), Shard(1)]}
    return _results(tensor, [wishes[wish], columns, whole, columns])


def _results(tensor: DTensor, wishes: Sequence[Any]) -> list[tuple[str, str] | bool]:
    seen: list[tuple[str, str] | bool] = []
    for placements in wishes:
        try:
            moved = tensor.redistribute(placements=placements)
        except DtckptError as error:
            seen.append((type(error).__name__, str(error)))
        else:
            region = moved.layout.region(dtckpt.client_id(), WHOLE.shape)
            seen.append(torch.equal(moved.to_local(), WHOLE[region.slices()]))
    return seen
