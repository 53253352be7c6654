"""`LentMemory`: the elements of a part in the tensors of their owner, and not in a file.

Each piece has the offset that it would have in a file with one dense piece after the other. So readers see the same
index, whether the elements were copied or not. When the loan ends, the owner may change the memory. From then on
nothing is read there. A read that is under way may bring changed bytes, so a digest must be compared after it, with
the bytes that arrived: see `verified_elements` and `dtckpt.checkpoint.parts.peers`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dtckpt.checkpoint.reading.pieces import c_strides
from dtckpt.checkpoint.saving.staging import ALIGNMENT

ENDED = "the version was in the memory of its publisher's training, which goes on; take a newer version"


class LentMemory:
    """The elements of the pieces of one part. Thread-safe once all pieces are placed.

    Attributes:
        nbytes: Bytes of a file that had the pieces.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self._elements: dict[int, np.ndarray[Any, Any]] = {}

    @property
    def view(self) -> LentMemory:
        """The memory, as readers take it; see `PartFile.view`."""
        return self

    def place(self, elements: np.ndarray[Any, Any]) -> tuple[int, tuple[int, ...]]:
        """Add a piece; return its offset, and the steps between its elements in a file. See `PartFile.place`."""
        offset = self.nbytes
        self._elements[offset] = elements
        self.nbytes += -(-elements.nbytes // ALIGNMENT) * ALIGNMENT
        return offset, c_strides(elements.shape)

    def elements(self, offset: int) -> np.ndarray[Any, Any]:
        """Return a view of the elements of a piece. Raises: FileNotFoundError: The loan has ended."""
        elements = self._elements.get(offset)
        if elements is None:
            raise FileNotFoundError(ENDED)
        return elements

    def end(self) -> None:
        """Let go of the memory: its owner may change it now."""
        self._elements = {}
