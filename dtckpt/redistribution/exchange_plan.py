"""Plan one exchange: which device sends which box of a tensor to which device, for any two layouts on any meshes.

One formulation serves every change of layout. A device holds a *part*: a box of the tensor and, if reductions are
pending, one *term* of them. The exchange makes a device's new box from all parts that overlap the box. The exchange
cuts each part to the overlap, and reduces over the terms. Slicing, all-gather, all-to-all, reduce-scatter, broadcast
and moves to another mesh are cases of this.

    parts of the source            a new box of the target              the moves to its device
    +-------+-------+              +-------+-------+
    |   0   |   1   |              |    ...|...    |                    from 0: lower right corner of its part
    |       |       |              |    : new :    |                    from 1: lower left
    +-------+-------+     +        +----:.....:----+          =         from 2: upper right
    |   2   |   3   |              |    : box :    |                    from 3: upper left
    |       |       |              |    :.....:    |
    +-------+-------+              +---------------+

Each byte goes at most once from one client to another. A client takes a box from its own devices if it can. If several
devices of one client need the same box, the first device receives it and forwards it to the others. If several remote
devices hold a box, the receiver's position in its mesh decides which device sends it. So receivers spread over senders.
Sender and receiver derive the same plan from the layouts, without communicating.

A client plans only the moves from and to its own devices. The parts of a layout form the mesh's grid of devices, with
the axes in the order of the tensor's dims. So the parts that overlap a box are a slice of that grid, and the plan looks
only at this slice.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from dtckpt.layout.layout import Layout
from dtckpt.layout.mesh import Mesh
from dtckpt.layout.region import Region

Coordinates = tuple[int, ...]
"""A device's coordinates along some axes of a mesh."""
Part = tuple[int, ...]
"""A part of a layout: its shard's index along every dim, then coordinates along some axes."""


@dataclass(frozen=True, slots=True, order=True)
class Move:
    """One box that a device of the source mesh sends to a device of the target mesh.

    Moves sort by receiver, box and sender. So sender and receiver know the order of the boxes in a message.

    Args:
        target: The receiving device, by global id in the target mesh.
        offset: First global index of the box.
        shape: Shape of the box.
        source: The sending device, by global id in the source mesh.
    """

    target: int
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    source: int

    @property
    def region(self) -> Region:
        """The box, in global indices."""
        return Region.unchecked(self.offset, self.shape)


@dataclass(frozen=True, slots=True)
class ExchangePlan:
    """One client's side of an exchange. Moves are sorted.

    Args:
        copies: Moves between devices of this client.
        sends: Moves to other clients, by receiving client, ascending.
        receives: Moves from other clients, by sending client, ascending.
        forwards: Moves between two of this client's devices, after all boxes are received; both ids are of the target
            mesh.
        is_local: Whether every client of the target holds all parts of the source, so that no client has to receive.
            The field can be false although no client sends.
    """

    copies: tuple[Move, ...]
    sends: Mapping[int, tuple[Move, ...]]
    receives: Mapping[int, tuple[Move, ...]]
    forwards: tuple[Move, ...]
    is_local: bool

    @property
    def num_received(self) -> int:
        """Number of elements received from other clients."""
        return sum(move.region.numel for moves in self.receives.values() for move in moves)


@lru_cache(maxsize=4096)
def plan_exchange(source: Layout, target: Layout, shape: tuple[int, ...], client: int) -> ExchangePlan:
    """Plan one client's side of an exchange.

    Reductions that are pending in both layouts, on an axis of the same name, size and op, stay pending. The exchange
    does all other reductions of the source. The target may have no further pending reductions.

    Args:
        source: The layout before.
        target: The layout after.
        shape: Global shape.
        client: The client whose side to plan.
    """
    return _planner(source, target, client).plan(shape)


def reduced_axes(source: Layout, target: Layout) -> tuple[str, ...]:
    """Return the axes of the source whose reduction an exchange does, in mesh order."""
    return tuple(
        axis for axis in source.mesh.mesh_dim_names if axis in source.partial and axis not in kept_axes(source, target)
    )


