"""Ed25519 keys in PEM files, by the package ``cryptography``."""

from __future__ import annotations

import hashlib
import importlib.util
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dtckpt.errors import ConfigError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

KeySource = str | os.PathLike[str] | bytes
"""A key: a path of a PEM file, or the bytes of one."""
MAX_KEY_NBYTES = 1 << 14
_ID_CHARS = 16


def private_key(source: KeySource) -> Ed25519PrivateKey:
    """Return the private key of a PEM file (PKCS 8, without a passphrase).

    Raises:
        ConfigError: The file cannot be read, or holds no such key.
    """
    _validate_installed()
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    data = _content(source)
    try:
        key = load_pem_private_key(data, password=None)
    except (ValueError, TypeError) as error:
        raise _no_key(source, "private", error) from None
    if not isinstance(key, Ed25519PrivateKey):
        raise _no_key(source, "private", f"it is a {type(key).__name__}")
    return key


def public_keys(sources: Sequence[KeySource]) -> dict[str, Ed25519PublicKey]:
    """Return the public keys of PEM files by their ids.

    Raises:
        ConfigError: A file cannot be read, or holds no such key.
    """
    _validate_installed()
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    keys = {}
    for source in sources:
        data = _content(source)
        try:
            key = load_pem_public_key(data)
        except (ValueError, TypeError) as error:
            raise _no_key(source, "public", error) from None
        if not isinstance(key, Ed25519PublicKey):
            raise _no_key(source, "public", f"it is a {type(key).__name__}")
        keys[key_id(key)] = key
    return keys


def key_id(key: Ed25519PublicKey) -> str:
    """Return the id of a key: the beginning of the SHA-256 digest of its 32 bytes."""
    return hashlib.sha256(key.public_bytes_raw()).hexdigest()[:_ID_CHARS]


def signers(message: bytes, signatures: Mapping[str, bytes], keys: Mapping[str, Ed25519PublicKey]) -> list[str]:
    """Return the ids of the keys whose signature of a message is valid; the keys decide, not the ids in the file."""
    from cryptography.exceptions import InvalidSignature

    found = []
    for name, key in keys.items():
        signature = signatures.get(name)
        if signature is not None:
            try:
                key.verify(signature, message)
            except InvalidSignature:
                continue
            found.append(name)
    return found


def _validate_installed() -> None:
    if importlib.util.find_spec("cryptography") is None:
        raise ConfigError("signatures need the package cryptography: pip install 'dtckpt[sign]'")


def _content(source: KeySource) -> bytes:
    if isinstance(source, bytes):
        return source
    try:
        with Path(source).open("rb") as file:
            return file.read(MAX_KEY_NBYTES)
    except OSError as error:
        raise ConfigError(f"the key {source} cannot be read: {error.strerror}") from None


def _no_key(source: KeySource, kind: str, reason: object) -> ConfigError:
    where = "the given bytes" if isinstance(source, bytes) else str(source)
    return ConfigError(f"{where} holds no {kind} Ed25519 key in PEM without a passphrase: {reason}")
