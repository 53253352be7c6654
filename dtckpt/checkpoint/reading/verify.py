"""Verify a checkpoint: read all of it, and compare every digest (of chunks, of blocks, of contents, of documents)."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby, takewhile
from typing import Protocol

import numpy as np

from dtckpt.checkpoint.reading.checkpoint_files import CheckpointFiles
from dtckpt.checkpoint.reading.tensor_info import TensorInfo
from dtckpt.checkpoint.reading.verified_reads import COLD_THREADS
from dtckpt.errors import CheckpointConflictError, CheckpointCorruptError, CheckpointError, StorageError
from dtckpt.format.content import content_digest, content_share
from dtckpt.format.dtypes import DTYPES
from dtckpt.layout.region import Region
from dtckpt.storage.location import Location

MAX_THREADS = 8
UNCHECKED_NBYTES = 1 << 20
"""Bound on the memory that is taken for a chunk before storage is asked for the size of its file."""
BATCH_NBYTES = 1 << 20
"""Bytes of small chunks that one thread takes at a time."""
MAX_BATCH = 64
"""Small chunks that one thread takes at a time."""
MAX_DAMAGES = 10_000
"""Damages after which the rest is not read: a manifest of a few megabytes can name a million missing chunks."""
MAX_NBYTES = 256 << 20
"""Bound on the bytes of chunks in memory, unless one chunk is larger."""


class VerifiableCheckpoint(Protocol):
    """The part of `dtckpt.checkpoint.reading.checkpoint.Checkpoint` that a verification needs."""

    @property
    def path(self) -> Location:
        """The checkpoint's path or URL."""
        ...

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """The tensors, by name."""
        ...

    def cause_of(self, error: CheckpointError) -> CheckpointError:
        """Return the error, or another error if a save has replaced the checkpoint since it was opened."""
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
        num_unverified: Tensors that could be read, but have no digest, so that changed bytes are not found. Other
            libraries' files have no digests, unless `dtckpt.convert` wrote them.
        unread: The rest of another library's checkpoint: files and notes that dtckpt does not read
            (`dtckpt.Checkpoint.unread`), and the paths of values that cannot be read.
    """

    path: Location
    num_tensors: int
    num_chunks: int
    nbytes: int
    num_contents: int
    seconds: float
    damages: tuple[Damage, ...]
    num_unverified: int = 0
    unread: Sequence[str] = ()

    @property
    def is_sound(self) -> bool:
        """Whether nothing is damaged."""
        return not self.damages


Progress = Callable[[str, int], None]
"""Called with a tensor's name and the bytes of its chunks that were read since the last call."""


