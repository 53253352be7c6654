"""One exchange of boxes, for one tensor or for many: compiled to the steps of this client, then run.

Compiling turns plans (`dtckpt.redistribution.exchange_plan`) into what is left to do each time: messages to post,
copies to make meanwhile, terms to reduce. A message is received in its place where the box lies there in one piece.
"""

from __future__ import annotations

import math
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial

import torch

from dtckpt.comm import host_memory
from dtckpt.comm.collectives import REDUCERS, Work, average, byte_view, collectives_of, reduce_terms
from dtckpt.comm.process_groups import message_memory
from dtckpt.comm.torch_device import device_of
from dtckpt.errors import LayoutError
from dtckpt.layout.layout import Layout
from dtckpt.layout.mesh import Mesh
from dtckpt.layout.region import Region
from dtckpt.redistribution.exchange_plan import Move, Place, kind_of, plan_exchange, reduced_axes, term_of
from dtckpt.redistribution.messages import ALIGNMENT, Box, Components, Parcel, Reduction, cut_messages, parcels

PIECE_NBYTES = 8 << 20
"""A large box travels through host memory in pieces of about this size."""
IN_FLIGHT_NBYTES = 256 << 20
"""Messages of one client that are under way at a time, given and taken, if one alone is not larger."""
_HOST = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Change:
    """One tensor's change of layout; the layouts are as this client sees them.

    Args:
        source: Layout before.
        target: Layout after; reductions that it lacks are done, and it has no others.
        shape: Global shape.
        dtype: The tensor's dtype.
    """

    source: Layout
    target: Layout
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def meshes(self) -> tuple[Mesh, Mesh]:
        """Source and target mesh."""
        return self.source.mesh, self.target.mesh

    @property
    def clients(self) -> tuple[int, ...]:
        """Clients of both meshes, ascending."""
        ours, theirs = self.source.mesh, self.target.mesh
        return ours.clients if ours is theirs else tuple(sorted({*ours.clients, *theirs.clients}))

    @property
    def client(self) -> int:
        """This client; -1 if it has no device in either mesh."""
        ours, theirs = self.source.mesh.local_client, self.target.mesh.local_client
        return ours if ours is not None else -1 if theirs is None else theirs

    @property
    def device_type(self) -> str:
        """Where messages lie: on the cards, if every client has one there and a backend for it, else in host memory."""
        for mesh in (self.source.mesh, self.target.mesh):
            if mesh.device_type != "cuda" or mesh.num_clients != mesh.size():
                return "cpu"
        return message_memory("cuda")

    @property
    def device(self) -> torch.device:
        """Where this client's messages lie; in host memory if it has none."""
        mesh = self.source.mesh if self.source.mesh.local_device_ids() else self.target.mesh
        return _HOST if self.device_type == "cpu" or self.client < 0 else device_of(mesh.local_devices()[0])

    @property
    def number(self) -> int:
        """A number below 2**31 that clients which want the same share, and others hardly ever do."""
        layouts = [(_number(each.mesh), each.sharding_specs, each.partial) for each in (self.source, self.target)]
        return zlib.crc32(f"{layouts} {self.shape} {self.dtype}".encode()) >> 1


@lru_cache(maxsize=256)
def _number(mesh: Mesh) -> int:
    return zlib.crc32(repr(mesh.identity).encode())


@dataclass(slots=True)
class Wave:
    """Messages that are under way at the same time.

    Args:
        sends: Clients, and the number of the message that each gets.
        receives: Clients, what their messages hold, and the numbers of the boxes in it.
        nbytes: Of all messages.
    """

    sends: list[tuple[int, int]]
    receives: list[tuple[int, Parcel, list[int]]]
    nbytes: int


