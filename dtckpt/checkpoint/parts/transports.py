"""`PartTransport`: how the parts of a save get from one source into a reader's memory.

* mapped: the source is on this host. Its memory is mapped, and copied from (`MappedFolder`).
* http: the server of the source sends boxes, by TLS if there is a certificate (`Peer`).
* nixl: the reader takes boxes from the memory of the source by NIXL. The server sends the other boxes (`NixlReads`).

``tests/checkpoint/parts/test_transports.py`` has the contract.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from dtckpt.checkpoint.parts.records import SaveId
from dtckpt.checkpoint.reading.read_chunks import convert
from dtckpt.format.digest import as_bytes
from dtckpt.layout.region import Region


@dataclass(frozen=True, slots=True, eq=False)
class BoxRequest:
    """A box of a piece that is to be read.

    Args:
        number: Number of the piece in its part.
        box: The box, in elements of the piece.
        target: Memory of its shape, of any strides; of another dtype, if elements are to be converted.
        dtype: The stored dtype.
        seed: If the box has a digest in the index: the seed of it, and
        digest: the digest.
        base: If it has one, and the target holds the box as it is in another save: its digest there. Then the source
            may send the changes.
    """

    number: int
    box: Region
    target: np.ndarray[Any, Any]
    dtype: np.dtype[Any]
    seed: int | None = None
    digest: int = 0
    base: int | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the stored elements."""
        return self.box.numel * self.dtype.itemsize

    @property
    def is_direct(self) -> bool:
        """Whether bytes go to the target without a conversion."""
        return self.target.dtype == self.dtype and self.target.flags.c_contiguous

    @contextmanager
    def memory(self) -> Iterator[memoryview]:
        """Yield memory for the stored elements: the target's own, or memory whose elements are converted at the end."""
        if self.is_direct:
            yield as_bytes(self.target).data
            return
        elements = np.empty(self.box.shape, self.dtype) if self.base is None else self.target.copy()
        yield as_bytes(elements).data
        convert(elements, self.target)


class PartTransport(Protocol):
    """The way to the parts of one source. Thread-safe.

    * After `read`, every box is in its target. A box with a digest was compared with it there. A box without a digest
      was verified by the source before it left, and a digest protected it on its way.
    * When `read` has returned or raised, nothing writes to a target any more. After a failure, targets have any
      elements.
    * No call waits for ever. `StorageError`: the source does not answer, or refuses. `CheckpointCorruptError`: the
      part is damaged or gone. Both name the host.

    Attributes:
        kind: Its name.
        host: Name of the source's host.
    """

    kind: str
    host: str

    def index_file(self, save: SaveId, client: int) -> bytes:
        """Return the index file of a client's part, as the source has it."""

    def read(self, save: SaveId, client: int, boxes: Sequence[BoxRequest]) -> int:
        """Read boxes of a client's part into their targets.

        Returns:
            The bytes of elements and changes that came from the source.
        """

    def close(self) -> None:
        """Let go of the source, which may be read again."""
