"""What the clients of a job do that lends its tensors to readers."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

import dtckpt
from dtckpt import Publisher, Subscriber
from dtckpt.config import Config
from dtckpt.errors import DtckptError

from .live_cases import FEED, SHAPES, WAIT_S, await_note, differs, note, parts, sharded, values


def lend_to_readers(folder: Path) -> list[Any]:
    """Lend a version to a reader that takes it, and another version to a reader that is late; return how the loans
    ended."""
    found: list[Any] = []
    client = Config.from_environ().client_id
    with Publisher(FEED, folder=folder / "memory", address="127.0.0.1", timeout_s=1.0) as publisher:
        for step in (3, 4):
            tree = sharded(values(step), 0)
            try:
                with publisher.publish({"model": tree}, step=step, copy=False):
                    note(folder, f"lent {step}")
                    await_note(folder, f"has {step}")
                found.append("taken back")
            except DtckptError as error:
                found.append((type(error).__name__, "client 0'" in str(error)))
            for tensor in tree.values():
                for part in parts(tensor):
                    part.fill_(7.0)
            note(folder, f"changed {step}")
        # Clients that disagree learn it at once, and neither waits for the other's exit.
        try:
            publisher.publish({"model": sharded(values(6), 0)}, step=6, copy=client == 0)
        except DtckptError as error:
            found.append((type(error).__name__, "another copy=" in str(error)))
        # One client's own error: the others do not wait for it.
        start = time.monotonic()
        try:
            with publisher.publish({"model": sharded(values(5), 0)}, step=5, copy=False):
                if client == 1:
                    raise KeyError("mine")
        except (DtckptError, KeyError) as error:
            found.append(type(error).__name__)
        return [*found, time.monotonic() - start < WAIT_S / 2]


def read_lent(folder: Path) -> list[Any]:
    """Take a version in time, and the next one too late."""
    target = {"model": sharded({name: torch.zeros(shape) for name, shape in SHAPES.items()}, 1)}
    with Subscriber(FEED, target) as subscriber:
        await_note(folder, "lent 3")
        subscriber.update(timeout_s=WAIT_S)
        note(folder, "has 3")
        await_note(folder, "changed 3")
        found: list[Any] = [differs(target["model"], 3, 1)]
        await_note(folder, "lent 4")
        with dtckpt.open_checkpoint(f"live://{FEED}") as held:
            note(folder, "has 4")
            await_note(folder, "changed 4")
            try:
                held.read("model/w")
                found.append("read")
            except DtckptError as error:
                found.append(type(error).__name__)
    return found
