"""Writes the Zarr v3 arrays of a checkpoint through TensorStore, and merges the writes of all clients.

Each client opens its own `TensorStoreWriter`; when all have committed, the leader calls `merge`::

    kind ocdbt:  client i writes a database in client_<i>/, in one transaction;
                 the merge makes the root database refer to the clients' data, without copying it
    kind zarr:   clients write files straight into the folders of the arrays; there is nothing to merge

Either way no two clients write the same key: each writes its own chunks, and its share of the ``zarr.json``.
`dtckpt.storage.zarr_files` writes where TensorStore cannot reach.

Facts about TensorStore that shape the code: a write copies its source unless told that it may refer to it. A read is
fast only into memory that is there already, from memory-mapped files. Chunks of zeros are not stored, and missing
chunks read as zeros, unless told otherwise. A range is copied between databases by reference only if all were opened
with one context.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, Protocol

import numpy as np

from dtckpt.comm.background_threads import begin
from dtckpt.comm.recycled_memory import RecycledMemory
from dtckpt.errors import CheckpointCorruptError, capped
from dtckpt.format.codecs import NO_CODEC
from dtckpt.format.dtypes import DTYPES
from dtckpt.format.grid import ChunkGrid
from dtckpt.format.zarr_documents import array_metadata
from dtckpt.layout.region import Region
from dtckpt.storage.failures import translate_errors
from dtckpt.storage.folder import Folder
from dtckpt.storage.s3_gcs_folder import BucketFolder
from dtckpt.storage.tensorstore_setup import open_context, tensorstore

DATABASE_NAME = "manifest.ocdbt"
"""The first file of an OCDBT database, which leads to all others."""
DATA_FOLDER = "d"
"""The folder of the other files of an OCDBT database."""
BASE_FOLDER = "__base"
"""A folder of a checkpoint under construction: the first file of its base's database. No array has such a path."""
BASE_CACHE_NBYTES = 64 << 20
"""Nodes of the base's database that are kept while many ranges are copied from it."""
TARGET_DATA_FILE_NBYTES = 256 << 20
TARGET_OBJECT_NBYTES = 8 << 20
"""The same in object stores: an object is uploaded by one request, and several requests have to be under way."""
SMALL_NBYTES = 1 << 20
"""A whole chunk of up to so many bytes is written straight to its key: opening the array would take longer."""
MAX_INLINE_NBYTES = 512
"""Values of up to so many bytes are kept in the database's nodes. A merge copies them, so the limit is low."""


class StoredArray(Protocol):
    """An array as the manifest describes it, without a look at storage."""

    @property
    def path(self) -> str:
        """Its path below the root of the key-value store."""
        ...

    @property
    def grid(self) -> ChunkGrid:
        """Its shape and chunks."""
        ...

    @property
    def stored_dtype(self) -> str:
        """Name of the element type on storage; see `dtckpt.format.dtypes`."""
        ...

    @property
    def codec(self) -> str:
        """How chunks are compressed."""
        ...


def client_folder(client: int) -> str:
    """Return the name of the folder that a client writes."""
    return f"client_{client}"


def _kvstore(kind: str, folder: Folder, *, to_write: bool = False, is_new: bool = False) -> dict[str, Any]:
    """Return TensorStore's specification of a client's writes, or of the checkpoint.

    Args:
        kind: Key-value store.
        folder: Its folder.
        to_write: As for `Folder.kvstore`.
        is_new: Whether no client has written to it.
    """
    base = folder.kvstore(to_write=to_write)
    assert base is not None  # noqa: S101  (a folder without one has another writer and reader)
    if kind == "zarr":
        return base
    is_bucket = isinstance(folder, BucketFolder)
    spec: dict[str, Any] = {
        "driver": "ocdbt",
        "base": base,
        "target_data_file_size": TARGET_OBJECT_NBYTES if is_bucket else TARGET_DATA_FILE_NBYTES,
        "config": {"max_inline_value_bytes": MAX_INLINE_NBYTES},
    }
    if is_bucket and is_new:
        # Else TensorStore would first write an empty database, to settle the configuration: one more round trip.
        spec["assume_config"] = True
        spec["config"]["uuid"] = secrets.token_hex(16)
    return spec


