"""Read a chunk, or some blocks of it, from a file into memory, and digest the bytes on the way.

Bytes go straight to their destination where the destination wants whole rows in the stored dtype. Otherwise they go to
a scratch buffer that stays in the processor's cache, are digested there, and are copied or converted from there:

    file ----> destination ----> digest                      rows wanted whole, as they are stored
    file ----> scratch ----> digest, then copy or convert    anything else
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dtckpt.checkpoint.reading.checkpoint_files import RegionBuffers
from dtckpt.checkpoint.reading.plan import ChunkPart
from dtckpt.errors import DTypeError
from dtckpt.format.digest import as_bytes, bytes_digest, digest_of_blocks, digest_of_data
from dtckpt.format.dtypes import DTYPES, UNCONVERTED
from dtckpt.format.manifest import ArrayEntry
from dtckpt.storage.local_values import StoredValue
from dtckpt.storage.zarr_tensorstore import allocate_elements

SPAN_NBYTES = 1 << 20
"""Bytes of a chunk that are read at a time, in whole blocks: few calls, and still cached when they are digested."""
LINE_NBYTES = 64
"""Bytes of a line of the processor's cache."""
SMALL_NBYTES = 32 << 10
"""Chunks of at most so many bytes are read many at a time."""
COPIED_NBYTES = 64 << 10
"""Reads of at least so many bytes go through the scratch buffer where the destination's alignment `is_slow`."""


@dataclass(slots=True, eq=False)
class ChunkRead:
    """The read of one part of a chunk, while it is under way.

    There are two ways: a part in a file of this machine has a ``value``, and is read by a `BlockReader`. Any other part
    is requested from storage, which has a ``handle``, and fills ``memory`` if the part is a whole chunk.

    Args:
        entry: The tensor's entry in the manifest.
        part: The part.
        targets: The destinations, one for each of the part's uses.
        value: The position of the stored chunk in a file of this machine.
        handle: The request to storage, once it was made.
        memory: The memory that storage fills.
        is_direct: Whether ``memory`` is the only destination, so that nothing is copied.
    """

    entry: ArrayEntry
    part: ChunkPart
    targets: Sequence[np.ndarray[Any, Any]]
    value: StoredValue | None = None
    handle: Any = None
    memory: Any = None
    is_direct: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of the part."""
        return self.part.nbytes


def is_small(read: ChunkRead, most_nbytes: int) -> bool:
    """Whether a read is of a whole chunk of at most so many bytes, and the stored bytes are its elements."""
    return read.part.nbytes <= most_nbytes and read.part.is_dense and read.entry.has_readable_blocks


def small_memory(read: ChunkRead) -> np.ndarray[Any, Any]:
    """Return the memory that a small chunk is read to: its only target, if it needs no conversion, or new memory."""
    entry, part, target = read.entry, read.part, read.targets[0]
    is_wanted = part.rows.wanted == (0, part.rows.count) and target.flags.c_contiguous
    if is_wanted and target.dtype == DTYPES[entry.stored_dtype]:
        return target
    return allocate_elements(entry.stored_dtype, part.box.shape)


def deliver(read: ChunkRead, elements: np.ndarray[Any, Any]) -> None:
    """Copy a part's elements to all its targets."""
    for (_, of_box, _), target in zip(read.part.uses, read.targets, strict=True):
        convert(cut(elements, of_box), target)


