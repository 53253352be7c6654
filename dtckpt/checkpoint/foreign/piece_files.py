"""`PieceFiles`: the files of another library's checkpoint, whose index says which bytes are which elements.

Such files have no digests of their content, so a read cannot tell a changed byte from the saved byte. But a read
notices a file that is too short, and another file in its place.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from typing_extensions import override

from dtckpt.checkpoint.foreign.torch_files import PieceLocator
from dtckpt.checkpoint.reading.checkpoint_files import CheckpointFiles, RegionBuffers
from dtckpt.checkpoint.reading.piece_reads import PieceInfo, Span, plan_spans
from dtckpt.checkpoint.reading.pieces import CheckedBytes, Piece, PieceIndex, PieceTensor, RulePieces
from dtckpt.checkpoint.reading.read_chunks import Scratch, convert, cut, validate_convertible
from dtckpt.checkpoint.reading.tensor_info import TensorInfo, TensorInfos
from dtckpt.checkpoint.reading.verified_reads import (
    COLD_THREADS,
    MAX_IN_FLIGHT,
    REMOTE_IN_FLIGHT_NBYTES,
    spare_threads,
)
from dtckpt.format import tree as trees
from dtckpt.format.digest import as_bytes, bytes_digest
from dtckpt.format.dtypes import DTYPES
from dtckpt.layout.region import Region
from dtckpt.storage.chunk_reader import RangeReader, content
from dtckpt.storage.failures import MalformedError, translate_errors
from dtckpt.storage.folder import Folder
from dtckpt.storage.local_values import OpenFile, StoredValue
from dtckpt.storage.watched_folder import WatchedFolder

LOCAL_GAP_NBYTES = 32 << 10
"""One more read of a local file takes as long as a copy of about so many unneeded bytes."""
REMOTE_GAP_NBYTES = 1 << 20
LOCAL_SPAN_NBYTES = 1 << 20
"""Bound on a read: large enough that calls cost nothing, small enough that its bytes stay in the processor's cache."""
REMOTE_SPAN_NBYTES = 8 << 20
PART_NBYTES = 16 << 20
"""Bytes that are verified at a time."""
BATCH_NBYTES = 8 << 20
"""Bytes of local reads that one thread takes at a time."""
MAX_BATCH = 256
"""Local reads that one thread takes at a time."""
NUM_SAMPLES = 32
SAMPLE_NBYTES = 256


