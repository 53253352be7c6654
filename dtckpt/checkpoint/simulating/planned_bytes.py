"""Count the bytes of a save, a restore and a redistribution from the plans that the real ones follow; pure.

Saves are planned for all clients, as every client of a real save does. In a real restore or redistribution each client
plans for itself. So with very many clients, this module plans restores and redistributions of some of them only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from dtckpt.checkpoint.reading.manifest_files import ArrayInfo
from dtckpt.checkpoint.reading.plan import plan_tensor_reads
from dtckpt.checkpoint.reading.tensor_info import TensorInfo
from dtckpt.checkpoint.restoring.shared_rows import pays, rows_layout
from dtckpt.checkpoint.saving.plan import SavePlan, TensorPlan
from dtckpt.checkpoint.simulating.model_shapes import ModelShapes
from dtckpt.format.dtypes import DTYPES
from dtckpt.format.grid import ChunkGrid
from dtckpt.format.manifest import ArrayEntry, ArrayKind
from dtckpt.layout.layout import Layout
from dtckpt.layout.region import Region
from dtckpt.redistribution.exchange_plan import Move, plan_exchange
from dtckpt.redistribution.path_plan import plan_path

Bytes = npt.NDArray[np.int64]
"""Bytes by client, or by device."""


@dataclass(frozen=True, slots=True, eq=False)
class SavedBytes:
    """The bytes of a save, by client.

    Args:
        held: Bytes of the client's devices.
        staged: Bytes that a save in the background copies to host memory: the client writes them or hands them over.
        handed_over: Pieces of chunks that others write, through storage.
        written: Bytes of the chunks that the client writes.
    """

    held: Bytes
    staged: Bytes
    handed_over: Bytes
    written: Bytes


def saved_bytes(plan: SavePlan, num_clients: int) -> SavedBytes:
    """Count the bytes of a save from its plan, which must be of tensors with layouts."""
    held = np.zeros(num_clients, np.int64)
    for (layout, shape, dtype), count in Counter(map(_kind, plan.tensors)).items():
        held += count * _held_nbytes(layout, shape, dtype, num_clients)
    written, given, taken = (np.zeros(num_clients, np.int64) for _ in range(3))
    for client, nbytes in plan.loads.items():
        written[client] = nbytes
    # Equal tensors share the pieces of their split chunks, and the clients that write these.
    split = {id(tensor.pieces): tensor for tensor in plan.tensors if tensor.pieces}
    for key, count in Counter(id(tensor.pieces) for tensor in plan.tensors if tensor.pieces).items():
        tensor = split[key]
        itemsize = count * DTYPES[tensor.stored_dtype].itemsize
        for number, pieces in tensor.pieces.items():
            owner = int(tensor.owners[number])
            for piece in pieces:
                if piece.client != owner:
                    given[piece.client] += piece.region.numel * itemsize
                    taken[owner] += piece.region.numel * itemsize
    return SavedBytes(held, written - taken + given, given, written)


def _kind(tensor: TensorPlan) -> tuple[Layout, tuple[int, ...], str]:
    assert tensor.layout is not None  # noqa: S101  (the simulation gives every tensor one)
    return tensor.layout, tensor.spec.shape, tensor.dtype


def _held_nbytes(layout: Layout, shape: Sequence[int], dtype: str, num_clients: int) -> Bytes:
    """Return the bytes of a tensor's components, by client."""
    numel = np.ones(layout.mesh.size(), np.int64)
    indices = np.array(layout.offset_to_shard(), np.int64).reshape(layout.mesh.size(), -1)
    for dim, size in enumerate(shape):
        bounds = np.array(layout.shards(dim, size), np.int64)
        numel *= (bounds[:, 1] - bounds[:, 0])[indices[:, dim]]
    held = np.zeros(num_clients, np.int64)
    np.add.at(held, layout.mesh.owners.ravel(), numel * DTYPES[dtype].itemsize)
    return held


@dataclass(frozen=True, slots=True, eq=False)
class StoredTensor:
    """Tensors of a planned checkpoint that are alike, where they are to go, and how many they are."""

    info: TensorInfo
    entry: ArrayEntry
    target: Layout
    count: int


def described_infos(model: ModelShapes) -> dict[str, TensorInfo]:
    """Describe the tensors of a model's state before they are planned, each as one chunk, in the model's layouts."""
    infos: dict[str, TensorInfo] = {}
    for prefix, dtype in model.state.items():
        for parameter in model.parameters:
            name = f"{prefix}/{parameter.name}"
            grid = ChunkGrid(parameter.shape, tuple(max(1, size) for size in parameter.shape))
            kind = ArrayKind(dtype, dtype, grid, np.zeros(grid.num_chunks, np.int32), parameter.layout)
            infos[name] = ArrayInfo.of(ArrayEntry(name, name, kind, np.empty(0, np.uint64)))
    return infos


def stored_infos(plan: SavePlan) -> dict[str, TensorInfo]:
    """Describe the tensors of a planned save, without digests, as if it were a checkpoint."""
    infos: dict[str, TensorInfo] = {}
    kinds: dict[tuple[object, ...], ArrayKind] = {}
    for tensor in plan.tensors:
        key = _kind(tensor), tensor.grid
        # Equal tensors may have other writers of their chunks; no reader asks for the writer.
        kind = kinds.get(key) or kinds.setdefault(
            key, ArrayKind(tensor.dtype, tensor.stored_dtype, tensor.grid, tensor.owners, tensor.layout)
        )
        infos[tensor.name] = ArrayInfo.of(ArrayEntry(tensor.name, tensor.path, kind, np.empty(0, np.uint64)))
    return infos


