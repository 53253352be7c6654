"""Compression of chunks, as codecs of Zarr v3.

Digests are over the elements, so they do not depend on the codec. A compressed chunk can only be read whole.
"""

from __future__ import annotations

import struct
from typing import Any

MAX_RATIO = 1 << 15
"""How much smaller than its elements a compressed chunk can be: Zstandard's shortest block has 4 bytes for 128 KiB."""

_MIN_GROWTH = 128
_OVERHEAD_NBYTES = 4096
"""What does not compress grows by headers: of Zstandard by a 256th, of Blosc by 16 bytes and 4 a block."""
_BLOSC_NBYTES = 16
_FRAME, _SKIPPABLE = 0xFD2FB528, 0x184D2A50
_NO_DESCRIPTOR = 1 << 3
"""A bit that is reserved, and so never set, in a frame's descriptor."""
_RAW, _REPEATED = 0, 1
_ZSTD_BLOCK_NBYTES = 128 << 10

NO_CODEC = "none"
CODECS = (NO_CODEC, "zstd", "blosc")
"""In the order of the `Codec` enum (from 0)."""


def codec_documents(codec: str, itemsize: int) -> list[dict[str, Any]]:
    """Return an array's ``codecs`` for its ``zarr.json`` (Zarr v3 specifications of `bytes`, `zstd`, `blosc`)."""
    documents: list[dict[str, Any]] = [{"name": "bytes", "configuration": {"endian": "little"}}]
    if codec == "zstd":
        # No checksum of its own: every read compares the digest of the elements.
        documents.append({"name": "zstd", "configuration": {"level": 3, "checksum": False}})
    elif codec == "blosc":
        # Exponents of weights are alike, mantissas are noise: bits of one place compress better side by side.
        shuffled = {"cname": "zstd", "clevel": 1, "shuffle": "bitshuffle", "typesize": itemsize, "blocksize": 0}
        documents.append({"name": "blosc", "configuration": shuffled})
    return documents


def chunk_bounds(codec: str, nbytes: int) -> tuple[int, int]:
    """Return the fewest and the most bytes that a chunk of so many bytes can take on storage."""
    if codec == NO_CODEC:
        return nbytes, nbytes
    return max(1, -(-nbytes // MAX_RATIO)), nbytes + nbytes // _MIN_GROWTH + _OVERHEAD_NBYTES


def validate_encoded(codec: str, data: bytes, nbytes: int) -> None:
    """Check that a stored chunk decodes to so many bytes, before memory is taken for more.

    Of Zstandard's, no more is decoded than is wanted, so only Blosc's header counts (Blosc 1, README_CHUNK_FORMAT).

    Raises:
        ValueError: It does not.
    """
    least, most = chunk_bounds(codec, nbytes)
    stated = nbytes, len(data)
    if codec == "blosc" and len(data) >= _BLOSC_NBYTES:
        decoded, _, encoded = struct.unpack_from("<III", data, 4)
        stated = decoded, encoded
    if not least <= len(data) <= most or stated != (nbytes, len(data)):
        raise ValueError(
            f"the chunk is corrupt: got {len(data)} stored bytes for {stated[0]} bytes of elements, expected {nbytes}"
        )


def zstd_bound(data: bytes) -> int:
    """Return how many bytes data can decompress to at most, as frames and blocks say (Zstandard, RFC 8878, section 3).

    Raises:
        ValueError: These are no frames.
    """
    at = total = 0
    try:
        while at < len(data):
            (magic,) = struct.unpack_from("<I", data, at)
            if magic & 0xFFFFFFF0 == _SKIPPABLE:
                at += 8 + struct.unpack_from("<I", data, at + 4)[0]
                continue
            descriptor = data[at + 4] if magic == _FRAME else _NO_DESCRIPTOR
            if descriptor & _NO_DESCRIPTOR:
                raise ValueError("no frame")
            is_single = descriptor >> 5 & 1
            content_nbytes = (is_single, 2, 4, 8)[descriptor >> 6]
            at += 5 + (1 - is_single) + (0, 1, 2, 4)[descriptor & 3] + content_nbytes
            is_last = False
            while not is_last:
                header = data[at] | data[at + 1] << 8 | data[at + 2] << 16
                is_last, kind, size = bool(header & 1), header >> 1 & 3, header >> 3
                at += 3 + (1 if kind == _REPEATED else size)
                total += size if kind in (_RAW, _REPEATED) else _ZSTD_BLOCK_NBYTES
            at += 4 * (descriptor >> 2 & 1)
        if at > len(data):
            raise ValueError("no end")
    except (struct.error, IndexError, ValueError):
        raise ValueError("Zstd-compressed data is corrupt: it ends within a frame, or is none") from None
    return total
