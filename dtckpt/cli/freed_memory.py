"""Have the C library return freed memory to the system, for commands that bound the memory they use."""

from __future__ import annotations

import ctypes

# Parameters of `mallopt`, from <malloc.h>.
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8


def return_freed_memory() -> None:
    """Make glibc return the memory of freed chunks to the system at once.

    By default it keeps up to twice ``--max-memory`` for later, in the heaps of several threads.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 1 << 20)
        mallopt(_M_ARENA_MAX, 1)
