"""Sorted tables of LevelDB, as TensorFlow writes them: sorted keys with values, in one file; pure.

::

    | block ... | metaindex block | index block | footer |

    a block    entries | restart offsets, u32 each | their number, u32 || type, 1 byte | masked CRC-32C of both
    an entry   varints: bytes shared with the key before, other bytes of the key, bytes of the value | key | value
    the index  separator (at least the last key of a block, less than the next) -> first byte and length of the block
    the footer first byte and length of metaindex and index, as varints | zeros | magic

Source: doc/table_format.md of LevelDB; TensorFlow's lib/io/{table_builder,block_builder,format}.cc.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from itertools import pairwise

from dtckpt.errors import CheckpointCorruptError, CheckpointVersionError

MAGIC = bytes.fromhex("57fb808b247547db")
FOOTER_NBYTES = 48
_TRAILER_NBYTES = 5
_MASK_DELTA = 0xA282EAD8
_BLOCK_NBYTES = 256 << 10
"""Bytes of entries after which TensorFlow ends a block."""
_RESTART_INTERVAL = 16
_MAX_VARINT_NBYTES = 10
_PLAIN, _SNAPPY = 0, 1


def mask(crc: int) -> int:
    """Return a CRC as it is stored: masked, so that the CRC of bytes that hold CRCs is of use."""
    return (((crc >> 15) | (crc << 17)) + _MASK_DELTA) & 0xFFFFFFFF


def unmask(masked: int) -> int:
    """Return the CRC that was masked."""
    rotated = (masked - _MASK_DELTA) & 0xFFFFFFFF
    return ((rotated >> 17) | (rotated << 15)) & 0xFFFFFFFF


def read_varint(data: bytes, position: int) -> tuple[int, int]:
    """Return a varint, and the position behind it.

    Raises:
        IndexError: The data ends before.
        ValueError: The number has too many bytes.
    """
    number = shift = 0
    for at in range(position, position + _MAX_VARINT_NBYTES):
        byte = data[at]
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, at + 1
        shift += 7
    raise ValueError("a number has too many bytes")


def varint(number: int) -> bytes:
    """Return a number as a varint; a negative one as its two's complement of 64 bits."""
    number &= (1 << 64) - 1
    parts = bytearray()
    while number >= 0x80:
        parts.append(number & 0x7F | 0x80)
        number >>= 7
    parts.append(number)
    return bytes(parts)


def read_table(data: bytes, where: str) -> list[tuple[bytes, bytes]]:
    """Return the keys and values of a table, ascending.

    Raises:
        CheckpointCorruptError: The table is damaged.
        CheckpointVersionError: The table is compressed.
    """
    if data[-len(MAGIC) :] != MAGIC or len(data) < FOOTER_NBYTES:
        raise CheckpointCorruptError(f"{where} is damaged: it does not end as a table does; restore another checkpoint")
    try:
        footer = data[-FOOTER_NBYTES:]
        _, position = read_varint(footer, 0)
        _, position = read_varint(footer, position)
        first, position = read_varint(footer, position)
        nbytes, _ = read_varint(footer, position)
        entries: list[tuple[bytes, bytes]] = []
        taken = 0
        for _, handle in _entries(_block(data, first, nbytes, where)):
            first, position = read_varint(handle, 0)
            nbytes, _ = read_varint(handle, position)
            # Else an index could name one block many times.
            taken += nbytes + _TRAILER_NBYTES
            if taken > len(data):
                raise ValueError("its blocks overlap")
            entries += _entries(_block(data, first, nbytes, where))
    except (IndexError, ValueError, struct.error) as error:
        raise CheckpointCorruptError(f"{where} is damaged: {error}; restore another checkpoint") from None
    if any(one[0] >= other[0] for one, other in pairwise(entries)):
        raise CheckpointCorruptError(f"{where} is damaged: its keys are not sorted; restore another checkpoint")
    return entries


