"""Plans of files that a conversion writes: elements at known places, and everything around them; pure.

A file is a row of slots, each with the elements of one tensor in C order, or of a box of it. The bytes around the
slots are the frame: headers, names, checksums. The frame may depend on the elements, so it is written last::

    |frame | slot "a"      | slot "b" | frame | slot "c"                    | frame|
           |<-------------- block -------------->|<------ block ------>|

A block holds elements that are close in the file, up to a bound. One thread reads a block while another thread writes
the block before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from dtckpt.checkpoint.converting.export import ExportedTensor
from dtckpt.layout.region import Region

MAX_GAP_NBYTES = 4 << 10
"""Slots that are no further apart are written together."""


@dataclass(frozen=True, slots=True)
class FileSlot:
    """The place of a box of a tensor in a file.

    Args:
        tensor: The tensor.
        region: The box.
        offset: Its first byte in the file.
    """

    tensor: ExportedTensor
    region: Region
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of the box."""
        return self.region.numel * self.tensor.itemsize


@dataclass(frozen=True, slots=True)
class FileDigests:
    """Digests of the elements of a file, which were read back from the file after its slots were filled.

    Args:
        contents: By tensor name, its content digest; once all its boxes are written.
        checksums: By slot, its checksum, in files that ask for them.
    """

    contents: Mapping[str, int]
    checksums: Mapping[FileSlot, int]


Frame = Callable[[FileDigests], Iterable[tuple[int, bytes]]]
"""Returns the frame of a file: pairs of first byte and bytes."""


@dataclass(frozen=True, slots=True)
class FilePlan:
    """A file.

    Args:
        name: Its name in the new checkpoint's folder.
        nbytes: Its bytes.
        slots: Its slots, ascending; they do not overlap.
        frame: See `Frame`.
        checksum: The checksum that the frame needs of each slot, as `awscrt.checksums.crc32`; None: none.
    """

    name: str
    nbytes: int
    slots: Sequence[FileSlot] = ()
    frame: Frame = field(default=lambda _: (), compare=False)
    checksum: Callable[[Any, int], int] | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Part:
    """A box of a slot in a block: elements that follow each other in C order.

    Args:
        slot: The slot.
        region: The box, in the tensor's indices.
        start: Its first byte in the block.
        nbytes: Its bytes.
    """

    slot: FileSlot
    region: Region
    start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Block:
    """A range of bytes of a file.

    Args:
        offset: The first byte in the file.
        nbytes: Their number.
        parts: The boxes in it; bytes between them belong to the frame.
    """

    offset: int
    nbytes: int
    parts: tuple[Part, ...]


def plan_blocks(slots: Iterable[FileSlot], max_nbytes: int) -> Iterator[Block]:
    """Cut the slots of a file into blocks of at most ``max_nbytes`` bytes; one element may be larger."""
    parts: list[Part] = []
    offset = end = 0
    for slot in slots:
        at = slot.offset
        for region in c_boxes(slot.region, slot.tensor.itemsize, max_nbytes, slot.tensor.info.chunk_shape):
            nbytes = region.numel * slot.tensor.itemsize
            if parts and (at - end > MAX_GAP_NBYTES or at + nbytes - offset > max_nbytes):
                yield Block(offset, end - offset, tuple(parts))
                parts = []
            if not parts:
                offset = at
            parts.append(Part(slot, region, at - offset, nbytes))
            at = end = at + nbytes
    if parts:
        yield Block(offset, end - offset, tuple(parts))


def c_boxes(region: Region, itemsize: int, max_nbytes: int, chunk_shape: Sequence[int]) -> Iterator[Region]:
    """Cut a box into boxes whose elements follow each other in its C order, each of at most ``max_nbytes`` bytes.

    Args:
        region: The box.
        itemsize: Bytes of an element.
        max_nbytes: Bound on the bytes of a box; one element may be larger.
        chunk_shape: Of the stored tensor. Where a chunk is no longer than a box, no chunk is in two boxes: it would be
            read twice.
    """
    if region.is_empty:
        return
    # The first dim whose rows, with all dims behind it, are not too large; boxes are some of its rows.
    if not region.ndim:
        yield region
        return
    fitting = (dim for dim in range(region.ndim) if itemsize * math.prod(region.shape[dim + 1 :]) <= max_nbytes)
    dim = next(fitting, region.ndim - 1)
    rows = max(1, max_nbytes // (itemsize * math.prod(region.shape[dim + 1 :])))
    # The first box ends where a chunk ends, so that the next ones begin there.
    chunk_rows = chunk_shape[dim] if chunk_shape[dim] <= rows else 1
    rows -= rows % chunk_rows
    start, stop = region.offset[dim], region.offset[dim] + region.shape[dim]
    edges = [start, *range(start - start % chunk_rows + rows, stop, rows), stop]
    for outer in _indices(region, dim):
        for first, last in pairwise(edges):
            offset = (*outer, first, *region.offset[dim + 1 :])
            yield Region.unchecked(offset, (*[1] * dim, last - first, *region.shape[dim + 1 :]))


def _indices(region: Region, dim: int) -> Iterator[tuple[int, ...]]:
    """Yield all indices of the dims before ``dim``, row-major."""
    if dim == 0:
        yield ()
        return
    for outer in _indices(region, dim - 1):
        for index in range(region.offset[dim - 1], region.offset[dim - 1] + region.shape[dim - 1]):
            yield (*outer, index)
