"""Reads ranges of bytes of the files of a folder: from local files into memory, elsewhere several at a time."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from dtckpt.comm.background_threads import Pool
from dtckpt.storage.folder import Folder
from dtckpt.storage.local_folder import LocalFolder
from dtckpt.storage.local_values import OpenFile
from dtckpt.storage.s3_gcs_folder import BucketFolder

NUM_THREADS = 16
MAX_OPEN_FILES = 64
"""Files that are kept open."""


class RangeReader:
    """Reads ranges of bytes of a folder's files. Thread-safe.

    Args:
        folder: The folder.
    """

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        # A file that is dropped here stays open while somebody reads from it.
        self._files = lru_cache(maxsize=MAX_OPEN_FILES)(OpenFile)
        self._lazy_pool: Pool | None = None

    def open(self, name: str) -> OpenFile:
        """Return a file of a local folder; it is opened once.

        Raises:
            MalformedError: The file is missing, or is no regular file.
        """
        assert isinstance(self._folder, LocalFolder)  # noqa: S101  (others are read by `start`)
        return self._files(f"{self._folder.path}/{name}")

    def start(self, name: str, start: int, stop: int) -> Any:
        """Start a read of bytes ``start`` to ``stop`` of a file; return its future.

        The future's result is the bytes, or TensorStore's result of a read.
        """
        # TensorStore has threads of its own.
        if isinstance(self._folder, BucketFolder):
            return self._folder.start_read(name, start, stop)
        return self.pool().submit(self._folder.read, name, start, stop)

    def pool(self) -> Pool:
        """Return the threads that read; they are made at first use."""
        if self._lazy_pool is None:
            self._lazy_pool = Pool(NUM_THREADS, "dtckpt-chunks")
        return self._lazy_pool

    def close(self) -> None:
        """Close the files that nobody reads from, and let the threads end."""
        self._files.cache_clear()
        if self._lazy_pool is not None:
            self._lazy_pool.shutdown(wait=False)
            self._lazy_pool = None