def verify(
    checkpoint: VerifiableCheckpoint,
    files: CheckpointFiles,
    *,
    threads: int | None = None,
    progress: Progress | None = None,
) -> VerifyReport:
    """Verify a checkpoint: see `dtckpt.checkpoint.reading.checkpoint.Checkpoint.verify`."""
    start = time.monotonic()
    infos = checkpoint.tensors
    largest = max((info.max_chunk_nbytes for info in infos.values()), default=0)
    threads = min(MAX_THREADS, max(COLD_THREADS, os.cpu_count() or 1)) if threads is None else threads
    damages: list[Damage] = []
    num_chunks = nbytes = num_contents = 0
    with ThreadPoolExecutor(max(1, min(threads, MAX_NBYTES // max(1, largest)))) as pool:
        try:
            checked = takewhile(
                lambda _: len(damages) < MAX_DAMAGES, _check_all(checkpoint.tensors, files, pool, threads)
            )
            for info, chunks in groupby(checked, key=lambda chunk: chunk.info):
                share, is_sound = 0, True
                for chunk in chunks:
                    damages += chunk.damages
                    share, is_sound = share ^ chunk.content, is_sound and not chunk.damages
                    num_chunks += 1
                    nbytes += chunk.nbytes
                    if progress is not None:
                        progress(info.name, chunk.nbytes)
                if info.content_digest is not None and is_sound:
                    num_contents += 1
                    if (
                        content_digest(share, info.shape, DTYPES[info.stored_dtype_name].itemsize)
                        != info.content_digest
                    ):
                        damages.append(Damage(info.name, None, "its content digest does not match"))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    if len(damages) >= MAX_DAMAGES:
        damages.append(Damage("", None, f"after {len(damages)} damages the rest was not read"))
    try:
        files.validate_rest()
    except (CheckpointCorruptError, StorageError) as error:
        damages.append(Damage("", None, error.message))
    # Once for all damages, because it opens the checkpoint again.
    cause = checkpoint.cause_of(CheckpointCorruptError(damages[0].reason)) if damages else None
    if isinstance(cause, CheckpointConflictError):
        raise cause
    return VerifyReport(
        path=checkpoint.path,
        num_tensors=len(infos),
        num_chunks=num_chunks,
        nbytes=nbytes,
        num_contents=num_contents,
        seconds=time.monotonic() - start,
        damages=tuple(damages),
        num_unverified=0 if files.has_digests else sum(map(_is_unknown, infos.values())),
        unread=(*files.unread, *files.refused),
    )


def _is_unknown(info: TensorInfo) -> bool:
    return info.content_digest is None and info.nbytes > 0


@dataclass(frozen=True, slots=True, eq=False)
class _CheckedChunk:
    """The result of one chunk: its bytes, its share in the tensor's content digest, its damages."""

    info: TensorInfo
    nbytes: int
    content: int
    damages: tuple[Damage, ...]


def _check_all(
    infos: Mapping[str, TensorInfo], files: CheckpointFiles, pool: ThreadPoolExecutor, threads: int
) -> Iterator[_CheckedChunk]:
    """Check all chunks in the pool, a few at a time, and yield their results in order."""
    waiting: deque[Future[list[_CheckedChunk]]] = deque()

    def check(batch: Sequence[tuple[TensorInfo, Region]]) -> list[_CheckedChunk]:
        return [_check(files, info, region) for info, region in batch]

    for batch in _batches((info, region) for name, info in infos.items() for region in files.parts(name)):
        waiting.append(pool.submit(check, batch))
        if len(waiting) > 2 * threads:
            yield from waiting.popleft().result()
    while waiting:
        yield from waiting.popleft().result()


def _batches(parts: Iterable[tuple[TensorInfo, Region]]) -> Iterator[list[tuple[TensorInfo, Region]]]:
    """Yield parts in batches for one thread each: to hand over a small chunk takes longer than to check it."""
    batch: list[tuple[TensorInfo, Region]] = []
    nbytes = 0
    for info, region in parts:
        batch.append((info, region))
        nbytes += region.numel * DTYPES[info.stored_dtype_name].itemsize
        if nbytes >= BATCH_NBYTES or len(batch) == MAX_BATCH:
            yield batch
            batch, nbytes = [], 0
    if batch:
        yield batch


def _check(files: CheckpointFiles, info: TensorInfo, region: Region) -> _CheckedChunk:
    content = 0
    damages: list[Damage] = []
    dtype = DTYPES[info.stored_dtype_name]
    nbytes = region.numel * dtype.itemsize
    try:
        files.validate_stored([(info.name, region)], UNCHECKED_NBYTES)
        elements = np.empty(region.shape, dtype)
        files.read([(info.name, [(region, elements)])], nbytes, lambda _: None)
        if info.content_digest is not None:
            content = content_share(elements, info.shape, region)
    except (CheckpointCorruptError, StorageError) as error:
        damages.append(Damage(info.name, region, error.message))
    try:
        files.validate_part(info.name, region)
    except (CheckpointCorruptError, StorageError) as error:
        damages.append(Damage(info.name, region, error.message))
    return _CheckedChunk(info, nbytes, content, tuple(damages))
