"""Boxes of components, and the format of the messages that carry them between clients.

    component of one device          message to one client
    +---------------+                +--------+-----+----------+----
    |   +-----+     |   pack         | box 0  | pad | box 1    | ...      small boxes share a message
    |   | box |     |  ------>       +--------+-----+----------+----
    |   +-----+     |                +---------------------------+
    +---------------+                | a large box or piece of it |        a large box travels alone
                                     +---------------------------+

Each box of a shared message starts at a multiple of `ALIGNMENT` bytes. Callers cut a very large box into pieces. Each
piece is a separate message, which a client packs, unpacks or reduces while the next piece is in flight.
Sender and receiver derive the same format from the sizes of the boxes, without communicating.
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
"""This client's components of one tensor, by global device id of their mesh."""

LARGE_NBYTES = 1 << 20
"""A box of at least this size is a separate message."""
MESSAGE_NBYTES = 64 << 20
"""Small boxes share a message up to this size, padding not counted."""
ALIGNMENT = 16
"""Bytes; fits every dtype."""


@dataclass(frozen=True, slots=True)
class Box:
    """Where a box of elements lies in this client's components of several tensors.

    Args:
        tensor: Position of the tensor in the list of tensors.
        device: The device whose component holds the box, by global id.
        offset: First index of the box within the component.
        shape: Shape of the box.
        dtype: Dtype of the tensor.
    """

    tensor: int
    device: int
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    _index: tuple[slice, ...] | None = field(compare=False)  # None: the box is the whole component

    @classmethod
    def in_component(cls, tensor: int, device: int, region: Region, component: Region, dtype: torch.dtype) -> Box:
        """Return the box of ``region`` in a component that covers ``component``; both are global regions."""
        inside = region.relative_to(component)
        index = None if region == component else inside.slices()
        return cls(tensor, device, inside.offset, region.shape, dtype, index)

    def view_in(self, tensors: Sequence[Components]) -> torch.Tensor:
        """Return the box's elements as a view of the component that holds them."""
        component = tensors[self.tensor][self.device]
        return component if self._index is None else component[self._index]

    @property
    def nbytes(self) -> int:
        """Bytes of the box's elements."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class MessageFormat:
    """The boxes that travel in one message. A message of one box is that box, in its own shape and dtype.

    Equal formats stand for equal messages, so a message to several clients is packed once.

    Args:
        boxes: The boxes, in order.
        starts: The byte at which each box starts.
        nbytes: Size of the message.
    """

    boxes: tuple[Box, ...]
    starts: tuple[int, ...]
    nbytes: int

    @classmethod
    def of(cls, boxes: Sequence[Box]) -> MessageFormat:
        """Return the format of a message of these boxes, at least one."""
        ends = itertools.accumulate((-(-box.nbytes // ALIGNMENT) * ALIGNMENT for box in boxes), initial=0)
        # The last box is not padded: the message ends with it.
        starts = tuple(ends)[:-1]
        return cls(tuple(boxes), starts, starts[-1] + boxes[-1].nbytes)

    def allocate(self, device: torch.device) -> torch.Tensor:
        """Allocate a buffer for the message."""
        if len(self.boxes) == 1:
            return host_memory.allocate(self.boxes[0].shape, self.boxes[0].dtype, device)
        return host_memory.allocate((self.nbytes,), torch.uint8, device)

    def views(self, message: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield every box of a message, as a view of it."""
        if len(self.boxes) == 1:
            yield message
            return
        for box, start in zip(self.boxes, self.starts, strict=True):
            yield message[start : start + box.nbytes].view(box.dtype).view(box.shape)

    def pack(self, tensors: Sequence[Components], device: torch.device | None) -> torch.Tensor:
        """Return the message, contiguous, on ``device``, by default the device of the boxes.

        If the message is one box, already contiguous on that device, the message is a view of the component, without a
        copy.
        """
        first = raw_values(self.boxes[0].view_in(tensors))
        if len(self.boxes) == 1:
            return (first if device in (None, first.device) else first.to(device)).contiguous()
        message = self.allocate(device or first.device)
        for box, view in zip(self.boxes, self.views(message), strict=True):
            # Of boxes with pending conjugation or negation, `copy_` writes the values.
            view.copy_(box.view_in(tensors))
        return message


@dataclass(frozen=True, slots=True)
class Reduction:
    """An output box, and the terms that are reduced into it.

    Args:
        box: The output box.
        terms: In the order in which they are reduced: boxes of this client, or numbers of received boxes.
        reduce_op: A key of `dtckpt.comm.collectives.REDUCERS`.
        divisor: Divides a sum in the end, for averages; 1 otherwise.
    """

    box: Box
    terms: tuple[Box | int, ...]
    reduce_op: str
    divisor: int


def message_formats(boxes: Sequence[Box]) -> Iterator[MessageFormat]:
    """Yield the formats of the messages that carry some boxes to one client."""
    for numbers in group_boxes([box.nbytes for box in boxes]):
        yield MessageFormat.of([boxes[number] for number in numbers])


def group_boxes(sizes: Sequence[int]) -> Iterator[list[int]]:
    """Group the boxes of one sender and receiver into messages; yield the numbers of each message's boxes.

    Args:
        sizes: Bytes of the boxes, in the order that sender and receiver both know.
    """
    numbers: list[int] = []
    nbytes = 0
    for number, size in enumerate(sizes):
        # A large box does not end the group: small boxes on both sides of it still share a message.
        if size >= LARGE_NBYTES:
            yield [number]
            continue
        # No group is empty here: a first small box is far below the bound.
        if nbytes + size > MESSAGE_NBYTES:
            yield numbers
            numbers, nbytes = [], 0
        numbers.append(number)
        nbytes += size
    if numbers:
        yield numbers


def raw_values(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose memory holds its values: detached, with pending conjugation and negation done."""
    tensor = tensor.detach() if tensor.requires_grad else tensor
    return tensor.resolve_conj().resolve_neg() if tensor.is_conj() or tensor.is_neg() else tensor
