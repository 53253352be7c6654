"""Read regions of many tensors at once: many small chunks per call, several large chunks at a time, all verified.

`RegionReader.read` takes requests and turns them into reads of parts of chunks (`dtckpt.checkpoint.reading.plan`):

    requests --plan--> parts --small ones in one file--> read_run, 128 together           in this thread
                         |
                         +--all others--> queue, finish: oldest first
                                            in a file here: BlockReader        large ones in a pool of threads
                                            elsewhere: request to storage      under way until it is finished;
                                                                               one for neighbours that are small

The queue is bounded in bytes and in parts, so memory is bounded, however much is requested.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np

from dtckpt.checkpoint.reading.block_digests import BlockDigests
from dtckpt.checkpoint.reading.checkpoint_files import RegionBuffers
from dtckpt.checkpoint.reading.plan import plan_tensor_reads
from dtckpt.checkpoint.reading.read_chunks import (
    SMALL_NBYTES,
    BlockReader,
    ChunkRead,
    Scratch,
    cut,
    deliver,
    from_span,
    is_small,
    small_memory,
    span_digests,
    validate_convertible,
)
from dtckpt.config import Config
from dtckpt.errors import CheckpointCorruptError, ConfigError
from dtckpt.format.digest import as_bytes, buffer_of, bytes_digest, digest_chunk, digest_of_data
from dtckpt.format.dtypes import DTYPES
from dtckpt.format.manifest import ArrayEntry
from dtckpt.layout.region import Region
from dtckpt.storage.chunk_reader import ChunkReader, FileRun, content, file_runs
from dtckpt.storage.failures import translate_errors
from dtckpt.storage.folder import Folder
from dtckpt.storage.local_values import StoredValue, contiguous_runs, read_run
from dtckpt.storage.location import Location
from dtckpt.storage.ocdbt_database import FileRange
from dtckpt.storage.zarr_tensorstore import allocate_elements

LOCAL_IN_FLIGHT_NBYTES = 8 << 20
"""Bound, per thread, on the bytes of chunks that are read at one time from this machine's storage.

Two larger chunks may nevertheless be under way. A higher bound is slower: the bytes should still be in the processor's
cache when they are digested and delivered.
"""
REMOTE_IN_FLIGHT_NBYTES = 64 << 20
"""Bound on the bytes of chunks that are read at one time from other storage, which takes long to answer."""
MAX_IN_FLIGHT = 256
"""Bound on the chunks that are read at one time, however small: each may have a file open."""
MAX_SMALL = 4096
"""Small chunks whose positions are looked up together."""
MAX_THREADS = 4
"""Bound on the threads that read large chunks from this machine's files, if it has cores for them."""
COLD_THREADS = 4
"""Threads that read large chunks from the disk, whatever the number of cores: they mostly wait, and a disk is fast only
while several requests wait for it. Announcing the reads (``POSIX_FADV_WILLNEED``) instead was slower by a tenth.
"""
UNCHECKED_NBYTES = 256 << 20
"""Bytes of memory that are taken before storage is asked for the sizes of the files that fill it."""
REMOTE_SMALL_NBYTES = 256 << 10
"""Chunks of at most so many bytes are read with their neighbours from other storage."""
LARGE_NBYTES = 1 << 20
"""Least bytes of a large chunk; for a smaller one another thread costs as much as it saves."""


@dataclass(slots=True, eq=False)
class RunRead:
    """The read of small chunks that lie near each other in a file on other storage, by one request.

    Args:
        run: The bytes that are requested.
        reads: The chunks.
        starts: Per chunk, its first byte in the run.
        handle: The request to storage, once it was made.
    """

    run: FileRun
    reads: Sequence[ChunkRead]
    starts: Sequence[int]
    handle: Any = None

    @property
    def nbytes(self) -> int:
        """Bytes of the run, with the gaps between its chunks: they are in memory until it is finished."""
        return self.run.stop - self.run.start


