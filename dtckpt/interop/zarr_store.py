"""`zarr_store`: a checkpoint as a read-only store of zarr-python.

The store does not hand out files as they are on storage. Each ``zarr.json`` is made from the manifest, whose digest was
compared at the opening; dtckpt reads, decodes and verifies the chunks. So the store serves databases, compressed
chunks, object stores and other libraries' files alike. Damage is an error, where other stores give wrong elements, or
zeros for a file that is lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from copy import copy
from typing import NoReturn

import numpy as np
from zarr.abc.store import ByteRequest, OffsetByteRequest, RangeByteRequest, Store, SuffixByteRequest
from zarr.core.buffer import Buffer, BufferPrototype, default_buffer_prototype

from dtckpt.checkpoint.open import open_checkpoint
from dtckpt.checkpoint.reading.checkpoint import Checkpoint
from dtckpt.checkpoint.reading.manifest_files import KIND
from dtckpt.checkpoint.saving.chunk_grid import choose_grid
from dtckpt.errors import CheckpointConflictError, ConfigError
from dtckpt.format.digest import as_bytes
from dtckpt.format.dtypes import DTYPES
from dtckpt.format.names import array_paths
from dtckpt.format.zarr_documents import ArrayChunk, PlainArray, ZarrHierarchy
from dtckpt.interop.zarr_data_types import register_data_types
from dtckpt.layout.region import Region
from dtckpt.storage.location import Location

PLAIN_CHUNK_NBYTES = 16 << 20
"""Bound on the bytes of a chunk of a tensor of another library's file, which has none."""


def zarr_store(path: str | Location) -> CheckpointStore:
    """Open a checkpoint as a store: ``zarr.open_group(dtckpt.zarr_store(path), mode="r")``.

    The call also registers bfloat16 and the float8 types with zarr-python.

    Blocks: On storage.

    Args:
        path: Path or URL of the checkpoint.

    Raises:
        CheckpointError: As for `dtckpt.open_checkpoint`.
    """
    return CheckpointStore(path)


