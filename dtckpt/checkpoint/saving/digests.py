"""Digest the chunks that a client writes, in threads beside the writing: while storage works, cores are idle."""

from __future__ import annotations

import math
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np

from dtckpt.checkpoint.saving.plan import TensorPlan
from dtckpt.comm.background_threads import Pool
from dtckpt.format.content import content_share
from dtckpt.format.digest import Blocks, identify_chunk
from dtckpt.format.dtypes import DTYPES
from dtckpt.layout.region import Region

MIN_NBYTES = 1 << 20
"""Smaller chunks are digested in the writing thread: to hand them to another thread would cost more."""
WAITING_NBYTES = 32 << 20
"""Bound on the bytes of elements made for a save that wait to be digested."""
GATHERED_NBYTES = 128 << 10
"""A tensor of at most so many bytes is put together from its chunks before its content is digested, if the rows of
chunks are shorter than the tensor's rows. A call for each chunk would take longer than its elements."""
_NUM_THREADS = 2
"""One thread alone, at its low priority, has digests left when storage is done: without fsync that took a fifth of a
save."""
_NICENESS = 5
"""Of the digests' threads: writing goes first, so that storage gets the chunks early, and digests fill its waits."""


class ChunkDigests(NamedTuple):
    """The digests of one chunk; see `dtckpt.format.digest` and `dtckpt.format.content`.

    Args:
        digest: The chunk's digest.
        blocks: The digests of its blocks, if it has several.
        identity: Its identity.
        content: Its share in the tensor's content.
    """

    digest: int
    blocks: list[int]
    identity: int
    content: int = 0

    @classmethod
    def of(
        cls,
        plan: TensorPlan,
        number: int,
        elements: np.ndarray[Any, Any],
        *,
        with_content: bool,
        saved: SavedChunk | None = None,
    ) -> ChunkDigests:
        """Digest the elements of a chunk, in the stored dtype.

        Args:
            plan: The tensor's plan.
            number: Number of the chunk.
            elements: The elements.
            with_content: Whether to digest the content.
            saved: A saved chunk of this tensor and place. If it is equal, its share is this chunk's.
        """
        (index, region), itemsize = plan.grid.chunk(number), DTYPES[plan.spec.stored_dtype].itemsize
        found = cls(*identify_chunk(plan.spec.name, index, elements, Blocks.of(plan.grid, itemsize)))
        if not with_content:
            return found
        if saved is not None and saved.share is not None and saved.is_equal(found):
            return found._replace(content=saved.share)
        return found._replace(content=content_share(elements, plan.grid.shape, region))


class SavedChunk(NamedTuple):
    """The digests of a chunk of an earlier checkpoint.

    Args:
        digest: Its digest.
        identity: Its identity.
        share: Its share in the tensor's content; None if it is not known.
    """

    digest: int
    identity: int
    share: int | None

    def is_equal(self, other: ChunkDigests) -> bool:
        """Whether a chunk of the same tensor and place has the same elements: 128 bits of their digests agree."""
        return (self.digest, self.identity) == (other.digest, other.identity)


@dataclass(slots=True, eq=False)
class TensorDigests:
    """Digests of one client's chunks of one tensor.

    Args:
        chunks: Digest by chunk number, ascending.
        identities: Identity by chunk number, in the same order.
        blocks_of: Digests of the blocks, by number of a chunk that has several.
        shares: The chunks' shares in the tensor's content, by number, in the same order; 0 where they are digested as
            one (`is_gathered`).
        content: The chunks' share in the tensor's content.
    """

    chunks: dict[int, int] = field(default_factory=dict)
    identities: dict[int, int] = field(default_factory=dict)
    shares: dict[int, int] = field(default_factory=dict)
    blocks_of: dict[int, list[int]] = field(default_factory=dict)
    content: int = 0

    @property
    def blocks(self) -> list[int]:
        """Digests of the blocks of all chunks that have several, in the order of the chunks."""
        return [digest for _, blocks in sorted(self.blocks_of.items()) for digest in blocks]

    def put(self, number: int, digests: ChunkDigests) -> None:
        """Add the digests of one chunk."""
        self.chunks[number], self.identities[number] = digests.digest, digests.identity
        self.shares[number] = digests.content
        if digests.blocks:
            self.blocks_of[number] = digests.blocks
        self.content ^= digests.content


@dataclass(slots=True, eq=False)
class _Gathered:
    """A small tensor whose chunks are put together; elements that did not come are zero, which adds nothing."""

    position: int
    elements: np.ndarray[Any, Any]

    @property
    def content(self) -> int:
        """The share of the elements that came in the tensor's content digest."""
        return content_share(self.elements, self.elements.shape, Region.full(self.elements.shape))


_Result = TypeVar("_Result")


