"""Restores from this machine's files in which the clients of a host read each block once, and hand it on in memory.

If every client reads for itself, each reads and digests every block that has elements for it. If a tensor is split
across its rows, every block has elements for every client. Here each part of a chunk has one *producer*, which reads
and digests the part in a slot of its ring. All clients copy their elements from there (`dtckpt.comm.host_rings`)::

    file          client 0's slots       client 0: ab        client 1: cd
    abcd  ------> abcd  ---------------->          ab                  cd
    efgh          client 1's slots                 ef                  gh
    efgh  ------> efgh  ---------------->

Invariant: all clients assign the same parts to the same producers, because each client plans the reads for the regions
of all clients. Each client lists the tensors that it would read in this way. In the restore's first round it sends the
others a digest of the list and the address of its ring. The clients read in this way only if all of them sent the same
digest from one host, and could open each other's rings.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from dtckpt.checkpoint.leaves import Leaf, own_array
from dtckpt.checkpoint.reading.checkpoint import Checkpoint
from dtckpt.checkpoint.reading.checkpoint_files import RegionBuffers
from dtckpt.checkpoint.reading.manifest_files import ManifestFiles
from dtckpt.checkpoint.reading.plan import plan_tensor_reads
from dtckpt.checkpoint.reading.read_chunks import (
    ChunkRead,
    cut,
    deliver_rows,
    from_span,
    part_digest,
    spans,
    validate_convertible,
)
from dtckpt.checkpoint.reading.verified_reads import COLD_THREADS, RegionReader, spare_threads
from dtckpt.checkpoint.restoring.read_once import mesh_key
from dtckpt.checkpoint.restoring.shared_memory import NamedLeaf
from dtckpt.checkpoint.restoring.shared_rows import MIN_NBYTES, reads_per_byte
from dtckpt.checkpoint.restoring.shared_rows import MIN_READS as MIN_SHARED_READS
from dtckpt.comm.host_rings import MAX_CLIENTS, NUM_SLOTS, SLOT_NBYTES, HostRings, OwnRing, RingAddress
from dtckpt.errors import CheckpointCorruptError, StorageError
from dtckpt.format.digest import bytes_digest
from dtckpt.format.manifest import ArrayEntry
from dtckpt.layout.layout import Layout
from dtckpt.layout.region import Region

MIN_READS = 3.0
"""Fewest reads of each byte, over all clients, for which handing on pays if the page cache has the files. Handing on
took 0.75 of the time for 4 clients that split rows on 2 cores, but 0.9 to 1.1 for 2 clients.
"""
MIN_COLD_READS = 1.5
"""The same for files that come from the disk: it took 0.7 of the time for 4 clients, and 0.77 for 2."""
WARM_SLOTS = 2
"""Slots in use while the page cache has the files. The rings of 4 clients with 8 slots were slower by a quarter."""
MIN_CHUNK_NBYTES = 256 << 10
"""Clients read many smaller chunks at a time, which costs less than handing on each of them."""


class HandedTensor(NamedTuple):
    """A tensor whose parts the clients of its mesh hand on.

    Args:
        name: Its name in the checkpoint.
        leaf: The memory that it is restored to.
        layout: The layout of that memory.
    """

    name: str
    leaf: Leaf
    layout: Layout


@dataclass(frozen=True, slots=True, eq=False)
class HandedOn:
    """The tensors that this client would read together with the other clients of its host.

    Args:
        clients: These clients, this one among them.
        tensors: The tensors, in the order in which they are read.
        ring: This client's ring.
    """

    clients: tuple[int, ...]
    tensors: Sequence[HandedTensor]
    ring: OwnRing

    def facts(self) -> list[Any]:
        """Return this client's message to the others: a digest of the clients and tensors, and the ring's address."""
        listed = [(tensor.name, tensor.layout.sharding_specs, mesh_key(tensor.layout.mesh)) for tensor in self.tensors]
        return [f"{bytes_digest(repr((self.clients, listed)).encode()):016x}", *self.ring.address]

    def agreed(self, facts: Mapping[int, Sequence[Any]], client: int, timeout_s: float) -> HostReads | None:
        """Return the reads if all clients would read the same tensors together, on one host; else None.

        Args:
            facts: The facts of all clients of the restore; empty for clients that would read no tensor so.
            client: This client.
            timeout_s: How long a wait for the others may take, in seconds.
        """
        digests, addresses = set(), {}
        for each in self.clients:
            digest, *address = facts.get(each) or ("", "", 0, 0, 0)
            digests.add(digest)
            addresses[each] = RingAddress(*address)
        if len(digests) > 1 or len({address.host for address in addresses.values()}) > 1:
            return None
        return HostReads(self.tensors, self.clients, client, HostRings(self.ring, addresses, client, timeout_s))


def handed_on(
    checkpoint: Checkpoint, leaves: Sequence[NamedLeaf], stack: ExitStack, *, is_forced: bool
) -> HandedOn | None:
    """Return the tensors that are worth reading in this way, None if there are none.

    Args:
        checkpoint: The checkpoint.
        leaves: The tensors that this client restores.
        stack: Closes the ring.
        is_forced: Whether to read bytes that several clients need only once, even if that may be slower.
    """
    if checkpoint.is_remote or not isinstance(checkpoint.files, ManifestFiles):
        return None
    arrays = checkpoint.files.manifest.arrays
    by_clients: dict[tuple[int, ...], dict[str, HandedTensor]] = {}
    fewest, is_cold = (MIN_SHARED_READS, True) if is_forced else (None, False)
    # By kind of tensor: a model has many similar tensors.
    reads: dict[tuple[Any, ...], float] = {}
    for name, leaf in leaves:
        layout = leaf.layout
        if layout is None or not 1 < layout.mesh.num_clients <= MAX_CLIENTS or not layout.mesh.local_device_ids():
            continue
        entry = arrays[name]
        if not _fits(entry) or any(own_array(memory) is None for memory in leaf.components):
            continue
        if fewest is None:
            is_cold = _is_cold(checkpoint.files.regions, entry, leaf.regions)
            fewest = MIN_COLD_READS if is_cold else MIN_READS * spare_threads()
        kind = entry.grid, entry.stored_dtype, layout
        if kind not in reads:
            pays = is_cold or not _is_read_directly(entry, leaf.regions)
            reads[kind] = reads_per_byte(checkpoint.info(name), layout) if pays else 0.0
        if reads[kind] >= fewest:
            # If one stored tensor has two targets, the second is read separately.
            by_clients.setdefault(tuple(layout.mesh.clients), {}).setdefault(name, HandedTensor(name, leaf, layout))
    if not by_clients:
        return None
    # One set of clients has one set of rings. Most jobs have one set; otherwise take the set with most tensors.
    clients, tensors = max(by_clients.items(), key=lambda item: (len(item[1]), item[0]))
    try:
        ring = OwnRing()
    except OSError:
        return None
    stack.callback(ring.close)
    # In the order of the files, which is the manifest's, as the order of the target's tensors may differ by client.
    return HandedOn(clients, [tensors[name] for name in arrays if name in tensors], ring)


def _is_read_directly(entry: ArrayEntry, wanted: Sequence[Region]) -> bool:
    """Tell whether a client wants whole rows, which it could read straight to their place, without copies."""
    behind = entry.blocks.dim + 1
    return all(region.shape[behind:] == entry.shape[behind:] for region in wanted)


def _is_cold(regions: RegionReader, entry: ArrayEntry, wanted: Sequence[Region]) -> bool:
    """Tell whether the page cache lacks the first part that this client needs of a tensor, as a guess for all parts."""
    part = next(
        (part for region in wanted if not region.is_empty for part in plan_tensor_reads(entry, (region,))), None
    )
    return part is not None and regions.locate(ChunkRead(entry, part, []))


def _fits(entry: ArrayEntry) -> bool:
    """Tell whether a tensor's chunks can be handed on, block by block, at a gain."""
    if entry.stored_nbytes < MIN_NBYTES or not entry.has_readable_blocks:
        return False
    chunk_nbytes = math.prod(entry.grid.chunk_shape) * entry.itemsize
    row_nbytes = chunk_nbytes // math.prod(entry.grid.chunk_shape[: entry.blocks.dim + 1])
    return chunk_nbytes >= MIN_CHUNK_NBYTES and row_nbytes * entry.blocks.rows <= SLOT_NBYTES


