"""Asynchronous saves and managers over several clients: functions that client processes run, by `Pool.run`."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
from support.states import bits_of

import dtckpt
from checkpoint.client_cases import Tensors, mesh_over_all, save_differently, tree_on
from dtckpt import SaveOptions, errors
from dtckpt.checkpoint.converting.file_plan import FilePlan
from dtckpt.checkpoint.converting.write_files import FileWriter
from dtckpt.checkpoint.restoring import restore as restoring
from dtckpt.checkpoint.saving import construction
from dtckpt.storage import commit_by_rename
from dtckpt.storage.zarr_tensorstore import TensorStoreWriter

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
    """Stops this client's writes of the background, after the first ``open_for``, until it is opened."""

    def __init__(self, open_for: int = 0) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()
        self._remaining = open_for

    def __enter__(self) -> Gate:
        self._write = write = TensorStoreWriter.write

        def wait(*args: Any, **kwargs: Any) -> None:
            self._remaining -= 1
            if self._remaining < 0:
                self.reached.set()
                assert self.opened.wait(WAIT_S)
            write(*args, **kwargs)

        TensorStoreWriter.write = wait  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        self.opened.set()
        TensorStoreWriter.write = self._write  # type: ignore[method-assign]


def fail_in_background(folder: str, victim: int) -> list[str]:
    """One client fails amid its writes; what every later call says, on clients that looked and clients that did not."""
    client, clients = dtckpt.client_id(), dtckpt.num_clients()
    mesh = mesh_over_all({"x": clients})
    tree, options = tree_on(mesh, SMALL, "new"), SaveOptions(timeout_s=WAIT_S)
    write = TensorStoreWriter.write

    def fail(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("no ink")

    def said(call: Any) -> str:
        try:
            call()
        except errors.DtckptError as error:
            return f"{type(error).__name__}: {error}"
        return "ok"

    if client == victim:
        # A client that did not look at its handle would go on as if the step were saved, until a crash needs it.
        TensorStoreWriter.write = fail  # type: ignore[method-assign]
    try:
        handle = dtckpt.save_async(f"{folder}/a", tree, options=options)
        handle.wait(WAIT_S)
    finally:
        TensorStoreWriter.write = write  # type: ignore[method-assign]
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

    if client == victim and where == "writing":  # the others would wait for it, or commit without its part
        TensorStoreWriter.write = die  # type: ignore[method-assign]
    elif client == victim and where == "committing":  # the others would report a checkpoint that is not there
        commit_by_rename.commit = die
    handle = dtckpt.save_async(path, tree, options=options)
    handle.result(WAIT_S)
    raise AssertionError("a client was lost, but the save went well")


def fail_to_stage(path: str, victim: int) -> None:
    """One client has no memory for the copy."""
    from dtckpt.checkpoint.saving import staging

    def fail(*_: Any) -> None:
        raise MemoryError("no room")

    tree = tree_on(mesh_over_all({"x": dtckpt.num_clients()}), SMALL, "new")
    copy = staging._copy
    if dtckpt.client_id() == victim:
        staging._copy = fail  # it leaves before its first barrier, where the others would wait for it until the timeout
    try:
        dtckpt.save_async(path, tree, options=SaveOptions(timeout_s=WAIT_S)).result(WAIT_S)
    finally:
        staging._copy = copy


# --- in a separate process -----------------------------------------------------------------------------------------


def exit_amid_a_save(path: str, how: str) -> None:
    """End the process while a save is in flight."""
    handle = dtckpt.save_async(path, {"w": torch.ones(1 << 22), "step": 3})
    assert not handle.done()
    if how == "SystemExit":
        raise SystemExit(3)
    if how == "error":
        raise ZeroDivisionError


def exit_after_a_failure(path: str) -> None:
    """End the process after a save whose failure was never read."""

    def fail(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("no ink")

    construction.merge_clients = fail  # the process would end with code 0, and its last step would be missing unseen
    dtckpt.save_async(path, {"w": torch.ones(3)}).wait(WAIT_S)


def fork_amid_a_save(path: str) -> None:
    """Fork while a save is in flight; the child neither waits for it nor commits it."""
    with Gate() as gate:
        handle = dtckpt.save_async(path, {"w": torch.ones(3)})
        assert gate.reached.wait(WAIT_S)
        child = os.fork()
        if not child:  # it has no thread that writes: it would wait for ever, or commit what its parent still writes
            try:
                handle.result(WAIT_S)
            except errors.ForkedProcessError:
                sys.exit(0)
            os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
    handle.result(WAIT_S)


# --- managers ------------------------------------------------------------------------------------------------------


def manage(root: str, steps: int, **options: Any) -> list[Any]:
    """Save a run's steps; return what is there in the end."""
    mesh = mesh_over_all({"x": dtckpt.num_clients()})
    with dtckpt.CheckpointManager(root, **options) as manager:
        for step in range(steps):
            tree = tree_on(mesh, SMALL, str(step))
            manager.save(step, tree, metrics={"loss": abs(step - 3.0)})
            spoil(tree)
        manager.wait()
        return [manager.all_steps(), manager.latest_step(), manager.best_step()]


def resume(root: str, odd_client: int = -1) -> tuple[int, list[int], list[str]]:
    """Restore the newest valid step; one client may find the newest one damaged though the others do not."""
    mesh = mesh_over_all({"x": dtckpt.num_clients()})
    open_checkpoint = restoring.open_checkpoint

    def fail_once(path: Any, **_: Any) -> Any:
        restoring.open_checkpoint = open_checkpoint
        raise errors.CheckpointCorruptError(f"{path} is damaged for me alone")

    if dtckpt.client_id() == odd_client:
        restoring.open_checkpoint = fail_once
    manager = dtckpt.CheckpointManager(root)
    if odd_client >= 0:
        found = manager.restore()
        return found.step, sorted(found.skipped), []
    found = manager.restore(target=tree_on(mesh, SMALL, "other"))
    expected = tree_on(mesh, SMALL, found.tree["step"])
    return found.step, sorted(found.skipped), differing(found.tree, expected)


def differing(tree: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    def parts(value: Any) -> Any:
        return [bits_of(part) for part in dtckpt.unpack(value)] if isinstance(value, dtckpt.DTensor) else bits_of(value)

    return [name for name in SMALL if parts(tree[name]) != parts(expected[name])]


def restore_different_steps(root: str) -> None:
    dtckpt.CheckpointManager(root).restore(dtckpt.client_id())


def manage_by_time(root: str) -> list[int]:
    """Client 0's clock decides; the other clients' clocks stand still."""
    now = [0.0]
    manager = dtckpt.CheckpointManager(root, save_interval_s=10, clock=lambda: now[0])
    for step in range(6):
        if dtckpt.client_id() == 0:
            now[0] += 5
        if manager.should_save(step):
            assert manager.save(step, {"step": step}) is not None
    manager.close()
    return manager.all_steps()


def go_on_after_failures(root: str, victim: int, error: str) -> tuple[list[bool], int, list[int]]:
    """The storage of one client refuses the second of three saves."""
    mesh = mesh_over_all({"x": dtckpt.num_clients()})
    began, commit = [], TensorStoreWriter.commit

    def fail(_: TensorStoreWriter) -> None:
        raise getattr(errors, error)("not today")

    with dtckpt.CheckpointManager(root, on_failure="warn") as manager:
        for step in range(3):
            if step == 1 and dtckpt.client_id() == victim:
                # If only the victim counted the failure, it would stop at another step than the others, and they would
                # hang.
                TensorStoreWriter.commit = fail  # type: ignore[method-assign]
            try:
                began.append(manager.save(step, tree_on(mesh, SMALL, str(step))) is not None)
                manager.wait()
            finally:
                TensorStoreWriter.commit = commit  # type: ignore[method-assign]
        return began, manager.num_failed_saves, manager.all_steps()


def export(root: str, path: str, shard_size: int, victim: int = -1) -> list[str]:
    """Save two steps and export the newest, as files of at most so many bytes; return the files that this client wrote.

    Args:
        root: Where the checkpoints go.
        path: Where the files go.
        shard_size: Bound on the tensor data of a file.
        victim: A client whose storage refuses to write.
    """
    mesh = mesh_over_all({"x": dtckpt.num_clients()})
    written, write_file = [], FileWriter._write_file

    def note(self: FileWriter, plan: FilePlan, *others: Any) -> None:
        if dtckpt.client_id() == victim:
            # An index that the others wrote would name a file that is not there.
            raise errors.StorageFullError("no space is left")
        written.append(plan.name)
        write_file(self, plan, *others)

    FileWriter._write_file = note  # type: ignore[method-assign]
    try:
        with dtckpt.CheckpointManager(root) as manager:
            for step in (1, 2):
                manager.save(step, tree_on(mesh, SMALL, str(step)))
            options = dtckpt.ExportOptions(max_shard_size=shard_size, rename={"w": "weight"}, overwrite=True)
            assert manager.export(path, options=options) == 2
    finally:
        FileWriter._write_file = write_file  # type: ignore[method-assign]
    return written


def export_differently(root: str, path: str) -> None:
    mesh = mesh_over_all({"x": dtckpt.num_clients()})
    with dtckpt.CheckpointManager(root) as manager:
        manager.save(1, tree_on(mesh, SMALL))
        manager.export(path, options=dtckpt.ExportOptions(select="wc"[dtckpt.client_id()]))


def save_back_to_back(root: str, blocked: int) -> tuple[list[int], list[int]]:
    """Save whenever the save before has ended on client 0; one client's saves end late."""
    mesh = mesh_over_all({"x": dtckpt.num_clients()})
    manager, saved = dtckpt.CheckpointManager(root, save_interval="continuous"), []
    for step in range(40):
        if manager.save(step, tree_on(mesh, SMALL, str(step))) is not None:
            saved.append(step)
        if dtckpt.client_id() == blocked:
            manager.wait()
    manager.close()
    return saved, manager.all_steps()


def train_until_preempted(root: str, victim: int) -> tuple[int, list[int], str]:
    """Train; one client gets SIGTERM amid step 4, and the others get no signal."""
    before = signal.getsignal(signal.SIGTERM)
    mesh = mesh_over_all({"x": dtckpt.num_clients()})
    step = 0
    with dtckpt.CheckpointManager(root, save_interval_steps=1000) as manager:
        with manager.preemption():
            while not manager.reached_preemption:
                step += 1
                assert step < 1000, "the signal has reached no client"
                if step == 4 and dtckpt.client_id() == victim:
                    os.kill(os.getpid(), signal.SIGTERM)
                manager.save(step, tree_on(mesh, SMALL, str(step)))
        manager.wait()
        return step, manager.all_steps(), str(signal.getsignal(signal.SIGTERM) == before)


def ask_a_rule_that_fails(root: str) -> None:
    def fail(step: int) -> bool:
        raise ZeroDivisionError("no rule today")

    dtckpt.CheckpointManager(root, save_when=fail, options=SaveOptions(timeout_s=WAIT_S)).should_save(1)


def ask_for_different_steps(root: str) -> None:
    dtckpt.CheckpointManager(root, save_interval_s=1).should_save(dtckpt.client_id())


def die_while_removing(root: str, where: str) -> None:
    """Client 0 is killed while it removes an old checkpoint; the others have saved and go on."""
    mesh = mesh_over_all({"x": dtckpt.num_clients()})
    manager = dtckpt.CheckpointManager(root, keep=1)

    def die(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    for step in range(2):
        if step == 1 and dtckpt.client_id() == 0:
            # A removal in place would leave a checkpoint with its manifest and without some of its chunks.
            if where == "before the rename":
                commit_by_rename.discard = die
            elif where == "before the deletion":
                shutil.rmtree = die
            else:
                os.unlink = _unlink_one_of_the_trash(die)
        manager.save(step, tree_on(mesh, SMALL, str(step)))
    manager.wait()


def _unlink_one_of_the_trash(then: Callable[[], None]) -> Callable[..., None]:
    unlink, is_first = os.unlink, iter([True])

    def unlink_and_end(path: Any, *, dir_fd: int | None = None) -> None:
        is_trash = dir_fd is not None and "-trash-" in os.readlink(f"/proc/self/fd/{dir_fd}")
        if is_trash and not next(is_first, False):
            then()
        unlink(path, dir_fd=dir_fd)

    return unlink_and_end


def hold(root: str, pipe: Connection) -> None:
    """Manage a root until killed."""
    manager = dtckpt.CheckpointManager(root)
    handle = manager.save(0, {"w": torch.ones(2)})
    assert handle is not None
    handle.result(WAIT_S)
    pipe.send("ready")
    pipe.recv()


def build_forever(path: str, pipe: Connection) -> None:
    """Be amid a save until killed."""
    with Gate() as gate:
        dtckpt.save_async(path, {"w": torch.ones(1000)})
        assert gate.reached.wait(WAIT_S)
        pipe.send("ready")
        pipe.recv()


# --- objects -------------------------------------------------------------------------------------------------------


def count_saves(prefix: str) -> tuple[int, list[str]]:
    """Save objects twice and restore them."""
    mesh = mesh_over_all({"x": dtckpt.num_clients()})
    checkpoint = dtckpt.DTensorCheckpoint(mesh, **tree_on(mesh, SMALL, "a"))
    for _ in range(2):
        path = checkpoint.save(prefix, options=SaveOptions(timeout_s=WAIT_S))
    other = dtckpt.DTensorCheckpoint(mesh, **tree_on(mesh, SMALL, "b"))
    other.restore(path).assert_consumed()
    return other.save_counter, differing({"w": other.w, "c": other.c}, tree_on(mesh, SMALL, "a"))


def assign_after_restore(prefix: str) -> list[str]:
    """Save objects, restore without objects as targets, and assign them then."""
    mesh = mesh_over_all({"x": dtckpt.num_clients()})
    path = dtckpt.DTensorCheckpoint(mesh, **tree_on(mesh, SMALL, "a")).save(prefix)
    checkpoint = dtckpt.DTensorCheckpoint(mesh)
    status = checkpoint.restore(path)
    for name, value in tree_on(mesh, SMALL, "b").items():
        setattr(checkpoint, name, value)
    status.assert_consumed()
    return differing({"w": checkpoint.w, "c": checkpoint.c}, tree_on(mesh, SMALL, "a"))


def lose_on_one_client(path: str) -> None:
    """Restore less than there is; only client 0 agrees to that."""
    mesh = mesh_over_all({"x": dtckpt.num_clients()})
    checkpoint = dtckpt.DTensorCheckpoint(mesh, w=tree_on(mesh, SMALL, "a")["w"])
    status = checkpoint.restore(path)
    if dtckpt.client_id() == 0:
        status.expect_partial()
    checkpoint.save(f"{path}-other", options=SaveOptions(timeout_s=WAIT_S))
