"""What client processes do in the tests of what saves take: functions for `Pool.run`."""

from __future__ import annotations

import logging
from typing import Any

import dtckpt
from dtckpt import SaveOptions
from dtckpt.checkpoint import phases
from dtckpt.storage.arrays import ArrayWriter

from .cases import Tensors, mesh_over_all, tree_on

STEP_S = 100.0


class Listener(logging.Handler):
    """Keeps what is logged."""

    def __init__(self, level: int) -> None:
        super().__init__(level)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def save_with_slow_client(path: str, tensors: Tensors, victim: int) -> list[str]:
    """Save, while one client's clock says that it takes long to write; return the warnings of this client."""
    mesh = mesh_over_all({"x": dtckpt.num_clients()})
    listener, write, monotonic, late = Listener(logging.WARNING), ArrayWriter.write, phases.monotonic, [0.0]

    def write_late(*args: Any, **kwargs: Any) -> None:
        late[0] += STEP_S
        write(*args, **kwargs)

    phases.logger.addHandler(listener)
    if dtckpt.client_id() == victim:
        ArrayWriter.write = write_late  # type: ignore[method-assign]
        phases.monotonic = lambda: monotonic() + late[0]
    try:
        dtckpt.save(path, tree_on(mesh, tensors), options=SaveOptions(timeout_s=30))
    finally:
        phases.logger.removeHandler(listener)
        ArrayWriter.write = write  # type: ignore[method-assign]
        phases.monotonic = monotonic
    return listener.texts
