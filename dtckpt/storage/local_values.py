"""Values of a checkpoint that lie in this machine's files, and are read straight into ready memory.

A caller who reads a value piece by piece finds each piece still in the processor's cache when it digests it, and waits
for no thread. What would be found in a wrong place does not verify.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from dtckpt.format.digest import as_bytes, buffer_of
from dtckpt.storage.failures import MalformedError
from dtckpt.storage.regular_files import open_regular

MAX_RUN = 128
"""Values that are read by one call: systems allow 1024, but what is read shall still be cached when it is digested."""


class File:
    """A file that stays open as long as somebody may read from it.

    Raises:
        MalformedError: It is missing, or no regular file.
    """

    def __init__(self, path: str) -> None:
        try:
            self.number, self.nbytes = open_regular(path)
        except FileNotFoundError:
            raise MalformedError(f"{path} is missing") from None
        weakref.finalize(self, os.close, self.number)


@dataclass(frozen=True, slots=True, eq=False)
class StoredValue:
    """A value in a file.

    Args:
        file: The file.
        start: Where in the file it begins.
        nbytes: Its length.
    """

    file: File
    start: int
    nbytes: int

    def read_into(self, memory: memoryview, start: int) -> None:
        """Fill memory with the bytes of the value from ``start`` on. Blocks: On storage.

        Raises:
            ValueError: It ends before.
        """
        place, is_inside = self.start + start, start + memory.nbytes <= self.nbytes
        while memory:
            nbytes = os.preadv(self.file.number, [memory], place) if is_inside else 0
            if not nbytes:
                raise ValueError("the chunk is cut short")
            place, memory = place + nbytes, memory[nbytes:]

    def is_before(self, other: StoredValue) -> bool:
        """Whether another value begins where this one ends."""
        return self.file is other.file and self.start + self.nbytes == other.start

    def announce(self, start: int, stop: int) -> None:
        """Let the system begin to read some bytes of the value from the disk.

        If it holds the last whole page of them, it holds all but for bad luck, and would look for every page in vain.
        """
        with suppress(OSError):
            inside = max(start, stop - 1 - mmap.PAGESIZE)  # the very last page may be the next value's, too
            if os.preadv(self.file.number, [bytearray(1)], self.start + inside, os.RWF_NOWAIT):
                return
        os.posix_fadvise(self.file.number, self.start + start, stop - start, os.POSIX_FADV_WILLNEED)


def runs_of(values: Sequence[StoredValue], sizes: Sequence[int]) -> Iterator[list[int]]:
    """Yield values that follow each other in a file, to be read by one call: their positions.

    Args:
        values: The values.
        sizes: How many bytes of each are wanted, from its first on.
    """
    run: list[int] = []
    for position in sorted(range(len(values)), key=lambda each: (values[each].file.number, values[each].start)):
        last = run[-1] if run else position
        is_next = values[last].nbytes == sizes[last] and values[last].is_before(values[position])
        if run and not (is_next and len(run) < MAX_RUN):
            yield run
            run = []
        run.append(position)
    if run:
        yield run


def read_run(values: Sequence[StoredValue], arrays: Sequence[np.ndarray[Any, Any]]) -> None:
    """Fill contiguous memory with the first bytes of values of a run. Blocks: On storage.

    Raises:
        ValueError: A value ends before.
    """
    nbytes, memories = sum([array.nbytes for array in arrays]), [buffer_of(array) for array in arrays]
    if len(values) == 1 or os.preadv(values[0].file.number, memories, values[0].start) < nbytes:
        for value, array in zip(values, arrays, strict=True):
            value.read_into(as_bytes(array).data, 0)
