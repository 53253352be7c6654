"""Boxes of components, and the messages that they travel in.

Small boxes from one client to another travel in one message, aligned; a large one travels in pieces, each a message of
its own, so that one is packed, unpacked or reduced while the next is under way. Giver and taker cut alike, by size.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from dtckpt.comm import host_memory
from dtckpt.layout.region import Region

Components = Mapping[int, torch.Tensor]
"""This client's components, by global device id of their mesh."""

LARGE_NBYTES = 1 << 20
"""A box from this size on is a message of its own."""
MESSAGE_NBYTES = 64 << 20
"""Small boxes that travel together make no message larger than this."""
ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class Box:
    """Where a box lies: in which of several tensors, in which device's component, from which index on."""

    tensor: int
    device: int
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    _index: tuple[slice, ...] | None = field(compare=False)  # None: all of the component

    @classmethod
    def cut(cls, tensor: int, device: int, region: Region, component: Region, dtype: torch.dtype) -> Box:
        """Return where ``region`` lies in a component that covers ``component``."""
        inside = region.relative_to(component)
        index = None if region == component else inside.slices()
        return cls(tensor, device, inside.offset, region.shape, dtype, index)

    def of(self, tensors: Sequence[Components]) -> torch.Tensor:
        """Return the box's elements, a view."""
        component = tensors[self.tensor][self.device]
        return component if self._index is None else component[self._index]

    @property
    def nbytes(self) -> int:
        """Bytes of the box's elements."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Parcel:
    """Boxes that travel as one message, and from which byte on each lies in it; one alone is the message."""

    boxes: tuple[Box, ...]
    starts: tuple[int, ...]
    nbytes: int

    @classmethod
    def of(cls, boxes: Sequence[Box]) -> Parcel:
        """Return the message of some boxes, each aligned for any dtype."""
        ends = itertools.accumulate((-(-box.nbytes // ALIGNMENT) * ALIGNMENT for box in boxes), initial=0)
        starts = tuple(ends)[:-1]
        return cls(tuple(boxes), starts, starts[-1] + boxes[-1].nbytes)

    def room(self, device: torch.device) -> torch.Tensor:
        """Return memory for the message."""
        if len(self.boxes) == 1:
            return host_memory.allocate(self.boxes[0].shape, self.boxes[0].dtype, device)
        return host_memory.allocate((self.nbytes,), torch.uint8, device)

    def views(self, message: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield every box's place in the message."""
        if len(self.boxes) == 1:
            yield message
            return
        for box, start in zip(self.boxes, self.starts, strict=True):
            yield message[start : start + box.nbytes].view(box.dtype).view(box.shape)

    def pack(self, tensors: Sequence[Components], device: torch.device | None) -> torch.Tensor:
        """Return the message on a device, default the boxes'; one box that lies there in one piece is not copied."""
        first = plain(self.boxes[0].of(tensors))
        if len(self.boxes) == 1:
            return (first if device in (None, first.device) else first.to(device)).contiguous()
        message = self.room(device or first.device)
        for box, view in zip(self.boxes, self.views(message), strict=True):
            view.copy_(box.of(tensors))
        return message


@dataclass(frozen=True, slots=True)
class Reduction:
    """A new box that is made of terms, in their order: boxes of this client, or the numbers of boxes that arrive."""

    box: Box
    terms: tuple[Box | int, ...]
    reduce_op: str
    divisor: int


def parcels(boxes: Sequence[Box]) -> Iterator[Parcel]:
    """Yield the messages in which some boxes travel to one client."""
    for inside in cut_messages([box.nbytes for box in boxes]):
        yield Parcel.of([boxes[number] for number in inside])


def cut_messages(sizes: Sequence[int]) -> Iterator[list[int]]:
    """Yield which boxes of a list travel together, by their sizes in bytes, in an order that both sides know."""
    together: list[int] = []
    nbytes = 0
    for number, size in enumerate(sizes):
        if size >= LARGE_NBYTES:
            yield [number]
            continue
        if nbytes + size > MESSAGE_NBYTES:
            yield together
            together, nbytes = [], 0
        together.append(number)
        nbytes += size
    if together:
        yield together


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that is in memory as it reads, without pending conjugation or negation, and has no gradient."""
    tensor = tensor.detach() if tensor.requires_grad else tensor
    return tensor.resolve_conj().resolve_neg() if tensor.is_conj() or tensor.is_neg() else tensor
