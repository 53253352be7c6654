"""Regular chunk grids: the box of each chunk, and the chunks that meet a box."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache

from dtckpt.errors import RegionError
from dtckpt.layout.region import Region

MAX_RANK = 32
"""Most dims of an array that TensorStore opens."""
MAX_NUMEL = 1 << 58
"""Most elements of a tensor, not counting dims of size zero; keeps all byte offsets and strides within 63 bits."""


@dataclass(frozen=True, slots=True)
class ChunkGrid:
    """A tensor's shape cut by one chunk shape; the last chunk of a dim may reach beyond the tensor.

    Args:
        shape: Elements per dim, >= 0.
        chunk_shape: Elements per dim of every chunk, >= 1.

    Attributes:
        counts: Chunks per dim.
        num_chunks: Chunks of the whole grid; 1 for a scalar, 0 for a tensor without elements.
    """

    shape: tuple[int, ...]
    chunk_shape: tuple[int, ...]
    counts: tuple[int, ...] = field(init=False, repr=False, compare=False)
    num_chunks: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if (
            len(self.shape) > MAX_RANK
            or math.prod(filter(None, self.shape)) > MAX_NUMEL
            or min(self.shape, default=0) < 0
        ):
            raise RegionError(
                f"shape cannot be stored; got {self.shape}, expected at most {MAX_RANK} dims, none negative, and "
                f"{MAX_NUMEL} elements"
            )
        if len(self.shape) != len(self.chunk_shape) or min(self.chunk_shape, default=1) < 1:
            raise RegionError(
                f"chunk shape does not fit; got {self.chunk_shape} for shape {self.shape}, "
                "expected one size >= 1 per dim"
            )
        counts = tuple(-(-size // chunk) for size, chunk in zip(self.shape, self.chunk_shape, strict=True))
        object.__setattr__(self, "counts", counts)
        object.__setattr__(self, "num_chunks", math.prod(counts))

    def index(self, number: int) -> tuple[int, ...]:
        """Return the position per dim of the chunk with a row-major number."""
        index = []
        for count in reversed(self.counts):
            number, position = divmod(number, count)
            index.append(position)
        return tuple(reversed(index))

    def chunk(self, number: int) -> tuple[tuple[int, ...], Region]:
        """Return index and box of the chunk with a row-major number; a cache keeps some thousands."""
        return _chunk(self, number)

    def number(self, index: tuple[int, ...]) -> int:
        """Return the row-major number of the chunk at ``index``."""
        number = 0
        for position, count in zip(index, self.counts, strict=True):
            number = number * count + position
        return number

    def region(self, index: tuple[int, ...]) -> Region:
        """Return the box that a chunk covers inside the tensor."""
        offset = tuple(position * chunk for position, chunk in zip(index, self.chunk_shape, strict=True))
        shape = tuple(
            min(chunk, size - start) for chunk, size, start in zip(self.chunk_shape, self.shape, offset, strict=True)
        )
        return Region.unchecked(offset, shape)

    def padded(self) -> ChunkGrid:
        """Return the grid of the same chunks, in a tensor that ends with the last chunk."""
        shape = tuple(count * size for count, size in zip(self.counts, self.chunk_shape, strict=True))
        return ChunkGrid(shape, self.chunk_shape)

    def meeting(self, region: Region) -> Iterator[tuple[int, ...]]:
        """Yield, row-major, the index of every chunk that shares an element with ``region``."""
        if region.is_empty:
            return iter(())
        return itertools.product(
            *(
                range(start // chunk, -(-stop // chunk))
                for start, stop, chunk in zip(region.offset, region.stop, self.chunk_shape, strict=True)
            )
        )


@lru_cache(maxsize=4096)
def _chunk(grid: ChunkGrid, number: int) -> tuple[tuple[int, ...], Region]:
    index = grid.index(number)
    return index, grid.region(index)