class Hop:
    """One exchange of boxes of some tensors, compiled for this client.

    Args:
        changes: One per tensor; all have the same clients and kind of messages.

    Raises:
        LayoutError: A dtype cannot be reduced by an op.
    """

    def __init__(self, changes: Sequence[Change]) -> None:
        first = changes[0]
        self.changes, self.clients, self.client = tuple(changes), first.clients, first.client
        self.device_type = first.device_type
        self.collectives = collectives_of(self.clients, self.client, first.device)
        # By tensor: old components that stay as they are, by new device; and what has to be made.
        self.kept: list[dict[int, int]] = []
        self.new: list[list[tuple[int, tuple[int, ...], torch.dtype, torch.device]]] = []
        self.copies: list[tuple[Box, Box]] = []
        self.forwards: list[tuple[Box, Box]] = []
        self.reductions: list[Reduction] = []
        self.arrivals: list[Box] = []
        self.is_local = True
        """Whether no client needs anything from another."""
        gives: dict[int, list[Box]] = {}
        takes: dict[int, list[int]] = {}
        for tensor, change in enumerate(changes):
            self._add(tensor, change, gives, takes)
        terms = [[term for term in reduction.terms if isinstance(term, int)] for reduction in self.reductions]
        self.num_terms = list(map(len, terms))
        """How many boxes each reduction waits for."""
        self.reduced = {term: number for number, arriving in enumerate(terms) for term in arriving}
        """Which reduction a box that arrives is a term of."""
        # Of a reduction, either of the first two terms may lie where their result goes.
        firsts = {next((term for term in each.terms[:2] if isinstance(term, int)), -1) for each in self.reductions}
        self.in_place = {*range(len(self.arrivals))} - self.reduced.keys() | firsts
        # What several clients get is packed once: messages by number, and who gets which.
        numbers: dict[Parcel, int] = {}
        sends = [
            (peer, numbers.setdefault(parcel, len(numbers)), parcel.nbytes)
            for peer, boxes in sorted(gives.items())
            for parcel in parcels(boxes)
        ]
        self.parcels = list(numbers)
        sent = Counter(number for _, number, _ in sends)
        self.shared = {number for number, times in sent.items() if times > 1}
        receives = [
            (peer, Parcel.of([self.arrivals[taken[i]] for i in inside]), [taken[i] for i in inside])
            for peer, taken in sorted(takes.items())
            for inside in cut_messages([self.arrivals[number].nbytes for number in taken])
        ]
        self.waves = list(self._waves(sends, receives))
        if not self.waves and not self.is_local and self.client in self.clients:
            self.waves = [Wave([], [], 0)]  # the others may wait for this client to make the group
        self.peers = gives.keys() | takes.keys()
        """Clients that this one gives something or gets something from."""

    def _waves(
        self, sends: Sequence[tuple[int, int, int]], receives: Sequence[tuple[int, Parcel, list[int]]]
    ) -> Iterator[Wave]:
        """Yield which messages are under way at a time, so that those in memory stay few.

        In round (k, n) each client gives its nth message to the one k places on. Rounds come in this order on all
        clients, so whatever both sides put into one wave, the first message that is missing has been posted by both
        (the schedule of block-cyclic redistribution: Desprez et al., "Scheduling block-cyclic array redistribution").
        """
        place = {client: number for number, client in enumerate(self.clients)}
        rounds: dict[tuple[int, int], Wave] = {}
        counts: Counter[tuple[bool, int]] = Counter()

        def at(peer: int, *, is_taken: bool) -> Wave:
            distance = place[self.client] - place[peer] if is_taken else place[peer] - place[self.client]
            counts[is_taken, peer] += 1
            return rounds.setdefault((distance % len(place), counts[is_taken, peer]), Wave([], [], 0))

        for peer, number, nbytes in sends:
            wave = at(peer, is_taken=False)
            wave.sends.append((peer, number))
            wave.nbytes += nbytes
        for peer, parcel, inside in receives:
            wave = at(peer, is_taken=True)
            wave.receives.append((peer, parcel, inside))
            wave.nbytes += parcel.nbytes
        together = Wave([], [], 0)
        for _, wave in sorted(rounds.items(), key=lambda item: item[0]):
            if together.nbytes and together.nbytes + wave.nbytes > IN_FLIGHT_NBYTES:
                yield together
                together = Wave([], [], 0)
            together.sends += wave.sends
            together.receives += wave.receives
            together.nbytes += wave.nbytes
        if together.nbytes:
            yield together

    def _add(self, tensor: int, change: Change, gives: dict[int, list[Box]], takes: dict[int, list[int]]) -> None:
        source, target, dtype = change.source, change.target, change.dtype
        plan = plan_exchange(source, target, change.shape, self.client)
        self.is_local &= plan.is_local
        axes = reduced_axes(source, target)
        held, wanted = _regions(source, change.shape), _regions(target, change.shape)
        here, there = _devices(source.mesh), _devices(target.mesh)
        is_kept = plan.is_local and not axes and _is_unchanged(plan.copies, held, wanted)
        is_kept = is_kept and all(here[move.source] == there[move.target] for move in plan.copies)
        kept = {move.target: move.source for move in plan.copies} if is_kept else {}
        self.kept.append(kept)
        self.new.append([(at, region.shape, dtype, there[at]) for at, region in wanted.items() if at not in kept])
        if is_kept:
            return

        is_cut = self.device_type == "cpu" and not plan.is_local

        def pieces(moves: Iterable[Move]) -> Iterator[Move]:
            return (piece for move in moves for piece in _pieces(move, dtype.itemsize)) if is_cut else iter(moves)

        def given(move: Move) -> Box:
            return Box.cut(tensor, move.source, move.region, held[move.source], dtype)

        def taken(move: Move) -> Box:
            return Box.cut(tensor, move.target, move.region, wanted[move.target], dtype)

        terms: dict[Box, list[tuple[Place, Box | int]]] = {}
        for move in pieces(plan.copies) if axes else plan.copies:
            if axes:
                terms.setdefault(taken(move), []).append((term_of(source, axes, move.source), given(move)))
            else:
                self.copies.append((taken(move), given(move)))
        for peer, moves in plan.sends.items():
            gives.setdefault(peer, []).extend(map(given, pieces(moves)))
        for peer, moves in plan.receives.items():
            for move in pieces(moves):
                takes.setdefault(peer, []).append(len(self.arrivals))
                if axes:
                    place = term_of(source, axes, move.source)
                    terms.setdefault(taken(move), []).append((place, len(self.arrivals)))
                self.arrivals.append(taken(move))
        for move in plan.forwards:
            origin = Box.cut(tensor, move.source, move.region, wanted[move.source], dtype)
            self.forwards.append((taken(move), origin))
        if axes:
            reduce_op = kind_of(source.partial[axes[0]])
            validate_reduction(reduce_op, dtype)
            divisor = math.prod(source.mesh.dim_size(axis) for axis in axes if source.partial[axis] == "avg")
            for box, listed in terms.items():
                ordered = tuple(term for _, term in sorted(listed, key=lambda item: item[0]))
                self.reductions.append(Reduction(box, ordered, reduce_op, divisor))

    def memory(self) -> list[Memory]:
        """Return memory for what is made of every tensor."""
        return [
            Memory({device: host_memory.allocate(shape, dtype, where) for device, shape, dtype, where in new})
            for new in self.new
        ]

    def index_within(self, later: Hop) -> dict[int, tuple[slice, ...]] | None:
        """Return where, in what ``later`` makes of this hop's result, each device's part of that result stays.

        Args:
            later: The next hop of the same single tensor.

        Returns:
            By device, or None if some part does not stay on its device, or anything but itself comes to its place.
        """
        target, wanted = self.changes[0].target, later.changes[0].target
        if self.is_local or self.kept[0] or later.kept[0] or target.mesh != wanted.mesh:
            return None
        shape = self.changes[0].shape
        parts, wholes = _regions(target, shape), _regions(wanted, shape)
        stay = Counter[int]()
        for into, source in later.copies:
            stay[into.device] += math.prod(into.shape) if into.device == source.device else 0
        # An empty part lies nowhere, though all contain it.
        if not all(part.numel == stay[at] > 0 and wholes[at].contains(part) for at, part in parts.items()):
            return None
        return {device: part.relative_to(wholes[device]).slices() for device, part in parts.items()}

    def start(self, tensors: Sequence[Components], tag: int = 0, memory: Sequence[Memory] | None = None) -> Transfer:
        """Post the messages, and copy what this client has meanwhile.

        Collective: Over the hop's clients, if any needs something from another.

        Args:
            tensors: The components of every tensor.
            tag: The messages'; below `END_OF_TAGS`.
            memory: Where to make what is made of each; default new memory.
        """
        return Transfer(self, tensors, tag, self.memory() if memory is None else memory)


