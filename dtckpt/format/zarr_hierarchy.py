"""`ZarrHierarchy`: the keys of the Zarr v3 hierarchy of a checkpoint's arrays, and where the value of each is; pure.

::

    zarr.json          group above everything        a document, which follows from facts about the arrays
    a/zarr.json        group
    a/b/zarr.json      array                         a document
    a/b/c/0/1          its chunk at (0, 1)           elements of the checkpoint

Chunks are as they would be without compression. What was not saved has no key.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from dtckpt.format.codecs import NO_CODEC
from dtckpt.format.dtypes import DTYPES
from dtckpt.format.grid import ChunkGrid
from dtckpt.format.names import groups
from dtckpt.format.zarr_documents import DOCUMENT_NAME, GROUP_DOCUMENT, DescribedArray, array_document, document_key
from dtckpt.layout.layout import Layout

_CHUNK_KEY = re.compile(r"(?P<path>.*)/c(?P<index>(?:/(?:0|[1-9][0-9]{0,17}))*)", re.DOTALL)


class HierarchyArray(DescribedArray, Protocol):
    """An array of a hierarchy; `dtckpt.format.manifest.ArrayEntry` is one."""

    @property
    def missing(self) -> frozenset[int]:
        """Row-major numbers of the chunks that were not saved."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class PlainArray:
    """A tensor of another library's file as an array, in chunks of its own; see `HierarchyArray`."""

    name: str
    path: str
    grid: ChunkGrid
    dtype: str
    stored_dtype: str
    layout: Layout | None
    codec: str = NO_CODEC
    missing: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, eq=False)
class ArrayChunk:
    """The value of a chunk's key: its elements in C order, little endian, padded at the grid's edge.

    Args:
        array: The array.
        index: The chunk's position per dim of the grid.
    """

    array: HierarchyArray
    index: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the value."""
        return math.prod(self.array.grid.chunk_shape) * DTYPES[self.array.stored_dtype].itemsize


class ZarrHierarchy:
    """The Zarr hierarchy of a checkpoint.

    Args:
        arrays: The arrays.
        raw_bits: As for `dtckpt.format.zarr_documents.array_metadata`.
    """

    def __init__(self, arrays: Iterable[HierarchyArray], *, raw_bits: bool = False) -> None:
        self._arrays = {array.path: array for array in arrays}
        self._raw_bits = raw_bits

    @cached_property
    def _names_of_groups(self) -> dict[str, list[str]]:
        """For each group, the names of the arrays and groups in it."""
        names: dict[str, list[str]] = {path: [] for path in groups(self._arrays)}
        for path in sorted({*names, *self._arrays} - {""}):
            parent, _, name = path.rpartition("/")
            names[parent].append(name)
        return names

    def find(self, key: str) -> bytes | ArrayChunk | None:
        """Return the value of a key: a document, or the place of a chunk; None if there is no such key."""
        path = key.rpartition("/")[0]
        if key == document_key(path):
            if (array := self._arrays.get(path)) is not None:
                # Elements are delivered decoded, whatever compresses them on storage.
                return array_document(array, raw_bits=self._raw_bits, codec=NO_CODEC)
            return GROUP_DOCUMENT if path in self._names_of_groups else None
        match = _CHUNK_KEY.fullmatch(key)
        if match is None or (array := self._arrays.get(match["path"])) is None:
            return None
        index = tuple(map(int, match["index"].split("/")[1:]))
        grid = array.grid
        if len(index) != len(grid.counts) or any(at >= count for at, count in zip(index, grid.counts, strict=True)):
            return None
        return None if grid.number(index) in array.missing else ArrayChunk(array, index)

    def list_keys(self, prefix: str = "") -> Iterator[str]:
        """Yield all keys that begin with a prefix."""
        paths = map(document_key, self._names_of_groups)
        yield from (key for key in paths if key.startswith(prefix))
        for path, array in self._arrays.items():
            # Most arrays are ruled out here, without a look at their chunks.
            if path.startswith(prefix) or prefix.startswith(f"{path}/"):
                yield from (key for key in _array_keys(array) if key.startswith(prefix))

    def list_names(self, folder: str) -> Iterable[str]:
        """Return the names directly below a folder, each once: those of keys, and of folders of keys."""
        folder = folder.rstrip("/")
        if folder in self._names_of_groups:
            return [DOCUMENT_NAME, *self._names_of_groups[folder]]
        below = f"{folder}/"
        return dict.fromkeys(key[len(below) :].partition("/")[0] for key in self.list_keys(below))


def _array_keys(array: HierarchyArray) -> Iterator[str]:
    """Yield the keys of an array: its document, and the chunks that were saved."""
    yield document_key(array.path)
    for number in range(array.grid.num_chunks):
        if number not in array.missing:
            yield "/".join([array.path, "c", *map(str, array.grid.index(number))])
