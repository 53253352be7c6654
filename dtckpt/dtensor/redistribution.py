"""Redistribution: bring a tensor into another layout, on the same mesh or on another.

A change of layout is one exchange of boxes, or a few: `plan_steps` puts a layout in between where that is cheaper (a
large sum that everyone wants is scattered first, then gathered) or needed (reductions of different kinds).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence

import torch

from dtckpt.dtensor import transport
from dtckpt.dtensor.devices import device_of
from dtckpt.errors import LayoutError
from dtckpt.layout import MATCH, UNSHARDED, Layout
from dtckpt.planning.exchange import Move, kept_axes, kind_of, plan_exchange, reduced_axes, term_of
from dtckpt.region import Region

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


def plan_steps(source: Layout, target: Layout, shape: Sequence[int], itemsize: int) -> list[Layout]:
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
        elif _is_worth_scattering(here, wanted, axes, math.prod(shape) * itemsize):
            here = _scattered(here, axes, shape)
        else:
            return [*steps, wanted] if here != wanted else steps
        steps.append(here)


def _without(layout: Layout, axes: Sequence[str]) -> Layout:
    partial = {axis: op for axis, op in layout.partial.items() if axis not in axes}
    return Layout(layout.sharding_specs, layout.mesh, partial) if axes else layout


def _is_worth_scattering(here: Layout, target: Layout, axes: Sequence[str], nbytes: int) -> bool:
    """Whether everyone wants the reduced tensor, so that scattering its reduction and gathering it moves less."""
    terms = math.prod(here.mesh.dim_size(axis) for axis in axes)
    taken = nbytes // max(1, math.prod(target.shard_grid))
    used = {name for spec in target.sharding_specs if spec != UNSHARDED for name in _axes(spec)}
    return terms > 2 and here.rank > 0 and here.mesh == target.mesh and not used & set(axes) and taken > SCATTER_NBYTES


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
    for step in plan_steps(source, target, shape, dtype.itemsize):
        components = exchange(components, here, step, shape, dtype)
        here = step
    return _make_terms(dict(components), here, target)


def exchange(
    components: Components, source: Layout, target: Layout, shape: tuple[int, ...], dtype: torch.dtype
) -> dict[int, torch.Tensor]:
    """Run one exchange of boxes; reductions are all of one kind. Collective: as `redistribute`."""
    client = _client_of(source, target)
    plan = plan_exchange(source, target, shape, client)
    axes = reduced_axes(source, target)
    regions = {device: target.region(device, shape) for device in target.mesh.local_device_ids()}
    devices = dict(zip(target.mesh.local_device_ids(), map(device_of, target.mesh.local_devices()), strict=True))
    boxes = _Boxes(source, shape)
    if not axes and plan.is_local and _is_unchanged(plan.copies, boxes, regions):
        kept = {move.target: components[move.source] for move in plan.copies}
        if all(component.device == devices[device] for device, component in kept.items()):
            return {
                device: kept[device] if device in kept else _new(regions[device], dtype, devices[device])
                for device in regions
            }
    outgoing = {
        peer: torch.cat([_as_bytes(boxes.cut(components, move)) for move in moves])
        for peer, moves in plan.sends.items()
    }
    sizes = {peer: sum(move.region.numel for move in moves) * dtype.itemsize for peer, moves in plan.receives.items()}
    clients = _all_clients(source, target)
    incoming = {} if plan.is_local or client not in clients else transport.swap(outgoing, sizes, clients)
    arrived = [(move, boxes.cut(components, move)) for move in plan.copies]
    for peer, moves in plan.receives.items():
        start = 0
        for move in moves:
            nbytes = move.region.numel * dtype.itemsize
            arrived.append((move, incoming[peer][start : start + nbytes].view(dtype).reshape(move.shape)))
            start += nbytes
    result = {device: _new(region, dtype, devices[device]) for device, region in regions.items()}
    _deliver(arrived, result, regions, source, axes)
    for move in plan.forwards:
        box = move.region
        giver = result[move.source][box.relative_to(regions[move.source]).slices()]
        result[move.target][box.relative_to(regions[move.target]).slices()].copy_(giver)
    return result


def _deliver(
    arrived: Sequence[tuple[Move, torch.Tensor]],
    result: Mapping[int, torch.Tensor],
    regions: Mapping[int, Region],
    source: Layout,
    axes: Sequence[str],
) -> None:
    """Write boxes into the new components, reducing terms in their order, so that replicas agree bit for bit."""
    ops = [source.partial[axis] for axis in axes]
    divisor = math.prod(source.mesh.dim_size(axis) for axis in axes if source.partial[axis] == "avg")

    def place(item: tuple[Move, torch.Tensor]) -> tuple[int, tuple[int, ...]]:
        return item[0].target, item[0].offset

    ordered = sorted(arrived, key=lambda item: (*place(item), term_of(source, axes, item[0].source)))
    for (device, _), group in itertools.groupby(ordered, place):
        terms = list(group)
        into = result[device][terms[0][0].region.relative_to(regions[device]).slices()]
        into.copy_(terms[0][1])
        for _, term in terms[1:]:
            into.copy_(_REDUCERS[ops[0]](into, term.to(into.device)))
        if divisor > 1:
            into.copy_(torch.div(into, divisor))


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
    """Whether every new component is an old one, whole."""
    return all(boxes.is_all_of(move) and move.region == regions[move.target] for move in copies)


def _new(region: Region, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty(region.shape, dtype=dtype, device=device)


def _as_bytes(box: torch.Tensor) -> torch.Tensor:
    return box.detach().contiguous().reshape(-1).view(torch.uint8)


def _all_clients(source: Layout, target: Layout) -> tuple[int, ...]:
    return tuple(sorted({*source.mesh.clients, *target.mesh.clients}))


def _client_of(source: Layout, target: Layout) -> int:
    for mesh in (source.mesh, target.mesh):
        if mesh.local_device_ids():
            return mesh.client_of(mesh.local_device_ids()[0])
    return -1
