"""What is planned of the source of a reshard or a conversion: memory, the parts that were saved, and the windows."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from dtckpt.checkpoint.reading.tensor_info import TensorInfo
from dtckpt.checkpoint.resharding.windows import Units, Windows
from dtckpt.checkpoint.saving.plan import Holding, SavePlan, TensorPlan
from dtckpt.errors import ConfigError
from dtckpt.format.dtypes import DTYPES

MIN_CHUNK_NBYTES = 64 << 10
"""New chunks are not made smaller than this to save memory: a tiny bound is refused, and not planned for hours."""
NUM_WINDOWS = 4
"""Windows in memory at one time; see `Budget`."""


@dataclass(frozen=True, slots=True)
class Budget:
    """The shares of ``max_memory``: one for stored chunks that are read, four for windows of new chunks.

    The four are the window that is being read, the window whose chunks are handed to storage, the window before it,
    whose chunks are being written, and these chunks as they are encoded for storage.

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
