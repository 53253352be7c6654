"""Chunks on their way from storage into ready memory: where each byte goes, and what it digests to."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dtckpt.checkpoint.reading.plan import PartRead
from dtckpt.format.digest import as_bytes, bytes_digest, digest_of_blocks, digest_of_data
from dtckpt.format.dtypes import DTYPES
from dtckpt.format.manifest import ArrayEntry
from dtckpt.storage.local_values import StoredValue

SPAN_NBYTES = 1 << 20
"""So much of a chunk is read at a time, in whole blocks: few calls, and it is still cached when it is digested."""
LINE_NBYTES = 64
"""A line of the processor's cache."""
SMALL_NBYTES = 32 << 10
"""Chunks that are no longer are read many at a time."""
COPIED_NBYTES = 64 << 10
"""What is read to memory where that `is_slow` goes over the scratch memory, if it is so long."""


@dataclass(slots=True, eq=False)
class ChunkRead:
    """A part of a chunk on its way.

    Args:
        entry: Its tensor.
        part: What is read.
        targets: The memory that wants it, use by use.
        value: Where it lies in a file; None: storage brings it.
        handle: What storage brings it with, once it was asked.
        memory: Where storage brings a whole chunk.
        is_direct: Whether that is the memory that wants it.
    """

    entry: ArrayEntry
    part: PartRead
    targets: Sequence[np.ndarray[Any, Any]]
    value: StoredValue | None = None
    handle: Any = None
    memory: Any = None
    is_direct: bool = False


def is_small(read: ChunkRead) -> bool:
    """Whether a read is of a small whole chunk, whose stored bytes are wanted as they are, in one piece of memory."""
    entry, part, target = read.entry, read.part, read.targets[0]
    return (
        part.is_plain
        and part.nbytes <= SMALL_NBYTES
        and target.dtype == DTYPES[entry.stored_dtype]
        and target.flags.c_contiguous
        and entry.has_readable_blocks
    )


class Scratch(threading.local):
    """Memory for some blocks after the others, which stays in the processor's cache: of each thread its own."""

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)
        self._first = 0

    def take(self, nbytes: int, place: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Return so many bytes, to be filled from a place in a file; they are those that were returned before."""
        if self._memory.size < nbytes + 2 * mmap.PAGESIZE:
            self._memory = np.empty(nbytes + 2 * mmap.PAGESIZE, np.uint8)
            self._first = -self._memory.ctypes.data % mmap.PAGESIZE
        start = self._first + place % mmap.PAGESIZE // LINE_NBYTES * LINE_NBYTES
        return self._memory[start : start + nbytes]


def is_slow(address: int, place: int) -> bool:
    """Whether reads from a place in a file to memory are slow: it lies less than a line further into its page.

    Processors then take what is stored for what is loaded next, and wait: reads took up to five times as long.
    """
    return 0 < (address - place) % mmap.PAGESIZE < LINE_NBYTES


class BlockReader:
    """Reads a part of a chunk, some blocks at a time, straight to where they are wanted, or over the scratch memory.

    Args:
        read: The part.
        value: Where the chunk is stored.
        scratch: The scratch memory.
    """

    __slots__ = ("_entry", "_part", "_ready", "_scratch", "_targets", "_value")

    def __init__(self, read: ChunkRead, value: StoredValue, scratch: Scratch) -> None:
        self._entry = read.entry
        self._part = read.part
        self._targets = read.targets
        self._value = value
        self._scratch = scratch
        self._ready = self._ready_bytes()

    def run(self) -> tuple[int, list[int]]:
        """Read all of it. Blocks: On storage.

        Returns:
            The digest of the chunk, if all of it was read, and those of its blocks (none, if it is one block itself).

        Raises:
            ValueError: The stored chunk is too short.
        """
        entry, part = self._entry, self._part
        count, step = part.rows.count, part.rows.block
        if part.is_whole and count <= step:
            return digest_of_data(entry.name, part.index, self._read(0, count)), []
        digests: list[int] = []
        span = step * max(1, SPAN_NBYTES // (step * part.rows.row_nbytes))
        for start in range(0, count, span):
            stop = min(start + span, count)
            data = self._read(start, stop)
            nbytes = data.nbytes // (stop - start) * step
            digests += [bytes_digest(data[at : at + nbytes]) for at in range(0, data.nbytes, nbytes)]
        return digest_of_blocks(entry.name, part.index, digests) if part.is_whole else 0, digests

    def _ready_bytes(self) -> memoryview | None:
        """Return the bytes of the memory that wants rows as they are stored; None if none does."""
        first, last = self._part.rows.wanted
        target = self._targets[0]
        if first == last or target.dtype != DTYPES[self._entry.stored_dtype] or not target.flags.c_contiguous:
            return None
        rows = self._part.rows
        if rows.nbytes >= COPIED_NBYTES:
            wanted = self._value.start + rows.start + first * rows.row_nbytes
            if is_slow(target.ctypes.data, wanted):
                return None
        return as_bytes(target).data

    def _read(self, start: int, stop: int) -> memoryview:
        """Read some rows to where they are wanted, and return their elements' bytes."""
        rows = self._part.rows
        first, last = rows.wanted
        begin, nbytes = start * rows.row_nbytes, (stop - start) * rows.row_nbytes
        if self._ready is not None and first <= start and stop <= last:
            place = begin - first * rows.row_nbytes
            into = self._ready[place : place + nbytes]
            self._value.read_into(into, rows.start + begin)
            return into
        data = self._scratch.take(nbytes, self._value.start + rows.start + begin)
        self._value.read_into(data.data, rows.start + begin)
        elements = from_span(self._entry, self._part, data)
        self._deliver(start, stop, elements)
        return as_bytes(elements).data

    def _deliver(self, start: int, stop: int, elements: np.ndarray[Any, Any]) -> None:
        """Copy what is wanted of some rows."""
        dim = self._part.rows.dim
        for (_, of_box, _), target in zip(self._part.uses, self._targets, strict=True):
            if dim is None:
                convert(elements, target)
                continue
            wanted = of_box[dim]
            first, last = max(start, wanted.start), min(stop, wanted.stop)
            if first < last:
                source = elements[(*of_box[:dim], slice(first - start, last - start), *of_box[dim + 1 :])]
                convert(source, target[(*[slice(None)] * dim, slice(first - wanted.start, last - wanted.start))])


def cut(memory: np.ndarray[Any, Any], slices: tuple[slice, ...]) -> np.ndarray[Any, Any]:
    """Return a view of a part of an array."""
    return memory[slices] if slices else memory  # a scalar's element would be no view of it


def from_span(entry: ArrayEntry, part: PartRead, data: bytes | np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return rows of a part from their stored bytes, without what fills up chunks that the grid cuts short."""
    dim, shape, stored = part.rows.dim, part.box.shape, entry.grid.chunk_shape
    elements = np.frombuffer(data, DTYPES[entry.stored_dtype])
    if dim is None:
        return elements.reshape(())
    elements = elements.reshape(*shape[:dim], -1, *stored[dim + 1 :])
    if shape[dim + 1 :] == stored[dim + 1 :]:
        return elements
    return elements[(slice(None),) * (dim + 1) + tuple(slice(size) for size in shape[dim + 1 :])]


def convert(source: np.ndarray[Any, Any], target: np.ndarray[Any, Any]) -> None:
    """Copy elements, converting dtype; floats are rounded to nearest even."""
    if source.dtype == target.dtype:
        np.copyto(target, source)
        return
    with np.errstate(over="ignore", invalid="ignore"):
        np.copyto(target, source, casting="unsafe")
