"""Reads the chunks of a committed checkpoint, from every back end, with bounds on the size of each read.

No read takes more from storage, or more memory, than the chunk's shape in the manifest allows:

* a chunk that is not compressed is its elements: just those bytes are read;
* a compressed chunk is read only if it is no longer than such a chunk can be, and decoded, from memory, only if it
  states the right size.

The ``zarr.json`` of the arrays plays no part; the manifest does.

A key, such as ``model/w/c/0/1``, leads to the bytes of a chunk::

    kind zarr:   key -> file of that name
    kind ocdbt:  key -> OcdbtDatabase.find -> FileRange in a client's data file, or the value itself if it is small
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import islice
from typing import Any

import numpy as np

from dtckpt.comm import fork_guard
from dtckpt.comm.background_threads import Pool
from dtckpt.format.codecs import NO_CODEC, chunk_bounds, validate_encoded
from dtckpt.format.dtypes import DTYPES
from dtckpt.format.names import groups
from dtckpt.format.zarr_documents import document_key
from dtckpt.layout.region import Region
from dtckpt.storage.failures import MalformedError, translate_errors
from dtckpt.storage.folder import Folder
from dtckpt.storage.local_values import OpenFile, StoredValue
from dtckpt.storage.ocdbt_database import FileRange, OcdbtDatabase
from dtckpt.storage.s3_gcs_folder import BucketFolder
from dtckpt.storage.tensorstore_setup import open_context, tensorstore
from dtckpt.storage.zarr_files import validate_kind
from dtckpt.storage.zarr_tensorstore import StoredArray, chunk_key, key_of, open_array

MAX_DOCUMENT_NBYTES = 1 << 20
"""Bytes of a ``zarr.json``; a longer file is not read."""
MAX_DOCUMENTS = 64
"""``zarr.json`` files that are read at one time."""
REQUEST_NBYTES = 4 << 20
"""Bytes that one request to an object store reads: many connections are faster than one."""
MAX_RUN_NBYTES = 2 << 20
"""Bytes that one request reads of small chunks on storage that takes long to answer."""
MAX_GAP_NBYTES = 16 << 10
"""Bytes between two of them that are read for nothing: another request would take longer."""
MAX_SIZES = 4096
"""Files whose sizes are asked for together."""


class _ReadyValue:
    """A read of a value that is in memory already, as a node of the database holds it. Has a future's interface."""

    def __init__(self, value: bytes) -> None:
        self._value = value

    def result(self) -> bytes:
        return self._value

    def exception(self) -> None:
        return None


class _SplitRead:
    """A read of a long range by several requests, all under way at one time. Has a future's interface.

    Args:
        reads: Per request, its future and the bytes that it asks for.
    """

    def __init__(self, reads: Sequence[tuple[Any, int]]) -> None:
        self._reads = reads

    def result(self) -> bytes:
        return b"".join([content(read, nbytes) for read, nbytes in self._reads])

    def exception(self) -> Any:
        errors = [read.exception() for read, _ in self._reads]  # so that no request is left under way
        return next(filter(None, errors), None)


class _ElementsRead:
    """A read of a whole chunk that is not compressed, into the caller's memory. Has a future's interface.

    Args:
        read: The future of the chunk's bytes.
        chunk_shape: The shape of every chunk of the array; a chunk at the grid's edge is stored padded to it.
        into: The memory, of the shape of the chunk's box.
    """

    def __init__(self, read: Any, chunk_shape: tuple[int, ...], into: np.ndarray[Any, Any]) -> None:
        self._read, self._chunk_shape, self._into = read, chunk_shape, into

    def result(self) -> None:
        data = content(self._read, math.prod(self._chunk_shape) * self._into.itemsize)
        # A chunk at the grid's edge is stored padded; only its part inside the tensor is copied.
        elements = np.frombuffer(data, self._into.dtype).reshape(self._chunk_shape)
        self._into[...] = elements[tuple(slice(size) for size in self._into.shape)]

    def exception(self) -> Any:
        return self._read.exception()


def content(read: Any, nbytes: int) -> bytes:
    """Return the ``nbytes`` bytes of a read. Blocks: on storage.

    Raises:
        MalformedError: There is nothing to read, or not so many bytes.
    """
    try:
        result = read.result()
    except FileNotFoundError:
        raise MalformedError("the chunk is missing") from None
    # TensorStore reports a missing file as a result, not as an error.
    if not isinstance(result, bytes) and isinstance(result, tensorstore().KvStore.ReadResult):
        result = result.value if result.state == "value" else b""
    if len(result) != nbytes:
        raise MalformedError(f"the chunk is missing or cut short: got {len(result)} bytes, expected {nbytes}")
    data: bytes = result
    return data


