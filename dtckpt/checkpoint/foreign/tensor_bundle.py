"""The index of a TensorFlow V2 checkpoint ("tensor bundle"): the header, and an entry for each tensor and slice; pure.

The keys of the table are names of tensors, and codes of slices. The values are protobuf messages::

    ""         BundleHeaderProto   1 num_shards   2 endianness (0: little)   3 version
    name       BundleEntryProto    1 dtype  2 shape {2 dim {1 size}}  3 shard  4 offset  5 size  6 masked CRC-32C
                                   7 slices {1 extent {1 start, 2 length}}
    a code     the same, for the elements of a slice: of the name, and start and length per dim

A tensor with slices has no bytes itself. The elements are in ``<prefix>.data-<shard>-of-<shards>``.

Sources: TensorFlow's core/protobuf/tensor_bundle.proto, core/framework/{types,tensor_shape,tensor_slice}.proto,
core/util/saved_tensor_slice_util.cc and core/lib/strings/ordered_code.cc.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from dtckpt.checkpoint.foreign.protobuf_fields import bytes_field, fields, number_field
from dtckpt.checkpoint.foreign.sstable import mask, read_varint, unmask
from dtckpt.checkpoint.reading.pieces import CheckedBytes, Piece, PieceTensor
from dtckpt.errors import CheckpointCorruptError, CheckpointVersionError
from dtckpt.format.dtypes import DTYPES
from dtckpt.layout.region import Region

OBJECT_GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"
"""The string that holds the graph of the objects of a ``tf.train.Checkpoint``."""
VALUE_SUFFIX = "/.ATTRIBUTES/VARIABLE_VALUE"
SLOT = ".OPTIMIZER_SLOT"
STRING = 7
DTYPE_NUMBERS: Mapping[str, int] = {
    "float32": 1,
    "float64": 2,
    "int32": 3,
    "uint8": 4,
    "int16": 5,
    "int8": 6,
    "complex64": 8,
    "int64": 9,
    "bool": 10,
    "bfloat16": 14,
    "uint16": 17,
    "complex128": 18,
    "float16": 19,
    "uint32": 22,
    "uint64": 23,
    "float8_e5m2": 24,
    "float8_e4m3fn": 25,
    "float8_e4m3fnuz": 26,
    "float8_e5m2fnuz": 28,
}
"""Number of an element type in TensorFlow (``DataType``), by its name."""
_DTYPES = {number: name for name, number in DTYPE_NUMBERS.items()}
_MAX_SHARDS = 1 << 17
_VERSION = 1
"""Of the format, in the header; a header with a larger ``min_consumer`` is of a newer format."""
_FULL = -1
"""The length of a slice in a dim of which it has all."""
# Of the code of a signed number with so many bytes, the bits of its first two bytes that tell the length.
_LENGTH_BITS = (0, 0x8000, 0xC000, 0xE000, 0xF000, 0xF800, 0xFC00, 0xFE00, 0xFF00, 0xFF80, 0xFFC0)
_ESCAPES = re.compile(r"\.S|\.\.")

Extent = tuple[int, int]
"""First index and length of a slice in a dim."""


@dataclass(frozen=True, slots=True)
class BundleEntry:
    """An entry of the index. Args: see the module.

    ``crc`` is None if the entry has none.
    """

    dtype: int
    shape: tuple[int, ...]
    shard: int
    offset: int
    nbytes: int
    crc: int | None
    slices: tuple[tuple[Extent, ...], ...]

    @classmethod
    def parse(cls, data: bytes) -> BundleEntry:
        """Parse an entry. Raises: ValueError, IndexError or struct.error: The entry is damaged."""
        single: dict[int, Any] = {}
        slices: list[tuple[Extent, ...]] = []
        for number, value in fields(data):
            if number == 7:
                slices.append(tuple(_extent(extent) for each, extent in fields(_data(value)) if each == 1))
            else:
                single[number] = value
        shape = _shape(_data(single.get(2, b"")))
        dtype, shard, offset, nbytes = (single.get(number, 0) for number in (1, 3, 4, 5))
        crc = single.get(6)
        if not all(type(number) is int for number in (dtype, shard, offset, nbytes, crc or 0)):
            raise ValueError("an entry has a number that is none")
        return cls(dtype, shape, shard, offset, nbytes, None if crc is None else unmask(crc), tuple(slices))

    def to_bytes(self) -> bytes:
        """Return the entry, which has no slices. The length does not depend on the CRC."""
        dims = b"".join(bytes_field(2, number_field(1, size)) for size in self.shape)
        numbers = number_field(3, self.shard) + number_field(4, self.offset) + number_field(5, self.nbytes)
        return (
            number_field(1, self.dtype)
            + bytes_field(2, dims)
            + numbers
            + b"\x35"
            + struct.pack("<I", mask(self.crc or 0))
        )


def header_bytes(num_shards: int) -> bytes:
    """Return the header of an index."""
    return number_field(1, num_shards) + bytes_field(3, number_field(1, 1))


def _data(value: Any) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError("a message has a number where another message should be")
    return value


def _int64(value: Any) -> int:
    if type(value) is not int:
        raise ValueError("a message has bytes where a number should be")
    return value - (1 << 64) if value >> 63 else value


@lru_cache(maxsize=1 << 10)
def _shape(data: bytes) -> tuple[int, ...]:
    """Return the sizes in a TensorShapeProto; layers have the same."""
    return tuple(_int64(dict(fields(_data(dim))).get(1, 0)) for each, dim in fields(data) if each == 2)


def _extent(value: Any) -> Extent:
    ends = dict(fields(_data(value)))
    return _int64(ends.get(1, 0)), _int64(ends[2]) if 2 in ends else _FULL


def slice_key(name: bytes, extents: Sequence[Extent]) -> bytes:
    """Return the key of the entry with the elements of a slice.

    >>> slice_key(b"w", [(0, 3), (0, -1)]).hex(" ")
    '00 77 00 01 01 02 80 83 80 7f'
    """
    escaped = re.sub(rb"[\0\xff]", lambda match: b"\0\xff" if match[0] == b"\0" else b"\xff\0", name)
    rank = len(extents)
    rank_code = bytes([(rank.bit_length() + 7) // 8]) + rank.to_bytes((rank.bit_length() + 7) // 8, "big")
    codes = b"".join(_signed_code(start) + _signed_code(length) for start, length in extents)
    return b"\0" + escaped + b"\0\1" + rank_code + codes


def _signed_code(number: int) -> bytes:
    """Return a number as bytes, in a form that sorts as the numbers do."""
    bits = (~number if number < 0 else number).bit_length()
    nbytes = bits // 7 + 1
    if nbytes == 1:
        return bytes([(0x80 ^ number) & 0xFF])
    code = number & ((1 << 80) - 1)
    code ^= _LENGTH_BITS[nbytes] << 8 * (nbytes - 2)
    return (code & ((1 << 8 * nbytes) - 1)).to_bytes(nbytes, "big")


@dataclass(frozen=True, slots=True)
class Bundle:
    """The index of a checkpoint.

    Args:
        num_shards: The number of its data files.
        entries: By key, its entries.
        stem: The name of the checkpoint, without its folder.
        where: The index file, for messages.
    """

    num_shards: int
    entries: Mapping[bytes, BundleEntry]
    stem: str
    where: str

    @classmethod
    def parse(cls, table: Sequence[tuple[bytes, bytes]], stem: str, where: str) -> Bundle:
        """Parse the entries of a table.

        Raises:
            CheckpointCorruptError: One is damaged, or there is no header.
            CheckpointVersionError: The elements are big endian, or the format is newer.
        """
        entries = dict(table)
        try:
            header = dict(fields(entries.pop(b"")))
            num_shards = header.get(1, 0)
            versions = dict(fields(_data(header.get(3, b""))))
            if (least := _int64(versions.get(2, 0))) > _VERSION:
                raise CheckpointVersionError(
                    f"{where} is for readers of version {least} and later, expected {_VERSION}; upgrade dtckpt, or "
                    "write it anew with TensorFlow"
                )
            if header.get(2, 0) != 0:
                raise CheckpointVersionError(f"{where} is of a big endian machine, expected a little endian one")
            if type(num_shards) is not int or not 0 <= num_shards <= _MAX_SHARDS:
                raise ValueError(f"it has {num_shards!r:.40} data files")
            parsed = {key: BundleEntry.parse(value) for key, value in entries.items()}
        except CheckpointVersionError:
            raise
        except (KeyError, IndexError, ValueError, struct.error) as error:
            raise CheckpointCorruptError(f"{where} is damaged: {error!r:.120}; restore another checkpoint") from None
        return cls(num_shards, parsed, stem, where)

    def names(self) -> list[bytes]:
        """Return the names of all tensors, as they are stored."""
        # A code of a slice begins with a zero.
        return [key for key in self.entries if not key.startswith(b"\0")]

    def file(self, shard: int) -> str:
        """Return the name of a data file."""
        if not 0 <= shard < self.num_shards:
            raise CheckpointCorruptError(f"{self.where} is damaged: it has no data file {shard} of {self.num_shards}")
        return f"{self.stem}.data-{shard:05d}-of-{self.num_shards:05d}"

    def tensor(self, key: bytes, name: str) -> PieceTensor:
        """Return a tensor.

        Args:
            key: Its name, as it is stored.
            name: Its name in the state tree.

        Raises:
            CheckpointCorruptError: Its entries contradict each other.
            CheckpointVersionError: The dtype is not known.
        """
        entry = self.entries[key]
        dtype = _DTYPES.get(entry.dtype)
        if dtype is None:
            raise CheckpointVersionError(
                f"tensor {name[:200]!r} is of TensorFlow's dtype {entry.dtype}, which dtckpt does not know; expected "
                f"one of {', '.join(DTYPE_NUMBERS)}"
            )
        if not entry.slices:
            region = Region.full(entry.shape)
            pieces = [self._piece(entry, region, dtype, name)]
        else:
            pieces = [self._slice(entry, key, extents, dtype, name) for extents in entry.slices]
        return PieceTensor(name, entry.shape, dtype, tuple(piece for piece in pieces if piece is not None))

    def _slice(self, entry: BundleEntry, key: bytes, extents: Sequence[Extent], dtype: str, name: str) -> Piece | None:
        part = self.entries.get(slice_key(key, extents)) if len(extents) == len(entry.shape) else None
        if part is None or part.dtype != entry.dtype:
            raise CheckpointCorruptError(
                f"tensor {name[:200]!r} is damaged: the index lacks its slice {extents!r:.200}"
            )
        offset = tuple(start for start, _ in extents)
        shape = tuple(
            size - start if length == _FULL else length
            for size, (start, length) in zip(entry.shape, extents, strict=True)
        )
        if part.shape != shape or min(offset, default=0) < 0 or min(shape, default=0) < 0:
            raise CheckpointCorruptError(
                f"tensor {name[:200]!r} is damaged: its slice {extents!r:.200} has another shape"
            )
        return self._piece(part, Region(offset, shape), dtype, name)

    def _piece(self, entry: BundleEntry, region: Region, dtype: str, name: str) -> Piece | None:
        nbytes = region.numel * DTYPES[dtype].itemsize
        if entry.nbytes != nbytes:
            raise CheckpointCorruptError(
                f"tensor {name[:200]!r} is damaged: it has {entry.nbytes} bytes, expected {nbytes}"
            )
        if not nbytes:
            return None
        crc = entry.crc
        checked = None if crc is None else CheckedBytes(entry.offset, nbytes, crc, is_castagnoli=True)
        return Piece(region, self.file(entry.shard), entry.offset, checked=checked)


def key_of(path: Sequence[str]) -> str:
    """Return the name of the value of the object at a path.

    >>> key_of(("model", "d", "x.y/z"))
    'model/d/x..y.Sz/.ATTRIBUTES/VARIABLE_VALUE'
    """
    return "/".join(key.replace(".", "..").replace("/", ".S") for key in path) + VALUE_SUFFIX


def path_of(name: str) -> tuple[str, ...] | None:
    """Return the path of the object whose value has a name; None if it is no object's own value.

    >>> path_of("model/d/x..y.Sz/.ATTRIBUTES/VARIABLE_VALUE")
    ('model', 'd', 'x.y/z')
    """
    if not name.endswith(VALUE_SUFFIX):
        return None
    keys = name.removesuffix(VALUE_SUFFIX).split("/")
    if SLOT in keys or "" in keys:
        return None
    return tuple(_ESCAPES.sub(lambda match: "/" if match[0] == ".S" else ".", key) for key in keys)


def parse_strings(data: bytes, count: int, crc: int | None, crc32c: Any) -> list[bytes]:
    """Parse the elements of a tensor of strings: their lengths as varints, a checksum of these, and the strings.

    Args:
        data: The bytes.
        count: The number of strings.
        crc: The CRC of all.
        crc32c: The function that computes it.

    Raises:
        ValueError or IndexError: They are damaged.
    """
    if count > len(data):
        raise ValueError("there are more strings than bytes")
    lengths, position = [], 0
    for _ in range(count):
        length, position = read_varint(data, position)
        lengths.append(length)
    # The checksums are of numbers, whatever bytes the varints have.
    numbers = b"".join(struct.pack("<I" if length < 1 << 32 else "<Q", length) for length in lengths)
    checksum = data[position : position + 4]
    start = position + 4
    if start + sum(lengths) != len(data) or unmask(int.from_bytes(checksum, "little")) != crc32c(numbers):
        raise ValueError("the lengths of the strings do not match their checksum")
    if crc is not None and crc32c(numbers + checksum + data[start:]) != crc:
        raise ValueError("the strings do not match their checksum")
    strings = []
    for length in lengths:
        strings.append(data[start : start + length])
        start += length
    return strings
