"""Where a device is in the row-major order of a mesh: by its id (`DeviceOffsets`), and along every axis (`unravel`)."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt


def unravel(offset: int, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the position along every axis of the device at a row-major offset in a mesh of this shape."""
    coordinate: list[int] = []
    for size in reversed(shape):
        offset, index = divmod(offset, size)
        coordinate.append(index)
    return tuple(reversed(coordinate))


class DeviceOffsets:
    """The row-major offsets of devices by their ids, which mostly count up by one.

    Args:
        ids: The ids in row-major order, each once.
    """

    def __init__(self, ids: Sequence[int]) -> None:
        self._ids = ids

    @cached_property
    def are_consecutive(self) -> bool:
        """Whether the ids count up by one."""
        return not self._ids or tuple(self._ids) == tuple(range(self._ids[0], self._ids[0] + len(self._ids)))

    @cached_property
    def lowest(self) -> int:
        """The lowest id; there must be one."""
        return min(self._ids)

    @cached_property
    def _by_id(self) -> dict[int, int]:
        return {device_id: offset for offset, device_id in enumerate(self._ids)}

    @cached_property
    def _ascending(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The ids in ascending order, and their offsets."""
        ids = np.array(self._ids, dtype=np.int64)
        order = ids.argsort()
        return ids[order], order

    def of(self, device_id: int) -> int | None:
        """Return the offset of a device, None if there is no such id."""
        if not self.are_consecutive:
            return self._by_id.get(operator.index(device_id))
        offset = operator.index(device_id) - self._ids[0] if self._ids else -1
        return offset if 0 <= offset < len(self._ids) else None

    def of_all(self, device_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the offsets of an array of ids, all of which exist, in its shape."""
        if self.are_consecutive:
            return device_ids - self._ids[0]
        ids, offsets = self._ascending
        return offsets[ids.searchsorted(device_ids)]
