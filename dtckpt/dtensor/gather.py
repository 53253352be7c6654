"""Put a whole tensor together from components, on one client or over all clients of the mesh."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch

from dtckpt.dtensor import transport
from dtckpt.layout import Layout
from dtckpt.region import Region

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

Term = tuple[int, ...]
"""Position along the axes with pending reductions, in mesh order: which summand a component is part of."""
Part = tuple[Region, Term]


def full_tensor(
    components: Sequence[torch.Tensor], layout: Layout, shape: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """Return the tensor that the components of all clients make up.

    Collective: Over the mesh's clients, unless every client holds every part.
    """
    shape = tuple(shape)
    mesh = layout.mesh
    local = dict(zip(mesh.local_device_ids(), components, strict=True))
    parts = _parts(layout, shape)
    # All clients must come to the same answer here: one that has everything is still needed by those that have not.
    if all(set(map(mesh.client_of, devices)) == set(mesh.clients) for devices in parts.values()):
        found = {part: next(local[device] for device in devices if device in local) for part, devices in parts.items()}
    else:
        found = _exchange(local, {part: devices[0] for part, devices in parts.items()}, layout, dtype)
    target = components[0].device if components else torch.device("cpu")
    terms: dict[Term, torch.Tensor] = {}
    for (region, term), component in found.items():
        whole = terms.setdefault(term, torch.empty(shape, dtype=dtype, device=target))
        whole[region.slices()].copy_(component)
    for axis, reduce_op in reversed(_pending(layout)):
        terms = _reduce(terms, reduce_op, layout.mesh.dim_size(axis))
    return terms[()] if terms else torch.empty(shape, dtype=dtype, device=target)


def _pending(layout: Layout) -> list[tuple[str, str]]:
    """Return ``(axis, reduce op)`` of the pending reductions, in mesh order."""
    return [(axis, layout.partial[axis]) for axis in layout.mesh.dim_names if axis in layout.partial]


def _parts(layout: Layout, shape: tuple[int, ...]) -> dict[Part, list[int]]:
    """Return every distinct non-empty part of the tensor and the devices that hold it, ascending."""
    names = layout.mesh.dim_names
    pending = [names.index(axis) for axis, _ in _pending(layout)]
    parts: dict[Part, list[int]] = {}
    for device in layout.mesh.device_ids:
        region = layout.region(device, shape)
        if not region.is_empty:
            place = layout.mesh.coordinate(device)
            parts.setdefault((region, tuple(place[axis] for axis in pending)), []).append(device)
    return parts


def _reduce(terms: Mapping[Term, torch.Tensor], reduce_op: str, size: int) -> dict[Term, torch.Tensor]:
    """Reduce over the last position of the terms."""
    reduced: dict[Term, torch.Tensor] = {}
    for term, tensor in sorted(terms.items(), key=lambda item: item[0]):
        key = term[:-1]
        reduced[key] = _REDUCERS[reduce_op](reduced[key], tensor) if key in reduced else tensor
    if reduce_op == "avg":
        return {key: torch.div(tensor, size).to(tensor.dtype) for key, tensor in reduced.items()}
    return reduced


def _exchange(
    local: Mapping[int, torch.Tensor], sources: Mapping[Part, int], layout: Layout, dtype: torch.dtype
) -> dict[Part, torch.Tensor]:
    """Give every client all parts; ``sources`` names one device per part, the same on every client."""
    by_client: dict[int, list[Part]] = {client: [] for client in layout.mesh.clients}
    for part, device in sources.items():
        by_client[layout.mesh.client_of(device)].append(part)
    sizes = [sum(part[0].numel for part in parts) * dtype.itemsize for parts in by_client.values()]
    message = torch.zeros(max(sizes), dtype=torch.uint8)
    mine = [local[sources[part]] for parts in by_client.values() for part in parts if sources[part] in local]
    if mine:
        flat = torch.cat([component.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for component in mine])
        message[: flat.numel()] = flat
    found: dict[Part, torch.Tensor] = {}
    for parts, received in zip(by_client.values(), transport.all_gather(message, layout.mesh.clients), strict=True):
        start = 0
        for part in parts:
            nbytes = math.prod(part[0].shape) * dtype.itemsize
            found[part] = received[start : start + nbytes].view(dtype).reshape(part[0].shape)
            start += nbytes
    return found
