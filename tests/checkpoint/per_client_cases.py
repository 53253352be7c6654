"""State that differs by client: functions that client processes run, by `Pool.run`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from support.client_calls import wait_until
from support.states import packed

import dtckpt
from dtckpt import ClientValues, Layout, PerClient, RestoreOptions, SaveOptions
from dtckpt.checkpoint.per_client import ResizeRule


class Loader:
    """A loader of data that knows its position and its buffer."""

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


def save(path: str, clients: list[int] | None = None) -> None:
    """Save own values twice, beside a tensor that lies on all clients; the given clients alone pass own values."""
    own = values_of(dtckpt.client_id())
    mesh = dtckpt.create_distributed_mesh({"x": dtckpt.num_clients()})
    tree: dict[str, Any] = {"w": packed(torch.ones(6), Layout(["x"], mesh))}
    if clients is None or dtckpt.client_id() in clients:
        tree |= {key: PerClient(value) for key, value in own.items()}
        tree["loader"] = PerClient(Loader(7))
    dtckpt.save(f"{path}_before", tree)
    # What changes from save to save are the values, not the structure.
    if "loader" in tree:
        tree["loader"].value = Loader(100 + dtckpt.client_id())
    dtckpt.save_async(path, tree).result(20)


def save_same_keys(path: str, kind: str) -> None:
    """Save, where all clients must pass the same keys."""
    tree: dict[str, Any] = {"rng": PerClient(values_of(dtckpt.client_id())), "step": 1}
    if dtckpt.client_id() == 1 and kind == "key":
        tree["rng_2"] = 1
    if dtckpt.client_id() == 1 and kind == "per client":
        tree["rng_2"] = PerClient(torch.ones(2))
    dtckpt.save(path, tree, options=SaveOptions(keys="same", timeout_s=20))


def go_on(path: str, to: str) -> int:
    """Restore by another number of clients, and save what came; return the client whose values came."""
    target = target_of("keep")
    dtckpt.restore(path, target, options=RestoreOptions(allow_unexpected=True))
    source = client_of(target)
    if source < 0:
        dtckpt.save(to, {key: PerClient(value) for key, value in values_of(dtckpt.client_id()).items()})
    else:
        dtckpt.save(to, target)
    return source


def save_in_groups(path: str) -> int:
    """Save in two groups of two clients, each to another path; each group restores the other group's checkpoint."""
    first = dtckpt.client_id() // 2 * 2
    group = [first + 1, first]
    tree = {key: PerClient(value) for key, value in values_of(dtckpt.client_id()).items()}
    dtckpt.save(f"{path}_{first}", tree, group=group)
    target = target_of("error")
    other = f"{path}_{2 - first}"
    wait_until(lambda: Path(other).exists())
    dtckpt.restore(other, target, group=group)
    return client_of(target)


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