def chunk_key(path: str, grid: ChunkGrid, region: Region) -> str:
    """Return the key of a whole chunk (Zarr v3, chunk key encoding ``default``)."""
    suffix = _chunk_suffix(grid, region)
    return f"{path}/{suffix}" if path else suffix


@lru_cache(maxsize=4096)
def _chunk_suffix(grid: ChunkGrid, region: Region) -> str:
    return "/".join(["c", *(str(start // size) for start, size in zip(region.offset, grid.chunk_shape, strict=True))])


def key_of(path: str, index: Sequence[int]) -> str:
    """Return the key of the chunk at a position of the grid."""
    return "/".join([path, "c", *map(str, index)] if path else ["c", *map(str, index)])


def _small_key(array: StoredArray, region: Region, nbytes: int) -> str | None:
    """Return the key of a chunk whose stored value is just its elements (Zarr v3, codec ``bytes``), if it is small.

    None for the others, which are left to TensorStore: large chunks and compressed ones.
    """
    is_small = array.codec == NO_CODEC and nbytes <= SMALL_NBYTES
    return chunk_key(array.path, array.grid, region) if is_small else None


def pad(elements: np.ndarray[Any, Any], into: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Fill a whole chunk with the elements of a chunk at the grid's edge, and zeros behind them; return it."""
    inside: tuple[slice, ...] = ()
    for size in elements.shape:
        into[(*inside, slice(size, None))] = 0
        inside = (*inside, slice(size))
    into[inside] = elements
    return into


class TensorStoreWriter:
    """One client's writes of one save.

    Args:
        kind: Key-value store, ``ocdbt`` or ``zarr``.
        root: The folder under construction; every client sees the same one.
        client: The client that writes.
        is_durable: Whether the data survives a power loss once `commit` has returned.
        is_cached: Whether a database may stay in this machine's memory, because it is read soon.
        max_pending_nbytes: Bytes that may wait in memory to be written. A thread writes them out in batches of half as
            many bytes; `write` waits when both batches are full.
    """

    def __init__(
        self,
        kind: str,
        root: Folder,
        client: int,
        *,
        is_durable: bool = True,
        is_cached: bool = True,
        max_pending_nbytes: int | None = None,
    ) -> None:
        self._where = root
        self._context = open_context()
        self._is_database = kind == "ocdbt"
        self._folder = root / client_folder(client) if self._is_database else root
        self._base: Any = None
        self._is_durable = is_durable
        self._is_settling = self._is_database and is_durable and not is_cached
        self._seen: set[str] = set()
        self._unsettled: set[str] = set()
        self._keys: list[str] = []
        self._arrays: dict[str, Any] = {}
        # Half of the bound for the batch that grows, half for the batch before it, which a thread writes out.
        self._max_batch_nbytes = math.inf if max_pending_nbytes is None else max_pending_nbytes / 2
        self._memory = RecycledMemory(math.inf)
        self._batch = self._new_batch()
        self._earlier: tuple[_Batch, Future[None]] | None = None

    def _new_batch(self) -> _Batch:
        # Only databases have transactions over several files; elsewhere each write is its own.
        return _Batch(tensorstore().Transaction(atomic=True) if self._is_database else None)

    def write(
        self, array: StoredArray, region: Region, elements: np.ndarray[Any, Any], *, is_kept: bool = False
    ) -> None:
        """Start writing one whole chunk; ``elements`` must not change before `commit` returns.

        Args:
            array: The array.
            region: The chunk's box inside the tensor.
            elements: The chunk's elements, of the shape of the box.
            is_kept: Whether the elements stay in memory anyway, so that only copies of them count as waiting.
        """
        if elements.shape != array.grid.chunk_shape:
            # TensorStore would read the chunk before it writes a part of it, and copy it more than once.
            elements, is_kept = self._padded(elements, array.grid.chunk_shape), False
        key, codec = _small_key(array, region, elements.nbytes), array.codec
        # TensorStore refers to a chunk's elements if they are contiguous, and copies them if not.
        is_copied = key is not None or codec != NO_CODEC or not elements.flags.c_contiguous
        # A compressor takes memory for the worst case, beside its result.
        held_nbytes = elements.nbytes * (is_copied + (not is_kept) + 2 * (codec != NO_CODEC))
        with translate_errors("write array {!r}", self._where, array.path):
            if key is not None:
                self._put(key, elements.tobytes())
                self._note(held_nbytes)
                return
            # Files of kind zarr have to be synced one by one, by their keys; a database has few files, which are listed
            # later.
            if not self._is_database:
                self._keys.append(chunk_key(array.path, array.grid, region))
            opened = self._open(array).with_transaction(self._batch.transaction)
            target = opened[Region(region.offset, elements.shape).slices()] if region.ndim else opened
            # Large chunks are not copied: the elements must stay as they are until they are on storage.
            write = target.write(elements, can_reference_source_data_indefinitely=True)
            self._batch.writes.append(write.copy if self._batch.transaction else write)
        self._note(held_nbytes)

    def _padded(self, elements: np.ndarray[Any, Any], chunk_shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
        memory = self._memory.take(math.prod(chunk_shape) * elements.itemsize)
        return pad(elements, memory.view(elements.dtype).reshape(chunk_shape))

    def begin_files(self) -> None:
        """Begin to write out all writes so far; the data files of a database get none of the later ones."""
        if self._is_database:
            self._write_out_beside()

    def write_document(self, key: str, document: bytes) -> None:
        """Start writing a ``zarr.json`` to its key."""
        with translate_errors("write {!r}", self._where, key):
            self._put(key, document)
        self._note(len(document))

    def _put(self, key: str, value: bytes) -> None:
        batch = self._batch
        if batch.transaction is None:
            self._keys.append(key)
            batch.writes.append(self._open_base().write(key, value))
            return
        if batch.store is None:
            batch.store = self._open_base().with_transaction(batch.transaction)
        batch.store[key] = value  # in memory until the transaction commits

    def _note(self, nbytes: int) -> None:
        """Count bytes that wait to be written; have a thread write them out when they are too many."""
        self._batch.nbytes += nbytes
        if self._batch.nbytes > self._max_batch_nbytes:
            self._write_out_beside()

    def _write_out_beside(self) -> None:
        self._wait_for_earlier()
        # One batch after the other: each transaction of a database goes on from the state that the last one left.
        self._earlier = self._batch, begin(partial(self._write_out, self._batch), "dtckpt-writes")
        self._batch = self._new_batch()

    def _wait_for_earlier(self) -> None:
        if self._earlier is not None:
            self._earlier[1].result()
            self._earlier = None

    def _open(self, array: StoredArray) -> Any:
        if array.path not in self._arrays:
            self._arrays[array.path] = open_array(self._open_base(), array, self._context, to_write=True)
        return self._arrays[array.path]

    def _open_base(self) -> Any:
        if self._base is None:
            kind = "ocdbt" if self._is_database else "zarr"
            spec = _kvstore(kind, self._folder, to_write=True, is_new=True)
            self._base = tensorstore().KvStore.open(spec, context=self._context).result()
        return self._base

    def commit(self) -> None:
        """Wait until everything is written, and durable if ``is_durable``. Blocks: on storage."""
        self._wait_for_earlier()
        self._write_out(self._batch)
        if self._is_durable:
            with translate_errors("sync chunks", self._where):
                self._folder.sync(_data_files(self._folder) if self._is_database else self._keys)

    def _write_out(self, batch: _Batch) -> None:
        # The kernel writes back while TensorStore still writes, so that the sync at the end has less to wait for.
        is_early = self._is_durable and self._is_database
        syncing = self._folder.early_sync(DATA_FOLDER) if is_early else nullcontext()
        with translate_errors("write chunks", self._where), syncing:
            for write in batch.writes:
                write.result()
            if batch.transaction is not None:
                # Among the writes before the wait: if an interrupt ends the wait, `abort` waits for this commit.
                commit = batch.transaction.commit_async()
                batch.writes.append(commit)
                commit.result()
        # The written elements are freed, even while their batch is still referred to.
        batch.writes.clear()
        if self._is_settling:
            self._settle()

    def _settle(self) -> None:
        """Wait until the files of the batch before this one are on the disk, to which they go since they were written.

        So files are not written faster than the disk takes them, and few of them are in memory.
        """
        with translate_errors("sync chunks", self._where):
            names = set(_data_files(self._folder))
            self._folder.settle(sorted(self._unsettled))
        self._unsettled, self._seen = names - self._seen, names

    def abort(self) -> None:
        """Drop the uncommitted writes, and wait for those under way: they could make removed folders again."""
        if self._earlier is not None:
            batch, written = self._earlier
            batch.abort()
            written.exception()
        self._batch.abort()


@dataclass(slots=True, eq=False)
class _Batch:
    """Writes that wait for each other: all are under way, and one commit ends them.

    Args:
        transaction: The transaction of a database; else None.
        store: The key-value store as the transaction sees it, once it is opened.
        writes: The writes under way.
        nbytes: Bytes of memory that they hold.
    """

    transaction: Any
    store: Any = None
    writes: list[Any] = field(default_factory=list)
    nbytes: int = 0

    def abort(self) -> None:
        """Drop the writes that are not committed, and wait for the writes that are under way."""
        if self.transaction is not None:
            self.transaction.abort()
        for write in list(self.writes):
            write.exception()


def open_array(store: Any, array: StoredArray, context: Any, *, to_write: bool = False) -> Any:
    """Open an array with the metadata of the manifest, without reading its ``zarr.json``; return TensorStore's array.

    Args:
        store: The key-value store that holds the array.
        array: The array.
        context: A TensorStore context.
        to_write: Whether to write whole chunks, also at the grid's edge, and also chunks of zeros; else a missing chunk
            is an error.
    """
    grid = array.grid.padded() if to_write else array.grid
    spec = _array_spec(grid, array.stored_dtype, array.codec, to_write=to_write)
    place = store / f"{array.path}/"
    return tensorstore().open(spec, kvstore=place, open=True, assume_metadata=True, context=context).result()


@lru_cache(maxsize=256)
def _array_spec(grid: ChunkGrid, stored_dtype: str, codec: str, *, to_write: bool) -> Any:
    """Return TensorStore's specification of arrays with this metadata. Kept, for parsing takes longer than opening."""
    mode = {"store_data_equal_to_fill_value": True} if to_write else {"fill_missing_data_reads": False}
    return tensorstore().Spec({"driver": "zarr3", "metadata": array_metadata(grid, stored_dtype, codec), **mode})


def merge(
    kind: str, root: Folder, last_written: Mapping[int, str], reused: Callable[[], Iterable[KeyRange]] = tuple
) -> None:
    """Make the clients' writes one hierarchy of arrays. Called by the leader, after all clients committed.

    Args:
        kind: Key-value store.
        root: The folder under construction.
        last_written: Per client that wrote, the key of its last write. If this process sees that one, it sees all.
        reused: Returns the ranges of keys that come from the base's database, in `BASE_FOLDER`.

    Raises:
        CheckpointCorruptError: This process does not see the writes of a client.
        StorageError: Storage refused.
    """
    with translate_errors("merge what the clients wrote", root):
        if root.kvstore() is None:
            is_visible = {client: _is_file(root, key) for client, key in last_written.items()}
        else:
            store = _merge_stores(kind, root, last_written, reused)
            # All reads are under way before the first answer: one round trip to storage, not one for each client.
            reads = {client: store.read(key, byte_range=slice(0, 1)) for client, key in last_written.items()}
            is_visible = {client: read.result().state == "value" for client, read in reads.items()}
    # The merge cannot tell: a database that is not seen, or is seen in an earlier state, looks like a smaller database.
    if lost := [client for client in last_written if not is_visible[client]]:
        raise CheckpointCorruptError(
            f"clients {capped(lost)} wrote files to {root} that this client does not see; got no "
            f"{last_written[lost[0]]}; every client must see one shared file system; nothing was committed, save again"
        )


KeyRange = tuple[str, str]
"""The first key of a range, and the key behind its last."""


def chunk_range(array: StoredArray, index: Sequence[int] | None) -> KeyRange:
    """Return the range of the key of one chunk of an array, or of the keys of all its chunks."""
    if index is None and array.grid.shape:
        return f"{key_of(array.path, ())}/", f"{key_of(array.path, ())}0"  # 0 comes after /
    key = key_of(array.path, index or ())
    return key, f"{key}\0"


def _merge_stores(kind: str, root: Folder, clients: Iterable[int], reused: Callable[[], Iterable[KeyRange]]) -> Any:
    """Merge the clients' writes through TensorStore; return the key-value store that holds all of it."""
    ts, context = tensorstore(), open_context()
    store = ts.KvStore.open(_kvstore(kind, root, to_write=True, is_new=True), context=context).result()
    if kind == "ocdbt":
        # One transaction: the root database refers to all clients' data, or to nothing.
        #     manifest.ocdbt -> nodes -+-> client_0/d/...   by reference
        #                              +-> client_1/d/...
        transaction = ts.Transaction(atomic=True)
        target = store.with_transaction(transaction)
        # A range is copied by reference only between stores whose base options are the same.
        if ranges := list(reused()):
            spec = {
                "driver": "ocdbt",
                "base": root.kvstore(to_write=True),
                "manifest": (root / BASE_FOLDER).kvstore(to_write=True),
                "cache_pool": {"total_bytes_limit": BASE_CACHE_NBYTES},
            }
            source = ts.KvStore.open(spec, context=context).result()
            wanted = [ts.KvStore.KeyRange(*each) for each in ranges]
            for copied in [source.experimental_copy_range_to(target, each) for each in wanted]:
                copied.result()
        specs = [_kvstore(kind, root / client_folder(client), to_write=True) for client in clients]
        # All are under way before the first is waited for: one round trip to storage, not one for each client.
        sources = [opened.result() for opened in [ts.KvStore.open(spec, context=context) for spec in specs]]
        for copied in [source.experimental_copy_range_to(target) for source in sources]:
            copied.result()
        transaction.commit_async().result()
    return store


def _is_file(folder: Folder, name: str) -> bool:
    try:
        folder.read(name, 0, 1)
    except FileNotFoundError:
        return False
    return True


def sync_merged(kind: str, root: Folder) -> None:
    """Wait until the files of `merge`, and those beside them, survive a power loss. Called by the leader.

    Blocks: on storage.
    """
    with translate_errors("sync what was merged", root):
        root.sync(_merged_files(kind, root))


def _merged_files(kind: str, root: Folder) -> Iterator[str]:
    # The entries of the root only: the clients have synced their files below.
    yield from root.names()
    if kind == "ocdbt":
        yield from _data_files(root)
    yield ""  # the folder itself: the clients' own databases are removed once this one is durable


def _data_files(folder: Folder) -> Iterator[str]:
    """Yield the files of a database, except `DATABASE_NAME`."""
    with suppress(FileNotFoundError):  # a database without large values has none
        yield from (f"{DATA_FOLDER}/{name}" for name in (folder / DATA_FOLDER).names())


def allocate_elements(stored_dtype: str, shape: Iterable[int]) -> np.ndarray[Any, Any]:
    """Allocate an uninitialised array of stored elements, in host memory."""
    return np.empty(tuple(shape), DTYPES[stored_dtype])
