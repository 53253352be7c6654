"""`SignedFiles`: the digests of files that a signature covers; `Envelope`: the digests with the signatures; pure.

The digests of the manifest (XXH3, CRC-64) find accidents, not forgeries: an attacker can compute other bytes of the
same digest. So the signature is over cryptographic digests of the files, one for each block of 1 MiB or more. A reader
verifies a range of a file by its blocks. The digests are BLAKE3 where the signer has the package ``blake3``, else
SHA-256. BLAKE3 takes 0.22 s a GiB and core; SHA-256 takes 0.6 s with instructions for it, and 2 s without.

The file ``dtckpt.signature`` is an envelope of DSSE (Dead Simple Signing Envelope 1.0.2, of in-toto and Sigstore)::

    {"payloadType": ..., "payload": base64 of the statement, "signatures": [{"keyid": ..., "sig": base64}]}
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import importlib.util
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from dtckpt.errors import ConfigError
from dtckpt.format import json_facts

SIGNATURE_NAME = "dtckpt.signature"
MAX_SIGNATURE_NBYTES = 256 << 20
"""Bytes of an envelope; a longer one is neither written nor read."""
PAYLOAD_TYPE = "application/vnd.dtckpt.files+json"
MIN_BLOCK_NBYTES = 1 << 20
MAX_BLOCKS = 1 << 20
"""Blocks of a checkpoint, more or less: larger checkpoints have larger blocks."""
MAX_BLOCK_NBYTES = 1 << 30
DIGEST_NBYTES = 32
SHA256, BLAKE3 = "sha256", "blake3"
"""The algorithms of digests, by their names in the payload."""
_VERSION = 1


@dataclass(frozen=True, slots=True)
class SignedFile:
    """The digests of one file.

    Args:
        nbytes: Its size.
        digests: The digests of its blocks, one after the other.
    """

    nbytes: int
    digests: bytes

    def digest(self, number: int) -> bytes:
        """Return the digest of a block."""
        return self.digests[number * DIGEST_NBYTES : (number + 1) * DIGEST_NBYTES]


def best_algorithm() -> str:
    """Return the fastest algorithm of digests for which this machine has a package."""
    return BLAKE3 if importlib.util.find_spec("blake3") is not None else SHA256


@cache
def _hasher_of(algorithm: str) -> Callable[..., Any]:
    """Return the constructor of a hash object. Raises: ConfigError: The package for it is not installed."""
    if algorithm == SHA256:
        return hashlib.sha256
    if best_algorithm() != BLAKE3:
        raise ConfigError("the signature is over BLAKE3 digests, which need blake3: pip install 'dtckpt[sign]'")
    import blake3  # here, because it may not be installed

    new: Callable[..., Any] = blake3.blake3
    return new


def block_digest(data: memoryview, algorithm: str) -> bytes:
    """Return the digest of a block's bytes."""
    digest: bytes = _hasher_of(algorithm)(data).digest()
    return digest


