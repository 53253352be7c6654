"""`ChunkFiles`: the files of another library's checkpoint whose tensors are arrays of Zarr, maybe compressed.

A read takes the chunks that intersect a region, decodes each whole, and copies the elements that are wanted. Several
chunks are under way at one time, up to a bound on their bytes.

Such chunks have no digests, so a read cannot tell a changed byte from the saved byte, but where a decoder notices it.
"""

from __future__ import annotations

import glob
import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from types import MappingProxyType
from typing import Any

import numpy as np
from typing_extensions import override

from dtckpt.checkpoint.foreign.zarr_arrays import ZarrArray
from dtckpt.checkpoint.reading.checkpoint_files import CheckpointFiles, RegionBuffers
from dtckpt.checkpoint.reading.pieces import is_expanded_too_far
from dtckpt.checkpoint.reading.read_chunks import convert, cut, validate_convertible
from dtckpt.checkpoint.reading.tensor_info import ChunkInfo, TensorInfo, TensorInfos
from dtckpt.checkpoint.reading.verified_reads import REMOTE_IN_FLIGHT_NBYTES
from dtckpt.comm.background_threads import Pool
from dtckpt.errors import CheckpointCorruptError, DtckptError, RegionError
from dtckpt.format import tree as trees
from dtckpt.format.codecs import NO_CODEC
from dtckpt.format.digest import bytes_digest
from dtckpt.format.dtypes import DTYPES
from dtckpt.layout.layout import Layout
from dtckpt.layout.region import Region
from dtckpt.storage.chunk_reader import ValueReader, decode_chunk
from dtckpt.storage.failures import MalformedError, translate_errors
from dtckpt.storage.folder import Folder
from dtckpt.storage.local_folder import LocalFolder
from dtckpt.storage.tensorstore_setup import open_context
from dtckpt.storage.watched_folder import WatchedFolder

NUM_THREADS = 8
MAX_CHUNKS = 1 << 24
"""Bound on the chunks of all arrays of a checkpoint."""
MAX_LOOKED_UP = 4096
"""Chunks whose files are looked up together."""
MAX_COUNTED = 1 << 18
"""Chunks that are looked at to find out how many bytes a checkpoint has."""
NUM_SAMPLES = 32


