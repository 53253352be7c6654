"""Plan reads of tensors made of pieces: the ranges of bytes that hold a region, and the elements in each; pure.

The file of a piece has each box as runs at regular distances. Runs that are close are read together, with the gaps
between them; long ones are cut::

    row 0  ..####....     wanted columns 2:6      gap <= max_gap:  |####......####......####|      one read
    row 1  ..####....                             else:            |####|     |####|     |####|    a read each
    row 2  ..####....
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from typing_extensions import override

from dtckpt.checkpoint.reading.pieces import Piece, PieceTensor, RulePieces, c_strides
from dtckpt.checkpoint.reading.tensor_info import ChunkInfo, TensorInfo
from dtckpt.errors import RegionError, RegionNotFoundError
from dtckpt.format.codecs import NO_CODEC
from dtckpt.layout.region import Region


@dataclass(frozen=True, slots=True)
class Span:
    """A range of bytes of a file, and the box of elements in it that is wanted.

    Args:
        file: The file.
        start: The first byte of the box's first element.
        stop: The byte behind the last.
        shape: The box's shape.
        strides: Bytes from one element of the box to the next, per dim.
        number: The region that wants the box, by its position in the request.
        target: The slices of the box in that region.
        is_dense: Whether the range holds the box's elements in C order, and nothing else.
    """

    file: str
    start: int
    stop: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    number: int
    target: tuple[slice, ...]
    is_dense: bool

    @property
    def nbytes(self) -> int:
        """Bytes of the range."""
        return self.stop - self.start


def plan_spans(
    tensor: PieceTensor,
    regions: Sequence[Region],
    *,
    max_gap: int,
    max_nbytes: int,
    places: Mapping[Piece, Piece] = MappingProxyType({}),
) -> Iterator[Span]:
    """Plan the reads of some regions of a tensor.

    Args:
        tensor: The tensor.
        regions: The regions.
        max_gap: The longest gap between two runs, in bytes, that is read rather than passed over.
        max_nbytes: Bound on the bytes of a range.
        places: By piece in a stream, the same piece with the place of its elements.

    Raises:
        RegionError: A region is outside the tensor.
        RegionNotFoundError: A part of a region was not saved.
    """
    for region in regions:
        if not tensor.contains(region):
            raise RegionError(f"region {region} is outside tensor {tensor.name!r} of shape {tensor.shape}")
        if not tensor.is_whole and region.numel > sum(box.numel for _, box in _overlaps(tensor, region)):
            raise RegionNotFoundError(
                f"tensor {tensor.name!r} was saved in part, without all of {region}; read a region that was saved"
            )
    return (
        span
        for number, region in enumerate(regions)
        for piece, box in _overlaps(tensor, region)
        for span in _BoxBytes.of(places.get(piece, piece), box, tensor.itemsize).spans(
            number, region, max_gap, max_nbytes
        )
    )


def _overlaps(tensor: PieceTensor, region: Region) -> Iterator[tuple[Piece, Region]]:
    for piece in tensor.pieces_in(region):
        if (box := piece.region.intersect(region)) is not None:
            yield piece, box


@dataclass(frozen=True, slots=True)
class _BoxBytes:
    """The bytes of a box of a piece.

    Args:
        file: The piece's file.
        start: The byte of the box's first element.
        box: The box.
        strides: Bytes from one element to the next, per dim.
        itemsize: Bytes of an element.
    """

    file: str
    start: int
    box: Region
    strides: tuple[int, ...]
    itemsize: int

    @classmethod
    def of(cls, piece: Piece, box: Region, itemsize: int) -> _BoxBytes:
        """Return the bytes of a box."""
        strides = tuple(itemsize * step for step in piece.element_strides)
        first = box.relative_to(piece.region).offset
        start = piece.offset + sum(index * step for index, step in zip(first, strides, strict=True))
        return cls(piece.file, start, box, strides, itemsize)

    def spans(self, number: int, region: Region, max_gap: int, max_nbytes: int) -> Iterator[Span]:
        """Yield the ranges of bytes to be read; see `plan_spans`."""
        # From the largest stride to the smallest, whichever dims have them: a tensor that was stored transposed is read
        # as it lies in the file. A dim of one element has no distance.
        dims = sorted((dim for dim, size in enumerate(self.box.shape) if size > 1), key=lambda dim: -self.strides[dim])
        cut = _Cut([self.box.shape[dim] for dim in dims], [self.strides[dim] for dim in dims], self.itemsize)
        origin = self.box.relative_to(region).offset
        for offsets, sizes in cut.boxes(cut.first_joined(max_gap), max_nbytes):
            start, shape = list(origin), [1] * len(origin)
            byte, extent = self.start, self.itemsize
            for dim, offset, size in zip(dims, offsets, sizes, strict=True):
                start[dim] += offset
                shape[dim] = size
                byte += offset * self.strides[dim]
                extent += (size - 1) * self.strides[dim]
            target = tuple(slice(first, first + size) for first, size in zip(start, shape, strict=True))
            yield Span(
                self.file, byte, byte + extent, tuple(shape), self.strides, number, target, self._is_dense(shape)
            )

    def _is_dense(self, shape: Sequence[int]) -> bool:
        dense = (self.itemsize * step for step in c_strides(tuple(shape)))
        return all(size == 1 or step == own for size, step, own in zip(shape, dense, self.strides, strict=True))


class _Cut:
    """Cuts a box into boxes that are each read at once.

    Args:
        sizes: Elements per dim, from the dim with the largest stride to that with the smallest.
        strides: Bytes from one element to the next, per dim.
        itemsize: Bytes of an element.
    """

    def __init__(self, sizes: Sequence[int], strides: Sequence[int], itemsize: int) -> None:
        self._sizes = tuple(sizes)
        self._strides = tuple(strides)
        # Per dim, the bytes from the first to the last element of a box of this dim and those behind it.
        extents = [itemsize]
        for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
            extents.append(extents[-1] + (size - 1) * stride)
        self._extents = extents[::-1]

    def first_joined(self, max_gap: int) -> int:
        """Return the first dim from which on all gaps are at most ``max_gap`` bytes."""
        dim = len(self._sizes)
        while dim and self._strides[dim - 1] - self._extents[dim] <= max_gap:
            dim -= 1
        return dim

    def boxes(self, joined: int, max_nbytes: int, dim: int = 0) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Yield offset and shape of each box, of ``dim`` and the dims behind it.

        Args:
            joined: The first dim along which elements are read together.
            max_nbytes: Bound on the bytes of a box, with its gaps.
            dim: The first dim of the boxes.
        """
        inner = self._sizes[dim + 1 :]
        if dim >= joined and self._extents[dim] <= max(max_nbytes, self._extents[-1]):
            yield (0,) * len(self._sizes[dim:]), self._sizes[dim:]
        elif dim >= joined and self._extents[dim + 1] <= max_nbytes:
            rows = (max_nbytes - self._extents[dim + 1]) // self._strides[dim] + 1
            for start in range(0, self._sizes[dim], rows):
                yield (start, *[0] * len(inner)), (min(rows, self._sizes[dim] - start), *inner)
        else:
            for index in range(self._sizes[dim]):
                for offsets, sizes in self.boxes(joined, max_nbytes, dim + 1):
                    yield (index, *offsets), (1, *sizes)