class CheckpointStore(Store):
    """A checkpoint as a read-only Zarr store; see `zarr_store`.

    The store stays with this very checkpoint, also after pickling: if a save replaces the checkpoint, reads are
    refused.

    Args:
        path: Path or URL of the checkpoint.
        read_only: True; the store refuses to be any other.

    Raises:
        ConfigError: ``read_only`` is False.
        CheckpointError: As for `dtckpt.open_checkpoint`.
    """

    supports_writes = False
    supports_partial_writes = False
    supports_deletes = False
    supports_listing = True
    # Documents come from memory, so nothing is saved by having them all in one; xarray then does not look for that one.
    supports_consolidated_metadata = False

    def __init__(self, path: str | Location, *, read_only: bool = True) -> None:
        if not read_only:
            raise ConfigError("the store of a checkpoint is read-only; got read_only=False")
        super().__init__(read_only=True)
        register_data_types()
        self._checkpoint = open_checkpoint(path)
        self._hierarchy = _hierarchy_of(self._checkpoint)

    @property
    def checkpoint(self) -> Checkpoint:
        """The open checkpoint."""
        return self._checkpoint

    def __repr__(self) -> str:
        return f"CheckpointStore({str(self._checkpoint.path)!r})"

    def __str__(self) -> str:
        return f"dtckpt://{self._checkpoint.path}"

    def __eq__(self, value: object) -> bool:
        if not isinstance(value, CheckpointStore):
            return NotImplemented
        own, other = self._checkpoint, value._checkpoint
        return (own.path, own.identity) == (other.path, other.identity)

    def __hash__(self) -> int:
        return hash((self._checkpoint.path, self._checkpoint.identity))

    def __reduce__(self) -> tuple[object, ...]:
        return _reopen, (type(self), self._checkpoint.path, self._checkpoint.identity)

    def close(self) -> None:
        """Close the files that reading holds open."""
        super().close()
        self._checkpoint.close()

    def with_read_only(self, read_only: bool = False) -> Store:
        """Return a store of the same checkpoint. Raises: `NotImplementedError` unless ``read_only``."""
        return copy(self) if read_only else super().with_read_only(read_only)

    # --- values -------------------------------------------------------------------------------------------------

    async def get(self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None) -> Buffer | None:
        """Return the value of a key, or a part of it; None if there is no such key.

        A part of a chunk is cut from the whole chunk, which is read and verified.

        Raises:
            ValueError: ``byte_range`` is no request of zarr-python.
            CheckpointCorruptError: Stored bytes are not the bytes that were saved.
            CheckpointConflictError: A save has replaced the checkpoint.
            StorageError: Storage refused.
        """
        await self._ensure_open()
        wanted, value = _slice_of(byte_range), self._hierarchy.find(key)
        data = await asyncio.to_thread(self._read, value) if isinstance(value, ArrayChunk) else value
        return None if data is None else prototype.buffer.from_bytes(data[wanted])

    def get_sync(
        self, key: str, *, prototype: BufferPrototype | None = None, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        """As `get`. Blocks: On storage."""
        wanted, value = _slice_of(byte_range), self._hierarchy.find(key)
        data = self._read(value) if isinstance(value, ArrayChunk) else value
        return None if data is None else (prototype or default_buffer_prototype()).buffer.from_bytes(data[wanted])

    def _read(self, chunk: ArrayChunk) -> memoryview:
        """Return the bytes of a chunk, verified. Blocks: On storage."""
        array, region = chunk.array, chunk.array.grid.region(chunk.index)
        # Before memory is taken: the shape is a claim of the manifest, and may be any.
        self._checkpoint.validate_stored([(array.name, region)])
        shape, dtype = array.grid.chunk_shape, DTYPES[array.stored_dtype]
        elements = np.empty(shape, dtype) if region.shape == shape else np.zeros(shape, dtype)
        inside = elements[Region.full(region.shape).slices()] if region.ndim else elements
        self._checkpoint.read_into(array.name, region, inside)
        return as_bytes(elements).data

    async def get_partial_values(
        self, prototype: BufferPrototype, key_ranges: Iterable[tuple[str, ByteRequest | None]]
    ) -> list[Buffer | None]:
        """Return parts of several values, as `get`."""
        return list(await asyncio.gather(*(self.get(key, prototype, byte_range) for key, byte_range in key_ranges)))

    async def exists(self, key: str) -> bool:
        """Whether there is such a key, by the manifest; storage is not asked."""
        return self._hierarchy.find(key) is not None

    async def getsize(self, key: str) -> int:
        """Return the bytes of a value, by the manifest.

        Raises:
            FileNotFoundError: There is no such key.
        """
        value = self._hierarchy.find(key)
        if value is None:
            raise FileNotFoundError(key)
        return value.nbytes if isinstance(value, ArrayChunk) else len(value)

    # --- lists, by the manifest ---------------------------------------------------------------------------------

    async def list(self) -> AsyncIterator[str]:
        """Yield all keys."""
        for key in self._hierarchy.list_keys():
            yield key

    async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        """Yield all keys that begin with a prefix."""
        for key in self._hierarchy.list_keys(prefix):
            yield key

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        """Yield the names of keys and folders directly below a prefix."""
        for name in self._hierarchy.list_names(prefix):
            yield name

    # --- writes, refused ----------------------------------------------------------------------------------------

    async def set(self, key: str, value: Buffer) -> NoReturn:  # noqa: ARG002
        """Refuse. Raises: `ValueError`, as the other read-only stores of zarr-python do."""
        self._refuse()

    async def set_partial_values(self, key_start_values: object) -> NoReturn:  # noqa: ARG002  (of zarr-python 3.1.0)
        """Refuse. Raises: as `set`."""
        self._refuse()

    async def delete(self, key: str) -> NoReturn:  # noqa: ARG002
        """Refuse. Raises: as `set`."""
        self._refuse()

    def _refuse(self) -> NoReturn:
        self._check_writable()
        raise AssertionError  # not reached: the store is read-only


def _hierarchy_of(checkpoint: Checkpoint) -> ZarrHierarchy:
    if checkpoint.format == KIND:
        return ZarrHierarchy(checkpoint.manifest.arrays.values(), raw_bits=checkpoint.manifest.raw_bits)
    paths = array_paths(checkpoint.tensors)
    arrays: list[PlainArray] = []
    for name, info in checkpoint.tensors.items():
        itemsize = DTYPES[info.stored_dtype_name].itemsize
        grid = choose_grid(info.shape, itemsize, [], PLAIN_CHUNK_NBYTES)
        arrays.append(PlainArray(name, paths[name], grid, info.dtype_name, info.stored_dtype_name, info.layout))
    return ZarrHierarchy(arrays)


def _reopen(kind: type[CheckpointStore], path: Location, identity: str) -> CheckpointStore:
    """Open a store that was pickled.

    Raises:
        CheckpointConflictError: A save has replaced the checkpoint since.
    """
    store = kind(path)
    if store.checkpoint.identity != identity:
        raise CheckpointConflictError(f"{path} was replaced since its store was pickled; open it again")
    return store


def _slice_of(byte_range: ByteRequest | None) -> slice:
    """Return the part of a value that a request asks for.

    Raises:
        ValueError: The argument is no request.
    """
    match byte_range:
        case None:
            return slice(None)
        case RangeByteRequest(start, end):
            return slice(start, end)
        case OffsetByteRequest(offset):
            return slice(offset, None)
        case SuffixByteRequest(suffix):
            return slice(-suffix, None) if suffix else slice(0)
    raise ValueError(f"Unexpected byte_range, got {byte_range!r}, expected a request of zarr.abc.store")
