"""Saves and restores with a slow client: functions that client processes run, by `Pool.run`."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import dtckpt
from dtckpt import SaveOptions
from dtckpt.checkpoint import timing
from dtckpt.checkpoint.reading.checkpoint import Checkpoint
from dtckpt.storage.zarr_tensorstore import TensorStoreWriter

from .client_cases import Tensors, mesh_over_all, tree_on

STEP_S = 100.0


class Listener(logging.Handler):
    """Keeps the texts of all log records."""

    def __init__(self, level: int) -> None:
        super().__init__(level)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def save_with_slow_client(path: str, tensors: Tensors, victim: int) -> list[str]:
    """Save, while one client's clock says that it takes long to write; return the warnings of this client."""
    tree = tree_on(mesh_over_all({"x": dtckpt.num_clients()}), tensors)
    with slowness_of(victim, TensorStoreWriter, "write") as warnings:
        dtckpt.save(path, tree, options=SaveOptions(timeout_s=30))
    return warnings


def restore_with_slow_client(path: str, tensors: Tensors, victim: int) -> list[str]:
    """Save and restore, while one client's clock says that it takes long to read; return this client's warnings."""
    tree = tree_on(mesh_over_all({"x": dtckpt.num_clients()}), tensors)
    dtckpt.save(path, tree, options=SaveOptions(timeout_s=30))
    with slowness_of(victim, Checkpoint, "read_all") as warnings:
        dtckpt.restore(path, tree)
    return warnings


@contextmanager
def slowness_of(victim: int, owner: type, name: str) -> Iterator[list[str]]:
    """Let one client's clock go on by `STEP_S` with each call of a method; give this client's warnings."""
    listener, method, monotonic, late = Listener(logging.WARNING), getattr(owner, name), timing.monotonic, [0.0]

    def slow_method(*args: Any, **kwargs: Any) -> Any:
        late[0] += STEP_S
        return method(*args, **kwargs)

    timing.logger.addHandler(listener)
    if dtckpt.client_id() == victim:
        setattr(owner, name, slow_method)
        timing.monotonic = lambda: monotonic() + late[0]
    try:
        yield listener.texts
    finally:
        timing.logger.removeHandler(listener)
        setattr(owner, name, method)
        timing.monotonic = monotonic
