"""Faults of jobs with a local tier, as client processes meet them; see `tier_cases` for the jobs."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from support import mounts

import dtckpt
from dtckpt import CheckpointManager
from dtckpt.checkpoint.parts import peers
from dtckpt.checkpoint.parts.host_folder import HostFolder
from dtckpt.checkpoint.parts.part_files import PartFiles
from dtckpt.checkpoint.parts.peers import Peer
from dtckpt.checkpoint.parts.server import _PartHandler
from dtckpt.checkpoint.saving import save_handle
from dtckpt.checkpoint.saving.write import ClientWriter
from dtckpt.checkpoint.tiers import durable
from dtckpt.errors import StorageFullError

from . import tier_cases
from .tier_cases import mesh_of_all, state, tier

TIMEOUT_S = 20.0
OPTIONS = dtckpt.SaveOptions(timeout_s=TIMEOUT_S)


@contextmanager
def warnings_told() -> Iterator[list[str]]:
    """Collect the warnings that this client logs."""
    told: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("dtckpt")
    logger.addHandler(handler)
    try:
        yield told
    finally:
        logger.removeHandler(handler)


# --- points at which a client dies ----------------------------------------------------------------------------------


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _before(owner: Any, name: str, act: Callable[[], object], is_now: Callable[[], bool]) -> Any:
    """Return a patch that acts before a method runs."""
    real = getattr(owner, name)

    def patched(*args: Any, **kwargs: Any) -> Any:
        if is_now():
            act()
        return real(*args, **kwargs)

    return mock.patch.object(owner, name, patched)


def _after(owner: Any, name: str, act: Callable[[], object], is_now: Callable[[], bool]) -> Any:
    real = getattr(owner, name)

    def patched(*args: Any, **kwargs: Any) -> Any:
        result = real(*args, **kwargs)
        if is_now():
            act()
        return result

    return mock.patch.object(owner, name, patched)


def _half_sent(act: Callable[[], object], is_now: Callable[[], bool]) -> Any:
    real = peers._send

    def patched(connection: Any, parts: Sequence[memoryview], *others: Any) -> None:
        if is_now():
            connection.sendall(parts[0][: len(parts[0]) // 2])
            act()
        real(connection, parts, *others)

    return mock.patch.object(peers, "_send", patched)


POINTS: dict[str, Callable[[Callable[[], object], Callable[[], bool]], Any]] = {
    # Before the vote. A restore that counted the step would look for elements that this host never wrote; if the index
    # counted as a vote, the other hosts would not have the step that this one wants.
    "filled": lambda act, is_now: _after(HostFolder, "take", act, is_now),
    "staged": lambda act, is_now: _before(HostFolder, "put", act, is_now),
    "index written": lambda act, is_now: _after(HostFolder, "put", act, is_now),
    # The others have the verdict, and this host has no note of it. If its part did not count, hosts would restore
    # different steps.
    "voted": lambda act, is_now: _before(HostFolder, "note_voted", act, is_now),
    # After the note, with no copy or a part of one. A host that took half a copy for a whole one would restore torn
    # elements if the owner were lost.
    "noted": lambda act, is_now: _after(HostFolder, "note_voted", act, is_now),
    "copying": _half_sent,
    "copied": lambda act, is_now: _after(Peer, "put", act, is_now),
    # Two steps are there. A restore that took the older one, or a removal that began with the newer one, would lose
    # what training was told is protected.
    "removing": lambda act, is_now: _before(HostFolder, "remove_all_but", act, is_now),
}
"""Where in a local save a client may die."""


def save_and_die(
    root: Path, folder: Path, hosts: Sequence[str], steps: Sequence[int], point: str, victims: Sequence[int]
) -> dict[str, Any]:
    """Save steps, of which the last one meets the death of some clients; return how the others learn of it."""
    mesh, is_last = mesh_of_all(), threading.Event()
    start = time.monotonic()
    with ExitStack() as stack:
        if dtckpt.client_id() in victims:
            stack.enter_context(POINTS[point](_die, is_last.is_set))
        error = ""
        try:
            local = tier(folder, hosts, timeout_s=TIMEOUT_S)
            with CheckpointManager(root, local=local, save_interval_steps=10**6, options=OPTIONS) as manager:
                for step in steps:
                    if step == steps[-1]:
                        dist.barrier()
                        is_last.set()
                    start = time.monotonic()
                    manager.save(step, state(step, mesh))
                    manager.wait()
                dist.barrier()
        except Exception as failure:
            error = type(failure).__name__
    return {"error": error, "seconds": time.monotonic() - start}


def restore_and_die(root: Path, folder: Path, hosts: Sequence[str], victims: Sequence[int]) -> dict[str, Any]:
    """Restore; clients die when they begin to read. Return how the others learn of it."""
    start, error = time.monotonic(), ""
    with ExitStack() as stack:
        if dtckpt.client_id() in victims:
            stack.enter_context(_before(PartFiles, "read", _die, lambda: True))
        try:
            tier_cases.restore(root, folder, hosts, timeout_s=TIMEOUT_S)
        except Exception as failure:
            error = type(failure).__name__
    return {"error": error, "seconds": time.monotonic() - start}


# --- tiers that cannot be written -----------------------------------------------------------------------------------


def save_beside(
    root: Path, folder: Path, hosts: Sequence[str], steps: Sequence[int], durable: int, own: dict[str, Any]
) -> dict[str, Any]:
    """Save steps with other options of the tier on this client; return the steps that were refused, and warnings."""
    mesh, refused, local = mesh_of_all(), [], tier(folder, hosts, **own)
    with (
        warnings_told() as told,
        CheckpointManager(root, local=local, save_interval_steps=durable, options=OPTIONS) as manager,
    ):
        for step in steps:
            handle = manager.save(step, state(step, mesh))
            manager.wait()
            if handle is None or handle.failure is not None:
                refused.append(step)
        dist.barrier()
        saved = manager.all_steps()
    return {"refused": refused, "told": told, "saved": saved}


def close_and_save_again(root: Path, folder: Path, hosts: Sequence[str]) -> list[int]:
    """Save two steps that are due in the root, with the manager closed between them; client 0 joins late."""
    real, mesh = durable.connect_beside, mesh_of_all()

    def late(name: str) -> Any:
        if dtckpt.client_id() == 0:
            time.sleep(0.5)  # a client in the barriers of the closed manager would wait for clients that have left
        return real(name)

    manager = CheckpointManager(root, local=tier(folder, hosts), save_interval_steps=4, options=OPTIONS)
    with manager:
        manager.save(0, state(0, mesh))
    with mock.patch.object(durable, "connect_beside", late), manager:
        manager.save(4, state(4, mesh))
    return manager.all_steps()


def save_as_one_host(root: Path, folder: Path) -> None:
    """Save a step on clients whose hosts have one name, but separate directories at one path."""
    # If names alone told hosts apart, each client would take its directory for the other's,
    # and look there for both parts.
    own = f"directory of client {dtckpt.client_id()}"
    with mock.patch.object(HostFolder, "token", return_value=own):
        save_beside(root, folder, ["host", "host"], [7], 100, {})


def save_on_small_disk(root: str, folder: str, nbytes: int, steps: int, pipe: Any) -> None:
    """Run a job of one client whose tier is a file system of a bounded size; send what became of it."""
    mounts.mount_small(folder, nbytes)
    with warnings_told() as told:
        local = dtckpt.LocalTier(path=folder, every_steps=1, copies=1)
        with CheckpointManager(root, local=local, save_interval_steps=3) as manager:
            refused = []
            for step in range(1, steps + 1):
                if manager.save(step, {"weight": torch.full((1 << 18,), float(step))}) is None:
                    refused.append(step)
                manager.wait()
                if step == 2:  # if the tier counted on its spare file, it would stop the training that it protects
                    Path(folder, "filler").write_bytes(bytes(shutil.disk_usage(folder).free))
                    shutil.rmtree(next(Path(folder).glob("*/spare")))
                if step == 5:
                    Path(folder, "filler").unlink()
            restored = manager.restore()
            pipe.send((refused, told, manager.all_steps(), restored.step, restored.tree["weight"].unique().tolist()))


# --- partners that take no copies -----------------------------------------------------------------------------------


def _full(*_: Any) -> None:
    # If the error reached the caller, a partner's full memory would end the training of all.
    raise StorageFullError("the local tier is full: 8 KiB are in use, and 4 KiB more are needed")


def _silent(handler: _PartHandler, *_: Any) -> None:
    # Without a timeout of the copy, each later save would wait for it for ever.
    _let_go.wait(60)


def _hangs_up(handler: _PartHandler, *_: Any) -> None:
    # A copy that was cut off and counted would be missed when its owner is lost.
    raise ConnectionResetError


_let_go = threading.Event()
PARTNERS: dict[str, Callable[..., None]] = {"full": _full, "silent": _silent, "hangs up": _hangs_up}


def save_with_partner(
    root: Path, folder: Path, hosts: Sequence[str], fault: str, troubled: Sequence[int], own: str = ""
) -> dict[str, Any]:
    """Save steps, some of them while the server of one host takes no copies; say how long the saves stopped training.

    Args:
        root: The root.
        folder: The tiers.
        hosts: By client, its host.
        fault: The server's reaction to copies.
        troubled: The steps that are saved meanwhile, of steps 1 to 6.
        own: Whether this client has that server: its name, else empty.
    """
    mesh, blocked = mesh_of_all(), []
    _let_go.clear()
    real = _PartHandler._keep
    state_ = {"step": 0}

    def keep(handler: _PartHandler, *args: Any) -> None:
        if own and state_["step"] in troubled:
            PARTNERS[fault](handler, *args)
        real(handler, *args)

    with warnings_told() as told, mock.patch.object(_PartHandler, "_keep", keep):
        start = time.monotonic()
        local = tier(folder, hosts, timeout_s=1.0)
        with CheckpointManager(root, local=local, save_interval_steps=10**6, options=OPTIONS) as manager:
            for step in range(1, 7):
                dist.barrier()
                state_["step"] = step
                begin = time.monotonic()
                manager.save(step, state(step, mesh)).result()
                blocked.append(time.monotonic() - begin)
                if step not in troubled:
                    manager.wait()
            dist.barrier()
            manager.wait()
            dist.barrier()
            parts = manager._tier.session.folder.parts()
            _let_go.set()
        seconds = time.monotonic() - start
    held = {save.step: sorted(clients) for save, clients in parts.voted.items()}
    return {"told": told, "blocked": blocked, "held": held, "seconds": seconds}


# --- writes to the root that are cut off ----------------------------------------------------------------------------


def save_and_die_writing(
    root: Path, folder: Path, hosts: Sequence[str], durable: int, after: int, victims: Sequence[int]
) -> dict[str, Any]:
    """Save steps from 1 on; clients die while a step is written to the root, when some more were saved in the tier."""
    mesh = mesh_of_all()
    error, may_die, real = "", threading.Event(), ClientWriter.write
    is_cut = threading.Event()

    def write(self: ClientWriter) -> int:
        if is_cut.is_set():
            assert may_die.wait(60)
            if dtckpt.client_id() in victims:
                # Without the note that this step is due in the root, the next attempt would leave it unwritten there.
                _die()
        return real(self)

    with mock.patch.object(ClientWriter, "write", write):
        try:
            local = tier(folder, hosts, timeout_s=TIMEOUT_S)
            with CheckpointManager(root, local=local, save_interval_steps=durable, options=OPTIONS) as manager:
                for step in range(1, durable + after + 1):
                    if step == durable:
                        is_cut.set()
                    manager.save(step, state(step, mesh), metrics={"step": step}).result()
                    manager._tier.session.replicator.wait(TIMEOUT_S)
                    if step < durable:
                        manager.wait()
                dist.barrier()
                may_die.set()
                manager.wait()
        except Exception as failure:
            error = type(failure).__name__
    return {"error": error}


def go_on(root: Path, folder: Path, hosts: Sequence[str]) -> dict[str, Any]:
    """Restore the newest step, save the next one in the tier, wait for the write that was cut off, and list all."""
    mesh = mesh_of_all()
    most, now, real, lock = 0, 0, ClientWriter.write, threading.Lock()

    def write(self: ClientWriter) -> int:
        nonlocal most, now
        with lock:
            now += 1
            most = max(most, now)
        try:
            return real(self)
        finally:
            with lock:
                now -= 1

    with (
        mock.patch.object(ClientWriter, "write", write),
        CheckpointManager(root, local=tier(folder, hosts), save_interval_steps=10**6, options=OPTIONS) as manager,
    ):
        restored = manager.restore(target=state(0, mesh))
        manager.wait()
        assert manager.all_steps() == [1], "a restore alone changes nothing"
        dist.barrier()
        manager.save(restored.step + 1, state(restored.step + 1, mesh))
        manager.wait()
        steps = manager.all_steps()
        metrics = manager.metrics(steps[-1])
    return {
        "step": restored.step,
        "is_local": restored.local is not None,
        "steps": steps,
        "metrics": metrics,
        "most": most,
    }


def save_and_leave(folder: str) -> None:
    """Save a step that is due in the root, which takes its time, and return to the end of the process."""
    real = ClientWriter.write

    def write(self: ClientWriter) -> int:
        time.sleep(0.3)  # storage is slow
        return real(self)

    local = dtckpt.LocalTier(path=f"{folder}/tier", every_steps=1, copies=1)
    with mock.patch.object(ClientWriter, "write", write):
        manager = CheckpointManager(f"{folder}/root", local=local, save_interval_steps=4)
        for step in (1, 2, 3):
            manager.save(step, {"weight": torch.full((100,), float(step)), "step": step})
        # The step of threading at the end of a process, which a forked process leaves out.
        save_handle._wait_at_exit()
