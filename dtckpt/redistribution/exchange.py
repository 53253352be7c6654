"""Exchange boxes between clients: one step of a redistribution, for one tensor or for several together.

An exchange brings tensors from a source layout to a target layout. Compilation happens once, from the plans of
`dtckpt.redistribution.exchange_plan` to the messages, copies and reductions of this client. The compiled exchange may
run many times. For a tensor that goes from rows to columns on two clients:

      source layout              target layout
                              client 0    client 1
    client 0  [ a | b ]         [ a ]       [ b ]        client 0: copies a, sends b, receives c
    client 1  [ c | d ]         [ c ]       [ d ]        client 1: copies d, sends c, receives b

A run of an exchange on one client (`BoxTransfer`):

    start()   post the first flight of messages      first buffers to receive into, then messages to send
              make local copies, reduce local terms  while messages are in flight
              post the other flights                 each when the flight before it is complete
    finish()  deliver each message as it arrives     copy it to its output, or reduce it with the last term
              forward                                between this client's own devices

Outputs are allocated once, at their final place: a box that is contiguous in its output is received in place.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from dtckpt.comm import host_memory
from dtckpt.comm.collectives import Work, average, byte_view, collectives_of, reduce_terms
from dtckpt.comm.torch_device import device_of
from dtckpt.errors import LayoutError
from dtckpt.layout.layout import Layout
from dtckpt.layout.mesh import Mesh
from dtckpt.layout.region import Region
from dtckpt.redistribution.exchange_plan import (
    Coordinates,
    Move,
    plan_exchange,
    reduced_axes,
    reduction_kind,
    term_of,
)
from dtckpt.redistribution.layout_change import LayoutChange
from dtckpt.redistribution.messages import (
    ALIGNMENT,
    Box,
    Components,
    MessageFormat,
    Reduction,
    group_boxes,
    message_formats,
)

PIECE_NBYTES = 8 << 20
"""A large box travels through host memory in pieces of about this size."""
IN_FLIGHT_NBYTES = 256 << 20
"""Most bytes of one client's messages in flight at a time, sent and received, unless a single round has more."""
_HOST = torch.device("cpu")


@dataclass(slots=True)
class Flight:
    """Messages that are in flight at the same time.

    Args:
        sends: Receiving clients, and the number of the message that each gets.
        receives: Sending clients, the formats of their messages, and the numbers of the boxes in each.
        nbytes: Size of all messages together.
    """

    sends: list[tuple[int, int]]
    receives: list[tuple[int, MessageFormat, list[int]]]
    nbytes: int


