"""The fields of protobuf messages, without their schema; pure. Source: protobuf.dev, "Encoding"."""

from __future__ import annotations

import struct
from collections.abc import Iterator

from dtckpt.checkpoint.foreign.sstable import read_varint, varint

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


def fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield the number and the value of each field of a message.

    Raises:
        ValueError, IndexError or struct.error: The message is damaged.
    """
    position = 0
    while position < len(data):
        tag, position = read_varint(data, position)
        kind = tag & 7
        value: int | bytes
        if kind == _VARINT:
            value, position = read_varint(data, position)
        elif kind == _BYTES:
            nbytes, position = read_varint(data, position)
            value, position = data[position : position + nbytes], position + nbytes
        elif kind in (_FIXED32, _FIXED64):
            (value,) = struct.unpack_from("<I" if kind == _FIXED32 else "<Q", data, position)
            position += 4 if kind == _FIXED32 else 8
        else:
            raise ValueError(f"a message has a field of kind {kind}")
        if position > len(data):
            raise ValueError("a message is cut short")
        yield tag >> 3, value


def number_field(number: int, value: int) -> bytes:
    """Return a field with a number; nothing for zero, which is the default."""
    return varint(number << 3 | _VARINT) + varint(value) if value else b""


def bytes_field(number: int, data: bytes) -> bytes:
    """Return a field with a text, bytes, or a message."""
    return varint(number << 3 | _BYTES) + varint(len(data)) + data
