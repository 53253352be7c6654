"""Keys drawn by several clients; runs in client processes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from support.states import cluster_mesh

import dtckpt
from dtckpt import Shard
from dtckpt.comm import observers
from dtckpt.dtensor import randn
from dtckpt.dtensor.random import agreed_key
from dtckpt.errors import DtckptError


@dataclass(frozen=True)
class KeyDraws:
    """What a client saw: the keys, errors, at which draws there was communication, and a tensor made afterwards."""

    keys: list[int]
    errors: list[str]
    compared: list[int]
    after: tuple[float, ...]


def draw_and_recover(draws: int, seed: int, apart_at: int | None = None) -> KeyDraws:
    """Draw keys; then seed all alike, and make a tensor."""
    client, clients = dtckpt.client_id(), dtckpt.num_clients()
    mesh = cluster_mesh({"x": clients}, clients, client)
    torch.manual_seed(seed)
    keys, errors, compared = [], [], []
    for number in range(1, draws + 1):
        if number == apart_at and client == 1:
            torch.rand(())
        with observers.observed_by(lambda _, number=number: compared.append(number)):
            try:
                keys.append(agreed_key(mesh))
            except DtckptError as error:
                errors.append(f"{type(error).__name__}: {error}")
    torch.manual_seed(0)
    made = randn(5, 3, device_mesh=mesh, placements=[Shard(0)]).full_tensor()
    return KeyDraws(keys, errors, compared, tuple(made.flatten().tolist()))


def draw_alone() -> str:
    """Have only the first client draw, and return what became of it."""
    client, clients = dtckpt.client_id(), dtckpt.num_clients()
    try:
        if client == 0:
            agreed_key(cluster_mesh({"x": clients}, clients, client))
    except DtckptError as error:
        return f"{type(error).__name__}: {error}"
    return ""