class BoxExchange:
    """An exchange of boxes by pairwise messages, compiled for this client.

    Received boxes have numbers, in an order that follows from the plans; so have the messages that are sent.

    Args:
        changes: One per tensor. All have the same clients and the same `LayoutChange.device_type`.

    Raises:
        LayoutError: A dtype cannot be reduced by an op.
    """

    def __init__(self, changes: Sequence[LayoutChange]) -> None:
        first = changes[0]
        self.changes, self.clients, self.client = tuple(changes), first.clients, first.client
        self.device_type = first.device_type
        self.collectives = collectives_of(self.clients, self.client, first.device)
        # Per tensor: by target device, the source device whose unchanged component is the output; all other outputs.
        self.reused: list[dict[int, int]] = []
        self.allocations: list[list[tuple[int, tuple[int, ...], torch.dtype, torch.device]]] = []
        # Pairs of boxes: the box to write, and the box to read. Forwards go from one output to another.
        self.copies: list[tuple[Box, Box]] = []
        self.forwards: list[tuple[Box, Box]] = []
        self.reductions: list[Reduction] = []
        self.received_boxes: list[Box] = []
        self.is_local = True
        """Whether no client needs anything from another."""
        sent_boxes: dict[int, list[Box]] = {}
        received_numbers: dict[int, list[int]] = {}
        for tensor, change in enumerate(changes):
            self._add(tensor, change, sent_boxes, received_numbers)
        terms = [[term for term in reduction.terms if isinstance(term, int)] for reduction in self.reductions]
        self.num_received_terms = list(map(len, terms))
        """How many received boxes each reduction waits for."""
        self.reduction_of = {term: number for number, received in enumerate(terms) for term in received}
        """By number of a received box, the reduction of which it is a term."""
        # A reduction overwrites its output when it adds its first two terms, so one of these may be received there.
        first_terms = {next((term for term in each.terms[:2] if isinstance(term, int)), -1) for each in self.reductions}
        self.in_place = {*range(len(self.received_boxes))} - self.reduction_of.keys() | first_terms
        """Numbers of the boxes that may be received where their output is."""
        # A message that several clients get is packed once.
        message_numbers: dict[MessageFormat, int] = {}
        sends = [
            (receiver, message_numbers.setdefault(message, len(message_numbers)), message.nbytes)
            for receiver, boxes in sorted(sent_boxes.items())
            for message in message_formats(boxes)
        ]
        self.messages = list(message_numbers)
        num_receivers = Counter(number for _, number, _ in sends)
        self.shared_messages = {number for number, times in num_receivers.items() if times > 1}
        receives = [
            (sender, MessageFormat.of([self.received_boxes[numbers[i]] for i in inside]), [numbers[i] for i in inside])
            for sender, numbers in sorted(received_numbers.items())
            for inside in group_boxes([self.received_boxes[number].nbytes for number in numbers])
        ]
        self.flights = list(self._flights(sends, receives))
        if not self.flights and not self.is_local and self.client in self.clients:
            self.flights = [Flight([], [], 0)]  # others may need this client to make the process group
        self.peers = sent_boxes.keys() | received_numbers.keys()
        """Clients to which this client sends, or from which it receives."""

    def _flights(
        self, sends: Sequence[tuple[int, int, int]], receives: Sequence[tuple[int, MessageFormat, list[int]]]
    ) -> Iterator[Flight]:
        """Yield the flights: messages that are in flight together, so that few are in memory.

        In round (k, n) each client sends its nth message to the client k positions on:

            k = 1:  0 -> 1 -> 2 -> 3 -> 0        k = 2:  0 <-> 2, 1 <-> 3        k = 3:  0 <- 1 <- 2 <- 3 <- 0

        A flight is one or several rounds. The end of a flight depends on this client's own messages, so clients may end
        their flights after different rounds. This cannot deadlock, because all clients go through the rounds in the
        same order. Of all missing messages, take the message of the earliest round: its sender and its receiver have
        posted it. (The schedule of block-cyclic redistribution: Desprez et al., "Scheduling block-cyclic array
        redistribution".)
        """
        positions = {client: position for position, client in enumerate(self.clients)}
        rounds: dict[tuple[int, int], Flight] = {}
        counts: Counter[tuple[bool, int]] = Counter()

        def next_round(peer: int, *, is_received: bool) -> Flight:
            step = positions[self.client] - positions[peer]
            counts[is_received, peer] += 1
            distance = (step if is_received else -step) % len(positions)
            return rounds.setdefault((distance, counts[is_received, peer]), Flight([], [], 0))

        for receiver, number, nbytes in sends:
            messages = next_round(receiver, is_received=False)
            messages.sends.append((receiver, number))
            messages.nbytes += nbytes
        for sender, message, numbers in receives:
            messages = next_round(sender, is_received=True)
            messages.receives.append((sender, message, numbers))
            messages.nbytes += message.nbytes
        flight = Flight([], [], 0)
        for _, messages in sorted(rounds.items(), key=lambda item: item[0]):
            if flight.nbytes and flight.nbytes + messages.nbytes > IN_FLIGHT_NBYTES:
                yield flight
                flight = Flight([], [], 0)
            flight.sends += messages.sends
            flight.receives += messages.receives
            flight.nbytes += messages.nbytes
        if flight.nbytes:
            yield flight

    def _add(
        self,
        tensor: int,
        change: LayoutChange,
        sent_boxes: dict[int, list[Box]],
        received_numbers: dict[int, list[int]],
    ) -> None:
        """Add one tensor's copies, messages and reductions.

        Args:
            tensor: Its position among the tensors.
            change: Its change of layout.
            sent_boxes: By receiver; this call appends to them.
            received_numbers: Numbers of the received boxes, by sender; this call appends to them.
        """
        source, target, dtype = change.source, change.target, change.dtype
        plan = plan_exchange(source, target, change.shape, self.client)
        self.is_local &= plan.is_local
        axes = reduced_axes(source, target)
        source_regions, target_regions = _regions(source, change.shape), _regions(target, change.shape)
        source_devices, target_devices = _devices(source.mesh), _devices(target.mesh)
        # If each output as a whole is one component of the source on the same device, no copy is made. The output
        # shares memory with the source. A caller that must not share memory makes a copy.
        is_reused = plan.is_local and not axes and _are_whole_components(plan.copies, source_regions, target_regions)
        is_reused = is_reused and all(
            source_devices[each.source] == target_devices[each.target] for each in plan.copies
        )
        reused = {move.target: move.source for move in plan.copies} if is_reused else {}
        self.reused.append(reused)
        self.allocations.append(
            [
                (device, region.shape, dtype, target_devices[device])
                for device, region in target_regions.items()
                if device not in reused
            ]
        )
        if is_reused:
            return

        # Through host memory a large box goes in pieces: a client packs or reduces a piece while the next piece is in
        # flight. NCCL runs an exchange as one operation, so pieces would not overlap there.
        is_cut = self.device_type == "cpu" and not plan.is_local

        def pieces(moves: Iterable[Move]) -> Iterator[Move]:
            return (piece for move in moves for piece in _pieces(move, dtype.itemsize)) if is_cut else iter(moves)

        def source_box(move: Move) -> Box:
            return Box.in_component(tensor, move.source, move.region, source_regions[move.source], dtype)

        def output_box(move: Move) -> Box:
            return Box.in_component(tensor, move.target, move.region, target_regions[move.target], dtype)

        terms: dict[Box, list[tuple[Coordinates, Box | int]]] = {}
        # Terms of one reduction must be equal boxes, so local ones are cut into the same pieces as received ones.
        for move in pieces(plan.copies) if axes else plan.copies:
            if axes:
                terms.setdefault(output_box(move), []).append((term_of(source, axes, move.source), source_box(move)))
            else:
                self.copies.append((output_box(move), source_box(move)))
        # Messages have no headers. Only its position identifies a box, so both sides go through tensors, then sorted
        # moves, then pieces.
        for receiver, moves in plan.sends.items():
            sent_boxes.setdefault(receiver, []).extend(map(source_box, pieces(moves)))
        for sender, moves in plan.receives.items():
            for move in pieces(moves):
                number = len(self.received_boxes)
                received_numbers.setdefault(sender, []).append(number)
                if axes:
                    terms.setdefault(output_box(move), []).append((term_of(source, axes, move.source), number))
                self.received_boxes.append(output_box(move))
        for move in plan.forwards:
            origin = Box.in_component(tensor, move.source, move.region, target_regions[move.source], dtype)
            self.forwards.append((output_box(move), origin))
        if axes:
            reduce_op = reduction_kind(source.partial[axes[0]])
            divisor = math.prod(source.mesh.dim_size(axis) for axis in axes if source.partial[axis] == "avg")
            # Now, when the exchange is compiled: no message is under way yet, so the caller can still report the error.
            validate_reduction(reduce_op, dtype, divisor)
            for box, box_terms in terms.items():
                # By coordinates along the axes: one order on all clients, so replicas agree bit for bit.
                ordered = tuple(term for _, term in sorted(box_terms, key=lambda item: item[0]))
                self.reductions.append(Reduction(box, ordered, reduce_op, divisor))

    def allocate_outputs(self) -> list[OutputBuffers]:
        """Allocate the output buffers of every tensor."""
        return [
            OutputBuffers({device: host_memory.allocate(shape, dtype, where) for device, shape, dtype, where in listed})
            for listed in self.allocations
        ]

    def index_in(self, later: BoxExchange) -> dict[int, tuple[slice, ...]] | None:
        """Return the places of this exchange's outputs within the outputs of the next exchange.

        Then both can share one buffer: this exchange writes its outputs where the next exchange would copy them.

        Args:
            later: The next exchange of the same single tensor.

        Returns:
            By device, the index of this exchange's output in the next one's. None if an output does not stay on its
            device as a whole, or is empty.
        """
        target, later_target = self.changes[0].target, later.changes[0].target
        if self.is_local or self.reused[0] or later.reused[0] or target.mesh != later_target.mesh:
            return None
        shape = self.changes[0].shape
        parts, wholes = _regions(target, shape), _regions(later_target, shape)
        num_staying = Counter[int]()
        # A next exchange that reduces has no copies, so it never qualifies: its outputs are sums, not this one's terms.
        for into, source in later.copies:
            num_staying[into.device] += math.prod(into.shape) if into.device == source.device else 0
        # An empty part has no place, though every region contains it.
        if not all(part.numel == num_staying[at] > 0 and wholes[at].contains(part) for at, part in parts.items()):
            return None
        return {device: part.relative_to(wholes[device]).slices() for device, part in parts.items()}

    def start(
        self, tensors: Sequence[Components], tag: int = 0, outputs: Sequence[OutputBuffers] | None = None
    ) -> BoxTransfer:
        """Post the messages, and make the local copies while they are in flight.

        Collective: Over the exchange's clients, if any client needs data of another.

        Args:
            tensors: The components of every tensor; do not write to them until the transfer is finished.
            tag: Tag of the messages, below `END_OF_TAGS`.
            outputs: Buffers for the new components of every tensor; default new ones.
        """
        return BoxTransfer(self, tensors, tag, self.allocate_outputs() if outputs is None else outputs)


