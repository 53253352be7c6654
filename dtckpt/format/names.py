"""Tensor names and the storage paths made from them.

A name is a path of segments joined by ``/``. Each segment is percent-encoded on storage, so that it can neither
escape the checkpoint nor collide with a file of the format; names that could only be abused are refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from urllib.parse import quote

from dtckpt.errors import TensorNameError, capped

MAX_NAME_BYTES = 1024
"""Longest name, in UTF-8; keeps error texts, manifests and object keys bounded."""
MAX_SEGMENT_BYTES = 255
"""Longest encoded segment: the limit of one file name on every common file system."""

_OWN = r"dtckpt\.manifest|manifest\.ocdbt|d|client_\d+|zarr\.json|edges"
"""Segments that the format itself uses, beside those that begin with two underscores."""
_RESERVED = re.compile(f"{_OWN}|__.*", re.DOTALL)
_SAFE = "!$'()+,;=@[]{}^&~ #"
_PLAIN = re.compile(f"[A-Za-z0-9_.~{re.escape(_SAFE)}-]*")
"""Segments that percent-encoding leaves as they are."""
_CONTROL = re.compile("[\0-\x1f\x7f]")
_LOCK_SUFFIX = ".__lock"
"""TensorStore's file driver refuses names that end so; it keeps them for its own lock files."""
_SPECIAL = rf"__|(?:{_OWN}|\.\.?|[^/]*{re.escape(_LOCK_SUFFIX)})(?:/|\Z)"
_COMMON_SEGMENT = rf"(?!{_SPECIAL})[A-Za-z0-9_.-]{{1,{MAX_SEGMENT_BYTES}}}"
_COMMON = re.compile(f"{_COMMON_SEGMENT}(?:/{_COMMON_SEGMENT})*")
"""Names that are valid, and stored as they are; surely most of them, not all."""
SELF_SEGMENT = "%self"
"""Last path segment of an array whose name is also a folder of others; no encoded segment can equal it."""


def _shown(name: str) -> str:
    return repr(name if len(name) <= 80 else name[:77] + "...")


def validate_name(name: str) -> None:
    """Check that a tensor name can be stored.

    Raises:
        TensorNameError: The name is empty, absolute or too long, or has an empty, ``.`` or ``..`` segment or a
            control character.
    """
    if not isinstance(name, str):
        raise TensorNameError(f"tensor name must be a str; got {type(name).__name__}")
    if _is_common(name):
        return
    try:
        nbytes = len(name.encode())
    except UnicodeEncodeError:
        raise TensorNameError(f"tensor name {_shown(name)} is not valid Unicode") from None
    if nbytes > MAX_NAME_BYTES:
        raise TensorNameError(
            f"tensor name {_shown(name)} is too long; got {nbytes} bytes, expected at most {MAX_NAME_BYTES}"
        )
    if _CONTROL.search(name):
        raise TensorNameError(f"tensor name {_shown(name)} holds a control character")
    for segment in name.split("/"):
        if segment in ("", ".", ".."):
            raise TensorNameError(
                f"tensor name {_shown(name)} cannot be stored; got segment {segment!r}, "
                "expected non-empty segments other than '.' and '..', joined by '/'"
            )
        if len(encode_segment(segment)) > MAX_SEGMENT_BYTES:
            raise TensorNameError(
                f"a segment of tensor name {_shown(name)} is too long; got {len(encode_segment(segment))} bytes "
                f"once encoded, expected at most {MAX_SEGMENT_BYTES}"
            )


def encode_segment(segment: str) -> str:
    """Percent-encode one segment; the names that the format itself uses get their first character encoded."""
    encoded = segment if _PLAIN.fullmatch(segment) else quote(segment, safe=_SAFE)
    if _RESERVED.fullmatch(segment):
        encoded = f"%{ord(segment[0]):02X}{quote(segment[1:], safe=_SAFE)}"
    return f"{encoded[:-1]}%6B" if encoded.endswith(_LOCK_SUFFIX) else encoded


def array_paths(names: Iterable[str]) -> dict[str, str]:
    """Return the storage path of each tensor's array, relative to the checkpoint.

    Zarr forbids arrays inside arrays, so a name that is also a prefix of others (``w`` beside ``w/m``) moves one
    level down, to ``w/%self``.

    Raises:
        TensorNameError: A name cannot be stored, or occurs twice.
    """
    listed = list(names)
    for name in listed:
        validate_name(name)
    if len(set(listed)) != len(listed):
        twice = sorted({name for name in listed if listed.count(name) > 1})
        raise TensorNameError(f"tensor names must differ; used more than once: {capped(map(_shown, twice))}")
    folders = {parent for name in listed for parent in _parents(name)}
    return {name: f"{_plain_path(name)}/{SELF_SEGMENT}" if name in folders else _plain_path(name) for name in listed}


def _is_common(name: str) -> bool:
    return len(name) <= MAX_NAME_BYTES and _COMMON.fullmatch(name) is not None


def _plain_path(name: str) -> str:
    return name if _is_common(name) else "/".join(map(encode_segment, name.split("/")))


def _parents(name: str) -> Iterable[str]:
    segments = name.split("/")
    return ("/".join(segments[:depth]) for depth in range(1, len(segments)))


def is_path_of(path: str, name: str) -> bool:
    """Whether an array of this name may be stored at a path, so that no manifest can point out of its checkpoint."""
    if path == name and _is_common(name):
        return True
    validate_name(name)
    return path in (plain := _plain_path(name), f"{plain}/{SELF_SEGMENT}")


def groups(paths: Iterable[str]) -> list[str]:
    """Return the Zarr groups above some array paths, sorted, the root (``""``) first."""
    return sorted({"", *(parent for path in paths for parent in _parents(path))})
