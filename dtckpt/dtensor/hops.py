"""One exchange of boxes, for one tensor or for many: compiled to the steps of this client, then run.

Compiling turns plans (`dtckpt.planning.exchange`) into what is left to do each time: messages to post, copies to make
meanwhile, terms to reduce. Small boxes from one client to another travel in one message, aligned; a large one travels
alone, and is received in its place where it lies there in one piece. Giver and taker cut messages alike, by size.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch

from dtckpt.dtensor.collectives import REDUCERS, Work, as_bytes, average, collectives_of, reduce_terms
from dtckpt.dtensor.devices import device_of
from dtckpt.errors import LayoutError
from dtckpt.groups import CPU_BACKENDS, backend_of
from dtckpt.layout import Layout
from dtckpt.mesh import Mesh
from dtckpt.planning.exchange import Move, Place, kind_of, plan_exchange, reduced_axes, term_of
from dtckpt.region import Region

Components = Mapping[int, torch.Tensor]
"""This client's components, by global device id of their mesh."""

LARGE_NBYTES = 1 << 20
"""A box from this size on is a message of its own."""
MESSAGE_NBYTES = 64 << 20
"""Small boxes that travel together make no message larger than this."""
IN_FLIGHT_NBYTES = 256 << 20
"""Messages of one client that are under way at a time, given and taken, if one alone is not larger."""
_ALIGNMENT = 16
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
        for mesh in (self.source.mesh, self.target.mesh):
            if mesh.local_device_ids():
                return mesh.client_of(mesh.local_device_ids()[0])
        return -1

    @property
    def device_type(self) -> str:
        """Where messages lie: on the cards, if every client has one there and a backend for it, else in host memory."""
        meshes = self.source.mesh, self.target.mesh
        has_cards = all(mesh.device_type == "cuda" and mesh.num_clients == mesh.size() for mesh in meshes)
        return "cuda" if has_cards and backend_of("cuda") not in CPU_BACKENDS else "cpu"

    @property
    def number(self) -> int:
        """A number below 2**31 that clients which want the same share, and others hardly ever do."""
        layouts = [(_number(each.mesh), each.sharding_specs, each.partial) for each in (self.source, self.target)]
        return zlib.crc32(f"{layouts} {self.shape} {self.dtype}".encode()) >> 1


