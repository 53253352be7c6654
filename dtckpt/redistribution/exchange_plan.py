"""Plans for moving a tensor between layouts: which device gives which box to which, for any two layouts on any meshes.

One formulation serves every change of layout. A device holds a *part*: a box of the tensor and, where reductions are
pending, one *term* of them. A device's new box is put together from all parts that meet it, cut to it, and reduced
over the terms. Slicing, all-gather, all-to-all, reduce-scatter, broadcast and moves to another mesh are cases of this.

Each byte goes at most once from one client to another: a device of the same client is asked first, and of several
devices of one client that need the same box, one receives it and hands it on. Where several remote devices could give
a box, the place of the taker in its mesh decides, so takers spread over givers, and both sides decide alike without a
word.

A client plans only what touches it. The parts of a layout are the mesh's grid of devices, its axes put in the order of
the tensor's dims, so the parts that meet a box are a slice of that grid, and no other part is looked at.
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
        return Region.unchecked(self.offset, self.shape)


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
    return _planner(source, target, client).plan(shape)


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


@dataclass(frozen=True, slots=True)
class _Parts:
    """Who holds the parts of a layout: arrays by shard index, place along some axes, and copy.

    Args:
        devices: Ids. The copies of a part are in order of their clients, and those of one client ascend.
        owners: Their clients.
        is_first: Which copies are the first one of their client.
    """

    devices: npt.NDArray[np.int64]
    owners: npt.NDArray[np.int64]
    is_first: npt.NDArray[np.bool_]

    def at(
        self, where: tuple[int | slice, ...]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """Return the arrays cut alike."""
        return self.devices[where], self.owners[where], self.is_first[where]

    def held_by(self, client: int) -> dict[Place, tuple[int, ...]]:
        """Return the parts that a client holds, and its devices that do, ascending."""
        mine = self.owners == client
        found: dict[Place, list[int]] = {}
        for (*part, _), device in zip(np.argwhere(mine).tolist(), self.devices[mine].tolist(), strict=True):
            found.setdefault(tuple(part), []).append(device)
        return {part: tuple(devices) for part, devices in found.items()}

    def clients_of(self, part: Place) -> list[int]:
        """Return the clients that hold a part, ascending."""
        clients: list[int] = self.owners[part][self.is_first[part]].tolist()
        return clients

    def giver(self, part: Place, turn: int) -> tuple[int, int]:
        """Return client and device that give a part to a remote device whose number among takers is ``turn``."""
        starts = np.flatnonzero(self.is_first[part])
        turn, number = divmod(turn, len(starts))
        copies = self.devices[part]
        own = copies[starts[number] : starts[number + 1] if number + 1 < len(starts) else None]
        return int(self.owners[part][starts[number]]), int(own[turn % len(own)])

    def are_held_by_all(self, clients: Sequence[int]) -> bool:
        """Tell whether each of these clients holds every part."""
        if self.devices.shape[-1] < len(clients):
            return False
        counts = (self.is_first & np.isin(self.owners, clients)).sum(axis=-1)
        return bool((counts == len(clients)).all())


@lru_cache(maxsize=128)
def _parts(layout: Layout, axes: tuple[str, ...]) -> _Parts:
    mesh = layout.mesh
    devices = layout.devices_by_part(axes)
    owners = mesh.owners.reshape(-1)[devices - mesh.min_global_device_id()]
    order = owners.argsort(axis=-1, kind="stable")
    devices, owners = (np.take_along_axis(array, order, axis=-1) for array in (devices, owners))
    is_first = np.ones(owners.shape, dtype=np.bool_)
    np.not_equal(owners[..., 1:], owners[..., :-1], out=is_first[..., 1:])
    return _Parts(devices, owners, is_first)


def _turns(source: Layout, target: Layout, axes: Sequence[str]) -> npt.NDArray[np.int64]:
    """Return, by place in the target's mesh, the number that tells a device which copy of a part to ask for.

    On one mesh that is its own place among the copies: it asks in its line of devices, as a collective along an axis
    would, so all copies give as much. On another mesh it is its place there.
    """
    mesh = target.mesh
    numbers = np.arange(mesh.size())
    if source.mesh != mesh:
        return numbers
    used = {*itertools.chain(*source.split_axes), *axes}
    copies = [axis for axis, name in enumerate(mesh.mesh_dim_names) if name not in used]
    if not copies:
        return np.zeros_like(numbers)
    places = np.unravel_index(numbers, mesh.shape)
    shape = tuple(mesh.shape[axis] for axis in copies)
    return np.ravel_multi_index(tuple(places[axis] for axis in copies), shape).astype(np.int64)


def meeting(layout: Layout, shape: Sequence[int], region: Region) -> Iterator[tuple[Place, Region]]:
    """Yield every shard of a layout that shares elements with a region: its index, and the common box."""
    per_dim = []
    for dim, window in enumerate(_window(layout, shape, region)):
        hits = ((index, *_common(layout, shape, region, dim, index)) for index in window)
        per_dim.append([(index, start, length) for index, start, length in hits if length > 0])
    for combination in itertools.product(*per_dim):
        box = Region.unchecked(
            tuple(start for _, start, _ in combination), tuple(length for _, _, length in combination)
        )
        yield tuple(index for index, _, _ in combination), box


def _window(layout: Layout, shape: Sequence[int], region: Region) -> list[range]:
    """Return which shards meet a region along every dim, empty ones between them included."""
    bounds = zip(shape, region.offset, region.stop, strict=True)
    return [layout.shards_meeting(dim, size, start, stop) for dim, (size, start, stop) in enumerate(bounds)]


def _common(layout: Layout, shape: Sequence[int], region: Region, dim: int, index: int) -> tuple[int, int]:
    """Return where along a dim what a shard has in common with a region starts, and its length."""
    start, stop = layout.shard_bounds(dim, shape[dim], index)
    first = max(start, region.offset[dim])
    return first, min(stop, region.offset[dim] + region.shape[dim]) - first


@dataclass(slots=True)
class _Draft:
    """The moves of a plan, as they are found."""

    copies: list[Move] = field(default_factory=list)
    sends: defaultdict[int, list[Move]] = field(default_factory=lambda: defaultdict(list))
    receives: defaultdict[int, list[Move]] = field(default_factory=lambda: defaultdict(list))
    forwards: list[Move] = field(default_factory=list)


@lru_cache(maxsize=128)
def _planner(source: Layout, target: Layout, client: int) -> _Planner:
    return _Planner(source, target, client)


class _Planner:
    """Plans one client's side of a change of layout; who holds which part does not depend on the shape."""

    def __init__(self, source: Layout, target: Layout, client: int) -> None:
        self._source, self._target = source, target
        kept, reduced = kept_axes(source, target), reduced_axes(source, target)
        self._givers, self._takers = _parts(source, (*kept, *reduced)), _parts(target, kept)
        self._held, self._wanted = self._givers.held_by(client), self._takers.held_by(client)
        self._holders = {part: self._givers.clients_of(part) for part in self._held}
        self._client = client
        self._num_kept = len(kept)
        self._terms = list(itertools.product(*(range(source.mesh.dim_size(axis)) for axis in reduced)))
        self._first_id = target.mesh.min_global_device_id()
        self._turns = _turns(source, target, (*kept, *reduced))
        self._same_device = _same_devices(source.mesh, target.mesh, client)
        self._is_local = self._givers.are_held_by_all(target.mesh.clients)

    def plan(self, shape: tuple[int, ...]) -> ExchangePlan:
        draft = _Draft()
        for part, takers in self._wanted.items():
            self._take(shape, part, takers, draft)
        for part, givers in () if self._is_local else self._held.items():
            self._give(shape, part, givers, draft)
        return ExchangePlan(
            copies=_in_order(draft.copies),
            sends=_by_client(draft.sends),
            receives=_by_client(draft.receives),
            forwards=_in_order(draft.forwards),
            is_local=self._is_local,
        )

    def _take(self, shape: tuple[int, ...], part: Place, takers: tuple[int, ...], draft: _Draft) -> None:
        """Plan how this client's devices ``takers``, which need the same box, get it."""
        first, *others = takers
        kept = part[len(shape) :]
        for index, box in meeting(self._source, shape, _box(self._target, shape, part)):
            terms = [(*index, *kept, *term) for term in self._terms]
            if all(term in self._held for term in terms):
                draft.copies += [
                    _move(self._local_giver(term, taker), taker, box) for taker in takers for term in terms
                ]
                continue
            for term in terms:
                if term in self._held:
                    draft.copies.append(_move(self._local_giver(term, first), first, box))
                else:
                    client, giver = self._givers.giver(term, int(self._turns[first - self._first_id]))
                    draft.receives[client].append(_move(giver, first, box))
            draft.forwards += [_move(first, other, box) for other in others]

    def _give(self, shape: tuple[int, ...], part: Place, givers: tuple[int, ...], draft: _Draft) -> None:
        """Plan to whom this client's devices ``givers``, which hold the same box, give some of it."""
        clients, box = self._holders[part], _box(self._source, shape, part)
        window = _window(self._target, shape, box)
        kept = part[len(shape) : len(shape) + self._num_kept]
        devices, owners, is_first = self._takers.at((*(slice(hits.start, hits.stop) for hits in window), *kept))
        turns = self._turns[devices - self._first_id]
        is_mine = is_first & (turns % len(clients) == clients.index(self._client))
        for place in map(tuple, np.argwhere(is_mine.any(axis=-1)).tolist()):
            common = box.intersect(
                _box(self._target, shape, [hits[at] for hits, at in zip(window, place, strict=True)])
            )
            if common is None:
                continue
            chosen = is_mine[place]
            takers = (array[place][chosen].tolist() for array in (devices, owners, turns))
            for taker, client, turn in zip(*takers, strict=True):
                if client not in clients:
                    draft.sends[client].append(_move(givers[turn // len(clients) % len(givers)], taker, common))

    def _local_giver(self, part: Place, taker: int) -> int:
        devices = self._held[part]
        same = self._same_device.get(taker)
        return same if same in devices else devices[taker % len(devices)]


def _same_devices(source: Mesh, target: Mesh, client: int) -> Mapping[int, int]:
    """Return, by a client's target device ids, the id of the same device in the source mesh."""
    if source == target:
        return {device: device for device in target.devices_of(client)}
    by_name = {source.device_name(device): device for device in source.devices_of(client)}
    names = {device: target.device_name(device) for device in target.devices_of(client)}
    return {device: by_name[name] for device, name in names.items() if name in by_name}


def _box(layout: Layout, shape: Sequence[int], part: Sequence[int]) -> Region:
    """Return the box of a part, or of a shard: the indices come first."""
    bounds = [layout.shard_bounds(dim, size, index) for dim, (size, index) in enumerate(zip(shape, part, strict=False))]
    return Region.unchecked(tuple(start for start, _ in bounds), tuple(stop - start for start, stop in bounds))


def _move(source: int, target: int, box: Region) -> Move:
    return Move(target, box.offset, box.shape, source)


def _in_order(moves: Iterable[Move]) -> tuple[Move, ...]:
    # As `Move` sorts, without calling it for each comparison.
    return tuple(sorted(moves, key=attrgetter("target", "offset", "shape", "source")))


def _by_client(moves: Mapping[int, Iterable[Move]]) -> dict[int, tuple[Move, ...]]:
    return {client: _in_order(listed) for client, listed in sorted(moves.items())}