@dataclass(frozen=True, slots=True)
class SignedFiles:
    """The digests of a checkpoint's files.

    Args:
        block_nbytes: Bytes of a block; the last block of a file may be shorter.
        algorithm: The algorithm of the digests.
        files: By name.
    """

    block_nbytes: int
    algorithm: str
    files: Mapping[str, SignedFile]

    def to_bytes(self) -> bytes:
        """Return the payload; equal files give equal bytes."""
        files = [
            {"name": name, "nbytes": file.nbytes, "digests": base64.b64encode(file.digests).decode()}
            for name, file in sorted(self.files.items())
        ]
        facts = {"version": _VERSION, "block_nbytes": self.block_nbytes, "algorithm": self.algorithm, "files": files}
        return json.dumps(facts).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> SignedFiles:
        """Read a payload whose signature was verified.

        Raises:
            ValueError: The payload is of a newer version, or malformed.
            ConfigError: The package for its digests is not installed.
        """
        facts = json_facts.parse_object(data)
        if facts.get("version") != _VERSION:
            raise ValueError(f"its version is not {_VERSION}; upgrade dtckpt")
        block_nbytes = json_facts.whole(facts.get("block_nbytes"), MAX_BLOCK_NBYTES + 1)
        if not block_nbytes:
            raise ValueError("its blocks have no bytes")
        algorithm = json_facts.text(facts.get("algorithm"))
        if algorithm not in (SHA256, BLAKE3):
            raise ValueError(f"its digests are {algorithm!r:.40}; upgrade dtckpt")
        _hasher_of(algorithm)
        files = {}
        for each in map(json_facts.fields, json_facts.items(facts.get("files"))):
            name, nbytes = json_facts.text(each.get("name")), json_facts.whole(each.get("nbytes"))
            digests = base64.b64decode(json_facts.text(each.get("digests")), validate=True)
            if len(digests) != DIGEST_NBYTES * -(-nbytes // block_nbytes) or name in files:
                raise ValueError(f"the digests of {name!r} do not fit its size, or it occurs twice")
            files[name] = SignedFile(nbytes, digests)
        return cls(block_nbytes, algorithm, files)


def block_nbytes_of(nbytes: int) -> int:
    """Return the bytes of a block of a checkpoint of so many bytes."""
    block_nbytes = MIN_BLOCK_NBYTES
    while nbytes > block_nbytes * MAX_BLOCKS and block_nbytes < MAX_BLOCK_NBYTES:
        block_nbytes *= 2
    return block_nbytes


class BlockHasher:
    """Digests a file, block by block, from pieces of any length.

    Args:
        block_nbytes: Bytes of a block.
        algorithm: The algorithm of the digests.
    """

    def __init__(self, block_nbytes: int, algorithm: str) -> None:
        self._block_nbytes = block_nbytes
        self._new = _hasher_of(algorithm)
        self._left = block_nbytes
        self._block = self._new()
        self._digests: list[bytes] = []
        self._nbytes = 0

    def add(self, data: memoryview) -> None:
        """Digest the next bytes of the file."""
        self._nbytes += data.nbytes
        while data.nbytes:
            part = data[: self._left]
            self._block.update(part)
            self._left -= part.nbytes
            data = data[part.nbytes :]
            if not self._left:
                self._end_block()

    def _end_block(self) -> None:
        self._digests.append(self._block.digest())
        self._left, self._block = self._block_nbytes, self._new()

    def file(self) -> SignedFile:
        """Return the digests of the file that has ended."""
        if self._left < self._block_nbytes:
            self._end_block()
        return SignedFile(self._nbytes, b"".join(self._digests))


@dataclass(frozen=True, slots=True)
class Envelope:
    """A payload with its signatures.

    Args:
        payload: The bytes that are signed.
        signatures: The signatures by the id of their key.
    """

    payload: bytes
    signatures: Mapping[str, bytes]

    def to_bytes(self) -> bytes:
        """Return the file."""
        signatures = [
            {"keyid": key, "sig": base64.b64encode(signature).decode()} for key, signature in self.signatures.items()
        ]
        payload = base64.b64encode(self.payload).decode()
        return json.dumps({"payloadType": PAYLOAD_TYPE, "payload": payload, "signatures": signatures}).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Envelope:
        """Read a file.

        Raises:
            ValueError: The file is malformed, or of another type.
        """
        facts = json_facts.parse_object(data)
        if facts.get("payloadType") != PAYLOAD_TYPE:
            raise ValueError(f"its payload is not of type {PAYLOAD_TYPE}")
        rows: Sequence[Mapping[str, object]] = [
            json_facts.fields(row) for row in json_facts.items(facts.get("signatures"))
        ]
        try:
            payload = base64.b64decode(json_facts.text(facts.get("payload")), validate=True)
            signatures = {
                json_facts.text(row.get("keyid")): base64.b64decode(json_facts.text(row.get("sig")), validate=True)
                for row in rows
            }
        except binascii.Error as error:
            raise ValueError(f"it is not base64: {error}") from None
        return cls(payload, signatures)


def signed_message(payload: bytes) -> bytes:
    """Return the bytes that a key signs: type and payload, each with its length (pre-authentication encoding)."""
    kind = PAYLOAD_TYPE.encode()
    return b"DSSEv1 %d %b %d %b" % (len(kind), kind, len(payload), payload)
