"""Reads of chunks, wherever they lie: no more is taken from storage, and of memory, than the chunk's shape allows.

A chunk that is not compressed is its elements, and just those bytes are asked for. A compressed one is read if it is
no longer than such a chunk can be, and decoded, from memory, if it states the right size. The arrays' own metadata is
not asked: what counts is the manifest.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import islice
from typing import Any

import numpy as np
import tensorstore as ts

from dtckpt.comm.background_threads import Pool
from dtckpt.format.codecs import NO_CODEC, chunk_bounds, validate_encoded
from dtckpt.format.dtypes import DTYPES
from dtckpt.format.names import groups
from dtckpt.layout.region import Region
from dtckpt.storage.failures import MalformedError, translated
from dtckpt.storage.folder import Folder, KeyValueFolder, LocalFolder, open_context
from dtckpt.storage.local_values import File, StoredValue
from dtckpt.storage.ocdbt_database import Database, Place
from dtckpt.storage.zarr_files import validate_kind
from dtckpt.storage.zarr_tensorstore import StoredArray, chunk_key, document_key, key_of, open_array

NUM_THREADS = 16
MAX_FILES = 64
"""Files of a database that are kept open."""
MAX_DOCUMENT_NBYTES = 1 << 20
"""Of a ``zarr.json``."""
MAX_DOCUMENTS = 64
"""Documents that are read at one time."""
MAX_SIZES = 4096
"""Files whose sizes are asked for together."""


class _Known:
    """A value that lies in the database's nodes; to be used as futures are."""

    def __init__(self, value: bytes) -> None:
        self._value = value

    def result(self) -> bytes:
        return self._value

    def exception(self) -> None:
        return None


class _ElementsRead:
    """A chunk that is not compressed on its way into ready memory; to be used as futures are."""

    def __init__(self, read: Any, chunk_shape: tuple[int, ...], into: np.ndarray[Any, Any]) -> None:
        self._read, self._chunk_shape, self._into = read, chunk_shape, into

    def result(self) -> None:
        data = content(self._read, math.prod(self._chunk_shape) * self._into.itemsize)
        elements = np.frombuffer(data, self._into.dtype).reshape(self._chunk_shape)
        self._into[...] = elements[tuple(slice(size) for size in self._into.shape)]

    def exception(self) -> Any:
        return self._read.exception()


def content(read: Any, nbytes: int) -> bytes:
    """Return what a read brought. Blocks: On storage.

    Raises:
        MalformedError: There is nothing, or not so many bytes.
    """
    try:
        found = read.result()
    except FileNotFoundError:
        raise MalformedError("the chunk is missing") from None
    if isinstance(found, ts.KvStore.ReadResult):
        found = found.value if found.state == "value" else b""
    if len(found) != nbytes:
        raise MalformedError(f"the chunk is missing or cut short: got {len(found)} bytes, expected {nbytes}")
    data: bytes = found
    return data