@dataclass(slots=True)
class OutputBuffers:
    """The buffers into which an exchange writes a tensor's new components.

    Args:
        outputs: The new components, by device id.
        spare: By device id, buffers of bytes that no other code uses before the exchange is finished.
    """

    outputs: dict[int, torch.Tensor]
    spare: dict[int, list[torch.Tensor]] = field(default_factory=dict)

    def within(self, index: Mapping[int, tuple[slice, ...]]) -> OutputBuffers:
        """Return the buffers of parts of these outputs; the bytes around each part are spare until it is complete.

            output of the next exchange:   [ spare | part, output of this one | spare ]

        Args:
            index: The part of each output, by device id; see `BoxExchange.index_in`.
        """
        return OutputBuffers(
            {device: self.outputs[device][part] for device, part in index.items()},
            {device: _bytes_around(self.outputs[device], part) for device, part in index.items()},
        )

    def take_spare(self, box: Box) -> torch.Tensor | None:
        """Take a spare buffer for a box on its device; return None if every spare buffer is too small."""
        buffers = self.spare.get(box.device, [])
        for number, spare in enumerate(buffers):
            # The bytes around a part begin at any address; a view of a wider dtype must not.
            start = -spare.data_ptr() % ALIGNMENT
            stop = start + box.nbytes
            if stop <= spare.numel():
                buffers[number] = spare[stop:]
                return spare[start:stop].view(box.dtype).view(box.shape)
        return None