@dataclass(frozen=True, slots=True, eq=False)
class HostReads:
    """The tensors that clients of one host have agreed to read together.

    Args:
        tensors: The tensors, the same on all clients.
        clients: The clients.
        client: This client.
        rings: Their rings.
    """

    tensors: Sequence[HandedTensor]
    clients: Sequence[int]
    client: int
    rings: HostRings

    def read(
        self, checkpoint: Checkpoint, buffers: Mapping[str, RegionBuffers], count: Callable[[int], object]
    ) -> None:
        """Read the tensors into the memory of this client, and hand on the parts that this client reads.

        Collective: Over the clients, which have joined their rings.

        Args:
            checkpoint: The checkpoint.
            buffers: For each tensor, the regions of this client, each with its memory.
            count: Called with the bytes of every part that this client read.
        """
        files = checkpoint.files
        assert isinstance(files, ManifestFiles)  # noqa: S101  (of other files nothing is handed on)
        arrays, rings = files.manifest.arrays, self.rings
        reads = (read for name, _, layout in self.tensors for read in _chunk_reads(arrays[name], layout, buffers[name]))
        dealt = _Dealt(reads, self.clients)
        try:
            with ExitStack() as stack:
                producer = _Producer(files.regions, rings, dealt.spans(self.client), count, stack)
                consumers = [_Consumer(rings, each, dealt.spans(each)) for each in self.clients if each != self.client]
                while producer.is_busy or consumers:
                    has_moved = producer.step()
                    for consumer in consumers:
                        has_moved |= consumer.step()
                    consumers = [consumer for consumer in consumers if consumer.is_busy]
                    if has_moved:
                        rings.note_progress()
                    else:
                        rings.wait({*(each.client for each in consumers), *producer.awaited()}, producer.sleep)
        except (CheckpointCorruptError, StorageError) as error:
            raise checkpoint.cause_of(error) from error


