"""Arrays of Zarr as other libraries write them: the document of an array, and the place of each of its chunks; pure.

A chunk is a value of a key-value store, and holds a box of the array::

    v2    <name>/.zarray      <name>/0.1        elements, maybe compressed by zstd
    v3    <name>/zarr.json    <name>/c/0/1      the same; or a shard: inner chunks, and an index of where they are

    a shard   | inner chunk | inner chunk | ... | per inner chunk: first byte, bytes | CRC-32C |

Sources: the specifications of Zarr v2, and of Zarr v3 and its codec ``sharding_indexed``; TensorStore's drivers
``zarr`` and ``zarr3`` for the names of dtypes that these lack.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dtckpt.errors import CheckpointCorruptError, CheckpointVersionError, RegionError
from dtckpt.format.codecs import NO_CODEC, chunk_bounds
from dtckpt.format.dtypes import DTYPES
from dtckpt.format.grid import ChunkGrid
from dtckpt.layout.region import Region
from dtckpt.storage.failures import MalformedError

MAX_CHUNKS = 1 << 18
"""Bound on the chunks of one array."""
MAX_INNER_CHUNKS = 1 << 16
"""Bound on the inner chunks of a shard."""
_ENTRY_NBYTES = 16
"""Bytes of an inner chunk's entry in the index of a shard: the first byte, and the number of bytes."""
_CRC_NBYTES = 4
_MAX_DIGITS = 20
_MISSING = (1 << 64) - 1
_NAMES3 = {name: name for name, dtype in DTYPES.items() if dtype.name == name}
"""Name of an element type by its name in a document of Zarr v3."""
ZARR2_DTYPES = {name: DTYPES[name].str if DTYPES[name].kind in "biufc" else name for name in _NAMES3}
"""By name of an element type, its name in a document of Zarr v2: numpy's, or TensorStore's if numpy lacks it."""
_NAMES2 = {text: name for name, text in ZARR2_DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Encoded:
    """Elements of a box that are compressed by themselves, as `dtckpt.storage.zarr_tensorstore.StoredArray`."""

    grid: ChunkGrid
    stored_dtype: str
    codec: str
    path: str = "chunk"


@dataclass(frozen=True, slots=True)
class ZarrArray:
    """An array.

    Args:
        path: Its name in the store.
        grid: Its shape and chunks.
        dtype: Name of its element type, one of `dtckpt.format.dtypes.DTYPES`.
        codec: How its chunks are compressed, or the inner chunks of its shards: ``none`` or ``zstd``.
        inner: The shape of the inner chunks, if its chunks are shards.
        key_parts: Parts of a chunk's key between the name and the positions: ``c`` or nothing.
        separator: The character between the parts of the key.
        is_filled: Whether a chunk that is missing is made of zeros.
    """

    path: str
    grid: ChunkGrid
    dtype: str
    codec: str
    inner: tuple[int, ...] | None = None
    key_parts: tuple[str, ...] = ()
    separator: str = "."
    is_filled: bool = False

    def key(self, index: Sequence[int]) -> str:
        """Return the key of a chunk."""
        return f"{self.path}/{self.separator.join((*self.key_parts, *map(str, index))) or '0'}"

    def has_key(self, key: str) -> bool:
        """Whether a key names a chunk."""
        first = len(self.key_parts)
        parts = key.removeprefix(f"{self.path}/").split(self.separator)[first:] if self.grid.counts else []
        if not all(part.isascii() and part.isdecimal() and len(part) < _MAX_DIGITS for part in parts):
            return False
        index = tuple(map(int, parts))
        return (
            len(index) == len(self.grid.counts)
            and all(position < count for position, count in zip(index, self.grid.counts, strict=True))
            and key == self.key(index)
        )

    def plain_places(self) -> Iterator[tuple[Region, str, int]]:
        """Yield the box, the key and the first byte of each chunk of an array without compression."""
        if self.codec == NO_CODEC and self.inner is None:
            for index in map(self.grid.index, range(self.grid.num_chunks)):
                yield self.grid.region(index), self.key(index), 0

    @property
    def chunk_nbytes(self) -> int:
        """Bytes of the elements of a whole chunk."""
        return math.prod(self.grid.chunk_shape) * DTYPES[self.dtype].itemsize

    @property
    def _inner_grid(self) -> ChunkGrid | None:
        return None if self.inner is None else ChunkGrid(self.grid.chunk_shape, self.inner)

    @property
    def bounds(self) -> tuple[int, int]:
        """The fewest and the most bytes that a chunk takes in the store."""
        if (grid := self._inner_grid) is None:
            return chunk_bounds(self.codec, self.chunk_nbytes)
        each = math.prod(grid.chunk_shape) * DTYPES[self.dtype].itemsize
        index_nbytes = grid.num_chunks * _ENTRY_NBYTES + _CRC_NBYTES
        least = index_nbytes if self.is_filled else chunk_bounds(self.codec, each)[0] + index_nbytes
        return least, grid.num_chunks * chunk_bounds(self.codec, each)[1] + index_nbytes

    def parts(self, data: bytes) -> list[tuple[Encoded, Region, bytes | None]]:
        """Cut the bytes of a chunk into boxes that are decoded by themselves.

        Returns:
            Per box, how its elements are stored, its region in the chunk, and its bytes; None: it is made of zeros.

        Raises:
            MalformedError: The index of a shard is damaged.
        """
        grid = self._inner_grid
        if grid is None:
            whole = ChunkGrid(self.grid.chunk_shape, self.grid.chunk_shape)
            return [(Encoded(whole, self.dtype, self.codec), Region.full(self.grid.chunk_shape), data)]
        start = len(data) - grid.num_chunks * _ENTRY_NBYTES - _CRC_NBYTES
        if start < 0:
            raise MalformedError(f"a shard is cut short: it has {len(data)} bytes")
        index, crc = data[start:-_CRC_NBYTES], int.from_bytes(data[-_CRC_NBYTES:], "little")
        from awscrt.checksums import crc32c  # here, because commands that only look do without

        if crc32c(index) != crc:
            raise MalformedError("the index of a shard is damaged: its CRC does not match")
        parts: list[tuple[Encoded, Region, bytes | None]] = []
        encoded = Encoded(ChunkGrid(grid.chunk_shape, grid.chunk_shape), self.dtype, self.codec)
        for number, (first, nbytes) in enumerate(np.frombuffer(index, "<u8").reshape(-1, 2).tolist()):
            region = grid.region(grid.index(number))
            if first == nbytes == _MISSING:
                if not self.is_filled:
                    raise MalformedError(f"a shard lacks its inner chunk {number}")
                parts.append((encoded, region, None))
                continue
            if first + nbytes > start:
                raise MalformedError(f"the index of a shard is damaged: chunk {number} would end behind its chunks")
            parts.append((encoded, region, data[first : first + nbytes]))
        return parts


def parse_zarr2(path: str, data: bytes, *, is_filled: bool) -> ZarrArray:
    """Parse a ``.zarray``.

    Args:
        path: The array's name in the store.
        data: The document.
        is_filled: As for `ZarrArray`.

    Raises:
        CheckpointCorruptError: The document is damaged.
        CheckpointVersionError: The document asks for something that this version does not know.
    """
    document = _document(path, data)
    compressor = document.get("compressor")
    codec = NO_CODEC if compressor is None else _field(path, compressor, "id", str)
    _expect(path, "zarr_format", document.get("zarr_format"), 2)
    _expect(path, "compressor", codec, NO_CODEC, "zstd")
    _expect(path, "filters", document.get("filters") or None, None)
    if "order" in document and document["order"] != "C" and len(document.get("shape", ())) > 1:
        _expect(path, "order", document["order"], "C")
    separator = document.get("dimension_separator", ".")
    _expect(path, "dimension_separator", separator, ".", "/")
    dtype = _field(path, document, "dtype", str)
    grid = _grid(path, document.get("shape"), document.get("chunks"))
    filled = is_filled and _is_zero(path, document.get("fill_value"))
    return ZarrArray(path, grid, _dtype(path, dtype, _NAMES2), codec, None, (), separator, filled)


def document_of(array: ZarrArray) -> dict[str, Any]:
    """Return the ``.zarray`` of an array without compression."""
    return {
        "zarr_format": 2,
        "shape": list(array.grid.shape),
        "chunks": list(array.grid.chunk_shape),
        "dtype": ZARR2_DTYPES[array.dtype],
        "order": "C",
        "compressor": None,
        "filters": None,
        "fill_value": None,
        "dimension_separator": array.separator,
    }


def parse_zarr3(path: str, data: bytes, *, is_filled: bool) -> ZarrArray:
    """Parse a ``zarr.json``. Arguments and errors as for `parse_zarr2`."""
    document = _document(path, data)
    _expect(path, "zarr_format", document.get("zarr_format"), 3)
    _expect(path, "node_type", document.get("node_type"), "array")
    chunks = _named(path, document.get("chunk_grid"))
    _expect(path, "chunk_grid", chunks[0], "regular")
    encoding, keys = _named(path, document.get("chunk_key_encoding"))
    _expect(path, "chunk_key_encoding", encoding, "default", "v2")
    separator = keys.get("separator", "/" if encoding == "default" else ".")
    _expect(path, "separator of its keys", separator, "/", ".")
    codecs = [_named(path, each) for each in _field(path, document, "codecs", list)]
    inner = None
    grid = _grid(path, document.get("shape"), chunks[1].get("chunk_shape"))
    if codecs and codecs[0][0] == "sharding_indexed":
        _expect(path, "codecs", len(codecs), 1)
        shard = codecs[0][1]
        _expect(path, "index_location", shard.get("index_location", "end"), "end")
        index = [_named(path, each)[0] for each in _field(path, shard, "index_codecs", list)]
        _expect(path, "index_codecs", index, ["bytes", "crc32c"])
        inner = _grid(path, list(grid.chunk_shape), shard.get("chunk_shape")).chunk_shape
        is_even = all(outer % each == 0 for outer, each in zip(grid.chunk_shape, inner, strict=True))
        if not is_even or ChunkGrid(grid.chunk_shape, inner).num_chunks > MAX_INNER_CHUNKS:
            raise _damaged(path, f"shards {grid.chunk_shape} of inner chunks {inner}")
        codecs = [_named(path, each) for each in _field(path, shard, "codecs", list)]
    _expect(path, "codecs", [name for name, _ in codecs], ["bytes"], ["bytes", "zstd"])
    _expect(path, "endian", codecs[0][1].get("endian", "little"), "little")
    dtype = _dtype(path, _field(path, document, "data_type", str), _NAMES3)
    parts = ("c",) if encoding == "default" else ()
    filled = is_filled and _is_zero(path, document.get("fill_value"))
    codec = NO_CODEC if len(codecs) == 1 else "zstd"
    return ZarrArray(path, grid, dtype, codec, inner, parts, separator, filled)


def _document(path: str, data: bytes) -> Mapping[str, Any]:
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        raise _damaged(path, "a document that is no JSON object")
    return document


def _field(path: str, document: Any, name: str, kind: type) -> Any:
    value = document.get(name) if isinstance(document, dict) else None
    if not isinstance(value, kind):
        raise _damaged(path, f"{value!r:.80} as {name}")
    return value


def _named(path: str, extension: Any) -> tuple[str, Mapping[str, Any]]:
    """Return name and configuration of an extension point of Zarr v3."""
    if isinstance(extension, str):
        return extension, {}
    configuration = extension.get("configuration", {}) if isinstance(extension, dict) else None
    if not isinstance(configuration, dict):
        raise _damaged(path, f"{extension!r:.80} in its document")
    return _field(path, extension, "name", str), configuration


def _expect(path: str, name: str, value: Any, *known: Any) -> None:
    if value not in known:
        raise CheckpointVersionError(
            f"array {path[:200]!r} cannot be read: got {value!r:.80} as {name}, expected "
            f"{' or '.join(map(repr, known))}; convert it with the library that wrote it"
        )


def _grid(path: str, shape: Any, chunks: Any) -> ChunkGrid:
    for sizes in (shape, chunks):
        if not isinstance(sizes, list) or not all(type(size) is int for size in sizes):
            raise _damaged(path, f"shape {shape!r:.80} and chunks {chunks!r:.80}")
    # A dim without elements still has chunks of some size.
    if len(shape) != len(chunks) or any(chunk > max(1, size) for size, chunk in zip(shape, chunks, strict=True)):
        raise _damaged(path, f"chunks {chunks!r:.80} of shape {shape!r:.80}")
    try:
        grid = ChunkGrid(tuple(shape), tuple(chunks))
    except RegionError as error:
        raise _damaged(path, f"an impossible shape ({error})") from None
    if grid.num_chunks > MAX_CHUNKS:
        raise _damaged(path, f"{grid.num_chunks} chunks, more than {MAX_CHUNKS}")
    return grid


def _dtype(path: str, name: str, names: Mapping[str, str]) -> str:
    if name not in names:
        raise CheckpointVersionError(
            f"array {path[:200]!r} has dtype {name!r:.80}, which dtckpt does not know; expected one of "
            f"{', '.join(_NAMES3)}; convert it with the library that wrote it"
        )
    return names[name]


def _is_zero(path: str, value: Any) -> bool:
    """Whether the fill value is zero; TensorStore takes zero where there is none."""
    if isinstance(value, list):
        return all(_is_zero(path, each) for each in value)
    return value is None or (isinstance(value, int | float) and value == 0)


def _damaged(path: str, reason: str) -> CheckpointCorruptError:
    return CheckpointCorruptError(f"array {path[:200]!r} is damaged: it has {reason}")
