"""Files of ``torch.save``: a zip of uncompressed records, one of them a pickle, one for each storage of tensors.

::

    archive/data.pkl     the tree; tensors as views of storages      archive/data/0   the bytes of storage "0"
    archive/byteorder    little or big                               archive/data/1   …

The elements of a tensor are therefore a range of bytes of the file, which its readers need not copy through PyTorch.
PyTorch leaves sizes out of the headers in front of the records; the directory at the file's end has them.

The format: PKWARE's APPNOTE, sections 4.3.7 (header of a record), 4.3.12 (directory) and 4.3.14 to 4.3.16 (its end).
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from dtckpt.checkpoint.foreign.pickle_syntax import MAX_PICKLE_NBYTES, ReadBudget, parse_pickle
from dtckpt.checkpoint.foreign.pickled_tensors import StorageView
from dtckpt.errors import CheckpointCorruptError, CheckpointVersionError

MAX_DIRECTORY_NBYTES = 256 << 20
"""Longest directory of a zip that is read; it has some million records."""
TAIL_NBYTES = 1024
"""Bytes from the end of a file that hold the whole directory of a zip with one tensor."""

_HEADER = struct.Struct("<4s22xHH")
"""Header of a record: signature, bytes of the name, bytes of the extra field."""
_ENTRY = struct.Struct("<4s4xHH4xIIIHHH8xI")
"""Of the directory: signature, flags, method, CRC, packed bytes, bytes; bytes of name, extra field and comment; header.
"""
CRC_NBYTES = 4
_CRC_OFFSET = 16
"""Offset of the CRC in an entry of the directory."""
_END = struct.Struct("<4s8xII2x")
"""Record after the directory: signature, bytes of the directory, its offset."""
_END_64 = struct.Struct("<4s36xQQ")
_LOCATOR_64 = struct.Struct("<4s4xQ4x")
_IS_ENCRYPTED, _HAS_TRAILER = 1, 8
"""Flags."""
_FULL = 0xFFFFFFFF
"""Value of a field of four bytes, if the extra field has the number in eight bytes."""

_OLD_MAGIC = bytes.fromhex("80028a0a6cfc9c46f9206aa85019")
"""The first bytes of the old format: a pickle of a large number."""
_OLD_NBYTES = 262

Read = Callable[[int, int], bytes]
"""Returns the bytes of a file from a position to another position; fewer where the file ends before."""
Parse = Callable[[bytes, str, ReadBudget], Any]
"""Returns the value of a pickle, as `parse_pickle` does."""


@dataclass(frozen=True, slots=True)
class Record:
    """A record of a zip.

    Args:
        name: Its name.
        header: Position of its header.
        nbytes: Bytes of its content.
        is_plain: Whether the content is stored as it is, neither compressed nor encrypted.
        stop: The end of its content, if it is plain.
        end: The end of the record, where the next record or the directory begins.
        crc: CRC-32 of its content; 0 if PyTorch computed none.
        crc_start: Position of the CRC in the directory.
    """

    name: str
    header: int
    nbytes: int
    is_plain: bool
    stop: int
    end: int
    crc: int
    crc_start: int


@dataclass(frozen=True, slots=True, eq=False)
class TorchZip:
    """A file of ``torch.save``, or a part of a file.

    Args:
        where: Its name, for messages.
        value: The value of its pickle, with stand-ins (`dtckpt.checkpoint.foreign.pickle_syntax`).
        prefix: Prefix of the names of its records.
        records: The records by name.
        read: Reads it.
        budget: Bounds the bytes of the objects made from it.
    """

    where: str
    value: Any
    prefix: str
    records: Mapping[str, Record]
    read: Read
    budget: ReadBudget

    def storage(self, key: str, nbytes: int) -> tuple[int, Record]:
        """Return the position of a storage's first byte, and its record. Blocks: on the file.

        Args:
            key: The storage's name in the pickle.
            nbytes: Its bytes.

        Raises:
            CheckpointCorruptError: There is no such storage, or it has another length.
        """
        record = self.records.get(f"{self.prefix}data/{key}")
        if record is None:
            raise _malformed(self.where, f"storage {key[:80]!r} is missing")
        if record.nbytes != nbytes:
            raise _malformed(self.where, f"storage {key!r} has {record.nbytes} bytes, expected {nbytes}")
        return _content_start(record, self.read, self.where), record

    def element_start(self, view: StorageView) -> int:
        """Return the position of a tensor's first element. Blocks and Raises: as `storage`."""
        return self.storage(view.key, view.storage_nbytes)[0] + view.start


