"""`Selection`: the elements that a slice such as ``[0:4, ..., -1]`` selects of a tensor; pure.

A selection is a `range` of indices per dim. Slicing a range gives a range, so selections can be cut like arrays::

    [1:8:3, ::-1] of shape (9, 4)        range(1, 8, 3), range(3, -1, -1)
    its region                           [1:8, 0:4]            the smallest box around it; this box is read
    its slices                           [::3, ::-1]           select it from that box
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dtckpt.errors import RegionError
from dtckpt.layout.region import Region

GAP_NBYTES = 64 << 10
"""Smaller gaps between selected elements are read, too: one more read would take longer."""
_INTEGER = re.compile(r"[+-]?\d{1,18}", re.ASCII)
_FORM = "expected what NumPy takes: integers, start:stop:step and '...', as in [0:4, ..., -1]"


@dataclass(frozen=True, slots=True)
class Selection:
    """Indices of a tensor per dim, as basic slices of NumPy select them.

    Args:
        ranges: The indices, per dim of the tensor.
        dropped: The dims that an integer selected: the result lacks them.
    """

    ranges: tuple[range, ...]
    dropped: frozenset[int] = frozenset()

    @classmethod
    def of(cls, region: Region) -> Selection:
        """Return the selection of all elements of a region."""
        return cls(tuple(map(range, region.offset, region.stop)))

    @classmethod
    def parse(cls, text: str, shape: Sequence[int]) -> Selection:
        """Parse a slice such as ``0:4, ..., -1``; indices below zero count from the end, as in NumPy.

        Raises:
            RegionError: The text is malformed, has more indices than the tensor has dims, or an integer is out of
                bounds.
        """
        items = [item.strip() for item in text.split(",")]
        if len(items) > 1 and not items[-1]:
            items.pop()  # as in NumPy, a comma may end it
        if items.count("...") > 1:
            raise RegionError(f"slice [{text}] cannot be used: '...' may be there once")
        num_dims = len(items) - items.count("...")
        if num_dims > len(shape):
            raise RegionError(
                f"slice [{text}] has too many indices; got {num_dims}, expected at most {len(shape)}, as the shape is "
                f"{tuple(shape)}"
            )
        at = items.index("...") if "..." in items else len(items)
        items[at : at + 1] = [":"] * (len(shape) - num_dims)
        ranges = tuple(_range(item, dim, shape[dim], text) for dim, item in enumerate(items))
        return cls(ranges, frozenset(dim for dim, item in enumerate(items) if ":" not in item))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the result."""
        return tuple(len(each) for dim, each in enumerate(self.ranges) if dim not in self.dropped)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(map(len, self.ranges))

    @property
    def region(self) -> Region:
        """The smallest box that holds all selected elements."""
        bounds = [(min(each[0], each[-1]), max(each[0], each[-1]) + 1) if each else (0, 0) for each in self.ranges]
        return Region(tuple(start for start, _ in bounds), tuple(stop - start for start, stop in bounds))

    @property
    def slices(self) -> tuple[slice, ...]:
        """The slices that select the elements from an array of `region`; no dim is dropped."""
        return tuple(slice(None, None, each.step) for each in self.ranges)

    def clip(self, region: Region) -> Selection:
        """Return the part of the selection that is in a region."""
        return Selection(tuple(map(_clip, self.ranges, region.offset, region.stop)), self.dropped)

    def pieces(
        self, shape: Sequence[int], itemsize: int, max_nbytes: int
    ) -> Iterator[tuple[tuple[slice, ...], Selection]]:
        """Cut the selection into pieces whose regions can be read, in row-major order of the result.

        Args:
            shape: The tensor's shape.
            itemsize: Bytes of an element.
            max_nbytes: Bound on the bytes of a piece's region; one element may be larger.

        Yields:
            The position of the piece in the result, with no dim dropped; and the piece. Its region has no gaps between
            selected elements that are as large as `GAP_NBYTES` on storage, if that is in row-major order.
        """
        gaps = [(abs(each.step) - 1) * itemsize * math.prod(shape[dim + 1 :]) for dim, each in enumerate(self.ranges)]
        sparse = [dim for dim, nbytes in enumerate(gaps) if nbytes >= GAP_NBYTES]
        return self._pieces(sparse, max_nbytes // itemsize, (0,) * len(self.ranges))

    def _pieces(
        self, sparse: Sequence[int], max_numel: int, at: tuple[int, ...]
    ) -> Iterator[tuple[tuple[slice, ...], Selection]]:
        if not self.numel:
            return
        is_fit = self.region.numel <= max_numel and all(len(self.ranges[dim]) == 1 for dim in sparse)
        dim = next((dim for dim, each in enumerate(self.ranges) if len(each) > 1), None)
        if is_fit or dim is None:
            yield tuple(slice(first, first + len(each)) for first, each in zip(at, self.ranges, strict=True)), self
            return
        half = len(self.ranges[dim]) // 2
        for part, start in ((slice(None, half), 0), (slice(half, None), half)):
            ranges = (*self.ranges[:dim], self.ranges[dim][part], *self.ranges[dim + 1 :])
            below = (*at[:dim], at[dim] + start, *at[dim + 1 :])
            yield from Selection(ranges)._pieces(sparse, max_numel, below)


def _range(item: str, dim: int, size: int, text: str) -> range:
    """Return the indices of one dim that an item of a slice selects."""
    bounds = [bound.strip() for bound in item.split(":")]
    is_sane = len(bounds) <= 3 and all(_INTEGER.fullmatch(bound) or (not bound and ":" in item) for bound in bounds)
    if not is_sane:
        raise RegionError(f"slice [{text}] cannot be used; got {item!r} for dim {dim}, {_FORM}")
    numbers = [int(bound) if bound else None for bound in bounds]
    if ":" in item:
        if numbers[2:] == [0]:
            raise RegionError(f"slice [{text}] cannot be used: the step of dim {dim} is zero")
        return range(size)[slice(*numbers)]
    index = int(item)
    if not -size <= index < size:
        raise RegionError(f"slice [{text}] cannot be used: index {index} is out of bounds for dim {dim} of size {size}")
    index %= size
    return range(index, index + 1)


def _clip(indices: range, start: int, stop: int) -> range:
    """Return the indices that are at least ``start`` and less than ``stop``, in their order."""
    if indices.step < 0:
        return _clip(indices[::-1], start, stop)[::-1]
    # How many indices are below each bound, rounded up.
    first, end = (max(0, -(-(bound - indices.start) // indices.step)) for bound in (start, stop))
    return indices[first:end]