def kept_axes(source: Layout, target: Layout) -> tuple[str, ...]:
    """Return the axes whose reduction stays pending, in the source mesh's order.

    The last axis is reduced first, and reductions of different kinds do not commute. So with several kinds, only
    leading axes can stay pending.
    """
    pending = [axis for axis in source.mesh.mesh_dim_names if axis in source.partial]
    kept = [
        axis
        for axis in pending
        if target.partial.get(axis) == source.partial[axis] and target.mesh.dim_size(axis) == source.mesh.dim_size(axis)
    ]
    if len({reduction_kind(source.partial[axis]) for axis in pending}) > 1:
        kept = list(itertools.takewhile(kept.__contains__, pending))
        # A target whose axes stand in another order would reduce them in another order.
        if [axis for axis in target.mesh.mesh_dim_names if axis in kept] != kept:
            kept = []
    return tuple(kept)


def reduction_kind(reduce_op: str) -> str:
    """Return the kind of a reduction; reductions of one kind commute. An average is a sum, divided in the end."""
    return "sum" if reduce_op == "avg" else reduce_op


def term_of(source: Layout, axes: Sequence[str], device: int) -> Coordinates:
    """Return the term that a device of the source mesh holds: the device's coordinates along ``axes``."""
    coordinates = source.mesh.coordinate(device)
    return tuple(coordinates[source.mesh.axis_index(axis)] for axis in axes)


