"""Clients that ask for different redistributions in one call; runs in client processes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from support.states import cluster_mesh

import dtckpt
from dtckpt import DTensor, Mesh, Partial, Replicate, Shard
from dtckpt.errors import DtckptError
from dtckpt.redistribution import execute
from dtckpt.redistribution.call_history import history_of
from dtckpt.redistribution.call_record import CallRecord

WHOLE = torch.arange(60.0).reshape(10, 6)

REQUESTS: dict[str, Any] = {
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


def ask(request: str, after: int = 0, *, late: Sequence[int] = ()) -> list[tuple[str, str] | bool]:
    """Ask for something, per client; then for what all ask for. Return what became of each.

    Args:
        request: The client's first request.
        after: It waits until so many others have said what they want, or why they fail.
        late: Clients that begin when all others are done with what they asked for first.
    """
    client, clients = dtckpt.client_id(), dtckpt.num_clients()
    tensor = rows(cluster_mesh({"x": clients}, clients, client))
    return _results(tensor, [REQUESTS[request], [Shard(1)], [Replicate()]], after, late)


def ask_on_grid(
    request: str = "columns", after: int = 0, *, late: Sequence[int] = (), slow: Sequence[int] = ()
) -> list[tuple[str, str] | bool]:
    """As `ask`, on a grid of clients.

    Args:
        request: See `ask`.
        after: See `ask`.
        late: See `ask`.
        slow: Clients whose watcher, when it has taken part in what others want, goes on only after all these calls.
    """
    client = dtckpt.client_id()
    if client in slow:
        has_asked = threading.Event()
        with patch.object(CallRecord, "join_requests", _slow(CallRecord.join_requests, has_asked)):
            seen = ask_on_grid(request, after, late=late)
            has_asked.set()
            return seen
    mesh = cluster_mesh({"a0": 2, "a1": 2}, 4, client)
    layout = dtckpt.Layout(["a0", "a1"], mesh)
    local = WHOLE[layout.region(client, WHOLE.shape).slices()].clone()
    tensor = DTensor.from_local(local, mesh, layout.placements)
    columns, whole = [Replicate(), Shard(1)], [Replicate(), Replicate()]
    requests = {"columns": columns, "everything": whole, "dim too large": [Shard(5), Shard(1)]}
    return _results(tensor, [requests[request], columns, whole, columns], after, late)


def ask_of_terms(request: str = "whole", after: int = 0) -> list[tuple[str, str] | bool]:
    """As `ask`, of terms on a grid; they are reduced along one axis after the other."""
    client = dtckpt.client_id()
    mesh = cluster_mesh({"a0": 2, "a1": 2}, 4, client)
    tensor = DTensor.from_local(WHOLE + 1 if client < 2 else -torch.ones_like(WHOLE), mesh, [Partial(), Partial("min")])
    whole = [Replicate(), Replicate()]
    return _results(tensor, [{"whole": whole, "dim too large": [Shard(5), Shard(1)]}[request], whole], after)


def _slow(join_requests: Callable[[Any], bool], has_asked: threading.Event) -> Callable[[Any], bool]:
    def join_and_wait(record: Any) -> bool:
        before = len(record._joined)
        is_all = join_requests(record)
        if len(record._joined) > before and threading.current_thread().name == "dtckpt-disagreement":
            has_asked.wait(10)
        return is_all

    return join_and_wait


def _results(
    tensor: DTensor, requests: Sequence[Any], after: int, late: Sequence[int] = ()
) -> list[tuple[str, str] | bool]:
    client, clients = dtckpt.client_id(), tuple(range(dtckpt.num_clients()))
    record = CallRecord(clients, history_of(clients).count, execute._plan_participation)
    while record.num_registered() < after:
        time.sleep(0.01)
    store = dist.distributed_c10d._get_default_store()
    if client in late:
        store.wait([f"past/{other}" for other in clients if other not in late])
    seen: list[tuple[str, str] | bool] = []
    for placements in requests:
        try:
            moved = tensor.redistribute(placements=placements)
        except DtckptError as error:
            seen.append((type(error).__name__, str(error)))
        else:
            region = moved.layout.region(client, WHOLE.shape)
            seen.append(torch.equal(moved.to_local(), WHOLE[region.slices()]))
        store.set(f"past/{client}", "")
    return seen


def one_changes_nothing() -> list[tuple[str, str] | bool]:
    """Return what becomes of a call in which only the last client keeps its layout, and of three calls after it."""
    client, clients = dtckpt.client_id(), dtckpt.num_clients()
    tensor = rows(cluster_mesh({"x": clients}, clients, client))
    wanted = [Shard(0)] if client == clients - 1 else [Replicate()]
    calls: list[Callable[[], bool]] = [
        lambda: torch.equal(tensor.redistribute(placements=wanted).full_tensor(), WHOLE),
        *[partial(_adds, tensor, number) for number in range(1, 4)],
    ]
    seen = [_outcome(call) for call in calls]
    _meet()
    return seen


def one_is_elsewhere(where: str, folder: str) -> tuple[tuple[str, str] | bool, float]:
    """Return what becomes of a call to which the last client does not come, and how long that takes.

    Args:
        where: The client's call instead.
        folder: Where it may save.
    """
    client, clients = dtckpt.client_id(), dtckpt.num_clients()
    tensor = rows(cluster_mesh({"x": clients}, clients, client))
    start = time.monotonic()
    if client < clients - 1:
        outcome = _outcome(lambda: torch.equal(tensor.full_tensor(), WHOLE))
        seconds = time.monotonic() - start
        _meet()
        return outcome, seconds
    waits = {
        "barrier": dist.barrier,
        "save": lambda: dtckpt.checkpoint.save(folder, {"a": torch.ones(2)}),
        "sleep": lambda: time.sleep(8),
    }
    done = threading.Thread(target=_meet)  # the others end while this client waits for them
    done.start()
    with suppress(Exception):
        waits[where]()
    done.join()
    return _outcome(lambda: torch.equal(tensor.full_tensor(), WHOLE)), 0.0


def wrong_local_shape() -> list[tuple[str, str] | bool]:
    """Return what becomes of `from_local` with a shape that the last client's component does not fit, and of a call."""
    client, clients = dtckpt.client_id(), dtckpt.num_clients()
    mesh = cluster_mesh({"x": clients}, clients, client)
    local = torch.ones(2 + (client == clients - 1))
    tensor = rows(mesh)
    first = _outcome(lambda: DTensor.from_local(local, mesh, [Shard(0)], shape=(2 * clients,)) is not None)
    seen = [first, _outcome(lambda: torch.equal(tensor.full_tensor(), WHOLE))]
    _meet()
    return seen


def _adds(tensor: DTensor, number: int) -> bool:
    return torch.equal((tensor + number).full_tensor(), WHOLE + number)


def _outcome(call: Callable[[], bool]) -> tuple[str, str] | bool:
    try:
        return call()
    except DtckptError as error:
        return type(error).__name__, str(error)


def _meet() -> None:
    """Wait for all clients: a client that ends would give the others an error of another kind."""
    store = dist.distributed_c10d._get_default_store().clone()
    store.set(f"over/{dtckpt.client_id()}", "")
    store.wait([f"over/{client}" for client in range(dtckpt.num_clients())])