class ArrayReader:
    """Reads chunks of a committed checkpoint.

    Args:
        kind: Key-value store.
        root: The checkpoint's folder.
        by_file: Whether to find chunks in the files of a local folder. Where storage takes long to answer,
            threads are better.
    """

    def __init__(self, kind: str, root: Folder, *, by_file: bool = False) -> None:
        validate_kind(kind, root)
        self._where = root
        self._context: Any = None if root.kvstore() is None else open_context()
        self._database = Database(root, self._context) if kind == "ocdbt" else None
        self._folder = root.path if by_file and isinstance(root, LocalFolder) else None
        self._files = lru_cache(maxsize=MAX_FILES)(File)
        self._threads: Pool | None = None

    def _place(self, key: str) -> Place | bytes:
        return Place(key) if self._database is None else self._database.find(key)

    def _pool(self) -> Pool:
        if self._threads is None:
            self._threads = Pool(NUM_THREADS, "dtckpt-chunks")
        return self._threads

    def locate(self, path: str, index: Sequence[int]) -> StoredValue | None:
        """Return where a chunk's stored bytes lie in a file of this machine; `start` reads any other.

        Args:
            path: The array.
            index: The chunk's position per dim.

        Raises:
            CheckpointCorruptError: The chunk is missing.
            StorageError: Storage refused.
        """
        if self._folder is None:
            return None
        with translated("find chunk {} of array {!r}", self._where, index, path, is_read=True):
            return self._value(key_of(path, index))

    def locate_small(self, places: Sequence[tuple[str, Sequence[int]]]) -> Sequence[StoredValue | None]:
        """Return where small chunks lie that share files with others, as `locate`; None for the others.

        Args:
            places: Array and position per dim, chunk by chunk.

        Raises:
            CheckpointCorruptError: The database that holds them is damaged.
            StorageError: Storage refused.
        """
        if not places or self._folder is None or self._database is None:
            return [None] * len(places)
        (first, _) = places[0]
        with translated("find {} chunks, of array {!r} first", self._where, len(places), first, is_read=True):
            return [self._value(key_of(path, index)) for path, index in places]

    def _value(self, key: str) -> StoredValue | None:
        try:
            place = self._place(key)
        except FileNotFoundError:
            raise MalformedError(f"{key} is missing") from None
        if isinstance(place, bytes):
            return None
        path = f"{self._folder}/{place.file}"
        if place.nbytes is None:
            file = File(path)
            return StoredValue(file, 0, file.nbytes)
        return StoredValue(self._files(path), place.start, place.nbytes)

    def start(self, array: StoredArray, region: Region, into: np.ndarray[Any, Any]) -> Any:
        """Start reading a whole chunk into ready memory of its region's shape; `finish` waits for it."""
        with translated("open array {!r}", self._where, array.path, is_read=True):
            key = chunk_key(array.path, array.grid, region)
            if array.codec == NO_CODEC:
                return _ElementsRead(self._start_read(key, 0, chunk_nbytes(array)), array.grid.chunk_shape, into)
            return self._pool().submit(self._decode, array, key, region, into)

    def finish(self, read: Any, path: str, region: Region) -> None:
        """Wait for a read. Blocks: on storage.

        Raises:
            CheckpointCorruptError: The chunk is missing or malformed.
            StorageError: Storage refused.
        """
        with translated("read {} of array {!r}", self._where, region, path, is_read=True):
            read.result()

    def start_span(self, path: str, index: Sequence[int], start: int, stop: int) -> Any:
        """Start reading bytes ``start`` to ``stop`` of a stored chunk; `finish_span` waits for them."""
        with translated("open array {!r}", self._where, path, is_read=True):
            return self._start_read(key_of(path, index), start, stop)

    def finish_span(self, read: Any, path: str, region: Region, nbytes: int) -> bytes:
        """Return the ``nbytes`` of a part of a chunk. Blocks: on storage. Raises: as `finish`."""
        with translated("read {} of array {!r}", self._where, region, path, is_read=True):
            return content(read, nbytes)

    def _start_read(self, key: str, start: int, stop: int) -> Any:
        try:
            place = self._place(key)
        except FileNotFoundError:
            return _Known(b"")
        if isinstance(place, bytes):
            return _Known(place[start:stop])
        if place.nbytes is not None and stop > place.nbytes:
            return _Known(b"")
        file, begin, end = place.file, place.start + start, place.start + stop
        if isinstance(self._where, KeyValueFolder):
            return self._where.start_read(file, begin, end)
        return self._pool().submit(self._where.read, file, begin, end)

    def _whole(self, key: str, most: int) -> bytes:
        """Return a value, unless it is longer. Blocks: On storage. Raises: as `Folder.read_whole`."""
        place = self._place(key)
        if isinstance(place, bytes):
            return place
        if place.nbytes is None:
            return self._where.read_whole(place.file, most)
        if place.nbytes > most:
            raise MalformedError(f"{key} is too long: it has {place.nbytes} bytes, expected at most {most}")
        return self._where.read(place.file, place.start, place.start + place.nbytes)

    def _decode(self, array: StoredArray, key: str, region: Region, into: np.ndarray[Any, Any]) -> None:
        nbytes = chunk_nbytes(array)
        try:
            data = self._whole(key, chunk_bounds(array.codec, nbytes)[1])
        except FileNotFoundError:
            raise MalformedError("the chunk is missing") from None
        validate_encoded(array.codec, data, nbytes)
        store = ts.KvStore.open({"driver": "memory"}, context=ts.Context()).result()
        store[key] = data
        opened = open_array(store, array, self._context)
        source = opened[region.slices()].translate_to[(0,) * region.ndim] if region.ndim else opened
        ts.array(into, context=self._context).write(source).result()

    def first_lost(self, chunks: Iterable[tuple[StoredArray, Sequence[int]]]) -> str | None:
        """Return what is not as long as some chunks ask for: one of them, or a file that holds several.

        Nothing is read but a database's nodes. Chunks of a database have bytes of their own, each.

        Args:
            chunks: Array and position per dim, chunk by chunk.

        Raises:
            CheckpointCorruptError: The database is damaged.
            StorageError: Storage refused.
        """
        with translated("look for chunks", self._where, is_read=True):
            sizes: dict[str, int] = {}
            for array, index in chunks:
                key = key_of(array.path, index)
                least, most = chunk_bounds(array.codec, chunk_nbytes(array))
                try:
                    place = self._place(key)
                except FileNotFoundError:
                    return key
                if isinstance(place, bytes):
                    nbytes = len(place)
                else:
                    nbytes = least if place.nbytes is None else place.nbytes
                    sizes[place.file] = sizes.get(place.file, 0) + nbytes
                if not least <= nbytes <= most:
                    return key
                if len(sizes) >= MAX_SIZES:
                    if (lost := self._where.first_short(sizes)) is not None:
                        return lost
                    sizes.clear()
            return self._where.first_short(sizes)

    def read_documents(self, paths: Iterable[str]) -> Iterator[tuple[str, bytes]]:
        """Yield the ``zarr.json`` of arrays and of the groups above them, with its key, in order.

        One that is missing is empty. Raises: as `finish`.
        """
        listed = list(paths)
        keys = map(document_key, sorted({*listed, *groups(listed)}))
        while some := list(islice(keys, MAX_DOCUMENTS)):
            with translated("read zarr.json", self._where, is_read=True):
                found = list(self._pool().map(self._document, some))
            yield from zip(some, found, strict=True)

    def _document(self, key: str) -> bytes:
        try:
            return self._whole(key, MAX_DOCUMENT_NBYTES)
        except FileNotFoundError:
            return b""

    def close(self) -> None:
        """Forget the open files."""
        self._files.cache_clear()
        if self._threads is not None:
            self._threads.shutdown(wait=False)
            self._threads = None


def chunk_nbytes(array: StoredArray) -> int:
    """Return the bytes of a chunk's elements, as long as any chunk of its array."""
    return math.prod(array.grid.chunk_shape) * DTYPES[array.stored_dtype].itemsize
