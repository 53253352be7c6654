"""`read_each`: read many small files, in threads only where storage takes long to answer.

A file in the memory of this machine is read faster than a thread takes over from another one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from dtckpt.storage.folder import Folder
from dtckpt.storage.local_folder import LocalFolder

T = TypeVar("T")
R = TypeVar("R")

NUM_THREADS = 16
_NUM_TRIED = 32
_QUICK_S = 0.001
"""If each of the first files takes longer, they do not come from memory."""


def read_each(folder: Folder, read: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """Return what a function returns for each item, in their order. Blocks: on storage.

    Args:
        folder: The folder that the function reads from.
        read: Reads the file of an item. Thread-safe.
        items: The items.
    """
    wanted = list(items)
    found: list[R] = []
    if isinstance(folder, LocalFolder):
        quickest, start = math.inf, time.monotonic()
        for item in wanted:
            if len(found) == _NUM_TRIED and quickest > _QUICK_S:
                break
            found.append(read(item))
            if len(found) <= _NUM_TRIED:  # the least: other programs may delay some
                now = time.monotonic()
                quickest, start = min(quickest, now - start), now
    if len(found) < len(wanted):
        with ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="dtckpt-headers") as pool:
            found += pool.map(read, wanted[len(found) :])
    return found
