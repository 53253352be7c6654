"""Plan a reshard: the new chunks of every tensor, the windows in which they are read, and the bytes of both; pure.

A conversion plans its reads and its memory in the same way.

A window is a run of neighbouring new chunks whose elements are read together. A new chunk consists of parts of old
chunks. If storage can be read only in units that several new chunks share, these chunks should be in one window, so
that the unit is read once::

    units of the old chunks (rows)   new chunks (columns)   a window: all new chunks that share units
    |aaaaaaaa|                       |a|b|c|d|              |####|
    |bbbbbbbb|                       | | | | |              |####|

A window is a run of chunks in row-major order, which is the order of the writes. So it is whole in all dims after the
dim in which it ends.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from dtckpt.checkpoint.reading.tensor_info import TensorInfo
from dtckpt.checkpoint.restoring.layout_choice import Layouts, choose_layout
from dtckpt.checkpoint.saving.plan import (
    NO_CLIENT,
    Holding,
    SavePlan,
    TensorPlan,
    TensorSpec,
    holdings_of,
    plan_save,
    with_owners,
)
from dtckpt.errors import ConfigError, MeshError
from dtckpt.format.dtypes import DTYPES, is_floating
from dtckpt.format.grid import ChunkGrid
from dtckpt.layout.layout import Layout
from dtckpt.layout.mesh import Mesh

WINDOW_NBYTES = 32 << 20
"""A window is not larger than this without need: it stays near the processor, and memory that is new costs time."""
Chunks = TypeVar("Chunks", int, npt.NDArray[np.int64])
_SLACK = 1.02
"""Windows that read so many times as much as the best ones are as good, if they are smaller."""


@dataclass(frozen=True, slots=True)
class Units:
    """The smallest parts that an old tensor can be read in: its chunks, cut into blocks.

    Args:
        chunk: Elements per dim of an old chunk.
        unit: Elements per dim of a unit. Each chunk begins with a new one.
    """

    chunk: tuple[int, ...]
    unit: tuple[int, ...]

    def amplification(self, shape: Sequence[int], lengths: Sequence[int]) -> float:
        """Return how often a unit is read, on average, by windows of these lengths per dim.

        A unit is read once more for every edge between windows that lies inside it.
        """
        factor = 1.0
        for size, length, chunk, unit in zip(shape, lengths, self.chunk, self.unit, strict=True):
            edges = np.arange(length, size, length)
            whole, rest = divmod(size, chunk)
            num_units = whole * -(-chunk // unit) - (-rest // unit)
            factor *= 1 + np.count_nonzero(edges % chunk % unit) / num_units
        return float(factor)


@dataclass(frozen=True, slots=True)
class Windows:
    """How the chunks of a tensor are cut into windows.

    Args:
        line: Chunks in a line; a window ends where its line ends.
        length: Chunks of a window, of which a line has one or more.
        nbytes: Bytes of a window.
        amplification: Bytes that are read to fill all windows, by the tensor's bytes.
    """

    line: int
    length: int
    nbytes: int
    amplification: float

    @classmethod
    @lru_cache(maxsize=4096)
    def of(cls, grid: ChunkGrid, itemsize: int, units: Units, max_nbytes: int) -> Windows:
        """Choose the windows of a tensor: of the windows that read least, the smallest.

        Args:
            grid: The tensor's shape and new chunks.
            itemsize: Bytes of an element in memory.
            units: The units in which storage is read.
            max_nbytes: Bound on the bytes of a window; one of a single chunk may exceed it.
        """
        found = list(_candidates(grid, itemsize, units, max_nbytes))
        least = min(windows.amplification for windows in found)
        good = [windows for windows in found if windows.amplification <= least * _SLACK]
        # Of windows that are all too small, the largest.
        large = [windows for windows in good if windows.nbytes >= WINDOW_NBYTES]
        return min(large, key=lambda windows: windows.nbytes) if large else max(good, key=lambda each: each.nbytes)

    def number(self, chunk: Chunks) -> Chunks:
        """Return the number of the window that a chunk lies in, by the chunk's row-major number; also for an array."""
        per_line = -(-self.line // self.length)
        return chunk // self.line * per_line + chunk % self.line // self.length


def _candidates(grid: ChunkGrid, itemsize: int, units: Units, max_nbytes: int) -> Iterator[Windows]:
    """Yield windows that fit, of at least one chunk: the smallest, the largest, and some that end with a unit."""
    # A tensor without elements has no chunks; any windows will do.
    shape, counts = ([max(1, size) for size in sizes] for sizes in (grid.shape, grid.counts))
    chunk = grid.chunk_shape
    lengths, inner = [min(size, each) for size, each in zip(shape, chunk, strict=True)], 1

    def windows(line: int, length: int) -> Windows:
        return Windows(line, length, itemsize * math.prod(lengths), units.amplification(shape, lengths))

    yield windows(1, 1)
    for dim in reversed(range(len(shape))):
        row = itemsize * math.prod(lengths) // lengths[dim]
        fitting = counts[dim] if shape[dim] * row <= max_nbytes else max(1, max_nbytes // (row * chunk[dim]))
        enough = min(counts[dim], -(-WINDOW_NBYTES // (row * chunk[dim])))
        # Chunks after which a window ends with an old chunk, or with a unit of it.
        steps = {1, *(math.lcm(chunk[dim], each[dim]) // chunk[dim] for each in (units.chunk, units.unit))}
        ends = {end for step in steps for end in (-(-enough // step) * step, fitting // step * step)}
        for count in sorted(ends):
            if 0 < count <= fitting:
                lengths[dim] = min(shape[dim], count * chunk[dim])
                yield windows(counts[dim] * inner, count * inner)
        # A window that goes on in an outer dim is whole in all inner ones.
        if fitting < counts[dim]:
            return
        lengths[dim], inner = shape[dim], inner * counts[dim]


def share_out(plan: SavePlan, windows: Sequence[Windows], num_workers: int) -> SavePlan:
    """Divide a plan among workers: each writes neighbouring windows, and all about as many bytes.

    So no two workers read the same part of an old chunk, and each reads its part of the old checkpoint in order.

    Args:
        plan: The plan of one writer.
        windows: How the chunks of each tensor are cut into windows.
        num_workers: Number of workers.
    """
    numbers, sizes, first = [], [], 0
    for tensor, cut in zip(plan.tensors, windows, strict=True):
        of_tensor = cut.number(np.arange(tensor.grid.num_chunks))
        numbers.append(of_tensor + first)
        first += int(of_tensor[-1]) + 1 if of_tensor.size else 0
        nbytes = math.prod(tensor.grid.chunk_shape) * DTYPES[tensor.stored_dtype].itemsize
        sizes.append(np.where(tensor.owners == NO_CLIENT, 0, nbytes))
    window_of_chunk = np.concatenate([np.empty(0, np.int64), *numbers])
    nbytes_of_window = np.bincount(window_of_chunk, np.concatenate([np.empty(0), *sizes]))
    # A window belongs to the worker in whose share its middle lies.
    middles = np.cumsum(nbytes_of_window) - nbytes_of_window / 2
    workers = (middles * num_workers / max(1.0, nbytes_of_window.sum())).astype(np.int32)
    return with_owners(plan, np.where(plan.owners == NO_CLIENT, NO_CLIENT, workers[window_of_chunk]).astype(np.int32))


DEFAULT_MAX_MEMORY = 1 << 30
MIN_CHUNK_NBYTES = 64 << 10
"""New chunks are not made smaller than this to save memory: a tiny bound is refused, and not planned for hours."""
NUM_WINDOWS = 4
"""Windows in memory at one time; see `Budget`."""


@dataclass(frozen=True, slots=True, eq=False)
class ReshardedTensor:
    """One tensor before and after resharding; bytes count its elements on storage."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    new_dtype: str
    layout: Layout | None
    new_layout: Layout
    num_chunks: int
    new_num_chunks: int
    nbytes: int
    new_nbytes: int
    content_digest: int | None
    """The digest of the old and the new tensor; None if the old tensor has no digest, or the stored dtype changes."""


@dataclass(frozen=True, slots=True)
class ReshardTarget:
    """How the tensors of a new checkpoint are laid out and stored.

    Args:
        mesh: The new mesh.
        layouts: As for `dtckpt.reshard`.
        dtype: The new dtype of floating-point tensors; None: they keep theirs.
        codec: The new codec; None: tensors keep theirs.
    """

    mesh: Mesh
    layouts: Layouts | None = None
    dtype: str | None = None
    codec: str | None = None

    def specs(self, infos: Mapping[str, TensorInfo]) -> list[TensorSpec]:
        """Describe the new tensors.

        Raises:
            MeshError: A layout is on another mesh.
            LayoutError: A layout does not fit its tensor.
        """
        return [self._spec(info, choose_layout(name, info, self.mesh, self.layouts)) for name, info in infos.items()]

    def _spec(self, info: TensorInfo, layout: Layout | None) -> TensorSpec:
        if layout is None or layout.mesh != self.mesh:
            raise MeshError(f"layout for tensor {info.name!r} is on another mesh; expected {self.mesh.to_string()}")
        dtype, stored = info.dtype_name, info.stored_dtype_name
        if self.dtype is not None and is_floating(dtype):
            dtype = stored = self.dtype
        # One process writes all shards, whichever clients will read them; several share them out (`share_out`).
        boxes = _boxes(layout, info.shape)
        # A tensor that keeps its stored dtype must keep its content digest; the merge refuses any other.
        content = info.content_digest if stored == info.stored_dtype_name else None
        codec = self.codec or info.codec
        return TensorSpec(info.name, info.shape, dtype, stored, saved_only(boxes, info), layout, content, codec)


@dataclass(frozen=True, slots=True, eq=False)
class ReshardPlan:
    """The plan of a reshard.

    Args:
        save: The new checkpoint, as one writer writes it.
        tensors: Its tensors before and after.
        windows: How the chunks of each are cut into windows.
        budget: How the memory is divided.
        chunk_nbytes: The bound on a new chunk's bytes that was used.
        read_nbytes: Bytes that are read to fill all windows, before compression.
    """

    save: SavePlan
    tensors: Sequence[ReshardedTensor]
    windows: Sequence[Windows]
    budget: Budget
    chunk_nbytes: int
    read_nbytes: int


def plan_reshard(
    infos: Mapping[str, TensorInfo], specs: Sequence[TensorSpec], *, max_memory: int, chunk_nbytes: int
) -> ReshardPlan:
    """Plan a reshard.

    Args:
        infos: The old tensors.
        specs: The new ones; see `ReshardTarget.specs`.
        max_memory: Bound on the bytes of tensor data in memory.
        chunk_nbytes: Bound on the bytes of a new chunk; less memory may make it smaller.

    Raises:
        ConfigError: ``max_memory`` is less than one chunk needs.
    """
    budget = Budget.of(infos.values(), max_memory)
    # A chunk must fit a window, as a window is made of whole chunks.
    chunk_nbytes = min(chunk_nbytes, max(MIN_CHUNK_NBYTES, budget.window))
    save = plan_save(specs, chunk_nbytes)
    tensors = [_describe(infos[item.name], item) for item in save.tensors]
    validate_memory(save, budget, max_memory)
    windows = [windows_of(item, infos[item.name], budget) for item in save.tensors]
    read_nbytes = sum(round(tensor.nbytes * each.amplification) for tensor, each in zip(tensors, windows, strict=True))
    return ReshardPlan(save, tensors, windows, budget, chunk_nbytes, read_nbytes)


@lru_cache(maxsize=4096)
def _boxes(layout: Layout, shape: tuple[int, ...]) -> tuple[Holding, ...]:
    """Return the boxes of a layout, all held by one writer; one object for equal arguments, as `plan_save` likes it."""
    return tuple(Holding(holding.region, (0,)) for holding in holdings_of(layout, shape))


def _describe(info: TensorInfo, plan: TensorPlan) -> ReshardedTensor:
    assert plan.spec.layout is not None  # noqa: S101  (`ReshardTarget.specs` gives every tensor one)
    return ReshardedTensor(
        name=info.name,
        shape=info.shape,
        dtype=info.dtype_name,
        new_dtype=plan.spec.dtype,
        layout=info.layout,
        new_layout=plan.spec.layout,
        num_chunks=info.num_chunks,
        new_num_chunks=plan.grid.num_chunks - len(plan.missing),
        nbytes=info.nbytes,
        new_nbytes=math.prod(info.shape) * DTYPES[plan.spec.stored_dtype].itemsize,
        content_digest=plan.spec.content,
    )


# --- the source of a reshard or a conversion: memory, the parts that were saved, the windows --------------------------


@dataclass(frozen=True, slots=True)
class Budget:
    """The shares of ``max_memory``: one for stored chunks that are read, four for windows of new chunks.

    The first of the four windows is being read. The second hands its chunks to storage, and the chunks of the third are
    being written. The fourth share is for these chunks as they are encoded for storage.

    Args:
        largest: Bytes of the largest stored chunk; its verification may need all of it, even if a part is wanted.
        reads: Bytes of stored chunks in memory at one time.
        window: Bound on the bytes of a window.
    """

    largest: int
    reads: int
    window: int

    @classmethod
    def of(cls, infos: Iterable[TensorInfo], max_memory: int) -> Budget:
        """Divide ``max_memory`` bytes for a source with these tensors."""
        largest = max((info.max_chunk_nbytes for info in infos), default=0)
        # At least the largest stored chunk; `validate_memory` refuses a bound that leaves too little for the rest.
        reads = max(largest, max_memory // 8)
        return cls(largest, reads, max(1, (max_memory - reads) // NUM_WINDOWS))


def validate_memory(plan: SavePlan, budget: Budget, max_memory: int) -> None:
    """Refuse a bound that the largest chunks alone exceed."""
    sizes = (
        (math.prod(item.grid.chunk_shape) * DTYPES[item.spec.dtype].itemsize, item.spec.name) for item in plan.tensors
    )
    largest, name = max(sizes, default=(0, ""))
    # A window has at least one chunk.
    needed = budget.largest + NUM_WINDOWS * largest
    if needed > max_memory:
        raise ConfigError(
            f"max_memory is too small; got {max_memory} bytes, expected at least {needed}: a stored chunk of "
            f"{budget.largest} bytes, and {NUM_WINDOWS} new ones of tensor {name!r}"
        )


def saved_only(boxes: tuple[Holding, ...], info: TensorInfo) -> tuple[Holding, ...]:
    """Return the boxes without the elements that were not saved, for a tensor that was saved in part."""
    if info.is_whole:
        return boxes
    parts = (
        Holding(part, box.clients)
        for box in boxes
        for chunk in info.chunks
        if (part := box.region.intersect(chunk.region))
    )
    return tuple(parts)


def windows_of(plan: TensorPlan, info: TensorInfo, budget: Budget) -> Windows:
    """Return how a source reads the chunks of a new tensor.

    Args:
        plan: The new tensor.
        info: The old one.
        budget: Of it the bytes of a window count.
    """
    units = Units(info.chunk_shape, info.block_shape)
    return Windows.of(plan.grid, DTYPES[plan.spec.dtype].itemsize, units, budget.window)
