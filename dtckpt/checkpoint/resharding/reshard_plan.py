"""Plan a reshard: the new chunks of every tensor, the windows in which they are read, and the bytes of both; pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from dtckpt.checkpoint.reading.tensor_info import TensorInfo
from dtckpt.checkpoint.resharding.source_plan import (
    MIN_CHUNK_NBYTES,
    Budget,
    saved_only,
    validate_memory,
    windows_of,
)
from dtckpt.checkpoint.resharding.windows import Windows
from dtckpt.checkpoint.restoring.layout_choice import Layouts, choose_layout
from dtckpt.checkpoint.saving.plan import Holding, SavePlan, TensorPlan, TensorSpec, holdings_of, plan_save
from dtckpt.errors import MeshError
from dtckpt.format.dtypes import DTYPES, is_floating
from dtckpt.layout.layout import Layout
from dtckpt.layout.mesh import Mesh

DEFAULT_MAX_MEMORY = 1 << 30


@dataclass(frozen=True, slots=True, eq=False)
class ReshardedTensor:
    """One tensor before and after resharding; bytes are those of its elements on storage."""

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
    """The old tensor's, which the new one has, too; None if the old one has none, or if the stored dtype changes."""


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
    """Return the boxes of a layout as those of one writer; one object for equal arguments, as `plan_save` likes it."""
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
