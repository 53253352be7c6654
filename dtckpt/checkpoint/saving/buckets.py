"""Bounded staging: elements are copied when the writer asks for them, and a bounded number of bytes wait for storage.

The call of `save_async` returns when the last element is copied. Until then its caller cannot change a tensor, so the
checkpoint holds the values of one moment, as with staging memory for all of them. The price is time: the call lasts
about as long as the write of all but the last ``nbytes`` bytes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from dtckpt.checkpoint.leaves import host_array, is_elsewhere
from dtckpt.checkpoint.saving.plan import SavePlan, TensorPlan
from dtckpt.checkpoint.saving.replica_check import Copy, part_digests, shared_boxes, written_as_held
from dtckpt.checkpoint.saving.state import MemorySource, State
from dtckpt.errors import CheckpointError, SliceError
from dtckpt.layout.region import Region

Noted = Mapping[tuple[str, Region], Sequence[Copy]]


class BucketSource:
    """Elements of tensors in memory, each copied when it is fetched.

    Args:
        memory: The tensors.
        noted: By tensor name and box, the digests of all copies of the boxes that are compared.
        nbytes: Bound on the bytes of copies that wait to be written.
    """

    def __init__(self, memory: MemorySource, noted: Noted, nbytes: int) -> None:
        self.max_pending_nbytes = nbytes
        self._memory = memory
        self._noted = noted
        self._num_expected: int | None = None
        self._lock = threading.Lock()
        self._is_closed = False
        self._is_copied = threading.Event()

    def wait(self) -> None:
        """Wait until all elements are copied, or `end` was called.

        If the wait is interrupted, the caller's tensors may change at any time, so the save fails.
        """
        try:
            self._is_copied.wait()
        except BaseException:
            with self._lock:
                self._is_closed = True
            raise

    def end(self) -> None:
        """Note that nothing more will be fetched."""
        self._is_copied.set()

    def expect(self, regions: Iterator[tuple[TensorPlan, Region]]) -> None:
        """As `Source.expect`: these regions are the last ones to be fetched."""
        self._num_expected = sum(1 for _ in regions)
        if not self._num_expected:
            self.end()

    def fetch(self, plan: TensorPlan, region: Region) -> np.ndarray[Any, Any]:
        """As `Source.fetch`: a copy."""
        with self._lock:
            if self._is_closed:
                raise CheckpointError("the call of save_async was interrupted while it copied the state; save again")
            elements = self._copy(plan.spec.name, region)
        if self._num_expected is not None:
            self._num_expected -= 1
            if not self._num_expected:
                self.end()
        return elements

    def _copy(self, name: str, region: Region) -> np.ndarray[Any, Any]:
        for box, copies in self._memory.parts(name):
            if box.contains(region):
                # Of a tensor on a card only this region goes to the host.
                view = copies[0].detach()[region.relative_to(box).slices()]
                elements = host_array(view)
                return elements if is_elsewhere(view) else elements.copy()
        raise SliceError(f"this client does not hold {region} of tensor {name!r}")

    def copies(self, plan: TensorPlan, region: Region) -> Sequence[Copy]:
        """As `Source.copies`."""
        return self._noted.get((plan.spec.name, region), (Copy(None),))


def stage_in_buckets(state: State, plan: SavePlan, client: int, *, with_copies: bool, nbytes: int) -> State:
    """Prepare to copy the elements that a client will write; with ``with_copies``, digest every copy of a value.

    Blocks: On the digests; for tensors on a card, on the work that the current stream has still to do.

    Args:
        state: The state to be saved.
        plan: The plan of the save.
        client: This client.
        with_copies: Whether the save compares replicas.
        nbytes: Bound on the bytes of copies that wait to be written.

    Returns:
        The state, whose source is a `BucketSource`; the given one if its elements do not come from memory.
    """
    memory = state.source
    if not isinstance(memory, MemorySource):
        return state
    memory.synchronize()
    noted: dict[tuple[str, Region], list[Copy]] = {}
    for item, shared in zip(plan.tensors, shared_boxes(plan, client), strict=True):
        but = written_as_held(item, client)
        for box, copies in memory.parts(item.spec.name):
            if with_copies and (box in shared or len(copies) > 1):
                # Of the first copy, the chunks that this client writes are digested at the write.
                noted[item.spec.name, box] = [
                    Copy(None, part_digests(item, box, host_array(copy.detach()), but=frozenset() if number else but))
                    for number, copy in enumerate(copies)
                ]
    return replace(state, source=BucketSource(memory, noted, nbytes))