def read_zip(
    read: Read, nbytes: int, where: str, budget: ReadBudget | None = None, parse: Parse = parse_pickle
) -> TorchZip:
    """Read the directory and the pickle of a file of ``torch.save``.

    Args:
        read: Reads the file.
        nbytes: Bytes of the file.
        where: Its name, for messages.
        budget: As for `parse_pickle`.
        parse: Parses the pickle.

    Raises:
        CheckpointCorruptError: The file is cut short or malformed, or makes far more than its bytes.
        CheckpointVersionError: The file was not written by ``torch.save``, by an old version, or on a big-endian
            machine.
    """
    _validate_age(read, where)
    try:
        records = _records(read, nbytes, where)
        name = next((name for name in records if name.endswith("/data.pkl") and name.count("/") == 1), None)
        if name is None:
            raise CheckpointVersionError(f"{where} is a zip, but not one of torch.save: it has no data.pkl")
        prefix = name.removesuffix("data.pkl")
        if f"{prefix}constants.pkl" in records:
            raise CheckpointVersionError(
                f"{where} is a TorchScript program; save its tensors: torch.save(torch.jit.load(path).state_dict(), …)"
            )
        _validate_byte_order(records.get(f"{prefix}byteorder"), read, where)
        if records[name].nbytes > MAX_PICKLE_NBYTES:
            raise _malformed(where, f"its pickle has {records[name].nbytes} bytes")
        budget = ReadBudget(where) if budget is None else budget
        value = parse(_content(records[name], read, where), where, budget)
    except (struct.error, UnicodeDecodeError) as error:
        raise _malformed(where, str(error)) from error
    return TorchZip(where, value, prefix, records, read, budget)


def _validate_byte_order(record: Record | None, read: Read, where: str) -> None:
    # Older versions of PyTorch do not note it; they ran on little-endian machines.
    order = b"little" if record is None else _content(record, read, where)
    if order != b"little":
        raise CheckpointVersionError(
            f"{where} has byte order {order[:16]!r}, expected little; load it with PyTorch and save it on a "
            "little-endian machine"
        )


def _records(read: Read, nbytes: int, where: str) -> dict[str, Record]:
    """Return the records of a zip, by name."""
    start, stop = _directory_span(read, nbytes, where)
    entries = sorted(_entries(read(start, stop), start, where), key=lambda entry: entry.header)
    records = {}
    for entry, end in zip(entries, [*(entry.header for entry in entries[1:]), start], strict=True):
        is_plain = entry.method == 0 and not entry.flags & _IS_ENCRYPTED and entry.nbytes == entry.packed
        stop = end - entry.trailer_nbytes
        record = Record(entry.name, entry.header, entry.nbytes, is_plain, stop, end, entry.crc, entry.crc_start)
        if entry.name in records or entry.header + entry.packed > record.stop:
            raise _malformed(where, f"its directory is damaged at {entry.name[:80]!r}")
        records[entry.name] = record
    return records


class _Entry(NamedTuple):
    """An entry of the directory."""

    name: str
    flags: int
    method: int
    crc: int
    crc_start: int
    packed: int
    nbytes: int
    header: int

    @property
    def trailer_nbytes(self) -> int:
        """Bytes between the content and the next record, with the numbers that the header lacks."""
        if not self.flags & _HAS_TRAILER:
            return 0
        return 24 if max(self.packed, self.nbytes, self.header) >= _FULL else 16