_Span = tuple[ChunkRead, int, int]
"""A part of a chunk, and the first row, and the row behind the last, of a span of the part."""


def _chunk_reads(entry: ArrayEntry, layout: Layout, buffers: RegionBuffers) -> Iterator[ChunkRead]:
    """Return the reads of the parts that the regions of any client need, with the targets of this client.

    Raises:
        DTypeError: A buffer has another dtype than the tensor, whose dtype cannot be converted.
    """
    validate_convertible(entry.name, entry.dtype, buffers)
    distinct = dict.fromkeys(layout.region(device, entry.shape) for device in layout.mesh.device_ids)
    regions = tuple(region for region in distinct if not region.is_empty)
    memory = {regions.index(region): array for region, array in buffers}
    for part in plan_tensor_reads(entry, regions):
        uses = tuple(use for use in part.uses if use[0] in memory)
        yield ChunkRead(
            entry, replace(part, uses=uses), [cut(memory[position], of_region) for position, _, of_region in uses]
        )


class _Dealt:
    """Deals reads out to producers: each read to the client that has the fewest bytes so far.

    Args:
        reads: The reads, the same on all clients.
        clients: The clients.
    """

    def __init__(self, reads: Iterator[ChunkRead], clients: Sequence[int]) -> None:
        self._reads = reads
        self._nbytes = dict.fromkeys(clients, 0)
        self._queues: dict[int, deque[ChunkRead]] = {client: deque() for client in clients}

    def spans(self, client: int) -> Iterator[_Span]:
        """Yield the spans that a client produces, in order."""
        queue = self._queues[client]
        while True:
            while not queue:
                read = next(self._reads, None)
                if read is None:
                    return
                owner = min(self._nbytes, key=self._nbytes.__getitem__)
                self._nbytes[owner] += read.part.nbytes
                self._queues[owner].append(read)
            read = queue.popleft()
            for start, stop in spans(read.part):
                yield read, start, stop


class _Consumer:
    """Copies this client's elements out of another client's slots.

    Args:
        rings: The rings.
        client: The other client.
        dealt: The spans that it produces.
    """

    def __init__(self, rings: HostRings, client: int, dealt: Iterator[_Span]) -> None:
        self._rings = rings
        self.client = client
        self._dealt = dealt
        self._span = next(dealt, None)

    @property
    def is_busy(self) -> bool:
        """Whether the client has still to produce spans."""
        return self._span is not None

    def step(self) -> bool:
        """Consume one span, if there is one; return whether there was."""
        if self._span is None:
            return False
        read, start, stop = self._span
        data = self._rings.next_span(self.client, (stop - start) * read.part.rows.row_nbytes)
        if data is None:
            return False
        if read.targets:
            deliver_rows(read, start, stop, from_span(read.entry, read.part, data))
        self._rings.consume(self.client)
        self._span = next(self._dealt, None)
        return True


