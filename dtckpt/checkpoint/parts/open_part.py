"""`OpenPart`: a part on this host, open for reading; every piece is verified when it is first looked at."""

from __future__ import annotations

from typing import Any

import numpy as np
import xxhash

from dtckpt.checkpoint.parts.host_folder import HostFolder
from dtckpt.checkpoint.parts.records import PartIndex, PartPiece, SaveId
from dtckpt.errors import CheckpointCorruptError
from dtckpt.format.digest import buffer_of
from dtckpt.format.dtypes import DTYPES
from dtckpt.layout.region import Region

SPAN_NBYTES = 256 << 10
"""Bytes that are copied and digested at a time: small enough to be in the processor's cache both times."""


def piece_seed(name: str, region: Region) -> int:
    """Return the seed of a piece's digest. The seed depends on tensor and box, so swapped pieces differ."""
    return xxhash.xxh3_64_intdigest(f"{name}\0{region.offset}{region.shape}".encode())


def piece_digest(name: str, region: Region, elements: np.ndarray[Any, Any]) -> int:
    """Return the digest of a box's elements."""
    return xxhash.xxh3_64_intdigest(buffer_of(elements), seed=piece_seed(name, region))


def elements_of(data: memoryview, piece: PartPiece, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Return a view of a piece's elements in a part's file. Raises: ValueError: The file is too short."""
    strides = tuple(step * dtype.itemsize for step in piece.strides)
    last = sum((size - 1) * step for size, step in zip(piece.region.shape, strides, strict=True))
    if piece.offset + last + dtype.itemsize > len(data):
        raise ValueError(f"the file of the part has {len(data)} bytes, and {piece.region} would end behind them")
    return np.ndarray(piece.region.shape, dtype, data, piece.offset, strides)


def validate_part(data: memoryview, index: PartIndex) -> None:
    """Check every piece of a part. Raises: CheckpointCorruptError: A piece has changed."""
    for number in range(len(index.pieces)):
        verified_elements(data, index, number)


def verified_elements(data: memoryview, index: PartIndex, number: int) -> np.ndarray[Any, Any]:
    """Return a view of a piece's elements.

    Raises:
        CheckpointCorruptError: The elements have changed since the save.
    """
    piece = index.piece(number)
    tensor = index.tensors[piece.tensor]
    try:
        elements = elements_of(data, piece, DTYPES[tensor.dtype])
    except ValueError as error:
        raise CheckpointCorruptError(f"the part of client {index.client} is cut short: {error}") from error
    if piece_digest(tensor.name, piece.region, elements) != piece.digest:
        raise CheckpointCorruptError(f"the part of client {index.client} is damaged at {tensor.name!r} {piece.region}")
    return elements


class OpenPart:
    """A part, mapped into memory. Thread-safe.

    Args:
        folder: The parts of this host.
        save: The save.
        client: The client whose part it is.
        index: The index, if it is known already.

    Raises:
        FileNotFoundError: The part is not here.
        CheckpointCorruptError: The part cannot be read, or its index is damaged.
    """

    def __init__(self, folder: HostFolder, save: SaveId, client: int, index: PartIndex | None = None) -> None:
        self.index = PartIndex.from_bytes(folder.index_file(save, client)) if index is None else index
        try:
            self._data = folder.open_data(save, client)
        except FileNotFoundError:
            raise
        except (OSError, ValueError) as error:  # an empty file cannot be mapped
            raise CheckpointCorruptError(f"the part of client {client} cannot be read: {error}") from error
        self.path = folder.data_path(save, client)
        self._verified: dict[int, np.ndarray[Any, Any]] = {}

    def copy_whole(self, number: int, into: memoryview) -> None:
        """Copy a dense piece to memory of its size, and verify the copy. Raises: as `verified_elements`."""
        piece = self.index.piece(number)
        name = self.index.tensors[piece.tensor].name
        digest = xxhash.xxh3_64(seed=piece_seed(name, piece.region))
        source = self._data[piece.offset : piece.offset + len(into)]
        if len(source) < len(into):
            raise CheckpointCorruptError(
                f"the part of client {self.index.client} is cut short at {name!r} {piece.region}"
            )
        for start in range(0, len(into), SPAN_NBYTES):
            span = into[start : start + SPAN_NBYTES]
            span[:] = source[start : start + SPAN_NBYTES]
            digest.update(span)
        if digest.intdigest() != piece.digest:
            raise CheckpointCorruptError(
                f"the part of client {self.index.client} is damaged at {name!r} {piece.region}"
            )

    def elements(self, number: int) -> np.ndarray[Any, Any]:
        """Return the elements of a piece. Raises: as `verified_elements`."""
        elements = self._verified.get(number)
        if elements is None:
            elements = self._verified[number] = verified_elements(self._data, self.index, number)
        return elements