@dataclass(frozen=True, slots=True, eq=False)
class PieceInfo(TensorInfo):
    """A tensor that is made of pieces, which count as its chunks.

    Args:
        tensor: The tensor.
        max_gap: As for `plan_spans`.
        max_nbytes: As for `plan_spans`.
    """

    tensor: PieceTensor
    max_gap: int
    max_nbytes: int

    @classmethod
    def of(cls, tensor: PieceTensor, *, max_gap: int, max_nbytes: int) -> PieceInfo:
        """Return the facts about a tensor."""
        return cls(
            name=tensor.name,
            shape=tensor.shape,
            dtype_name=tensor.dtype,
            stored_dtype_name=tensor.dtype,
            layout=tensor.layout,
            nbytes=tensor.nbytes,
            content_digest=tensor.content,
            tensor=tensor,
            max_gap=max_gap,
            max_nbytes=max_nbytes,
        )

    @property
    @override
    def chunks(self) -> list[ChunkInfo]:
        return [
            ChunkInfo(piece.region, f"{piece.file}@{piece.offset}", digest=None, client=None)
            for piece in self.tensor.pieces
        ]

    @property
    @override
    def codec(self) -> str:
        return NO_CODEC

    @property
    @override
    def num_chunks(self) -> int:
        return len(self.tensor.pieces)

    @property
    @override
    def is_whole(self) -> bool:
        return self.tensor.is_whole

    @property
    @override
    def max_chunk_nbytes(self) -> int:
        # A piece is read a span at a time.
        return min(self.tensor.nbytes, self.max_nbytes)

    @property
    def _largest(self) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Shape and strides of the largest piece; None if there are no pieces."""
        pieces = self.tensor.pieces
        if not pieces:
            return None
        if isinstance(pieces, RulePieces):
            return pieces.largest_shape, c_strides(pieces.largest_shape)
        largest = max(pieces, key=lambda piece: piece.region.numel)
        return largest.region.shape, largest.element_strides

    @property
    @override
    def chunk_shape(self) -> tuple[int, ...]:
        return tuple(max(1, size) for size in self.tensor.shape) if self._largest is None else self._largest[0]

    @property
    @override
    def block_shape(self) -> tuple[int, ...]:
        # Any range of bytes can be read.
        return (1,) * len(self.tensor.shape)

    @property
    @override
    def row_dim(self) -> int:
        # The dim with the largest stride.
        if self._largest is None:
            return 0
        shape, strides = self._largest
        return max(range(len(shape)), key=lambda dim: (shape[dim] > 1, strides[dim], -dim), default=0)

    @override
    def read_nbytes(self, region: Region) -> int:
        spans = plan_spans(self.tensor, [region], max_gap=self.max_gap, max_nbytes=self.max_nbytes)
        return sum(span.nbytes for span in spans)
