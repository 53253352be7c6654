"""Zarr v3 arrays in a checkpoint directory, through TensorStore.

Writing: each client opens its own `ArrayWriter`; the leader then calls `merge`. With the ``ocdbt`` key-value store a
client writes one database under ``client_<i>/`` in one transaction, and the merge makes the root database refer to
the clients' data without copying it. With ``zarr`` clients write chunk files straight into the array folders and
the merge adds the metadata files. Either way only the leader writes metadata, so clients share no key.

Facts that shape the code: a write copies its source unless it may refer to it; a read is fast only into ready
memory with memory-mapped files; chunks of zeros are left out and read back as zeros unless told otherwise; a range
copy between databases works only if all were opened with one context.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts

from dtckpt.errors import StorageError
from dtckpt.format.dtypes import DTYPES, fill_value
from dtckpt.format.grid import ChunkGrid
from dtckpt.format.names import groups
from dtckpt.region import Region
from dtckpt.storage.failures import translated

DATABASE_NAME = "manifest.ocdbt"
"""The file of an OCDBT database that leads to all others."""
TARGET_DATA_FILE_NBYTES = 256 << 20
SMALL_NBYTES = 1 << 20
"""A whole chunk up to this size goes straight to its key: opening an array takes longer than writing it."""
MAX_INLINE_NBYTES = 512
"""Values up to this size live inside the database's nodes; they are copied by a merge, so it stays small."""


def client_folder(client: int) -> str:
    """Return the name of the folder that one client writes."""
    return f"client_{client}"


def array_metadata(grid: ChunkGrid, stored_dtype: str, attributes: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return an array's ``zarr.json`` (Zarr v3 core specification)."""
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(grid.shape),
        "data_type": stored_dtype,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(grid.chunk_shape)}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": fill_value(stored_dtype),
        "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
        "attributes": dict(attributes or {}),
    }


def _file_kvstore(folder: Path, **options: Any) -> dict[str, Any]:
    return {"driver": "file", "path": f"{folder.absolute()}/", **options}


def _kvstore(kind: str, folder: Path, **options: Any) -> dict[str, Any]:
    base = _file_kvstore(folder, **options)
    if kind == "zarr":
        return base
    return {
        "driver": "ocdbt",
        "base": base,
        "target_data_file_size": TARGET_DATA_FILE_NBYTES,
        "config": {"max_inline_value_bytes": MAX_INLINE_NBYTES},
    }


