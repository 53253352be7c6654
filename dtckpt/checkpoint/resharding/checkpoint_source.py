"""`CheckpointSource`: the elements of a checkpoint as the source of a save, read ahead in bounded memory.

Each new chunk is made of the old chunks that it intersects. The source fills a block of neighbouring new chunks at
once, so that an old chunk is read once for each block and not once for each new chunk::

    old chunks (rows)      new chunks (columns)      a block: as many neighbouring new chunks as memory allows
    |aaaaaaaa|             |a|b|c|d|                 |####|...|
    |bbbbbbbb|             | | | | |                 |####|...|   reads every old chunk once

A thread reads the next block while the chunks of this one are digested, and those of the block before are written::

    thread of the reader    | block 2 ---> | block 3 ---> |
    caller (digests)        | block 1 ---> | block 2 ---> |
    storage (writes)        | block 0 ---> | block 1 ---> |
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from dtckpt.checkpoint.reading.checkpoint import Checkpoint
from dtckpt.checkpoint.reading.tensor_info import TensorInfo
from dtckpt.checkpoint.saving.plan import Holding, SavePlan, TensorPlan
from dtckpt.checkpoint.saving.replica_check import Copy
from dtckpt.comm import host_memory
from dtckpt.comm.background_threads import begin
from dtckpt.errors import ConfigError
from dtckpt.format.content import content_digest, content_share
from dtckpt.format.dtypes import DTYPES
from dtckpt.layout.region import Region

MIN_CHUNK_NBYTES = 64 << 10
"""New chunks are not made smaller than this to save memory: a tiny bound is refused, and not planned for hours."""
NUM_BLOCKS = 4
"""Blocks in memory at one time; see `Budget`."""

Progress = Callable[[str, int], None]
"""Called with the tensor's name and the bytes of its new chunks that were handed to storage since the last call."""


