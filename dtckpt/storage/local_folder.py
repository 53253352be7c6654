"""The local back end: `LocalFolder`, files in a directory of a file system."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Self

from dtckpt.storage import fsync
from dtckpt.storage.regular_files import open_regular, regular_nbytes, too_long_error


class LocalFolder:
    """A directory.

    Args:
        path: Its path.
    """

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
        descriptor, nbytes = open_regular(f"{self.path}/{name}")
        with open(descriptor, "rb") as file:
            # The size bounds the read: Python allocates as many bytes as it is asked for, however short the file is.
            file.seek(start)
            return file.read(max(0, (nbytes if stop is None else min(stop, nbytes)) - start))

    def read_whole(self, name: str, most: int) -> bytes:
        """As `Folder.read_whole`."""
        descriptor, nbytes = open_regular(f"{self.path}/{name}")
        with open(descriptor, "rb") as file:
            # The size of the open file: a save may have replaced the one at this path.
            if nbytes > most:
                raise too_long_error(name, most)
            return file.read(nbytes)

    def find_short_file(self, sizes: Mapping[str, int]) -> str | None:
        """As `Folder.find_short_file`."""
        # -1 is less than any size, so a missing file is a short one, even where it may be empty.
        return next((name for name, least in sizes.items() if self._nbytes(name) < least), None)

    def _nbytes(self, name: str) -> int:
        """Return a file's size; -1 if there is no such file."""
        try:
            return regular_nbytes(f"{self.path}/{name}")
        except FileNotFoundError:
            return -1

    def write(self, name: str, data: bytes) -> None:
        """As `Folder.write`."""
        (self.path / name).write_bytes(data)

    def replace(self, name: str, data: bytes) -> None:
        """As `Folder.replace`. A process that dies meanwhile may leave a hidden file, which the next call replaces."""
        draft = self.path / f".{name.lstrip('.')}.draft"
        draft.write_bytes(data)
        draft.rename(self.path / name)

    def sync(self, names: Iterable[str]) -> None:
        """As `Folder.sync`; the name of a directory stands for the names in it."""
        fsync.sync_all(self.path / name for name in names)

    def settle(self, names: Iterable[str]) -> None:
        """As `Folder.settle`."""
        fsync.settle(self.path / name for name in names)

    def early_sync(self, folder: str) -> AbstractContextManager[None]:
        """As `Folder.early_sync`."""
        return fsync.early_writeback(self.path / folder)

    def names(self, prefix: str = "") -> list[str]:
        """As `Folder.names`, but only of the entries of this very directory."""
        return sorted(entry.name for entry in self.path.iterdir() if entry.name.startswith(prefix))

    def remove(self, names: Iterable[str]) -> None:
        """As `Folder.remove`; this directory is removed too once it is empty."""
        for name in names:
            (self.path / name).unlink(missing_ok=True)
        if not any(self.path.iterdir()):
            self.path.rmdir()

    def kvstore(self, *, to_write: bool = False) -> dict[str, Any]:
        """As `Folder.kvstore`. TensorStore reads fast only from memory-mapped files."""
        mode: dict[str, Any] = {"file_io_sync": False} if to_write else {"file_io_mode": {"mode": "memmap"}}
        return {"driver": "file", "path": f"{self.path.absolute()}/", **mode}