@lru_cache(maxsize=256)
def _number(mesh: Mesh) -> int:
    return zlib.crc32(repr(mesh.identity).encode())


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
        component = tensors[self.tensor][self.device]
        return component if self._index is None else component[self._index]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Parcel:
    """Boxes that travel as one message, and from which byte on each lies in it."""

    boxes: tuple[Box, ...]
    starts: tuple[int, ...]
    nbytes: int

    @classmethod
    def of(cls, boxes: Sequence[Box]) -> Parcel:
        """Return the message of some boxes, each aligned for any dtype."""
        ends = itertools.accumulate((-(-box.nbytes // _ALIGNMENT) * _ALIGNMENT for box in boxes), initial=0)
        starts = tuple(ends)[:-1]
        return cls(tuple(boxes), starts, starts[-1] + boxes[-1].nbytes)

    def views(self, memory: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield every box's place in the message's bytes."""
        for box, start in zip(self.boxes, self.starts, strict=True):
            yield memory[start : start + box.nbytes].view(box.dtype).view(box.shape)

    def pack(self, tensors: Sequence[Components], device: torch.device | None) -> torch.Tensor:
        """Return the message's bytes on a device, default the boxes'; one box in one piece there is not copied."""
        if len(self.boxes) == 1:
            alone = plain(self.boxes[0].of(tensors))
            alone = alone if device is None else alone.to(device)
            return as_bytes(alone.contiguous())
        where = device or self.boxes[0].of(tensors).device
        memory = torch.empty(self.nbytes, dtype=torch.uint8, device=where)
        for box, view in zip(self.boxes, self.views(memory), strict=True):
            view.copy_(box.of(tensors))
        return memory


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


@dataclass(frozen=True, slots=True)
class Reduction:
    """A new box that is made of terms, in their order: boxes of this client, or the numbers of boxes that arrive."""

    box: Box
    terms: tuple[Box | int, ...]
    reduce_op: str
    divisor: int


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
        self.collectives = collectives_of(self.clients, self.client, self.device_type)
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
        self.reduced = {term for reduction in self.reductions for term in reduction.terms if isinstance(term, int)}
        # Of a reduction, either of the first two terms may lie where their result goes.
        firsts = ([term for term in each.terms[:2] if isinstance(term, int)] for each in self.reductions)
        self.in_place = {*range(len(self.arrivals))} - self.reduced | {first for first, *_ in filter(None, firsts)}
        # What several clients get is packed once: messages by number, and who gets which.
        numbers: dict[Parcel, int] = {}
        sends = [
            (peer, numbers.setdefault(parcel, len(numbers)), parcel.nbytes)
            for peer, boxes in sorted(gives.items())
            for parcel in _parcels(boxes)
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
        self.takers = {peer for peer, _, _ in sends}
        """Clients that this one gives something."""

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

        def given(move: Move) -> Box:
            return Box.cut(tensor, move.source, move.region, held[move.source], dtype)

        def taken(move: Move) -> Box:
            return Box.cut(tensor, move.target, move.region, wanted[move.target], dtype)

        terms: dict[Box, list[tuple[Place, Box | int]]] = {}
        for move in plan.copies:
            if axes:
                terms.setdefault(taken(move), []).append((term_of(source, axes, move.source), given(move)))
            else:
                self.copies.append((taken(move), given(move)))
        for peer, moves in plan.sends.items():
            gives.setdefault(peer, []).extend(map(given, moves))
        for peer, moves in plan.receives.items():
            for move in moves:
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

    def start(self, tensors: Sequence[Components], tag: int = 0) -> Transfer:
        """Post the messages, and copy what this client has meanwhile.

        Collective: Over the hop's clients, if any needs something from another.

        Args:
            tensors: The components of every tensor.
            tag: The messages'; below 2**31.
        """
        return Transfer(self, tensors, tag)


class Transfer:
    """A hop under way. ``made`` are the new components of every tensor, complete after `finish`."""

    def __init__(self, hop: Hop, tensors: Sequence[Components], tag: int) -> None:
        self._hop, self._tag = hop, tag
        self.made: list[dict[int, torch.Tensor]] = [
            {device: torch.empty(shape, dtype=dtype, device=where) for device, shape, dtype, where in new}
            for new in hop.new
        ]
        self._tensors = tensors
        self._work: Work | None = None
        self._receiving: list[tuple[Parcel, list[int], torch.Tensor]] = []
        self._sending: list[torch.Tensor] = []
        self._shared: dict[int, torch.Tensor] = {}
        # Terms that have arrived, by number.
        self._terms: dict[int, torch.Tensor] = {}
        self._post(hop.waves[:1])
        for into, source in hop.copies:
            into.of(self.made).copy_(source.of(tensors))
        for made, components, kept in zip(self.made, tensors, hop.kept, strict=True):
            made.update({device: components[source] for device, source in kept.items()})
        self._post(hop.waves[1:])

    def _post(self, waves: Sequence[Wave]) -> None:
        """Post the messages of waves, each when those before are done."""
        device = _HOST if self._hop.device_type == "cpu" else None
        for wave in waves:
            self._complete()
            self._sending = [self._message(number, device) for _, number in wave.sends]
            rooms = [self._room(parcel, numbers, device) for _, parcel, numbers in wave.receives]
            self._receiving = [
                (parcel, numbers, room) for (_, parcel, numbers), room in zip(wave.receives, rooms, strict=True)
            ]
            self._work = self._hop.collectives.exchange(
                [(peer, message) for (peer, _), message in zip(wave.sends, self._sending, strict=True)],
                [(peer, room) for (peer, _, _), room in zip(wave.receives, rooms, strict=True)],
                self._tag,
            )

    def _message(self, number: int, device: torch.device | None) -> torch.Tensor:
        """Return the bytes of a message; what goes to several clients is packed once."""
        if number in self._shared:
            return self._shared[number]
        message = self._hop.parcels[number].pack(self._tensors, device)
        if number in self._hop.shared:
            self._shared[number] = message
        return message

    def _room(self, parcel: Parcel, numbers: Sequence[int], device: torch.device | None) -> torch.Tensor:
        """Return memory for a message: the box's own place where it comes alone and lies there in one piece."""
        place = parcel.boxes[0].of(self.made)
        is_alone = len(numbers) == 1 and numbers[0] in self._hop.in_place
        if is_alone and device in (None, place.device) and place.is_contiguous():
            return as_bytes(place)
        return torch.empty(parcel.nbytes, dtype=torch.uint8, device=device or place.device)

    def finish(self) -> list[dict[int, torch.Tensor]]:
        """Return ``made`` when all messages are there, delivered and reduced."""
        self._complete()
        for reduction in self._hop.reductions:
            into = reduction.box.of(self.made)
            terms = [self._terms[term] if isinstance(term, int) else term.of(self._tensors) for term in reduction.terms]
            reduce_terms(into, [term.to(into.device) for term in terms], reduction.reduce_op)
            average(into, reduction.divisor)
        for into_box, source in self._hop.forwards:
            into_box.of(self.made).copy_(source.of(self.made))
        self._terms, self._shared, self._tensors = {}, {}, ()
        return self.made

    def _complete(self) -> None:
        """Deliver what is under way."""
        if self._work is not None:
            self._work.wait()
        for parcel, numbers, room in self._receiving:
            for number, view in zip(numbers, parcel.views(room), strict=True):
                into = self._hop.arrivals[number].of(self.made)
                is_there = into.data_ptr() == view.data_ptr()
                if number in self._hop.reduced:
                    # Of two views of one memory with different strides torch cannot tell that they are the same.
                    self._terms[number] = into if is_there else view
                elif not is_there:
                    into.copy_(view)
        self._work, self._receiving, self._sending = None, [], []


def validate_reduction(reduce_op: str, dtype: torch.dtype) -> None:
    """Check that terms of a dtype can be reduced.

    Raises:
        LayoutError: They cannot.
    """
    try:
        REDUCERS[reduce_op](torch.zeros(1, dtype=dtype), torch.zeros(1, dtype=dtype))
    except (RuntimeError, TypeError) as error:
        raise LayoutError(f"reduction: cannot reduce {dtype} by {reduce_op!r}: {error}; convert it first") from None


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that is in memory as it reads, without pending conjugation or negation, and has no gradient."""
    return tensor.detach().resolve_conj().resolve_neg()


def _parcels(boxes: Sequence[Box]) -> Iterator[Parcel]:
    for inside in cut_messages([box.nbytes for box in boxes]):
        yield Parcel.of([boxes[number] for number in inside])


def _regions(layout: Layout, shape: tuple[int, ...]) -> dict[int, Region]:
    return {device: layout.region(device, shape) for device in layout.mesh.local_device_ids()}


def _devices(mesh: Mesh) -> dict[int, torch.device]:
    return dict(zip(mesh.local_device_ids(), map(device_of, mesh.local_devices()), strict=True))


def _is_unchanged(copies: Sequence[Move], held: Mapping[int, Region], wanted: Mapping[int, Region]) -> bool:
    """Whether every new component is an old one, whole, and no two of them the same one, which they would share."""
    sources = {move.source for move in copies}
    return len(sources) == len(copies) and all(
        held[move.source] == move.region == wanted[move.target] for move in copies
    )
