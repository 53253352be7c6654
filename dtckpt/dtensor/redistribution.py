"""Redistribution: bring a tensor into another layout, on the same mesh or on another.

A change of layout is one exchange of boxes, or a few: `plan_steps` puts a layout in between where that is cheaper (a
large sum that everyone wants is scattered first, then gathered) or needed (reductions of different kinds).
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Mapping, Sequence

import torch

from dtckpt.dtensor import transport
from dtckpt.dtensor.devices import device_of
from dtckpt.errors import LayoutError
from dtckpt.layout import MATCH, UNSHARDED, Layout
from dtckpt.planning.exchange import Move, kept_axes, kind_of, plan_exchange, reduced_axes, term_of
from dtckpt.region import Region

_LOG = logging.getLogger("dtckpt.dtensor")

Components = Mapping[int, torch.Tensor]
"""This client's components, by global device id of their mesh."""

SCATTER_NBYTES = 256 << 10
"""A sum larger than this is scattered and then gathered, if three or more terms make it worth a second round."""

_REDUCERS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "min": torch.minimum,
    "max": torch.maximum,
    "product": torch.mul,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}
_ALL_REDUCE = {"sum", "avg", "min", "max", "product"}
_NEUTRAL = {"sum": 0, "product": 1, "bxor": 0}
"""What all devices but the first hold when a value becomes a term; with the other ops every device may hold it."""


def resolve_match(layout: Layout, source: Layout) -> Layout:
    """Return ``layout`` with every MATCH spec replaced by the source's spec of that dim.

    Raises:
        LayoutError: The ranks differ, or a kept spec collides with another one.
    """
    if layout.rank != source.rank:
        raise LayoutError(f"layout does not fit the tensor; got rank {layout.rank}, expected {source.rank}")
    if MATCH not in layout.sharding_specs:
        return layout
    specs = [
        kept if spec == MATCH else spec for spec, kept in zip(layout.sharding_specs, source.sharding_specs, strict=True)
    ]
    return Layout(specs, layout.mesh, layout.partial)


def plan_steps(source: Layout, target: Layout, shape: Sequence[int], dtype: torch.dtype) -> list[Layout]:
    """Return the layouts that a tensor goes through after ``source``, up to the target's sharding.

    Reductions that are pending in the target only are not part of it: `redistribute` makes terms of the result.
    """
    new = [axis for axis in target.partial if axis not in kept_axes(source, target)]
    is_mixed = len({kind_of(op) for op in target.partial.values()}) > 1
    # Terms of different kinds are made of the whole value, all axes together.
    wanted = _without(target, list(target.partial) if new and is_mixed else new)
    steps: list[Layout] = []
    here = source
    while True:
        axes = reduced_axes(here, wanted)
        if len({kind_of(here.partial[axis]) for axis in axes}) > 1:
            # Reductions of different kinds do not commute: the last axis goes first.
            here = _without(here, axes[-1:])
        elif _is_worth_scattering(here, wanted, axes, shape, dtype):
            here = _scattered(here, axes, shape)
        else:
            return [*steps, wanted] if here != wanted else steps
        steps.append(here)


def _without(layout: Layout, axes: Sequence[str]) -> Layout:
    partial = {axis: op for axis, op in layout.partial.items() if axis not in axes}
    return Layout(layout.sharding_specs, layout.mesh, partial) if axes else layout


def _is_worth_scattering(
    here: Layout, target: Layout, axes: Sequence[str], shape: Sequence[int], dtype: torch.dtype
) -> bool:
    """Whether everyone wants the reduced tensor, so that scattering its reduction and gathering it moves less."""
    terms = math.prod(here.mesh.dim_size(axis) for axis in axes)
    taken = math.prod(shape) * dtype.itemsize // max(1, math.prod(target.shard_grid))
    if terms <= 2 or here.rank == 0 or here.mesh != target.mesh or taken <= SCATTER_NBYTES:
        return False
    used = {name for spec in target.sharding_specs if spec != UNSHARDED for name in _axes(spec)}
    return not used & set(axes) and all_reduce_clients(here, target, axes, dtype) is None


def _axes(spec: str | tuple[str, ...]) -> tuple[str, ...]:
    return () if spec == UNSHARDED else (spec,) if isinstance(spec, str) else spec


