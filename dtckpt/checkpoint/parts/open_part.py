"""`OpenPart`: a part on this host, open for reading; every piece is verified when it is first looked at."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import xxhash

from dtckpt.checkpoint.parts.host_folder import HostFolder
from dtckpt.checkpoint.parts.lent_memory import LentMemory
from dtckpt.checkpoint.parts.records import PartIndex, PartPiece, PartTensor, SaveId
from dtckpt.checkpoint.reading.read_chunks import convert, cut
from dtckpt.errors import CheckpointCorruptError
from dtckpt.format.digest import as_bytes, buffer_of
from dtckpt.format.dtypes import DTYPES
from dtckpt.layout.region import Region

SPAN_NBYTES = 256 << 10
"""Bytes that are copied and digested at a time: small enough to be in the processor's cache both times."""


def piece_seed(name: str, region: Region) -> int:
    """Return the seed of a piece's digest. The seed depends on tensor and box, so swapped pieces differ."""
    return xxhash.xxh3_64_intdigest(f"{name}\0{region.offset}{region.shape}".encode())


def piece_digest(name: str, region: Region, elements: np.ndarray[Any, Any]) -> int:
    """Return the digest of a box's elements."""
    seed = piece_seed(name, region)
    if elements.flags.c_contiguous:
        return xxhash.xxh3_64_intdigest(buffer_of(elements), seed=seed)
    digest = xxhash.xxh3_64(seed=seed)
    for span in spans(elements.shape, elements.itemsize):
        digest.update(buffer_of(cut(elements, span)))
    return digest.intdigest()


def spans(shape: Sequence[int], itemsize: int) -> Iterator[tuple[slice, ...]]:
    """Yield the parts of an array, in C order, each of at most `SPAN_NBYTES`."""
    if not shape or math.prod(shape) * itemsize <= SPAN_NBYTES:
        yield tuple(slice(0, size) for size in shape)
        return
    first, *rest = shape
    rows = SPAN_NBYTES // (math.prod(rest) * itemsize)
    if rows:
        for start in range(0, first, rows):
            yield slice(start, min(start + rows, first)), *(slice(0, size) for size in rest)
        return
    for row in range(first):
        for span in spans(rest, itemsize):
            yield slice(row, row + 1), *span


