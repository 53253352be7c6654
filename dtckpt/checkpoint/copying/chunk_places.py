"""`ChunkPlaces`: the bytes of a checkpoint's files that are chunks, so that a copy verifies each range that it moves.

The manifest has a digest of each chunk's elements, and the checkpoint's index tells the place of each chunk::

    client_0/d/9f31   | chunk 0 of a | chunk 5 of a | nodes ... | chunk 0 of b | nodes ... |
    segments          |<-- at most RANGE_NBYTES -->|<-- rest -->|<----------->|<-- rest -->|

A segment ends where a chunk ends, so each chunk is whole in one segment. No chunk covers the rest: the index,
documents, digests of blocks, small files. `validate_rest` compares the digests of most of them. Bytes that no reader
uses have no digest.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from dtckpt.checkpoint.reading.manifest_files import ManifestFiles
from dtckpt.errors import CheckpointCorruptError
from dtckpt.format.codecs import NO_CODEC, chunk_bounds
from dtckpt.format.digest import digest_chunk
from dtckpt.format.dtypes import DTYPES
from dtckpt.format.manifest import MANIFEST_NAME, MAX_MANIFEST_NBYTES, ArrayEntry, Manifest
from dtckpt.layout.region import Region
from dtckpt.storage.chunk_reader import ValueReader, chunk_nbytes, decode_chunk
from dtckpt.storage.failures import MalformedError, translate_errors
from dtckpt.storage.folder import Folder
from dtckpt.storage.location import Location
from dtckpt.storage.tensorstore_setup import open_context
from dtckpt.storage.whole_files import RANGE_NBYTES
from dtckpt.storage.zarr_tensorstore import key_of

_UNKNOWN_END = 1 << 62
"""The end of a file whose size storage does not tell."""


@dataclass(frozen=True, slots=True, eq=False)
class ChunkPlace:
    """A chunk in a file.

    Args:
        start: The chunk's first byte in the file.
        stop: The byte behind its last.
        entry: The tensor.
        number: Row-major number of the chunk.
    """

    start: int
    stop: int
    entry: ArrayEntry
    number: int

    @property
    def text(self) -> str:
        """The chunk's name in messages."""
        region = self.entry.grid.region(self.entry.grid.index(self.number))
        return f"chunk {region} of tensor {self.entry.name!r}"


@dataclass(frozen=True, slots=True)
class Segment:
    """A range of bytes of a file that is read at once.

    Args:
        start: The first byte.
        stop: The byte behind the last.
        chunks: The chunks in it; none: the rest.
    """

    start: int
    stop: int
    chunks: Sequence[ChunkPlace] = ()


