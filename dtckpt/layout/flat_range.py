"""A range of a tensor's elements in C order as boxes; pure.

Trainers that flatten parameters cut them anywhere. Such a range of an n-d tensor is rows that begin in the middle,
whole rows, and rows that end in the middle; and so on in every dim::

    shape (4, 6), elements 3 to 20       . . . # # #      row 0, columns 3:6
                                         # # # # # #      rows 1:3
                                         # # # # # #
                                         # # . . . .      row 3, columns 0:2
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from dtckpt.layout.region import Region


def flat_boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[Region]:
    """Yield the boxes of a range of elements in C order, in this order: at most ``2 * rank - 1``, at least one.

    Every box is dense in the range: its elements follow each other, and the next box follows the last of them.

    Args:
        shape: The tensor's shape.
        start: The first element.
        stop: The element behind the last. An empty range has no boxes.

    Raises:
        ValueError: The range is not inside the tensor.

    >>> [str(box) for box in flat_boxes((4, 6), 3, 20)]
    ['[0:1, 3:6]', '[1:3, 0:6]', '[3:4, 0:2]']
    """
    shape = tuple(shape)
    if not 0 <= start <= stop <= math.prod(shape):
        raise ValueError(f"elements {start} to {stop} are not inside shape {shape}")
    steps = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    while start < stop:
        # The outermost dim of which whole slices begin here, and fit.
        dim = next((dim for dim, step in enumerate(steps) if start % step == 0 and step <= stop - start), 0)
        offset = tuple(start // step % size for step, size in zip(steps, shape, strict=True))
        sizes = [1] * dim + list(shape[dim:])
        if shape:
            sizes[dim] = min((stop - start) // steps[dim], shape[dim] - offset[dim])
        box = Region(offset, tuple(sizes))
        yield box
        start += box.numel
