"""The Zarr v3 hierarchy of a checkpoint's arrays: the ``zarr.json`` documents, and the keys with their values; pure.

dtckpt reads by its manifest alone; the documents are for other readers. The documents follow from the facts of the
manifest, so every holder of a manifest can write them::

    zarr.json          group above everything        a document
    a/zarr.json        group                         a document
    a/b/zarr.json      array                         a document
    a/b/c/0/1          its chunk at (0, 1)           elements of the checkpoint

`ZarrHierarchy` presents chunks as they would be without compression. A chunk that was not saved has no key. The
Zarr v3 core specification defines the format.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Protocol

from dtckpt.format.codecs import NO_CODEC, codec_documents
from dtckpt.format.dtypes import DTYPES, fill_value, zarr_data_type
from dtckpt.format.grid import ChunkGrid
from dtckpt.format.names import groups
from dtckpt.layout.layout import Layout

DOCUMENT_NAME = "zarr.json"
GROUP_DOCUMENT = json.dumps({"zarr_format": 3, "node_type": "group", "attributes": {}}).encode()


class DescribedArray(Protocol):
    """An array with all the facts that its document states."""

    @property
    def name(self) -> str:
        """The tensor's name."""
        ...

    @property
    def path(self) -> str:
        """Its path below the root of the key-value store."""
        ...

    @property
    def grid(self) -> ChunkGrid:
        """Its shape and chunks."""
        ...

    @property
    def dtype(self) -> str:
        """The tensor's element type."""
        ...

    @property
    def stored_dtype(self) -> str:
        """Element type on storage."""
        ...

    @property
    def codec(self) -> str:
        """How chunks are compressed."""
        ...

    @property
    def layout(self) -> Layout | None:
        """The tensor's layout, if it was on a mesh."""
        ...


def array_metadata(grid: ChunkGrid, stored_dtype: str, codec: str, *, raw_bits: bool = False) -> dict[str, Any]:
    """Return the fields of an array's document by which its chunks are read and written.

    Args:
        grid: The array's shape and chunks.
        stored_dtype: Element type on storage.
        codec: How chunks are compressed.
        raw_bits: Whether elements of types that the core specification lacks are described as unsigned integers.
    """
    data_type, itemsize = zarr_data_type(stored_dtype, raw_bits=raw_bits), DTYPES[stored_dtype].itemsize
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(grid.shape),
        "data_type": data_type,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(grid.chunk_shape)}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": fill_value(data_type),
        "codecs": codec_documents(codec, itemsize, math.prod(grid.chunk_shape) * itemsize),
    }


def dimension_names(path: str, ndim: int) -> list[str]:
    """Return names for the dims of an array, which xarray needs: ``a/b`` has ``a:b:0``, ``a:b:1``.

    To xarray, dims of one name are one dim: they must have one size within a group, and from a group to the groups
    below. A dim with the name of a variable is that variable. Paths of arrays have no colon, because names of tensors
    are encoded. So no other dim and no array of the checkpoint has one of these names.
    """
    stem = path.replace("/", ":")
    return [f"{stem}:{dim}" for dim in range(ndim)]


def array_document(array: DescribedArray, *, raw_bits: bool = False, codec: str | None = None) -> bytes:
    """Return the document of an array.

    Args:
        array: The array.
        raw_bits: As for `array_metadata`.
        codec: Another codec than the array's.
    """
    before, between, after = _document_around(
        array.grid, array.dtype, array.stored_dtype, codec or array.codec, array.layout, raw_bits=raw_bits
    )
    dims = dimension_names(array.path, len(array.grid.shape))
    return b"".join([before, json.dumps(dims).encode(), between, json.dumps(array.name).encode(), after])


_DIMS, _NAME = "\0dims", "\0name"
"""Stand for an array's dimension names and a tensor's name; no tensor can have such a name."""


@lru_cache(maxsize=4096)
def _document_around(
    grid: ChunkGrid, dtype: str, stored_dtype: str, codec: str, layout: Layout | None, *, raw_bits: bool
) -> tuple[bytes, bytes, bytes]:
    """Return the text before, between and after dimension names and name in the documents of all arrays of one kind.

    The attributes hold the facts that Zarr has no place for: the name, the dtype, the layout.
    """
    metadata = array_metadata(grid, stored_dtype, codec, raw_bits=raw_bits)
    facts: dict[str, Any] = {"name": _NAME, "dtype": dtype}
    # The elements are the bits of a type that the data type does not name.
    if metadata["data_type"] != stored_dtype:
        facts["stored_dtype"] = stored_dtype
    if layout is not None:
        facts["mesh"] = {"name": layout.mesh.name, "axes": dict(layout.mesh.axis_sizes)}
        facts["sharding_specs"] = [list(spec) if isinstance(spec, tuple) else spec for spec in layout.sharding_specs]
    text = json.dumps({**metadata, "dimension_names": _DIMS, "attributes": {"dtckpt": facts}}).encode()
    before, _, rest = text.partition(json.dumps(_DIMS).encode())
    between, _, after = rest.partition(json.dumps(_NAME).encode())
    return before, between, after


def documents(arrays: Iterable[DescribedArray], *, raw_bits: bool = False) -> dict[str, bytes]:
    """Return the documents of arrays and of the groups above them, by key, sorted by path."""
    by_path = {array.path: array_document(array, raw_bits=raw_bits) for array in arrays}
    by_path |= dict.fromkeys(groups(by_path), GROUP_DOCUMENT)
    return {document_key(path): document for path, document in sorted(by_path.items())}


def document_key(path: str) -> str:
    """Return the key of an array's or a group's document."""
    return f"{path}/{DOCUMENT_NAME}" if path else DOCUMENT_NAME


_CHUNK_KEY = re.compile(r"(?P<path>.*)/c(?P<index>(?:/(?:0|[1-9][0-9]{0,17}))*)", re.DOTALL)


class HierarchyArray(DescribedArray, Protocol):
    """An array of a hierarchy; `dtckpt.format.manifest.ArrayEntry` is one."""

    @property
    def missing(self) -> frozenset[int]:
        """Row-major numbers of the chunks that were not saved."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class PlainArray:
    """A tensor of another library's file as an array with a chunk grid; see `HierarchyArray`."""

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
                # Readers get decoded elements, with any compression on storage.
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
            # This check rules out most arrays without a look at their chunks.
            if path.startswith(prefix) or prefix.startswith(f"{path}/"):
                yield from (key for key in _array_keys(array) if key.startswith(prefix))

    def list_names(self, folder: str) -> Iterable[str]:
        """Return the names of the keys and the folders directly below a folder, each once."""
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