def _scattered(here: Layout, axes: Sequence[str], shape: Sequence[int]) -> Layout:
    """Return the layout that also splits, over the reduced axes, the dim with the longest shards."""
    lengths = [size // shards for size, shards in zip(shape, here.shard_grid, strict=True)]
    dim = lengths.index(max(lengths))
    specs = here.sharding_specs
    specs[dim] = (*_axes(specs[dim]), *axes)
    partial = {axis: op for axis, op in here.partial.items() if axis not in axes}
    return Layout(specs, here.mesh, partial)


def redistribute(
    components: Components, source: Layout, target: Layout, shape: Sequence[int], dtype: torch.dtype
) -> dict[int, torch.Tensor]:
    """Return this client's components of a tensor in another layout.

    Collective: Over the clients of both meshes, unless no byte moves between clients for any of them.

    Args:
        components: By device id of the source mesh.
        source: The present layout.
        target: The layout wanted. An axis may be Partial that was not before: the value becomes a term there.
        shape: Global shape.
        dtype: The tensor's dtype.

    Returns:
        New memory by device id of the target mesh, except where a component does not change: that one is returned.
    """
    here, shape = source, tuple(shape)
    for step in plan_steps(source, target, shape, dtype):
        if _LOG.isEnabledFor(logging.DEBUG):  # before it starts: a client that hangs has said where
            _LOG.debug("redistribute %s of %s: %r to %r", shape, dtype, here, step)
        components = exchange(components, here, step, shape, dtype)
        here = step
    return _make_terms(dict(components), here, target)


def exchange(
    components: Components, source: Layout, target: Layout, shape: tuple[int, ...], dtype: torch.dtype
) -> dict[int, torch.Tensor]:
    """Run one exchange of boxes; reductions are all of one kind. Collective: as `redistribute`."""
    axes = reduced_axes(source, target)
    if peers := all_reduce_clients(source, target, axes, dtype):
        return _all_reduce(components, source, axes, peers)
    client = _client_of(source, target)
    plan = plan_exchange(source, target, shape, client)
    boxes = _Boxes(source, shape)
    regions = {device: target.region(device, shape) for device in target.mesh.local_device_ids()}
    devices = dict(zip(target.mesh.local_device_ids(), map(device_of, target.mesh.local_devices()), strict=True))
    if not axes and plan.is_local and _is_unchanged(plan.copies, boxes, regions):
        kept = {move.target: components[move.source] for move in plan.copies}
        if all(component.device == devices[device] for device, component in kept.items()):
            return {device: kept.get(device, _new(regions[device], dtype, devices[device])) for device in regions}
    result = {device: _new(region, dtype, devices[device]) for device, region in regions.items()}
    places = _Places(result, regions)
    outgoing = {peer: _message([boxes.cut(components, move) for move in moves]) for peer, moves in plan.sends.items()}
    incoming = {peer: _room(moves, places, dtype, is_final=not axes) for peer, moves in plan.receives.items()}
    clients = _all_clients(source, target)
    if not plan.is_local and client in clients and len(clients) > 1:
        transport.swap(outgoing, incoming, clients)
    arrived = [(move, boxes.cut(components, move)) for move in plan.copies]
    for peer, moves in plan.receives.items():
        start = 0
        for move in moves:
            nbytes = move.region.numel * dtype.itemsize
            arrived.append((move, incoming[peer][start : start + nbytes].view(dtype).reshape(move.shape)))
            start += nbytes
    _deliver(arrived, places, source, axes)
    for move in plan.forwards:
        places.of(move.target, move.region).copy_(places.of(move.source, move.region))
    return result


def all_reduce_clients(
    source: Layout, target: Layout, axes: Sequence[str], dtype: torch.dtype
) -> tuple[int, ...] | None:
    """Return the clients to reduce over if nothing but a reduction is to be done, each client having one device."""
    mesh = source.mesh
    is_reduction = bool(axes) and target == _without(source, axes) and len(mesh.local_device_ids()) == 1
    ops = {source.partial[axis] for axis in axes}
    if (
        not is_reduction
        or mesh.num_clients != mesh.size()
        or dtype not in transport.REDUCIBLE
        or not ops <= _ALL_REDUCE
    ):
        return None
    (device,) = mesh.local_device_ids()
    others = [name for name in mesh.mesh_dim_names if name not in axes]
    place = term_of(source, others, device)
    peers = tuple(sorted(mesh.client_of(peer) for peer in mesh.device_ids if term_of(source, others, peer) == place))
    return peers if len(peers) > 1 else None


def _all_reduce(
    components: Components, source: Layout, axes: Sequence[str], peers: tuple[int, ...]
) -> dict[int, torch.Tensor]:
    ((device, component),) = components.items()
    total = component.detach().cpu().clone(memory_format=torch.contiguous_format)
    transport.all_reduce(total, source.partial[axes[0]], peers)
    return {device: _averaged(total, source, axes).to(component.device)}


def _averaged(total: torch.Tensor, source: Layout, axes: Sequence[str]) -> torch.Tensor:
    """Divide a sum by the sizes of the axes that are averages, in place."""
    divisor = math.prod(source.mesh.dim_size(axis) for axis in axes if source.partial[axis] == "avg")
    return total.copy_(torch.div(total, divisor)) if divisor > 1 else total


def _message(boxes: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the bytes of boxes, one after the other; a single box that lies in one piece is not copied."""
    flat = [box.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for box in boxes]
    return flat[0] if len(flat) == 1 else torch.cat(flat)


def _room(moves: Sequence[Move], places: _Places, dtype: torch.dtype, *, is_final: bool) -> torch.Tensor:
    """Return memory for a message: the box's own place where it comes alone and lies there in one piece."""
    if is_final and len(moves) == 1:
        place = places.of(moves[0].target, moves[0].region)
        if place.device.type == "cpu" and place.is_contiguous():
            return place.view(-1).view(torch.uint8)
    return torch.empty(sum(move.region.numel for move in moves) * dtype.itemsize, dtype=torch.uint8)


class _Places:
    """Finds boxes in the new components."""

    def __init__(self, result: Mapping[int, torch.Tensor], regions: Mapping[int, Region]) -> None:
        self._result, self._regions = result, regions

    def of(self, device: int, box: Region) -> torch.Tensor:
        return self._result[device][box.relative_to(self._regions[device]).slices()]


def _deliver(
    arrived: Sequence[tuple[Move, torch.Tensor]], places: _Places, source: Layout, axes: Sequence[str]
) -> None:
    """Write boxes into the new components, reducing terms in their order, so that replicas agree bit for bit."""

    def box_of(item: tuple[Move, torch.Tensor]) -> tuple[int, tuple[int, ...]]:
        return item[0].target, item[0].offset

    ordered = sorted(arrived, key=lambda item: (*box_of(item), term_of(source, axes, item[0].source)))
    for (device, _), group in itertools.groupby(ordered, box_of):
        (move, first), *terms = group
        into = places.of(device, move.region)
        if first.data_ptr() != into.data_ptr():
            into.copy_(first)
        for _, term in terms:
            into.copy_(_REDUCERS[source.partial[axes[0]]](into, term.to(into.device)))
        _averaged(into, source, axes)


def _make_terms(components: dict[int, torch.Tensor], here: Layout, target: Layout) -> dict[int, torch.Tensor]:
    """Turn whole values into terms on the axes that are Partial in the target only."""
    # In mesh order: the last axis is reduced first, so what it needs to leave its term alone counts.
    for axis in (axis for axis in target.mesh.mesh_dim_names if axis in target.partial and axis not in here.partial):
        neutral = _NEUTRAL.get(target.partial[axis])
        for device, component in components.items():
            if neutral is not None and target.mesh.coordinate(device)[target.mesh.axis_index(axis)]:
                components[device] = torch.full_like(component, neutral)
    return components


class _Boxes:
    """Cuts boxes out of this client's source components."""

    def __init__(self, source: Layout, shape: tuple[int, ...]) -> None:
        self._regions = {device: source.region(device, shape) for device in source.mesh.local_device_ids()}

    def cut(self, components: Components, move: Move) -> torch.Tensor:
        return components[move.source][move.region.relative_to(self._regions[move.source]).slices()]

    def is_all_of(self, move: Move) -> bool:
        return move.region == self._regions[move.source]


def _is_unchanged(copies: Sequence[Move], boxes: _Boxes, regions: Mapping[int, Region]) -> bool:
    """Whether every new component is an old one, whole, and no two of them the same one, which they would share."""
    sources = {move.source for move in copies}
    return len(sources) == len(copies) and all(
        boxes.is_all_of(move) and move.region == regions[move.target] for move in copies
    )


def _new(region: Region, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty(region.shape, dtype=dtype, device=device)


def _all_clients(source: Layout, target: Layout) -> tuple[int, ...]:
    return tuple(sorted({*source.mesh.clients, *target.mesh.clients}))


def _client_of(source: Layout, target: Layout) -> int:
    for mesh in (source.mesh, target.mesh):
        if mesh.local_device_ids():
            return mesh.client_of(mesh.local_device_ids()[0])
    return -1
