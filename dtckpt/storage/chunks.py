"""Zarr v3 arrays where TensorStore does not reach: chunk by chunk, each a file of its own.

The codec is ``bytes`` (little endian), so a chunk's file is its elements in C order; chunks that the grid cuts short
at its edge are stored filled up with zeros. A few files are on their way at one time, each in a thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from dtckpt.errors import ConfigError
from dtckpt.format.codecs import NO_CODEC
from dtckpt.format.grid import ChunkGrid
from dtckpt.format.names import groups
from dtckpt.region import Region
from dtckpt.storage.arrays import ArrayReader, ArrayWriter, StoredArray, chunk_key, document_key, key_of
from dtckpt.storage.failures import translated
from dtckpt.storage.folders import Folder
from dtckpt.threads import Pool

NUM_THREADS = 16


def open_writer(
    kind: str, root: Folder, client: int, *, is_durable: bool = True, max_pending_nbytes: int | None = None
) -> ArrayWriter | ChunkWriter:
    """Return what writes one client's chunks below a folder; arguments as for `ArrayWriter`."""
    if root.kvstore() is None:
        return ChunkWriter(kind, root, max_pending_nbytes=max_pending_nbytes)
    return ArrayWriter(kind, root, client, is_durable=is_durable, max_pending_nbytes=max_pending_nbytes)


def open_reader(kind: str, root: Folder, *, by_file: bool = False) -> ArrayReader | ChunkReader:
    """Return what reads the chunks below a folder; arguments as for `ArrayReader`."""
    return ChunkReader(kind, root) if root.kvstore() is None else ArrayReader(kind, root, by_file=by_file)


def validate_kind(kind: str, root: Folder, codecs: Iterable[str] = ()) -> None:
    """Refuse a kind of key-value store, or codecs, that a folder cannot hold.

    Raises:
        ConfigError: It cannot.
    """
    if kind != "zarr" and root.kvstore() is None:
        raise ConfigError(f"{root} cannot hold a database, which TensorStore writes; use SaveOptions(kvstore='zarr')")
    if set(codecs) - {NO_CODEC} and root.kvstore() is None:
        raise ConfigError(f"{root} cannot hold compressed chunks; use SaveOptions(codec='none')")


class ChunkWriter:
    """As `ArrayWriter`, without TensorStore."""

    def __init__(self, kind: str, root: Folder, *, max_pending_nbytes: int | None = None) -> None:
        validate_kind(kind, root)
        self._root = root
        self._max_pending_nbytes = max_pending_nbytes
        self._pool = Pool(NUM_THREADS, "dtckpt-chunks")
        self._pending: list[Future[None]] = []
        self._pending_nbytes = 0

    def write(
        self,
        array: StoredArray,
        region: Region,
        elements: np.ndarray[Any, Any],
        *,
        is_kept: bool = False,  # noqa: ARG002  (all are copied)
    ) -> None:
        """As `ArrayWriter.write`."""
        validate_kind("zarr", self._root, [array.codec])
        key = chunk_key(array.path, array.grid, region)
        self._pending.append(self._pool.submit(self._write, key, array.grid, elements))
        self._note(elements.nbytes)

    def write_document(self, key: str, document: bytes) -> None:
        """As `ArrayWriter.write_document`."""
        self._pending.append(self._pool.submit(self._root.write, key, document))
        self._note(len(document))

    def _note(self, nbytes: int) -> None:
        self._pending_nbytes += nbytes
        if self._max_pending_nbytes is not None and self._pending_nbytes > self._max_pending_nbytes:
            self._wait()

    def _write(self, key: str, grid: ChunkGrid, elements: np.ndarray[Any, Any]) -> None:
        if elements.shape != grid.chunk_shape:
            whole = np.zeros(grid.chunk_shape, elements.dtype)
            whole[tuple(slice(size) for size in elements.shape)] = elements
            elements = whole
        self._root.write(key, elements.tobytes())

    def _wait(self) -> None:
        with translated("write chunks", self._root):
            for write in self._pending:
                write.result()
        self._pending, self._pending_nbytes = [], 0

    def commit(self) -> None:
        """As `ArrayWriter.commit`."""
        self._wait()
        self._pool.shutdown()

    def abort(self) -> None:
        """As `ArrayWriter.abort`."""
        self._pool.shutdown(cancel_futures=True)


class _ChunkRead:
    """A whole chunk on its way into ready memory; to be used as TensorStore's futures are."""

    def __init__(self, read: Future[bytes], grid: ChunkGrid, into: np.ndarray[Any, Any]) -> None:
        self._read, self._grid, self._into = read, grid, into

    def result(self) -> None:
        elements = np.frombuffer(_found(self._read), self._into.dtype)
        if elements.size != np.prod(self._grid.chunk_shape, dtype=int):
            raise ValueError(f"the chunk is cut short: got {elements.size} elements")
        self._into[...] = elements.reshape(self._grid.chunk_shape)[tuple(slice(size) for size in self._into.shape)]

    def exception(self) -> Any:
        return self._read.exception()


def _found(read: Future[bytes]) -> bytes:
    try:
        return read.result()
    except FileNotFoundError:
        raise ValueError("the chunk is missing") from None


class ChunkReader:
    """As `ArrayReader`, without TensorStore."""

    def __init__(self, kind: str, root: Folder) -> None:
        validate_kind(kind, root)
        self._root = root
        self._pool = Pool(NUM_THREADS, "dtckpt-chunks")

    def expect(self, count: int) -> None:
        """As `ArrayReader.expect`."""

    def locate(self, path: str, index: Sequence[int], nbytes: int) -> None:
        """As `ArrayReader.locate`: what fsspec reads lies in no file that is known."""

    def locate_small(self, places: Sequence[tuple[str, Sequence[int]]]) -> list[None]:
        """As `ArrayReader.locate_small`: what fsspec reads lies in no file that is known."""
        return [None for _ in places]

    def start(self, array: StoredArray, region: Region, into: np.ndarray[Any, Any]) -> Any:
        """As `ArrayReader.start`; ``region`` is a whole chunk."""
        validate_kind("zarr", self._root, [array.codec])
        read = self._pool.submit(self._root.read, chunk_key(array.path, array.grid, region))
        return _ChunkRead(read, array.grid, into)

    def finish(self, read: Any, path: str, region: Region) -> None:
        """As `ArrayReader.finish`."""
        with translated(f"read {region} of array {path!r}", self._root, is_read=True):
            read.result()

    def start_span(self, path: str, index: Sequence[int], start: int, stop: int) -> Any:
        """As `ArrayReader.start_span`."""
        return self._pool.submit(self._root.read, key_of(path, index), start, stop)

    def finish_span(self, read: Any, path: str, region: Region, nbytes: int) -> bytes:
        """As `ArrayReader.finish_span`."""
        with translated(f"read {region} of array {path!r}", self._root, is_read=True):
            data = _found(read)
            if len(data) != nbytes:
                raise ValueError("the chunk is missing or cut short")
            return data

    def read_documents(self, paths: Iterable[str]) -> dict[str, bytes]:
        """As `ArrayReader.read_documents`."""
        listed = list(paths)
        found: dict[str, bytes] = {}
        with translated("read zarr.json", self._root, is_read=True):
            keys = map(document_key, sorted({*listed, *groups(listed)}))
            for key, read in [(key, self._pool.submit(self._root.read, key)) for key in keys]:
                try:
                    found[key] = read.result()
                except FileNotFoundError:
                    found[key] = b""
        return found

    def close(self) -> None:
        """As `ArrayReader.close`."""
        self._pool.shutdown(wait=False)
