"""Tensors stored as ranges of flat vectors, as trainers that flatten parameters store them; pure.

DeepSpeed's ZeRO and FSDP1 join parameters to one vector, and cut the vector in parts, one for each process::

    parameters     | w, shape (4, 3)       | b, (2) |pad|
    vector         0 1 2 3 4 5 6 7 8 9 10 11 12 13  -  -
    parts          |   rank 0       |  rank 1           |     rank 0: w[0:2], w[2:3, 0:2]; rank 1: the rest

The vectors are checked once, and the ranges of a tensor follow from the rule. So a tensor's pieces are made only when a
client needs them (`dtckpt.checkpoint.reading.pieces.RulePieces`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from typing_extensions import override

from dtckpt.checkpoint.foreign.pickle_syntax import TENSOR_NBYTES, ReadBudget
from dtckpt.checkpoint.reading.pieces import Extent, Piece, PieceTensor, RulePieces, c_strides
from dtckpt.errors import CheckpointCorruptError
from dtckpt.layout.flat_range import flat_boxes


@dataclass(frozen=True, slots=True)
class FlatRange:
    """Elements of a tensor that follow each other in a vector.

    Args:
        vector: The vector: a whole tensor of one dim, one of `FlatVectors`.
        first: The first of the elements in the vector.
        start: The first of the elements in the tensor, in C order.
        stop: The element behind the last in the tensor.
    """

    vector: PieceTensor
    first: int
    start: int
    stop: int

    def pieces(self, shape: tuple[int, ...]) -> Iterator[Piece]:
        """Yield the pieces of the tensor, which has this shape."""
        if self.start == self.stop:
            return
        (source,) = self.vector.pieces
        itemsize, position = self.vector.itemsize, self.first
        for box in flat_boxes(shape, self.start, self.stop):
            yield Piece(box, source.file, source.offset + position * itemsize, checked=source.checked)
            position += box.numel


class FlatVectors:
    """The vectors of one kind of all processes, which are checked.

    Args:
        vectors: The vectors.
        dtype: The dtype that all have.

    Raises:
        CheckpointCorruptError: A tensor of them is no vector, has gaps between its elements, or has another dtype.
    """

    def __init__(self, vectors: Iterable[PieceTensor], dtype: str) -> None:
        self.dtype = dtype
        extents: list[Extent] = []
        for each in vectors:
            if each.dtype != dtype:
                raise CheckpointCorruptError(f"{each.name} is {each.dtype}, expected {dtype}")
            if len(each.shape) != 1:
                raise CheckpointCorruptError(f"{each.name} has shape {each.shape}, expected a vector")
            for piece in each.pieces:
                if piece.element_strides != c_strides(each.shape):
                    raise CheckpointCorruptError(f"{each.name} has gaps between its elements")
                extents.append((piece.file, piece.offset, piece.stop(each.itemsize)))
        self.extents = tuple(extents)


class FlatPieces(RulePieces):
    """The pieces of a tensor stored in ranges of vectors.

    Args:
        shape: The tensor's shape.
        boxes: Their number, and the shape of the largest, as `BoxCounts` counts them.
        ranges: Returns the ranges.
        vectors: The vectors.
        key: As in `RulePieces`.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        boxes: tuple[int, tuple[int, ...]],
        ranges: Callable[[], Iterable[FlatRange]],
        vectors: FlatVectors,
        key: object,
    ) -> None:
        self.extents = vectors.extents
        self.key = key
        self.dtype = vectors.dtype
        self._shape = shape
        self._count, self.largest_shape = boxes
        self._ranges = ranges

    @override
    def __len__(self) -> int:
        return self._count

    @override
    def __iter__(self) -> Iterator[Piece]:
        return (piece for each in self._ranges() for piece in each.pieces(self._shape))


class BoxCounts:
    """Counts the boxes that ranges of tensors are, without making them twice: layers of a model have the same.

    Args:
        budget: Bounds the boxes.
    """

    def __init__(self, budget: ReadBudget) -> None:
        self._budget = budget
        self._known: dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[int, tuple[int, ...]]] = {}

    def of(self, shape: tuple[int, ...], cuts: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
        """Return the number of boxes, and the shape of the largest.

        Args:
            shape: The tensor's shape.
            cuts: The elements, ascending, at which the ranges begin, and behind them the number of all elements.

        Raises:
            CheckpointCorruptError: The budget does not allow so many.
        """
        found = self._known.get((shape, cuts))
        if found is not None:
            self._budget.take(TENSOR_NBYTES * found[0])
            return found
        count, largest = 0, tuple(max(1, size) for size in shape)
        numel = 0
        for start, stop in pairwise(cuts):
            for box in flat_boxes(shape, start, stop):
                self._budget.take(TENSOR_NBYTES)
                count += 1
                if box.numel > numel:
                    largest, numel = box.shape, box.numel
        return self._known.setdefault((shape, cuts), (count, largest))


def tensor_of_ranges(
    name: str, shape: tuple[int, ...], ranges: Sequence[FlatRange], vectors: FlatVectors, counts: BoxCounts
) -> PieceTensor:
    """Return the tensor stored in ranges of vectors.

    Args:
        name: Its name.
        shape: Its shape.
        ranges: The ranges, in the order of the tensor's elements.
        vectors: The vectors.
        counts: Counts the pieces.

    Raises:
        CheckpointCorruptError: A vector is too short, or the ranges do not make up the tensor.
    """
    stop = 0
    for each in ranges:
        last = each.first + each.stop - each.start
        if not 0 <= each.first <= last <= each.vector.shape[0]:
            raise CheckpointCorruptError(
                f"{each.vector.name} has {each.vector.shape[0]} elements, expected {last} at least"
            )
        if each.start != stop:
            break
        stop = each.stop
    if stop != math.prod(shape):
        raise CheckpointCorruptError(f"the files lack elements of {name[:200]!r}, of shape {shape}")
    boxes = counts.of(shape, (*(each.start for each in ranges), stop))
    key = [(each.vector.name, each.first, each.start) for each in ranges]
    return PieceTensor(name, shape, vectors.dtype, FlatPieces(shape, boxes, lambda: ranges, vectors, key))
