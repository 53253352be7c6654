"""Find the chunks of a save that its base, an earlier checkpoint, has already; they are shared and not written again.

A chunk is reused if the base has a chunk of the same tensor, place, shape, dtype and codec, with the same digest and
the same identity, 128 bits together (`dtckpt.format.digest`). Each client decides about the chunks that it would write,
before any of them is copied or written::

    the base's manifest     a look at one block         all of the chunk
    no such chunk    ---->  write
    alike            ---->  another digest       ---->  write
                            the same             ---->  another digest or identity  ---->  write
                                                        the same                    ---->  share

Where training changes everything, one block of 256 KiB per chunk tells, and the save costs no more. Where a
chunk has not changed, the base's manifest also tells its share in the tensor's content, so its bytes are read once.

In a database many chunks share a data file. A file of which less than half is still in use is not shared: its chunks
are written again, apart from the chunks that have changed. So they are in a file that is worth sharing next time, and a
checkpoint never keeps more than twice the bytes that it uses.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from dtckpt.checkpoint.reading.block_digests import BlockDigests
from dtckpt.checkpoint.saving.digests import MIN_NBYTES, ChunkDigests, SavedChunk
from dtckpt.checkpoint.saving.plan import SavePlan, TensorPlan
from dtckpt.comm.background_threads import Pool
from dtckpt.errors import CheckpointCorruptError, CheckpointError, StorageError
from dtckpt.format.content import share_of_content
from dtckpt.format.digest import as_bytes, bytes_digest
from dtckpt.format.dtypes import DTYPES
from dtckpt.format.manifest import MANIFEST_NAME, MAX_MANIFEST_NBYTES, ArrayEntry, Manifest
from dtckpt.layout.region import Region
from dtckpt.storage.commit import commit_target_of
from dtckpt.storage.failures import translate_errors
from dtckpt.storage.folder import Folder
from dtckpt.storage.local_folder import LocalFolder
from dtckpt.storage.location import Location
from dtckpt.storage.ocdbt_database import FileRange
from dtckpt.storage.reused_chunks import StoredChunks, last_uses

NUM_THREADS = 4
"""Threads that digest chunks that look unchanged; nothing else is under way then."""

Fetch = Callable[[TensorPlan, Region], np.ndarray[Any, Any]]
"""Returns the elements of a region that this client holds, in the stored dtype."""
ChunkId = tuple[int, int]
"""Index of a tensor in the plan, and number of one of its chunks."""


@dataclass(frozen=True, eq=False)
class Base:
    """An earlier checkpoint, whose chunks a save may share.

    Args:
        where: Its path or URL.
        folder: Its folder; on a file system the very directory, whatever has its path later.
        manifest: Its manifest.
    """

    where: Location
    folder: Folder
    manifest: Manifest

    @property
    def name(self) -> str:
        """Its name, by which later checkpoints tell where their chunks come from."""
        return self.where.name

    @property
    def identity(self) -> int:
        """A number that clients compare: different for different checkpoints, and not 0."""
        return bytes_digest(f"{self.name}\0{self.manifest.attempt}".encode()) or 1

    @cached_property
    def chunks(self) -> StoredChunks:
        """Its chunks on storage."""
        return StoredChunks(self.manifest.kvstore, self.folder)

    @cached_property
    def block_digests(self) -> BlockDigests:
        """The digests of its blocks."""
        return BlockDigests(self.manifest, self.folder)

    def origin(self, entry: ArrayEntry, number: int) -> str:
        """Return the name of the checkpoint that first wrote a chunk."""
        origin = 0 if entry.origins is None else int(entry.origins[number])
        return self.manifest.origins[origin - 1] if origin else self.name


def open_base(where: Location, kvstore: str) -> Base:
    """Open a checkpoint as the base of a save.

    Args:
        where: Its path or URL.
        kvstore: The kind of key-value store that the save writes.

    Raises:
        CheckpointError: There is no checkpoint of this library, or it cannot be a base of such a save.
    """
    with translate_errors("open the base", where, is_read=True):
        folder = commit_target_of(where).locate()
        if isinstance(folder, LocalFolder):
            folder = folder.hold()
        try:
            data = folder.read_whole(MANIFEST_NAME, MAX_MANIFEST_NBYTES)
        except FileNotFoundError:
            raise CheckpointError(f"{where} was removed meanwhile") from None
        # Asked for no files: whether storage can share any.
        if not folder.share(folder, {}):
            raise CheckpointError(f"storage at {where} cannot copy files by itself")
    manifest = Manifest.from_bytes(data, f"{where}/{MANIFEST_NAME}")
    if manifest.kvstore != kvstore:
        raise CheckpointError(f"{where} is of kind {manifest.kvstore}, and this save writes {kvstore}")
    entries = manifest.arrays.values()
    if entries and all(entry.identities is None for entry in entries):
        raise CheckpointError(f"an earlier version of dtckpt saved {where}, with 64 bits of each chunk only")
    return Base(where, folder, manifest)


def is_alike(item: TensorPlan, entry: ArrayEntry) -> bool:
    """Whether the chunks of a tensor to be saved can equal the chunks of a saved tensor: all but the elements agree."""
    facts = item.path, item.grid, item.dtype, item.stored_dtype, item.codec
    saved = entry.path, entry.grid, entry.dtype, entry.stored_dtype, entry.codec
    return entry.identities is not None and facts == saved


def candidates(plan: SavePlan, client: int, base: Manifest) -> Iterator[tuple[int, TensorPlan, int, ArrayEntry]]:
    """Yield the chunks that a client would write and the base may have: the chunk as in the plan, and the base's entry.

    Chunks that are put together from several clients' pieces are left out, as no client has their elements yet.
    """
    entry, last = None, -1
    for index, item, number in plan.owned_by(client):
        if index != last:
            last, entry = index, base.arrays.get(item.name)
            entry = entry if entry is not None and is_alike(item, entry) else None
        if entry is not None and number not in item.pieces and number not in entry.missing:
            yield index, item, number, entry


def saved_chunk(entry: ArrayEntry, number: int) -> SavedChunk:
    """Return the digests of a chunk of the base."""
    assert entry.identities is not None  # noqa: S101  `is_alike`
    share = None
    if entry.content is not None and entry.grid.num_chunks == 1:
        share = share_of_content(entry.content, entry.shape, entry.itemsize)
    elif entry.shares is not None:
        share = int(entry.shares[number])
    return SavedChunk(int(entry.digests[number]), int(entry.identities[number]), share)


@dataclass(frozen=True, slots=True, eq=False)
class Reuse:
    """The chunks of one client that need not be written.

    Args:
        digests: The digests of the chunks that are digested already, whether they changed or not.
        shared: The range of the base's files that holds each chunk that is not written.
        steady: The chunks that have not changed, but are written again, apart from the others.
        regions: By tensor, the regions of the chunks in ``shared``.
        nbytes: Bytes of the elements of the chunks in ``shared``.
    """

    digests: Mapping[ChunkId, ChunkDigests] = field(default_factory=dict)
    shared: Mapping[ChunkId, FileRange] = field(default_factory=dict)
    steady: frozenset[ChunkId] = frozenset()
    regions: Mapping[str, frozenset[Region]] = field(default_factory=dict)
    nbytes: int = 0

    @property
    def files(self) -> Mapping[str, int]:
        """The files that are shared, each with the bytes that it must have at least."""
        return last_uses(self.shared.values())

    def is_done(self, index: int, number: int) -> bool:
        """Whether a chunk is in the checkpoint already, or is among the chunks that are written first."""
        return (index, number) in self.shared or (index, number) in self.steady

    def share(self, base: Base, folder: Folder) -> None:
        """Share the files with a folder under construction.

        Raises:
            CheckpointError: The base has been removed or damaged, or storage refused.
        """
        with translate_errors("share files of the base {}", folder, base.where, is_read=True):
            try:
                is_shared = folder.share(base.folder, self.files)
            except FileNotFoundError as error:
                raise CheckpointError(f"{base.where} was removed meanwhile: {error.filename} is missing") from None
        if not is_shared:
            raise CheckpointError(f"storage at {folder} cannot copy files by itself")


NO_REUSE = Reuse()


def find_reuse(plan: SavePlan, client: int, base: Base, fetch: Fetch, *, with_content: bool) -> Reuse:
    """Find the chunks of a client that the base has already.

    Blocks: On the digests of chunks that look unchanged, and on reads of the base's metadata.

    Args:
        plan: The plan of the save.
        client: This client.
        base: The base.
        fetch: See `Fetch`.
        with_content: Whether the save digests contents.

    Raises:
        CheckpointError: The base is damaged, or storage refused.
    """
    digests: dict[ChunkId, ChunkDigests] = {}
    waiting: list[tuple[ChunkId, Future[ChunkDigests]]] = []
    saved: dict[ChunkId, SavedChunk] = {}
    with Pool(NUM_THREADS, "dtckpt-digests") as pool:
        for index, item, number, entry in candidates(plan, client, base.manifest):
            if not _looks_equal(item, number, entry, base, fetch):
                continue
            saved[index, number] = known = saved_chunk(entry, number)
            elements = fetch(item, item.grid.chunk(number)[1])
            # New memory is digested and freed at once; views of the state cost nothing while they wait.
            if elements.flags.owndata or elements.nbytes < MIN_NBYTES:
                digests[index, number] = ChunkDigests.of(item, number, elements, with_content=with_content, saved=known)
            else:
                work = pool.submit(ChunkDigests.of, item, number, elements, with_content=with_content, saved=known)
                waiting.append(((index, number), work))
        digests |= {chunk: work.result() for chunk, work in waiting}
    found: dict[ChunkId, FileRange] = {}
    with translate_errors("look for chunks of the base", base.where, is_read=True):
        for (index, number), each in digests.items():
            item = plan.tensors[index]
            if saved[index, number].is_equal(each):
                stored = base.chunks.find(item, item.grid.index(number))
                if stored is not None:
                    found[index, number] = stored
    wasteful = _wasteful_files(base, found)
    shared = {chunk: stored for chunk, stored in found.items() if stored.file not in wasteful}
    regions: defaultdict[str, set[Region]] = defaultdict(set)
    nbytes = 0
    for index, number in shared:
        item = plan.tensors[index]
        region = item.grid.chunk(number)[1]
        regions[item.name].add(region)
        nbytes += region.numel * DTYPES[item.stored_dtype].itemsize
    return Reuse(
        digests,
        shared,
        frozenset(found.keys() - shared.keys()),
        {name: frozenset(each) for name, each in regions.items()},
        nbytes,
    )


def _looks_equal(item: TensorPlan, number: int, entry: ArrayEntry, base: Base, fetch: Fetch) -> bool:
    """Whether the first block of a chunk has the digest that the base has for it; also if the chunk has one block."""
    region = item.grid.chunk(number)[1]
    if entry.blocks.count(region.shape) <= 1:
        return True
    try:
        (first,) = base.block_digests.read(entry, number, range(1))
    except (CheckpointCorruptError, StorageError):
        # The file of the base's blocks is damaged; a new one comes with a chunk that is written.
        return False
    block = fetch(item, entry.blocks.span(region, 0, 1))
    return bytes_digest(as_bytes(block).data) == first


def _wasteful_files(base: Base, found: Mapping[ChunkId, FileRange]) -> set[str]:
    """Return the files of which this client would use less than half."""
    used: defaultdict[str, int] = defaultdict(int)
    for stored in found.values():
        # A file of kind zarr holds one chunk.
        if stored.nbytes is not None and base.manifest.kvstore == "ocdbt":
            used[stored.file] += stored.nbytes
    with translate_errors("look at the files of the base", base.where, is_read=True):
        return {file for file, nbytes in used.items() if not base.chunks.is_mostly_used(file, nbytes)}