class ValueReader:
    """Finds and reads values by key, of files or of a database. Thread-safe.

    Args:
        root: The folder that the files are in, or the database.
        has_database: Whether it is an OCDBT database.
    """

    def __init__(self, root: Folder, *, has_database: bool) -> None:
        self._root = root
        self._database = OcdbtDatabase(root) if has_database else None

    @property
    def has_database(self) -> bool:
        """Whether several values may share a file."""
        return self._database is not None

    def find(self, key: str) -> FileRange | bytes:
        """Return where the value of a key is stored, or the value itself. Raises: as `OcdbtDatabase.find`."""
        return FileRange(key) if self._database is None else self._database.find(key)

    def read(self, key: str, most: int) -> bytes:
        """Return a value of at most ``most`` bytes. Blocks: on storage. Raises: as `Folder.read_whole`."""
        stored = self.find(key)
        if isinstance(stored, bytes):
            return stored
        if stored.nbytes is None:
            return self._root.read_whole(stored.file, most)
        if stored.nbytes > most:
            raise MalformedError(f"{key} is too long: it has {stored.nbytes} bytes, expected at most {most}")
        return self._root.read(stored.file, stored.start, stored.start + stored.nbytes)


class ChunkReader:
    """Reads chunks of a committed checkpoint.

    Args:
        kind: Key-value store, ``ocdbt`` or ``zarr``.
        root: The checkpoint's folder.
        by_file: Whether `locate` finds chunks in the files of a local folder, for reads by preadv. Where storage takes
            long to answer, `start`, which reads in threads, is better.
    """

    def __init__(self, kind: str, root: Folder, *, by_file: bool = False) -> None:
        validate_kind(kind, root)
        self._where = root
        if root.kvstore() is not None:
            fork_guard.claim_process()
        self._values = ValueReader(root, has_database=kind == "ocdbt")
        self._is_local = by_file and root.is_local
        self._ranges = RangeReader(root)

    @cached_property
    def _context(self) -> Any:
        # Made at first use: few checkpoints are compressed, and a look at a manifest needs no TensorStore.
        return open_context()

    def locate(self, path: str, index: Sequence[int]) -> StoredValue | None:
        """Return the bytes of a local file that hold a chunk; None if there are none, and `start` must read it.

        Args:
            path: The array's path.
            index: The chunk's position per dim.

        Raises:
            CheckpointCorruptError: The chunk is missing.
            StorageError: Storage refused.
        """
        if not self._is_local:
            return None
        with translate_errors("find chunk {} of array {!r}", self._where, index, path, is_read=True):
            return self._value(key_of(path, index))

    def locate_small(self, chunks: Sequence[tuple[str, Sequence[int]]]) -> Sequence[StoredValue | None]:
        """Locate small chunks that share a file with others, as `locate` does; None for each chunk that does not.

        Args:
            chunks: Per chunk, the array's path and the chunk's position per dim.

        Raises:
            CheckpointCorruptError: The database that holds them is damaged.
            StorageError: Storage refused.
        """
        if not chunks or not self._is_local or not self._values.has_database:
            return [None] * len(chunks)
        (first, _) = chunks[0]
        with translate_errors("find {} chunks, of array {!r} first", self._where, len(chunks), first, is_read=True):
            return [self._value(key_of(path, index)) for path, index in chunks]

    def find_small(self, chunks: Sequence[tuple[str, Sequence[int]]]) -> Sequence[FileRange | None]:
        """Find small chunks that share a file with others, where storage takes long to answer, for `start_run`.

        None for each chunk that is missing, a separate file, or in a node of the database. Arguments and errors as for
        `locate_small`.
        """
        if not chunks or self._is_local or not self._values.has_database:
            return [None] * len(chunks)
        (first, _) = chunks[0]
        with translate_errors("find {} chunks, of array {!r} first", self._where, len(chunks), first, is_read=True):
            return [self._find_in_file(key_of(path, index)) for path, index in chunks]

    def _find_in_file(self, key: str) -> FileRange | None:
        try:
            stored = self._values.find(key)
        except FileNotFoundError:
            return None
        return stored if isinstance(stored, FileRange) and stored.nbytes is not None else None

    def start_run(self, run: FileRun) -> Any:
        """Start reading all bytes of a run; `content` waits for them."""
        return self._ranges.start(run.file, run.start, run.stop)

    def _value(self, key: str) -> StoredValue | None:
        """Return the bytes of a local file that hold a value; None if a node of the database holds it.

        Raises:
            MalformedError: There is no such key.
        """
        try:
            stored = self._values.find(key)
        except FileNotFoundError:
            raise MalformedError(f"{key} is missing") from None
        if isinstance(stored, bytes):
            return None
        # With zarr each chunk is a separate file; a data file of a database holds many chunks, and is opened once.
        if stored.nbytes is None:
            file = self._where.open_local(stored.file)
            return StoredValue(file, 0, file.nbytes)
        return StoredValue(self._ranges.open(stored.file), stored.start, stored.nbytes)

    def start(self, array: StoredArray, region: Region, into: np.ndarray[Any, Any]) -> Any:
        """Start reading a whole chunk; `finish` waits for it.

        Args:
            array: The array.
            region: The chunk's box.
            into: The memory to read into, of the region's shape; contiguous or not.
        """
        with translate_errors("open array {!r}", self._where, array.path, is_read=True):
            key = chunk_key(array.path, array.grid, region)
            if array.codec == NO_CODEC:
                return _ElementsRead(self._start_read(key, 0, chunk_nbytes(array)), array.grid.chunk_shape, into)
            return self._ranges.pool().submit(self._decode, array, key, region, into)

    def finish(self, read: Any, path: str, region: Region) -> None:
        """Wait for a read that `start` returned. Blocks: on storage.

        Raises:
            CheckpointCorruptError: The chunk is missing or malformed.
            StorageError: Storage refused.
        """
        with translate_errors("read {} of array {!r}", self._where, region, path, is_read=True):
            read.result()

    def start_span(self, path: str, index: Sequence[int], start: int, stop: int) -> Any:
        """Start reading bytes ``start`` to ``stop`` of a stored chunk; `finish_span` waits for them.

        Args:
            path: The array's path.
            index: The chunk's position per dim.
            start: The first byte.
            stop: The byte after the last.
        """
        with translate_errors("open array {!r}", self._where, path, is_read=True):
            return self._start_read(key_of(path, index), start, stop)

    def finish_span(self, read: Any, path: str, region: Region, nbytes: int) -> bytes:
        """Return the ``nbytes`` bytes of a read that `start_span` returned. Blocks: on storage. Raises: as `finish`."""
        with translate_errors("read {} of array {!r}", self._where, region, path, is_read=True):
            return content(read, nbytes)

    def _start_read(self, key: str, start: int, stop: int) -> Any:
        try:
            stored = self._values.find(key)
        except FileNotFoundError:
            # Too few bytes: `content` raises when the read is finished, as for every other damaged chunk.
            return _ReadyValue(b"")
        if isinstance(stored, bytes):
            return _ReadyValue(stored[start:stop])
        # The bytes behind a value in a data file belong to other values.
        if stored.nbytes is not None and stop > stored.nbytes:
            return _ReadyValue(b"")
        return self._ranges.start(stored.file, stored.start + start, stored.start + stop)

    def _decode(self, array: StoredArray, key: str, region: Region, into: np.ndarray[Any, Any]) -> None:
        """Read and decode a whole compressed chunk. Blocks: on storage.

        Raises:
            MalformedError: The chunk is missing, or longer than it can be.
            ValueError: The stored value does not decode to the chunk's bytes.
        """
        nbytes = chunk_nbytes(array)
        try:
            data = self._values.read(key, chunk_bounds(array.codec, nbytes)[1])
        except FileNotFoundError:
            raise MalformedError("the chunk is missing") from None
        decode_chunk(array, data, region, into, self._context)

    def find_missing_chunk(self, chunks: Iterable[tuple[StoredArray, Sequence[int]]]) -> str | None:
        """Return the key of a chunk that is missing or has a wrong size, or the name of a file that is too short.

        Returns None if there is neither. Nothing is read but a database's nodes. A data file must be as long as all
        chunks in it together: else many keys of one stored value could make up a tensor of any size.

        Args:
            chunks: Per chunk, the array and the chunk's position per dim.

        Raises:
            CheckpointCorruptError: The database is damaged.
            StorageError: Storage refused.
        """
        with translate_errors("look for chunks", self._where, is_read=True):
            sizes: dict[str, int] = {}
            for array, index in chunks:
                key = key_of(array.path, index)
                least, most = chunk_bounds(array.codec, chunk_nbytes(array))
                try:
                    stored = self._values.find(key)
                except FileNotFoundError:
                    return key
                if isinstance(stored, bytes):
                    nbytes = len(stored)
                else:
                    # The size of a chunk that is a separate file is looked up below, together with many others.
                    nbytes = least if stored.nbytes is None else stored.nbytes
                    sizes[stored.file] = sizes.get(stored.file, 0) + nbytes
                if not least <= nbytes <= most:
                    return key
                # Of kind zarr, each of millions of chunks is a file: their names and sizes are not all in memory at
                # once.
                if len(sizes) >= MAX_SIZES:
                    if (short := self._where.find_short_file(sizes)) is not None:
                        return short
                    sizes.clear()
            return self._where.find_short_file(sizes)

    def read_documents(self, paths: Iterable[str]) -> Iterator[tuple[str, bytes]]:
        """Yield key and content of the ``zarr.json`` of arrays and of the groups above them, sorted by path.

        The content of a missing file is empty. Raises: as `finish`.

        Args:
            paths: The arrays' paths.
        """
        arrays = list(paths)
        keys = map(document_key, sorted({*arrays, *groups(arrays)}))
        while batch := list(islice(keys, MAX_DOCUMENTS)):
            with translate_errors("read zarr.json", self._where, is_read=True):
                documents = list(self._ranges.pool().map(self._document, batch))
            yield from zip(batch, documents, strict=True)

    def _document(self, key: str) -> bytes:
        try:
            return self._values.read(key, MAX_DOCUMENT_NBYTES)
        except FileNotFoundError:
            return b""

    def close(self) -> None:
        """Close the files from which no thread reads, and let the threads end."""
        self._ranges.close()


