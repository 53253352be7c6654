"""Tensor names: which are valid, and the path on storage of each tensor's array.

A name is a sequence of segments joined by ``/``. Each segment is percent-encoded on storage, so that it can neither
lead out of the checkpoint nor collide with a file of the format. `validate_name` refuses names that could only serve an
attack. Listings sort names in natural order (`natural_key`).
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

_OWN = r"dtckpt\.manifest|manifest\.ocdbt|d|client_\d+|zarr\.json|edges|\.metadata"
"""Segments that the format uses itself, beside all segments that begin with two underscores."""
_RESERVED = re.compile(f"{_OWN}|__.*", re.DOTALL)
_SAFE = "!$'()+,;=@[]{}^&~ #"
_PLAIN = re.compile(f"[A-Za-z0-9_.~{re.escape(_SAFE)}-]*")
"""Segments that percent-encoding leaves unchanged."""
_CONTROL = re.compile("[\0-\x1f\x7f]")
_LOCK_SUFFIX = ".__lock"
"""End of names that TensorStore's file driver refuses: it keeps them for its own lock files."""
_SPECIAL = rf"__|(?:{_OWN}|\.\.?|[^/]*{re.escape(_LOCK_SUFFIX)})(?:/|\Z)"
_COMMON_SEGMENT = rf"(?!{_SPECIAL})[A-Za-z0-9_.-]{{1,{MAX_SEGMENT_BYTES}}}"
_COMMON = re.compile(f"{_COMMON_SEGMENT}(?:/{_COMMON_SEGMENT})*")
"""Matches most names that are valid and stored unchanged, and no others. A match spares the full check."""
_SEGMENTS_OF_KEYS = {"": "%", ".": "%2E", "..": "%2E%2E"}
DCP_METADATA_NAME = ".metadata"
"""The file by which PyTorch finds a distributed checkpoint. The plug-in for PyTorch also writes this file beside
a checkpoint of this library (`dtckpt.checkpoint.foreign.dcp_metadata`)."""
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


def name_of_key(key: str) -> str:
    """Return the form of a state tree's key in the names of tensors: mostly the key itself.

    A key may be any text, such as the path of a file. Two kinds of segments, which no name can have, are replaced: an
    empty segment by ``%``, and the dots of ``.`` and ``..`` by ``%2E``.
    """
    if _is_common(key):
        return key
    return "/".join(_SEGMENTS_OF_KEYS.get(segment, segment) for segment in key.split("/"))


def is_own_segment(segment: str) -> bool:
    """Tell whether the format uses a segment itself, not for a tensor."""
    return _RESERVED.fullmatch(segment) is not None


def encode_segment(segment: str) -> str:
    """Percent-encode one segment, with the first character if the format uses the segment itself."""
    encoded = segment if _PLAIN.fullmatch(segment) else quote(segment, safe=_SAFE)
    if is_own_segment(segment):
        encoded = f"%{ord(segment[0]):02X}{quote(segment[1:], safe=_SAFE)}"
    return f"{encoded[:-1]}%6B" if encoded.endswith(_LOCK_SUFFIX) else encoded


def array_paths(names: Iterable[str]) -> dict[str, str]:
    """Return, by tensor name, the path of the tensor's array below the root of the key-value store.

    Zarr forbids arrays inside arrays. So if a name is also a prefix of others, as ``w`` beside ``w/m``, its array is
    one level further down, at ``w/%self``.

    Raises:
        TensorNameError: A name cannot be stored, or occurs twice.
    """
    all_names = list(names)
    for name in all_names:
        validate_name(name)
    if len(set(all_names)) != len(all_names):
        twice = sorted({name for name in all_names if all_names.count(name) > 1})
        raise TensorNameError(f"tensor names must differ; used more than once: {capped(map(_shown, twice))}")
    folders = {parent for name in all_names for parent in _parents(name)}
    return {name: f"{_plain_path(name)}/{SELF_SEGMENT}" if name in folders else _plain_path(name) for name in all_names}


def _is_common(name: str) -> bool:
    return len(name) <= MAX_NAME_BYTES and _COMMON.fullmatch(name) is not None


def _plain_path(name: str) -> str:
    return name if _is_common(name) else "/".join(map(encode_segment, name.split("/")))


def _parents(name: str) -> Iterable[str]:
    segments = name.split("/")
    return ("/".join(segments[:depth]) for depth in range(1, len(segments)))


def is_path_of(path: str, name: str) -> bool:
    """Tell whether a tensor's array may have this path; another path in a manifest could lead out of the checkpoint.

    Raises:
        TensorNameError: The name cannot be stored.
    """
    if path == name and _is_common(name):
        return True
    validate_name(name)
    return path in (plain := _plain_path(name), f"{plain}/{SELF_SEGMENT}")


def groups(paths: Iterable[str]) -> list[str]:
    """Return the paths of the Zarr groups above some arrays, sorted, the root (``""``) first."""
    return sorted({"", *(parent for path in paths for parent in _parents(path))})


_DIGITS = re.compile(r"([0-9]+)")


def natural_key(name: str) -> tuple[tuple[object, ...], str]:
    """Return a sort key by which numbers in names count as numbers; different names have different keys."""
    parts: list[object] = list(_DIGITS.split(name))
    for position in range(1, len(parts), 2):
        digits = str(parts[position]).lstrip("0")
        # By length first: a name may have more digits than Python converts to an int.
        parts[position] = (len(digits), digits)
    # Names that differ in zeros in front of numbers have equal parts.
    return tuple(parts), name
