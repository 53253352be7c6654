"""Client processes that train and save at each step, through all faults, and report how each save ended.

The state of client i at step s is a row full of s, so a checkpoint that mixes operations is seen at once.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from support.client_crew import Crew

HEARTBEAT_S = 1.0
TIMEOUT_S = 3.0
ROW = 64


@dataclass(frozen=True)
class Training:
    """How clients train.

    Args:
        num_clients: How many there are.
        num_steps: Steps; each client saves at each.
        where: ``one path``, ``a path each``, ``manager``.
        is_async: Whether saves go on in the background.
        gives_step: Whether saves get the step; a manager's saves always do.
        is_lockstep: Whether clients wait for each other at the end of each step, as at a collective.
        step_s: What a step takes.
        skips: (client, step) where a client does not call save.
        raises: (client, step) where a client's ``state_dict`` raises.
        interrupts: (client, step) where a client's save is interrupted as by Ctrl-C.
        patience_s: How long after its timeout a call still looks for the coordinator; default: as long as it does.
    """

    num_clients: int = 2
    num_steps: int = 10
    where: str = "one path"
    is_async: bool = False
    gives_step: bool = False
    is_lockstep: bool = False
    step_s: float = 0.1
    skips: tuple[tuple[int, int], ...] = ()
    raises: tuple[tuple[int, int], ...] = ()
    interrupts: tuple[tuple[int, int], ...] = ()
    patience_s: float | None = None


@dataclass(frozen=True)
class Step:
    """What one client saw of one step: how its save ended, when, and the steps of the rows in the checkpoint."""

    step: int
    outcome: str
    text: str
    seconds: float
    rows: tuple[int, ...] = ()


class UnsavableState:
    """State whose ``state_dict`` raises."""

    def state_dict(self) -> dict[str, Any]:
        raise ValueError("no state")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise ValueError("no state")


def work(training: Training, port: int | None, store_port: int, client: int, root: str, pipe: Connection) -> None:
    """Train, and send how each step ended; wait for an answer where clients are in lockstep."""
    os.environ |= {"RANK": str(client), "WORLD_SIZE": str(training.num_clients)}
    from datetime import timedelta

    import torch.distributed as dist

    from dtckpt.coordination import grpc_calls, grpc_client
    from dtckpt.coordination.api import Member
    from dtckpt.coordination.connect import set_coordination
    from dtckpt.coordination.grpc_client import GrpcCoordination
    from dtckpt.coordination.torch_store import TorchStoreCoordination

    if training.patience_s is not None:
        grpc_calls.CALL_TIMEOUT_S = grpc_client.CALL_TIMEOUT_S = training.patience_s
    member = Member("job", client, training.num_clients, secrets.randbits(60))
    if port is not None:
        coordination: Any = GrpcCoordination(f"127.0.0.1:{port}", member, heartbeat_timeout_s=HEARTBEAT_S)
    else:
        timeout = timedelta(seconds=30)
        store = dist.TCPStore("127.0.0.1", store_port, is_master=False, wait_for_workers=False, timeout=timeout)
        coordination = TorchStoreCoordination(store, member, heartbeat_timeout_s=HEARTBEAT_S)
    set_coordination(coordination)
    coordination.register()
    pipe.send("ready")
    assert pipe.recv() == "train"
    save = Saver(training, client, root)
    for step in range(training.num_steps):
        time.sleep(training.step_s)
        pipe.send(save(step))
        if training.is_lockstep:
            pipe.recv()
    save.close()
    pipe.send("done")
    pipe.recv()
    coordination.leave()


class Saver:
    """Saves one client's state at each step."""

    def __init__(self, training: Training, client: int, root: str) -> None:
        import dtckpt

        self._training = training
        self._client = client
        self._root = root
        self._options = dtckpt.SaveOptions(timeout_s=TIMEOUT_S, overwrite=True)
        mesh = dtckpt.create_distributed_mesh({"client": training.num_clients}, device_type="CPU")
        self._layout = dtckpt.Layout(["client", dtckpt.UNSHARDED], mesh)
        self._manager = dtckpt.CheckpointManager(root, keep=3, is_async=training.is_async, options=self._options)

    def __call__(self, step: int) -> Step:
        start, place = time.monotonic(), (self._client, step)
        if (
            place in self._training.skips
        ):  # its next save would meet the others' saves of the step before: rows would mix
            return Step(step, "skipped", "", 0.0)
        try:
            path = self._save(step, place)
            outcome, text, rows = "saved", "", self._rows(path)
        except KeyboardInterrupt as error:
            outcome, text, rows = type(error).__name__, str(error), ()
        except Exception as error:
            outcome, text, rows = type(error).__name__, str(error), ()
        return Step(step, outcome, text, time.monotonic() - start, rows)

    def _save(self, step: int, place: tuple[int, int]) -> Any:
        import torch

        import dtckpt

        row = torch.full((1, ROW), step, dtype=torch.int64)
        shape = self._layout.mesh.size(), ROW
        tree: dict[str, Any] = {"rows": dtckpt.pack([row], self._layout, shape)}
        if place in self._training.raises:  # it leaves before the first barrier, where the others would wait for it
            tree["unfit"] = UnsavableState()
        if place in self._training.interrupts:  # others would take a checkpoint for saved whose part it never finished
            return interrupted_in(TIMEOUT_S / 4, lambda: self._write(step, tree))
        return self._write(step, tree)

    def _write(self, step: int, tree: Any) -> Any:
        import dtckpt

        training = self._training
        if training.where == "manager":
            handle = self._manager.save(step, tree)
            assert handle is not None
            return handle.result().path
        path = f"{self._root}/latest" if training.where == "one path" else f"{self._root}/{step}"
        told = step if training.gives_step else None
        if training.is_async:
            return dtckpt.save_async(path, tree, options=self._options, step=told).result().path
        return dtckpt.save(path, tree, options=self._options, step=told).path

    def _rows(self, path: Any) -> tuple[int, ...]:
        """Return the steps that a checkpoint's rows are of; only the leader looks, as no later save can replace it."""
        import dtckpt

        if self._client != 0:
            return ()
        with dtckpt.open_checkpoint(path) as checkpoint:
            assert checkpoint.verify().is_sound
            return tuple(checkpoint.read("rows")[:, 0].tolist())

    def close(self) -> None:
        import dtckpt

        with suppress(dtckpt.errors.DtckptError):  # what the last save failed with, which is known
            self._manager.close()