class _Producer:
    """Reads this client's spans into its slots, publishes them, and copies its elements out of them.

    Args:
        regions: Reads the files.
        rings: The rings.
        dealt: The spans.
        count: Called with the bytes of every part that was read.
        stack: Ends the threads.
    """

    def __init__(
        self,
        regions: RegionReader,
        rings: HostRings,
        dealt: Iterator[_Span],
        count: Callable[[int], object],
        stack: ExitStack,
    ) -> None:
        self._regions = regions
        self._rings = rings
        self._dealt = dealt
        self._count = count
        self._stack = stack
        self._next = next(dealt, None)
        # Slots that are being filled, in order.
        self._taken: deque[tuple[_Span, np.ndarray[Any, Any], Future[list[int]] | None]] = deque()
        self._digests: list[int] = []
        self._depth = self._spare = spare_threads()
        self._located: ChunkRead | None = None
        self._pool: ThreadPoolExecutor | None = None

    @property
    def is_busy(self) -> bool:
        """Whether spans are still to be published."""
        return self._next is not None or bool(self._taken)

    def awaited(self) -> list[int]:
        """Return the slow clients for which this client waits before it can fill a slot."""
        return self._rings.slow_consumers() if self._next is not None and not self._taken else []

    def step(self) -> bool:
        """Begin to fill free slots, and publish the oldest full slot; return whether there was work."""
        has_moved = False
        while self._next is not None and (memory := self._take(self._next)) is not None:
            load = None
            if self._depth > 1:
                if self._pool is None:
                    pool = ThreadPoolExecutor(max(self._spare, COLD_THREADS), "dtckpt-reads")
                    self._pool = self._stack.enter_context(pool)
                load = self._pool.submit(self._regions.load_span, *self._next, memory)
            self._taken.append((self._next, memory, load))
            self._next = next(self._dealt, None)
            has_moved = True
        if not self._taken:
            return has_moved
        span, memory, load = self._taken[0]
        if load is not None and not load.done():
            return has_moved
        digests = self._regions.load_span(*span, memory) if load is None else load.result()
        self._taken.popleft()
        self._finish(span, memory, digests)
        return True

    def sleep(self, seconds: float) -> bool:
        """Wait until the oldest slot is full, for so long at most; return False if no thread fills a slot."""
        load = self._taken[0][2] if self._taken else None
        if load is None:
            return False
        futures.wait([load], seconds)
        return True

    def _take(self, span: _Span) -> np.ndarray[Any, np.dtype[np.uint8]] | None:
        """Take a slot for a span; None if no slot is free, or if enough slots are being filled."""
        read, start, stop = span
        rows = read.part.rows
        if self._located is not read:
            is_cold = self._regions.locate(read)
            self._located, self._depth = read, max(self._spare, COLD_THREADS) if is_cold else self._spare
        if len(self._taken) >= self._depth:
            return None
        position = rows.start + start * rows.row_nbytes + (read.value.start if read.value is not None else 0)
        # From the disk, fill many slots at a time; from the page cache one, while others copy the slot before.
        limit = NUM_SLOTS if self._depth > 1 else WARM_SLOTS
        return self._rings.take_slot((stop - start) * rows.row_nbytes, position, limit)

    def _finish(self, span: _Span, memory: np.ndarray[Any, np.dtype[np.uint8]], digests: list[int]) -> None:
        """Verify a part with its last span, and hand the span on."""
        read, start, stop = span
        part = read.part
        self._digests += digests
        if stop == part.rows.count:
            self._regions.validate(read, *part_digest(read.entry, part, self._digests))
            self._digests = []
            self._count(part.nbytes)
            read.value = None  # this closes a file that no other read needs
        self._rings.publish()
        if read.targets:
            deliver_rows(read, start, stop, from_span(read.entry, part, memory))