class BoxTransfer:
    """One run of a `BoxExchange`, from the first message posted to the last one delivered.

    Attributes:
        outputs: The new components of every tensor, by device id; complete after `finish`.
    """

    def __init__(
        self, exchange: BoxExchange, tensors: Sequence[Components], tag: int, buffers: Sequence[OutputBuffers]
    ) -> None:
        self._exchange, self._tensors, self._tag, self._buffers = exchange, tensors, tag, buffers
        self.outputs = [each.outputs for each in buffers]
        self._work: Work | None = None
        # Of the flight under way: format, numbers of boxes, buffer, and whether that is the output itself.
        self._receives: list[tuple[MessageFormat, list[int], torch.Tensor, bool]] = []
        self._sent: list[torch.Tensor] = []
        self._shared: dict[int, torch.Tensor] = {}
        # Received terms, by number of the box, and the number of terms that each reduction still lacks.
        self._terms: dict[int, torch.Tensor] = {}
        self._num_missing = list(exchange.num_received_terms)
        try:
            self._start()
        except BaseException:
            self.abandon()
            raise

    def _start(self) -> None:
        exchange, tensors = self._exchange, self._tensors
        if exchange.flights:
            # Before any flight: clients may end their flights after different rounds.
            exchange.collectives.connect(exchange.peers)
            self._post(exchange.flights[:1])
        # Local work stands between the first flight and the others, so that messages are in flight meanwhile.
        for output_box, source_box in exchange.copies:
            output, source = output_box.view_in(self.outputs), source_box.view_in(tensors)
            if output.data_ptr() != source.data_ptr():  # the same where buffers are shared, see `OutputBuffers.within`
                output.copy_(source)
        for number, missing in enumerate(exchange.num_received_terms):
            if not missing:
                self._reduce(number)
        for outputs, components, reused in zip(self.outputs, tensors, exchange.reused, strict=True):
            outputs.update({device: components[source] for device, source in reused.items()})
        if exchange.flights:
            self._post(exchange.flights[1:])

    def _post(self, flights: Sequence[Flight]) -> None:
        """Post the messages of flights, each when the flight before is complete."""
        device = _HOST if self._exchange.device_type == "cpu" else None
        for flight in flights:
            self._complete()
            self._receives = [
                (message, numbers, *self._receive_buffer(message, numbers, device))
                for _, message, numbers in flight.receives
            ]
            # A sender can write at once if its receiver has posted a buffer. So all buffers are posted before any
            # message is packed. `exchange` packs messages one by one, so that earlier messages are in flight meanwhile.
            self._work = self._exchange.collectives.exchange(
                flight.sends,
                [
                    (sender, buffer)
                    for (sender, *_), (_, _, buffer, _) in zip(flight.receives, self._receives, strict=True)
                ],
                self._tag,
                partial(self._pack, device),
            )

    def _pack(self, device: torch.device | None, number: int) -> torch.Tensor:
        """Return a packed message. The transfer keeps it until it is sent."""
        message = self._shared.get(number)
        if message is None:
            message = self._exchange.messages[number].pack(self._tensors, device)
            # Kept until the end of the transfer, as its receivers may belong to different flights.
            if number in self._exchange.shared_messages:
                self._shared[number] = message
        self._sent.append(message)
        return message

    def _receive_buffer(
        self, message: MessageFormat, numbers: Sequence[int], device: torch.device | None
    ) -> tuple[torch.Tensor, bool]:
        """Return a buffer to receive a message into, and whether it is the output itself.

        In order of preference: the output, if the box is contiguous there; a spare part of a later output; a new
        buffer.
        """
        box = message.boxes[0]
        output_device = self.outputs[box.tensor][box.device].device
        if len(numbers) == 1 and device in (None, output_device):
            if numbers[0] in self._exchange.in_place and (output := box.view_in(self.outputs)).is_contiguous():
                return output, True
            if (spare := self._buffers[box.tensor].take_spare(box)) is not None:
                return spare, False
        return message.allocate(device or output_device), False

    def finish(self) -> list[dict[int, torch.Tensor]]:
        """Wait until all messages are delivered and reduced, and return `outputs`."""
        self._complete()
        # Last, because they read outputs which a message or a reduction may have written just now.
        for output_box, origin in self._exchange.forwards:
            output_box.view_in(self.outputs).copy_(origin.view_in(self.outputs))
        self._shared, self._tensors, self._buffers = {}, (), ()
        return self.outputs

    def _complete(self) -> None:
        """Complete the flight under way: deliver each message as it arrives."""
        if self._work is not None:
            try:
                for number in self._work.arrivals():
                    self._deliver(*self._receives[number])
                self._work.wait()
            except BaseException:
                self.abandon()
                raise
        self._work, self._receives, self._sent = None, [], []

    def abandon(self) -> None:
        """Leave all memory alone from now on: the call has failed."""
        if self._work is not None:
            self._work.abandon()

    def _deliver(self, message: MessageFormat, numbers: Sequence[int], buffer: torch.Tensor, is_in_place: bool) -> None:
        for number, view in zip(numbers, message.views(buffer), strict=True):
            reduction = self._exchange.reduction_of.get(number)
            if reduction is not None:
                self._terms[number] = view
                self._num_missing[reduction] -= 1
                if not self._num_missing[reduction]:
                    self._reduce(reduction)
            elif not is_in_place:
                self._exchange.received_boxes[number].view_in(self.outputs).copy_(view)

    def _reduce(self, number: int) -> None:
        """Reduce the terms of an output box; all terms are on this device."""
        reduction = self._exchange.reductions[number]
        output = reduction.box.view_in(self.outputs)
        # Popped: a term is kept until its reduction is done and its flight is complete, and no longer.
        terms = [
            self._terms.pop(term) if isinstance(term, int) else term.view_in(self._tensors) for term in reduction.terms
        ]
        reduce_terms(output, [term.to(output.device) for term in terms], reduction.reduce_op)
        average(output, reduction.divisor)


