"""Digests of what a client writes, taken beside the writing: storage is waited for, and cores are idle then."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from dtckpt.checkpoint.saving.plan import TensorPlan
from dtckpt.comm.background_threads import Pool
from dtckpt.format.content import content_share
from dtckpt.format.digest import Blocks, digest_chunk
from dtckpt.format.dtypes import DTYPES

MIN_NBYTES = 1 << 20
"""Smaller chunks are digested at once: handing them to a thread would cost more."""
WAITING_NBYTES = 32 << 20
"""Elements made for a save that may wait to be digested."""
_NICENESS = 5
"""What is written goes first, so that storage has it early and digests are taken while that is waited for."""


@dataclass(slots=True, eq=False)
class TensorDigests:
    """Digests of one client's chunks of one tensor.

    Args:
        chunks: Digest by chunk number, ascending.
        blocks_of: Digests of the blocks, by number of a chunk that has several.
        content: The chunks' share in the tensor's content.
    """

    chunks: dict[int, int] = field(default_factory=dict)
    blocks_of: dict[int, list[int]] = field(default_factory=dict)
    content: int = 0

    @property
    def blocks(self) -> list[int]:
        """Digests of the blocks of all chunks that have several, in the order of the chunks."""
        return [digest for _, blocks in sorted(self.blocks_of.items()) for digest in blocks]

    def put(self, number: int, found: _Found) -> None:
        """Take the digests of one chunk."""
        self.chunks[number], blocks, content = found
        if blocks:
            self.blocks_of[number] = blocks
        self.content ^= content


_Found = tuple[int, list[int], int]
_Result = TypeVar("_Result")


class Digesting:
    """Digests of all chunks that a client writes.

    Args:
        thread: Where large chunks are digested; None: in the caller's.
        with_content: Whether to digest the content, too.
    """

    def __init__(self, thread: Pool | None, *, with_content: bool) -> None:
        self._thread = thread
        self._with_content = with_content
        self._results: dict[int, TensorDigests] = {}
        self._pending: list[tuple[TensorDigests, int, Future[_Found]]] = []
        self._waiting: deque[tuple[Future[_Found], int]] = deque()
        self._waiting_nbytes = 0
        self._lock = threading.Lock()

    def add(
        self, position: int, plan: TensorPlan, number: int, elements: np.ndarray[Any, Any], *, is_kept: bool = False
    ) -> None:
        """Take a chunk; its elements must not change before `results`. A tensor's chunks come in their order.

        Blocks: On the digests of chunks before, where elements that are not kept (see `TensorStoreWriter.write`) wait.
        """
        result = self._results.get(position) or self._results.setdefault(position, TensorDigests())
        if self._thread is None or elements.nbytes < MIN_NBYTES:
            result.put(number, self._digest(plan, number, elements))
            return
        result.chunks[number] = 0  # keeps the place
        found = self._thread.submit(self._digest, plan, number, elements)
        self._pending.append((result, number, found))
        if not is_kept:
            self._bound(found, elements.nbytes)

    def _bound(self, found: Future[_Found], nbytes: int) -> None:
        """Wait for the oldest, so that not too many bytes stay in memory for their digests alone."""
        self._waiting.append((found, nbytes))
        self._waiting_nbytes += nbytes
        while self._waiting_nbytes > WAITING_NBYTES:
            oldest, nbytes = self._waiting.popleft()
            oldest.result()
            self._waiting_nbytes -= nbytes

    def _digest(self, plan: TensorPlan, number: int, elements: np.ndarray[Any, Any]) -> _Found:
        (index, region), itemsize = plan.grid.chunk(number), DTYPES[plan.spec.stored_dtype].itemsize
        digest, blocks = digest_chunk(plan.spec.name, index, elements, Blocks.of(plan.grid, itemsize))
        return digest, blocks, content_share(elements, plan.grid.shape, region) if self._with_content else 0

    def then(self, work: Callable[[], _Result]) -> Callable[[], _Result]:
        """Do more, when all chunks taken so far are digested; what is returned waits for it."""
        return self._thread.submit(work).result if self._thread else work

    def results(self) -> dict[int, TensorDigests]:
        """Return the digests by position of the tensor, once all are known. Two threads may ask."""
        with self._lock:
            for result, number, found in self._pending:
                result.put(number, found.result())
            self._pending.clear()
        return self._results


@contextmanager
def digesting(*, beside: bool, with_content: bool) -> Iterator[Digesting]:
    """Begin to digest, ``beside`` the caller's work in a thread or within it."""
    if not beside:
        yield Digesting(None, with_content=with_content)
        return
    with Pool(1, "dtckpt-digests", _step_back) as thread:
        try:
            yield Digesting(thread, with_content=with_content)
        except BaseException:
            thread.shutdown(wait=True, cancel_futures=True)
            raise


def _step_back() -> None:
    """Let this thread run when others need not."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)  # on Linux, of one thread
