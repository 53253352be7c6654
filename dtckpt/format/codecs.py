"""Compression of chunks: the codecs of Zarr v3 that a checkpoint may use, and bounds on the decoded size.

Digests are over the elements, so they do not depend on the codec. A compressed chunk can only be read whole.
"""

from __future__ import annotations

import struct
from typing import Any

MAX_RATIO = 1 << 15
"""How many times smaller than its elements a chunk can be: Zstandard's shortest block has 4 bytes for 128 KiB."""

_GROWTH_DIVISOR = 128
_OVERHEAD_NBYTES = 4096
"""Data that does not compress grows by headers: a 256th for Zstandard, 16 bytes and 4 per block for Blosc. These two
bounds allow more: a 128th of the elements, and 4 KiB."""
_BLOSC_HEADER_NBYTES = 16
_FRAME, _SKIPPABLE = 0xFD2FB528, 0x184D2A50
_NO_DESCRIPTOR = 1 << 3
"""The reserved bit of a frame's descriptor, which is never set."""
_RAW, _REPEATED = 0, 1
_ZSTD_BLOCK_NBYTES = 128 << 10
_BLOSC_BLOCK_NUMEL = 2 * _ZSTD_BLOCK_NBYTES
"""Elements of a block of Blosc: two blocks of Zstandard for each byte of an element. In the shuffled block, no block of
Zstandard holds two of these bytes, and so each has a separate code: short for exponents, none for mantissas. For
blocks of more than 256 KiB, Zstandard also looks for longer repetitions only, which noise has not."""

NO_CODEC = "none"
CODECS = (NO_CODEC, "zstd", "blosc")
"""The codecs, in the order of the `Codec` enum of the manifest (from 0)."""


def codec_documents(codec: str, itemsize: int, chunk_nbytes: int) -> list[dict[str, Any]]:
    """Return the ``codecs`` of an array's ``zarr.json`` (Zarr v3 specifications of `bytes`, `zstd`, `blosc`).

    A chunk of Blosc tells by itself how it was shuffled, so readers also take the settings of earlier versions of
    dtckpt, whose chunks a later checkpoint may share.

    Args:
        codec: How chunks are compressed.
        itemsize: Bytes of an element.
        chunk_nbytes: Bytes of the elements of a chunk.
    """
    documents: list[dict[str, Any]] = [{"name": "bytes", "configuration": {"endian": "little"}}]
    if codec == "zstd":
        # The codec needs no checksum: every read compares the digest of the elements.
        documents.append({"name": "zstd", "configuration": {"level": 3, "checksum": False}})
    elif codec == "blosc":
        # Exponents of weights are alike, mantissas are noise. In a chunk that is too small for codes of single bytes,
        # equal bits side by side compress better.
        is_small = chunk_nbytes < itemsize * _ZSTD_BLOCK_NBYTES
        shuffle, blocksize = ("bitshuffle", 0) if is_small else ("shuffle", itemsize * _BLOSC_BLOCK_NUMEL)
        settings = {"cname": "zstd", "clevel": 1, "shuffle": shuffle, "typesize": itemsize, "blocksize": blocksize}
        documents.append({"name": "blosc", "configuration": settings})
    return documents


def chunk_bounds(codec: str, nbytes: int) -> tuple[int, int]:
    """Return the fewest and the most bytes on storage for a chunk whose elements have ``nbytes`` bytes."""
    if codec == NO_CODEC:
        return nbytes, nbytes
    return max(1, -(-nbytes // MAX_RATIO)), nbytes + nbytes // _GROWTH_DIVISOR + _OVERHEAD_NBYTES


def validate_encoded(codec: str, data: bytes, nbytes: int) -> None:
    """Check that a stored chunk decodes to ``nbytes`` bytes, before a decoder takes memory for more.

    The decoder of Zstandard stops at the expected size, so only the header of Blosc is checked (Blosc 1,
    README_CHUNK_FORMAT).

    Raises:
        ValueError: The header states another size, or an impossible length.
    """
    least, most = chunk_bounds(codec, nbytes)
    stated = nbytes, len(data)
    if codec == "blosc" and len(data) >= _BLOSC_HEADER_NBYTES:
        decoded, _, encoded = struct.unpack_from("<III", data, 4)
        stated = decoded, encoded
    if not least <= len(data) <= most or stated != (nbytes, len(data)):
        raise ValueError(
            f"the chunk is corrupt: got {len(data)} stored bytes for {stated[0]} bytes of elements, expected {nbytes}"
        )


def zstd_bound(data: bytes) -> int:
    """Return the most bytes that Zstandard data can decompress to, from its frame and block headers.

    Source: RFC 8878, section 3.

    Raises:
        ValueError: The data is not made of whole frames.
    """
    position = total = 0
    try:
        while position < len(data):
            (magic,) = struct.unpack_from("<I", data, position)
            if magic & 0xFFFFFFF0 == _SKIPPABLE:
                position += 8 + struct.unpack_from("<I", data, position + 4)[0]
                continue
            descriptor = data[position + 4] if magic == _FRAME else _NO_DESCRIPTOR
            if descriptor & _NO_DESCRIPTOR:
                raise ValueError("no frame")
            # The header: magic, descriptor, window unless it is a single segment, dictionary id, content size.
            is_single = descriptor >> 5 & 1
            content_nbytes = (is_single, 2, 4, 8)[descriptor >> 6]
            position += 5 + (1 - is_single) + (0, 1, 2, 4)[descriptor & 3] + content_nbytes
            is_last = False
            while not is_last:
                header = data[position] | data[position + 1] << 8 | data[position + 2] << 16
                is_last, kind, size = bool(header & 1), header >> 1 & 3, header >> 3
                # A repeated block stores one byte; a compressed block states no size, but its size is bounded.
                position += 3 + (1 if kind == _REPEATED else size)
                total += size if kind in (_RAW, _REPEATED) else _ZSTD_BLOCK_NBYTES
            # The checksum, if there is one.
            position += 4 * (descriptor >> 2 & 1)
        if position > len(data):
            raise ValueError("no end")
    except (struct.error, IndexError, ValueError):
        raise ValueError("Zstd-compressed data is corrupt: it ends within a frame, or is none") from None
    return total