def validate_reduction(reduce_op: str, dtype: torch.dtype, divisor: int = 1) -> None:
    """Check that terms of a dtype can be reduced, and their sum divided.

    Every client comes to the same result, with or without a GPU.

    Args:
        reduce_op: The reduction.
        dtype: Dtype of the terms.
        divisor: Divides the reduced value.

    Raises:
        LayoutError: The terms cannot be reduced, or the sum cannot be divided.
    """
    try:
        # A trial, since only torch knows which of its functions takes which dtype. The trial runs on the host.
        # Reductions that only the host can do must be refused here, or a GPU would fail when messages are under way.
        trial = torch.zeros(1, dtype=dtype, device=_HOST)
        reduce_terms(trial, [trial, trial], reduce_op)
        average(trial, divisor)
        if dtype.is_floating_point and dtype.itemsize == 1:
            raise TypeError("GPUs cannot multiply 8-bit floats")
    except (RuntimeError, TypeError) as error:
        wanted = "avg" if divisor > 1 else reduce_op
        raise LayoutError(f"reduction: cannot reduce {dtype} by {wanted!r}: {error}; convert it first") from None


def _regions(layout: Layout, shape: tuple[int, ...]) -> dict[int, Region]:
    return {device: layout.region(device, shape) for device in layout.mesh.local_device_ids()}


