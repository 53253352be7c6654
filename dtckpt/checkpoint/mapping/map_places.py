"""Where tensors lie in the array of a rule's axes, and which boxes of one are which boxes of another; pure.

A rule names axes. Each of its tensors is a box of the array of all axes, with some axes joined to one dim::

    linear_qkv   "layers (groups each dim) hidden"       all of it
    q_proj       "(groups each[:-2] dim) hidden"         one layer, and of each group all but the last two

A box of one tensor then lies in several boxes of the other, in other places and maybe with other strides. A read fills
views of the caller's memory with them, so that it needs no memory for itself.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dtckpt.layout.flat_range import flat_boxes
from dtckpt.layout.region import Region

Box = Mapping[str, tuple[int, int]]
"""By axis, the first index and the index behind the last."""


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a tensor.

    Args:
        dims: The axes that each dim of the tensor joins, outermost first.
        box: The box that it is of the array of all axes.
    """

    dims: tuple[tuple[str, ...], ...]
    box: Box

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's shape."""
        return tuple(math.prod(self.extents(axes)) for axes in self.dims)

    def extents(self, axes: Sequence[str]) -> tuple[int, ...]:
        """Return the sizes of the box along axes."""
        return tuple(stop - start for start, stop in map(self.box.__getitem__, axes))

    def flat(self, axes: Sequence[str], box: Box) -> tuple[int, int]:
        """Return the first index of a box in a dim, and the number of its indices, which follow each other."""
        start, step = 0, 1
        for axis, size in zip(reversed(axes), reversed(self.extents(axes)), strict=True):
            start += (box[axis][0] - self.box[axis][0]) * step
            step *= size
        return start, math.prod(box[axis][1] - box[axis][0] for axis in axes)


def common_box(one: Box, other: Box) -> Box | None:
    """Return the box that two boxes share; None if they share no element."""
    box = {axis: (max(one[axis][0], other[axis][0]), min(one[axis][1], other[axis][1])) for axis in one}
    return None if any(start >= stop for start, stop in box.values()) else box


def numel_of(box: Box) -> int:
    """Return the number of elements of a box."""
    return math.prod(stop - start for start, stop in box.values())


@dataclass(frozen=True, slots=True)
class SharedBox:
    """A box of a tensor of the source, and its place in a region of a tensor of the target.

    Args:
        region: The box in the source's tensor.
        slices: The box in the region.
        sizes: The sizes of the axes in the box of the target, in its order.
        order: The axes in the order of the source, as positions in ``sizes``.
    """

    region: Region
    slices: tuple[slice, ...]
    sizes: tuple[int, ...]
    order: tuple[int, ...]

    def view(self, memory: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return the view of a region's memory that has the box's shape in the source."""
        # No step copies: the last one joins dims that the first one has cut.
        part: np.ndarray[Any, Any] = memory[self.slices] if self.slices else memory
        return part.reshape(self.sizes).transpose(self.order).reshape(self.region.shape)


def shared_boxes(target: Place, source: Place, region: Region) -> Iterator[SharedBox]:
    """Yield the boxes of a source's tensor that lie in a region of a target's tensor.

    Args:
        target: The target's tensor.
        source: The source's tensor.
        region: The region of the target's tensor.
    """
    whole = common_box(target.box, source.box)
    if whole is None or region.is_empty:
        return
    cuts = [
        [
            {
                axis: (target.box[axis][0] + start, target.box[axis][0] + stop)
                for axis, start, stop in zip(axes, box.offset, box.stop, strict=True)
            }
            for box in flat_boxes(target.extents(axes), start, stop)
        ]
        for axes, start, stop in zip(target.dims, region.offset, region.stop, strict=True)
    ]
    for parts in itertools.product(*cuts):
        box = common_box(whole, dict(whole) | {axis: span for part in parts for axis, span in part.items()})
        if box is not None:
            yield from _dense_boxes(target, source, region, box)


def _dense_boxes(target: Place, source: Place, region: Region, box: Box) -> Iterator[SharedBox]:
    """Cut a box into boxes that are boxes in both tensors."""
    single = _single_axes(target, source, box)
    for indices in itertools.product(*(range(*box[axis]) for axis in single)):
        part = dict(box) | {axis: (index, index + 1) for axis, index in zip(single, indices, strict=True)}
        here = [axis for axes in target.dims for axis in axes if part[axis][1] - part[axis][0] > 1]
        there = [axis for axes in source.dims for axis in axes if axis in here]
        spans = [target.flat(axes, part) for axes in target.dims]
        starts = [start - first for (start, _), first in zip(spans, region.offset, strict=True)]
        places = [source.flat(axes, part) for axes in source.dims]
        yield SharedBox(
            Region(tuple(start for start, _ in places), tuple(size for _, size in places)),
            tuple(slice(start, start + size) for start, (_, size) in zip(starts, spans, strict=True)),
            tuple(part[axis][1] - part[axis][0] for axis in here),
            tuple(map(here.index, there)),
        )


def _single_axes(target: Place, source: Place, box: Box) -> list[str]:
    """Return the axes along which a box must be cut into single indices, so that the parts are boxes in both tensors.

    In a dim, the indices of a box follow each other if all axes behind the first one are whole. And axes that a dim of
    the source joins must be neighbours in the target, or a view could not join them.
    """
    single: list[str] = []

    def wide(axes: Sequence[str]) -> list[str]:
        return [axis for axis in axes if axis not in single and box[axis][1] - box[axis][0] > 1]

    def is_dense(place: Place, axes: Sequence[str]) -> bool:
        first = axes.index(wide(axes)[0])
        return all(
            place.box[axis][1] - place.box[axis][0] == 1 or (axis not in single and box[axis] == place.box[axis])
            for axis in axes[first + 1 :]
        )

    def is_joined(axes: Sequence[str]) -> bool:
        wanted = wide(axes)
        return any(
            wanted == found[at : at + len(wanted)] for found in map(wide, target.dims) for at in range(len(found))
        )

    def offender() -> str | None:
        for place in (target, source):
            for axes in place.dims:
                if (own := wide(axes)) and not (is_dense(place, axes) and (place is target or is_joined(axes))):
                    return own[0]
        return None

    while (axis := offender()) is not None:
        single.append(axis)
    return single
