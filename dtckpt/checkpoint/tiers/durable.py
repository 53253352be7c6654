"""Write steps of the local tier to the root, in the background, while training and local saves go on.

For that the clients form a second job beside the first: a durable write takes long, and its barriers must not mix with
the barriers of local saves meanwhile. One write at a time is under way; client 0 decides at each local save whether to
begin one.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np
from typing_extensions import override

from dtckpt.checkpoint.options import SaveOptions
from dtckpt.checkpoint.parts.part_files import PartCheckpoint
from dtckpt.checkpoint.parts.records import HostInfo
from dtckpt.checkpoint.saving.plan import Holding, TensorPlan, TensorSpec
from dtckpt.checkpoint.saving.replica_check import Replica
from dtckpt.checkpoint.saving.report import SaveReport
from dtckpt.checkpoint.saving.save import SaveAttempt
from dtckpt.checkpoint.saving.save_handle import SaveHandle
from dtckpt.checkpoint.saving.state import State
from dtckpt.checkpoint.saving.stored_dtypes import StoredDtypes
from dtckpt.checkpoint.saving.write import Source
from dtckpt.checkpoint.tiers.holdings import HeldSave
from dtckpt.coordination.api import Coordination
from dtckpt.coordination.barrier_texts import DURABLE
from dtckpt.coordination.connect import connect_beside
from dtckpt.format.codecs import NO_CODEC
from dtckpt.format.dtypes import DTYPES
from dtckpt.format.tree_union import value_paths
from dtckpt.layout.region import Region
from dtckpt.storage.location import Location


class DurableWriter:
    """Writes one step after the other to the root.

    Args:
        max_rate: Bound on the bytes per second of this client.
    """

    def __init__(self, max_rate: float | None) -> None:
        self._max_rate = max_rate
        self.life = ""
        """Part of the second job's name, equal on all clients; each time that the clients join, they form a new job."""
        self.handle: SaveHandle | None = None
        """The latest write."""
        self.is_busy = False
        """Whether a write is under way, or the removals that follow it."""
        self._coordination: Coordination | None = None
        self._lock = threading.Lock()

    def wait(self) -> None:
        """Wait until no write is under way."""
        if self.handle is not None:
            self.handle.wait()

    def start(
        self,
        path: Location,
        step: int,
        collect: Callable[[], State],
        options: SaveOptions,
        *,
        extra_files: Mapping[str, bytes],
        then: Callable[[SaveHandle], object],
        base: Location | None = None,
    ) -> SaveHandle:
        """Begin to write a step. Collective: over all clients, in the background; barriers as in `dtckpt.save`.

        Args:
            path: Where the checkpoint will be.
            step: The step.
            collect: Returns this client's description of the state; runs in the background.
            options: The options of the save.
            extra_files: Files, by name, that the leader adds; ``collect`` may still change them.
            then: Called in the background when the write has ended, with success or not.
            base: As for `dtckpt.save`.
        """
        with self._lock:
            if self._coordination is None:
                self._coordination = connect_beside(f"{DURABLE}{self.life}")

        def collect_at_rate() -> State:
            state = collect()
            return (
                state
                if self._max_rate is None
                else replace(state, source=RateLimitedSource(state.source, self._max_rate))
            )

        attempt = SaveAttempt(
            path,
            collect_at_rate,
            options,
            self._coordination,
            extra_files=extra_files,
            step=step,
            follow_link=False,
            base=base,
        )

        def write() -> SaveReport:
            with attempt.collective.process_lock():
                return attempt.begin().complete()

        def after(ended: SaveHandle) -> None:
            try:
                then(ended)
            finally:
                # Another client may be ahead, so the next write may have begun here, too.
                self.is_busy = self.handle is not ended

        self.handle = handle = SaveHandle(path, attempt.collective.phases, timeout_s=options.timeout_s, blocking_s=0.0)
        self.is_busy = True
        handle.launch(write, ExitStack(), after)
        return handle

    def close(self) -> None:
        """Leave the job of the durable writes, when the latest has ended."""
        self.wait()
        with self._lock:
            coordination, self._coordination = self._coordination, None
        if coordination is not None:
            coordination.leave()


class RateLimitedSource(Source):
    """Elements that are fetched no faster than at a rate.

    Args:
        source: Where they come from.
        max_rate: Bytes per second.
        clock: Returns seconds.
        sleep: Waits so many seconds.
    """

    def __init__(
        self,
        source: Source,
        max_rate: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._source, self._max_rate, self._clock, self._sleep = source, max_rate, clock, sleep
        self._free_at: float | None = None

    @property
    @override
    def max_pending_nbytes(self) -> int | None:
        return self._source.max_pending_nbytes

    @override
    def expect(self, regions: Iterator[tuple[TensorPlan, Region]]) -> None:
        self._source.expect(regions)

    @override
    def fetch(self, plan: TensorPlan, region: Region) -> np.ndarray[Any, Any]:
        # Wait until the bytes before these could have been written at the rate.
        now = self._clock()
        self._free_at = now if self._free_at is None else max(now, self._free_at)
        self._sleep(self._free_at - now)
        elements = self._source.fetch(plan, region)
        self._free_at += elements.nbytes / self._max_rate
        return elements

    @override
    def copies(self, plan: TensorPlan, region: Region) -> Sequence[Replica]:
        return self._source.copies(plan, region)


class TierSource:
    """Elements of a local save, for a write that continues the write of another process.

    Args:
        checkpoint: The save, open.
    """

    max_pending_nbytes = 64 << 20

    def __init__(self, checkpoint: PartCheckpoint) -> None:
        self._checkpoint = checkpoint

    def expect(self, regions: Iterator[tuple[TensorPlan, Region]]) -> None:
        """Nothing to prepare: most elements are in this host's memory."""

    def fetch(self, plan: TensorPlan, region: Region) -> np.ndarray[Any, Any]:
        """Return the elements of a region."""
        elements = np.empty(region.shape, DTYPES[plan.spec.dtype])
        self._checkpoint.read_into(plan.spec.name, region, elements)
        return elements

    def copies(self, plan: TensorPlan, region: Region) -> Sequence[Replica]:
        """Return the one copy that there is."""
        return [Replica(self.fetch(plan, region))]


def state_of_save(
    checkpoint: PartCheckpoint, held: HeldSave, hosts: Mapping[str, HostInfo], options: SaveOptions
) -> State:
    """Describe a local save as the state that a save writes; the same on all clients but for the source.

    A client of a host that holds a piece writes this piece; another client may have saved it.
    """
    files = checkpoint.parts
    writers: dict[int, int] = {}
    loads: defaultdict[int, int] = defaultdict(int)
    for client, holders in sorted(held.holders.items()):
        candidates = [each for host in holders if host in hosts for each in hosts[host].clients] or [0]
        writers[client] = min(candidates, key=lambda each: (loads[each], each))
        # Without near copies, because only their own host knows them: all clients choose the same writers.
        loads[writers[client]] += files.indexes[client].without_copies().nbytes
    rules = StoredDtypes(options)
    specs = tuple(
        TensorSpec(
            name,
            tensor.shape,
            tensor.dtype,
            rules.choose(name, tensor.dtype, save_as_bf16=False),
            tuple(Holding(piece.region, (writers[int(piece.file)],)) for piece in tensor.pieces),
            tensor.layout,
            codec=options.codec or NO_CODEC,
        )
        for name, tensor in sorted(files.index.tensors.items())
    )
    return State(specs, TierSource(checkpoint), files.tree, tuple(value_paths(files.structure)))