class ChunkPlaces:
    """The chunks of a checkpoint by file, and the comparison of their bytes with the manifest's digests. Thread-safe.

    Args:
        manifest: The manifest.
        chunks: By file name, the chunks by their first byte.
    """

    def __init__(self, manifest: Manifest, chunks: Mapping[str, Sequence[ChunkPlace]]) -> None:
        self.manifest = manifest
        self.chunks = chunks
        self._context = open_context()

    @classmethod
    def of(cls, where: Location, folder: Folder, manifest: Manifest) -> ChunkPlaces:
        """Look all chunks of a checkpoint up in its index. Blocks: on storage.

        Raises:
            CheckpointCorruptError: The index is damaged, or chunks overlap.
        """
        places: dict[str, list[ChunkPlace]] = {}
        values = ValueReader(folder, has_database=manifest.kvstore == "ocdbt")
        plan = cls(manifest, places)
        with translate_errors("look for chunks", where, is_read=True):
            for entry in manifest.arrays.values():
                for number in range(entry.grid.num_chunks):
                    if number not in entry.missing:
                        plan._find(values, entry, number, places)
        for name, found in places.items():
            found.sort(key=lambda place: place.start)
            if overlap := next((after for before, after in pairwise(found) if after.start < before.stop), None):
                raise CheckpointCorruptError(
                    f"{where} is damaged: {overlap.text} shares bytes of {name} with another chunk"
                )
        return plan

    def _find(self, values: ValueReader, entry: ArrayEntry, number: int, places: dict[str, list[ChunkPlace]]) -> None:
        index = entry.grid.index(number)
        try:
            found = values.find(key_of(entry.path, index))
        except FileNotFoundError:
            raise MalformedError(f"the index lacks chunk {number} of tensor {entry.name!r}") from None
        if isinstance(found, bytes):
            if not self._is_sound(entry, number, memoryview(found)):
                raise MalformedError(f"chunk {number} of tensor {entry.name!r}, in the index, is damaged")
            return
        nbytes = found.nbytes
        if nbytes is None:
            # A file of the chunk's own: compressed, it is as long as it is.
            most = chunk_bounds(entry.codec, chunk_nbytes(entry))[1]
            nbytes = chunk_nbytes(entry) if entry.codec == NO_CODEC else most
        place = ChunkPlace(found.start, found.start + nbytes, entry, number)
        places.setdefault(found.file, []).append(place)

    def segments(self, name: str, nbytes: int | None) -> Iterator[Segment]:
        """Yield the segments of a file, in order: all its chunks, and the rest up to its size, or without an end.

        A segment may end behind the file's end: a chunk is missing there, or a compressed chunk has a file alone.

        Args:
            name: The file.
            nbytes: Its size; None: unknown.
        """
        at = 0
        for segment in self.chunk_segments(name):
            yield from _rest(at, segment.start)
            yield segment
            at = segment.stop
        yield from _rest(at, _UNKNOWN_END if nbytes is None else nbytes)

    def chunk_segments(self, name: str) -> Iterator[Segment]:
        """Yield the segments of a file that have chunks, in order."""
        group: list[ChunkPlace] = []
        for place in self.chunks.get(name, ()):
            if group and (place.start != group[-1].stop or place.stop - group[0].start > RANGE_NBYTES):
                yield Segment(group[0].start, group[-1].stop, tuple(group))
                group = []
            group.append(place)
        if group:
            yield Segment(group[0].start, group[-1].stop, tuple(group))

    def damaged(self, segment: Segment, data: memoryview) -> Iterator[ChunkPlace]:
        """Yield the chunks of a segment whose bytes are not the bytes that were saved."""
        for place in segment.chunks:
            start = place.start - segment.start
            if not self._is_sound(place.entry, place.number, data[start : place.stop - segment.start]):
                yield place

    def _is_sound(self, entry: ArrayEntry, number: int, data: memoryview) -> bool:
        """Whether the stored bytes of a chunk have the manifest's digest."""
        index = entry.grid.index(number)
        region = entry.grid.region(index)
        dtype, nbytes = DTYPES[entry.stored_dtype], chunk_nbytes(entry)
        least, most = chunk_bounds(entry.codec, nbytes)
        if not least <= data.nbytes <= most:
            return False
        if entry.codec == NO_CODEC:
            # A chunk at the grid's edge is stored padded.
            padded = np.frombuffer(data[:nbytes], dtype).reshape(entry.grid.chunk_shape)
            elements: np.ndarray[Any, Any] = padded[tuple(slice(size) for size in region.shape)]
        else:
            elements = np.empty(region.shape, dtype)
            try:
                decode_chunk(entry, bytes(data), Region(region.offset, region.shape), elements, self._context)
            except ValueError:
                return False
        digest, _ = digest_chunk(entry.name, index, elements, entry.blocks)
        return digest == int(entry.digests[number])


def _rest(start: int, stop: int) -> Iterator[Segment]:
    for at in range(start, stop, RANGE_NBYTES):
        yield Segment(at, min(at + RANGE_NBYTES, stop))


def read_manifest(where: Location, folder: Folder) -> tuple[bytes, Manifest]:
    """Return the bytes of a checkpoint's manifest, and the manifest.

    Raises:
        CheckpointCorruptError: The manifest is missing or damaged.
    """
    with translate_errors("read the manifest", where, is_read=True):
        try:
            data = folder.read_whole(MANIFEST_NAME, MAX_MANIFEST_NBYTES)
        except FileNotFoundError:
            raise MalformedError(f"{MANIFEST_NAME} is missing") from None
    return data, Manifest.from_bytes(data, f"{folder}/{MANIFEST_NAME}")


def validate_rest(where: Location, folder: Folder, manifest: Manifest) -> None:
    """Compare the digests of blocks and of all ``zarr.json``; the index was read when the plan was made.

    Raises:
        CheckpointCorruptError: Something is damaged.
    """
    with closing(ManifestFiles(where, folder, manifest, is_remote=True)) as files:
        for name, entry in manifest.arrays.items():
            if math.prod(entry.grid.chunk_shape) and entry.blocks.count(entry.grid.chunk_shape) > 1:
                for region in files.parts(name):
                    files.validate_part(name, region)
        files.validate_rest()
