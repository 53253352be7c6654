"""TensorStore, imported so that its exit handlers are known: a forked process must not run them.

At exit TensorStore waits for its threads that are about to call Python. In a process that was forked while such a
thread waited for its turn, nobody ends that wait, and ``sys.exit`` would never return.
"""

from __future__ import annotations

import atexit
import os
from types import BuiltinFunctionType

from dtckpt.comm import fork_guard


class _Listing:
    """Equal to nothing; notes what it is compared with. `atexit.unregister` compares with all handlers."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self) -> None:
        self.found: list[object] = []

    def __eq__(self, other: object) -> bool:
        self.found.append(other)
        return False


def _native_handlers() -> list[object]:
    listing = _Listing()
    atexit.unregister(listing)  # type: ignore[arg-type]  # it may be anything that compares
    return [handler for handler in listing.found if isinstance(handler, BuiltinFunctionType)]


_before = _native_handlers()
import tensorstore  # noqa: E402

_handlers = [handler for handler in _native_handlers() if not any(handler is known for known in _before)]


def _forget_handlers() -> None:
    if fork_guard.is_forked():
        for handler in _handlers:
            atexit.unregister(handler)  # type: ignore[arg-type]


os.register_at_fork(after_in_child=_forget_handlers)

__all__ = ["tensorstore"]
