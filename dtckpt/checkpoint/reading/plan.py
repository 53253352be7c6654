"""Which chunks, and which blocks of them, a reader of some regions of a tensor needs."""

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
"""Plans over grids of no more chunks are kept: many tensors of a model are alike, and are read alike."""


@dataclass(frozen=True, slots=True, eq=False)
class StoredRows:
    """Where the elements of a part lie in the stored chunk: rows of the dim that is cut into blocks.

    A stored chunk is as long as any; what the grid cuts short is filled up.

    Args:
        dim: That dim; None: the tensor is a scalar.
        start: Where in the stored chunk the part begins, in bytes.
        row_nbytes: Bytes of a row, as it is stored.
        count: Rows of the part.
        block: Rows of a block.
        wanted: First and last + 1 row that the only use of the part wants, if it wants them as they are stored;
            empty, if there are several uses, or the only one wants less than whole rows.
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
class PartRead:
    """A chunk that is needed, or some of its blocks.

    Args:
        number: Row-major number of the chunk.
        index: Its position per dim.
        chunk: The box that it covers.
        blocks: The numbers of the blocks that are read.
        box: The box that those cover.
        nbytes: Bytes of its elements on storage, before compression.
        uses: Which of the regions asked for need it: position of the region, what of the box, what of the region.
        rows: Where it lies in the stored chunk.
        is_whole: Whether it is all of the chunk.
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
    def is_plain(self) -> bool:
        """Whether it is a whole chunk of one block, all of which is wanted once, as it is stored."""
        return self.is_whole and self.rows.count <= self.rows.block and self.rows.wanted == (0, self.rows.count)


def plan_reads(grid: ChunkGrid, itemsize: int, regions: tuple[Region, ...], *, by_blocks: bool) -> Iterable[PartRead]:
    """Say what must be read for some regions of a tensor, each chunk once.

    Args:
        grid: Its shape and chunks.
        itemsize: Bytes per stored element.
        regions: What is wanted.
        by_blocks: Whether a block can be read without the rest of its chunk.

    Raises:
        RegionError: A region is outside the tensor.
    """
    if grid.num_chunks <= _KEPT_CHUNKS:
        return _kept_plan(grid, itemsize, regions, by_blocks)
    _validate_inside(grid, regions)
    return _parts(grid, itemsize, regions, by_blocks)


@lru_cache(maxsize=256)
def _kept_plan(grid: ChunkGrid, itemsize: int, regions: tuple[Region, ...], by_blocks: bool) -> tuple[PartRead, ...]:
    _validate_inside(grid, regions)
    return tuple(_parts(grid, itemsize, regions, by_blocks))


def _validate_inside(grid: ChunkGrid, regions: tuple[Region, ...]) -> None:
    whole = Region.full(grid.shape)
    for region in regions:
        if region.ndim != whole.ndim or not whole.contains(region):
            raise RegionError(f"region {region} is outside shape {grid.shape}")


def _parts(grid: ChunkGrid, itemsize: int, regions: tuple[Region, ...], by_blocks: bool) -> Iterator[PartRead]:
    """Yield the parts in the chunks' order, one at a time: a part takes much more memory than its chunk's digest."""
    blocks = Blocks.of(grid, itemsize)
    met = merge(*(zip(grid.meeting(region), repeat(position)) for position, region in enumerate(regions)))
    for index, uses_of in groupby(met, key=itemgetter(0)):
        chunk = box = grid.region(index)
        overlaps = [(at, overlap) for _, at in uses_of if (overlap := chunk.intersect(regions[at])) is not None]
        needed = range(blocks.count(chunk.shape) if by_blocks else 1)
        if len(needed) > 1:
            spans = [blocks.meeting(chunk, overlap) for _, overlap in overlaps]
            needed = range(min(span.start for span in spans), max(span.stop for span in spans))
            box = blocks.span(chunk, needed.start, needed.stop)
        uses = tuple(
            (position, overlap.relative_to(box).slices(), overlap.relative_to(regions[position]).slices())
            for position, overlap in overlaps
        )
        rows = _rows(grid, itemsize, chunk, box, [overlap for _, overlap in overlaps])
        nbytes = box.numel * itemsize
        yield PartRead(grid.number(index), index, chunk, needed, box, nbytes, uses, rows, box == chunk)


def _rows(grid: ChunkGrid, itemsize: int, chunk: Region, box: Region, overlaps: Sequence[Region]) -> StoredRows:
    if not box.ndim:
        return StoredRows(None, 0, itemsize, 1, 1, (0, 1) if len(overlaps) == 1 else (0, 0))
    blocks, (first, *more) = Blocks.of(grid, itemsize), overlaps
    dim = blocks.dim
    row_nbytes = itemsize * math.prod(grid.chunk_shape[dim + 1 :])
    start, count = box.offset[dim], box.shape[dim]
    is_dense = first.shape[dim + 1 :] == grid.chunk_shape[dim + 1 :] and not more
    wanted = (first.offset[dim] - start, first.stop[dim] - start) if is_dense else (0, 0)
    return StoredRows(dim, (start - chunk.offset[dim]) * row_nbytes, row_nbytes, count, blocks.rows, wanted)


def parts_of(entry: ArrayEntry, regions: tuple[Region, ...]) -> Iterable[PartRead]:
    """Return what must be read, chunk by chunk, for some regions of a tensor."""
    plan = partial(plan_reads, entry.grid, entry.itemsize, regions, by_blocks=entry.has_readable_blocks)
    try:
        parts = plan()
    except RegionError:
        outside = next(region for region in regions if not _is_inside(region, entry.shape))
        raise RegionError(f"region {outside} is outside tensor {entry.name!r} of shape {entry.shape}") from None
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
