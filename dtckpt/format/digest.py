"""Chunk digests: XXH3 (64 bit) over a chunk's elements, bound to the tensor and to the chunk's place.

The seed is derived from the tensor's name and the chunk's index, so two chunks that changed places do not verify.
Elements are hashed in C order in the stored dtype, little endian, without the padding of edge chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import xxhash


def chunk_digest(name: str, index: Sequence[int], elements: np.ndarray[Any, Any]) -> int:
    """Return the digest of one chunk; non-contiguous ``elements`` are copied first."""
    place = f"{name}\0{','.join(map(str, index))}".encode()
    return xxhash.xxh3_64_intdigest(as_bytes(elements).data, seed=xxhash.xxh3_64_intdigest(place))


def as_bytes(elements: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """View elements as flat uint8, in C order (a copy only where they are not contiguous)."""
    return np.ascontiguousarray(elements).reshape(-1).view(np.uint8)


def bytes_digest(data: bytes | memoryview) -> int:
    """Return the digest of plain bytes."""
    return xxhash.xxh3_64_intdigest(data)
