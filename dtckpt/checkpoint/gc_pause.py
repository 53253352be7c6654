"""`gc_paused`: pause Python's cycle collector while many objects are made."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_depth = 0
_was_enabled = False


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pause Python's cycle collector, in all threads.

    A save or restore of thousands of tensors makes many objects at once and keeps them. Meanwhile the collector would
    go through all objects of the process again and again, find nothing, and take as long as the work itself. Use it
    for short work only: the garbage of other threads waits, too. Contexts may be nested, and entered by several
    threads; the collector runs again when the last context ends.
    """
    global _depth, _was_enabled  # noqa: PLW0603  (the collector is global, too)
    with _lock:
        if _depth == 0:
            _was_enabled = gc.isenabled()
            gc.disable()
        _depth += 1
    try:
        yield
    finally:
        with _lock:
            _depth -= 1
            if _depth == 0 and _was_enabled:
                gc.enable()


def _forget_parent() -> None:
    global _lock, _depth
    if _depth and _was_enabled:
        gc.enable()
    _lock, _depth = threading.Lock(), 0


os.register_at_fork(after_in_child=_forget_parent)
