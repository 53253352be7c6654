"""Folders below URLs that TensorStore does not reach, through fsspec."""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, Self, TypeVar

import fsspec
from fsspec.implementations.local import LocalFileSystem
from tenacity import Retrying, retry_if_exception, stop_after_attempt, wait_random_exponential

from dtckpt.errors import ConfigError
from dtckpt.storage.regular_files import regular_nbytes, too_long

NUM_THREADS = 16
MAX_TRIES = 10
MAX_PAUSE_S = 20.0
_PUT_OFF = re.compile(
    r"SlowDown|Throttl|TooManyRequests|Too Many Requests|Service Unavailable|\b(429|50[0234])\b", re.I
)

T = TypeVar("T")


def _is_put_off(error: BaseException) -> bool:
    """Whether storage only asks for patience."""
    is_final = isinstance(error, FileNotFoundError | FileExistsError | PermissionError)
    return isinstance(error, ConnectionError | TimeoutError) or (not is_final and bool(_PUT_OFF.search(str(error))))


def _patiently(call: Callable[[], T]) -> T:
    """Return what a call returns, trying again, with growing and random pauses, while storage puts it off.

    Raises:
        OSError: It failed, whatever kind of error the file system's library has for that.
    """
    tries = Retrying(
        retry=retry_if_exception(_is_put_off),
        stop=stop_after_attempt(MAX_TRIES),
        wait=wait_random_exponential(multiplier=0.2, max=MAX_PAUSE_S),
        reraise=True,
    )
    try:
        return tries(call)
    except OSError:
        raise
    except Exception as error:
        raise OSError(errno.EIO, f"{type(error).__name__}: {error}") from error


def open_foreign(url: str) -> ForeignFolder:
    """Return the folder at a URL.

    Raises:
        ConfigError: No file system goes by that scheme, or the library that it needs is not installed.
    """
    try:
        files, path = fsspec.core.url_to_fs(url, use_listings_cache=False)
    except (ValueError, ImportError) as error:
        raise ConfigError(f"cannot open {url}: {error}") from error
    return ForeignFolder(files, path.rstrip("/"), url)


class ForeignFolder:
    """A folder of an fsspec file system.

    How sure `create` is depends on the file system: those of object stores and of memory leave the choice to the
    store, others look first and write then.

    Args:
        files: The file system.
        path: The folder's path there.
        where: Its URL, for messages.
    """

    def __init__(self, files: Any, path: str, where: str) -> None:
        self._files = files
        self._path = path
        self._where = where

    def __str__(self) -> str:
        return self._where

    def __truediv__(self, name: str) -> Self:
        return type(self)(self._files, f"{self._path}/{name}", f"{self._where}/{name}")

    def make(self) -> None:
        """As `Folder.make`: folders are made when they are written to."""

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """As `Folder.read`."""
        path = self._regular(name)
        if (start, stop) == (0, None):
            return bytes(_patiently(lambda: self._files.cat_file(path)))
        return bytes(_patiently(lambda: self._files.cat_file(path, start=start, end=stop)))

    def read_whole(self, name: str, most: int) -> bytes:
        """As `Folder.read_whole`."""
        nbytes = self._nbytes(name)
        # Where sizes are not told, one byte more is asked for.
        data = self.read(name, 0, most + 1) if nbytes is None or nbytes <= most else b""
        if len(data) > most or (nbytes or 0) > most:
            raise too_long(name, most)
        return data

    def first_short(self, sizes: Mapping[str, int]) -> str | None:
        """As `Folder.first_short`."""
        with ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="dtckpt-sizes") as pool:
            found = zip(sizes.items(), pool.map(self._nbytes, sizes), strict=True)
            return next((name for (name, least), nbytes in found if nbytes is not None and nbytes < least), None)

    def _nbytes(self, name: str) -> int | None:
        """Return a file's size; -1 if it is not there, None if its file system does not tell sizes."""
        try:
            path = self._regular(name)
            nbytes: int | None = _patiently(lambda: self._files.size(path))
        except FileNotFoundError:
            return -1
        return nbytes

    def _regular(self, name: str) -> str:
        """Return a file's path. On this machine's file systems, a read of something else may never end."""
        path = f"{self._path}/{name}"
        if isinstance(self._files, LocalFileSystem):
            regular_nbytes(path)
        return path

    def write(self, name: str, data: bytes) -> None:
        """As `Folder.write`."""
        self._write(name, data, mode="overwrite")

    def sync(self, names: Iterable[str]) -> None:
        """As `Folder.sync`: what is written is as durable as the file system makes it."""

    def early_sync(self, folder: str) -> AbstractContextManager[None]:  # noqa: ARG002  (nothing can be done)
        """As `Folder.early_sync`."""
        return nullcontext()

    def create(self, name: str, data: bytes) -> bool:
        """As `ObjectFolder.create`."""
        try:
            self._write(name, data, mode="create")
        except FileExistsError:
            return False
        return True

    def _write(self, name: str, data: bytes, *, mode: str) -> None:
        path = f"{self._path}/{name}"

        def write() -> None:
            try:
                self._files.pipe_file(path, data, mode=mode)
            except FileNotFoundError:
                self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
                self._files.pipe_file(path, data, mode=mode)

        _patiently(write)

    def names(self, prefix: str = "") -> list[str]:
        """As `Folder.names`."""
        # A prefix of a name is no folder; what it may be of is looked for in the folder that it ends in.
        folder = f"{self._path}/{prefix}".rpartition("/")[0]
        try:
            found = [path[len(self._path) + 1 :] for path in _patiently(lambda: self._files.find(folder))]
        except FileNotFoundError:  # some say so, others find nothing
            return []
        return sorted(name for name in found if name.startswith(prefix))

    def remove(self, names: Iterable[str]) -> None:
        """As `Folder.remove`."""
        for name in names:
            path = f"{self._path}/{name}"
            with suppress(FileNotFoundError):
                _patiently(lambda path=path: self._files.rm_file(path))  # type: ignore[misc]

    def clear(self) -> None:
        """As `ObjectFolder.clear`."""
        with suppress(FileNotFoundError):
            _patiently(lambda: self._files.rm(self._path, recursive=True))

    def kvstore(self, *, to_write: bool = False) -> None:  # noqa: ARG002  (TensorStore does not reach it)
        """As `Folder.kvstore`."""
        return