def _chunk_key(path: str, grid: ChunkGrid, region: Region, nbytes: int) -> str | None:
    """Return the key of a small whole chunk, whose value is its elements (Zarr v3, codec ``bytes``); else None.

    What a grid cuts short at its edge is stored filled up, which is left to TensorStore.
    """
    if nbytes > SMALL_NBYTES or region.shape != grid.chunk_shape:
        return None
    index = (start // size for start, size in zip(region.offset, grid.chunk_shape, strict=True))
    return "/".join(([path] if path else []) + ["c", *map(str, index)])


_pid: int | None = None
"""Process that uses TensorStore; its threads do not survive a fork."""


def _context() -> Any:
    global _pid  # noqa: PLW0603  (a fact about the process)
    _pid = _pid or os.getpid()
    if _pid != os.getpid():
        raise StorageError(
            "this process was forked from one that had used checkpoints already, and cannot; start it with 'spawn' or "
            "'forkserver', or use checkpoints here first"
        )
    return ts.Context({"cache_pool": {"total_bytes_limit": 0}})


class ArrayWriter:
    """One client's writes of one save.

    Args:
        kind: Key-value store, ``ocdbt`` or ``zarr``.
        root: The checkpoint directory under construction; every client sees the same one.
        client: Whose writes these are.
        is_durable: Whether data is on the disk (fsync), not only handed to the kernel, when `commit` returns.
        max_pending_nbytes: Elements that may wait to be written; more are written out before `write` returns.
    """

    def __init__(
        self,
        kind: str,
        root: Path,
        client: int,
        *,
        is_durable: bool = True,
        max_pending_nbytes: int | None = None,
    ) -> None:
        self._where = root
        self._context = _context()
        self._is_database = kind == "ocdbt"
        folder = root / client_folder(client) if self._is_database else root
        self._kvstore = _kvstore(kind, folder, file_io_sync=is_durable)
        self._arrays: dict[str, Any] = {}
        self._max_pending_nbytes = max_pending_nbytes
        self._reset()

    def _reset(self) -> None:
        # The file driver has no transactions over several files; there each write is its own.
        self._transaction = ts.Transaction(atomic=True) if self._is_database else None
        self._store: Any = None
        self._pending: list[Any] = []
        self._pending_nbytes = 0

    def write(
        self, path: str, grid: ChunkGrid, stored_dtype: str, region: Region, elements: np.ndarray[Any, Any]
    ) -> None:
        """Start writing one whole chunk; ``elements`` must not change before `commit` returns."""
        key = _chunk_key(path, grid, region, elements.nbytes)
        with translated(f"write array {path!r}", self._where):
            if key is not None:
                self._pending.append(self._values().write(key, elements.tobytes()))
                self._note(elements.nbytes)
                return
            array = self._open(path, grid, stored_dtype).with_transaction(self._transaction)
            target = array[region.slices()] if region.ndim else array
            write = target.write(elements, can_reference_source_data_indefinitely=True)
            self._pending.append(write.copy if self._transaction else write)
        self._note(elements.nbytes)

    def _note(self, nbytes: int) -> None:
        self._pending_nbytes += nbytes
        if self._max_pending_nbytes is not None and self._pending_nbytes > self._max_pending_nbytes:
            self.commit()

    def _values(self) -> Any:
        """Return the key-value store as the transaction sees it."""
        if self._store is None:
            store = ts.KvStore.open(self._kvstore, context=self._context).result()
            self._store = store.with_transaction(self._transaction) if self._transaction else store
        return self._store

    def _open(self, path: str, grid: ChunkGrid, stored_dtype: str) -> Any:
        if path not in self._arrays:
            self._arrays[path] = _open_array(
                self._kvstore, path, grid, stored_dtype, self._context, store_data_equal_to_fill_value=True
            )
        return self._arrays[path]

    def commit(self) -> None:
        """Wait until everything is written. Blocks: on storage."""
        with translated("write chunks", self._where):
            for write in self._pending:
                write.result()
            if self._transaction is not None:
                commit = self._transaction.commit_async()
                self._pending.append(commit)
                commit.result()
        self._reset()

    def abort(self) -> None:
        """Drop what was not committed, and wait for writes under way: they would make removed folders again."""
        if self._transaction is not None:
            self._transaction.abort()
        for write in self._pending:
            write.exception()


def _open_array(
    kvstore: Mapping[str, Any], path: str, grid: ChunkGrid, stored_dtype: str, context: Any, **options: Any
) -> Any:
    """Open an array whose metadata is known, without reading it."""
    spec = {
        "driver": "zarr3",
        "kvstore": {**kvstore, "path": f"{kvstore.get('path', '')}{path}/"},
        "metadata": array_metadata(grid, stored_dtype),
        **options,
    }
    return ts.open(spec, open=True, assume_metadata=True, context=context).result()


def documents(metadata: Mapping[str, dict[str, Any]]) -> dict[str, bytes]:
    """Return the ``zarr.json`` of arrays (metadata by array path) and of the groups above them, by key."""
    group = {"zarr_format": 3, "node_type": "group", "attributes": {}}
    found = {**metadata, **dict.fromkeys(groups(metadata), group)}
    return {_document_key(path): json.dumps(document).encode() for path, document in sorted(found.items())}


def _document_key(path: str) -> str:
    return f"{path}/zarr.json" if path else "zarr.json"


def merge(
    kind: str, root: Path, clients: Sequence[int], metadata: Mapping[str, bytes], *, is_durable: bool = True
) -> None:
    """Make the clients' writes one hierarchy of arrays. Called by the leader, after all clients committed.

    Args:
        kind: Key-value store.
        root: The checkpoint directory under construction.
        clients: Clients that wrote chunks.
        metadata: See `documents`.
        is_durable: As for `ArrayWriter`.
    """
    with translated("merge what the clients wrote", root):
        context = _context()
        store = ts.KvStore.open(_kvstore(kind, root, file_io_sync=is_durable), context=context).result()
        transaction = ts.Transaction(atomic=True) if kind == "ocdbt" else None
        target = store.with_transaction(transaction) if transaction else store
        if transaction:
            for client in clients:
                # A range is copied by reference only between stores whose base options are the same.
                spec = _kvstore(kind, root / client_folder(client), file_io_sync=is_durable)
                source = ts.KvStore.open(spec, context=context).result()
                source.experimental_copy_range_to(target).result()
        writes = [target.write(key, document) for key, document in metadata.items()]
        for write in writes:
            write.result()
        if transaction:
            transaction.commit_async().result()


class _SmallRead:
    """A small whole chunk on its way into ready memory; to be used as TensorStore's futures are."""

    def __init__(self, read: Any, into: np.ndarray[Any, Any]) -> None:
        self._read, self._into = read, into

    def result(self) -> None:
        found = self._read.result()
        if found.state != "value" or len(found.value) != self._into.nbytes:
            raise ValueError(f"chunk is missing, or not of {self._into.nbytes} bytes")
        self._into[...] = np.frombuffer(found.value, self._into.dtype).reshape(self._into.shape)

    def exception(self) -> Any:
        return self._read.exception()


class ArrayReader:
    """Reads chunks of a committed checkpoint.

    Args:
        kind: Key-value store.
        root: The checkpoint directory.
    """

    def __init__(self, kind: str, root: Path) -> None:
        self._where = root
        self._kvstore = _kvstore(kind, root, file_io_mode={"mode": "memmap"})
        self._context = _context()
        self._arrays: dict[str, Any] = {}
        self._store: Any = None

    def start(self, path: str, grid: ChunkGrid, stored_dtype: str, region: Region, into: np.ndarray[Any, Any]) -> Any:
        """Start reading ``region`` (global indices) into ready memory of its shape; `finish` waits for it."""
        key = _chunk_key(path, grid, region, into.nbytes)
        with translated(f"open array {path!r}", self._where, is_read=True):
            if key is not None:
                return _SmallRead(self._open_store().read(key), into)
            if path not in self._arrays:
                self._arrays[path] = _open_array(
                    self._kvstore, path, grid, stored_dtype, self._context, fill_missing_data_reads=False
                )
            array = self._arrays[path]
            source = array[region.slices()].translate_to[(0,) * region.ndim] if region.ndim else array
            return ts.array(into, context=self._context).write(source)

    def finish(self, read: Any, path: str, region: Region) -> None:
        """Wait for a read. Blocks: on storage.

        Raises:
            CheckpointCorruptError: The chunk is missing or malformed.
            StorageError: Storage refused.
        """
        with translated(f"read {region} of array {path!r}", self._where, is_read=True):
            read.result()

    def read_documents(self, paths: Iterable[str]) -> dict[str, bytes]:
        """Return the ``zarr.json`` of arrays and of the groups above them, by key; empty where one is missing."""
        listed = list(paths)
        with translated("read zarr.json", self._where, is_read=True):
            store = self._open_store()
            reads = {key: store.read(key) for key in map(_document_key, sorted({*listed, *groups(listed)}))}
            return {key: bytes(read.result().value) for key, read in reads.items()}

    def _open_store(self) -> Any:
        if self._store is None:
            self._store = ts.KvStore.open(self._kvstore, context=self._context).result()
        return self._store

    def start_span(self, path: str, index: Sequence[int], start: int, stop: int) -> Any:
        """Start reading bytes ``start`` to ``stop`` of a stored chunk; `finish_span` waits for them."""
        with translated(f"open array {path!r}", self._where, is_read=True):
            key = "/".join([path, "c", *map(str, index)])
            return self._open_store().read(key, byte_range=slice(start, stop))

    def finish_span(self, read: Any, path: str, region: Region, nbytes: int) -> bytes:
        """Return the ``nbytes`` of a part of a chunk. Blocks: on storage. Raises: as `finish`."""
        with translated(f"read {region} of array {path!r}", self._where, is_read=True):
            result = read.result()
            if result.state != "value" or len(result.value) != nbytes:
                raise ValueError("the chunk is missing or cut short")
            return bytes(result.value)

    def close(self) -> None:
        """Forget the open arrays."""
        self._store = None
        self._arrays.clear()


def stored_empty(stored_dtype: str, shape: Iterable[int]) -> np.ndarray[Any, Any]:
    """Return uninitialised host memory for stored elements."""
    return np.empty(tuple(shape), DTYPES[stored_dtype])
