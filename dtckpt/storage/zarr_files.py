"""Writes the Zarr v3 arrays of a checkpoint, one file per chunk, to back ends that TensorStore cannot reach.

The only codec is ``bytes`` (little endian), so the file of a chunk is its elements in C order. A chunk that the grid
cuts short at its edge is padded with zeros. A few files are written at a time, each in a thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future
from typing import Any

import numpy as np

from dtckpt.comm.background_threads import Pool
from dtckpt.errors import ConfigError
from dtckpt.format.codecs import NO_CODEC
from dtckpt.format.grid import ChunkGrid
from dtckpt.layout.region import Region
from dtckpt.storage.failures import translate_errors
from dtckpt.storage.folder import Folder
from dtckpt.storage.zarr_tensorstore import StoredArray, TensorStoreWriter, chunk_key, pad

NUM_THREADS = 16


def open_writer(
    kind: str,
    root: Folder,
    client: int,
    *,
    is_durable: bool = True,
    is_cached: bool = True,
    max_pending_nbytes: int | None = None,
) -> TensorStoreWriter | ChunkFileWriter:
    """Return the writer of one client's chunks that fits a folder. Args: as for `TensorStoreWriter`."""
    if root.kvstore() is None:
        return ChunkFileWriter(kind, root, max_pending_nbytes=max_pending_nbytes)
    return TensorStoreWriter(
        kind, root, client, is_durable=is_durable, is_cached=is_cached, max_pending_nbytes=max_pending_nbytes
    )


def validate_kind(kind: str, root: Folder, codecs: Iterable[str] = ()) -> None:
    """Refuse a kind of key-value store, or codecs, that need TensorStore where it cannot reach the folder.

    Raises:
        ConfigError: The folder cannot hold them.
    """
    if kind != "zarr" and root.kvstore() is None:
        raise ConfigError(f"{root} cannot hold a database, which TensorStore writes; use SaveOptions(kvstore='zarr')")
    if set(codecs) - {NO_CODEC} and root.kvstore() is None:
        raise ConfigError(f"{root} cannot hold compressed chunks; use SaveOptions(codec='none')")


class ChunkFileWriter:
    """One client's writes of one save, without TensorStore. The methods are the same as in `TensorStoreWriter`."""

    def __init__(self, kind: str, root: Folder, *, max_pending_nbytes: int | None = None) -> None:
        validate_kind(kind, root)
        self._root = root
        self._max_pending_nbytes = max_pending_nbytes
        self._pool = Pool(NUM_THREADS, "dtckpt-chunks")
        self._pending: deque[tuple[Future[None], int]] = deque()
        self._pending_nbytes = 0

    def write(
        self,
        array: StoredArray,
        region: Region,
        elements: np.ndarray[Any, Any],
        *,
        is_kept: bool = False,  # noqa: ARG002  (every chunk is copied)
    ) -> None:
        """Start to write a chunk; wait for earlier ones while too many bytes are under way."""
        validate_kind("zarr", self._root, [array.codec])
        key = chunk_key(array.path, array.grid, region)
        self._add(self._pool.submit(self._write, key, array.grid, elements), elements.nbytes)

    def begin_files(self) -> None:
        """Each chunk is a separate file anyway."""

    def write_document(self, key: str, document: bytes) -> None:
        """Start to write a ``zarr.json``."""
        self._add(self._pool.submit(self._root.write, key, document), len(document))

    def _add(self, write: Future[None], nbytes: int) -> None:
        """Note a write under way; wait for the oldest ones while too many bytes are."""
        self._pending.append((write, nbytes))
        self._pending_nbytes += nbytes
        if self._max_pending_nbytes is not None:
            self._wait(self._max_pending_nbytes)

    def _write(self, key: str, grid: ChunkGrid, elements: np.ndarray[Any, Any]) -> None:
        if elements.shape != grid.chunk_shape:
            elements = pad(elements, np.empty(grid.chunk_shape, elements.dtype))
        self._root.write(key, elements.tobytes())

    def _wait(self, max_nbytes: int) -> None:
        """Wait for the oldest writes until no more bytes than ``max_nbytes`` are under way."""
        with translate_errors("write chunks", self._root):
            while self._pending and (self._pending_nbytes > max_nbytes or not max_nbytes):
                write, nbytes = self._pending.popleft()
                write.result()
                self._pending_nbytes -= nbytes

    def commit(self) -> None:
        """Wait for all writes."""
        self._wait(0)
        self._pool.shutdown()

    def abort(self) -> None:
        """Drop the writes that have not started, and wait for the others."""
        self._pool.shutdown(cancel_futures=True)
