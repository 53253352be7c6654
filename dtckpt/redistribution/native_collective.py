"""Run an exchange as one collective of the communication library: all-reduce, all-gather or reduce-scatter.

If every client has one device, an exchange along some axes of one mesh is the same collective in every line of devices
along these axes. For a mesh of axes ``x=2, y=3`` and a gather along ``y``:

              y ->
    x    [ 0  1  2 ]    one all-gather among clients 0, 1, 2
    |    [ 3  4  5 ]    another among clients 3, 4, 5

`find_collective` finds the collective of an exchange from the layouts alone, so all members find the same one. Only
dims that split evenly count.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dtckpt.comm import host_memory
from dtckpt.comm.collectives import NativeCollectives, Work, average
from dtckpt.redistribution.exchange import OutputBuffers, validate_reduction
from dtckpt.redistribution.exchange_plan import reduced_axes, reduction_kind, term_of
from dtckpt.redistribution.layout_change import LayoutChange
from dtckpt.redistribution.messages import Components, raw_values

ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER = "all_reduce", "all_gather", "reduce_scatter"


@dataclass(frozen=True, slots=True)
class NativeCollective:
    """The collective that an exchange is.

    Args:
        kind: `ALL_REDUCE`, `ALL_GATHER` or `REDUCE_SCATTER`.
        axes: The axes along which it runs. Pieces of the dim are in the order of these axes, major first.
        dim: The tensor dim that is gathered or scattered; -1 for an all-reduce.
    """

    kind: str
    axes: tuple[str, ...]
    dim: int = -1


def find_collective(change: LayoutChange) -> NativeCollective | None:
    """Return the collective that does a change of layout, or None if only an exchange of boxes does it."""
    source, target = change.source, change.target
    mesh = source.mesh
    # The library's members are clients, so two devices of one client could not be two members.
    if mesh != target.mesh or mesh.num_clients != mesh.size() or mesh.num_clients == 1:
        return None
    reduced = reduced_axes(source, target)
    before, after = source.split_axes, target.split_axes
    # One op serves all axes: a path never leaves reductions of different kinds to one exchange.
    if reduced and before == after:
        return NativeCollective(ALL_REDUCE, reduced)
    differing = [dim for dim, pair in enumerate(zip(before, after, strict=True)) if pair[0] != pair[1]]
    if len(differing) != 1:
        return None
    (dim,) = differing
    # A gather drops the last axes that split the dim. A scatter adds the reduced axes at the end.
    fine, coarse = (after[dim], before[dim]) if reduced else (before[dim], after[dim])
    tail = fine[len(coarse) :]
    finest = target if reduced else source
    if not tail or fine[: len(coarse)] != coarse or change.shape[dim] % finest.num_shards(dim):
        return None
    if not reduced:
        return NativeCollective(ALL_GATHER, tail, dim)
    return NativeCollective(REDUCE_SCATTER, tail, dim) if set(tail) == set(reduced) else None


class NativeExchange:
    """An exchange of one tensor that is one collective, for a client that has one device in the mesh.

    Args:
        change: The tensor's change of layout.
        collective: The collective that does it; see `find_collective`.
    """

    is_local = False

    def __init__(self, change: LayoutChange, collective: NativeCollective) -> None:
        self._change, self._collective = change, collective
        mesh = change.source.mesh
        (self._device,) = mesh.local_device_ids()
        fixed = [axis for axis in mesh.mesh_dim_names if axis not in collective.axes]
        coordinates = term_of(change.source, fixed, self._device)
        line = [device for device in mesh.device_ids if term_of(change.source, fixed, device) == coordinates]
        members = sorted(line, key=mesh.client_of)
        # Which piece of the dim each member has, in the order of clients, which is the order of the process group.
        pieces = sorted(line, key=lambda device: term_of(change.source, collective.axes, device))
        self._piece_of_member = [pieces.index(device) for device in members]
        self._collectives = NativeCollectives(
            [mesh.client_of(device) for device in members], change.client, change.device
        )
        partial = change.source.partial
        ops = [partial[axis] for axis in collective.axes if axis in partial]
        self._reduce_op = reduction_kind(ops[0]) if ops else ""
        self._divisor = math.prod(mesh.dim_size(axis) for axis in collective.axes if partial.get(axis) == "avg")
        if ops:
            validate_reduction(self._reduce_op, change.dtype, self._divisor)

    def start(
        self, tensors: Sequence[Components], tag: int = 0, outputs: Sequence[OutputBuffers] | None = None
    ) -> NativeTransfer:
        """Start the collective. The collective writes to a new buffer, and needs no tag.

        Collective: Over the clients along the axes.
        """
        del tag, outputs
        component = raw_values(tensors[0][self._device])
        region = self._change.target.region(self._device, self._change.shape)
        kind, dim = self._collective.kind, self._collective.dim
        if kind == ALL_REDUCE:
            # The library reduces in place, and the source must keep its values.
            output = host_memory.detached_clone(component)
            work = self._collectives.all_reduce(output, self._reduce_op)
            return NativeTransfer(self._device, output, work, self._divisor)
        output = host_memory.allocate(region.shape, component.dtype, component.device)
        if kind == REDUCE_SCATTER:
            chunks = component.chunk(len(self._piece_of_member), dim)
            terms = [chunks[piece].contiguous() for piece in self._piece_of_member]
            work = self._collectives.reduce_scatter(output, terms, self._reduce_op)
            return NativeTransfer(self._device, output, work, self._divisor)
        # Along an inner dim, parts of the output are not contiguous. Separate buffers receive such parts, and `finish`
        # copies them.
        parts = [output.chunk(len(self._piece_of_member), dim)[piece] for piece in self._piece_of_member]
        buffers = [part if part.is_contiguous() else torch.empty_like(part).contiguous() for part in parts]
        work = self._collectives.all_gather(buffers, component.contiguous())
        unpack = [(part, buffer) for part, buffer in zip(parts, buffers, strict=True) if buffer is not part]
        return NativeTransfer(self._device, output, work, unpack=unpack)


class NativeTransfer:
    """One run of a `NativeExchange`; as `dtckpt.redistribution.exchange.BoxTransfer`.

    Args:
        device: This client's device in the mesh.
        output: Its new component.
        work: The collective under way.
        divisor: Divides the output when it is complete.
        unpack: Parts of the output, and the buffers that are copied there when the collective is complete.
    """

    def __init__(
        self,
        device: int,
        output: torch.Tensor,
        work: Work,
        divisor: int = 1,
        unpack: Sequence[tuple[torch.Tensor, torch.Tensor]] = (),
    ) -> None:
        self.outputs = [{device: output}]
        self._output, self._work, self._divisor, self._unpack = output, work, divisor, unpack

    def abandon(self) -> None:
        """Stop all access to memory from now on: the call has failed."""
        self._work.abandon()

    def finish(self) -> list[dict[int, torch.Tensor]]:
        """Wait until the collective is complete, and return `outputs`."""
        self._work.wait()
        for part, buffer in self._unpack:
            part.copy_(buffer)
        average(self._output, self._divisor)
        return self.outputs
