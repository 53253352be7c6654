"""Regions: half-open boxes of global tensor indices, with intersection and difference."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dtckpt.errors import RegionError

_INTERVAL = re.compile(r"\s*([0-9]+)\s*:\s*([0-9]+)\s*")


@dataclass(frozen=True, slots=True)
class Region:
    """A half-open box of global indices: ``offset[d] <= index[d] < offset[d] + shape[d]`` in every dim ``d``.

    A region of rank 0 holds the one element of a scalar. A region with a zero in its shape holds none.

    Raises:
        RegionError: Offset and shape differ in length, or a number is negative or not an integer.

    >>> Region((0, 4), (2, 4)).intersect(Region((1, 0), (4, 5)))
    Region(offset=(1, 4), shape=(1, 1))
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        offset, shape = _integers("offset", self.offset), _integers("shape", self.shape)
        if len(offset) != len(shape):
            raise RegionError(
                f"region: offset and shape must have one number per dim each; got offset {offset}, shape {shape}"
            )
        if min(offset, default=0) < 0 or min(shape, default=0) < 0:
            raise RegionError(f"region: got offset {offset}, shape {shape}; expected numbers that are zero or greater")
        object.__setattr__(self, "offset", offset)
        object.__setattr__(self, "shape", shape)

    @classmethod
    def unchecked(cls, offset: tuple[int, ...], shape: tuple[int, ...]) -> Region:
        """Return a region without checking its numbers, which must be valid. The checks take most of the time."""
        region = object.__new__(cls)
        object.__setattr__(region, "offset", offset)
        object.__setattr__(region, "shape", shape)
        return region

    @classmethod
    def full(cls, shape: Sequence[int]) -> Region:
        """Return the region of a whole tensor of this shape."""
        return cls((0,) * len(shape), tuple(shape))

    @classmethod
    def parse(cls, text: str) -> Region:
        """Read the form that `str` writes, such as ``"[0:2, 3:5]"``."""
        inner = text.strip()
        if not (inner.startswith("[") and inner.endswith("]")):
            raise RegionError(f"region: got {text!r}, expected a form such as '[0:2, 3:5]'")
        intervals = [_INTERVAL.fullmatch(item) for item in inner[1:-1].split(",")] if inner[1:-1].strip() else []
        bounds = [(int(match[1]), int(match[2])) for match in intervals if match]
        if len(bounds) != len(intervals) or any(stop < start for start, stop in bounds):
            raise RegionError(f"region: got {text!r}, expected 'start:stop' with start <= stop for every dim")
        return cls(tuple(start for start, _ in bounds), tuple(stop - start for start, stop in bounds))

    def __str__(self) -> str:
        return f"[{', '.join(f'{start}:{stop}' for start, stop in zip(self.offset, self.stop, strict=True))}]"

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def is_empty(self) -> bool:
        return 0 in self.shape

    @property
    def stop(self) -> tuple[int, ...]:
        """The first index after the region, in every dim."""
        return tuple(map(operator.add, self.offset, self.shape))

    def slices(self) -> tuple[slice, ...]:
        """Return the slices that select this region from the whole tensor."""
        return tuple(map(slice, self.offset, self.stop))

    def intersect(self, other: Region) -> Region | None:
        """Return the region that both regions share, None if they share no element."""
        self._require_same_rank(other)
        start = tuple(map(max, self.offset, other.offset))
        shape = tuple(map(operator.sub, map(min, self.stop, other.stop), start))
        return Region.unchecked(start, shape) if min(shape, default=1) > 0 else None

    def contains(self, other: Region) -> bool:
        """Tell whether every element of the other region is in this region; an empty region is in every region."""
        return other.is_empty or self.intersect(other) == other

    def subtract(self, other: Region) -> list[Region]:
        """Return disjoint regions that together hold the elements of this region outside of the other region."""
        common = self.intersect(other)
        if common is None:
            return [] if self.is_empty else [self]
        # Dim by dim, cut off the slabs before and after the common box; the rest shrinks towards that box.
        pieces: list[Region] = []
        offset, shape = list(self.offset), list(self.shape)
        for dim in range(self.ndim):
            lo, hi, stop = common.offset[dim], common.stop[dim], offset[dim] + shape[dim]
            for piece_start, piece_stop in ((offset[dim], lo), (hi, stop)):
                if piece_start < piece_stop:
                    offset[dim], shape[dim] = piece_start, piece_stop - piece_start
                    pieces.append(Region(tuple(offset), tuple(shape)))
            offset[dim], shape[dim] = lo, hi - lo
        return pieces

    def translate(self, by: Sequence[int]) -> Region:
        """Return this region moved by one number per dim, which may be negative."""
        if len(by) != self.ndim:
            raise RegionError(f"region {self}: cannot move by {tuple(by)}; expected {self.ndim} numbers")
        return Region(tuple(map(operator.add, self.offset, by)), self.shape)

    def relative_to(self, origin: Region) -> Region:
        """Return this region with offsets counted from the first index of another region."""
        self._require_same_rank(origin)
        offset = tuple(map(operator.sub, self.offset, origin.offset))
        return Region.unchecked(offset, self.shape) if min(offset, default=0) >= 0 else Region(offset, self.shape)

    def _require_same_rank(self, other: Region) -> None:
        if self.ndim != other.ndim:
            raise RegionError(
                f"region {self} has rank {self.ndim}, region {other} has rank {other.ndim}; expected equal"
            )


def _integers(what: str, numbers: Iterable[int]) -> tuple[int, ...]:
    try:
        return tuple(map(operator.index, numbers))
    except TypeError:
        raise RegionError(f"region: got {what} {numbers!r}, expected a sequence of integers") from None
