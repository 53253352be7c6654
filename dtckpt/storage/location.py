"""Where a checkpoint is: a local path, or the URL of a place on an object store or another kind of storage."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from dtckpt.errors import CheckpointNotFoundError, ConfigError, ConfigTypeError
from dtckpt.storage import commit_by_rename


@dataclass(frozen=True, slots=True)
class Url:
    """A place that is on no file system of this host. It answers to what is asked of a `Path` here.

    Args:
        scheme: What stands before ``://``.
        text: What stands after it, without a slash at the end. It is taken literally, percent signs too.
    """

    scheme: str
    text: str

    def __str__(self) -> str:
        return f"{self.scheme}://{self.text}"

    def __truediv__(self, name: str) -> Url:
        return Url(self.scheme, f"{self.text}/{name}")

    @property
    def name(self) -> str:
        """The last segment."""
        return self.text.rpartition("/")[2]

    @property
    def parent(self) -> Url:
        """The URL without its last segment."""
        return Url(self.scheme, self.text.rpartition("/")[0])


Location = Path | Url
"""What a checkpoint's path, as an argument, stands for."""


def is_inside(inner: Location, outer: Location) -> bool:
    """Whether one location is below another."""
    return type(inner) is type(outer) and str(inner).startswith(f"{outer}/")


def location_of(path: str | Path | Url) -> Location:
    """Return what a checkpoint argument stands for: an absolute local path, links followed, or a URL.

    Args:
        path: A path, a ``file://`` URL, or another URL.

    Raises:
        CheckpointNotFoundError: This is no path at all.
        ConfigError: A checkpoint cannot have such a name.
        ConfigTypeError: This is no text.
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
    resolved = os.path.realpath(bare)
    _validate_text(resolved)
    target = Path(resolved)
    commit_by_rename.validate_name(target)
    return target


def _validate_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise CheckpointNotFoundError(f"{text!r} is no path of a checkpoint: it is not valid Unicode") from None
    if "\\" in text:
        # TensorStore takes them for slashes: the data would land elsewhere than the manifest.
        raise CheckpointNotFoundError(f"{text} is no path of a checkpoint: it holds a backslash")


def _url(scheme: str, rest: str) -> Url:
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
