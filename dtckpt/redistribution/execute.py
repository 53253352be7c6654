"""Redistribution: bring tensors into other layouts, on the same mesh or on another.

A change of layout is a path of hops (`dtckpt.redistribution.path_plan`). Each is an exchange of boxes
(`dtckpt.redistribution.exchange`) or, on NCCL, one of its collectives (`dtckpt.redistribution.native_collective`).
Programs are compiled once per change and kept. Many tensors go together: hop by hop, what they send to one client
travels in few messages.
"""

from __future__ import annotations

import itertools
import logging
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache

import torch
import torch.distributed as dist

from dtckpt.comm.cuda_streams import SideStreams
from dtckpt.comm.point_to_point import END_OF_TAGS, ensure_progress
from dtckpt.comm.process_groups import message_memory
from dtckpt.errors import DtckptError, LayoutError
from dtckpt.layout.layout import MATCH, Layout
from dtckpt.layout.mesh import Mesh
from dtckpt.redistribution import disagreement
from dtckpt.redistribution.exchange import Change, Hop, Memory, Transfer
from dtckpt.redistribution.messages import Components
from dtckpt.redistribution.native_collective import NativeHop, NativeTransfer, recognise
from dtckpt.redistribution.path_plan import plan_path

_LOG = logging.getLogger("dtckpt.dtensor")

_TAGS_APART = 1_000_003
"""How far the tags of one call's messages lie from those of the next."""
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


