"""Compression of chunks, as codecs of Zarr v3.

Digests are over the elements, so they do not depend on the codec. A compressed chunk can only be read whole.
"""

from __future__ import annotations

from typing import Any

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