@dataclass(slots=True)
class Memory:
    """Where a hop makes a tensor's new components.

    Args:
        made: The new components, by device id.
        spare: By device id, bytes that nobody else uses before the hop is done.
    """

    made: dict[int, torch.Tensor]
    spare: dict[int, list[torch.Tensor]] = field(default_factory=dict)

    def within(self, index: Mapping[int, tuple[slice, ...]]) -> Memory:
        """Return the memory of parts of what is to be made here; what lies around them is spare meanwhile."""
        return Memory(
            {device: self.made[device][place] for device, place in index.items()},
            {device: _around(self.made[device], place) for device, place in index.items()},
        )

    def take(self, box: Box) -> torch.Tensor | None:
        """Return spare memory for a box on its device, if there is enough."""
        listed = self.spare.get(box.device, [])
        for number, spare in enumerate(listed):
            start = -spare.data_ptr() % ALIGNMENT
            stop = start + box.nbytes
            if stop <= spare.numel():
                listed[number] = spare[stop:]
                return spare[start:stop].view(box.dtype).view(box.shape)
        return None


class Transfer:
    """A hop under way. ``made`` are the new components of every tensor, complete after `finish`."""

    def __init__(self, hop: Hop, tensors: Sequence[Components], tag: int, memory: Sequence[Memory]) -> None:
        self._hop, self._tensors, self._tag, self._memory = hop, tensors, tag, memory
        self.made = [each.made for each in memory]
        self._work: Work | None = None
        self._receiving: list[tuple[Parcel, list[int], torch.Tensor, bool]] = []
        self._sending: list[torch.Tensor] = []
        self._shared: dict[int, torch.Tensor] = {}
        # Terms that have arrived, by number, and how many each reduction still waits for.
        self._terms: dict[int, torch.Tensor] = {}
        self._missing = list(hop.num_terms)
        try:
            self._begin()
        except BaseException:
            self.abandon()
            raise

    def _begin(self) -> None:
        hop, tensors = self._hop, self._tensors
        if hop.waves:
            # Before any wave: clients may cut theirs in different places.
            hop.collectives.connect(hop.peers)
            self._post(hop.waves[:1])
        for into_box, source_box in hop.copies:
            into, source = into_box.of(self.made), source_box.of(tensors)
            if into.data_ptr() != source.data_ptr():  # see `Memory.within`
                into.copy_(source)
        for number, missing in enumerate(hop.num_terms):
            if not missing:
                self._reduce(number)
        for made, components, kept in zip(self.made, tensors, hop.kept, strict=True):
            made.update({device: components[source] for device, source in kept.items()})
        if hop.waves:
            self._post(hop.waves[1:])

    def _post(self, waves: Sequence[Wave]) -> None:
        """Post the messages of waves, each when those before are done."""
        device = _HOST if self._hop.device_type == "cpu" else None
        for wave in waves:
            self._complete()
            self._receiving = [
                (parcel, numbers, *self._room(parcel, numbers, device)) for _, parcel, numbers in wave.receives
            ]
            # Who gives a message does so at once where it is known to be expected: so rooms first, then each is packed.
            self._work = self._hop.collectives.exchange(
                wave.sends,
                [(peer, room) for (peer, *_), (_, _, room, _) in zip(wave.receives, self._receiving, strict=True)],
                self._tag,
                partial(self._message, device),
            )

    def _message(self, device: torch.device | None, number: int) -> torch.Tensor:
        """Return a message, which is kept until it is there; what goes to several clients is packed once."""
        message = self._shared.get(number)
        if message is None:
            message = self._hop.parcels[number].pack(self._tensors, device)
            if number in self._hop.shared:
                self._shared[number] = message
        self._sending.append(message)
        return message

    def _room(self, parcel: Parcel, numbers: Sequence[int], device: torch.device | None) -> tuple[torch.Tensor, bool]:
        """Return memory for a message, and whether that is the box's own place: where it lies there in one piece."""
        box = parcel.boxes[0]
        where = self.made[box.tensor][box.device].device
        if len(numbers) == 1 and device in (None, where):
            if numbers[0] in self._hop.in_place and (place := box.of(self.made)).is_contiguous():
                return place, True
            if (spare := self._memory[box.tensor].take(box)) is not None:
                return spare, False
        return parcel.room(device or where), False

    def finish(self) -> list[dict[int, torch.Tensor]]:
        """Return ``made`` when all messages are there, delivered and reduced."""
        self._complete()
        for into_box, source in self._hop.forwards:
            into_box.of(self.made).copy_(source.of(self.made))
        self._shared, self._tensors, self._memory = {}, (), ()
        return self.made

    def _complete(self) -> None:
        """Deliver what is under way, each message as it comes."""
        if self._work is not None:
            try:
                for number in self._work.arrivals():
                    self._deliver(*self._receiving[number])
                self._work.wait()
            except BaseException:
                self.abandon()
                raise
        self._work, self._receiving, self._sending = None, [], []

    def abandon(self) -> None:
        """Leave all memory alone from now on: the call has failed."""
        if self._work is not None:
            self._work.abandon()

    def _deliver(self, parcel: Parcel, numbers: Sequence[int], room: torch.Tensor, is_there: bool) -> None:
        for number, view in zip(numbers, parcel.views(room), strict=True):
            reduction = self._hop.reduced.get(number)
            if reduction is not None:
                self._terms[number] = view
                self._missing[reduction] -= 1
                if not self._missing[reduction]:
                    self._reduce(reduction)
            elif not is_there:
                self._hop.arrivals[number].of(self.made).copy_(view)

    def _reduce(self, number: int) -> None:
        """Make a box of its terms, which are all here."""
        reduction = self._hop.reductions[number]
        into = reduction.box.of(self.made)
        terms = [self._terms.pop(term) if isinstance(term, int) else term.of(self._tensors) for term in reduction.terms]
        reduce_terms(into, [term.to(into.device) for term in terms], reduction.reduce_op)
        average(into, reduction.divisor)