class Scratch(threading.local):
    """A buffer for one span of blocks after the other, which so stays in the processor's cache; one per thread."""

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)
        self._first = 0

    def take(self, nbytes: int, position: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Return a buffer of ``nbytes`` bytes, to be filled from a position in a file.

        The buffer takes the memory that the call before returned. Its address is aligned to the file's position, up to
        a line of the cache, so that the read is not slow (see `is_slow`).
        """
        # Up to one page to begin at a page's first byte, and up to one for the position's place in its page.
        if self._memory.size < nbytes + 2 * mmap.PAGESIZE:
            self._memory = np.empty(nbytes + 2 * mmap.PAGESIZE, np.uint8)
            self._first = -self._memory.ctypes.data % mmap.PAGESIZE
        start = self._first + position % mmap.PAGESIZE // LINE_NBYTES * LINE_NBYTES
        return self._memory[start : start + nbytes]


def is_slow(address: int, position: int) -> bool:
    """Whether reads from a position in a file to an address are slow: reads took up to five times as long.

    Reads are slow if the address lies further into its page than the file's position does, by less than a line. The
    processor compares only the low bits of addresses: it takes each store for the source of the next load, and waits.
    """
    return 0 < (address - position) % mmap.PAGESIZE < LINE_NBYTES


class BlockReader:
    """Reads a part of a chunk from a file, some blocks at a time, and digests each block.

    Args:
        read: The read.
        value: The position of the stored chunk in a file of this machine.
        scratch: The scratch buffer.
    """

    __slots__ = ("_destination", "_read", "_scratch", "_value")

    def __init__(self, read: ChunkRead, value: StoredValue, scratch: Scratch) -> None:
        self._read = read
        self._value = value
        self._scratch = scratch
        self._destination = self._direct_destination()

    def run(self) -> tuple[int, list[int]]:
        """Read all of it; return its `part_digest`. Blocks: On storage.

        Raises:
            ValueError: The stored chunk is too short.
        """
        entry, part = self._read.entry, self._read.part
        digests: list[int] = []
        for start, stop in spans(part):
            digests += span_digests(entry, part, self._read_span(start, stop), stop - start)
        return part_digest(entry, part, digests)

    def _direct_destination(self) -> memoryview | None:
        """Return the bytes of the destination, if rows can be read straight to it."""
        rows, target = self._read.part.rows, self._read.targets[0]
        first, last = rows.wanted
        if first == last or target.dtype != DTYPES[self._read.entry.stored_dtype] or not target.flags.c_contiguous:
            return None
        # Short reads go straight to the destination, also where its alignment is slow.
        if rows.nbytes >= COPIED_NBYTES:
            position = self._value.start + rows.start + first * rows.row_nbytes
            if is_slow(target.ctypes.data, position):
                return None
        return as_bytes(target).data

    def _read_span(self, start: int, stop: int) -> memoryview:
        """Read rows ``start`` to ``stop`` of the part, deliver them, and return the bytes of their elements."""
        rows = self._read.part.rows
        first, last = rows.wanted
        begin, nbytes = start * rows.row_nbytes, (stop - start) * rows.row_nbytes
        # Spans at the ends of the wanted rows go the other way: they are verified whole, and only a part is delivered.
        if self._destination is not None and first <= start and stop <= last:
            offset = begin - first * rows.row_nbytes
            buffer = self._destination[offset : offset + nbytes]
            self._value.read_into(buffer, rows.start + begin)
            return buffer
        data = self._scratch.take(nbytes, self._value.start + rows.start + begin)
        self._value.read_into(data.data, rows.start + begin)
        elements = from_span(self._read.entry, self._read.part, data)
        deliver_rows(self._read, start, stop, elements)
        return as_bytes(elements).data


def spans(part: ChunkPart) -> Iterator[tuple[int, int]]:
    """Yield the first row, and the row behind the last, of the spans of a part.

    A span has whole blocks, so that each block's bytes are together when the block is digested.
    """
    rows = part.rows
    step = rows.block * max(1, SPAN_NBYTES // (rows.block * rows.row_nbytes))
    for start in range(0, rows.count, step):
        yield start, min(start + step, rows.count)


def span_digests(entry: ArrayEntry, part: ChunkPart, data: memoryview, num_rows: int) -> list[int]:
    """Return the digests of the blocks of a span; of a chunk of one block, the chunk's digest.

    Args:
        entry: The tensor's entry in the manifest.
        part: The part that the span is of.
        data: The bytes of the span's elements. A chunk at an edge is stored with padding, which is not digested.
        num_rows: The span's rows.
    """
    if _is_one_block(part):
        return [digest_of_data(entry.name, part.index, data)]
    nbytes = data.nbytes // num_rows * part.rows.block
    return [bytes_digest(data[start : start + nbytes]) for start in range(0, data.nbytes, nbytes)]


def part_digest(entry: ArrayEntry, part: ChunkPart, digests: list[int]) -> tuple[int, list[int]]:
    """Return the digests by which a part is verified.

    Args:
        entry: The tensor's entry in the manifest.
        part: The part.
        digests: The `span_digests` of all its spans.

    Returns:
        The digest of the chunk, or 0 if the part is not the whole chunk; and the digests of the part's blocks, none for
        a chunk of one block.
    """
    if _is_one_block(part):
        return digests[0], []
    return digest_of_blocks(entry.name, part.index, digests) if part.is_whole else 0, digests


def _is_one_block(part: ChunkPart) -> bool:
    """Whether a part is a chunk of one block, which has no digests of blocks, but a digest of its bytes."""
    return part.is_whole and part.rows.count <= part.rows.block


def deliver_rows(read: ChunkRead, start: int, stop: int, elements: np.ndarray[Any, Any]) -> None:
    """Copy the wanted elements of rows ``start`` to ``stop`` of a part to all its targets."""
    dim = read.part.rows.dim
    for (_, of_box, _), target in zip(read.part.uses, read.targets, strict=True):
        if dim is None:
            convert(elements, target)
            continue
        # Uses of one part may want different rows of the span, or none.
        rows = of_box[dim]
        first, last = max(start, rows.start), min(stop, rows.stop)
        if first < last:
            source = elements[(*of_box[:dim], slice(first - start, last - start), *of_box[dim + 1 :])]
            convert(source, target[(*[slice(None)] * dim, slice(first - rows.start, last - rows.start))])


def cut(memory: np.ndarray[Any, Any], slices: tuple[slice, ...]) -> np.ndarray[Any, Any]:
    """Return a view of a part of an array."""
    return memory[slices] if slices else memory  # a scalar's element would be no view of it


def from_span(entry: ArrayEntry, part: ChunkPart, data: bytes | np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the elements of rows of a part from their stored bytes, without the padding of chunks at an edge."""
    dim, shape, stored = part.rows.dim, part.box.shape, entry.grid.chunk_shape
    elements = np.frombuffer(data, DTYPES[entry.stored_dtype])
    if dim is None:
        return elements.reshape(())
    # Dims before the dim that is cut into blocks have size 1, so rows lie behind each other.
    elements = elements.reshape(*shape[:dim], -1, *stored[dim + 1 :])
    if shape[dim + 1 :] == stored[dim + 1 :]:
        return elements
    return elements[(slice(None),) * (dim + 1) + tuple(slice(size) for size in shape[dim + 1 :])]


def validate_convertible(name: str, dtype: str, buffers: RegionBuffers) -> None:
    """Check that a tensor can be read into buffers.

    Raises:
        DTypeError: A buffer has another dtype than the tensor, whose dtype cannot be converted.
    """
    expected = DTYPES[dtype]
    if dtype in UNCONVERTED and any(buffer.dtype != expected for _, buffer in buffers):
        raise DTypeError(
            f"tensor {name!r} of dtype {dtype} is not converted; got memory of {buffers[0][1].dtype}, "
            f"expected {expected}"
        )


def convert(source: np.ndarray[Any, Any], target: np.ndarray[Any, Any]) -> None:
    """Copy elements, converting dtype; floats are rounded to nearest even."""
    if source.dtype == target.dtype:
        np.copyto(target, source)
        return
    # Whether to convert was decided before (`RestoreOptions.cast`); NumPy would warn of each value that does not fit.
    with np.errstate(over="ignore", invalid="ignore"):
        np.copyto(target, source, casting="unsafe")
