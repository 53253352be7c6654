"""What client processes do in the tests of asynchronous saves and managers: functions for `Pool.run`."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import torch

import dtckpt
from dtckpt import SaveOptions, errors
from dtckpt.checkpoint import save as saving
from dtckpt.storage import directory
from dtckpt.storage.arrays import ArrayWriter

from .cases import Tensors, mesh_over_all, save_differently, tree_on

WAIT_S = 30
STATE: Tensors = {
    "w": ((64, 8), "float32", ["x", "unsharded"]),
    "v": ((50257, 3), "float32", [("x", "y"), "unsharded"]),
    "c": ((300, 8), "bfloat16", ["unsharded", "unsharded"]),
    "p": ((40,), "int64", None),
}
SMALL: Tensors = {"w": ((64, 8), "float32", ["x", "unsharded"]), "c": ((30, 8), "float32", None)}


def spoil(tree: dict[str, Any]) -> None:
    """Overwrite the memory of all tensors, as the next step of a training loop does."""
    for tensor in tree.values():
        if isinstance(tensor, torch.Tensor):
            for part in dtckpt.unpack(tensor) if isinstance(tensor, dtckpt.DTensor) else [tensor]:
                part.fill_(7)


def save_and_spoil(path: str, axes: dict[str, int], tensors: Tensors, devices: int, **options: Any) -> dict[str, Any]:
    """Save twice in the background, changing the tensors right after each call."""
    mesh = mesh_over_all(axes, devices)
    saved = SaveOptions(overwrite=True, timeout_s=WAIT_S, **options)
    for generation in ("first", "second"):
        tree = tree_on(mesh, tensors, generation)
        handle = dtckpt.save_async(path, tree, options=saved)
        spoil(tree)
    report = handle.result(WAIT_S)
    return {"progress": handle.progress, "stats": handle.stats, "client_nbytes": report.client_nbytes}


def save_differently_in_background(path: str, clients: int, kind: str) -> None:
    """As `save_differently`, through `save_async`, whose call must raise."""
    save, dtckpt.save = dtckpt.save, dtckpt.save_async
    try:
        save_differently(path, clients, kind)
    finally:
        dtckpt.save = save


class Gate:
    """Stops this client's first write of the background until it is opened."""

    def __init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()

    def __enter__(self) -> Gate:
        self._write = write = ArrayWriter.write

        def wait(*args: Any, **kwargs: Any) -> None:
            self.reached.set()
            assert self.opened.wait(WAIT_S)
            write(*args, **kwargs)

        ArrayWriter.write = wait  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        self.opened.set()
        ArrayWriter.write = self._write  # type: ignore[method-assign]


def fail_in_background(folder: str, victim: int) -> list[str]:
    """One client fails amid its writes; what every later call says, on clients that looked and clients that did not."""
    client, clients = dtckpt.client_id(), dtckpt.num_clients()
    mesh = mesh_over_all({"x": clients})
    tree, options = tree_on(mesh, SMALL, "new"), SaveOptions(timeout_s=WAIT_S)
    write = ArrayWriter.write

    def fail(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("no ink")

    def said(call: Any) -> str:
        try:
            call()
        except errors.DtckptError as error:
            return f"{type(error).__name__}: {error}"
        return "ok"

    if client == victim:
        ArrayWriter.write = fail  # type: ignore[method-assign]
    try:
        handle = dtckpt.save_async(f"{folder}/a", tree, options=options)
        handle.wait(WAIT_S)
    finally:
        ArrayWriter.write = write  # type: ignore[method-assign]
    found = []
    if client == 0:  # only one client looks
        found.append(said(handle.result))
    else:
        found.append(said(lambda: dtckpt.save(f"{folder}/b", tree, options=options)))
    if client == 0:
        found.append(said(lambda: dtckpt.save(f"{folder}/b", tree, options=options)))
    else:
        found.append(said(handle.result))
    found.append(said(lambda: dtckpt.save_async(f"{folder}/c", tree, options=options).result(WAIT_S)))
    return [*found, handle.progress.phase]


def die_in_background(path: str, victim: int, where: str) -> float:
    """Save, while one client is killed in the background part of it."""
    client, clients = dtckpt.client_id(), dtckpt.num_clients()
    tree = tree_on(mesh_over_all({"x": clients}), SMALL, "new")
    options = SaveOptions(overwrite=True, timeout_s=WAIT_S)

    def die(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if client == victim and where == "writing":
        ArrayWriter.write = die  # type: ignore[method-assign]
    elif client == victim and where == "committing":
        directory.commit = die
    handle = dtckpt.save_async(path, tree, options=options)
    handle.result(WAIT_S)
    raise AssertionError("a client was lost, but the save went well")


def fail_to_stage(path: str, victim: int) -> None:
    """One client has no memory for the copy."""
    from dtckpt.checkpoint import staging

    def fail(*_: Any) -> None:
        raise MemoryError("no room")

    tree = tree_on(mesh_over_all({"x": dtckpt.num_clients()}), SMALL, "new")
    copy = staging._copy
    if dtckpt.client_id() == victim:
        staging._copy = fail
    try:
        dtckpt.save_async(path, tree, options=SaveOptions(timeout_s=WAIT_S)).result(WAIT_S)
    finally:
        staging._copy = copy


# --- in a process of its own ---------------------------------------------------------------------------------------


def exit_amid_a_save(path: str, how: str) -> None:
    """End the process while a save is in flight."""
    handle = dtckpt.save_async(path, {"w": torch.ones(1 << 22), "step": 3})
    assert not handle.done()
    if how == "SystemExit":
        raise SystemExit(3)
    if how == "error":
        raise ZeroDivisionError


def exit_after_a_failure(path: str) -> None:
    """End the process after a save whose failure nobody looked at."""

    def fail(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("no ink")

    saving.merge_clients = fail
    dtckpt.save_async(path, {"w": torch.ones(3)}).wait(WAIT_S)


def fork_amid_a_save(path: str) -> None:
    """Fork while a save is in flight; the child neither waits for it nor commits it."""
    with Gate() as gate:
        handle = dtckpt.save_async(path, {"w": torch.ones(3)})
        assert gate.reached.wait(WAIT_S)
        child = os.fork()
        if not child:
            from dtckpt.checkpoint import in_flight

            in_flight.wait(1.0)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    handle.result(WAIT_S)
