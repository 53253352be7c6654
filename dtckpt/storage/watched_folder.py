"""`WatchedFolder`: a directory whose files must stay the same, from the first look at a file to its last read.

Files without digests tell nothing of a change: after another save to the same path, a header that was read before it
would describe elements that were written after it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

from typing_extensions import override

from dtckpt.errors import CheckpointConflictError
from dtckpt.storage.local_folder import LocalFolder
from dtckpt.storage.local_values import OpenFile
from dtckpt.storage.regular_files import open_regular, regular_status

MAX_WATCHED = 1 << 17
"""Files that are compared: a checkpoint may have a file for each of millions of chunks."""
_MISSING = 0


class WatchedFolder(LocalFolder):
    """A directory, for reading. Each read raises `CheckpointConflictError` if the file is not the file of before.

    Args:
        base: The directory.
    """

    def __init__(self, base: Path) -> None:
        super().__init__(base)
        # By path; folders below share it.
        self._known: dict[str, int] = {}

    def look_at(self, names: Iterable[str]) -> None:
        """Look at files that are read later, if at all; they may be missing. Blocks: on storage."""
        for name in islice(names, max(0, MAX_WATCHED - len(self._known))):
            path = f"{self.path}/{name}"
            try:
                status = os.stat(path)
            except OSError:
                self._known.setdefault(path, _MISSING)
            else:
                self._compare(path, status)

    def validate_same(self, name: str, descriptor: int) -> None:
        """Compare an open file with the file of before. Raises: CheckpointConflictError: It is another, or changed."""
        self._compare(f"{self.path}/{name}", os.fstat(descriptor))

    def _compare(self, path: str, status: os.stat_result) -> None:
        stamp = hash((status.st_ino, status.st_size, status.st_mtime_ns, status.st_dev))
        known = self._known.get(path)
        if known is None:
            if len(self._known) < MAX_WATCHED:
                self._known[path] = stamp
        elif known != stamp:
            raise _conflict(path, "replaced or changed" if known != _MISSING else "added")

    @override
    def open_regular(self, name: str) -> tuple[int, int]:
        path = f"{self.path}/{name}"
        try:
            descriptor, status = open_regular(path)
        except FileNotFoundError:
            self._validate_missing(path)
            raise
        try:
            self._compare(path, status)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor, status.st_size

    @override
    def file_nbytes(self, name: str) -> int:
        path = f"{self.path}/{name}"
        try:
            status = regular_status(path)
        except FileNotFoundError:
            self._validate_missing(path)
            raise
        self._compare(path, status)
        return status.st_size

    @override
    def open_local(self, name: str) -> OpenFile:
        file = super().open_local(name)
        self.validate_same(name, file.descriptor)
        return file

    def _validate_missing(self, path: str) -> None:
        if self._known.get(path, _MISSING) != _MISSING:
            raise _conflict(path, "removed") from None


def _conflict(path: str, change: str) -> CheckpointConflictError:
    return CheckpointConflictError(f"{path} was {change} while the checkpoint was being read; open it again")