@dataclass(frozen=True, eq=False)
class Program:
    """How one tensor gets from a layout to another, for one client.

    Args:
        change: What is wanted.
        hops: One per layout on the path, this client's side of each.
        within: Per hop, where its result stays within the next one's, by device; None: nowhere, or it is the last.
        neutral: What some of the target's devices hold in the end, as the value became a term.
    """

    change: Change
    hops: tuple[Hop | NativeHop, ...]
    within: tuple[dict[int, tuple[slice, ...]] | None, ...]
    neutral: Mapping[int, int]

    @cached_property
    def is_local(self) -> bool:
        """Whether no client needs anything from another."""
        return all(hop.is_local for hop in self.hops)

    def memory(self, number: int, into: Components | None = None) -> list[Memory]:
        """Return memory for a hop's result and for those after it that hold it in its place, the last one first.

        Args:
            number: Which hop.
            into: Where the last hop's result is wanted.
        """
        index, hop = self.within[number], self.hops[number]
        if index is None and into is not None and number + 1 == len(self.hops):
            return [Memory(dict(into))]
        if index is None:
            return hop.memory() if isinstance(hop, Hop) else []
        later = self.memory(number + 1, into)
        return [*later, later[-1].within(index)]

    def with_neutral(self, made: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Return what the hops made, and neutral elements where those are wanted instead."""
        return {**made, **{device: torch.full_like(made[device], value) for device, value in self.neutral.items()}}


def program_of(source: Layout, target: Layout, shape: Sequence[int], dtype: torch.dtype) -> Program:
    """Return the program of a change, compiled when it is first asked for."""
    return _program_of(Change(source, target, tuple(shape), dtype))


def _program_of(change: Change) -> Program:
    is_on_cards = "cuda" in (change.source.mesh.device_type, change.target.mesh.device_type)
    # Equal meshes may be seen from different clients of one process, whose process group may be followed by another.
    return _compile(change, change.client, message_memory("cuda") if is_on_cards else "cpu")


@lru_cache(maxsize=4096)
def _compile(change: Change, client: int, memory: str) -> Program:
    del client, memory
    source, target, shape, dtype = change.source, change.target, change.shape, change.dtype
    path = plan_path(source, target, shape, is_native=change.device_type != "cpu")
    hops: list[Hop | NativeHop] = []
    for before, after in itertools.pairwise((source, *path)):
        hop = Change(before, after, shape, dtype)
        found = recognise(hop) if hop.device_type != "cpu" and hop.client in hop.clients else None
        hops.append(NativeHop(hop, found) if found else Hop([hop]))
    within = [
        one.index_within(later) if isinstance(one, Hop) and isinstance(later, Hop) else None
        for one, later in itertools.pairwise(hops)
    ]
    reached = path[-1] if path else source
    neutral: dict[int, int] = {}
    # In mesh order: the last axis is reduced first, so what it needs to leave its term alone counts.
    for axis in (axis for axis in target.mesh.mesh_dim_names if axis in target.partial and axis not in reached.partial):
        value = _NEUTRAL.get(target.partial[axis])
        for device in target.mesh.local_device_ids():
            if value is not None and target.mesh.coordinate(device)[target.mesh.axis_index(axis)]:
                neutral[device] = value
    return Program(change, tuple(hops), (*within, None), neutral)


@lru_cache(maxsize=256)
def _together(hops: tuple[Hop, ...]) -> Hop:
    return Hop([hop.changes[0] for hop in hops])


@lru_cache(maxsize=256)
def _number(programs: tuple[Program, ...]) -> int:
    """Return a number below 2**31 for the tags of all that some programs send, when they run together.

    Paths to different layouts may begin with the same hop. Its messages must not be taken for those of another path.
    """
    return zlib.crc32(str([program.change.number for program in programs]).encode()) >> 1


class Redistribution:
    """Tensors on their way; the last hop may be under way still.

    Args:
        programs: One per tensor.
        tensors: The components of each.
        call: Looks after what this client waits for.
        count: Which of the calls among its clients this is; messages of one are not taken for those of another.
        into: Memory for the new components of each; they are not made there where they are old ones.
    """

    def __init__(
        self,
        programs: Sequence[Program],
        tensors: Sequence[Components],
        call: disagreement.Call | None = None,
        count: int = 0,
        into: Sequence[Components] | None = None,
    ) -> None:
        self._call = call
        self._error: DtckptError | None = None
        self._under_way: list[Transfer | NativeTransfer] = []
        self._first_tag = _number(tuple(programs)) + count * _TAGS_APART
        try:
            here = self._start(programs, tensors, into)
        except BaseException:
            self._abandon()
            raise
        self.components = [program.with_neutral(made) for program, made in zip(programs, here, strict=True)]
        """The new components of every tensor by device id of its target mesh; complete after `wait`."""

    def _start(
        self, programs: Sequence[Program], tensors: Sequence[Components], into: Sequence[Components] | None
    ) -> list[dict[int, torch.Tensor]]:
        """Run all hops but the last, and start that; return what it makes."""
        here = [dict(components) for components in tensors]
        memory: list[list[Memory]] = [[] for _ in programs]
        for number in range(max((len(program.hops) for program in programs), default=0)):
            self._finish()
            with self._call.waiting() if self._call else nullcontext():
                for members, hop in _wave(programs, number):
                    for member in members:
                        wanted = None if into is None else into[member]
                        memory[member] = memory[member] or programs[member].memory(number, wanted)
                    transfer = hop.start(
                        [here[member] for member in members],
                        (self._first_tag + number) % END_OF_TAGS,
                        [memory[member].pop() for member in members if memory[member]],
                    )
                    for member, made in zip(members, transfer.made, strict=True):
                        here[member] = made
                    self._under_way.append(transfer)
        return here

    def wait(self) -> None:
        """Complete what is under way.

        Raises:
            DtckptError: Another client failed, or wanted something else.
            CoordinationError: A client is gone.
        """
        if self._error is not None:
            raise self._error
        try:
            self._finish()
            if self._call is not None:
                call, self._call = self._call, None
                call.validate()
        except DtckptError as error:
            self._error = error  # whoever waits for the same again must not take what is there for a result
            raise

    def _finish(self) -> None:
        with self._call.waiting() if self._under_way and self._call else nullcontext():
            try:
                while self._under_way:
                    self._under_way[0].finish()
                    self._under_way.pop(0)
            except BaseException:
                self._abandon()
                raise

    def _abandon(self) -> None:
        """Leave all memory alone from now on, also that of transfers which have not failed themselves."""
        while self._under_way:
            self._under_way.pop().abandon()

    def __del__(self) -> None:
        # Others wait for what this client sends, and for its part in what they want instead, whether or not anyone
        # here wants the result.
        if self._error is not None:
            return
        try:
            self.wait()
        except Exception as error:  # there is nobody to raise it to
            _LOG.warning("a redistribution whose result was dropped has failed: %s", error)


def _wave(programs: Sequence[Program], number: int) -> list[tuple[list[int], Hop | NativeHop]]:
    """Return the hops of one number of all programs, exchanges among the same clients together."""
    waves: list[tuple[list[int], Hop | NativeHop]] = []
    exchanges: dict[tuple[tuple[int, ...], str], list[int]] = {}
    for member, program in enumerate(programs):
        hop = program.hops[number] if number < len(program.hops) else None
        if isinstance(hop, Hop):
            exchanges.setdefault((hop.clients, hop.device_type), []).append(member)
        elif hop is not None:
            waves.append(([member], hop))
    for members in exchanges.values():
        hops = tuple(programs[member].hops[number] for member in members)
        waves.append((members, hops[0] if len(hops) == 1 else _together(hops)))
    return waves


class LocalRedistribution:
    """Tensors none of whose bytes travels between clients; brought where they are wanted at once.

    Args:
        programs: One per tensor.
        tensors: The components of each.
        into: As for `Redistribution`.
    """

    def __init__(
        self, programs: Sequence[Program], tensors: Sequence[Components], into: Sequence[Components] | None
    ) -> None:
        self.components = [
            _locally(program, components, None if into is None else into[number])
            for number, (program, components) in enumerate(zip(programs, tensors, strict=True))
        ]

    def wait(self) -> None:
        """Return: all is done."""


def _locally(program: Program, components: Components, into: Components | None) -> dict[int, torch.Tensor]:
    here, memory = dict(components), list[Memory]()
    for number, hop in enumerate(program.hops):
        memory = memory or program.memory(number, into)
        (here,) = hop.start([here], memory=[memory.pop()] if memory else None).finish()
    return program.with_neutral(here)


class EnqueuedRedistribution:
    """Tensors whose way is enqueued on streams beside the current ones, so that the host need not wait.

    Args:
        programs: One per tensor; nothing travels through host memory.
        tensors: The components of each.
        cards: See `_cards`.
    """

    def __init__(
        self, programs: Sequence[Program], tensors: Sequence[Components], cards: Sequence[torch.device]
    ) -> None:
        inputs = [part for components in tensors for part in components.values()]
        self._beside = SideStreams(cards)
        self.components: list[dict[int, torch.Tensor]] = []

        def work() -> list[torch.Tensor]:
            running = Redistribution(programs, tensors)
            running.wait()
            self.components = running.components
            return [part for components in self.components for part in components.values()]

        self._beside.run(work, inputs)

    def wait(self) -> None:
        """Order what the current streams do next after the last transfer."""
        self._beside.wait()


Running = Redistribution | LocalRedistribution | EnqueuedRedistribution


def redistribute_into(programs: Sequence[Program], tensors: Sequence[Components], into: Sequence[Components]) -> None:
    """Bring tensors into other layouts, in ready memory. Collective and errors: as `redistribute`.

    Args:
        programs: What is wanted, per tensor.
        tensors: The components of each by device id of its source mesh.
        into: Memory for the new components of each by device id of its target mesh.
    """
    for made, wanted in zip(redistribute(programs, tensors, into=into).components, into, strict=True):
        for device, component in made.items():
            if component is not wanted[device]:
                wanted[device].copy_(component)


def redistribute(
    programs: Sequence[Program],
    tensors: Sequence[Components],
    *,
    is_async: bool = False,
    into: Sequence[Components] | None = None,
) -> Running:
    """Bring tensors into other layouts.

    Collective: Over the clients of all meshes, with the same changes in the same order, unless no byte moves between
    clients for any of them.

    Args:
        programs: What is wanted, per tensor; see `program_of`.
        tensors: The components of each by device id of its source mesh.
        is_async: Return while the last hop is under way.
        into: Memory for the new components of each; see `redistribute_into`.

    Raises:
        DtckptError: Another client failed, or wanted something else.
        CoordinationError: A client is gone.
    """
    if _LOG.isEnabledFor(logging.DEBUG):  # before it starts: a client that hangs has said where
        for program in programs:
            change = program.change
            _LOG.debug("redistribute %s of %s: %r to %r", change.shape, change.dtype, change.source, change.target)
    has_waits = any(not program.is_local and program.change.device_type == "cpu" for program in programs)
    if is_async and not has_waits and (cards := _cards(programs, tensors)):
        return EnqueuedRedistribution(programs, tensors, cards)
    if all(program.is_local for program in programs):
        return LocalRedistribution(programs, tensors, into)
    call = disagreement.Call([program.change for program in programs], _part) if has_waits else None
    running = Redistribution(programs, tensors, call, call.count if call else 0, into)
    if not is_async:
        running.wait()
    elif has_waits:
        ensure_progress()
    return running


def _cards(programs: Sequence[Program], tensors: Sequence[Components]) -> list[torch.device]:
    """Return this client's cards from or to which tensors go; others of a batch may lie on the host."""
    sources = (part.device for components in tensors for part in components.values())
    messages = (program.change.device for program in programs)
    return [device for device in dict.fromkeys((*sources, *messages)) if device.type == "cuda"]


def _part(seen_by: Callable[[int], Sequence[Change]], count: int) -> disagreement.Part:
    own = dist.get_rank()
    changes = seen_by(own)
    programs = [_program_of(change) for change in changes]

    @cache
    def ways_of(client: int) -> list[tuple[Hop | NativeHop, ...]]:
        return [_program_of(change).hops for change in seen_by(client)]

    # Hop by hop: nobody is done with one before those it exchanges messages with have begun it.
    late, clients = {own}, {client for change in changes for client in change.clients}
    for number in range(max(len(program.hops) for program in programs)):
        if late < clients:
            hops = [way[number] for client in late for way in ways_of(client) if number < len(way)]
            late |= {peer for hop in hops if isinstance(hop, Hop) for peer in hop.peers}

    def run() -> None:
        Redistribution(programs, [_zeros(change) for change in changes], count=count).wait()

    return frozenset(late - {own}), run


def _zeros(change: Change) -> dict[int, torch.Tensor]:
    mesh = change.source.mesh
    regions = {device: change.source.region(device, change.shape) for device in mesh.local_device_ids()}
    return {device: torch.zeros(region.shape, dtype=change.dtype) for device, region in regions.items()}


def tell(error: DtckptError, meshes: Sequence[Mesh]) -> bool:
    """Tell the clients of some meshes of an error that keeps this one from a redistribution between those.

    Blocks: See `divergence.tell`, and for what is returned.
    """
    return disagreement.tell(error, meshes, _part)


def cache_info() -> tuple[int, int, int, int]:
    """Return hits, misses, size and bound of the cache of programs."""
    info = _compile.cache_info()
    return info.hits, info.misses, info.currsize, info.maxsize or 0


def clear_cache() -> None:
    """Forget all programs."""
    _compile.cache_clear()
    _together.cache_clear()
    _number.cache_clear()
