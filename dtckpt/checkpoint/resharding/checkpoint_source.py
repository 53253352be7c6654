"""`CheckpointSource`: the elements of a checkpoint as the source of a save, read ahead in bounded memory.

Each new chunk is made of the old chunks that it intersects. The source fills a window of neighbouring new chunks at
once (`dtckpt.checkpoint.resharding.reshard_plan`), each chunk in separate memory. So an old chunk is read once for each
window and not once for each new chunk.

A thread reads the next window while the chunks of this one are digested, and chunks of earlier windows are written::

    thread of the reader    | window 2 --> | window 3 --> |
    caller (digests)        | window 1 --> | window 2 --> |
    storage (writes)        | window 0 --> | window 1 --> |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from types import MappingProxyType
from typing import Any

import numpy as np

from dtckpt.checkpoint.reading.checkpoint import Checkpoint
from dtckpt.checkpoint.reading.tensor_info import TensorInfo
from dtckpt.checkpoint.resharding.reshard_plan import NUM_WINDOWS, WINDOW_NBYTES, Budget, windows_of
from dtckpt.checkpoint.saving.plan import TensorPlan
from dtckpt.checkpoint.saving.replica_check import Replica
from dtckpt.comm.background_threads import begin
from dtckpt.comm.recycled_memory import RecycledMemory
from dtckpt.format.content import content_digest, content_share
from dtckpt.format.dtypes import DTYPES
from dtckpt.layout.region import Region

BATCH_NBYTES = 64 << 20
"""Bound on the bytes that are written at one time; more would only take memory."""

Progress = Callable[[str, int], None]
"""Called with the tensor's name and the bytes of its new chunks that were handed to storage since the last call."""


_Chunk = tuple[TensorPlan, Region]


@dataclass(frozen=True, slots=True, eq=False)
class _Window:
    """A window of new chunks that was read.

    Args:
        elements: By the tensor's new name and the chunk's region, the elements of the chunks that are not yet fetched,
            in the new dtype.
        shares: The window's shares in the content digests of tensors whose digest is not known yet, by tensor.
    """

    elements: dict[tuple[str, Region], np.ndarray[Any, Any]]
    shares: Mapping[TensorPlan, int]


class CheckpointSource:
    """The elements of a checkpoint as the source of a save, read a window of neighbouring chunks at a time.

    Args:
        checkpoint: The checkpoint to read.
        budget: Bytes of a window, and of the stored chunks that are read at one time.
        progress: See `Progress`.
        old_names: By new name, the old name of the tensors that are renamed.
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
        self._memory = RecycledMemory(NUM_WINDOWS * budget.window)
        # Two batches of writes: the batch that grows, and the batch that is being written.
        self.max_pending_nbytes = 2 * min(budget.window, BATCH_NBYTES)
        self._window = _Window({}, {})
        self._next: Future[_Window] | None = None
        self._expected: Iterator[list[_Chunk]] = iter(())

    def expect(self, regions: Iterator[_Chunk]) -> None:
        """Begin to read the regions that will be fetched, a window ahead of the caller."""
        self._expected = self._cut(regions)
        self._read_ahead()

    def fetch(self, plan: TensorPlan, region: Region) -> np.ndarray[Any, Any]:
        """Return the elements of one new chunk."""
        key = plan.spec.name, region
        if key not in self._window.elements:
            self._take_next()
        if key not in self._window.elements:
            self._window = self._read([(plan, region)])  # the caller asks for another chunk than it announced
        elements = self._window.elements.pop(key)
        if self._progress is not None:
            self._progress(plan.spec.name, region.numel * DTYPES[plan.spec.stored_dtype].itemsize)
        return elements

    def contents(self) -> Mapping[str, int]:
        """Return, by name, the content digests of the tensors that were read, where the plan does not have them."""
        return self._contents

    def copies(self, plan: TensorPlan, region: Region) -> Sequence[Replica]:
        """Return the one copy of a box."""
        return [Replica(self.fetch(plan, region))]

    def close(self) -> None:
        """Wait for the read that is under way; its result is dropped."""
        if self._next is not None:
            self._next.exception()
            self._next = None

    def _cut(self, chunks: Iterator[_Chunk]) -> Iterator[list[_Chunk]]:
        """Cut chunks into windows; small ones of several tensors are read together."""
        batch: list[_Chunk] = []
        nbytes = 0
        for plan, chunks_of_tensor in groupby(chunks, key=itemgetter(0)):
            windows = windows_of(plan, self._info(plan), self._budget)
            for _, window in groupby(chunks_of_tensor, key=lambda chunk: windows.number(_number(*chunk))):
                added = list(window)
                added_nbytes = sum(region.numel for _, region in added) * DTYPES[plan.spec.dtype].itemsize
                if batch and nbytes + added_nbytes > min(WINDOW_NBYTES, self._budget.window):
                    yield batch
                    batch, nbytes = [], 0
                batch += added
                nbytes += added_nbytes
        if batch:
            yield batch

    def _info(self, plan: TensorPlan) -> TensorInfo:
        return self._checkpoint.info(self._old_names.get(plan.spec.name, plan.spec.name))

    def _read_ahead(self) -> None:
        chunks = next(self._expected, None)
        self._next = begin(lambda: self._read(chunks), "dtckpt-read-ahead") if chunks else None

    def _take_next(self) -> None:
        """Go on to the window that was read ahead, and begin to read the one after it."""
        self._window = _Window({}, {})
        if self._next is not None:
            self._window = self._next.result()
            self._note_contents(self._window)
            self._read_ahead()

    def _note_contents(self, window: _Window) -> None:
        # Every window is taken once, so the shares belong to disjoint regions.
        for plan, share in window.shares.items():
            spec, itemsize = plan.spec, DTYPES[plan.spec.dtype].itemsize
            before = self._contents.get(spec.name, content_digest(0, spec.shape, itemsize))
            self._contents[spec.name] = before ^ share

    def _read(self, chunks: Sequence[_Chunk]) -> _Window:
        elements: dict[tuple[str, Region], np.ndarray[Any, Any]] = {}
        requests = []
        for plan, chunks_of_tensor in groupby(chunks, key=itemgetter(0)):
            dtype = DTYPES[plan.spec.dtype]
            buffers = [
                (region, self._memory.take(region.numel * dtype.itemsize).view(dtype).reshape(region.shape))
                for _, region in chunks_of_tensor
            ]
            elements.update(((plan.spec.name, region), buffer) for region, buffer in buffers)
            requests.append((self._info(plan).name, buffers))
        # The reader starts one chunk beyond its bound before it waits for the first.
        self._checkpoint.read_all(requests, max_in_flight=self._budget.reads - self._budget.largest)
        return _Window(elements, _shares(chunks, elements))


def _shares(
    chunks: Sequence[_Chunk], elements: Mapping[tuple[str, Region], np.ndarray[Any, Any]]
) -> Mapping[TensorPlan, int]:
    """Return the shares of chunks in the content digests of the tensors whose digest is not known yet."""
    shares: dict[TensorPlan, int] = {}
    for plan, region in chunks:
        spec = plan.spec
        if spec.content is None and spec.dtype == spec.stored_dtype:
            share = content_share(elements[spec.name, region], spec.shape, region)
            shares[plan] = shares.get(plan, 0) ^ share
    return shares


def _number(plan: TensorPlan, region: Region) -> int:
    """Return the row-major number of the chunk that begins where a region does."""
    steps = zip(region.offset, plan.grid.chunk_shape, strict=True)
    return plan.grid.number(tuple(start // step for start, step in steps))