@dataclass(frozen=True, slots=True)
class FileRun:
    """Ranges of one file that one request reads.

    Args:
        file: The file.
        start: The first byte of the first range.
        stop: The byte after the last range.
        positions: The ranges, as positions in the list that `file_runs` was given.
    """

    file: str
    start: int
    stop: int
    positions: Sequence[int]


def file_runs(ranges: Sequence[FileRange]) -> Iterator[FileRun]:
    """Group ranges that lie near each other in a file. Yields: Runs; each range is in one of them."""
    run: list[int] = []
    start = stop = 0
    order = sorted(range(len(ranges)), key=lambda position: (ranges[position].file, ranges[position].start))
    for position in order:
        found = ranges[position]
        end = found.start + (found.nbytes or 0)
        is_near = run and found.file == ranges[run[0]].file and found.start <= stop + MAX_GAP_NBYTES
        if run and not (is_near and end - start <= MAX_RUN_NBYTES):
            yield FileRun(ranges[run[0]].file, start, stop, run)
            run = []
        if not run:
            start = stop = found.start
        run.append(position)
        stop = max(stop, end)
    if run:
        yield FileRun(ranges[run[0]].file, start, stop, run)


def decode_chunk(array: StoredArray, data: bytes, region: Region, into: np.ndarray[Any, Any], context: Any) -> None:
    """Decode a whole compressed chunk.

    Args:
        array: The array.
        data: The stored bytes.
        region: The chunk's box.
        into: The memory for its elements, of the region's shape; contiguous or not.
        context: A TensorStore context.

    Raises:
        ValueError: The stored bytes do not decode to the chunk's bytes.
    """
    # The caller bounds the bytes that are read, and this bound is on the decoded bytes.
    validate_encoded(array.codec, data, chunk_nbytes(array))
    # Decoded from memory: TensorStore never opens a file of an untrusted checkpoint.
    # A new context: stores in memory are shared within a context, and other threads decode other chunks.
    ts = tensorstore()
    store = ts.KvStore.open({"driver": "memory"}, context=ts.Context()).result()
    store[chunk_key(array.path, array.grid, region)] = data
    opened = open_array(store, array, context)
    source = opened[region.slices()].translate_to[(0,) * region.ndim] if region.ndim else opened
    ts.array(into, context=context).write(source).result()