def _block(data: bytes, first: int, nbytes: int, where: str) -> bytes:
    stop = first + nbytes
    if stop + _TRAILER_NBYTES > len(data):
        raise ValueError("a block would end behind the file")
    kind, masked = data[stop], int.from_bytes(data[stop + 1 : stop + _TRAILER_NBYTES], "little")
    from awscrt.checksums import crc32c  # here, because most checkpoints are of other formats

    if crc32c(data[first : stop + 1]) != unmask(masked):
        raise ValueError("the CRC of a block does not match")
    if kind != _PLAIN:
        name = "Snappy" if kind == _SNAPPY else f"method {kind}"
        raise CheckpointVersionError(f"{where} is compressed by {name}, which TensorFlow does not do; write it anew")
    return data[first:stop]


def _entries(block: bytes) -> Iterator[tuple[bytes, bytes]]:
    (num_restarts,) = struct.unpack_from("<I", block, len(block) - 4)
    stop = len(block) - 4 - 4 * num_restarts
    position, key, taken = 0, b"", 0
    while position < stop:
        shared, position = read_varint(block, position)
        rest, position = read_varint(block, position)
        nbytes, position = read_varint(block, position)
        if shared > len(key) or position + rest + nbytes > stop:
            raise ValueError("an entry is cut short")
        key = key[:shared] + block[position : position + rest]
        position += rest
        # Keys that share their beginnings could together be far longer than the block.
        taken += len(key)
        if taken > 64 * len(block) + (1 << 20):
            raise ValueError("its keys are too long")
        yield key, block[position : position + nbytes]
        position += nbytes
    if position != stop or stop < 0:
        raise ValueError("a block does not end where its entries do")


def table_bytes(entries: Sequence[tuple[bytes, bytes]]) -> bytes:
    """Return the table of keys, ascending, and values."""
    table = bytearray()
    index, block = _Block(1), _Block(_RESTART_INTERVAL)
    for position, (key, value) in enumerate(entries):
        block.add(key, value)
        after = entries[position + 1][0] if position + 1 < len(entries) else None
        if after is None or block.nbytes >= _BLOCK_NBYTES:
            index.add(_separator(key, after), block.append_to(table))
            block = _Block(_RESTART_INTERVAL)
    handles = _Block(_RESTART_INTERVAL).append_to(table) + index.append_to(table)
    return bytes(table) + handles.ljust(FOOTER_NBYTES - len(MAGIC), b"\0") + MAGIC


class _Block:
    """A block that is being written.

    Args:
        interval: Of how many entries the first has its whole key.
    """

    def __init__(self, interval: int) -> None:
        self._interval = interval
        self._data = bytearray()
        self._restarts = [0]
        self._count = 0
        self._last = b""

    @property
    def nbytes(self) -> int:
        """Bytes of the block, without type and CRC."""
        return len(self._data) + 4 * len(self._restarts) + 4

    def add(self, key: bytes, value: bytes) -> None:
        """Add an entry."""
        shared = 0
        if self._count % self._interval:
            while shared < min(len(key), len(self._last)) and key[shared] == self._last[shared]:
                shared += 1
        elif self._count:
            self._restarts.append(len(self._data))
        self._data += varint(shared) + varint(len(key) - shared) + varint(len(value)) + key[shared:] + value
        self._last = key
        self._count += 1

    def append_to(self, table: bytearray) -> bytes:
        """Append the block to a table; return its handle."""
        data = bytes(self._data) + struct.pack(f"<{len(self._restarts) + 1}I", *self._restarts, len(self._restarts))
        handle = varint(len(table)) + varint(len(data))
        data += bytes([_PLAIN])
        from awscrt.checksums import crc32c  # here, as above

        table += data + struct.pack("<I", mask(crc32c(data)))
        return handle


def _separator(key: bytes, after: bytes | None) -> bytes:
    """Return a short key that is at least ``key`` and less than the key after it, if there is one."""
    for at, byte in enumerate(key):
        if after is not None and key[: at + 1] == after[: at + 1]:
            continue
        if byte < 0xFF and (after is None or (at < len(after) and byte + 1 < after[at])):
            return key[:at] + bytes([byte + 1])
        if after is not None:
            break
    return key
