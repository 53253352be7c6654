"""The global write plan of a save: every chunk of every tensor, and the one client that writes it.

Each client computes the same plan from the layouts. Chunks that only one client holds are its own; copies are
written once, by the least loaded of their holders, largest first. A chunk that no client holds whole gets an
owner, and the other holders hand it their pieces.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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
"""Owner of a chunk that nobody holds."""
KEPT_STRUCTURES = 4
"""Structures whose plan is kept for their next save."""


@dataclass(frozen=True, slots=True)
class Holding:
    """One distinct box of a tensor and the clients that hold a copy of it, ascending."""

    region: Region
    clients: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class TensorSpec:
    """A tensor to be saved, as every client sees it. It equals only itself, so that it is a cheap key.

    Args:
        name: The tensor's name.
        shape: Global shape of the stored tensor.
        dtype: Element type.
        stored_dtype: Element type on storage.
        holdings: Who holds what.
        layout: Layout to be recorded, if there is one.
        content: Content digest that the stored elements must come to, where it is known already.
        codec: How chunks are compressed.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    stored_dtype: str
    holdings: tuple[Holding, ...]
    layout: Layout | None = None
    content: int | None = None
    codec: str = NO_CODEC


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a chunk and the client that provides it."""

    region: Region
    client: int


@dataclass(frozen=True, slots=True, eq=False)
class TensorPlan:
    """One tensor of the plan.

    Args:
        path: Array path below the root of the key-value store.
        owners: The writing client per chunk, row-major; `NO_CLIENT` where nobody holds the chunk.
        pieces: For each chunk that its owner does not hold whole: where its parts come from.
    """

    spec: TensorSpec
    path: str
    grid: ChunkGrid
    owners: npt.NDArray[np.int32]
    pieces: Mapping[int, tuple[Piece, ...]]

    @property
    def stored_dtype(self) -> str:
        """Element type on storage."""
        return self.spec.stored_dtype

    @property
    def codec(self) -> str:
        """How chunks are compressed."""
        return self.spec.codec

    def owned_by(self, client: int) -> Iterator[int]:
        """Yield the row-major numbers of the chunks that a client writes."""
        return iter(np.flatnonzero(self.owners == client).tolist())

    @property
    def missing(self) -> tuple[int, ...]:
        """Row-major numbers of the chunks that nobody holds."""
        return tuple(np.flatnonzero(self.owners == NO_CLIENT).tolist())


@dataclass(frozen=True, eq=False)
class SavePlan:
    """What all clients write. It may be kept for later saves, so nothing in it may be changed.

    Args:
        tensors: Sorted by name.
        owners: Their owners, one tensor's after the other's.
        digests: Per tensor, the digest of all that clients must see alike before any of them writes.
        topic: The digest of all those.
        loads: The bytes that each client writes.
    """

    tensors: tuple[TensorPlan, ...]
    owners: npt.NDArray[np.int32] = field(repr=False)
    digests: tuple[int, ...] = field(repr=False)
    topic: bytes = field(repr=False)
    loads: Mapping[int, int] = field(repr=False)

    @cached_property
    def starts(self) -> npt.NDArray[np.int64]:
        """Per tensor, how many chunks those before it have; last, how many all have."""
        return np.cumsum([0, *(tensor.grid.num_chunks for tensor in self.tensors)], dtype=np.int64)

    def chunks_of(self, client: int) -> npt.NDArray[np.int64]:
        """Return where the chunks that a client writes stand among all of the plan, ascending."""
        return np.flatnonzero(self.owners == client)

    def tensors_at(self, places: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the positions of the tensors that chunks belong to."""
        return np.searchsorted(self.starts, places, side="right") - 1

    def owned_by(self, client: int) -> Iterator[tuple[int, TensorPlan, int]]:
        """Yield position, plan and row-major chunk number of all that a client writes, as `chunks_of` counts it."""
        places = self.chunks_of(client)
        positions = self.tensors_at(places)
        numbers = places - self.starts[positions]
        for position, number in zip(positions.tolist(), numbers.tolist(), strict=True):
            yield position, self.tensors[position], number

    @cached_property
    def names_digest(self) -> int:
        """Digest of the names of all tensors."""
        return bytes_digest("\0".join(tensor.spec.name for tensor in self.tensors).encode())

    @cached_property
    def has_moves(self) -> bool:
        """Whether any chunk must be put together from several clients' pieces."""
        return any(tensor.pieces for tensor in self.tensors)

    def moves(self, source: int, owner: int) -> Iterator[tuple[int, int, Region]]:
        """Yield ``(tensor, chunk, region)`` of every piece that ``source`` hands to ``owner``, in a fixed order."""
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
    """Return who holds what of a tensor of ``shape`` under ``layout``; empty boxes are left out.

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
    """Return who holds what of a tensor of which every client has a copy."""
    whole = Region.full(shape)
    return () if whole.is_empty else (Holding(whole, clients),)


@lru_cache(maxsize=KEPT_STRUCTURES)
def kept_plan(specs: tuple[TensorSpec, ...], max_chunk_nbytes: int) -> SavePlan:
    """Return `plan_save` of these very specs, which is kept for when they are saved again."""
    return plan_save(specs, max_chunk_nbytes)


def plan_save(specs: Sequence[TensorSpec], max_chunk_nbytes: int, salt: bytes = b"") -> SavePlan:
    """Plan who writes what.

    Args:
        specs: The tensors; entries of one name are slices of one tensor and must agree in shape and dtype.
        max_chunk_nbytes: Bound on a chunk's bytes; a box that cannot be cut evenly may exceed it.
        salt: Whatever else clients must agree on; goes into `SavePlan.topic`.

    Raises:
        TensorNameError: A name cannot be stored.
        SliceError: Slices of one tensor overlap or disagree.
    """
    merged = _merge_slices(specs)
    paths = array_paths(merged)
    loads: dict[int, int] = {}
    # Most tensors of a model are like others; what is alike in shape, dtype and holders is chunked alike.
    known: dict[tuple[int, tuple[int, ...], str], _Draft] = {}
    drafts: list[_Draft] = []
    listed = [spec for _, spec in sorted(merged.items())]
    for spec in listed:
        key = id(spec.holdings), spec.shape, spec.stored_dtype
        draft = known[key] = known.get(key) or _draft(spec, max_chunk_nbytes)
        for client, nbytes in draft.loads.items():
            loads[client] = loads.get(client, 0) + nbytes
        drafts.append(draft)
    owners = np.concatenate([np.empty(0, np.int32), *(draft.owners for draft in drafts)])
    starts = np.cumsum([0, *(draft.owners.size for draft in drafts)]).tolist()
    shared = [
        (-nbytes, position, number, clients)
        for position, draft in enumerate(drafts)
        for number, (nbytes, clients) in draft.shared.items()
    ]
    # Per set of holders, those with the least load first; what a heap says is renewed when it comes to the top.
    heaps: dict[int, list[tuple[int, int]]] = {}
    for negative_nbytes, position, number, clients in sorted(shared):
        heap = heaps.get(id(clients)) or heaps.setdefault(id(clients), [(0, client) for client in clients])
        while (current := loads.get(heap[0][1], 0)) != heap[0][0]:
            heapreplace(heap, (current, heap[0][1]))
        owner = heap[0][1]
        loads[owner] = current - negative_nbytes
        heapreplace(heap, (loads[owner], owner))
        owners[starts[position] + number] = owner
    owners.flags.writeable = False
    tensors = tuple(
        TensorPlan(spec, paths[spec.name], draft.grid, owners[start:stop], draft.pieces)
        for spec, draft, (start, stop) in zip(listed, drafts, pairwise(starts), strict=True)
    )
    digests = tuple(map(_digest, tensors))
    topic = bytes_digest(b"".join(digest.to_bytes(8, "big") for digest in digests) + salt).to_bytes(8, "big")
    return SavePlan(tensors, owners, digests, topic, loads)


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
        clash = next(
            ((a.region, b.region) for a in spec.holdings for b in other.holdings if a.region.intersect(b.region)), None
        )
        if clash:
            raise SliceError(f"slices of tensor {spec.name!r} overlap; got {clash[0]} and {clash[1]}")
        merged[spec.name] = TensorSpec(
            spec.name, spec.shape, spec.dtype, spec.stored_dtype, other.holdings + spec.holdings, codec=spec.codec
        )
    return merged


@dataclass(frozen=True, slots=True, eq=False)
class _Draft:
    """The plan of a tensor of some shape and holders, but for the chunks that several clients could write.

    Args:
        grid: See `TensorPlan`, as for ``owners`` and ``pieces``.
        shared: By chunk number: its bytes, and the clients of which one will be its owner.
        loads: Bytes by client, of the chunks that have an owner.
    """

    grid: ChunkGrid
    owners: npt.NDArray[np.int32]
    pieces: Mapping[int, tuple[Piece, ...]]
    shared: Mapping[int, tuple[int, tuple[int, ...]]]
    loads: Mapping[int, int]


def _draft(spec: TensorSpec, max_chunk_nbytes: int) -> _Draft:
    """Plan one tensor, as far as others do not matter."""
    itemsize = validate_dtype(spec.stored_dtype).itemsize
    is_whole = sum(holding.region.numel for holding in spec.holdings) == math.prod(spec.shape)
    boxes = [holding.region for holding in spec.holdings]
    grid = choose_grid(spec.shape, itemsize, boxes, max_chunk_nbytes, is_whole=is_whole)
    owners = np.full(grid.num_chunks, NO_CLIENT, np.int32)
    by_index = owners.reshape(grid.counts)
    loads: dict[int, int] = {}
    shared: dict[int, tuple[int, tuple[int, ...]]] = {}
    split: dict[int, list[Holding]] = {}
    for holding in spec.holdings:
        region, client = holding.region, holding.clients[0]
        if len(holding.clients) == 1 and (chunks := _whole_chunks(grid, region)):
            by_index[chunks] = client
            loads[client] = loads.get(client, 0) + region.numel * itemsize
            continue
        for index in grid.meeting(region):
            chunk, number = grid.region(index), grid.number(index)
            part = region.intersect(chunk)
            if part != chunk:
                split.setdefault(number, []).append(Holding(part or chunk, holding.clients))
            elif len(holding.clients) > 1:
                shared[number] = chunk.numel * itemsize, holding.clients
            else:
                owners[number] = client
                loads[client] = loads.get(client, 0) + chunk.numel * itemsize
    pieces: dict[int, tuple[Piece, ...]] = {}
    for number, parts in sorted(split.items()):
        owner = max(parts, key=lambda part: part.region.numel).clients[0]
        owners[number] = owner
        loads[owner] = loads.get(owner, 0) + grid.region(grid.index(number)).numel * itemsize
        # A piece that the owner holds itself stays at home.
        pieces[number] = tuple(
            Piece(part.region, owner if owner in part.clients else part.clients[0]) for part in parts
        )
    return _Draft(grid, owners, pieces, shared, loads)


def _whole_chunks(grid: ChunkGrid, region: Region) -> tuple[slice, ...]:
    """Return the chunks that a region consists of, as an index by dim; empty if it cuts a chunk (or has no dims)."""
    for start, stop, size, chunk in zip(region.offset, region.stop, grid.shape, grid.chunk_shape, strict=True):
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
