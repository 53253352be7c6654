"""Memory for large arrays that come and go; NumPy asks for huge pages for it.

Apart from `dtckpt.comm.host_memory`, because commands that only read do without PyTorch.
"""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np

RECYCLED_NBYTES = 1 << 20
"""For smaller arrays the C library uses memory again, at less cost."""


class RecycledMemory:
    """Memory of arrays, used again when the last view of an array is gone: new memory costs a page fault per page.

    Args:
        max_nbytes: Bound on the bytes that are lent or free, if no more than these are lent.
    """

    def __init__(self, max_nbytes: float) -> None:
        self._max_nbytes = max_nbytes
        self._nbytes = 0
        self._free: dict[int, list[np.ndarray[Any, Any]]] = {}

    def take(self, nbytes: int) -> np.ndarray[Any, Any]:
        """Return uninitialized bytes. Their memory comes back when no array refers to it any more."""
        if nbytes < RECYCLED_NBYTES:
            return np.empty(nbytes, np.uint8)
        # Rounded up by a quarter at most, so that chunks of nearly the same size use the same memory.
        step = 1 << max(0, nbytes.bit_length() - 3)
        size = -(-nbytes // step) * step
        free = self._free.setdefault(size, [])
        memory = free.pop() if free else self._allocate(size)
        loan = _Loan(memory)
        weakref.finalize(loan, free.append, memory).atexit = False
        return np.asarray(loan)[:nbytes]

    def _allocate(self, nbytes: int) -> np.ndarray[Any, Any]:
        while self._nbytes + nbytes > self._max_nbytes and (other := next(filter(None, self._free.values()), None)):
            self._nbytes -= other.pop().nbytes
        self._nbytes += nbytes
        return np.empty(nbytes, np.uint8)


class _Loan:
    """The base of the arrays of lent memory: it lives as long as one of them."""

    def __init__(self, memory: np.ndarray[Any, Any]) -> None:
        self.__array_interface__ = memory.__array_interface__