def _devices(mesh: Mesh) -> dict[int, torch.device]:
    return dict(zip(mesh.local_device_ids(), map(device_of, mesh.local_devices()), strict=True))


def _pieces(move: Move, itemsize: int) -> Iterator[Move]:
    """Cut a move along the first dim that is longer than 1, into about even pieces; yield them."""
    nbytes = math.prod(move.shape) * itemsize
    # Along the outermost such dim: so a piece of a contiguous box is contiguous, and can be received in place.
    dim = next((dim for dim, size in enumerate(move.shape) if size > 1), 0)
    if nbytes < 2 * PIECE_NBYTES:
        yield move
        return
    # Every piece but the last has `PIECE_NBYTES` or more; where the dim has few large rows, a piece is at least a row.
    size = -(-move.shape[dim] // (nbytes // PIECE_NBYTES))
    for start in range(0, move.shape[dim], size):
        offset, shape = list(move.offset), list(move.shape)
        offset[dim] += start
        shape[dim] = min(size, move.shape[dim] - start)
        yield Move(move.target, tuple(offset), tuple(shape), move.source)


def _bytes_around(whole: torch.Tensor, part: Sequence[slice]) -> list[torch.Tensor]:
    """Return the bytes before and after a part of a tensor, if the part is rows of a contiguous tensor; else none."""
    # If the part is not rows, the bytes around it lie in many short runs between the bytes of the part.
    is_rows = all(one == slice(0, size) for one, size in zip(part[1:], whole.shape[1:], strict=True))
    if not part or not is_rows or not whole.is_contiguous():
        return []
    rows = (whole[: part[0].start], whole[part[0].stop :])
    return [byte_view(each) for each in rows if each.numel()]


def _are_whole_components(
    copies: Sequence[Move], source_regions: Mapping[int, Region], target_regions: Mapping[int, Region]
) -> bool:
    """Tell whether every copy turns a whole component into a whole output, and no two outputs share a component."""
    sources = {move.source for move in copies}
    return len(sources) == len(copies) and all(
        source_regions[move.source] == move.region == target_regions[move.target] for move in copies
    )
