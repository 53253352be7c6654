"""Folders: files by name below one place, wherever that is. All that the writing and reading of a checkpoint needs.

`LocalFolder` is a directory, `KeyValueFolder` a prefix of what TensorStore reaches, and
`dtckpt.storage.fsspec_folder.ForeignFolder` is below any other URL. What they raise is translated by their callers.
"""

from __future__ import annotations

import errno
import functools
import itertools
import os
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Protocol, Self

from dtckpt.comm import fork_guard
from dtckpt.storage import commit_by_rename
from dtckpt.storage.regular_files import open_regular, regular_nbytes, too_long
from dtckpt.storage.tensorstore_import import tensorstore as ts
from dtckpt.storage.writeback import early_writeback

RETRIES = {"max_retries": 16, "initial_delay": "200ms", "max_delay": "20s"}
"""What object stores put off (throttling, server errors) is asked for again, with growing and random pauses."""

MAX_PROBES = 256
"""Files of an object store whose sizes are asked for at one time."""


def open_context() -> Any:
    """Return a new TensorStore context.

    Raises:
        ForkedProcessError: This process was forked from one that uses checkpoints.
    """
    fork_guard.claim_process()
    return ts.Context(
        {"cache_pool": {"total_bytes_limit": 0}, "s3_request_retries": RETRIES, "gcs_request_retries": RETRIES}
    )


class Folder(Protocol):
    """Files by name below one place. Names may hold slashes."""

    def __truediv__(self, name: str) -> Self:
        """Return a folder below this one."""
        ...

    def make(self) -> None:
        """Make the folder, where folders must be made; its parent must be there."""
        ...

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """Return a file's content, or some bytes of it: fewer, maybe none, where the file ends before ``stop``.

        Raises:
            FileNotFoundError: There is no such file.
        """
        ...

    def read_whole(self, name: str, most: int) -> bytes:
        """Return a file's content, unless it is longer than ``most`` bytes, which then are not read.

        Raises:
            FileNotFoundError: There is no such file.
            MalformedError: It is longer, or no regular file.
        """
        ...

    def first_short(self, sizes: Mapping[str, int]) -> str | None:
        """Return a file that is not there or has fewer bytes than said, if there is one; no file is read."""
        ...

    def write(self, name: str, data: bytes) -> None:
        """Write a file whole."""
        ...

    def sync(self, names: Iterable[str]) -> None:
        """Return when files of these names survive a power loss. Where what is written always does, at once."""
        ...

    def early_sync(self, folder: str) -> AbstractContextManager[None]:
        """Begin to make durable what is written to a folder below meanwhile, so that `sync` finds less to do."""
        ...

    def names(self, prefix: str = "") -> list[str]:
        """Return the names of all files below that begin with something, sorted."""
        ...

    def remove(self, names: Iterable[str]) -> None:
        """Remove files, as far as they are there."""
        ...

    def kvstore(self, *, to_write: bool = False) -> dict[str, Any] | None:
        """Return TensorStore's specification of this place; None if TensorStore does not reach it.

        Args:
            to_write: Whether for writing, which `sync` makes durable.
        """
        ...


class ObjectFolder(Folder, Protocol):
    """A folder whose files can be made in one step, by the first who tries."""

    def create(self, name: str, data: bytes) -> bool:
        """Write a file whole if there is none of that name yet; return whether there was none."""
        ...

    def clear(self) -> None:
        """Remove all files."""
        ...


class LocalFolder:
    """A directory."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __str__(self) -> str:
        return str(self.path)

    def __truediv__(self, name: str) -> Self:
        return type(self)(self.path / name)

    def make(self) -> None:
        """Make the directory, if it is not there."""
        self.path.mkdir(exist_ok=True)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """As `Folder.read`."""
        number, nbytes = open_regular(f"{self.path}/{name}")
        with open(number, "rb") as file:
            file.seek(start)
            return file.read(max(0, (nbytes if stop is None else min(stop, nbytes)) - start))

    def read_whole(self, name: str, most: int) -> bytes:
        """As `Folder.read_whole`."""
        if regular_nbytes(f"{self.path}/{name}") > most:
            raise too_long(name, most)
        return self.read(name, 0, most)

    def first_short(self, sizes: Mapping[str, int]) -> str | None:
        """As `Folder.first_short`."""
        return next((name for name, least in sizes.items() if self._nbytes(name) < least), None)

    def _nbytes(self, name: str) -> int:
        try:
            return regular_nbytes(f"{self.path}/{name}")
        except FileNotFoundError:
            return -1

    def write(self, name: str, data: bytes) -> None:
        """As `Folder.write`."""
        (self.path / name).write_bytes(data)

    def sync(self, names: Iterable[str]) -> None:
        """As `Folder.sync`; a directory's entries are those of its file."""
        commit_by_rename.sync_all(self.path / name for name in names)

    def early_sync(self, folder: str) -> AbstractContextManager[None]:
        """As `Folder.early_sync`."""
        return early_writeback(self.path / folder)

    def names(self, prefix: str = "") -> list[str]:
        """As `Folder.names`, of the files directly in this directory."""
        return sorted(entry.name for entry in self.path.iterdir() if entry.name.startswith(prefix))

    def remove(self, names: Iterable[str]) -> None:
        """As `Folder.remove`; a directory that is empty then goes, too."""
        for name in names:
            (self.path / name).unlink(missing_ok=True)
        if not any(self.path.iterdir()):
            self.path.rmdir()

    def kvstore(self, *, to_write: bool = False) -> dict[str, Any]:
        """As `Folder.kvstore`. A read is fast only with memory-mapped files."""
        how: dict[str, Any] = {"file_io_sync": False} if to_write else {"file_io_mode": {"mode": "memmap"}}
        return {"driver": "file", "path": f"{self.path.absolute()}/", **how}


