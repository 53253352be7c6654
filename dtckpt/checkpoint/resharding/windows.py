"""Cut the new chunks of a tensor into windows: neighbouring chunks whose elements are read together; pure.

A new chunk is made of parts of old ones. If storage can be read only in units that several new chunks share, these
chunks should be in one window, so that the unit is read once::

    units of the old chunks (rows)   new chunks (columns)   a window: all new chunks that share units
    |aaaaaaaa|                       |a|b|c|d|              |####|
    |bbbbbbbb|                       | | | | |              |####|

A window is a run of chunks in row-major order, which is the order of the writes. So it is whole in all dims behind the
one in which it ends.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from dtckpt.checkpoint.saving.plan import NO_CLIENT, SavePlan, with_owners
from dtckpt.format.dtypes import DTYPES
from dtckpt.format.grid import ChunkGrid

WINDOW_NBYTES = 32 << 20
"""A window is not larger than this without need: it stays near the processor, and memory that is new costs time."""
Chunks = TypeVar("Chunks", int, npt.NDArray[np.int64])
_SLACK = 1.02
"""Windows that read so many times as much as the best ones are as good, if they are smaller."""


@dataclass(frozen=True, slots=True)
class Units:
    """The smallest parts that an old tensor can be read in: its chunks, cut into blocks.

    Args:
        chunk: Elements per dim of an old chunk.
        unit: Elements per dim of a unit. Each chunk begins with a new one.
    """

    chunk: tuple[int, ...]
    unit: tuple[int, ...]

    def amplification(self, shape: Sequence[int], lengths: Sequence[int]) -> float:
        """Return how often a unit is read, on average, by windows of these lengths per dim.

        A unit is read once more for every edge between windows that lies inside it.
        """
        factor = 1.0
        for size, length, chunk, unit in zip(shape, lengths, self.chunk, self.unit, strict=True):
            edges = np.arange(length, size, length)
            whole, rest = divmod(size, chunk)
            num_units = whole * -(-chunk // unit) - (-rest // unit)
            factor *= 1 + np.count_nonzero(edges % chunk % unit) / num_units
        return float(factor)


@dataclass(frozen=True, slots=True)
class Windows:
    """How the chunks of a tensor are cut into windows.

    Args:
        line: Chunks in a line; a window ends where its line ends.
        length: Chunks of a window, of which a line has one or more.
        nbytes: Bytes of a window.
        amplification: Bytes that are read to fill all windows, by the tensor's bytes.
    """

    line: int
    length: int
    nbytes: int
    amplification: float

    @classmethod
    @lru_cache(maxsize=4096)
    def of(cls, grid: ChunkGrid, itemsize: int, units: Units, max_nbytes: int) -> Windows:
        """Choose the windows of a tensor: of the windows that read least, the smallest.

        Args:
            grid: The tensor's shape and new chunks.
            itemsize: Bytes of an element in memory.
            units: The units in which storage is read.
            max_nbytes: Bound on the bytes of a window; one of a single chunk may exceed it.
        """
        found = list(_candidates(grid, itemsize, units, max_nbytes))
        least = min(windows.amplification for windows in found)
        good = [windows for windows in found if windows.amplification <= least * _SLACK]
        # Of windows that are all too small, the largest.
        large = [windows for windows in good if windows.nbytes >= WINDOW_NBYTES]
        return min(large, key=lambda windows: windows.nbytes) if large else max(good, key=lambda each: each.nbytes)

    def number(self, chunk: Chunks) -> Chunks:
        """Return the number of the window that a chunk lies in, by the chunk's row-major number; also for an array."""
        per_line = -(-self.line // self.length)
        return chunk // self.line * per_line + chunk % self.line // self.length


def _candidates(grid: ChunkGrid, itemsize: int, units: Units, max_nbytes: int) -> Iterator[Windows]:
    """Yield windows that fit, of at least one chunk: the smallest, the largest, and some that end with a unit."""
    # A tensor without elements has no chunks; any windows will do.
    shape, counts = ([max(1, size) for size in sizes] for sizes in (grid.shape, grid.counts))
    chunk = grid.chunk_shape
    lengths, inner = [min(size, each) for size, each in zip(shape, chunk, strict=True)], 1

    def windows(line: int, length: int) -> Windows:
        return Windows(line, length, itemsize * math.prod(lengths), units.amplification(shape, lengths))

    yield windows(1, 1)
    for dim in reversed(range(len(shape))):
        row = itemsize * math.prod(lengths) // lengths[dim]
        fitting = counts[dim] if shape[dim] * row <= max_nbytes else max(1, max_nbytes // (row * chunk[dim]))
        enough = min(counts[dim], -(-WINDOW_NBYTES // (row * chunk[dim])))
        # Chunks after which a window ends with an old chunk, or with a unit of it.
        steps = {1, *(math.lcm(chunk[dim], each[dim]) // chunk[dim] for each in (units.chunk, units.unit))}
        ends = {end for step in steps for end in (-(-enough // step) * step, fitting // step * step)}
        for count in sorted(ends):
            if 0 < count <= fitting:
                lengths[dim] = min(shape[dim], count * chunk[dim])
                yield windows(counts[dim] * inner, count * inner)
        # A window that goes on in an outer dim is whole in all inner ones.
        if fitting < counts[dim]:
            return
        lengths[dim], inner = shape[dim], inner * counts[dim]


def share_out(plan: SavePlan, windows: Sequence[Windows], num_workers: int) -> SavePlan:
    """Divide a plan among workers: each writes neighbouring windows, and all about as many bytes.

    So no two workers read the same part of an old chunk, and each reads its part of the old checkpoint in order.

    Args:
        plan: The plan of one writer.
        windows: How the chunks of each tensor are cut into windows.
        num_workers: Number of workers.
    """
    numbers, sizes, first = [], [], 0
    for tensor, cut in zip(plan.tensors, windows, strict=True):
        of_tensor = cut.number(np.arange(tensor.grid.num_chunks))
        numbers.append(of_tensor + first)
        first += int(of_tensor[-1]) + 1 if of_tensor.size else 0
        nbytes = math.prod(tensor.grid.chunk_shape) * DTYPES[tensor.stored_dtype].itemsize
        sizes.append(np.where(tensor.owners == NO_CLIENT, 0, nbytes))
    window_of_chunk = np.concatenate([np.empty(0, np.int64), *numbers])
    nbytes_of_window = np.bincount(window_of_chunk, np.concatenate([np.empty(0), *sizes]))
    # A window belongs to the worker in whose share its middle lies.
    middles = np.cumsum(nbytes_of_window) - nbytes_of_window / 2
    workers = (middles * num_workers / max(1.0, nbytes_of_window.sum())).astype(np.int32)
    return with_owners(plan, np.where(plan.owners == NO_CLIENT, NO_CLIENT, workers[window_of_chunk]).astype(np.int32))
