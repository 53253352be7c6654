"""Reads chunks of local files, with preadv(2), straight into the caller's memory.

A caller that reads a value piece by piece finds each piece still in the processor's cache when it digests it, and
waits for no thread. Nothing here checks the bytes: bytes of a wrong place do not match the digest.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dtckpt.format.digest import as_bytes, buffer_of
from dtckpt.storage.failures import MalformedError
from dtckpt.storage.regular_files import open_regular

MAX_RUN_VALUES = 128
"""Values that one call reads. Systems allow 1024, but the bytes must still be in the cache when they are digested."""


class OpenFile:
    """A file that stays open as long as this object lives: until no `StoredValue` refers to it.

    Args:
        path: Its path.

    Attributes:
        descriptor: The file descriptor.
        nbytes: The file's size.

    Raises:
        MalformedError: The file is missing, or is no regular file.
    """

    def __init__(self, path: str) -> None:
        try:
            self.descriptor, status = open_regular(path)
        except FileNotFoundError:
            raise MalformedError(f"{path} is missing") from None
        self.nbytes = status.st_size
        weakref.finalize(self, os.close, self.descriptor)

    def read_into(self, memories: Sequence[memoryview], position: int) -> int:
        """Fill memories, one after the other, with the bytes from a position on. Blocks: on storage.

        Returns:
            The number of bytes: fewer than the memories take if the file ends before, or if the system gave fewer.
        """
        return os.preadv(self.descriptor, memories, position)


@dataclass(frozen=True, slots=True, eq=False)
class StoredValue:
    """A stored value, in practice a chunk, as a range of bytes of a file.

    Args:
        file: The file.
        start: The value's first byte in the file.
        nbytes: The value's length.
    """

    file: OpenFile
    start: int
    nbytes: int

    def read_into(self, memory: memoryview, start: int) -> None:
        """Fill memory with the bytes of the value from ``start`` on. Blocks: on storage.

        Raises:
            ValueError: The value, or the file, ends before the memory is full.
        """
        position, is_inside = self.start + start, start + memory.nbytes <= self.nbytes
        while memory:
            nbytes = self.file.read_into([memory], position) if is_inside else 0
            if not nbytes:
                raise ValueError("the chunk is cut short")
            position, memory = position + nbytes, memory[nbytes:]

    def is_before(self, other: StoredValue) -> bool:
        """Whether another value begins, in the same file, where this value ends."""
        return self.file is other.file and self.start + self.nbytes == other.start

    def is_cold(self, start: int, stop: int) -> bool:
        """Whether bytes ``start`` to ``stop`` of the value must be read from the disk, as the page cache lacks them.

        Only the last whole page is looked up: a range is usually in the page cache as a whole or not at all. False
        where the file system cannot tell.
        """
        # One page before the end: the very last page may belong to the next value, too.
        probe = max(start, stop - 1 - mmap.PAGESIZE)
        try:
            os.preadv(self.file.descriptor, [bytearray(1)], self.start + probe, os.RWF_NOWAIT)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False


def contiguous_runs(values: Sequence[StoredValue], sizes: Sequence[int]) -> Iterator[list[int]]:
    """Group values that follow each other in a file, so that one call reads a group: yield their positions.

    Args:
        values: The values.
        sizes: Per value, the bytes to read, from its first on.

    Yields:
        Positions in ``values``; each position occurs once.
    """
    run: list[int] = []
    for position in sorted(
        range(len(values)), key=lambda position: (values[position].file.descriptor, values[position].start)
    ):
        last = run[-1] if run else position
        is_next = values[last].nbytes == sizes[last] and values[last].is_before(values[position])
        if run and not (is_next and len(run) < MAX_RUN_VALUES):
            yield run
            run = []
        run.append(position)
    if run:
        yield run


def read_run(values: Sequence[StoredValue], arrays: Sequence[np.ndarray[Any, Any]]) -> None:
    """Fill arrays with the first bytes of the values of a run, by one call. Blocks: on storage.

    Args:
        values: Values that follow each other in a file, as `contiguous_runs` groups them.
        arrays: Per value, a contiguous array to fill.

    Raises:
        ValueError: A value ends before its array is full.
    """
    nbytes, memories = sum([array.nbytes for array in arrays]), [buffer_of(array) for array in arrays]
    if len(values) == 1 or values[0].file.read_into(memories, values[0].start) < nbytes:
        for value, array in zip(values, arrays, strict=True):
            value.read_into(as_bytes(array).data, 0)
