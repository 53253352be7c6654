"""State that differs by client: functions that client processes run, by `Pool.run`."""

from __future__ import annotations

from typing import Any

import torch

import dtckpt
from dtckpt import ClientValues, Layout, PerClient
from dtckpt.checkpoint.per_client import ResizeRule
from support.states import packed


class Loader:
    """A loader of data that knows its position and what it has buffered."""

    def __init__(self, position: int = -1) -> None:
        self.position = position
        self.buffer = torch.full((3,), position)

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "buffer": self.buffer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position, self.buffer = state["position"], state["buffer"]


def values_of(client: int) -> dict[str, Any]:
    """Return what a client saves."""
    return {
        "rng": torch.arange(4) + 10 * client,
        "loader": Loader(100 + client).state_dict(),
        "name": f"client {client}",
    }


def target_of(on_resize: ResizeRule) -> dict[str, PerClient]:
    """Return a target for `values_of`."""
    return {
        "rng": PerClient(torch.full((4,), -1), on_resize=on_resize),
        "loader": PerClient(Loader(), on_resize=on_resize),
        "name": PerClient(None, on_resize=on_resize),
    }


def client_of(target: dict[str, PerClient]) -> int:
    """Return the client whose values a target has; -1 if it has none."""
    rng, loader, name = (target[key].value for key in ("rng", "loader", "name"))
    if name is None:
        assert (rng.unique().tolist(), loader.position, loader.buffer.unique().tolist()) == ([-1], -1, [-1])
        return -1
    client = int(name.removeprefix("client "))
    assert rng.equal(torch.arange(4) + 10 * client)
    assert (loader.position, loader.buffer.unique().tolist()) == (100 + client, [100 + client])
    return client


def by_clients(num_clients: int) -> dict[str, ClientValues]:
    """Return the values of several clients, as a restore without a target returns them."""
    values = [values_of(client) for client in range(num_clients)]
    return {key: ClientValues({client: each[key] for client, each in enumerate(values)}) for key in values[0]}


def restore_beside_weights(path: str, on_resize: ResizeRule) -> int:
    """Restore, together with a tensor that lies on all clients."""
    mesh = dtckpt.create_distributed_mesh({"x": dtckpt.num_clients()})
    target = {**target_of(on_resize), "w": packed(torch.zeros(6), Layout(["x"], mesh))}
    dtckpt.restore(path, target)
    assert all(component.eq(1).all() for component in target["w"].components)
    return client_of(target)


def last_value(values: ClientValues, client: int, num_clients: int) -> Any:
    """Give every client but the first the last value: a rule of `PerClient`."""
    assert (client, num_clients) == (dtckpt.client_id(), dtckpt.num_clients())
    return values[max(values) if client else 0]