class ChunkDigester:
    """Digests all chunks that a client writes, and their content.

    Args:
        threads: The pool that digests large chunks; None: the caller's thread digests all.
        with_content: Whether to digest the content, too.
    """

    def __init__(self, threads: Pool | None, *, with_content: bool) -> None:
        self._threads = threads
        self._with_content = with_content
        self._results: dict[int, TensorDigests] = {}
        self._pending: list[tuple[TensorDigests, int, Future[ChunkDigests]]] = []
        self._waiting: deque[tuple[Future[ChunkDigests], int]] = deque()
        self._waiting_nbytes = 0
        self._gathered: _Gathered | None = None
        self._lock = threading.Lock()

    def add(
        self, position: int, plan: TensorPlan, number: int, elements: np.ndarray[Any, Any], *, is_kept: bool = False
    ) -> None:
        """Begin to digest a chunk. A tensor's chunks must come in their order.

        Blocks: On earlier chunks, if too many bytes of elements that are not kept wait for their digests.

        Args:
            position: Index of the tensor in the plan.
            plan: The tensor's plan.
            number: Number of the chunk.
            elements: The chunk's elements, in the stored dtype; they must not change before `results` returns.
            is_kept: Whether the elements stay in memory in any case; see `TensorStoreWriter.write`.
        """
        result = self._results.get(position) or self._results.setdefault(position, TensorDigests())
        if self._threads is None or elements.nbytes < MIN_NBYTES:
            gathers = self._with_content and is_gathered(plan)
            with_content = self._with_content and not gathers
            result.put(number, ChunkDigests.of(plan, number, elements, with_content=with_content))
            if gathers:
                self._gather(position, plan, number, elements)
            return
        # In their order, whatever the order of the results.
        result.chunks[number] = result.identities[number] = result.shares[number] = 0
        future = self._threads.submit(ChunkDigests.of, plan, number, elements, with_content=self._with_content)
        self._pending.append((result, number, future))
        if not is_kept:
            self._bound(future, elements.nbytes)

    def put(self, position: int, number: int, digests: ChunkDigests) -> None:
        """Add the digests of a chunk that was digested before; as `add`, in the order of the chunks."""
        self._results.setdefault(position, TensorDigests()).put(number, digests)

    def _bound(self, future: Future[ChunkDigests], nbytes: int) -> None:
        """Wait for the oldest digests, so that not too many bytes stay in memory for their digests alone."""
        self._waiting.append((future, nbytes))
        self._waiting_nbytes += nbytes
        while self._waiting_nbytes > WAITING_NBYTES:
            oldest, nbytes = self._waiting.popleft()
            oldest.result()
            self._waiting_nbytes -= nbytes

    def _gather(self, position: int, plan: TensorPlan, number: int, elements: np.ndarray[Any, Any]) -> None:
        if self._gathered is None or self._gathered.position != position:
            self._digest_gathered()
            self._gathered = _Gathered(position, np.zeros(plan.grid.shape, elements.dtype))
        self._gathered.elements[plan.grid.chunk(number)[1].slices()] = elements

    def _digest_gathered(self) -> None:
        gathered, self._gathered = self._gathered, None
        if gathered is not None:
            self._results[gathered.position].content ^= gathered.content

    def then(self, work: Callable[[], _Result]) -> Callable[[], _Result]:
        """Run work after all chunks that were added so far; return a function that waits for its result."""
        return self._threads.submit(work).result if self._threads else work

    def results(self) -> dict[int, TensorDigests]:
        """Wait for all digests, and return them by index of the tensor. Thread-safe."""
        with self._lock:
            for result, number, future in self._pending:
                result.put(number, future.result())
            self._pending.clear()
            self._digest_gathered()
        return self._results


def is_gathered(plan: TensorPlan) -> bool:
    """Whether a tensor's content is digested once for all its chunks; see `GATHERED_NBYTES`."""
    grid = plan.grid
    is_cut = grid.chunk_shape[1:] != grid.shape[1:]
    return is_cut and math.prod(grid.shape) * DTYPES[plan.spec.stored_dtype].itemsize <= GATHERED_NBYTES


@contextmanager
def chunk_digester(*, has_threads: bool, with_content: bool) -> Iterator[ChunkDigester]:
    """Open a digester, for a context. With ``has_threads`` it digests large chunks in separate threads."""
    if not has_threads:
        yield ChunkDigester(None, with_content=with_content)
        return
    with Pool(_NUM_THREADS, "dtckpt-digests", _step_back) as threads:
        try:
            yield ChunkDigester(threads, with_content=with_content)
        except BaseException:
            threads.shutdown(wait=True, cancel_futures=True)
            raise


def _step_back() -> None:
    """Give this thread a lower priority than the others of the process."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)  # on Linux, of one thread
