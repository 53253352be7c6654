"""The fsspec back end: `FsspecFolder`, a folder at any URL that TensorStore does not reach.

The libraries of fsspec's file systems raise errors of every kind; here all of them become `OSError`. A request that
storage puts off is repeated.
"""

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
from typing_extensions import override

from dtckpt.errors import ConfigError
from dtckpt.storage.failures import MalformedError
from dtckpt.storage.folder import Folder, ObjectFolder
from dtckpt.storage.regular_files import regular_nbytes, too_long_error

NUM_THREADS = 16
MAX_TRIES = 10
MAX_PAUSE_S = 20.0
_TEMPORARY = re.compile(
    r"SlowDown|Throttl|TooManyRequests|Too Many Requests|Service Unavailable|\b(429|50[0234])\b", re.I
)

T = TypeVar("T")


def _is_temporary(error: BaseException) -> bool:
    """Whether storage puts a request off: a later request may succeed."""
    is_final = isinstance(error, FileNotFoundError | FileExistsError | PermissionError)
    return isinstance(error, ConnectionError | TimeoutError) or (not is_final and bool(_TEMPORARY.search(str(error))))


def _retry(call: Callable[[], T]) -> T:
    """Return the result of a call; repeat it, with growing and random pauses, while storage puts it off.

    Raises:
        OSError: The call failed; an error of another kind is its cause.
    """
    tries = Retrying(
        retry=retry_if_exception(_is_temporary),
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


def open_fsspec_folder(url: str) -> FsspecFolder:
    """Return the folder at a URL.

    Raises:
        ConfigError: fsspec knows no file system of that scheme, or a library that it needs is not installed.
    """
    if url.startswith("live://"):
        raise ConfigError(
            f"{url} is a live version; only a Publisher writes one, and only open_checkpoint, restore and Subscriber "
            "read it"
        )
    try:
        fs, path = fsspec.core.url_to_fs(url, use_listings_cache=False)
    except (ValueError, ImportError) as error:
        raise ConfigError(f"cannot open {url}: {error}") from error
    return FsspecFolder(fs, path.rstrip("/"), url)


class FsspecFolder(ObjectFolder):
    """A folder of an fsspec file system.

    Whether `create` is one step depends on the file system. Object stores and file systems in memory check and
    create in one step; other file systems look first and write then.

    Args:
        fs: The file system (`fsspec.AbstractFileSystem`).
        path: The folder's path there.
        where: Its URL, for messages.
    """

    def __init__(self, fs: Any, path: str, where: str) -> None:
        self._fs = fs
        self._path = path
        self._where = where

    def __str__(self) -> str:
        return self._where

    def __truediv__(self, name: str) -> Self:
        return type(self)(self._fs, f"{self._path}/{name}", f"{self._where}/{name}")

    @override
    def make(self) -> None:
        """A write makes the folders that it needs."""

    @override
    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        path = self._regular(name)
        if (start, stop) == (0, None):
            return bytes(_retry(lambda: self._fs.cat_file(path)))
        return bytes(_retry(lambda: self._fs.cat_file(path, start=start, end=stop)))

    @override
    def read_whole(self, name: str, most: int) -> bytes:
        nbytes = self._nbytes(name)
        # Where the file system does not tell sizes, one byte more is asked for.
        data = self.read(name, 0, most + 1) if nbytes is None or nbytes <= most else b""
        if len(data) > most or (nbytes or 0) > most:
            raise too_long_error(name, most)
        return data

    @override
    def find_short_file(self, sizes: Mapping[str, int]) -> str | None:
        with ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="dtckpt-sizes") as pool:
            files = zip(sizes.items(), pool.map(self._nbytes, sizes), strict=True)
            return next((name for (name, least), nbytes in files if nbytes is not None and nbytes < least), None)

    def _nbytes(self, name: str) -> int | None:
        """Return a file's size; -1 if there is no such file, None if its file system does not tell sizes."""
        try:
            path = self._regular(name)
            nbytes: int | None = _retry(lambda: self._fs.size(path))
        except FileNotFoundError:
            return -1
        return nbytes

    def _regular(self, name: str) -> str:
        """Return a file's path. On local file systems, refuse all but regular files: a read of others may never end."""
        path = f"{self._path}/{name}"
        if isinstance(self._fs, LocalFileSystem):
            regular_nbytes(path)
        return path

    @override
    def write(self, name: str, data: bytes) -> None:
        self._write(name, data, mode="overwrite")

    replace = write  # object stores show no half of an object

    @override
    def share(self, source: Folder, sizes: Mapping[str, int]) -> bool:
        """Copy files within one store: the store itself does it, where it has such a request."""
        if not isinstance(source, FsspecFolder) or source._fs is not self._fs:
            return False
        if (short := source.find_short_file(sizes)) is not None:
            raise MalformedError(f"{source}/{short} is missing or too short")

        def copy(name: str) -> None:
            old, new = f"{source._path}/{name}", f"{self._path}/{name}"
            try:
                self._fs.cp_file(old, new)
            except FileNotFoundError:
                self._fs.makedirs(new.rpartition("/")[0], exist_ok=True)
                self._fs.cp_file(old, new)

        def share_file(name: str) -> bool:
            try:
                _retry(lambda: copy(name))
            except OSError as error:
                if isinstance(error.__cause__, NotImplementedError):
                    return False
                raise
            return True

        with ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="dtckpt-copies") as pool:
            return all(list(pool.map(share_file, sizes)))

    @override
    def sync(self, names: Iterable[str]) -> None:
        """A write is as durable as the file system makes it."""

    @override
    def settle(self, names: Iterable[str]) -> None:
        """There is nothing to be done."""

    @override
    def early_sync(self, folder: str) -> AbstractContextManager[None]:  # nothing can be done
        return nullcontext()

    @override
    def create(self, name: str, data: bytes) -> bool:
        try:
            self._write(name, data, mode="create")
        except FileExistsError:
            return False
        return True

    def _write(self, name: str, data: bytes, *, mode: str) -> None:
        path = f"{self._path}/{name}"

        def write() -> None:
            try:
                self._fs.pipe_file(path, data, mode=mode)
            except FileNotFoundError:
                self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
                self._fs.pipe_file(path, data, mode=mode)

        _retry(write)

    @override
    def names(self, prefix: str = "") -> list[str]:
        # The last part of a prefix may be the start of a name, so fsspec looks in the folder before it.
        folder = f"{self._path}/{prefix}".rpartition("/")[0]
        try:
            names = [path[len(self._path) + 1 :] for path in _retry(lambda: self._fs.find(folder))]
        except FileNotFoundError:  # some file systems raise this, others return nothing
            return []
        return sorted(name for name in names if name.startswith(prefix))

    @override
    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            path = f"{self._path}/{name}"
            with suppress(FileNotFoundError):
                _retry(lambda path=path: self._fs.rm_file(path))  # type: ignore[misc]

    @override
    def clear(self) -> None:
        with suppress(FileNotFoundError):
            _retry(lambda: self._fs.rm(self._path, recursive=True))

    @override
    def kvstore(self, *, to_write: bool = False) -> None:  # TensorStore does not reach it
        return