def validate_reduction(reduce_op: str, dtype: torch.dtype) -> None:
    """Check that terms of a dtype can be reduced.

    Raises:
        LayoutError: They cannot.
    """
    try:
        REDUCERS[reduce_op](torch.zeros(1, dtype=dtype), torch.zeros(1, dtype=dtype))
    except (RuntimeError, TypeError) as error:
        raise LayoutError(f"reduction: cannot reduce {dtype} by {reduce_op!r}: {error}; convert it first") from None


def _regions(layout: Layout, shape: tuple[int, ...]) -> dict[int, Region]:
    return {device: layout.region(device, shape) for device in layout.mesh.local_device_ids()}


def _devices(mesh: Mesh) -> dict[int, torch.device]:
    return dict(zip(mesh.local_device_ids(), map(device_of, mesh.local_devices()), strict=True))


def _pieces(move: Move, itemsize: int) -> Iterator[Move]:
    """Yield a move cut along its first dim that can be cut, in about even pieces."""
    nbytes = math.prod(move.shape) * itemsize
    dim = next((dim for dim, size in enumerate(move.shape) if size > 1), 0)
    if nbytes < 2 * PIECE_NBYTES:
        yield move
        return
    size = -(-move.shape[dim] // (nbytes // PIECE_NBYTES))
    for start in range(0, move.shape[dim], size):
        offset, shape = list(move.offset), list(move.shape)
        offset[dim] += start
        shape[dim] = min(size, move.shape[dim] - start)
        yield Move(move.target, tuple(offset), tuple(shape), move.source)


def _around(whole: torch.Tensor, place: Sequence[slice]) -> list[torch.Tensor]:
    """Return the bytes before and after a part of a tensor, where the part is rows of it in one piece."""
    is_rows = all(one == slice(0, size) for one, size in zip(place[1:], whole.shape[1:], strict=True))
    if not place or not is_rows or not whole.is_contiguous():
        return []
    rows = (whole[: place[0].start], whole[place[0].stop :])
    return [byte_view(part) for part in rows if part.numel()]


def _is_unchanged(copies: Sequence[Move], held: Mapping[int, Region], wanted: Mapping[int, Region]) -> bool:
    """Whether every new component is an old one, whole, and no two of them the same one, which they would share."""
    sources = {move.source for move in copies}
    return len(sources) == len(copies) and all(
        held[move.source] == move.region == wanted[move.target] for move in copies
    )
