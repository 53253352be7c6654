"""Chunk digests: XXH3 (64 bit) over a chunk's elements, bound to the tensor and to the chunk's position.

The seed depends on the tensor's name and the chunk's index, so a check finds two chunks that changed places. Elements
are hashed in C order in the stored dtype, little endian, without the padding of edge chunks.

A chunk of several blocks (`Blocks`) is hashed block by block, without a seed, and its digest is the digest of its
blocks' digests. So a reader that has the blocks' digests verifies single blocks.

64 bits find damage, but must not decide that two contents are equal. So a chunk also has an identity, 64 further bits:
the upper half of XXH3-128, whose lower half is XXH3-64. One pass over the elements gives both halves.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import xxhash

from dtckpt.format.grid import ChunkGrid
from dtckpt.layout.region import Region

BLOCK_NBYTES = 256 << 10
"""Bytes of a block, unless one row of a chunk is larger. Part of the format."""

_DIGEST = np.dtype("<u8")
_LOWER = (1 << 64) - 1
_MAX_SPECIAL_NBYTES = 240
"""Up to so many bytes XXH3-64 is another function than the lower half of XXH3-128."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """How the chunks of a tensor are cut into blocks, which can be verified one by one: each is some rows of one dim.

    Args:
        dim: The first dim along which chunks are longer than one element; it alone is cut.
        rows: Elements per block along that dim.
    """

    dim: int
    rows: int

    @classmethod
    @lru_cache(maxsize=4096)
    def of(cls, grid: ChunkGrid, itemsize: int) -> Blocks:
        """Return the blocks of a tensor's chunks."""
        dim = next((dim for dim, size in enumerate(grid.chunk_shape) if size > 1), 0)
        row_nbytes = itemsize * math.prod(grid.chunk_shape[dim + 1 :])
        return cls(dim, max(1, BLOCK_NBYTES // row_nbytes))

    def count(self, shape: Sequence[int]) -> int:
        """Return the number of blocks of a chunk whose box has this shape."""
        return -(-shape[self.dim] // self.rows) if shape else 1

    def cut(self, chunk: Region) -> Iterator[Region]:
        """Yield the box of each block of a chunk."""
        for start in range(0, chunk.shape[self.dim], self.rows):
            yield self.span(chunk, start // self.rows, start // self.rows + 1)

    def meeting(self, chunk: Region, region: Region) -> range:
        """Return the numbers of the chunk's blocks, from the first to the last that shares an element with a region."""
        start = max(region.offset[self.dim] - chunk.offset[self.dim], 0)
        stop = min(region.stop[self.dim] - chunk.offset[self.dim], chunk.shape[self.dim])
        return range(start // self.rows, -(-stop // self.rows))

    def span(self, chunk: Region, first: int, stop: int) -> Region:
        """Return the box of blocks ``first`` to ``stop`` (exclusive) of a chunk."""
        start = first * self.rows
        offset, shape = list(chunk.offset), list(chunk.shape)
        offset[self.dim] += start
        shape[self.dim] = min(stop * self.rows, shape[self.dim]) - start
        return Region(tuple(offset), tuple(shape))


def digest_chunk(
    name: str, index: tuple[int, ...], elements: np.ndarray[Any, Any], blocks: Blocks
) -> tuple[int, list[int]]:
    """Return the digest of a chunk, and the digests of its blocks (none if it is one block itself).

    Args:
        name: The tensor's name.
        index: The chunk's position per dim of the grid.
        elements: The chunk's elements in the stored dtype, of the shape of its box.
        blocks: How the tensor's chunks are cut into blocks.
    """
    if blocks.count(elements.shape) <= 1:
        return digest_of_data(name, index, buffer_of(elements)), []
    parts = [bytes_digest(data) for data in _block_data(elements, blocks)]
    return digest_of_blocks(name, index, parts), parts


def identify_chunk(
    name: str, index: tuple[int, ...], elements: np.ndarray[Any, Any], blocks: Blocks
) -> tuple[int, list[int], int]:
    """Return the digest of a chunk and the digests of its blocks, as `digest_chunk`, and the chunk's identity."""
    if blocks.count(elements.shape) <= 1:
        digest, identity = _wide_digest(buffer_of(elements), _seed(name, index))
        return digest, [], identity
    wide = [_wide_digest(data, 0) for data in _block_data(elements, blocks)]
    lower, upper = [digest for digest, _ in wide], [identity for _, identity in wide]
    return digest_of_blocks(name, index, lower), lower, digest_of_blocks(name, index, upper)


def _wide_digest(data: memoryview, seed: int) -> tuple[int, int]:
    """Return XXH3-64 of data, and the upper half of XXH3-128."""
    wide = xxhash.xxh3_128_intdigest(data, seed=seed)
    is_special = data.nbytes <= _MAX_SPECIAL_NBYTES
    return xxhash.xxh3_64_intdigest(data, seed=seed) if is_special else wide & _LOWER, wide >> 64


def _block_data(elements: np.ndarray[Any, Any], blocks: Blocks) -> Iterator[memoryview]:
    """Yield the bytes of each block of a chunk of several blocks."""
    if elements.flags.c_contiguous:
        # The dims before the cut dim are one element long, so each block is contiguous.
        data = as_bytes(elements).data
        step = elements.nbytes // elements.shape[blocks.dim] * blocks.rows
        yield from (data[start : start + step] for start in range(0, elements.nbytes, step))
    else:
        whole = Region.full(elements.shape)
        yield from (as_bytes(elements[box.slices()]).data for box in blocks.cut(whole))


def digest_of_blocks(name: str, index: tuple[int, ...], digests: Sequence[int] | np.ndarray[Any, Any]) -> int:
    """Return the digest of a chunk, made from the digests of its blocks."""
    return digest_of_data(name, index, np.asarray(digests, _DIGEST).data)


def digest_of_data(name: str, index: tuple[int, ...], data: memoryview) -> int:
    """Return the digest of a chunk of one block from its elements' bytes."""
    return xxhash.xxh3_64_intdigest(data, seed=_seed(name, index))


def _seed(name: str, index: tuple[int, ...]) -> int:
    return xxhash.xxh3_64_intdigest(name.encode() + _suffix(index))


@lru_cache(maxsize=4096)
def _suffix(index: tuple[int, ...]) -> bytes:
    return f"\0{','.join(map(str, index))}".encode()


def as_bytes(elements: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """View elements as flat uint8, in C order (a copy only where they are not contiguous)."""
    return np.ascontiguousarray(elements).reshape(-1).view(np.uint8)


def buffer_of(elements: np.ndarray[Any, Any]) -> memoryview:
    """Return elements as a buffer, in C order (a copy only where they are not contiguous).

    Types that numpy lacks, such as bfloat16, have no buffer interface. For these it returns a buffer of their bytes.
    """
    has_buffer = elements.flags.c_contiguous and elements.dtype.isbuiltin == 1
    return elements.data if has_buffer else as_bytes(elements).data


def documents_digest(documents: Iterable[tuple[str, bytes]]) -> int:
    """Return the digest of documents, pairs of key and content, in their order."""
    digest = xxhash.xxh3_64()
    for key, data in documents:
        digest.update(b"%b\0%d\0%b" % (key.encode(), len(data), data))
    return digest.intdigest()


def bytes_digest(data: bytes | memoryview) -> int:
    """Return the digest of bytes, without a seed."""
    return xxhash.xxh3_64_intdigest(data)