@dataclass(frozen=True, slots=True)
class Budget:
    """The shares of ``max_memory``: one for stored chunks that are read, four for blocks of new chunks.

    The four are the block that is being read, the block whose chunks are handed to storage, the block before it, whose
    chunks are being written, and these chunks as they are encoded for storage.

    Args:
        largest: Bytes of the largest stored chunk; its verification may need all of it, even if a part is wanted.
        reads: Bytes of stored chunks in memory at one time.
        block: Bytes of a block.
    """

    largest: int
    reads: int
    block: int

    @classmethod
    def of(cls, checkpoint: Checkpoint, max_memory: int) -> Budget:
        """Divide ``max_memory`` bytes."""
        largest = max((info.max_chunk_nbytes for info in checkpoint.tensors.values()), default=0)
        # At least the largest stored chunk; `validate_memory` refuses a bound that leaves too little for the rest.
        reads = max(largest, max_memory // 8)
        return cls(largest, reads, max(1, (max_memory - reads) // NUM_BLOCKS))


def validate_memory(plan: SavePlan, budget: Budget, max_memory: int) -> None:
    """Refuse a bound that the largest chunks alone exceed."""
    sizes = (
        (math.prod(item.grid.chunk_shape) * DTYPES[item.spec.dtype].itemsize, item.spec.name) for item in plan.tensors
    )
    largest, name = max(sizes, default=(0, ""))
    # A block has at least one chunk.
    needed = budget.largest + NUM_BLOCKS * largest
    if needed > max_memory:
        raise ConfigError(
            f"max_memory is too small; got {max_memory} bytes, expected at least {needed}: a stored chunk of "
            f"{budget.largest} bytes, and {NUM_BLOCKS} new ones of tensor {name!r}"
        )


def saved_only(boxes: Sequence[Holding], info: TensorInfo) -> tuple[Holding, ...]:
    """Return the boxes without the elements that were not saved, for a tensor that was saved in part."""
    if info.is_whole:
        return tuple(boxes)
    parts = (
        Holding(part, box.clients)
        for box in boxes
        for chunk in info.chunks
        if (part := box.region.intersect(chunk.region))
    )
    return tuple(parts)


@dataclass(frozen=True, slots=True, eq=False)
class _Block:
    """A block of new chunks, and its elements in the new dtype.

    Args:
        name: The tensor's new name.
        region: The block's box.
        elements: Its elements.
        share: Its share in the tensor's content digest, if nobody knows that digest yet.
    """

    name: str
    region: Region
    elements: np.ndarray[Any, Any]
    share: int | None

    def contains(self, name: str, region: Region) -> bool:
        return self.name == name and self.region.contains(region)


class CheckpointSource:
    """The elements of a checkpoint as the source of a save, read a block of neighbouring chunks at a time.

    Args:
        checkpoint: The checkpoint to read.
        budget: Bytes of a block, and of the stored chunks that are read at one time.
        progress: See `Progress`.
        old_names: By new name, the old one, of the tensors that are renamed.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        budget: Budget,
        progress: Progress | None,
        old_names: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._checkpoint = checkpoint
        self._budget = budget
        self._progress = progress
        self._old_names = old_names
        self._contents: dict[str, int] = {}
        self._memory = _RecycledMemory(budget.block)
        # Two batches of writes: the block that is handed over, and the one that is being written.
        self.max_pending_nbytes = 2 * budget.block
        self._block: _Block | None = None
        self._next: Future[_Block | None] | None = None
        self._expected: Iterator[tuple[TensorPlan, Region]] = iter(())

    def expect(self, regions: Iterator[tuple[TensorPlan, Region]]) -> None:
        """Begin to read the regions that will be fetched, a block ahead of the caller."""
        self._expected = regions
        self._next = begin(lambda: self._read_next(None), "dtckpt-read-ahead")

    def fetch(self, plan: TensorPlan, region: Region) -> np.ndarray[Any, Any]:
        """Return the elements of one new chunk."""
        name = plan.spec.name
        if self._block is None or not self._block.contains(name, region):
            self._block = None  # chunks of it may still wait to be written; then they keep its memory
            self._block = self._take_next(plan, region)
            self._note_content(plan, self._block)
        if self._progress is not None:
            self._progress(name, region.numel * DTYPES[plan.spec.stored_dtype].itemsize)
        block = self._block
        return block.elements[region.relative_to(block.region).slices()] if region.ndim else block.elements

    def _note_content(self, plan: TensorPlan, block: _Block) -> None:
        if block.share is not None:
            spec, itemsize = plan.spec, block.elements.itemsize
            # Every block is taken once, so the shares are those of disjoint regions.
            before = self._contents.get(spec.name, content_digest(0, spec.shape, itemsize))
            self._contents[spec.name] = before ^ block.share

    def contents(self) -> Mapping[str, int]:
        """Return, by name, the content digests of what was read, where the plan does not have them."""
        return self._contents

    def copies(self, plan: TensorPlan, region: Region) -> Sequence[Copy]:
        """Return the one copy of a box."""
        return [Copy(self.fetch(plan, region))]

    def close(self) -> None:
        """Wait for the read that is under way; its result is dropped."""
        if self._next is not None:
            self._next.exception()
            self._next = None

    def _take_next(self, plan: TensorPlan, region: Region) -> _Block:
        """Return the block that was read ahead, and begin to read the one after it."""
        block = self._next.result() if self._next is not None else None
        self._next = None
        if block is None or not block.contains(plan.spec.name, region):
            return self._read(plan, region)  # not what was expected
        self._next = begin(lambda: self._read_next(block), "dtckpt-read-ahead")
        return block

    def _read_next(self, before: _Block | None) -> _Block | None:
        """Read the block of the next expected region that is not in the block before; None if there is none."""
        for plan, region in self._expected:
            if before is None or not before.contains(plan.spec.name, region):
                return self._read(plan, region)
        return None

    def _read(self, plan: TensorPlan, region: Region) -> _Block:
        spec, dtype = plan.spec, DTYPES[plan.spec.dtype]
        name = self._old_names.get(spec.name, spec.name)
        box = block_of(plan, region, self._budget.block, self._checkpoint.info(name).chunk_shape)
        elements = self._memory.take(math.prod(box.shape) * dtype.itemsize).view(dtype).reshape(box.shape)
        # The reader starts one chunk beyond its bound before it waits for the first.
        in_flight = self._budget.reads - self._budget.largest
        self._checkpoint.read_into(name, box, elements, max_in_flight=in_flight)
        is_new = spec.content is None and spec.dtype == spec.stored_dtype
        return _Block(spec.name, box, elements, content_share(elements, spec.shape, box) if is_new else None)


class _RecycledMemory:
    """Memory of blocks, used again when the last view of a block is gone: new memory costs a page fault per page.

    Args:
        nbytes: Bytes of a block; a larger one has memory of its own size.
    """

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._free: list[torch.Tensor] = []

    def take(self, nbytes: int) -> np.ndarray[Any, Any]:
        """Return uninitialized bytes. Their memory comes back when no array refers to it any more."""
        memory = self._free.pop() if self._free else None
        if memory is None or memory.numel() < nbytes:
            memory = None  # freed before the other is taken
            memory = host_memory.allocate((max(nbytes, self._nbytes),), torch.uint8)
        loan = _Loan(memory.numpy())
        weakref.finalize(loan, self._free.append, memory).atexit = False
        return np.asarray(loan)[:nbytes]


class _Loan:
    """What arrays of lent memory refer to as their base: it lives as long as one of them."""

    def __init__(self, memory: np.ndarray[Any, Any]) -> None:
        self.__array_interface__ = memory.__array_interface__


def block_of(plan: TensorPlan, region: Region, max_nbytes: int, old_chunk_shape: Sequence[int]) -> Region:
    """Return the box of whole new chunks that begins with ``region``, in row-major order, and fits ``max_nbytes``.

    It grows from the last dim to the first, so that a walk over the chunks in row-major order enters each block once.
    Where it ends inside a dim, it ends with an old chunk if it can, so that no old chunk is read for two blocks.

    Args:
        plan: The new tensor.
        region: The first new chunk.
        max_nbytes: Bound on the bytes of the block; a single chunk may exceed it.
        old_chunk_shape: The shape of the old chunks.
    """
    # A larger box could reach over chunks that were never saved.
    if plan.missing:
        return region
    offset, shape = list(region.offset), list(region.shape)
    itemsize = DTYPES[plan.spec.dtype].itemsize
    for dim in reversed(range(region.ndim)):
        size, chunk = plan.grid.shape[dim], plan.grid.chunk_shape[dim]
        line = itemsize * math.prod(shape[:dim] + shape[dim + 1 :])
        fitting = max(shape[dim], max_nbytes // max(1, line) // chunk * chunk)
        if fitting < size:
            common = math.lcm(chunk, max(1, old_chunk_shape[dim]))
            fitting = fitting // common * common or fitting
        if offset[dim] == 0 or fitting < size:
            shape[dim] = min(fitting, size - offset[dim])
        # A box that goes on in an outer dim must be whole in all inner ones; else the walk would come back to it.
        if shape[dim] < size:
            break
    return Region(tuple(offset), tuple(shape))
