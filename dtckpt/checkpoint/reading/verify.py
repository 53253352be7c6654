"""Read a whole checkpoint and compare every digest."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np

from dtckpt.errors import CheckpointCorruptError, StorageError
from dtckpt.format.content import content_digest, content_share
from dtckpt.format.dtypes import DTYPES
from dtckpt.format.manifest import ArrayEntry
from dtckpt.layout.region import Region
from dtckpt.storage.location import Location

if TYPE_CHECKING:
    from dtckpt.checkpoint.reading.checkpoint import Checkpoint

MAX_THREADS = 8
UNCHECKED_NBYTES = 1 << 20
"""Memory that is taken for a chunk without a look at the size of the file that shall fill it."""
MAX_NBYTES = 256 << 20
"""Bound on chunks in memory, unless one is larger."""


@dataclass(frozen=True, slots=True)
class Damage:
    """What is not as it was saved: a chunk, a tensor as a whole (``region`` is None), or a file of no tensor."""

    tensor: str
    region: Region | None
    reason: str


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What a verification read, and what it found.

    Args:
        path: The checkpoint.
        num_tensors: Tensors that were read.
        num_chunks: Chunks that were read.
        nbytes: Bytes of those chunks.
        num_contents: Tensors whose content digest was compared, too.
        seconds: How long it took.
        damages: What is damaged, in the order of the tensors and their chunks.
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


def verify(checkpoint: Checkpoint, *, threads: int | None = None, progress: Progress | None = None) -> VerifyReport:
    """Verify a checkpoint: see `Checkpoint.verify`."""
    start = time.monotonic()
    largest = max((info.max_chunk_nbytes for info in checkpoint.tensors.values()), default=0)
    wanted = min(MAX_THREADS, os.cpu_count() or 1) if threads is None else threads
    damages: list[Damage] = []
    num_chunks = nbytes = num_contents = 0
    with ThreadPoolExecutor(max(1, min(wanted, MAX_NBYTES // max(1, largest)))) as pool:
        try:
            for name, chunks in groupby(_checked(checkpoint, pool, wanted), key=lambda chunk: chunk.entry.name):
                share, is_sound = 0, True
                for chunk in chunks:
                    damages += chunk.damages
                    share, is_sound = share ^ chunk.content, is_sound and not chunk.damages
                    num_chunks += 1
                    nbytes += chunk.nbytes
                    if progress is not None:
                        progress(name, chunk.nbytes)
                entry = checkpoint.manifest.arrays[name]
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
    num_tensors, seconds = len(checkpoint.tensors), time.monotonic() - start
    return VerifyReport(checkpoint.path, num_tensors, num_chunks, nbytes, num_contents, seconds, tuple(damages))


@dataclass(frozen=True, slots=True, eq=False)
class _Checked:
    """What one chunk came to."""

    entry: ArrayEntry
    nbytes: int
    content: int
    damages: tuple[Damage, ...]


def _checked(checkpoint: Checkpoint, pool: ThreadPoolExecutor, threads: int) -> Iterator[_Checked]:
    """Check all chunks, a few at a time, and yield them in order."""
    waiting: deque[Future[_Checked]] = deque()
    for entry in checkpoint.manifest.arrays.values():
        for number in range(entry.grid.num_chunks):
            if number not in entry.missing:
                waiting.append(pool.submit(_check, checkpoint, entry, number))
                if len(waiting) > 2 * threads:
                    yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def _check(checkpoint: Checkpoint, entry: ArrayEntry, number: int) -> _Checked:
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
        # Those of the blocks are needed only where less than a chunk is read.
        checkpoint.block_digests(entry, number)
    except (CheckpointCorruptError, StorageError) as error:
        damages.append(Damage(entry.name, region, error.message))
    return _Checked(entry, region.numel * entry.itemsize, content, tuple(damages))
