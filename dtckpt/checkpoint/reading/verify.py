"""Verify a checkpoint: read all of it, and compare every digest (of chunks, of blocks, of contents, of documents)."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol

import numpy as np

from dtckpt.checkpoint.reading.plan import max_chunk_nbytes
from dtckpt.errors import CheckpointCorruptError, StorageError
from dtckpt.format.content import content_digest, content_share
from dtckpt.format.dtypes import DTYPES
from dtckpt.format.manifest import ArrayEntry, Manifest
from dtckpt.layout.region import Region
from dtckpt.storage.location import Location

MAX_THREADS = 8
UNCHECKED_NBYTES = 1 << 20
"""Bound on the memory that is taken for a chunk before storage is asked for the size of its file."""
MAX_NBYTES = 256 << 20
"""Bound on the bytes of chunks in memory, unless one chunk is larger."""


class VerifiableCheckpoint(Protocol):
    """The part of `dtckpt.checkpoint.reading.checkpoint.Checkpoint` that a verification needs."""

    @property
    def path(self) -> Location:
        """The checkpoint's path or URL."""
        ...

    @property
    def manifest(self) -> Manifest:
        """The checkpoint's manifest."""
        ...

    def validate_stored(self, regions: Iterable[tuple[str, Region]], *, unchecked: int) -> None:
        """As `RegionReader.validate_stored`, by names of tensors."""
        ...

    def read_into(
        self, name: str, region: Region, into: np.ndarray[Any, Any], *, max_in_flight: int | None = None
    ) -> int:
        """Read a region of a tensor into memory of its shape, verified by the digests of its chunks."""
        ...

    def block_digests(self, entry: ArrayEntry, number: int) -> list[int]:
        """Return the digests of a chunk's blocks, verified by the digest of the chunk."""
        ...

    def validate_documents(self) -> None:
        """Check every ``zarr.json``."""
        ...


@dataclass(frozen=True, slots=True)
class Damage:
    """A chunk, a tensor as a whole (``region`` is None), or a file of no tensor that is not as it was saved."""

    tensor: str
    region: Region | None
    reason: str


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """The result of a verification.

    Args:
        path: The checkpoint.
        num_tensors: Tensors that were read.
        num_chunks: Chunks that were read.
        nbytes: Bytes of those chunks.
        num_contents: Tensors whose content digest was compared, too.
        seconds: Duration.
        damages: The damages, in the order of the tensors and their chunks.
    """

    path: Location
    num_tensors: int
    num_chunks: int
    nbytes: int
    num_contents: int
    seconds: float
    damages: tuple[Damage, ...]

    @property
    def is_sound(self) -> bool:
        """Whether nothing is damaged."""
        return not self.damages


Progress = Callable[[str, int], None]
"""Called with a tensor's name and the bytes of its chunks that were read since the last call."""


def verify(
    checkpoint: VerifiableCheckpoint, *, threads: int | None = None, progress: Progress | None = None
) -> VerifyReport:
    """Verify a checkpoint: see `dtckpt.checkpoint.reading.checkpoint.Checkpoint.verify`."""
    start = time.monotonic()
    arrays = checkpoint.manifest.arrays
    largest = max((max_chunk_nbytes(entry) for entry in arrays.values()), default=0)
    threads = min(MAX_THREADS, os.cpu_count() or 1) if threads is None else threads
    damages: list[Damage] = []
    num_chunks = nbytes = num_contents = 0
    with ThreadPoolExecutor(max(1, min(threads, MAX_NBYTES // max(1, largest)))) as pool:
        try:
            for name, chunks in groupby(_check_all(checkpoint, pool, threads), key=lambda chunk: chunk.entry.name):
                share, is_sound = 0, True
                for chunk in chunks:
                    damages += chunk.damages
                    share, is_sound = share ^ chunk.content, is_sound and not chunk.damages
                    num_chunks += 1
                    nbytes += chunk.nbytes
                    if progress is not None:
                        progress(name, chunk.nbytes)
                entry = arrays[name]
                if entry.content is not None and is_sound:
                    num_contents += 1
                    if content_digest(share, entry.shape, entry.itemsize) != entry.content:
                        damages.append(Damage(name, None, "its content digest does not match"))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    try:
        checkpoint.validate_documents()
    except (CheckpointCorruptError, StorageError) as error:
        damages.append(Damage("", None, error.message))
    num_tensors, seconds = len(arrays), time.monotonic() - start
    return VerifyReport(checkpoint.path, num_tensors, num_chunks, nbytes, num_contents, seconds, tuple(damages))


@dataclass(frozen=True, slots=True, eq=False)
class _Checked:
    """The result of one chunk: its bytes, its share in the tensor's content digest, its damages."""

    entry: ArrayEntry
    nbytes: int
    content: int
    damages: tuple[Damage, ...]


def _check_all(checkpoint: VerifiableCheckpoint, pool: ThreadPoolExecutor, threads: int) -> Iterator[_Checked]:
    """Check all chunks in the pool, a few at a time, and yield their results in order."""
    waiting: deque[Future[_Checked]] = deque()
    for entry in checkpoint.manifest.arrays.values():
        for number in range(entry.grid.num_chunks):
            if number not in entry.missing:
                waiting.append(pool.submit(_check, checkpoint, entry, number))
                if len(waiting) > 2 * threads:
                    yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def _check(checkpoint: VerifiableCheckpoint, entry: ArrayEntry, number: int) -> _Checked:
    region = entry.grid.region(entry.grid.index(number))
    content = 0
    damages: list[Damage] = []
    try:
        checkpoint.validate_stored([(entry.name, region)], unchecked=UNCHECKED_NBYTES)
        elements = np.empty(region.shape, DTYPES[entry.stored_dtype])
        checkpoint.read_into(entry.name, region, elements, max_in_flight=elements.nbytes)
        if entry.content is not None:
            content = content_share(elements, entry.shape, region)
    except (CheckpointCorruptError, StorageError) as error:
        damages.append(Damage(entry.name, region, error.message))
    try:
        # Reads of whole chunks do not use the digests of blocks, so read_into above did not look at them.
        checkpoint.block_digests(entry, number)
    except (CheckpointCorruptError, StorageError) as error:
        damages.append(Damage(entry.name, region, error.message))
    return _Checked(entry, region.numel * entry.itemsize, content, tuple(damages))
