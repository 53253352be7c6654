"""`CheckpointFiles`: the seam between an open checkpoint and the format of its files.

`dtckpt.checkpoint.reading.manifest_files` implements it for this library's format, and
`dtckpt.checkpoint.foreign.piece_files` for the formats of other libraries. Restores, resharding, inspection,
verification and conversion know the seam only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from dtckpt.checkpoint.reading.tensor_info import TensorInfo
from dtckpt.errors import DtckptError
from dtckpt.format import tree as trees
from dtckpt.layout.region import Region

RegionBuffers = Sequence[tuple[Region, np.ndarray[Any, Any]]]
"""Regions of a tensor, each with the buffer that it is read into, an array of its shape."""


class CheckpointFiles(Protocol):
    """The files of a checkpoint: which tensors they hold, and reads of any region of these. Thread-safe."""

    kind: str
    """The format: ``dtckpt``, or the kind of a `dtckpt.checkpoint.reading.pieces.PieceIndex`."""
    identity: str
    """A token that clients compare: equal if and only if they opened the same checkpoint."""
    tensors: Mapping[str, TensorInfo]
    """The tensors, by name."""
    refused: Mapping[str, DtckptError]
    """By path, why something in the checkpoint cannot be read. Such a path is neither a tensor nor in the structure."""
    files: Sequence[str]
    """The files of another library that it is read from; empty for checkpoints of this library."""
    unread: Sequence[str]
    """Files beside these that are not read, and notes in these that are not read; as far as they can be listed."""
    notes: Sequence[str] = ()
    """Notes for the reader about tensors that dtckpt keeps as they are stored."""

    @property
    def structure(self) -> trees.Node:
        """The structure of the state tree and its plain values, which must not be changed."""
        ...

    @property
    def tree(self) -> bytes:
        """The structure as JSON; empty for a flat set of named tensors."""
        ...

    @property
    def has_digests(self) -> bool:
        """Whether reads compare elements with digests."""
        ...

    def fingerprint(self) -> bytes:
        """Return bytes that differ between checkpoints of different content."""
        ...

    def read(
        self,
        requests: Iterable[tuple[str, RegionBuffers]],
        max_in_flight: int | None,
        count: Callable[[int], object],
    ) -> int:
        """Read regions of tensors of known names, as `Checkpoint.read_all` does."""
        ...

    def validate_stored(self, regions: Iterable[tuple[str, Region]], unchecked: int) -> None:
        """Check that the files are long enough for regions of tensors, before memory for the regions is taken.

        Otherwise a damaged or hostile description could ask for any amount of memory.

        Args:
            regions: The regions, each with the name of its tensor.
            unchecked: The smallest regions are not checked, up to so many bytes together.

        Raises:
            RegionNotFoundError: A region was not saved.
            CheckpointCorruptError: A file is missing or too short.
            StorageError: Storage refused.
        """
        ...

    def parts(self, name: str) -> Iterator[Region]:
        """Yield boxes that together cover the saved elements of a tensor; each is verified by itself."""
        ...

    def validate_part(self, name: str, region: Region) -> None:
        """Check the rest of one of `parts`, which a read of it leaves unchecked. Raises: as `read`."""
        ...

    def validate_rest(self) -> None:
        """Check the files that no read of a tensor looks at. Raises: as `read`."""
        ...

    def tied(self) -> Mapping[str, str]:
        """Return, for each tensor that is made of the same bytes as an earlier one in the tree, the first such one."""
        ...

    def close(self) -> None:
        """Close the files that reading holds open."""
        ...
