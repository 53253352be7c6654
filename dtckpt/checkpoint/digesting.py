"""Digests of what a client writes, taken beside the writing: storage is waited for, and cores are idle then."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from dtckpt.format.content import ContentSum
from dtckpt.format.digest import Blocks, digest_chunk
from dtckpt.format.dtypes import DTYPES
from dtckpt.planning.save_plan import TensorPlan

MIN_NBYTES = 1 << 20
"""Smaller chunks are digested at once: handing them to a thread would cost more."""


@dataclass(slots=True, eq=False)
class TensorDigests:
    """Digests of one client's chunks of one tensor, in the order of the chunks.

    Args:
        chunks: Digest by chunk number.
        blocks: Digests of the blocks of chunks that have several.
        content: The chunks' part of the content sum.
    """

    chunks: dict[int, int] = field(default_factory=dict)
    blocks: list[int] = field(default_factory=list)
    content: int = 0


_Found = tuple[int, list[int], int]
_Result = TypeVar("_Result")


class Digesting:
    """Digests of all chunks that a client writes.

    Args:
        thread: Where large chunks are digested; None: in the caller's.
        with_content: Whether to add up the content.
    """

    def __init__(self, thread: ThreadPoolExecutor | None, *, with_content: bool) -> None:
        self._thread = thread
        self._with_content = with_content
        self._found: dict[int, list[tuple[int, _Found | Future[_Found]]]] = {}

    def add(self, position: int, plan: TensorPlan, number: int, elements: np.ndarray[Any, Any]) -> None:
        """Take a chunk; its elements must not change before `results`."""
        is_large = self._thread is not None and elements.nbytes >= MIN_NBYTES
        found = self._thread.submit(self._digest, plan, number, elements) if self._thread and is_large else None
        self._found.setdefault(position, []).append((number, found or self._digest(plan, number, elements)))

    def _digest(self, plan: TensorPlan, number: int, elements: np.ndarray[Any, Any]) -> _Found:
        index, itemsize = plan.grid.index(number), DTYPES[plan.spec.stored_dtype].itemsize
        digest, blocks = digest_chunk(plan.spec.name, index, elements, Blocks.of(plan.grid, itemsize))
        content = ContentSum(plan.grid.shape, itemsize)
        if self._with_content:
            content.add(elements, plan.grid.region(index))
        return digest, blocks, content.total

    def then(self, work: Callable[[], _Result]) -> Callable[[], _Result]:
        """Do more, when all chunks taken so far are digested; what is returned waits for it."""
        return self._thread.submit(work).result if self._thread else work

    def results(self) -> dict[int, TensorDigests]:
        """Return the digests by position of the tensor, once all are known."""
        results: dict[int, TensorDigests] = {}
        for position, chunks in self._found.items():
            result = results[position] = TensorDigests()
            for number, found in chunks:
                digest, blocks, content = found.result() if isinstance(found, Future) else found
                result.chunks[number] = digest
                result.blocks += blocks
                result.content = (result.content + content) % 2**64
        return results


@contextmanager
def digesting(*, beside: bool, with_content: bool) -> Iterator[Digesting]:
    """Begin to digest, ``beside`` the caller's work in a thread or within it."""
    if not beside:
        yield Digesting(None, with_content=with_content)
        return
    with ThreadPoolExecutor(1, thread_name_prefix="dtckpt-digests") as thread:
        try:
            yield Digesting(thread, with_content=with_content)
        except BaseException:
            thread.shutdown(wait=True, cancel_futures=True)
            raise
