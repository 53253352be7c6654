"""Read elements of tensors: in batches of bounded memory, a slice, its edges, or its statistics.

Batches are of one or several checkpoints, which are read side by side and one batch ahead.

While the caller works on one batch, a thread per checkpoint reads the next one::

    checkpoint A   |read 1|read 2|read 3|                    memory: two batches per checkpoint,
    checkpoint B   |read 1|read 2|read 3|                    and the stored chunks that are being read
    caller                |work 1|work 2|work 3|
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dtckpt.checkpoint.inspecting.elements import Statistics
from dtckpt.checkpoint.inspecting.selection import Selection
from dtckpt.checkpoint.inspecting.tensor_comparison import SMALL_CHUNK_NBYTES
from dtckpt.checkpoint.reading.checkpoint import Checkpoint
from dtckpt.checkpoint.reading.tensor_info import TensorInfo
from dtckpt.comm.background_threads import Pool
from dtckpt.errors import ConfigError
from dtckpt.format.codecs import NO_CODEC
from dtckpt.format.dtypes import DTYPES
from dtckpt.layout.region import Region

DEFAULT_MAX_MEMORY = 256 << 20
MAX_BATCH_NBYTES = 16 << 20
"""Larger batches are no faster."""
MIN_BATCH_NBYTES = 1 << 20
MAX_BATCH = 4096
"""Pieces of a batch."""
WORK_NBYTES = 8 << 20
"""Memory of the caller, which works on few elements at a time."""
_SPAN_NBYTES = 2 << 20
"""Bytes beside a piece that are read with it where chunks are not compressed: up to a block at each end."""
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True, eq=False)
class SelectedPiece:
    """A part of the tensors that are read side by side.

    Args:
        path: The caller's name for the tensors.
        infos: The tensors, one per checkpoint; all of one shape.
        selection: The elements; its region is read.
    """

    path: str
    infos: tuple[TensorInfo, ...]
    selection: Selection

    @property
    def region(self) -> Region:
        """The box that is read."""
        return self.selection.region


Loaded = Iterator[tuple[SelectedPiece, tuple[np.ndarray[Any, Any], ...]]]
"""Pieces with the elements of their regions as they are stored, one array per checkpoint."""


@dataclass(frozen=True, slots=True)
class BatchBudget:
    """The shares of a bound on memory, of each of the checkpoints.

    Args:
        batch: Bytes of a batch; two are in memory.
        in_flight: Bytes of stored chunks in memory at one time.
    """

    batch: int
    in_flight: int

    @classmethod
    def of(cls, sources: Sequence[Iterable[TensorInfo]], max_memory: int) -> BatchBudget:
        """Divide ``max_memory`` bytes.

        Args:
            sources: The tensors that are read, by checkpoint.
            max_memory: The bound.

        Raises:
            ConfigError: ``max_memory`` is too small for the largest stored chunks.
        """
        # The reader starts one chunk beyond its bound before it waits for the first.
        largest = [max(map(_read_nbytes, infos), default=0) for infos in sources]
        rest = max_memory - WORK_NBYTES - sum(largest)
        batch = min(MAX_BATCH_NBYTES, rest // (4 * len(sources)))
        if batch < MIN_BATCH_NBYTES:
            least = max_memory - rest + 4 * len(sources) * MIN_BATCH_NBYTES
            raise ConfigError(
                f"max_memory is too small; got {max_memory} bytes, expected at least {least}: a read of a stored chunk "
                f"takes {max(largest)}"
            )
        return cls(batch, rest // len(sources) - 2 * batch)


def _read_nbytes(info: TensorInfo) -> int:
    """Return the bytes that a read of a chunk takes beside its piece, at most."""
    # A compressed chunk is decoded as a whole, and its stored bytes, which may be as many, are in memory meanwhile.
    return 2 * info.max_chunk_nbytes if info.codec != NO_CODEC else min(info.max_chunk_nbytes, _SPAN_NBYTES)


def cut_pieces(
    path: str, infos: tuple[TensorInfo, ...], selection: Selection, budget: BatchBudget
) -> Iterator[SelectedPiece]:
    """Cut a selection of some tensors into pieces that fit into a batch."""
    itemsize = max(DTYPES[info.stored_dtype_name].itemsize for info in infos)
    return (SelectedPiece(path, infos, piece) for _, piece in selection.pieces(infos[0].shape, itemsize, budget.batch))


def read_ahead(checkpoints: Sequence[Checkpoint], pieces: Iterable[SelectedPiece], budget: BatchBudget) -> Loaded:
    """Read pieces, and yield them in order. The arrays of a piece are valid until the caller asks for the next piece.

    Blocks: on storage.

    Raises:
        CheckpointCorruptError: Stored bytes are not the bytes that were saved.
        StorageError: Storage refused.
    """
    memory = deque([np.empty(budget.batch + _ALIGNMENT * MAX_BATCH, np.uint8) for _ in checkpoints] for _ in range(2))

    def read(side: int, batch: Sequence[SelectedPiece], buffer: npt.NDArray[np.uint8]) -> list[np.ndarray[Any, Any]]:
        arrays = _arrays([(piece.infos[side], piece.region) for piece in batch], buffer)
        requests = [
            (piece.infos[side].name, [(piece.region, array)]) for piece, array in zip(batch, arrays, strict=True)
        ]
        checkpoints[side].read_all(requests, max_in_flight=budget.in_flight)
        return arrays

    waiting: deque[tuple[Sequence[SelectedPiece], list[Future[list[np.ndarray[Any, Any]]]]]] = deque()
    with Pool(len(checkpoints), "dtckpt-read-ahead") as pool:
        for batch in _batches(pieces, budget.batch):
            if len(waiting) == 2:
                yield from _loaded(*waiting.popleft())
            waiting.append((batch, [pool.submit(read, side, batch, buffer) for side, buffer in enumerate(memory[0])]))
            memory.rotate(1)
        while waiting:
            yield from _loaded(*waiting.popleft())


def _loaded(batch: Sequence[SelectedPiece], reads: Sequence[Future[list[np.ndarray[Any, Any]]]]) -> Loaded:
    return zip(batch, zip(*(read.result() for read in reads), strict=True), strict=True)


def _batches(pieces: Iterable[SelectedPiece], max_nbytes: int) -> Iterator[list[SelectedPiece]]:
    """Gather pieces, up to a bound on the bytes of each checkpoint."""
    batch: list[SelectedPiece] = []
    room = max_nbytes
    for piece in pieces:
        nbytes = piece.region.numel * max(DTYPES[info.stored_dtype_name].itemsize for info in piece.infos)
        if batch and (nbytes > room or len(batch) == MAX_BATCH):
            yield batch
            batch, room = [], max_nbytes
        batch.append(piece)
        room -= nbytes
    if batch:
        yield batch


def _arrays(regions: Sequence[tuple[TensorInfo, Region]], buffer: npt.NDArray[np.uint8]) -> list[np.ndarray[Any, Any]]:
    """Return arrays for regions of tensors, in one buffer."""
    arrays: list[np.ndarray[Any, Any]] = []
    start = 0
    for info, region in regions:
        dtype = DTYPES[info.stored_dtype_name]
        arrays.append(np.ndarray(region.shape, dtype, buffer.data, start))
        start += -(-region.numel * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
    return arrays


MAX_PIECE_NBYTES = 8 << 20
"""Bytes that are read at a time for elements that are far apart."""


def read_elements(checkpoint: Checkpoint, name: str, selection: Selection) -> np.ndarray[Any, Any]:
    """Return selected elements as they are stored. Blocks: on storage. Raises: as `Checkpoint.read_into`."""
    info = checkpoint.info(name)
    dtype = DTYPES[info.stored_dtype_name]
    elements = np.empty(tuple(map(len, selection.ranges)), dtype)
    for position, piece in selection.pieces(info.shape, dtype.itemsize, MAX_PIECE_NBYTES):
        box = np.empty(piece.region.shape, dtype)
        checkpoint.read_into(name, piece.region, box, max_in_flight=MAX_PIECE_NBYTES)
        elements[position] = box[piece.slices]
    return elements.reshape(selection.shape)


def read_edges(checkpoint: Checkpoint, name: str, selection: Selection, edge: int) -> np.ndarray[Any, Any]:
    """Return the first and last ``edge`` elements of every dim, as for a summary of a large array.

    A dim that has more elements than these has one more here, between them, which is not read.
    """
    shape = tuple(min(len(each), 2 * edge + 1) for each in selection.ranges)
    elements = np.zeros(shape, DTYPES[checkpoint.info(name).stored_dtype_name])
    # Per dim, the parts that are read: of the result, and of the selection.
    parts = [
        [(slice(None), each)]
        if len(each) <= 2 * edge
        else [(slice(None, edge), each[:edge]), (slice(-edge, None), each[-edge:])]
        for each in selection.ranges
    ]
    for chosen in itertools.product(*parts):
        ranges = tuple(indices for _, indices in chosen)
        elements[tuple(position for position, _ in chosen)] = read_elements(checkpoint, name, Selection(ranges))
    return elements.reshape([size for dim, size in enumerate(shape) if dim not in selection.dropped])


def read_statistics(
    checkpoint: Checkpoint,
    name: str,
    selection: Selection,
    *,
    max_memory: int = DEFAULT_MAX_MEMORY,
    progress: Callable[[str, int], None] | None = None,
) -> Statistics:
    """Return statistics of selected elements. Blocks: on storage.

    Args:
        checkpoint: The checkpoint.
        name: The tensor's name.
        selection: The elements.
        max_memory: Bound on the bytes of elements in memory.
        progress: Called with the tensor's name and the bytes of the elements that were read since the last call.

    Raises:
        ConfigError: The bound is too small for one of the stored chunks.
        CheckpointError: As for `Checkpoint.read_into`.
    """
    info = checkpoint.info(name)
    budget = BatchBudget.of([[info]], max_memory)
    pieces = (piece for part in _parts(info, selection) for piece in cut_pieces(name, (info,), part, budget))
    statistics = Statistics()
    for piece, (box,) in read_ahead([checkpoint], pieces, budget):
        statistics += Statistics.of(box[piece.selection.slices], info.stored_dtype_name)
        if progress is not None:
            progress(name, box.nbytes)
    return statistics


def _parts(info: TensorInfo, selection: Selection) -> list[Selection]:
    """Return the parts of a selection that lie in one chunk each, so that no chunk is read twice."""
    if info.max_chunk_nbytes < SMALL_CHUNK_NBYTES or not info.is_whole or not info.chunks:
        return [selection]
    return [selection.clip(chunk.region) for chunk in info.chunks]