def stored_tensors(infos: Mapping[str, TensorInfo], targets: Mapping[str, Layout]) -> list[StoredTensor]:
    """Group the tensors of a planned checkpoint that are alike.

    Args:
        infos: As from `stored_infos`.
        targets: By name, the layout that a tensor is to get.
    """
    alike: dict[tuple[object, ...], list[str]] = {}
    for name, info in infos.items():
        entry = _entry(info)
        alike.setdefault((id(entry.kind), targets[name]), []).append(name)
    return [
        StoredTensor(infos[names[0]], _entry(infos[names[0]]), targets[names[0]], len(names))
        for names in alike.values()
    ]


def _entry(info: TensorInfo) -> ArrayEntry:
    assert isinstance(info, ArrayInfo)  # noqa: S101  (`stored_infos` made it)
    return info.entry


def held_bytes(tensors: Iterable[StoredTensor], num_clients: int) -> Bytes:
    """Return the bytes that the devices of each client hold after a restore."""
    held = np.zeros(num_clients, np.int64)
    for tensor in tensors:
        held += tensor.count * _held_nbytes(tensor.target, tensor.info.shape, tensor.entry.dtype, num_clients)
    return held


@dataclass(frozen=True, slots=True, eq=False)
class MovedBytes:
    """The bytes of a restore or a redistribution, by client, of the clients that were planned.

    Args:
        read: Bytes that the client reads from storage.
        sent: Bytes that it sends to clients of other hosts.
        received: Bytes that it receives from clients of other hosts.
        within: Bytes that it receives from clients of the same host.
    """

    read: Bytes
    sent: Bytes
    received: Bytes
    within: Bytes


def restored_bytes(
    tensors: Iterable[StoredTensor], clients: Sequence[int], clients_per_host: int, *, read_once: bool
) -> MovedBytes:
    """Count the bytes of a restore.

    Args:
        tensors: The tensors.
        clients: The clients whose restore is planned.
        clients_per_host: Consecutive clients that share a host.
        read_once: Whether clients share the parts that several of them need, where that pays, as from remote storage.
    """
    moved, changes = _none(clients), []
    for tensor in tensors:
        target = tensor.target
        is_shared = read_once and pays(tensor.info, target, tensor.entry.itemsize)
        rows = rows_layout(target, tensor.info.row_dim) if is_shared else target
        for at, client in enumerate(clients):
            moved.read[at] += tensor.count * _read_nbytes(tensor.entry, _regions(rows, tensor.info.shape, client))
        if is_shared:
            changes.append(_Change(rows, target, tensor.info.shape, tensor.count * tensor.entry.itemsize))
    _add_exchanges(moved, changes, clients, clients_per_host)
    return moved


def redistributed_bytes(tensors: Iterable[StoredTensor], clients: Sequence[int], clients_per_host: int) -> MovedBytes:
    """Count the bytes of a redistribution from the layouts of the save; arguments as for `restored_bytes`."""
    moved = _none(clients)
    changes = [
        _Change(tensor.info.layout, tensor.target, tensor.info.shape, tensor.count * tensor.entry.itemsize)
        for tensor in tensors
        if tensor.info.layout is not None
    ]
    _add_exchanges(moved, changes, clients, clients_per_host)
    return moved


def _none(clients: Sequence[int]) -> MovedBytes:
    return MovedBytes(*(np.zeros(len(clients), np.int64) for _ in range(4)))


def _regions(layout: Layout, shape: tuple[int, ...], client: int) -> tuple[Region, ...]:
    """Return the distinct regions of a client's devices that hold elements."""
    regions = dict.fromkeys(layout.region(device, shape) for device in layout.mesh.devices_of(client))
    return tuple(region for region in regions if not region.is_empty)


def _read_nbytes(entry: ArrayEntry, regions: tuple[Region, ...]) -> int:
    return sum(part.nbytes for part in plan_tensor_reads(entry, regions)) if regions else 0


@dataclass(frozen=True, slots=True, eq=False)
class _Change:
    """A change of layout of tensors that are alike; ``nbytes`` adds up one element of each tensor."""

    source: Layout
    target: Layout
    shape: tuple[int, ...]
    nbytes: int

    def exchanges(self) -> Iterator[tuple[Layout, Layout]]:
        """Yield the layouts before and after every exchange on the path."""
        yield from pairwise((self.source, *plan_path(self.source, self.target, self.shape)))


def _add_exchanges(
    moved: MovedBytes, changes: Sequence[_Change], clients: Sequence[int], clients_per_host: int
) -> None:
    exchanges = [(each, change) for change in changes for each in change.exchanges()]
    # Client by client: the planner of one client and two layouts is kept, and serves tensors of all shapes.
    for at, client in enumerate(clients):
        host = client // clients_per_host
        for (before, after), change in exchanges:
            plan = plan_exchange(before, after, change.shape, client)
            for sender, moves in plan.receives.items():
                received = moved.within if sender // clients_per_host == host else moved.received
                received[at] += change.nbytes * _numel(moves)
            for receiver, moves in plan.sends.items():
                if receiver // clients_per_host != host:
                    moved.sent[at] += change.nbytes * _numel(moves)


def _numel(moves: Iterable[Move]) -> int:
    return sum(move.region.numel for move in moves)
