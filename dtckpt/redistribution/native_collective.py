"""Hops that are a collective, run as one call of the communication library: all-reduce, all-gather, reduce-scatter.

Where every client has one device, a hop along some axes of one mesh is the same collective in every line of devices
along them. `recognise` says which, from the layouts alone, so that all members find the same; evenly split dims only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dtckpt.comm import host_memory
from dtckpt.comm.collectives import NativeCollectives, Work, average
from dtckpt.redistribution.exchange import Change, Memory, validate_reduction
from dtckpt.redistribution.exchange_plan import kind_of, reduced_axes, term_of
from dtckpt.redistribution.messages import Components, plain

ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER = "all_reduce", "all_gather", "reduce_scatter"


@dataclass(frozen=True, slots=True)
class Recognised:
    """A hop that is a collective.

    Args:
        kind: Which one.
        axes: The axes along which it runs; pieces stand in their order, major first.
        dim: The tensor dim that is gathered or scattered; -1 for an all-reduce.
    """

    kind: str
    axes: tuple[str, ...]
    dim: int = -1


def recognise(change: Change) -> Recognised | None:
    """Return which collective a hop is, or None: then it takes an exchange of boxes."""
    source, target = change.source, change.target
    mesh = source.mesh
    if mesh != target.mesh or mesh.num_clients != mesh.size() or mesh.num_clients == 1:
        return None
    reduced = reduced_axes(source, target)
    before, after = source.split_axes, target.split_axes
    if reduced and before == after:
        return Recognised(ALL_REDUCE, reduced)
    differing = [dim for dim, pair in enumerate(zip(before, after, strict=True)) if pair[0] != pair[1]]
    if len(differing) != 1:
        return None
    (dim,) = differing
    fine, coarse = (after[dim], before[dim]) if reduced else (before[dim], after[dim])
    tail = fine[len(coarse) :]
    finest = target if reduced else source
    if not tail or fine[: len(coarse)] != coarse or change.shape[dim] % finest.num_shards(dim):
        return None
    if not reduced:
        return Recognised(ALL_GATHER, tail, dim)
    return Recognised(REDUCE_SCATTER, tail, dim) if set(tail) == set(reduced) else None


class NativeHop:
    """A recognised hop of one tensor, for the client that has one device in the mesh.

    Args:
        change: What is wanted.
        found: Which collective it is.
    """

    is_local = False

    def __init__(self, change: Change, found: Recognised) -> None:
        self._change, self._found = change, found
        mesh = change.source.mesh
        (self._device,) = mesh.local_device_ids()
        fixed = [axis for axis in mesh.mesh_dim_names if axis not in found.axes]
        place = term_of(change.source, fixed, self._device)
        line = [device for device in mesh.device_ids if term_of(change.source, fixed, device) == place]
        members = sorted(line, key=mesh.client_of)
        # Which piece of the dim each member, by client, has.
        pieces = sorted(line, key=lambda device: term_of(change.source, found.axes, device))
        self._order = [pieces.index(device) for device in members]
        self._collectives = NativeCollectives(
            [mesh.client_of(device) for device in members], change.client, change.device
        )
        partial = change.source.partial
        ops = [partial[axis] for axis in found.axes if axis in partial]
        self._reduce_op = kind_of(ops[0]) if ops else ""
        if ops:
            validate_reduction(self._reduce_op, change.dtype)
        self._divisor = math.prod(mesh.dim_size(axis) for axis in found.axes if partial.get(axis) == "avg")

    def start(
        self, tensors: Sequence[Components], tag: int = 0, memory: Sequence[Memory] | None = None
    ) -> NativeTransfer:
        """Start the collective, which needs no tag, in new memory. Collective: over the clients along the axes."""
        del tag, memory
        component = plain(tensors[0][self._device])
        region = self._change.target.region(self._device, self._change.shape)
        kind, dim = self._found.kind, self._found.dim
        if kind == ALL_REDUCE:
            made = host_memory.detached_clone(component)
            work = self._collectives.all_reduce(made, self._reduce_op)
            return NativeTransfer(self._device, made, work, self._divisor)
        made = host_memory.allocate(region.shape, component.dtype, component.device)
        if kind == REDUCE_SCATTER:
            chunks = component.chunk(len(self._order), dim)
            terms = [chunks[piece].contiguous() for piece in self._order]
            work = self._collectives.reduce_scatter(made, terms, self._reduce_op)
            return NativeTransfer(self._device, made, work, self._divisor)
        places = [made.chunk(len(self._order), dim)[piece] for piece in self._order]
        rooms = [place if place.is_contiguous() else torch.empty_like(place).contiguous() for place in places]
        work = self._collectives.all_gather(rooms, component.contiguous())
        unpack = [(place, room) for place, room in zip(places, rooms, strict=True) if room is not place]
        return NativeTransfer(self._device, made, work, unpack=unpack)


class NativeTransfer:
    """A recognised hop under way; see `dtckpt.redistribution.exchange.Transfer`."""

    def __init__(
        self,
        device: int,
        made: torch.Tensor,
        work: Work,
        divisor: int = 1,
        unpack: Sequence[tuple[torch.Tensor, torch.Tensor]] = (),
    ) -> None:
        self.made = [{device: made}]
        self._result, self._work, self._divisor, self._unpack = made, work, divisor, unpack

    def abandon(self) -> None:
        """As `dtckpt.redistribution.exchange.Transfer.abandon`."""
        self._work.abandon()

    def finish(self) -> list[dict[int, torch.Tensor]]:
        """Return ``made`` when it is complete."""
        self._work.wait()
        for place, room in self._unpack:
            place.copy_(room)
        average(self._result, self._divisor)
        return self.made
