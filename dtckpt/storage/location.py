"""Locations of checkpoints: parses a path or URL, and tells storage of this machine from remote storage."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import unquote

from dtckpt.errors import CheckpointNotFoundError, ConfigError, ConfigTypeError
from dtckpt.storage import commit_by_rename
from dtckpt.storage.url import Url

LOCAL_TYPES = frozenset(
    {
        "bcachefs",
        "btrfs",
        "erofs",
        "ext2",
        "ext3",
        "ext4",
        "f2fs",
        "overlay",
        "ramfs",
        "squashfs",
        "tmpfs",
        "xfs",
        "zfs",
    }
)
"""Types of file systems whose data is on this machine; every other type counts as a network file system."""
_MOUNTS = Path("/proc/self/mounts")

Location = Path | Url
"""The path or URL of a checkpoint, as `location_of` returns it."""


def is_inside(inner: Location, outer: Location) -> bool:
    """Whether one location is below another."""
    return type(inner) is type(outer) and str(inner).startswith(f"{outer}/")


def validate_not_nested(source: Location, target: Location) -> None:
    """Refuse a checkpoint inside another checkpoint: a save that replaces the outer one removes both.

    Raises:
        ConfigError: One of the two is below the other.
    """
    if is_inside(source, target) or is_inside(target, source):
        raise ConfigError(f"{source} and {target} cannot lie one inside the other; choose another destination")


def location_of(path: str | os.PathLike[str] | Url, *, follow_link: bool = True) -> Location:
    """Return the location of a checkpoint: an absolute local path, symbolic links followed, or a URL.

    Args:
        path: A path, a ``file://`` URL, or another URL, as a user passes it.
        follow_link: Whether a link at the path is followed; links on the way to it always are.

    Raises:
        CheckpointNotFoundError: The text is no path at all.
        ConfigError: A checkpoint cannot have such a name.
        ConfigTypeError: The argument is neither a ``str`` nor a path.
    """
    if isinstance(path, Url):
        return path
    if not isinstance(path, str | os.PathLike):
        raise ConfigTypeError(f"a checkpoint's path must be a str or a Path; got {type(path).__name__}")
    text = str(path)
    if "\0" in text or not text:
        raise CheckpointNotFoundError(f"{text!r} is no path")
    scheme, has_scheme, rest = text.partition("://")
    if has_scheme and scheme != "file":
        return _url(scheme, rest)
    bare = unquote(rest) if has_scheme else text
    _validate_text(bare)
    folder, name = os.path.split(os.path.abspath(bare))
    resolved = os.path.realpath(bare) if follow_link else os.path.join(os.path.realpath(folder), name)
    _validate_text(resolved)
    target = Path(resolved)
    commit_by_rename.validate_name(target)
    return target


def _validate_text(text: str) -> None:
    """Refuse text that no path of a checkpoint can have. Raises: `CheckpointNotFoundError`."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise CheckpointNotFoundError(f"{text!r} is no path of a checkpoint: it is not valid Unicode") from None
    if "\\" in text:
        # TensorStore takes them for slashes: the data would land elsewhere than the manifest.
        raise CheckpointNotFoundError(f"{text} is no path of a checkpoint: it holds a backslash")


def _url(scheme: str, rest: str) -> Url:
    """Parse the two parts of a URL, before and after ``://``. Raises: as `location_of`."""
    _validate_text(rest)
    url = Url(scheme.lower(), rest.rstrip("/"))
    segments = url.text.lstrip("/").split("/")
    odd = [segment for segment in segments if segment in ("", ".", "..") or segment.startswith(".dtckpt")]
    if odd or not url.text.isprintable() or ":" in scheme:
        raise ConfigError(
            f"{str(url)!r} cannot be a checkpoint: a URL is scheme://name/name, and names are not empty, '.', '..', or "
            "'.dtckpt'"
        )
    return url


def is_remote(path: str | Location) -> bool:
    """Whether a path or URL leads to another machine: to an object store or a network file system."""
    if "://" in str(path):
        return True
    where = Path(str(path)).absolute().resolve()
    try:
        mounts = [line.split(" ")[1:3] for line in _MOUNTS.read_text().splitlines()]
    except OSError:
        return False
    # The last mount at a mount point hides those before; a path belongs to the nearest mount point above it.
    types = {_unescaped(mount_point): file_system for mount_point, file_system in mounts}
    ancestors = map(str, (where, *where.parents))
    return next((types[folder] not in LOCAL_TYPES for folder in ancestors if folder in types), False)


def _unescaped(mount_point: str) -> str:
    return mount_point.encode().decode("unicode_escape") if "\\" in mount_point else mount_point
