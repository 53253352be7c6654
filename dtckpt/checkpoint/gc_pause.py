"""Stretches of work in which Python's cycle collector waits."""

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
    """Let Python's cycle collector wait, in all threads.

    Of thousands of tensors a save or a restore makes many objects at once and keeps them. The collector would go
    through all objects of the process again and again meanwhile, find nothing, and take as long as the work itself.
    Only for stretches that soon end: the garbage of other threads waits too. May be nested, and entered by several
    threads.
    """
    global _depth, _was_enabled  # noqa: PLW0603  (so is the collector)
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