@dataclass(frozen=True, slots=True)
class ChunkTensor:
    """A tensor that is an array of Zarr.

    Args:
        name: The tensor's name.
        array: The array.
        store: The folder of its store, below the checkpoint's; empty for that folder itself.
        layout: Layout at the time of the save, if the checkpoint tells it.
    """

    name: str
    array: ZarrArray
    store: str = ""
    layout: Layout | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Global shape."""
        return self.array.grid.shape

    @property
    def dtype(self) -> str:
        """Name of the element type."""
        return self.array.dtype


@dataclass(frozen=True, slots=True)
class ChunkIndex:
    """The description of a checkpoint whose tensors are arrays of Zarr.

    Args:
        kind: The format: a key of `dtckpt.checkpoint.foreign.formats.FORMATS`.
        tensors: By name.
        structure: The state tree, as a node of `dtckpt.format.tree`.
        stores: By folder below the checkpoint's, the reader of its values.
        refused: As in `dtckpt.checkpoint.reading.pieces.PieceIndex`.
        files: As there.
        unread: As there.
        notes: As there.
    """

    kind: str
    tensors: Mapping[str, ChunkTensor]
    structure: trees.Node
    stores: Mapping[str, ValueReader]
    refused: Mapping[str, DtckptError] = field(default_factory=dict)
    files: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        count = sum(tensor.array.grid.num_chunks for tensor in self.tensors.values())
        if count > MAX_CHUNKS:
            raise CheckpointCorruptError(f"the checkpoint is damaged: its arrays have {count} chunks together")


@dataclass(frozen=True, slots=True, eq=False)
class ArrayOfChunks(TensorInfo):
    """The facts about a tensor that is an array of Zarr."""

    array: ZarrArray

    @property
    @override
    def chunks(self) -> list[ChunkInfo]:
        grid = self.array.grid
        indexes = map(grid.index, range(grid.num_chunks))
        return [ChunkInfo(grid.region(each), self.array.key(each), digest=None, client=None) for each in indexes]

    @property
    @override
    def codec(self) -> str:
        return self.array.codec

    @property
    @override
    def num_chunks(self) -> int:
        return self.array.grid.num_chunks

    @property
    @override
    def is_whole(self) -> bool:
        return True

    @property
    @override
    def max_chunk_nbytes(self) -> int:
        return min(self.nbytes, self.array.chunk_nbytes)

    @property
    @override
    def chunk_shape(self) -> tuple[int, ...]:
        return self.array.grid.chunk_shape

    @property
    @override
    def block_shape(self) -> tuple[int, ...]:
        return self.array.grid.chunk_shape

    @property
    @override
    def row_dim(self) -> int:
        return next((dim for dim, count in enumerate(self.array.grid.counts) if count > 1), 0)

    @override
    def read_nbytes(self, region: Region) -> int:
        return self.array.chunk_nbytes * sum(1 for _ in self.array.grid.meeting(region))


class ChunkFiles(CheckpointFiles):
    """The files of a checkpoint with an index of chunks.

    Args:
        folder: The checkpoint's folder.
        index: The index.

    Raises:
        CheckpointCorruptError: A file is missing or damaged, or the arrays have far more bytes than the files.
        StorageError: Storage refused.
    """

    has_digests = False

    def __init__(self, folder: Folder, index: ChunkIndex) -> None:
        self.kind = index.kind
        self.refused = index.refused
        self.files = index.files
        self.unread = index.unread
        self.notes = index.notes
        self._folder = folder
        self._index = index
        self.tensors = TensorInfos(index.tensors, self._describe)
        with translate_errors("look for the chunks of the checkpoint", folder, is_read=True):
            self._validate_claims()
            self._look_at_files()
            self.identity = f"{bytes_digest(repr(self._facts()).encode('utf-8', 'surrogatepass')):016x}"

    def _validate_claims(self) -> None:
        """Look for all chunks if the files alone do not show that the shapes of the arrays can be true.

        Raises:
            MalformedError: Chunks are missing, or far more bytes than are stored would be zeros.
        """
        claimed = sum(each.array.grid.num_chunks * each.array.chunk_nbytes for each in self._index.tensors.values())
        if is_expanded_too_far(claimed, 0) and is_expanded_too_far(claimed, _files_nbytes(self._folder, claimed)):
            self._validate_filled(*self._look_up(self._all_chunks()))

    def _look_at_files(self) -> None:
        """Look at the files of the chunks, so that a read notices another file in the place of one of them."""
        if not isinstance(self._folder, WatchedFolder):
            return
        databases = {name for name, store in self._index.stores.items() if store.has_database}
        for name in sorted(databases):
            root = self._folder / name if name else self._folder
            root.look_at(_database_files(root))
        self._folder.look_at(
            f"{tensor.store}/{key}" if tensor.store else key
            for tensor in self._index.tensors.values()
            if tensor.store not in databases
            for key in map(tensor.array.key, map(tensor.array.grid.index, range(tensor.array.grid.num_chunks)))
        )

    def _all_chunks(self) -> Iterator[tuple[ChunkTensor, Sequence[int]]]:
        for tensor in self._index.tensors.values():
            for index in map(tensor.array.grid.index, range(tensor.array.grid.num_chunks)):
                yield tensor, index

    def _validate_filled(self, filled: int, stored: int) -> None:
        # Else a small file could ask for any amount of memory.
        if is_expanded_too_far(filled, stored):
            raise MalformedError(f"chunks of {filled} bytes are missing, and may not all be zeros")

    def _facts(self) -> tuple[object, ...]:
        """Return the facts of the index, and of some chunks: a model that was trained on has others."""
        tensors = list(self._index.tensors.values())
        some = [each for each in tensors if each.array.grid.num_chunks]
        samples: list[object] = []
        for tensor in some[:: max(1, len(some) // NUM_SAMPLES)][:NUM_SAMPLES]:
            array = tensor.array
            key = array.key(array.grid.index(array.grid.num_chunks // 2))
            store = self._index.stores[tensor.store]
            try:
                stored = store.find(key)
                # The files of a database have random names; other files always have the same.
                is_whole_file = not isinstance(stored, bytes) and stored.nbytes is None
                samples.append(self._root(tensor.store).read(key, 0, 256) if is_whole_file else stored)
            except FileNotFoundError:
                samples.append(None)
        facts = [(each.name, each.shape, each.dtype, each.array.grid.chunk_shape) for each in tensors]
        return self.kind, facts, self.structure, sorted(self.refused), samples

    def _root(self, store: str) -> Folder:
        return self._folder / store if store else self._folder

    def _describe(self, name: str) -> TensorInfo:
        tensor = self._index.tensors[name]
        return ArrayOfChunks(
            name=name,
            shape=tensor.shape,
            dtype_name=tensor.dtype,
            stored_dtype_name=tensor.dtype,
            layout=tensor.layout,
            nbytes=math.prod(tensor.shape) * DTYPES[tensor.dtype].itemsize,
            content_digest=None,
            array=tensor.array,
        )

    @property
    @override
    def structure(self) -> trees.Node:
        return self._index.structure

    @cached_property
    @override
    def tree(self) -> bytes:
        return trees.dump(self.structure)

    @override
    def fingerprint(self) -> bytes:
        return self.identity.encode()

    # --- reads --------------------------------------------------------------------------------------------------

    @cached_property
    def _pool(self) -> Pool:
        return Pool(NUM_THREADS, "dtckpt-chunks")

    @cached_property
    def _context(self) -> Any:
        return open_context()

    @override
    def read(
        self,
        requests: Iterable[tuple[str, RegionBuffers]],
        max_in_flight: int | None,
        count: Callable[[int], object],
    ) -> int:
        limit = REMOTE_IN_FLIGHT_NBYTES if max_in_flight is None else max_in_flight
        pending: deque[tuple[Future[int], int]] = deque()
        in_flight = total = 0
        try:
            for read in self._reads(requests):
                while pending and (len(pending) >= 2 * NUM_THREADS or in_flight + read.nbytes > limit):
                    future, nbytes = pending.popleft()
                    total += (done := future.result())
                    in_flight -= nbytes
                    count(done)
                pending.append((self._pool.submit(self._read_chunk, read), read.nbytes))
                in_flight += read.nbytes
            for future, _ in pending:
                total += (done := future.result())
                count(done)
        except BaseException:
            # After a failure nothing may go on writing into the caller's memory, which may be freed.
            for future, _ in pending:
                if not future.cancel():
                    future.exception()
            raise
        return total

    def _reads(self, requests: Iterable[tuple[str, RegionBuffers]]) -> Iterator[_ChunkRead]:
        """Yield the reads of the chunks that some regions need; each chunk of a tensor once."""
        for name, buffers in requests:
            tensor = self._index.tensors[name]
            validate_convertible(name, tensor.dtype, buffers)
            chunks: dict[tuple[int, ...], list[tuple[Region, np.ndarray[Any, Any]]]] = {}
            for region, buffer in buffers:
                _validate_inside(tensor, region)
                for index in tensor.array.grid.meeting(region):
                    chunks.setdefault(index, []).append((region, buffer))
            for index, uses in chunks.items():
                yield _ChunkRead(tensor, index, uses)

    def _read_chunk(self, read: _ChunkRead) -> int:
        """Read and decode a chunk, and copy the boxes that are wanted; return its bytes. Blocks: on storage."""
        tensor, array = read.tensor, read.tensor.array
        key = array.key(read.index)
        with translate_errors("read chunk {} of tensor {!r}", self._folder, key, tensor.name, is_read=True):
            data = self._stored(tensor, key)
            elements = read.only_target
            is_direct = elements is not None
            if elements is None:
                elements = np.empty(array.grid.chunk_shape, DTYPES[array.dtype])
            if data is None:
                elements[...] = 0
            for encoded, region, part in () if data is None else array.parts(data):
                if part is None:
                    elements[region.slices()] = 0
                else:
                    decode_part(encoded, part, cut(elements, region.slices()), lambda: self._context)
        box = array.grid.region(read.index)
        for region, buffer in () if is_direct else read.uses:
            if (wanted := box.intersect(region)) is not None:
                source = cut(elements, wanted.relative_to(box).slices())
                convert(source, cut(buffer, wanted.relative_to(region).slices()))
        return array.chunk_nbytes

    def _stored(self, tensor: ChunkTensor, key: str) -> bytes | None:
        """Return the bytes of a chunk; None if it is made of zeros."""
        least, most = tensor.array.bounds
        try:
            data = self._index.stores[tensor.store].read(key, most)
        except FileNotFoundError:
            if tensor.array.is_filled:
                return None
            raise MalformedError("the chunk is missing") from None
        if len(data) < least:
            raise MalformedError(f"the chunk is cut short: it has {len(data)} bytes, expected at least {least}")
        return data

    # --- checks -------------------------------------------------------------------------------------------------

    @override
    def validate_stored(self, regions: Iterable[tuple[str, Region]], unchecked: int) -> None:
        wanted: list[tuple[ChunkTensor, Region]] = []
        for name, region in regions:
            tensor = self._index.tensors[name]
            _validate_inside(tensor, region)
            wanted.append((tensor, region))
        with translate_errors("look for chunks", self._folder, is_read=True):
            needed = sum(region.numel * DTYPES[tensor.dtype].itemsize for tensor, region in wanted)
            if needed <= unchecked:
                return
            chunks = ((tensor, index) for tensor, region in wanted for index in tensor.array.grid.meeting(region))
            filled, stored = self._look_up(chunks)
            self._validate_filled(filled, self._stored_nbytes if is_expanded_too_far(filled, stored) else stored)

    @cached_property
    def _stored_nbytes(self) -> int:
        """Bytes of the stored chunks of all tensors, as far as `MAX_COUNTED` chunks tell."""
        return self._look_up(islice(self._all_chunks(), MAX_COUNTED))[1]

    def _look_up(self, chunks: Iterable[tuple[ChunkTensor, Sequence[int]]]) -> tuple[int, int]:
        """Look for chunks; return the bytes of the elements of missing chunks, and the bytes of the other chunks.

        Raises:
            MalformedError: A chunk is missing that cannot be made of zeros, or is too short or too long; or a data file
                is shorter than the chunks in it are together, as if many keys had one value.
        """
        filled = stored = 0
        chunks = iter(chunks)
        while batch := list(islice(chunks, MAX_LOOKED_UP)):
            shared: dict[str, dict[str, int]] = {}
            for tensor, index in batch:
                array, key = tensor.array, tensor.array.key(index)
                least, most = array.bounds
                try:
                    found = self._index.stores[tensor.store].find(key)
                except FileNotFoundError:
                    nbytes = 0
                else:
                    nbytes = (
                        len(found) if isinstance(found, bytes) else (least if found.nbytes is None else found.nbytes)
                    )
                    if not isinstance(found, bytes):
                        sizes = shared.setdefault(tensor.store, {})
                        if found.nbytes is None and array.is_filled and self._is_missing(tensor, index):
                            nbytes = 0
                        else:
                            sizes[found.file] = sizes.get(found.file, 0) + nbytes
                if not nbytes and array.is_filled:
                    filled += array.chunk_nbytes
                elif not least <= nbytes <= most:
                    raise MalformedError(f"chunk {key} is missing, or has {nbytes} bytes, expected {least} to {most}")
                stored += nbytes
            for store, sizes in shared.items():
                if (short := self._root(store).find_short_file(sizes)) is not None:
                    raise MalformedError(f"{short} is missing or cut short: expected at least {sizes[short]} bytes")
        return filled, stored

    def _is_missing(self, tensor: ChunkTensor, index: Sequence[int]) -> bool:
        with translate_errors("look for chunks of {!r}", self._folder, tensor.name, is_read=True):
            try:
                found = self._index.stores[tensor.store].find(tensor.array.key(index))
            except FileNotFoundError:
                return True
            if isinstance(found, bytes) or found.nbytes is not None:
                return False
            return self._root(tensor.store).find_short_file({found.file: 0}) is not None

    @override
    def parts(self, name: str) -> Iterator[Region]:
        # Chunks of zeros that were not stored need no check.
        tensor = self._index.tensors[name]
        grid = tensor.array.grid
        for index in map(grid.index, range(grid.num_chunks)):
            if not (tensor.array.is_filled and self._is_missing(tensor, index)):
                yield grid.region(index)

    @override
    def validate_part(self, name: str, region: Region) -> None:
        # A read of a chunk leaves nothing unchecked that could be checked.
        return

    @override
    def validate_rest(self) -> None:
        # The documents were read when the checkpoint was opened.
        return

    @override
    def tied(self) -> Mapping[str, str]:
        # Every array is stored by itself.
        return MappingProxyType({})

    @override
    def close(self) -> None:
        if "_pool" in vars(self):
            vars(self).pop("_pool").shutdown(wait=False)


@dataclass(frozen=True, slots=True, eq=False)
class _ChunkRead:
    """The read of a chunk.

    Args:
        tensor: The tensor.
        index: The chunk's position per dim.
        uses: The regions that want elements of it, each with the buffer that it is read into.
    """

    tensor: ChunkTensor
    index: tuple[int, ...]
    uses: Sequence[tuple[Region, np.ndarray[Any, Any]]]

    @property
    def nbytes(self) -> int:
        """Bytes of the elements, before they are converted."""
        return self.tensor.array.chunk_nbytes

    @property
    def only_target(self) -> np.ndarray[Any, Any] | None:
        """The memory for the whole chunk in the only buffer that wants it, if it needs no conversion."""
        grid = self.tensor.array.grid
        box = grid.region(self.index)
        region, buffer = self.uses[0]
        is_wanted = len(self.uses) == 1 and box.intersect(region) == box and box.shape == grid.chunk_shape
        if is_wanted and buffer.dtype == DTYPES[self.tensor.dtype]:
            return cut(buffer, box.relative_to(region).slices())
        return None


def decode_part(encoded: Any, data: bytes, into: np.ndarray[Any, Any], context: Callable[[], Any]) -> None:
    """Decode elements that are stored by themselves, into memory of their shape.

    Args:
        encoded: How they are stored.
        data: The stored bytes.
        into: The memory.
        context: Returns a TensorStore context.

    Raises:
        ValueError: The bytes are damaged.
    """
    if encoded.codec != NO_CODEC:
        decode_chunk(encoded, data, Region.full(into.shape), into, context())
        return
    if len(data) != into.nbytes:
        raise MalformedError(f"a chunk has {len(data)} bytes, expected {into.nbytes}")
    into[...] = np.frombuffer(data, into.dtype).reshape(into.shape)


def _database_files(root: LocalFolder) -> Iterator[str]:
    """Yield the names of a database's files, as ``ocdbt.process_0/d/…``, and of other entries."""
    for pattern in ("*", "*/*", "*/*/*"):
        yield from glob.iglob(pattern, root_dir=root.path)


