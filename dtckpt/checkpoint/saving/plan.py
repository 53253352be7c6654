"""Plan a save: every chunk of every tensor, and the one client that writes it (its owner); pure.

Each client computes the same plan from the layouts, without communicating. A chunk that only one client holds is
written by that client. A chunk that several clients hold whole is written by the holder with the least to write;
largest chunks are given out first. A chunk that no client holds whole is written by the holder of its largest piece,
and the other holders send it their pieces.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property, lru_cache
from heapq import heapreplace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from dtckpt.checkpoint.saving.chunk_grid import choose_grid
from dtckpt.errors import LayoutError, SliceError
from dtckpt.format.codecs import NO_CODEC
from dtckpt.format.digest import bytes_digest
from dtckpt.format.dtypes import validate_dtype
from dtckpt.format.grid import ChunkGrid
from dtckpt.format.names import array_paths
from dtckpt.layout.layout import Layout
from dtckpt.layout.region import Region

NO_CLIENT = -1
"""The owner of a chunk that no client holds."""
KEPT_STRUCTURES = 4
"""Number of structures whose plans are kept for their next saves."""
ASSEMBLED_STEPS_PER_BOX = 8
"""Chunks per box and dim where one client puts all split chunks together: of most tensors it gets an eighth at most."""


class CopyRule(StrEnum):
    """A save's rule for different copies of one value on several clients."""

    EQUAL = "equal"
    """The save refuses such a value."""
    NOTED = "noted"
    """The lowest client's copy is stored, and the leader's log names the tensor."""
    FREE = "free"
    """The lowest client's copy is stored; copies are not compared."""


@dataclass(frozen=True, slots=True)
class Holding:
    """One distinct box of a tensor and the clients that hold a copy of it, ascending."""

    region: Region
    clients: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class TensorSpec:
    """A tensor to be saved, alike on every client. A spec equals only itself, so that it is a cheap key.

    Args:
        name: The tensor's name.
        shape: Global shape of the stored tensor.
        dtype: Element type.
        stored_dtype: Element type on storage.
        holdings: The boxes that clients hold.
        layout: Layout to be recorded; None for a plain tensor, or a slice of a larger one.
        content: Content digest that the stored elements must have, if it is known already.
        codec: The compression of chunks.
        copies: The rule where copies of a box differ.
        is_parameter: Whether it is a parameter, or of the state of one: errors then tell how to save parts of it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    stored_dtype: str
    holdings: tuple[Holding, ...]
    layout: Layout | None = None
    content: int | None = None
    codec: str = NO_CODEC
    copies: CopyRule = CopyRule.EQUAL
    is_parameter: bool = False

    @property
    def given(self) -> tuple[Holding, ...]:
        """The boxes, each with the clients that may write it: of copies that may differ, the lowest client's."""
        if self.copies is CopyRule.EQUAL:
            return self.holdings
        return tuple(Holding(holding.region, holding.clients[:1]) for holding in self.holdings)


@dataclass(frozen=True, slots=True)
class ProvidedPart:
    """A part of a chunk, and the client that provides its elements."""

    region: Region
    client: int


@dataclass(frozen=True, slots=True, eq=False)
class TensorPlan:
    """One tensor of the plan.

    Args:
        spec: The tensor.
        path: Array path below the root of the key-value store.
        grid: The chunks.
        owners: The client that writes each chunk, row-major; `NO_CLIENT` if no client holds the chunk.
        pieces: For each chunk that its owner does not hold whole, by number: its pieces.
    """

    spec: TensorSpec
    path: str
    grid: ChunkGrid
    owners: npt.NDArray[np.int32]
    pieces: Mapping[int, tuple[ProvidedPart, ...]]

    @property
    def name(self) -> str:
        """The tensor's name."""
        return self.spec.name

    @property
    def dtype(self) -> str:
        """The tensor's element type."""
        return self.spec.dtype

    @property
    def stored_dtype(self) -> str:
        """Element type on storage."""
        return self.spec.stored_dtype

    @property
    def layout(self) -> Layout | None:
        """The layout to be recorded."""
        return self.spec.layout

    @property
    def codec(self) -> str:
        """The compression of chunks."""
        return self.spec.codec

    def owned_by(self, client: int) -> Iterator[int]:
        """Yield the row-major numbers of the chunks that a client writes."""
        return iter(np.flatnonzero(self.owners == client).tolist())

    @property
    def missing(self) -> tuple[int, ...]:
        """Row-major numbers of the chunks that no client holds."""
        return tuple(np.flatnonzero(self.owners == NO_CLIENT).tolist())


