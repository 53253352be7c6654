"""Tensors that lie as ranges in flat vectors, as trainers that flatten parameters store them; pure.

DeepSpeed's ZeRO and FSDP1 join parameters to one vector, and cut the vector in parts, one for each process::

    parameters     | w, shape (4, 3)       | b, (2) |pad|
    vector         0 1 2 3 4 5 6 7 8 9 10 11 12 13  -  -
    parts          |   rank 0       |  rank 1           |     rank 0: w[0:2], w[2:3, 0:2]; rank 1: the rest
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from dtckpt.checkpoint.foreign.pickle_syntax import TENSOR_NBYTES, ReadBudget
from dtckpt.checkpoint.reading.pieces import Piece, PieceTensor, c_strides
from dtckpt.errors import CheckpointCorruptError
from dtckpt.format.dtypes import DTYPES
from dtckpt.layout.flat_range import flat_boxes


@dataclass(frozen=True, slots=True)
class FlatRange:
    """Elements of a tensor that follow each other in a vector.

    Args:
        vector: The vector: a whole tensor of one dim.
        first: The first of the elements in the vector.
        start: The first of the elements in the tensor, in C order.
        stop: The element behind the last in the tensor.
    """

    vector: PieceTensor
    first: int
    start: int
    stop: int

    def pieces(self, shape: tuple[int, ...]) -> Iterator[Piece]:
        """Yield the pieces of the tensor, which has this shape.

        Raises:
            CheckpointCorruptError: The vector is too short, or no vector.
        """
        numel, length = math.prod(self.vector.shape), self.stop - self.start
        if len(self.vector.shape) != 1 or not 0 <= self.first <= self.first + length <= numel:
            raise CheckpointCorruptError(
                f"{self.vector.name} has shape {self.vector.shape}, expected a vector with elements {self.first} to "
                f"{self.first + length}"
            )
        if not length:
            return
        (source,) = self.vector.pieces
        if source.element_strides != c_strides(self.vector.shape):
            raise CheckpointCorruptError(f"{self.vector.name} has gaps between its elements")
        itemsize = DTYPES[self.vector.dtype].itemsize
        position = self.first
        for box in flat_boxes(shape, self.start, self.stop):
            yield Piece(box, source.file, source.offset + position * itemsize, checked=source.checked)
            position += box.numel


def tensor_of_ranges(
    name: str, shape: tuple[int, ...], dtype: str, ranges: Iterable[FlatRange], budget: ReadBudget
) -> PieceTensor:
    """Return the tensor that lies in ranges of vectors.

    Args:
        name: Its name.
        shape: Its shape.
        dtype: Its dtype.
        ranges: The ranges.
        budget: Bounds the pieces.

    Raises:
        CheckpointCorruptError: A vector is too short or of another dtype, or the ranges do not make up the tensor.
    """
    budget.take(TENSOR_NBYTES)
    pieces = []
    for each in ranges:
        if each.vector.dtype != dtype:
            raise CheckpointCorruptError(f"{each.vector.name} is {each.vector.dtype}, expected {dtype} for {name!r}")
        for piece in each.pieces(shape):
            budget.take(TENSOR_NBYTES)
            pieces.append(piece)
    tensor = PieceTensor(name, shape, dtype, tuple(pieces))
    if not tensor.is_whole:
        raise CheckpointCorruptError(f"the files lack elements of {name[:200]!r}, of shape {shape}")
    return tensor