def _files_nbytes(folder: Folder, claimed: int) -> int:
    """Return the bytes of the files of a local folder, without links; 0 for other storage.

    Args:
        folder: The folder.
        claimed: The bytes that arrays claim. Once the files that were counted may hold them, the others do not matter.
    """
    if not isinstance(folder, LocalFolder):
        return 0
    found = (os.path.join(path, name) for path, _, names in os.walk(folder.path) for name in names)
    nbytes = 0
    for file in found:
        nbytes += os.lstat(file).st_size
        if not is_expanded_too_far(claimed, nbytes):
            break
    return nbytes


def _validate_inside(tensor: ChunkTensor, region: Region) -> None:
    is_inside = region.ndim == len(tensor.shape) and all(
        start + size <= limit for start, size, limit in zip(region.offset, region.shape, tensor.shape, strict=True)
    )
    if not is_inside:
        raise RegionError(f"region {region} is outside tensor {tensor.name!r} of shape {tensor.shape}")


def read_scalar(array: ZarrArray, store: ValueReader) -> np.ndarray[Any, Any]:
    """Return the elements of a small array. Blocks: on storage.

    Raises:
        CheckpointCorruptError: The array is no scalar.
        FileNotFoundError: The chunk is missing.
        ValueError: The chunk is damaged.
    """
    if array.grid.shape:
        raise CheckpointCorruptError(f"value {array.path[:200]!r} is damaged: it has shape {array.grid.shape}")
    elements = np.zeros((), DTYPES[array.dtype])
    try:
        data = store.read(array.key(()), array.bounds[1])
    except FileNotFoundError:
        if array.is_filled:
            return elements
        raise
    for encoded, _, part in array.parts(data):
        if part is not None:
            decode_part(encoded, part, elements, open_context)
    return elements
