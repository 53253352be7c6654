"""`HeldBoxes`: which boxes of which content some memory holds, as reads of former versions left it there.

A box is not read again if the new version has the same content there. Digests are compared, not numbers, so neither a
skipped version nor a publisher that began anew can be mistaken for another.

::

    read of version 1   writes the memory             notes    w [0:4, 0:8] = a1    w [4:8, 0:8] = b1
    read of version 2   b1 is the digest of version 2, too: not read, noted again
                        a1 is not: forgotten, read, verified, and noted as a2

If a read fails, the boxes that it forgot and did not note again stay forgotten. Notes live from one read to the next
one, so no note outlives a read that wrote the memory as other boxes.

Clients that read tensors together must agree which of them they hold. So the content of whole tensors is noted, too,
when all of a version was read: it is the same on all clients, whichever boxes they hold.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from dtckpt.layout.region import Region


@dataclass(frozen=True, slots=True)
class BoxContent:
    """The identity of the content of a box.

    Args:
        tensor: Name of the tensor.
        region: The box.
        dtype: The stored dtype: equal bits of two dtypes are other numbers.
        digest: Its digest; None: it has none.
        piece: The piece that contains the box.
        piece_digest: Digest of the piece.
    """

    tensor: str
    region: Region
    dtype: str
    digest: int | None
    piece: Region
    piece_digest: int

    def is_same_box(self, other: BoxContent) -> bool:
        """Whether two boxes are of the same tensor and region, stored alike."""
        return (self.tensor, self.region, self.dtype) == (other.tensor, other.region, other.dtype)

    def equals(self, other: BoxContent) -> bool:
        """Whether two boxes are of the same tensor and region, and have the same elements for certain."""
        if not self.is_same_box(other):
            return False
        if self.digest is not None and self.digest == other.digest:
            return True
        return (self.piece, self.piece_digest) == (other.piece, other.piece_digest)


class HeldBoxes:
    """The boxes that memory holds.

    Args:
        is_private: Tells of an address whether only reads that note it write the memory there, and it lives as long as
            this object. Boxes in other memory count only after their digests are computed again and found equal.
            Default: no memory is private.

    Attributes:
        tensors: Digests of whole tensors of the version that was read last, if it was read whole to private memory.
    """

    def __init__(self, is_private: Callable[[int], bool] | None = None) -> None:
        self._is_private = is_private
        self._before: dict[Any, BoxContent] = {}
        self._now: dict[Any, BoxContent] = {}
        self.tensors: Mapping[str, int] = {}

    def begin(self) -> None:
        """Begin a read, which knows the notes of the last read. A note goes unless this read notes it again."""
        self._before, self._now = self._now, {}
        self.tensors = {}

    def take(self, memory: np.ndarray[Any, Any]) -> BoxContent | None:
        """Return the box that some memory holds, and forget it."""
        return self._before.pop(_place(memory), None)

    def note(self, memory: np.ndarray[Any, Any], content: BoxContent) -> None:
        """Note what some memory holds: it was verified."""
        # Beside private memory there is scratch memory, whose addresses may be private memory's later.
        if self._is_private is None or self.is_private(memory):
            self._now[_place(memory)] = content

    def note_whole(self, tensors: Mapping[str, int]) -> None:
        """Note the digests of whole tensors of a version that was read whole."""
        if self._is_private is not None:
            self.tensors = tensors

    def is_private(self, memory: np.ndarray[Any, Any]) -> bool:
        """Whether memory is private."""
        return self._is_private is not None and self._is_private(memory.ctypes.data)

    def has(self, memory: np.ndarray[Any, Any], content: BoxContent) -> bool:
        """Whether the last read noted that private memory holds a box."""
        noted = self._now.get(_place(memory))
        return noted is not None and noted.equals(content) and self.is_private(memory)

    def clear(self) -> None:
        """Forget everything."""
        self._before, self._now, self.tensors = {}, {}, {}


def _place(memory: np.ndarray[Any, Any]) -> tuple[Any, ...]:
    return memory.ctypes.data, memory.shape, memory.strides, memory.dtype
