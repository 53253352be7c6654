"""`RegionIndex`: many regions of one tensor, to find those that share elements with another one, or with each other.

Sharded tensors have up to tens of thousands of regions, so no question may compare each with each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Any

import numpy as np

from dtckpt.layout.region import Region

Positions = np.ndarray[Any, np.dtype[np.int64]]

FEW = 8
"""Regions up to which to compare each with each is fastest."""
MAX_SORTED = 64
"""How often `RegionIndex.clash` may sort a region, on average, before it compares the rest in pairs."""
_COMPARED = 1 << 20
"""Pairs of regions that are compared in one call."""


class RegionIndex:
    """An index of regions, none of which is empty.

    Args:
        regions: The regions, of one rank, with numbers of 63 bits.
    """

    def __init__(self, regions: Sequence[Region]) -> None:
        self._regions = tuple(regions)
        self._is_few = len(regions) <= FEW
        if self._is_few:
            return
        shape = len(regions), regions[0].ndim
        self._starts = np.array([region.offset for region in regions], np.int64).reshape(shape)
        self._stops = np.array([region.stop for region in regions], np.int64).reshape(shape)
        everything = np.arange(shape[0])
        # By the dim in which the regions begin at the most places, so that a search is left with the fewest.
        self._dim = max(range(shape[1]), key=lambda dim: len(np.unique(self._starts[:, dim])), default=None)
        self._order = everything if self._dim is None else np.argsort(self._starts[:, self._dim], kind="stable")
        if self._dim is not None:
            self._sorted_starts = self._starts[self._order, self._dim]
            self._reach = np.maximum.accumulate(self._stops[self._order, self._dim])

    def meeting(self, region: Region) -> list[int]:
        """Return the positions of the regions that share an element with a region, ascending."""
        if self._is_few:
            return [position for position, each in enumerate(self._regions) if each.intersect(region) is not None]
        if region.is_empty:
            return []
        if self._dim is None:
            return list(range(len(self._regions)))
        start, stop = region.offset[self._dim], region.stop[self._dim]
        first = np.searchsorted(self._reach, start, "right")
        near = self._order[first : np.searchsorted(self._sorted_starts, stop, "left")]
        meets = (self._starts[near] < np.array(region.stop)) & (self._stops[near] > np.array(region.offset))
        return sorted(near[meets.all(axis=1)].tolist())

    def clash(self) -> tuple[int, int] | None:
        """Return the positions of two regions that share an element; None if no two do.

        Regions that a plane separates need not be compared::

            |  a  | b | c |         the planes in one dim part a from {b, d} from {c, e},
            |     | d | e |         and those in the other dim part b from d, c from e
        """
        if self._is_few:
            pairs = combinations(range(len(self._regions)), 2)
            return next(
                (pair for pair in pairs if self._regions[pair[0]].intersect(self._regions[pair[1]]) is not None), None
            )
        budget, groups = MAX_SORTED * len(self._order), [self._order]
        while groups:
            group = groups.pop()
            budget -= len(group) * self._starts.shape[1]
            parts = max((self._parts(group, dim) for dim in range(self._starts.shape[1])), key=len, default=[group])
            if len(parts) > 1 and budget > 0:
                groups += [part for part in parts if len(part) > 1]
            elif (found := self._compare(group)) is not None:
                return found
        return None

    def _parts(self, group: Positions, dim: int) -> list[Positions]:
        """Cut a group at all places of a dim that no region of it crosses."""
        group = group[np.argsort(self._starts[group, dim], kind="stable")]
        reach = np.maximum.accumulate(self._stops[group, dim])
        return np.split(group, np.flatnonzero(self._starts[group[1:], dim] >= reach[:-1]) + 1)

    def _compare(self, group: Positions) -> tuple[int, int] | None:
        for rows in _blocks(len(group)):
            one, meet = group[rows], np.ones((rows.stop - rows.start, len(group)), np.bool_)
            for starts, stops in zip(self._starts.T, self._stops.T, strict=True):
                meet &= (starts[one, None] < stops[group]) & (starts[group] < stops[one, None])
            meet[np.arange(len(one)), np.arange(rows.start, rows.stop)] = False  # itself
            if meet.any():
                first, second = np.argwhere(meet)[0].tolist()
                return int(one[first]), int(group[second])
        return None


def _blocks(count: int) -> Iterator[slice]:
    step = max(1, _COMPARED // count)
    return (slice(start, min(start + step, count)) for start in range(0, count, step))
