"""Plans for moving a tensor between layouts: which device gives which box to which, for any two layouts on any meshes.

One formulation serves every change of layout. A device holds a *part*: a box of the tensor and, where reductions are
pending, one *term* of them. A device's new box is put together from all parts that meet it, cut to it, and reduced
over the terms. Slicing, all-gather, all-to-all, reduce-scatter, broadcast and moves to another mesh are cases of this.

Each byte goes at most once from one client to another: a device of the same client is asked first, and of several
devices of one client that need the same box, one receives it and hands it on. Where several remote devices could give
a box, the place of the taker in its mesh decides, so takers spread over givers, and both sides decide alike without a
word. A client plans only what touches it.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from dtckpt.layout import Layout
from dtckpt.mesh import Mesh
from dtckpt.region import Region

Place = tuple[int, ...]
"""Coordinates along some axes of a mesh."""


@dataclass(frozen=True, slots=True, order=True)
class Move:
    """One box that a device of the source mesh gives to a device of the target mesh, both by global device id.

    Moves sort by taker, box and giver; giver and taker know the order of a message from this alone.
    """

    target: int
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    source: int

    @property
    def region(self) -> Region:
        """The box, in global indices."""
        return Region(self.offset, self.shape)


@dataclass(frozen=True, slots=True)
class ExchangePlan:
    """One client's side of a change of layout; moves are in order.

    Args:
        copies: Between devices of this client.
        sends: By taking client, ascending; the moves of one client are one message.
        receives: By giving client, ascending.
        forwards: When all has been received: from one of this client's devices to another, both of the target mesh.
        is_local: Whether no client needs anything from another: each holds all parts.
    """

    copies: tuple[Move, ...]
    sends: Mapping[int, tuple[Move, ...]]
    receives: Mapping[int, tuple[Move, ...]]
    forwards: tuple[Move, ...]
    is_local: bool

    @property
    def num_received(self) -> int:
        """Elements that come from other clients."""
        return sum(move.region.numel for moves in self.receives.values() for move in moves)


@lru_cache(maxsize=4096)
def plan_exchange(source: Layout, target: Layout, shape: tuple[int, ...], client: int) -> ExchangePlan:
    """Plan one client's side of moving a tensor of global ``shape`` from one layout to another.

    Reductions that are pending in both layouts on an axis of one name, size and op stay pending; all others of the
    source are done. The target may have no others.
    """
    return _Planner(source, target, shape, client).plan()


def reduced_axes(source: Layout, target: Layout) -> tuple[str, ...]:
    """Return the axes of the source whose reduction a change of layout does, in mesh order."""
    return tuple(
        axis for axis in source.mesh.mesh_dim_names if axis in source.partial and axis not in kept_axes(source, target)
    )


def kept_axes(source: Layout, target: Layout) -> tuple[str, ...]:
    """Return the axes whose reduction stays pending, in the source mesh's order.

    The last axis is reduced first, and reductions of different kinds do not commute. So where kinds are mixed only
    leading axes can stay.
    """
    pending = [axis for axis in source.mesh.mesh_dim_names if axis in source.partial]
    kept = [
        axis
        for axis in pending
        if target.partial.get(axis) == source.partial[axis] and target.mesh.dim_size(axis) == source.mesh.dim_size(axis)
    ]
    if len({kind_of(source.partial[axis]) for axis in pending}) > 1:
        kept = list(itertools.takewhile(kept.__contains__, pending))
        if [axis for axis in target.mesh.mesh_dim_names if axis in kept] != kept:
            kept = []
    return tuple(kept)


def kind_of(reduce_op: str) -> str:
    """Return a name for the reductions that commute with this one: an average is a sum, divided."""
    return "sum" if reduce_op == "avg" else reduce_op


def term_of(source: Layout, axes: Sequence[str], device: int) -> Place:
    """Return which term of the reductions along ``axes`` a device of the source mesh holds."""
    place = source.mesh.coordinate(device)
    return tuple(place[source.mesh.axis_index(axis)] for axis in axes)


@lru_cache(maxsize=1024)
def _holders(layout: Layout, axes: tuple[str, ...]) -> dict[tuple[Place, Place], dict[int, tuple[int, ...]]]:
    """Return who holds each part: by shard index and place along ``axes``, the devices of each client, ascending."""
    mesh = layout.mesh
    columns = [mesh.axis_index(axis) for axis in axes]
    found: dict[tuple[Place, Place], dict[int, list[int]]] = {}
    for device, shard in zip(mesh.device_ids, layout.offset_to_shard(), strict=True):
        place = mesh.coordinate(device) if axes else ()
        key = shard, tuple(place[column] for column in columns)
        found.setdefault(key, {}).setdefault(mesh.client_of(device), []).append(device)
    return {key: {client: tuple(ids) for client, ids in clients.items()} for key, clients in found.items()}


@lru_cache(maxsize=8192)
def _edges(layout: Layout, dim: int, size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    shards = layout.shards(dim, size)
    return tuple(start for start, _ in shards), tuple(stop for _, stop in shards)


def meeting(layout: Layout, shape: Sequence[int], region: Region) -> Iterator[tuple[Place, Region]]:
    """Yield every shard of a layout that shares elements with a region: its index, and the common box."""
    per_dim = []
    for dim, (start, stop, size) in enumerate(zip(region.offset, region.stop, shape, strict=True)):
        starts, stops = _edges(layout, dim, size)
        shards = range(bisect_right(stops, start), bisect_left(starts, stop))
        hits = [(index, max(start, starts[index]), min(stop, stops[index])) for index in shards]
        per_dim.append([(index, first, last) for index, first, last in hits if first < last])
    for combination in itertools.product(*per_dim):
        offset = tuple(first for _, first, _ in combination)
        box = Region(offset, tuple(last - first for _, first, last in combination))
        yield tuple(index for index, _, _ in combination), box


class _Planner:
    def __init__(self, source: Layout, target: Layout, shape: tuple[int, ...], client: int) -> None:
        self._source, self._target, self._shape, self._client = source, target, shape, client
        kept, reduced = kept_axes(source, target), reduced_axes(source, target)
        self._givers = _holders(source, (*kept, *reduced))
        self._takers = _holders(target, kept)
        self._terms = list(itertools.product(*(range(source.mesh.dim_size(axis)) for axis in reduced)))
        self._num_kept = len(kept)
        self._same_device = _same_devices(source.mesh, target.mesh)

    def plan(self) -> ExchangePlan:
        copies: list[Move] = []
        receives: dict[int, list[Move]] = {}
        forwards: list[Move] = []
        for key, clients in self._takers.items():
            mine = clients.get(self._client, ())
            if mine:
                self._plan_taking(key, mine, copies, receives, forwards)
        everyone = set(self._target.mesh.clients)
        return ExchangePlan(
            copies=tuple(sorted(copies)),
            sends=_in_order(self._sends()),
            receives=_in_order(receives),
            forwards=tuple(sorted(forwards)),
            is_local=all(everyone <= set(holders) for holders in self._givers.values()),
        )

    def _plan_taking(
        self,
        key: tuple[Place, Place],
        takers: tuple[int, ...],
        copies: list[Move],
        receives: dict[int, list[Move]],
        forwards: list[Move],
    ) -> None:
        """Plan how this client's devices ``takers``, which need the same box, get it."""
        shard, kept = key
        for index, box in meeting(self._source, self._shape, self._box(self._target, shard)):
            holders = [self._givers[index, kept + term] for term in self._terms]
            if all(self._client in clients for clients in holders):
                copies.extend(
                    _move(self._local_giver(clients[self._client], taker), taker, box)
                    for taker in takers
                    for clients in holders
                )
                continue
            first, *others = takers
            for clients in holders:
                if self._client in clients:
                    copies.append(_move(self._local_giver(clients[self._client], first), first, box))
                else:
                    giver, device = self._remote_giver(clients, first)
                    receives.setdefault(giver, []).append(_move(device, first, box))
            forwards.extend(_move(first, other, box) for other in others)

    def _sends(self) -> dict[int, list[Move]]:
        sends: dict[int, list[Move]] = {}
        for (shard, place), clients in self._givers.items():
            if self._client not in clients:
                continue
            kept = place[: self._num_kept]
            for index, box in meeting(self._target, self._shape, self._box(self._source, shard)):
                for taker, devices in self._takers[index, kept].items():
                    if taker in clients:
                        continue
                    giver, device = self._remote_giver(clients, devices[0])
                    if giver == self._client:
                        sends.setdefault(taker, []).append(_move(device, devices[0], box))
        return sends

    def _box(self, layout: Layout, shard: Place) -> Region:
        bounds = [
            layout.shards(dim, size)[index] for dim, (size, index) in enumerate(zip(self._shape, shard, strict=True))
        ]
        return Region(tuple(start for start, _ in bounds), tuple(stop - start for start, stop in bounds))

    def _local_giver(self, devices: tuple[int, ...], taker: int) -> int:
        same = self._same_device.get(taker)
        return same if same in devices else devices[taker % len(devices)]

    def _remote_giver(self, clients: Mapping[int, tuple[int, ...]], taker: int) -> tuple[int, int]:
        """Return client and device that give a box to the remote device ``taker``."""
        order = taker - self._target.mesh.min_global_device_id()
        names = sorted(clients)
        client = names[order % len(names)]
        devices = clients[client]
        return client, devices[order // len(names) % len(devices)]


def _same_devices(source: Mesh, target: Mesh) -> Mapping[int, int]:
    """Return, by target device id, the id of the same device in the source mesh."""
    if source == target:
        return {device: device for device in target.device_ids}
    by_name = dict(zip(source.portable().global_devices(), source.device_ids, strict=True))
    names = zip(target.device_ids, target.portable().global_devices(), strict=True)
    return {device: by_name[name] for device, name in names if name in by_name}


def _move(source: int, target: int, box: Region) -> Move:
    return Move(target, box.offset, box.shape, source)


def _in_order(moves: Mapping[int, Iterable[Move]]) -> dict[int, tuple[Move, ...]]:
    return {client: tuple(sorted(listed)) for client, listed in sorted(moves.items())}