@dataclass(frozen=True, slots=True)
class _Holders:
    """The devices that hold each part of a layout.

    The arrays have one dim per tensor dim (the shard's index), one per axis (the coordinate along it), and one for the
    replicas of a part. Replicas are in order of their clients; the replicas of one client ascend.

    Args:
        devices: Device ids.
        owners: Their clients.
        is_first: Whether a replica is the first of its client.
    """

    devices: npt.NDArray[np.int64]
    owners: npt.NDArray[np.int64]
    is_first: npt.NDArray[np.bool_]

    def at(
        self, where: tuple[int | slice, ...]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """Return the three arrays at an index."""
        return self.devices[where], self.owners[where], self.is_first[where]

    def held_by(self, client: int) -> dict[Part, tuple[int, ...]]:
        """Return the parts that a client holds, and its devices that hold each, ascending."""
        is_own = self.owners == client
        parts: dict[Part, list[int]] = {}
        for (*part, _), device in zip(np.argwhere(is_own).tolist(), self.devices[is_own].tolist(), strict=True):
            parts.setdefault(tuple(part), []).append(device)
        return {part: tuple(devices) for part, devices in parts.items()}

    def clients_of(self, part: Part) -> list[int]:
        """Return the clients that hold a part, ascending."""
        clients: list[int] = self.owners[part][self.is_first[part]].tolist()
        return clients

    def sender(self, part: Part, turn: int) -> tuple[int, int]:
        """Return the client and the device that send a part to a remote device with this turn; see `_turns`."""
        # First the clients take turns, then the devices of each: receivers that follow each other have other senders.
        #     replicas  4 5 | 8 9 | 12        turn   0  1   2  3  4   5
        #     clients   0 0 | 1 1 |  2        sender 4  8  12  5  9  12
        starts = np.flatnonzero(self.is_first[part])
        turn, number = divmod(turn, len(starts))
        replicas = self.devices[part]
        own = replicas[starts[number] : starts[number + 1] if number + 1 < len(starts) else None]
        return int(self.owners[part][starts[number]]), int(own[turn % len(own)])

    def are_held_by_all(self, clients: Sequence[int]) -> bool:
        """Tell whether each of these clients holds every part."""
        if self.devices.shape[-1] < len(clients):
            return False
        counts = (self.is_first & np.isin(self.owners, clients)).sum(axis=-1)
        return bool((counts == len(clients)).all())


@lru_cache(maxsize=128)
def _holders(layout: Layout, axes: tuple[str, ...]) -> _Holders:
    mesh = layout.mesh
    devices = layout.devices_by_part(axes)
    owners = mesh.owners.reshape(-1)[mesh.offsets.of_all(devices)]
    # Stable, since the devices of one client must still ascend: `sender` and `_send` count on it.
    order = owners.argsort(axis=-1, kind="stable")
    devices, owners = (np.take_along_axis(array, order, axis=-1) for array in (devices, owners))
    #     owners    0 0 1 1 2         sorted by client, so a client's replicas are one run,
    #     is_first  T F T F T         and the marks are where runs start
    is_first = np.ones(owners.shape, dtype=np.bool_)
    np.not_equal(owners[..., 1:], owners[..., :-1], out=is_first[..., 1:])
    return _Holders(devices, owners, is_first)


def _turns(source: Layout, target: Layout, axes: Sequence[str]) -> npt.NDArray[np.int64]:
    """Return, by position in the target's mesh, the turn of a device: which replica of a part sends to it.

    On one mesh, the turn is the device's own position among the replicas. So the device receives from its line of
    devices, as in a collective along an axis, and all replicas send equally much. On another mesh, the turn is the
    position there.
    """
    mesh = target.mesh
    numbers = np.arange(mesh.size())
    if source.mesh != mesh:
        return numbers
    used = {*itertools.chain(*source.split_axes), *axes}
    replicated = [axis for axis, name in enumerate(mesh.mesh_dim_names) if name not in used]
    if not replicated:
        return np.zeros_like(numbers)
    coordinates = np.unravel_index(numbers, mesh.shape)
    shape = tuple(mesh.shape[axis] for axis in replicated)
    return np.ravel_multi_index(tuple(coordinates[axis] for axis in replicated), shape).astype(np.int64)


def overlapping_shards(layout: Layout, shape: Sequence[int], region: Region) -> Iterator[tuple[Part, Region]]:
    """Yield every shard of a layout that overlaps a region: its index along every dim, and the overlap."""
    per_dim = []
    for dim, window in enumerate(_window(layout, shape, region)):
        # Where several axes split a dim, an empty shard may stand before full ones: 5 elements in 4 are 2, 2, 1, 0, and
        # the shards of the next 5 follow. Such a shard is in the window and has no overlap.
        overlaps = ((index, *_overlap(layout, shape, region, dim, index)) for index in window)
        per_dim.append([(index, start, length) for index, start, length in overlaps if length > 0])
    for combination in itertools.product(*per_dim):
        box = Region.unchecked(
            tuple(start for _, start, _ in combination), tuple(length for _, _, length in combination)
        )
        yield tuple(index for index, _, _ in combination), box


def _window(layout: Layout, shape: Sequence[int], region: Region) -> list[range]:
    """Return which shards overlap a region along every dim, empty ones between them included."""
    bounds = zip(shape, region.offset, region.stop, strict=True)
    return [layout.shards_meeting(dim, size, start, stop) for dim, (size, start, stop) in enumerate(bounds)]


def _overlap(layout: Layout, shape: Sequence[int], region: Region, dim: int, index: int) -> tuple[int, int]:
    """Return start and length, along a dim, of the overlap of a shard and a region."""
    start, stop = layout.shard_bounds(dim, shape[dim], index)
    first = max(start, region.offset[dim])
    return first, min(stop, region.offset[dim] + region.shape[dim]) - first


@dataclass(slots=True)
class _DraftMoves:
    """The moves of a plan that is being made."""

    copies: list[Move] = field(default_factory=list)
    sends: defaultdict[int, list[Move]] = field(default_factory=lambda: defaultdict(list))
    receives: defaultdict[int, list[Move]] = field(default_factory=lambda: defaultdict(list))
    forwards: list[Move] = field(default_factory=list)


@lru_cache(maxsize=128)
def _planner(source: Layout, target: Layout, client: int) -> _Planner:
    return _Planner(source, target, client)


class _Planner:
    """Plans one client's side of exchanges between two layouts, for tensors of any shape.

    The devices that hold each part do not depend on the shape, so the planner looks them up once.
    """

    def __init__(self, source: Layout, target: Layout, client: int) -> None:
        self._source, self._target = source, target
        kept, reduced = kept_axes(source, target), reduced_axes(source, target)
        self._senders, self._receivers = _holders(source, (*kept, *reduced)), _holders(target, kept)
        # By part, this client's devices that hold it before, and this client's devices that need it.
        self._old_parts, self._new_parts = self._senders.held_by(client), self._receivers.held_by(client)
        self._clients_of = {part: self._senders.clients_of(part) for part in self._old_parts}
        self._client = client
        self._num_kept = len(kept)
        self._terms = list(itertools.product(*(range(source.mesh.dim_size(axis)) for axis in reduced)))
        self._offsets = target.mesh.offsets
        self._turns = _turns(source, target, (*kept, *reduced))
        self._same_device = _same_devices(source.mesh, target.mesh, client)
        self._is_local = self._senders.are_held_by_all(target.mesh.clients)

    def plan(self, shape: tuple[int, ...]) -> ExchangePlan:
        draft = _DraftMoves()
        for part, receivers in self._new_parts.items():
            self._receive(shape, part, receivers, draft)
        # If every client holds all parts, no client receives, and a search for receivers finds none.
        for part, senders in () if self._is_local else self._old_parts.items():
            self._send(shape, part, senders, draft)
        return ExchangePlan(
            copies=_in_order(draft.copies),
            sends=_by_client(draft.sends),
            receives=_by_client(draft.receives),
            forwards=_in_order(draft.forwards),
            is_local=self._is_local,
        )

    def _receive(self, shape: tuple[int, ...], part: Part, receivers: tuple[int, ...], draft: _DraftMoves) -> None:
        """Plan how this client's devices ``receivers``, which need the same new box, get it.

        If the client holds all terms of a box, each device copies the box. Otherwise the first device gets the box and
        forwards it to the others.
        """
        # Invariant: of a box, no byte comes to this client twice. So one device receives for all that need it.
        first, *others = receivers
        kept = part[len(shape) :]
        for index, box in overlapping_shards(self._source, shape, _box(self._target, shape, part)):
            terms = [(*index, *kept, *term) for term in self._terms]
            if all(term in self._old_parts for term in terms):
                draft.copies += [
                    _move(self._local_sender(term, receiver), receiver, box) for receiver in receivers for term in terms
                ]
                continue
            for term in terms:
                if term in self._old_parts:
                    # Terms that are here already meet the received ones on the device that reduces them.
                    draft.copies.append(_move(self._local_sender(term, first), first, box))
                else:
                    client, sender = self._senders.sender(term, int(self._turns[self._offsets.of(first) or 0]))
                    draft.receives[client].append(_move(sender, first, box))
            draft.forwards += [_move(first, other, box) for other in others]

    def _send(self, shape: tuple[int, ...], part: Part, senders: tuple[int, ...], draft: _DraftMoves) -> None:
        """Plan the messages to other clients from this client's devices ``senders``, which hold the same part.

        The mirror of `_receive`: of the receivers that overlap the part, those whose turn falls on this client.
        """
        clients, box = self._clients_of[part], _box(self._source, shape, part)
        window = _window(self._target, shape, box)
        kept = part[len(shape) : len(shape) + self._num_kept]
        devices, owners, is_first = self._receivers.at((*(slice(each.start, each.stop) for each in window), *kept))
        # The same arithmetic as in `_Holders.sender`. If the two differed, a client would wait for a box that no
        # client sends.
        turns = self._turns[self._offsets.of_all(devices)]
        is_mine = is_first & (turns % len(clients) == clients.index(self._client))
        for index in map(tuple, np.argwhere(is_mine.any(axis=-1)).tolist()):
            new_box = _box(self._target, shape, [shards[i] for shards, i in zip(window, index, strict=True)])
            overlap = box.intersect(new_box)
            if overlap is None:
                continue
            chosen = is_mine[index]
            receivers = (array[index][chosen].tolist() for array in (devices, owners, turns))
            for receiver, client, turn in zip(*receivers, strict=True):
                # A client that holds the part copies it itself.
                if client not in clients:
                    draft.sends[client].append(_move(senders[turn // len(clients) % len(senders)], receiver, overlap))

    def _local_sender(self, part: Part, receiver: int) -> int:
        devices = self._old_parts[part]
        # The same device, if it holds the part: that copy crosses no bus, and may even be left out.
        same = self._same_device.get(receiver)
        return same if same in devices else devices[receiver % len(devices)]


def _same_devices(source: Mesh, target: Mesh, client: int) -> Mapping[int, int]:
    """Return, by a client's target device ids, the id of the same device in the source mesh."""
    if source == target:
        return {device: device for device in target.devices_of(client)}
    # Each mesh counts ids separately, so only a name shows that two meshes share a device.
    by_name = {source.device_name(device): device for device in source.devices_of(client)}
    names = {device: target.device_name(device) for device in target.devices_of(client)}
    return {device: by_name[name] for device, name in names.items() if name in by_name}


def _box(layout: Layout, shape: Sequence[int], part: Sequence[int]) -> Region:
    """Return the box of a part or of a shard."""
    bounds = [layout.shard_bounds(dim, size, index) for dim, (size, index) in enumerate(zip(shape, part, strict=False))]
    return Region.unchecked(tuple(start for start, _ in bounds), tuple(stop - start for start, stop in bounds))


def _move(source: int, target: int, box: Region) -> Move:
    return Move(target, box.offset, box.shape, source)


def _in_order(moves: Iterable[Move]) -> tuple[Move, ...]:
    # The same order as `Move`'s, without a call of its comparison for each pair.
    return tuple(sorted(moves, key=attrgetter("target", "offset", "shape", "source")))


def _by_client(moves: Mapping[int, Iterable[Move]]) -> dict[int, tuple[Move, ...]]:
    return {client: _in_order(unsorted) for client, unsorted in sorted(moves.items())}