def elements_of(data: memoryview | LentMemory, piece: PartPiece, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Return a view of a piece's elements in a part's file, or where they lie.

    Raises:
        ValueError: The file is too short.
        FileNotFoundError: The memory is lent no more.
    """
    if isinstance(data, LentMemory):
        return data.elements(piece.offset)
    strides = tuple(step * dtype.itemsize for step in piece.strides)
    last = sum((size - 1) * step for size, step in zip(piece.region.shape, strides, strict=True))
    if piece.offset + last + dtype.itemsize > len(data):
        raise ValueError(f"the file of the part has {len(data)} bytes, and {piece.region} would end behind them")
    return np.ndarray(piece.region.shape, dtype, data, piece.offset, strides)


def validate_part(data: memoryview, index: PartIndex) -> None:
    """Check every piece of a part. Raises: CheckpointCorruptError: A piece has changed."""
    for number in range(len(index.pieces)):
        verified_elements(data, index, number)


def verified_elements(data: memoryview | LentMemory, index: PartIndex, number: int) -> np.ndarray[Any, Any]:
    """Return a view of a piece's elements; of lent memory, which its owner may change at any time, a copy.

    Raises:
        CheckpointCorruptError: The elements have changed since the save.
        FileNotFoundError: The memory is lent no more.
    """
    piece = index.piece(number)
    tensor = index.tensors[piece.tensor]
    try:
        elements = elements_of(data, piece, DTYPES[tensor.dtype])
    except ValueError as error:
        raise CheckpointCorruptError(f"the part of client {index.client} is cut short: {error}") from error
    if isinstance(data, LentMemory):
        elements = elements.copy()
    if piece_digest(tensor.name, piece.region, elements) != piece.digest:
        raise CheckpointCorruptError(f"the part of client {index.client} is damaged at {tensor.name!r} {piece.region}")
    return elements


class OpenPart:
    """A part, mapped into memory, or lent. Thread-safe.

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
            self._data = folder.open_memory(save, client)
        except FileNotFoundError:
            raise
        except (OSError, ValueError) as error:  # an empty file cannot be mapped
            raise CheckpointCorruptError(f"the part of client {client} cannot be read: {error}") from error
        self._is_lent = isinstance(self._data, LentMemory)
        self.path = None if self._is_lent else folder.data_path(save, client)
        """The file; None if the part is in lent memory."""
        self._start = 0 if isinstance(self._data, LentMemory) else np.frombuffer(self._data, np.uint8).ctypes.data
        self._verified: dict[int, np.ndarray[Any, Any]] = {}
        self.digests = self.index.digests()
        """Digests of pieces and announced boxes, by tensor and region."""
        self._numbers: dict[str, list[int]] = {}
        for number, piece in enumerate(self.index.pieces):
            self._numbers.setdefault(self.index.tensors[piece.tensor].name, []).append(number)

    @property
    def memory(self) -> np.ndarray[Any, Any]:
        """The bytes of the file."""
        assert not isinstance(self._data, LentMemory)  # noqa: S101  the caller has looked at `path`
        return np.frombuffer(self._data, np.uint8)

    def tensor(self, number: int) -> PartTensor:
        """Return the tensor of a piece."""
        return self.index.tensors[self.index.piece(number).tensor]

    def region(self, number: int, box: Region) -> Region:
        """Return the region of the tensor that a box of a piece is."""
        return box.translate(self.index.piece(number).region.offset)

    def find(self, tensor: PartTensor, region: Region) -> np.ndarray[Any, Any] | None:
        """Return the elements of a region of a tensor, unverified, if they lie in one piece of this part."""
        for number in self._numbers.get(tensor.name, ()):
            piece = self.index.pieces[number]
            found = self.index.tensors[piece.tensor]
            if (found.shape, found.dtype) == (tensor.shape, tensor.dtype) and piece.region.contains(region):
                return self.view(number, region.relative_to(piece.region))
        return None

    def offset(self, view: np.ndarray[Any, Any]) -> int:
        """Return the place of a view's first byte in the file."""
        return int(view.ctypes.data) - self._start

    def view(self, number: int, box: Region) -> np.ndarray[Any, Any]:
        """Return the unverified elements of a box of a piece. Raises: as `verified_elements`."""
        piece = self.index.piece(number)
        try:
            elements = elements_of(self._data, piece, DTYPES[self.index.tensors[piece.tensor].dtype])
        except ValueError as error:
            raise CheckpointCorruptError(f"the part of client {self.index.client} is cut short: {error}") from error
        return cut(elements, box.slices())

    def copy(self, number: int, box: Region, digest: int, target: np.ndarray[Any, Any]) -> None:
        """Copy a box of a piece to memory of its shape, and compare what arrived with the box's digest.

        Raises: as `verified_elements`.
        """
        name, region = self.tensor(number).name, self.region(number, box)
        source, found = self.view(number, box), xxhash.xxh3_64(seed=piece_seed(name, region))
        for span in spans(box.shape, source.itemsize):
            part, into = cut(source, span), cut(target, span)
            if target.dtype == source.dtype:
                convert(part, into)
                found.update(as_bytes(into).data)
            else:
                # Of converted elements there is no digest. A copy of this process cannot change meanwhile.
                arrived = part.copy()
                found.update(as_bytes(arrived).data)
                convert(arrived, into)
        if found.intdigest() != digest:
            raise CheckpointCorruptError(f"the part of client {self.index.client} is damaged at {name!r} {region}")

    def elements(self, number: int) -> np.ndarray[Any, Any]:
        """Return the elements of a piece. Raises: as `verified_elements`."""
        elements = self._verified.get(number)
        if elements is None:
            elements = verified_elements(self._data, self.index, number)
            if self._is_lent:
                self._verified = {}  # there is memory for the copy of one piece
            self._verified[number] = elements
        return elements
