"""Plan reads: which chunks, and which blocks of them, a reader of some regions of a tensor needs; pure.

A large chunk is cut into blocks of whole rows, each with a digest. So a part of a chunk can be read and verified
without the rest, if it is not compressed::

    chunk of 6 rows, 2 rows a block     wanted region      part that is read
    block 0   row 0  ........
              row 1  ........
    block 1   row 2  ........           ..####..           blocks 1 and 2: verified block by block,
              row 3  ........           ..####..           then ..####.. is copied out of rows 2 to 4
    block 2   row 4  ........           ..####..
              row 5  ........
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from heapq import merge
from itertools import groupby, repeat
from operator import itemgetter

from dtckpt.errors import RegionError, RegionNotFoundError
from dtckpt.format.digest import Blocks
from dtckpt.format.grid import ChunkGrid
from dtckpt.format.manifest import ArrayEntry
from dtckpt.layout.region import Region

_KEPT_CHUNKS = 64
"""Plans of tensors with no more chunks are kept: many tensors of a model are alike, and are read alike."""


@dataclass(frozen=True, slots=True, eq=False)
class StoredRows:
    """The position of a part's elements in the stored chunk: rows of the dim that is cut into blocks.

    All stored chunks of a tensor have the same length: a chunk that the tensor's edge cuts short is padded.

    Args:
        dim: The dim that is cut into blocks; None: the tensor is a scalar.
        start: Offset of the part in the stored chunk, in bytes.
        row_nbytes: Bytes of a row, as it is stored.
        count: Rows of the part.
        block: Rows of a block.
        wanted: First row, and row behind the last, that the only use of the part wants, if it wants whole rows as they
            are stored. Empty if there are several uses, or the only use wants less than whole rows.
    """

    dim: int | None
    start: int
    row_nbytes: int
    count: int
    block: int
    wanted: tuple[int, int]

    @property
    def nbytes(self) -> int:
        """Bytes of the part as it is stored."""
        return self.count * self.row_nbytes


@dataclass(frozen=True, slots=True, eq=False)
class ChunkPart:
    """A part of a chunk that must be read: neighbouring blocks, or all of it.

    Args:
        number: Row-major number of the chunk.
        index: Position of the chunk per dim of the grid.
        chunk: The box that the chunk covers.
        blocks: Numbers of the blocks that are read.
        box: The box that these blocks cover.
        nbytes: Bytes of the part's elements on storage, before compression.
        uses: One entry for each requested region that needs the part: the region's position in the request, and the
            slices of the box and of the region that overlap.
        rows: Position of the part in the stored chunk.
        is_whole: Whether the part is all of the chunk.
    """

    number: int
    index: tuple[int, ...]
    chunk: Region
    blocks: range
    box: Region
    nbytes: int
    uses: tuple[tuple[int, tuple[slice, ...], tuple[slice, ...]], ...]
    rows: StoredRows
    is_whole: bool

    @property
    def is_dense(self) -> bool:
        """Whether it is a whole chunk of one block, stored as its elements without padding between them."""
        return self.is_whole and self.rows.count <= self.rows.block and self.rows.nbytes == self.nbytes


def plan_reads(grid: ChunkGrid, itemsize: int, regions: tuple[Region, ...], *, by_blocks: bool) -> Iterable[ChunkPart]:
    """Plan the reads for some regions of a tensor, each chunk once.

    Args:
        grid: The tensor's shape and chunks.
        itemsize: Bytes per stored element.
        regions: The regions that are wanted.
        by_blocks: Whether a block can be read without the rest of its chunk.

    Raises:
        RegionError: A region is outside the tensor.
    """
    # Larger plans are not kept, but made chunk by chunk while the reader goes through them.
    if grid.num_chunks <= _KEPT_CHUNKS:
        return _kept_plan(grid, itemsize, regions, by_blocks)
    _validate_inside(grid, regions)
    return _parts(grid, itemsize, regions, by_blocks)


@lru_cache(maxsize=256)
def _kept_plan(grid: ChunkGrid, itemsize: int, regions: tuple[Region, ...], by_blocks: bool) -> tuple[ChunkPart, ...]:
    _validate_inside(grid, regions)
    return tuple(_parts(grid, itemsize, regions, by_blocks))


def _validate_inside(grid: ChunkGrid, regions: tuple[Region, ...]) -> None:
    whole = Region.full(grid.shape)
    for region in regions:
        if region.ndim != whole.ndim or not whole.contains(region):
            raise RegionError(f"region {region} is outside shape {grid.shape}")


def _parts(grid: ChunkGrid, itemsize: int, regions: tuple[Region, ...], by_blocks: bool) -> Iterator[ChunkPart]:
    """Yield the parts in row-major order of their chunks.

    One at a time: there may be millions, and a part takes much more memory than its chunk does in the manifest.
    """
    blocks = Blocks.of(grid, itemsize)
    # The chunks of each region come in row-major order, so a merge brings the regions of one chunk together.
    chunks = merge(*(zip(grid.meeting(region), repeat(position)) for position, region in enumerate(regions)))
    for index, uses_of in groupby(chunks, key=itemgetter(0)):
        chunk = box = grid.region(index)
        overlaps = [
            (position, overlap)
            for _, position in uses_of
            if (overlap := chunk.intersect(regions[position])) is not None
        ]
        needed = range(blocks.count(chunk.shape) if by_blocks else 1)
        if len(needed) > 1:
            spans = [blocks.meeting(chunk, overlap) for _, overlap in overlaps]
            # One run of blocks, even if two regions of the chunk lie far apart: a read has one start and one end.
            needed = range(min(span.start for span in spans), max(span.stop for span in spans))
            box = blocks.span(chunk, needed.start, needed.stop)
        uses = tuple(
            (position, overlap.relative_to(box).slices(), overlap.relative_to(regions[position]).slices())
            for position, overlap in overlaps
        )
        rows = _rows(grid, itemsize, chunk, box, [overlap for _, overlap in overlaps])
        nbytes = box.numel * itemsize
        yield ChunkPart(grid.number(index), index, chunk, needed, box, nbytes, uses, rows, box == chunk)


def _rows(grid: ChunkGrid, itemsize: int, chunk: Region, box: Region, overlaps: Sequence[Region]) -> StoredRows:
    """Return the position in the stored chunk of a box of whole blocks, of which some overlaps are wanted."""
    # A scalar: one element, one row, and no dim to cut.
    if not box.ndim:
        return StoredRows(None, 0, itemsize, 1, 1, (0, 1) if len(overlaps) == 1 else (0, 0))
    blocks, (first, *more) = Blocks.of(grid, itemsize), overlaps
    dim = blocks.dim
    row_nbytes = itemsize * math.prod(grid.chunk_shape[dim + 1 :])
    start, count = box.offset[dim], box.shape[dim]
    # A chunk that the tensor's edge cuts short is never dense in a later dim: its rows are stored with padding.
    is_dense = first.shape[dim + 1 :] == grid.chunk_shape[dim + 1 :] and not more
    wanted = (first.offset[dim] - start, first.stop[dim] - start) if is_dense else (0, 0)
    return StoredRows(dim, (start - chunk.offset[dim]) * row_nbytes, row_nbytes, count, blocks.rows, wanted)


def plan_tensor_reads(entry: ArrayEntry, regions: tuple[Region, ...]) -> Iterable[ChunkPart]:
    """Plan the reads for some regions of a tensor, chunk by chunk; as `plan_reads`, with errors that name the tensor.

    Raises:
        RegionError: A region is outside the tensor.
        RegionNotFoundError: A region needs a chunk that was not saved.
    """
    # Compressed chunks have no blocks that can be read alone.
    plan = partial(plan_reads, entry.grid, entry.itemsize, regions, by_blocks=entry.has_readable_blocks)
    try:
        parts = plan()
    except RegionError:
        outside = next(region for region in regions if not _is_inside(region, entry.shape))
        raise RegionError(f"region {outside} is outside tensor {entry.name!r} of shape {entry.shape}") from None
    # Planned a second time: the plan of a large tensor is an iterator, which this look would use up.
    if entry.missing and (lost := next((part.chunk for part in plan() if part.number in entry.missing), None)):
        raise RegionNotFoundError(
            f"tensor {entry.name!r} was saved in part, without {lost}; read a region that was saved"
        )
    return parts


def max_chunk_nbytes(entry: ArrayEntry) -> int:
    """Return the bytes of a tensor's largest chunk, before compression."""
    return min(math.prod(entry.grid.chunk_shape), math.prod(entry.shape)) * entry.itemsize


def _is_inside(region: Region, shape: tuple[int, ...]) -> bool:
    return region.ndim == len(shape) and Region.full(shape).contains(region)