def chunk_nbytes(array: StoredArray) -> int:
    """Return the bytes of a whole chunk's elements, before compression; the same for every chunk of the array."""
    return math.prod(array.grid.chunk_shape) * DTYPES[array.stored_dtype].itemsize


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
        # A file that is dropped here stays open while a thread reads from it.
        self._files = lru_cache(maxsize=MAX_OPEN_FILES)(folder.open_local)
        self._lazy_pool: Pool | None = None

    def open(self, name: str) -> OpenFile:
        """Return a file of a local folder; it is opened once.

        Raises:
            MalformedError: The file is missing, or is no regular file.
        """
        return self._files(name)

    def start(self, name: str, start: int, stop: int) -> Any:
        """Start a read of bytes ``start`` to ``stop`` of a file; return its future.

        The future's result is the bytes, or TensorStore's result of a read.
        """
        # TensorStore has its own threads.
        if isinstance(self._folder, BucketFolder):
            if stop - start <= REQUEST_NBYTES:
                return self._folder.start_read(name, start, stop)
            ranges = [(at, min(at + REQUEST_NBYTES, stop)) for at in range(start, stop, REQUEST_NBYTES)]
            return _SplitRead([(self._folder.start_read(name, *each), each[1] - each[0]) for each in ranges])
        return self.pool().submit(self._folder.read, name, start, stop)

    def pool(self) -> Pool:
        """Return the threads that read; they are made at first use."""
        if self._lazy_pool is None:
            self._lazy_pool = Pool(NUM_THREADS, "dtckpt-chunks")
        return self._lazy_pool

    def close(self) -> None:
        """Close the files from which no thread reads, and let the threads end."""
        self._files.cache_clear()
        if self._lazy_pool is not None:
            self._lazy_pool.shutdown(wait=False)
            self._lazy_pool = None
