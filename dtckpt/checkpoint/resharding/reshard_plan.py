"""Plan a reshard: the new chunks of every tensor, the windows in which they are read, and the bytes of both; pure.

A conversion plans its reads and its memory in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from dtckpt.checkpoint.reading.tensor_info import TensorInfo
from dtckpt.checkpoint.resharding.windows import Units, Windows
from dtckpt.checkpoint.restoring.layout_choice import Layouts, choose_layout
from dtckpt.checkpoint.saving.plan import Holding, SavePlan, TensorPlan, TensorSpec, holdings_of, plan_save
from dtckpt.errors import ConfigError, MeshError
from dtckpt.format.dtypes import DTYPES, is_floating
from dtckpt.layout.layout import Layout
from dtckpt.layout.mesh import Mesh

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
