"""The examples' training loops, as functions that client processes run."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any


def run_loop(name: str, argv: Sequence[str]) -> list[float]:
    """Run the ``main`` of an example as torchrun would; return its losses."""
    os.environ["LOCAL_RANK"] = os.environ["RANK"]
    try:
        losses: list[float] = importlib.import_module(f"examples.{name}").main(argv)
        return losses
    finally:
        forget_processes()


def forget_processes() -> None:
    """Let Accelerate look anew for the processes of the job: it keeps their number for the life of a process."""
    if (state := sys.modules.get("accelerate.state")) is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()


def call(module: str, function: str, *args: Any, **kwargs: Any) -> Any:
    """Call a function of a module that the test process need not import."""
    try:
        return getattr(importlib.import_module(module), function)(*args, **kwargs)
    finally:
        forget_processes()