def _entries(data: bytes, start: int, where: str) -> Iterator[_Entry]:
    """Yield the entries of a directory, which begins at a position of the file."""
    position = 0
    while position < len(data):
        signature, flags, method, crc, packed, nbytes, *lengths, header = _ENTRY.unpack_from(data, position)
        name_start, crc_start = position + _ENTRY.size, start + position + _CRC_OFFSET
        extra_start = name_start + lengths[0]
        extra = data[extra_start : extra_start + lengths[1]]
        position = extra_start + lengths[1] + lengths[2]
        if signature != b"PK\1\2" or position > len(data):
            raise _malformed(where, "its directory is damaged")
        # The extra field has the numbers that are too large for the entry, in this order.
        nbytes, packed, header = _long_numbers((nbytes, packed, header), extra)
        yield _Entry(data[name_start:extra_start].decode(), flags, method, crc, crc_start, packed, nbytes, header)


def _validate_age(read: Read, where: str) -> None:
    """Refuse the formats that ``torch.save`` had before it wrote zips: a series of pickles, and before that a tar."""
    head = read(0, _OLD_NBYTES)
    if head.startswith(_OLD_MAGIC) or head[257:262] == b"ustar":
        raise CheckpointVersionError(
            f"{where} has the format of torch.save before PyTorch 1.6; write it anew: "
            "torch.save(torch.load(path, weights_only=True), path)"
        )


def _directory_span(read: Read, nbytes: int, where: str) -> tuple[int, int]:
    """Return where the directory of a zip begins and ends."""
    tail_start = max(0, nbytes - TAIL_NBYTES)
    tail = read(tail_start, nbytes)
    # PyTorch writes no comment, so the zip ends with this.
    end = len(tail) - _END.size
    if len(tail) != nbytes - tail_start or end < 0 or not tail.startswith(b"PK\5\6", end):
        raise _malformed(where, "its end is missing; was it copied in part?")
    _, length, start = _END.unpack_from(tail, end)
    locator = end - _LOCATOR_64.size
    if locator >= 0 and tail.startswith(b"PK\6\7", locator):
        position = _LOCATOR_64.unpack_from(tail, locator)[1] - tail_start
        if position < 0 or not tail.startswith(b"PK\6\6", position):
            raise _malformed(where, "its end is damaged")
        _, length, start = _END_64.unpack_from(tail, position)
    if length > MAX_DIRECTORY_NBYTES or start + length > nbytes:
        raise _malformed(where, "its end is damaged")
    return start, start + length


def _long_numbers(numbers: tuple[int, ...], extra: bytes) -> tuple[int, ...]:
    """Return the numbers of an entry; numbers that are too large for it are in the extra field."""
    if _FULL not in numbers:
        return numbers
    position = 0
    while position + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, position)
        if kind == 1:
            longs = iter(struct.unpack_from(f"<{numbers.count(_FULL)}Q", extra, position + 4))
            return tuple(next(longs) if number == _FULL else number for number in numbers)
        position += 4 + length
    return numbers


def _content_start(record: Record, read: Read, where: str) -> int:
    """Return the position of a record's content."""
    if not record.is_plain:
        raise CheckpointVersionError(
            f"record {record.name[:80]!r} of {where} is compressed; load it with PyTorch and save it anew"
        )
    name = record.name.encode()
    header = read(record.header, record.header + _HEADER.size + len(name))
    signature, name_nbytes, extra_nbytes = _HEADER.unpack_from(header)
    start = record.header + len(header) + int(extra_nbytes)
    # Nothing else would tell that the length of the extra field, and with it the place of all elements, is damaged.
    is_sound = signature == b"PK\3\4" and header[_HEADER.size :] == name and name_nbytes == len(name)
    if not is_sound or start + record.nbytes != record.stop:
        raise _malformed(where, f"the header of record {record.name[:80]!r} is damaged")
    return start


def _content(record: Record, read: Read, where: str) -> bytes:
    start = _content_start(record, read, where)
    content = read(start, start + record.nbytes)
    if len(content) != record.nbytes:
        raise _malformed(where, f"record {record.name[:80]!r} is cut short")
    if record.crc and zlib.crc32(content) != record.crc:
        raise _malformed(where, f"the bytes of record {record.name[:80]!r} differ from the saved bytes")
    return content


def _malformed(where: str, reason: str) -> CheckpointCorruptError:
    return CheckpointCorruptError(f"{where} cannot be read as a file of torch.save: {reason}; use another copy")