def interrupted_in(seconds: float, call: Any) -> Any:
    """Call in the main thread, and interrupt it after a while, unless it has ended."""
    import _thread
    import threading

    timer = threading.Timer(seconds, _thread.interrupt_main)
    timer.start()
    try:
        return call()
    finally:
        timer.cancel()


class Trainers(Crew):
    """All clients of one job.

    Args:
        training: The client's program.
        ports: Of the coordinator, as each client sees it; None: they meet at the store.
        store_port: Of the store.
        root: Folder of the checkpoints.
    """

    def __init__(self, training: Training, ports: Sequence[int | None], store_port: int, root: str) -> None:
        self._training = training
        super().__init__(work, [(training, port, store_port, client, root) for client, port in enumerate(ports)])

    def begin(self) -> None:
        for client in range(self._training.num_clients):
            self.send(client, "train")

    def run(self, at_step: Any = lambda step: None) -> list[list[Step]]:
        """Let them train; return how each step ended, by client.

        Args:
            at_step: Called when a step has begun on the first client that gets there; in lockstep: on all.
        """
        clients = range(self._training.num_clients)
        seen: list[list[Step]] = [[] for _ in clients]
        self.begin()
        at_step(0)
        if self._training.is_lockstep:
            for step in range(self._training.num_steps):
                for client in clients:
                    seen[client].append(self.answer(client))
                at_step(step + 1)
                for client in clients:
                    self.send(client, "go on")
        begun = 0
        for client in clients if self._training.is_lockstep else ():
            assert self.answer(client) == "done"
        running = set() if self._training.is_lockstep else set(clients)
        while running:
            for client in self.wait_for_any(running):
                message = self.answer(client)
                if message == "done":
                    running.remove(client)
                    continue
                seen[client].append(message)
                if message.step + 1 > begun:
                    begun = message.step + 1
                    at_step(begun)
        for client in clients:
            self.send(client, "leave")
        return seen