class PieceFiles(CheckpointFiles):
    """The files of a checkpoint with an index.

    Args:
        folder: The folder that the files of the index are in.
        index: The index.
        is_remote: Whether the files are on other storage than this machine's.

    Raises:
        CheckpointCorruptError: A file is missing, or shorter than the index says.
        StorageError: Storage refused.
    """

    def __init__(self, folder: Folder, index: PieceIndex, *, is_remote: bool) -> None:
        self.kind = index.kind
        self.refused = index.refused
        self.files = index.files
        self.unread = index.unread
        self.notes = index.notes
        self._index = index
        self._folder = folder
        self._watched = folder if isinstance(folder, WatchedFolder) and not is_remote else None
        self._is_local = self._watched is not None
        self._max_gap = LOCAL_GAP_NBYTES if self._is_local else REMOTE_GAP_NBYTES
        self._max_nbytes = LOCAL_SPAN_NBYTES if self._is_local else REMOTE_SPAN_NBYTES
        self._ranges = RangeReader(folder)
        self._locator = PieceLocator(folder, self._read_bytes)
        self._places: dict[Piece, Piece] = {}
        self._sound: set[tuple[str, CheckedBytes]] = set()
        sizes = index.file_nbytes
        with translate_errors("look for the files of the checkpoint", folder, is_read=True):
            if (short := folder.find_short_file(sizes)) is not None:
                raise MalformedError(
                    f"{short} is missing or cut short: expected at least {sizes[short]} bytes, with "
                    f"{index.held_in(short)}"
                )
            samples = b"\0".join(self._samples())
        self.identity = f"{bytes_digest(samples):016x}"
        self.tensors = TensorInfos(index.tensors, self._describe)

    def _samples(self) -> Iterator[bytes]:
        """Yield the facts of the index, and some bytes of the files: a model that was trained on has others."""
        facts = [(name, each.shape, each.dtype, _facts(each.pieces)) for name, each in self._index.tensors.items()]
        yield repr((self.kind, facts, self.structure, sorted(self.refused))).encode("utf-8", "surrogatepass")
        for tensor in self._index.tensors.values():
            if tensor.elements is not None:
                yield tensor.elements.tobytes()
        pieces = sorted(self._index.extents())
        some = pieces[:: max(1, len(pieces) // NUM_SAMPLES)][:NUM_SAMPLES]
        # From the middle: embeddings may begin with zeros.
        starts = [(file, (start + stop) // 2, stop) for file, start, stop in some]
        reads = [self._ranges.start(file, start, min(stop, start + SAMPLE_NBYTES)) for file, start, stop in starts]
        for (_, start, stop), read in zip(starts, reads, strict=True):
            yield content(read, min(stop, start + SAMPLE_NBYTES) - start)

    def _describe(self, name: str) -> TensorInfo:
        tensor = self._index.tensors[name]
        return PieceInfo.of(tensor, max_gap=self._max_gap, max_nbytes=self._max_nbytes)

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

    @override
    def read(
        self,
        requests: Iterable[tuple[str, RegionBuffers]],
        max_in_flight: int | None,
        count: Callable[[int], object],
    ) -> int:
        max_nbytes = self._max_nbytes if max_in_flight is None else max(1, min(self._max_nbytes, max_in_flight))
        reads = self._reads(requests, max_nbytes)
        nbytes = 0
        for done in (
            self._read_local(reads, max_in_flight) if self._is_local else self._read_remote(reads, max_in_flight)
        ):
            nbytes += done
            count(done)
        return nbytes

    def _reads(self, requests: Iterable[tuple[str, RegionBuffers]], max_nbytes: int) -> Iterator[_SpanRead]:
        """Yield the reads of the spans that some regions need."""
        for name, buffers in requests:
            tensor = self._index.tensors[name]
            validate_convertible(name, tensor.dtype, buffers)
            regions = [region for region, _ in buffers]
            self._locate_all(tensor, regions)
            spans = plan_spans(tensor, regions, max_gap=self._max_gap, max_nbytes=max_nbytes, places=self._places)
            for span in spans:
                yield _SpanRead(span, DTYPES[tensor.dtype], cut(buffers[span.number][1], span.target))
            if tensor.elements is not None:
                for region, buffer in buffers:
                    convert(cut(tensor.elements, region.slices()), buffer)

    def _locate_all(self, tensor: PieceTensor, regions: Sequence[Region]) -> list[Piece]:
        """Find the elements of the pieces that some regions need; return those pieces."""
        wanted = (
            tensor.pieces_in(regions[0])
            if len(regions) == 1
            else list(dict.fromkeys(piece for region in regions for piece in tensor.pieces_in(region)))
        )
        unknown = [piece for piece in wanted if piece.stream_nbytes is not None and piece not in self._places]
        if self._is_local:
            places = [self._locate(tensor, piece) for piece in unknown]
        else:
            reads = [self._ranges.pool().submit(self._locate, tensor, piece) for piece in unknown]
            places = [read.result() for read in reads]
        self._places.update(zip(unknown, places, strict=True))
        return [self._places.get(piece, piece) for piece in wanted]

    def _locate(self, tensor: PieceTensor, piece: Piece) -> Piece:
        with translate_errors("find the elements of {!r} in {}", self._folder, tensor.name, piece.file, is_read=True):
            return self._locator.locate(tensor, piece)

    def _read_local(self, reads: Iterable[_SpanRead], max_in_flight: int | None) -> Iterator[int]:
        """Read spans of local files, batches of them in several threads; yield the bytes of each batch."""
        spare = 1 if max_in_flight is not None else spare_threads()
        scratch = Scratch()
        pending: deque[Future[int]] = deque()
        with ExitStack() as stack:
            pools: dict[int, ThreadPoolExecutor] = {}  # by number of threads
            try:
                for batch, nbytes in _batches(reads):
                    # A smaller batch is the only batch, or the last.
                    is_large = nbytes >= BATCH_NBYTES
                    is_cold = is_large and max_in_flight is None and self._is_cold(batch[0].span)
                    threads = max(spare, COLD_THREADS) if is_cold else spare
                    if threads == 1 or not is_large:
                        yield self._read_batch(batch, scratch)
                        continue
                    if threads not in pools:
                        pools[threads] = stack.enter_context(ThreadPoolExecutor(threads, "dtckpt-reads"))
                    pending.append(pools[threads].submit(self._read_batch, batch, scratch))
                    while len(pending) > threads:
                        yield pending.popleft().result()
                while pending:
                    yield pending.popleft().result()
            except BaseException:
                # After a failure nothing may go on writing into the caller's memory, which may be freed.
                for pool in pools.values():
                    pool.shutdown(cancel_futures=True)
                raise

    def _is_cold(self, span: Span) -> bool:
        with self._errors_of(span):
            return StoredValue(self._file(span.file), span.start, span.nbytes).is_cold(0, span.nbytes)

    def _read_batch(self, batch: Sequence[_SpanRead], scratch: Scratch) -> int:
        for read in batch:
            span = read.span
            with self._errors_of(span):
                value = StoredValue(self._file(span.file), span.start, span.nbytes)
                if read.is_direct:
                    value.read_into(as_bytes(read.target).data, 0)
                else:
                    data = scratch.take(span.nbytes, span.start)
                    value.read_into(data.data, 0)
                    read.deliver(data.data)
        return sum(read.span.nbytes for read in batch)

    def _file(self, name: str) -> OpenFile:
        """Return an open file.

        Raises:
            CheckpointConflictError: Another file has taken the place of the file that was there when the checkpoint was
                opened.
        """
        file = self._ranges.open(name)
        if self._watched is not None:  # it may have changed since it was opened
            self._watched.validate_same(name, file.descriptor)
        return file

    def _read_bytes(self, name: str, start: int, stop: int) -> bytes:
        """Return bytes of a file; fewer where it ends before. Raises: as `_file`."""
        if self._is_local:
            file = self._file(name)  # a name for it, because it closes as soon as nothing refers to it
            return os.pread(file.descriptor, stop - start, start)
        return self._folder.read(name, start, stop)

    def _read_remote(self, reads: Iterable[_SpanRead], max_in_flight: int | None) -> Iterator[int]:
        """Read spans elsewhere, with many requests under way; yield the bytes of each."""
        limit = REMOTE_IN_FLIGHT_NBYTES if max_in_flight is None else max_in_flight
        pending: deque[tuple[_SpanRead, Any]] = deque()
        in_flight = 0

        def finish_oldest() -> int:
            read, handle = pending.popleft()
            with self._errors_of(read.span):
                read.deliver(memoryview(content(handle, read.span.nbytes)))
            return read.span.nbytes

        for read in reads:
            span = read.span
            while pending and (len(pending) == MAX_IN_FLIGHT or in_flight + span.nbytes > limit):
                done = finish_oldest()
                in_flight -= done
                yield done
            with self._errors_of(span):
                pending.append((read, self._ranges.start(span.file, span.start, span.stop)))
            in_flight += span.nbytes
        while pending:
            yield finish_oldest()

    def _errors_of(self, span: Span) -> translate_errors:
        return translate_errors(
            "read bytes {} to {} of {}", self._folder, span.start, span.stop, span.file, is_read=True
        )

    # --- checks -------------------------------------------------------------------------------------------------

    @override
    def validate_stored(self, regions: Iterable[tuple[str, Region]], unchecked: int) -> None:
        # The files were as long as the index says when the checkpoint was opened, and the index compared the tensors
        # with the bytes that they are made of.
        for name, region in regions:
            tensor = self._index.tensors[name]
            if not tensor.is_whole:
                plan_spans(tensor, [region], max_gap=0, max_nbytes=1)  # raises: a part that was not saved is no damage

    @override
    def parts(self, name: str) -> Iterator[Region]:
        # Boxes of each piece.
        tensor = self._index.tensors[name]
        for piece in tensor.pieces:
            rows = max(1, PART_NBYTES // max(1, tensor.itemsize * math.prod(piece.region.shape[1:])))
            yield from _cut_rows(piece.region, rows)

    @property
    @override
    def has_digests(self) -> bool:
        # True if the files have a checksum of everything that was read.
        pieces = (piece for tensor in self._index.tensors.values() for piece in tensor.pieces)
        return all(self._places.get(piece, piece).checked is not None for piece in pieces)

    @override
    def validate_part(self, name: str, region: Region) -> None:
        # Compare the checksums of the bytes that its pieces begin in, if they have any.
        tensor = self._index.tensors[name]
        for piece in self._locate_all(tensor, [region]):
            # Once for a piece, at its first part; once for pieces that share their bytes.
            checked = piece.checked if piece.region.offset == region.offset else None
            if checked is not None and (piece.file, checked) not in self._sound:
                with translate_errors("check the elements of {!r}", self._folder, name, is_read=True):
                    self._validate_checked(piece.file, checked)
                self._sound.add((piece.file, checked))

    def _validate_checked(self, file: str, checked: CheckedBytes) -> None:
        from awscrt.checksums import crc32, crc32c  # here, because commands that only look do without

        crc, stop = 0, checked.start + checked.nbytes
        update = crc32c if checked.is_castagnoli else crc32
        for start in range(checked.start, stop, BATCH_NBYTES):
            crc = update(self._read_bytes(file, start, min(start + BATCH_NBYTES, stop)), crc)
        if crc != checked.crc:
            raise MalformedError(
                f"bytes {checked.start} to {stop} of {file} differ from the saved bytes: their CRC does not match"
            )

    @override
    def validate_rest(self) -> None:
        # The index was checked when it was parsed.
        return

    @override
    def tied(self) -> Mapping[str, str]:
        first: dict[tuple[tuple[int, ...], str, tuple[Piece, ...] | RulePieces], str] = {}
        tied: dict[str, str] = {}
        for name in trees.tensor_names(self.structure):
            tensor = self._index.tensors[name]
            if tensor.pieces:
                kept = first.setdefault((tensor.shape, tensor.dtype, tensor.pieces), name)
                tied |= {} if kept == name else {name: kept}
        return tied

    @override
    def close(self) -> None:
        self._ranges.close()


def _facts(pieces: tuple[Piece, ...] | RulePieces) -> object:
    """Return the facts by which pieces differ from others."""
    if not isinstance(pieces, tuple):
        return pieces.key
    return [(each.region.offset, each.region.shape, each.file, each.offset) for each in pieces]


@dataclass(frozen=True, slots=True, eq=False)
class _SpanRead:
    """A span, the dtype of its elements, and the array that they go to."""

    span: Span
    dtype: np.dtype[Any]
    target: np.ndarray[Any, Any]

    @property
    def is_direct(self) -> bool:
        """Whether the bytes go to the target without a conversion."""
        return self.span.is_dense and self.target.dtype == self.dtype and self.target.flags.c_contiguous

    def deliver(self, data: memoryview) -> None:
        """Copy or convert the elements to the target."""
        elements: np.ndarray[Any, Any] = np.ndarray(self.span.shape, self.dtype, data, 0, self.span.strides)
        convert(elements, self.target)


def _batches(reads: Iterable[_SpanRead]) -> Iterator[tuple[list[_SpanRead], int]]:
    """Yield reads in batches for one thread each, with their bytes."""
    batch: list[_SpanRead] = []
    nbytes = 0
    for read in reads:
        batch.append(read)
        nbytes += read.span.nbytes
        if nbytes >= BATCH_NBYTES or len(batch) == MAX_BATCH:
            yield batch, nbytes
            batch, nbytes = [], 0
    if batch:
        yield batch, nbytes


def _cut_rows(region: Region, rows: int) -> Iterator[Region]:
    """Yield boxes of at most so many rows of the first dim."""
    if not region.ndim:
        yield region
        return
    for start in range(0, region.shape[0], rows):
        offset = (region.offset[0] + start, *region.offset[1:])
        yield Region(offset, (min(rows, region.shape[0] - start), *region.shape[1:]))
