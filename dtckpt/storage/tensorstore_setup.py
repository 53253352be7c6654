"""TensorStore, imported at its first use, so that a forked process can exit; and the contexts that it is opened with.

At exit TensorStore waits for its threads that are about to call Python. In a process that was forked while such a
thread waited for its turn, the wait never ends, and ``sys.exit`` would never return. So this module notes the exit
handlers that the import registers, and a forked process drops them.

The import takes a fifth of a second, which a command that only reads a manifest does not need.
"""

from __future__ import annotations

import atexit
import os
from functools import cache
from importlib import import_module
from types import BuiltinFunctionType
from typing import Any

from dtckpt.comm import fork_guard

RETRIES = {"max_retries": 16, "initial_delay": "200ms", "max_delay": "20s"}
"""How TensorStore repeats requests that an object store puts off (throttling, server errors); pauses grow."""


class _HandlerProbe:
    """Compares unequal to every object, and notes it: `atexit.unregister` compares its argument with all handlers."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self) -> None:
        self.handlers: list[object] = []

    def __eq__(self, other: object) -> bool:
        self.handlers.append(other)
        return False


def _native_handlers() -> list[object]:
    probe = _HandlerProbe()
    atexit.unregister(probe)  # type: ignore[arg-type]  # it may be anything that compares
    return [handler for handler in probe.handlers if isinstance(handler, BuiltinFunctionType)]


_handlers: list[object] = []
"""The exit handlers that TensorStore registered."""


@cache
def tensorstore() -> Any:
    """Return the module ``tensorstore``."""
    before = _native_handlers()
    module = import_module("tensorstore")
    _handlers.extend(handler for handler in _native_handlers() if not any(handler is other for other in before))
    return module


def _drop_handlers() -> None:
    if fork_guard.is_forked():
        for handler in _handlers:
            atexit.unregister(handler)  # type: ignore[arg-type]


os.register_at_fork(after_in_child=_drop_handlers)


def open_context() -> Any:
    """Return a new TensorStore context: no cache, and `RETRIES` for object stores.

    Raises:
        ForkedProcessError: The parent of this forked process uses checkpoints.
    """
    fork_guard.claim_process()
    return tensorstore().Context(
        {"cache_pool": {"total_bytes_limit": 0}, "s3_request_retries": RETRIES, "gcs_request_retries": RETRIES}
    )
