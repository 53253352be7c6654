"""Read a slice of one tensor: its elements, those at its edges, or their statistics."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

from dtckpt.checkpoint.inspecting.element_statistics import Statistics
from dtckpt.checkpoint.inspecting.read_batches import DEFAULT_MAX_MEMORY, BatchBudget, cut_pieces, read_ahead
from dtckpt.checkpoint.inspecting.selection import Selection
from dtckpt.checkpoint.inspecting.tensor_comparison import SMALL_CHUNK_NBYTES
from dtckpt.checkpoint.open import Checkpoint
from dtckpt.checkpoint.reading.tensor_info import TensorInfo
from dtckpt.format.dtypes import DTYPES

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