@dataclass(frozen=True, eq=False)
class SavePlan:
    """The plan of a save: which client writes which chunk. Later saves may use it again, so it must not be changed.

    The chunks of all tensors, one tensor after the other, are numbered through; `chunks_of` returns such numbers.

    Args:
        tensors: The tensors, sorted by name.
        owners: The owner of each chunk of all tensors.
        digests: For each tensor, a digest of all facts on which clients must agree before any of them writes.
        topic: A digest of these digests.
        loads: Bytes that each client writes, by client; empty if the owners were not chosen by `plan_save`.
    """

    tensors: tuple[TensorPlan, ...]
    owners: npt.NDArray[np.int32] = field(repr=False)
    digests: tuple[int, ...] = field(repr=False)
    topic: bytes = field(repr=False)
    loads: Mapping[int, int] = field(repr=False)

    @cached_property
    def starts(self) -> npt.NDArray[np.int64]:
        """For each tensor, the number of its first chunk among all chunks; last, the number of all chunks."""
        return np.cumsum([0, *(tensor.grid.num_chunks for tensor in self.tensors)], dtype=np.int64)

    def chunks_of(self, client: int) -> npt.NDArray[np.int64]:
        """Return the chunks that a client writes, by their numbers among all chunks of the plan; ascending."""
        return np.flatnonzero(self.owners == client)

    def tensors_at(self, chunks: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return, for chunks by their numbers among all, the indices of the tensors that they belong to."""
        return np.searchsorted(self.starts, chunks, side="right") - 1

    def owned_by(self, client: int) -> Iterator[tuple[int, TensorPlan, int]]:
        """Yield the chunks that a client writes: index and plan of the tensor, number of the chunk in the tensor."""
        chunks = self.chunks_of(client)
        indices = self.tensors_at(chunks)
        numbers = chunks - self.starts[indices]
        for index, number in zip(indices.tolist(), numbers.tolist(), strict=True):
            yield index, self.tensors[index], number

    @cached_property
    def names_digest(self) -> int:
        """Digest of the names of all tensors."""
        return bytes_digest("\0".join(tensor.spec.name for tensor in self.tensors).encode())

    @cached_property
    def has_moves(self) -> bool:
        """Whether any chunk is put together from pieces, so that the save has a round ``edges``."""
        return any(tensor.pieces for tensor in self.tensors)

    def moves(self, source: int, owner: int) -> Iterator[tuple[int, int, Region]]:
        """Yield index of the tensor, number of the chunk, and region of every piece that ``source`` sends to ``owner``.

        The pieces come in the order of their elements in the file that the source writes.
        """
        for position, tensor in enumerate(self.tensors):
            for number, pieces in tensor.pieces.items():
                if tensor.owners[number] == owner != source:
                    yield from ((position, number, piece.region) for piece in pieces if piece.client == source)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all elements on storage."""
        return sum(
            holding.region.numel * validate_dtype(tensor.spec.stored_dtype).itemsize
            for tensor in self.tensors
            for holding in tensor.spec.holdings
        )


@lru_cache(maxsize=4096)
def holdings_of(layout: Layout, shape: tuple[int, ...]) -> tuple[Holding, ...]:
    """Return the boxes of a tensor of ``shape`` under ``layout``, each with its holders; empty boxes are left out.

    Raises:
        LayoutError: A reduction is pending on the layout, so no client holds the tensor's values.
    """
    if layout.partial:
        raise LayoutError(
            f"a tensor with pending reductions cannot be saved; got partial axes {dict(layout.partial)}, "
            "expected none; relayout it to sharded or replicated first"
        )
    clients: dict[Region, set[int]] = {}
    for device in layout.mesh.device_ids:
        region = layout.region(device, shape)
        if not region.is_empty:
            clients.setdefault(region, set()).add(layout.mesh.client_of(device))
    return tuple(Holding(region, tuple(sorted(holders))) for region, holders in clients.items())


@lru_cache(maxsize=4096)
def copies_of(clients: tuple[int, ...], shape: tuple[int, ...]) -> tuple[Holding, ...]:
    """Return the one box of a tensor of which every client has a copy."""
    whole = Region.full(shape)
    return () if whole.is_empty else (Holding(whole, clients),)


@lru_cache(maxsize=KEPT_STRUCTURES)
def kept_plan(specs: tuple[TensorSpec, ...], max_chunk_nbytes: int) -> SavePlan:
    """Return `plan_save` of these specs, and keep it: a later save of the same spec objects gets it again."""
    return plan_save(specs, max_chunk_nbytes)


def plan_save(
    specs: Sequence[TensorSpec], max_chunk_nbytes: int, salt: bytes = b"", *, assembler: int | None = None
) -> SavePlan:
    """Plan which client writes which chunk. The same arguments give the same plan on every client.

    Args:
        specs: The tensors; entries of one name are slices of one tensor and must agree in shape and dtype.
        max_chunk_nbytes: Bound on a chunk's bytes; a box that cannot be cut evenly may exceed it.
        salt: Further facts on which clients must agree; part of `SavePlan.topic`.
        assembler: A client that holds nothing, and puts together every chunk that no client holds whole; default: the
            holder of the largest piece does.

    Raises:
        TensorNameError: A name cannot be stored.
        SliceError: Slices of one tensor overlap or disagree.
    """
    merged = _merge_slices(specs)
    paths = array_paths(merged)
    loads: dict[int, int] = {}
    # Most tensors of a model are like others; tensors of the same shape, dtype and holders share a draft.
    drafts_by_kind: dict[tuple[int, tuple[int, ...], str, bool], _TensorDraft] = {}
    drafts: list[_TensorDraft] = []
    listed = [spec for _, spec in sorted(merged.items())]
    for spec in listed:
        # `holdings_of` and `copies_of` return one object for equal arguments. The specs keep it alive, so its id stays
        # its own.
        key = id(spec.holdings), spec.shape, spec.stored_dtype, spec.copies is CopyRule.EQUAL
        draft = drafts_by_kind[key] = drafts_by_kind.get(key) or _draft(spec, max_chunk_nbytes, assembler)
        drafts.append(draft)
    # Draft by draft, not tensor by tensor: there may be thousands of tensors, each with a load on thousands of clients.
    for draft, count in Counter(drafts).items():
        for client, nbytes in draft.loads.items():
            loads[client] = loads.get(client, 0) + count * nbytes
    owners = _joined_owners(drafts)
    starts = np.cumsum([0, *(draft.owners.size for draft in drafts)]).tolist()
    shared = [
        (-nbytes, position, number, clients)
        for position, draft in enumerate(drafts)
        for number, (nbytes, clients) in draft.shared.items()
    ]
    # For each set of holders a heap, with the least loaded client at the top. A client is in several heaps, so the
    # loads in a heap get stale: an entry is renewed when it comes to the top. Loads only grow, so no other entry that
    # is less loaded lies below it.
    heaps: dict[int, list[tuple[int, int]]] = {}
    # The largest chunks first, as small ones then even out the loads; equal chunks in order, so that all clients deal
    # alike.
    for negative_nbytes, position, number, clients in sorted(shared):
        heap = heaps.get(id(clients)) or heaps.setdefault(id(clients), [(0, client) for client in clients])
        while (current := loads.get(heap[0][1], 0)) != heap[0][0]:
            heapreplace(heap, (current, heap[0][1]))
        owner = heap[0][1]
        loads[owner] = current - negative_nbytes
        heapreplace(heap, (loads[owner], owner))
        owners[starts[position] + number] = owner
    tensors = _tensor_plans(listed, paths, drafts, owners)
    digests = tuple(map(_digest, tensors))
    return SavePlan(tensors, owners, digests, _topic(digests, salt), loads)


def with_owners(plan: SavePlan, owners: npt.NDArray[np.int32]) -> SavePlan:
    """Return a plan in which other clients write the chunks; each of them must hold the chunks that it writes.

    Args:
        plan: A plan without split chunks.
        owners: The owner of each chunk of all tensors, `NO_CLIENT` where no client holds the chunk.
    """
    owners.flags.writeable = False
    tensors = tuple(
        replace(tensor, owners=owners[start:stop])
        for tensor, (start, stop) in zip(plan.tensors, pairwise(plan.starts.tolist()), strict=True)
    )
    digests = tuple(map(_digest, tensors))
    return SavePlan(tensors, owners, digests, _topic(digests, plan.topic), {})


def _topic(digests: Sequence[int], salt: bytes) -> bytes:
    return bytes_digest(b"".join(digest.to_bytes(8, "big") for digest in digests) + salt).to_bytes(8, "big")


def plan_part(
    specs: Sequence[TensorSpec],
    paths: Mapping[str, str],
    grids: Mapping[str, ChunkGrid],
    *,
    assembler: int,
    topic: bytes,
) -> SavePlan:
    """Plan the chunks of one client, which knows the chunks of its tensors, but not the boxes of other clients.

    Args:
        specs: The tensors that it holds boxes of, with these boxes only.
        paths: Array path by name.
        grids: Chunks by name.
        assembler: As for `plan_save`.
        topic: The topic of the plan of all.
    """
    listed = sorted(specs, key=lambda spec: spec.name)
    drafts_by_kind: dict[tuple[int, ChunkGrid, str], _TensorDraft] = {}
    drafts: list[_TensorDraft] = []
    for spec in listed:
        grid = grids[spec.name]
        key = id(spec.holdings), grid, spec.stored_dtype
        draft = drafts_by_kind[key] = drafts_by_kind.get(key) or _draft_on_grid(spec, grid, assembler)
        drafts.append(draft)
    owners = _joined_owners(drafts)
    return SavePlan(_tensor_plans(listed, paths, drafts, owners), owners, (), topic, {})


def _joined_owners(drafts: Sequence[_TensorDraft]) -> npt.NDArray[np.int32]:
    return np.concatenate([np.empty(0, np.int32), *(draft.owners for draft in drafts)])


def _tensor_plans(
    specs: Sequence[TensorSpec], paths: Mapping[str, str], drafts: Sequence[_TensorDraft], owners: npt.NDArray[np.int32]
) -> tuple[TensorPlan, ...]:
    # The plan may be kept for later saves, and its tensors have views of this array.
    owners.flags.writeable = False
    starts = np.cumsum([0, *(draft.owners.size for draft in drafts)]).tolist()
    return tuple(
        TensorPlan(spec, paths[spec.name], draft.grid, owners[start:stop], draft.pieces)
        for spec, draft, (start, stop) in zip(specs, drafts, pairwise(starts), strict=True)
    )


def _merge_slices(specs: Sequence[TensorSpec]) -> dict[str, TensorSpec]:
    merged: dict[str, TensorSpec] = {}
    for spec in specs:
        validate_dtype(spec.dtype)
        validate_dtype(spec.stored_dtype)
        other = merged.setdefault(spec.name, spec)
        if other is spec:
            continue
        if (spec.shape, spec.dtype, spec.stored_dtype) != (other.shape, other.dtype, other.stored_dtype):
            raise SliceError(
                f"slices of tensor {spec.name!r} disagree; got shape {spec.shape} {spec.dtype} "
                f"beside {other.shape} {other.dtype}"
            )
        # Two slices would have two values for one element, and nothing decides between them.
        clash = next(
            ((a.region, b.region) for a in spec.holdings for b in other.holdings if a.region.intersect(b.region)), None
        )
        if clash:
            raise SliceError(f"slices of tensor {spec.name!r} overlap; got {clash[0]} and {clash[1]}")
        merged[spec.name] = TensorSpec(
            spec.name,
            spec.shape,
            spec.dtype,
            spec.stored_dtype,
            other.holdings + spec.holdings,
            codec=spec.codec,
            copies=spec.copies,
            is_parameter=spec.is_parameter,
        )
    return merged


@dataclass(frozen=True, slots=True, eq=False)
class _TensorDraft:
    """The plan of a tensor of some shape and holders, without owners for the chunks that several clients could write.

    Args:
        grid: See `TensorPlan`, as for ``owners`` and ``pieces``.
        shared: For each chunk without an owner yet, by number: its bytes, and the clients that could own it.
        loads: Bytes of the chunks that have an owner, by client.
    """

    grid: ChunkGrid
    owners: npt.NDArray[np.int32]
    pieces: Mapping[int, tuple[ProvidedPart, ...]]
    shared: Mapping[int, tuple[int, tuple[int, ...]]]
    loads: Mapping[int, int]


def _draft(spec: TensorSpec, max_chunk_nbytes: int, assembler: int | None) -> _TensorDraft:
    """Plan one tensor, as far as the other tensors do not matter."""
    # Slices do not overlap, so equal sizes mean that nothing is missing.
    is_whole = sum(holding.region.numel for holding in spec.holdings) == math.prod(spec.shape)
    grid = choose_grid(
        spec.shape,
        validate_dtype(spec.stored_dtype).itemsize,
        [holding.region for holding in spec.holdings],
        max_chunk_nbytes,
        is_whole=is_whole,
        steps_per_box=1 if assembler is None else ASSEMBLED_STEPS_PER_BOX,
    )
    return _draft_on_grid(spec, grid, assembler)


def _draft_on_grid(spec: TensorSpec, grid: ChunkGrid, assembler: int | None) -> _TensorDraft:
    """Plan which clients write the chunks of a grid."""
    itemsize = validate_dtype(spec.stored_dtype).itemsize
    owners = np.full(grid.num_chunks, NO_CLIENT, np.int32)
    by_index = owners.reshape(grid.counts)
    loads: dict[int, int] = {}
    shared: dict[int, tuple[int, tuple[int, ...]]] = {}
    split: dict[int, list[Holding]] = {}
    for holding in spec.given:
        region, client = holding.region, holding.clients[0]
        # The usual case, by one assignment: a shard may have thousands of chunks.
        if len(holding.clients) == 1 and (chunks := _whole_chunks(grid, region)):
            by_index[chunks] = client
            loads[client] = loads.get(client, 0) + region.numel * itemsize
            continue
        for index in grid.meeting(region):
            chunk, number = grid.region(index), grid.number(index)
            part = region.intersect(chunk)
            # A shard ends inside the chunk, so its owner needs pieces from others:
            #     shards   |----- client 0 -----|----- client 1 -----|
            #     chunks   |.......|.......|....+..|.......|.........|
            if part != chunk:
                split.setdefault(number, []).append(Holding(part or chunk, holding.clients))
            elif len(holding.clients) > 1:
                shared[number] = chunk.numel * itemsize, holding.clients
            else:
                owners[number] = client
                loads[client] = loads.get(client, 0) + chunk.numel * itemsize
    pieces: dict[int, tuple[ProvidedPart, ...]] = {}
    for number, parts in sorted(split.items()):
        # The largest piece stays where it is, and only the others move.
        owner = max(parts, key=lambda part: part.region.numel).clients[0] if assembler is None else assembler
        owners[number] = owner
        loads[owner] = loads.get(owner, 0) + grid.region(grid.index(number)).numel * itemsize
        # A piece that the owner holds itself is not sent.
        pieces[number] = tuple(
            ProvidedPart(part.region, owner if owner in part.clients else part.clients[0]) for part in parts
        )
    return _TensorDraft(grid, owners, pieces, shared, loads)


def _whole_chunks(grid: ChunkGrid, region: Region) -> tuple[slice, ...]:
    """Return the chunks that a region consists of, as an index by dim; empty if it cuts a chunk (or has no dims)."""
    for start, stop, size, chunk in zip(region.offset, region.stop, grid.shape, grid.chunk_shape, strict=True):
        # A chunk that the tensor's edge cuts short is whole, too.
        if start % chunk or (stop % chunk and stop != size):
            return ()
    bounds = zip(region.offset, region.stop, grid.chunk_shape, strict=True)
    return tuple(slice(start // chunk, -(-stop // chunk)) for start, stop, chunk in bounds)


def _digest(plan: TensorPlan) -> int:
    spec, layout = plan.spec, plan.spec.layout
    # Layouts can differ and still give the same chunks and owners, but other pieces and so other rounds.
    placed = None if layout is None else (layout.sharding_specs, dict(layout.mesh.axis_sizes))
    kind = spec.dtype, spec.stored_dtype, spec.codec
    facts = spec.name, spec.shape, kind, plan.grid.chunk_shape, plan.pieces, placed
    return bytes_digest(repr(facts).encode("utf-8", "backslashreplace") + plan.owners.tobytes())