class RegionReader:
    """Reads regions of a checkpoint's tensors. Thread-safe.

    Args:
        path: The checkpoint, for messages.
        root: Its folder.
        reader: Reads its chunks.
        block_digests: The digests of its blocks.
        is_remote: Whether the checkpoint is on other storage than this machine's.
    """

    def __init__(
        self,
        path: Location,
        root: Folder,
        reader: ChunkReader,
        block_digests: BlockDigests,
        *,
        is_remote: bool,
    ) -> None:
        self._path = path
        self._root = root
        self._reader = reader
        self._block_digests = block_digests
        self._is_remote = is_remote

    def read(
        self,
        requests: Iterable[tuple[ArrayEntry, RegionBuffers]],
        max_in_flight: int | None,
        count: Callable[[int], object],
    ) -> int:
        """Read and verify regions of tensors; arguments and result as for `Checkpoint.read_all`.

        Raises:
            RegionError: A region is outside its tensor.
            RegionNotFoundError: A region was not saved.
            CheckpointCorruptError: Stored bytes are not the bytes that were saved.
            StorageError: Storage refused.
        """
        nbytes = in_flight = 0
        spare = 1 if self._is_remote or max_in_flight is not None else spare_threads()
        pending: deque[tuple[ChunkRead | RunRead, Callable[[], int]]] = deque()
        scratch = Scratch()

        def note(read_nbytes: int) -> None:
            nonlocal nbytes
            nbytes += read_nbytes
            count(read_nbytes)

        def finish_oldest() -> None:
            nonlocal in_flight
            # A read leaves the queue only when it is done: after a failure every read in the queue is waited for.
            read_nbytes = pending[0][1]()
            in_flight -= pending.popleft()[0].nbytes
            note(read_nbytes)

        with ExitStack() as stack:
            # By number of threads: chunks in the page cache get no more threads than the client has cores.
            pools: dict[int, ThreadPoolExecutor] = {}
            try:
                for read in self._read_small_ones(requests, note):
                    is_cold = isinstance(read, ChunkRead) and self.locate(read) and max_in_flight is None
                    threads = max(spare, COLD_THREADS) if is_cold else spare
                    usual = REMOTE_IN_FLIGHT_NBYTES if self._is_remote else LOCAL_IN_FLIGHT_NBYTES * threads
                    # Each thread has a part and one more waits, even if each part alone is beyond the limit.
                    limit, fewest = (usual, threads + 1) if max_in_flight is None else (max_in_flight, 1)
                    while len(pending) == MAX_IN_FLIGHT or (len(pending) >= fewest and in_flight + read.nbytes > limit):
                        finish_oldest()
                    work: Callable[[], int]
                    if isinstance(read, RunRead):
                        read.handle = self._reader.start_run(read.run)
                        work = partial(self._finish_run, read)
                    else:
                        if read.value is None:
                            self._request(read)
                        work = partial(self._finish, read, scratch)
                    # A read that is alone in the queue runs in this thread, which would only wait for another thread.
                    if threads > 1 and pending and read.handle is None and read.nbytes >= LARGE_NBYTES:
                        if threads not in pools:
                            pools[threads] = stack.enter_context(ThreadPoolExecutor(threads, "dtckpt-reads"))
                        work = pools[threads].submit(work).result
                    pending.append((read, work))
                    in_flight += read.nbytes
                while pending:
                    finish_oldest()
            except BaseException:
                # After a failure nothing may go on writing into the caller's memory, which may be freed: reads that
                # have not begun are cancelled, all others are waited for.
                for pool in pools.values():
                    pool.shutdown(cancel_futures=True)
                for read, _ in pending:
                    if read.handle is not None:
                        read.handle.exception()
                raise
        return nbytes

    def validate_stored(
        self, regions: Iterable[tuple[ArrayEntry, Region]], *, unchecked: int = UNCHECKED_NBYTES
    ) -> None:
        """Check that the stored files are long enough for regions of tensors, before memory for the regions is taken.

        Otherwise a damaged or hostile manifest could ask for any amount of memory.

        Args:
            regions: The regions.
            unchecked: The smallest regions are not checked, up to so many bytes together.

        Raises:
            RegionNotFoundError: A region was not saved.
            CheckpointCorruptError: A file is missing or too short.
            StorageError: Storage refused.
        """
        sized = sorted(
            # The number breaks ties: entries have no order.
            ((region.numel * entry.itemsize, number, entry, region) for number, (entry, region) in enumerate(regions))
        )
        ends = accumulate(nbytes for nbytes, *_ in sized)
        checked = [(entry, region) for end, (_, _, entry, region) in zip(ends, sized, strict=True) if end > unchecked]
        for entry, region in checked:
            if entry.missing:
                plan_tensor_reads(entry, (region,))  # raises: a chunk that was never saved is not damage
        # The largest regions first: a claim that is much too large is found at its first chunks.
        chunks = ((entry, index) for entry, region in reversed(checked) for index in entry.grid.meeting(region))
        if (lost := self._reader.find_missing_chunk(chunks)) is not None:
            raise CheckpointCorruptError(
                f"{self._path} lacks chunks that its manifest names: {lost} is missing, or too short for the chunks "
                "that should be in it; restore another checkpoint"
            )

    def _read_small_ones(
        self,
        requests: Iterable[tuple[ArrayEntry, RegionBuffers]],
        count: Callable[[int], object],
    ) -> Iterator[ChunkRead | RunRead]:
        """Read the small chunks of local files, many at a time; yield all other reads, and runs of small chunks."""
        small: list[ChunkRead] = []
        most_nbytes, read_small = (
            (REMOTE_SMALL_NBYTES, self._runs) if self._is_remote else (SMALL_NBYTES, self._read_small)
        )
        for entry, buffers in requests:
            for read in _chunk_reads(entry, buffers):
                if not is_small(read, most_nbytes):
                    yield read
                    continue
                small.append(read)
                if len(small) == MAX_SMALL:
                    yield from read_small(small, count)
                    small = []
        yield from read_small(small, count)

    def _runs(self, reads: Sequence[ChunkRead], _: Callable[[int], object]) -> Iterator[ChunkRead | RunRead]:
        """Yield small chunks on other storage: chunks of one file as runs of neighbours, the others alone."""
        ranges = self._reader.find_small([(read.entry.path, read.part.index) for read in reads])
        shared: list[ChunkRead] = []
        places: list[FileRange] = []
        for read, found in zip(reads, ranges, strict=True):
            # Only the first bytes of the value: a chunk at the tensor's edge is stored padded.
            if found is not None and 0 < read.nbytes <= (found.nbytes or 0):
                shared.append(read)
                places.append(FileRange(found.file, found.start, read.nbytes))
            else:
                yield read
        for run in file_runs(places):
            starts = [places[position].start - run.start for position in run.positions]
            yield RunRead(run, [shared[position] for position in run.positions], starts)

    def _finish_run(self, run: RunRead) -> int:
        """Wait for the bytes of a run, verify and deliver its chunks; return the chunks' bytes."""
        path = run.reads[0].entry.path
        with translate_errors("read {} chunks, of array {!r} first", self._root, len(run.reads), path, is_read=True):
            data = memoryview(content(run.handle, run.nbytes))
        for read, start in zip(run.reads, run.starts, strict=True):
            stored, entry = data[start : start + read.nbytes], read.entry
            self.validate(read, digest_of_data(entry.name, read.part.index, stored), [])
            deliver(read, np.frombuffer(stored, DTYPES[entry.stored_dtype]).reshape(read.part.box.shape))
        return sum(read.nbytes for read in run.reads)

    def _read_small(self, reads: Sequence[ChunkRead], count: Callable[[int], object]) -> Iterator[ChunkRead]:
        """Read and deliver small chunks that share a file, a run of neighbours per call; yield the others."""
        located: list[tuple[ChunkRead, StoredValue]] = []
        values = self._reader.locate_small([(read.entry.path, read.part.index) for read in reads])
        for read, value in zip(reads, values, strict=True):
            if value is None:
                yield read
            else:
                located.append((read, value))
        for run in contiguous_runs([value for _, value in located], [read.part.nbytes for read, _ in located]):
            reads, values = zip(*(located[position] for position in run), strict=True)
            arrays = [small_memory(read) for read in reads]
            with translate_errors(
                "read {} chunks, of array {!r} first", self._root, len(run), reads[0].entry.path, is_read=True
            ):
                read_run(values, arrays)
            for read, array in zip(reads, arrays, strict=True):
                self.validate(read, digest_of_data(read.entry.name, read.part.index, buffer_of(array)), [])
                if array is not read.targets[0]:
                    deliver(read, array)
            count(sum([read.part.nbytes for read in reads]))

    def locate(self, read: ChunkRead) -> bool:
        """Find a part in a file of this machine; return whether its bytes must come from the disk."""
        entry, part = read.entry, read.part
        # The destination may be small, and the part of the chunk around it not: memory for the part is taken below.
        if part.nbytes > UNCHECKED_NBYTES:
            self.validate_stored([(entry, part.chunk)])
        # Compressed chunks are decoded as a whole, by `ChunkReader.start`.
        if entry.has_readable_blocks:
            read.value = self._reader.locate(entry.path, part.index)
        if read.value is None or part.nbytes < LARGE_NBYTES:
            return False
        return read.value.is_cold(part.rows.start, part.rows.start + part.rows.nbytes)

    def load_span(
        self, read: ChunkRead, start: int, stop: int, memory: np.ndarray[Any, np.dtype[np.uint8]]
    ) -> list[int]:
        """Read a span of a located part into memory, as it is stored; return its `span_digests`. Blocks: On storage."""
        entry, part = read.entry, read.part
        elements = from_span(entry, part, memory)
        if read.value is None:
            # A node of the database holds the chunk.
            offset, shape, dim = list(part.box.offset), list(part.box.shape), entry.blocks.dim
            offset[dim], shape[dim] = offset[dim] + start, stop - start
            self.read([(entry, [(Region(tuple(offset), tuple(shape)), elements)])], None, lambda _: None)
        else:
            with translate_errors("read {} of array {!r}", self._root, part.box, entry.path, is_read=True):
                read.value.read_into(memory.data, part.rows.start + start * part.rows.row_nbytes)
        return span_digests(entry, part, as_bytes(elements).data, stop - start)

    def _request(self, read: ChunkRead) -> None:
        """Request a part from storage."""
        entry, part = read.entry, read.part
        if not part.is_whole:
            stop = part.rows.start + part.rows.nbytes
            read.handle = self._reader.start_span(entry.path, part.index, part.rows.start, stop)
            return
        # Storage fills a whole chunk: the destination itself, if it is the only one and needs no conversion.
        first, *more = read.targets
        is_fit = first.shape == part.box.shape and first.dtype == DTYPES[entry.stored_dtype]
        read.is_direct = is_fit and first.flags.aligned and not more
        read.memory = first if read.is_direct else allocate_elements(entry.stored_dtype, part.box.shape)
        read.handle = self._reader.start(entry, part.chunk, read.memory)

    def _finish(self, read: ChunkRead, scratch: Scratch) -> int:
        """Wait for one read, verify the part, and deliver it; return the part's bytes.

        A part that was not verified may have been delivered: then this raises, and the caller's memory is undefined.
        """
        entry, part, memory = read.entry, read.part, read.memory
        if read.value is not None:
            with translate_errors("read {} of array {!r}", self._root, part.box, entry.path, is_read=True):
                digest, digests = BlockReader(read, read.value, scratch).run()
        elif part.is_whole:
            self._reader.finish(read.handle, entry.path, part.chunk)
            digest, digests = digest_chunk(entry.name, part.index, memory, entry.blocks)
        else:
            data = self._reader.finish_span(read.handle, entry.path, part.box, part.rows.nbytes)
            memory = from_span(entry, part, data)
            boxes = entry.blocks.cut(Region.full(memory.shape))
            digest, digests = 0, [bytes_digest(as_bytes(memory[box.slices()]).data) for box in boxes]
        self.validate(read, digest, digests)
        # Only now, when the elements have been verified. (A direct read has filled the destination already.)
        if read.handle is not None and not read.is_direct:
            deliver(read, memory)
        read.value = None  # this closes a file that no other read needs
        return part.nbytes

    def validate(self, read: ChunkRead, digest: int, digests: list[int]) -> None:
        """Compare the digest of a whole chunk, or the digests of the blocks that were read, with the stored ones."""
        entry, part = read.entry, read.part
        if part.is_whole:
            is_sound = digest == int(entry.digests[part.number])
        else:
            is_sound = digests == self._block_digests.read(entry, part.number, part.blocks)
        if not is_sound:
            raise CheckpointCorruptError(
                f"chunk {part.chunk} of tensor {entry.name!r} in {self._path} is damaged: its digest does not match "
                f"(written by client {int(entry.writers[part.number])}); restore another checkpoint"
            )


def _chunk_reads(entry: ArrayEntry, buffers: RegionBuffers) -> Iterator[ChunkRead]:
    """Return the reads of the parts of chunks that some regions of a tensor need.

    Raises:
        DTypeError: A buffer has another dtype than the tensor, whose dtype cannot be converted.
    """
    validate_convertible(entry.name, entry.dtype, buffers)
    parts = plan_tensor_reads(entry, tuple([region for region, _ in buffers]))
    return (
        ChunkRead(entry, part, [cut(buffers[position][1], of_region) for position, _, of_region in part.uses])
        for part in parts
    )


def spare_threads() -> int:
    """Return the number of threads that may read at one time: this client's share of its machine's cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        config = Config.from_environ()
        clients = (
            config.local_world_size if config.local_world_size_text else max(config.num_clients, _process_group_size())
        )
    # How many clients share the machine is not known; one thread takes nothing from the others.
    except ConfigError:
        return 1
    return max(1, min(MAX_THREADS, cores // clients))


def _process_group_size() -> int:
    """Return the number of clients in the default process group; a process without PyTorch has no such group."""
    if "torch" not in sys.modules:
        return 1
    from dtckpt.comm import process_groups  # here, because it imports PyTorch

    return process_groups.size()