class KeyValueFolder:
    """A prefix of a key-value store of TensorStore. What was written is durable.

    Args:
        spec: TensorStore's specification of the store, without a path.
        path: The prefix, without slashes at its ends.
        where: Its URL, for messages.
    """

    def __init__(self, spec: Mapping[str, Any], path: str, where: str) -> None:
        self._spec = spec
        self._path = path
        self._where = where
        self._store: Any = None

    def __str__(self) -> str:
        return self._where

    def __truediv__(self, name: str) -> Self:
        return type(self)(self._spec, f"{self._path}/{name}".lstrip("/"), f"{self._where}/{name}")

    def make(self) -> None:
        """As `Folder.make`: there is nothing to be made."""

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """As `Folder.read`."""
        part = {} if (start, stop) == (0, None) else {"byte_range": slice(start, stop)}
        try:
            result = self._open().read(name, **part).result()
        except ValueError as error:
            if "OUT_OF_RANGE" in str(error):
                return b""
            raise
        if result.state != "value":
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), f"{self}/{name}")
        return bytes(result.value)

    def start_read(self, name: str, start: int, stop: int) -> Any:
        """Begin a read of some bytes of a file; TensorStore's future of it."""
        return self._open().read(name, byte_range=slice(start, stop))

    def read_whole(self, name: str, most: int) -> bytes:
        """As `Folder.read_whole`. Stores do not tell sizes here, but whether there is a byte at a place."""
        if self.read(name, most, most + 1):
            raise too_long(name, most)
        return self.read(name)

    def first_short(self, sizes: Mapping[str, int]) -> str | None:
        """As `Folder.first_short`."""
        waiting = iter(sizes.items())
        while some := list(itertools.islice(waiting, MAX_PROBES)):
            probes = [(name, self.start_read(name, least - 1, least)) for name, least in some]
            found = [(name, probe.exception(), probe) for name, probe in probes]
            for name, error, probe in found:
                if error is not None and "OUT_OF_RANGE" not in str(error):
                    raise error
                if error is not None or probe.result().state != "value":
                    return name
        return None

    def write(self, name: str, data: bytes) -> None:
        """As `Folder.write`."""
        self._open().write(name, data).result()

    def sync(self, names: Iterable[str]) -> None:
        """As `Folder.sync`."""

    def early_sync(self, folder: str) -> AbstractContextManager[None]:  # noqa: ARG002  (nothing is left to be done)
        """As `Folder.early_sync`."""
        return nullcontext()

    def create(self, name: str, data: bytes) -> bool:
        """As `ObjectFolder.create`."""
        found = self._open().read(name).result()
        if found.state != "missing":
            return False
        written = self._open().write(name, data, if_equal=found.stamp.generation).result()
        return bool(written.generation)  # that of nothing is empty

    def names(self, prefix: str = "") -> list[str]:
        """As `Folder.names`."""
        # Names are text to Google's API, so the end of the range must be, too.
        after = prefix[:-1] + chr(ord(prefix[-1]) + 1) if prefix else ""
        found = self._open().list(ts.KvStore.KeyRange(prefix, after)).result()
        return sorted(name.decode() for name in found)

    def remove(self, names: Iterable[str]) -> None:
        """As `Folder.remove`."""
        store = self._open()
        for removal in [store.write(name, None) for name in names]:
            removal.result()

    def clear(self) -> None:
        """As `ObjectFolder.clear`."""
        self._open().delete_range(ts.KvStore.KeyRange()).result()

    def kvstore(self, *, to_write: bool = False) -> dict[str, Any]:  # noqa: ARG002  (both are the same)
        """As `Folder.kvstore`."""
        return {**self._spec, "path": f"{self._path}/" if self._path else ""}

    def _open(self) -> Any:
        if self._store is None:
            self._store = ts.KvStore.open(self.kvstore(), context=_shared_context()).result()
        return self._store


@functools.cache
def _shared_context() -> Any:
    return open_context()
