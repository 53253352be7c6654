"""Run redistributions: bring tensors into other layouts, on the same mesh or on another.

A redistribution is a path of layouts (`dtckpt.redistribution.path_plan`), and one exchange between each layout and the
next. An exchange sends boxes from client to client (`dtckpt.redistribution.exchange`); on NCCL it may be one collective
instead (`dtckpt.redistribution.native_collective`).

    source --exchange--> layout --exchange--> ... --exchange--> target without new terms --(neutral values)--> target

The plan of a redistribution is compiled once and cached. Several tensors go together, exchange by exchange: the boxes
of all tensors that go to one client share messages.
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

from dtckpt.comm.collectives import neutral_term
from dtckpt.comm.point_to_point import END_OF_TAGS, ensure_progress
from dtckpt.comm.process_groups import is_fake, message_memory, validate_connected
from dtckpt.comm.torch_device import SideStreams
from dtckpt.errors import DtckptError, LayoutError
from dtckpt.layout.layout import MATCH, Layout
from dtckpt.layout.mesh import Mesh
from dtckpt.redistribution import disagreement
from dtckpt.redistribution.exchange import BoxExchange, BoxTransfer, OutputBuffers
from dtckpt.redistribution.layout_change import LayoutChange
from dtckpt.redistribution.messages import Components
from dtckpt.redistribution.native_collective import NativeExchange, NativeTransfer, find_collective
from dtckpt.redistribution.path_plan import plan_path

_LOG = logging.getLogger("dtckpt.dtensor")

Exchange = BoxExchange | NativeExchange
Transfer = BoxTransfer | NativeTransfer

_TAGS_APART = 1_000_003
"""Distance between the tags of one call's messages and the tags of the next call's."""
_NEUTRAL_VALUES = {"product": 1, "bxor": 0}
"""When a value becomes a term, all devices but the first hold this, or the neutral term of a sum.

With other ops every device may hold the value.
"""


def resolve_match(layout: Layout, source: Layout) -> Layout:
    """Return ``layout`` with every MATCH spec replaced by the source's spec of that dim.

    Raises:
        LayoutError: The ranks differ, or a spec of the source collides with another spec.
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
class RedistributionPlan:
    """The exchanges that bring one tensor from a layout to another, compiled for this client.

    Args:
        change: The change of layout.
        exchanges: One per layout on the path.
        index_in_next: Per exchange, the place of its outputs within the outputs of the next exchange, by device; None
            if they move, and for the last exchange. See `BoxExchange.index_in`.
        neutral_values: By device of the target, the value that fills its component in the end, if a value becomes a
            term.
    """

    change: LayoutChange
    exchanges: tuple[Exchange, ...]
    index_in_next: tuple[dict[int, tuple[slice, ...]] | None, ...]
    neutral_values: Mapping[int, complex]

    @cached_property
    def is_local(self) -> bool:
        """Whether no exchange needs another client: see `ExchangePlan`."""
        return all(exchange.is_local for exchange in self.exchanges)

    def output_buffers(self, step: int, into: Components | None = None) -> list[OutputBuffers]:
        """Allocate the outputs of an exchange, and of those after it that share buffers with it.

        Args:
            step: Number of the exchange.
            into: Buffers for the outputs of the last exchange; default new ones.

        Returns:
            The buffers of each of these exchanges, the last exchange first. Empty for a native exchange, which
            allocates its output itself.
        """
        index, exchange = self.index_in_next[step], self.exchanges[step]
        if index is None and into is not None and step + 1 == len(self.exchanges):
            return [OutputBuffers(dict(into))]
        if index is None:
            return exchange.allocate_outputs() if isinstance(exchange, BoxExchange) else []
        # From the back: the last exchange that shares the buffer allocates it, and earlier exchanges get parts of
        # parts.
        #     step 1 [ part ]  within  step 2 [ ....part.... ]  within  step 3 [ all ], allocated
        later = self.output_buffers(step + 1, into)
        return [*later, later[-1].within(index)]

    def with_neutral_values(self, outputs: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Return the outputs of the last exchange, and components of neutral values where the target needs those."""
        return {
            **outputs,
            **{device: torch.full_like(outputs[device], value) for device, value in self.neutral_values.items()},
        }


def plan_redistribution(source: Layout, target: Layout, shape: Sequence[int], dtype: torch.dtype) -> RedistributionPlan:
    """Return the plan of a change of layout; compile it at the first call.

    Args:
        source: The layout before.
        target: The layout after, without MATCH specs.
        shape: Global shape.
        dtype: The tensor's dtype.
    """
    return _cached_plan(LayoutChange(source, target, tuple(shape), dtype))


def _cached_plan(change: LayoutChange) -> RedistributionPlan:
    is_cuda = "cuda" in (change.source.mesh.device_type, change.target.mesh.device_type)
    # The two other arguments are part of the cache's key. Different clients of one process may see equal meshes, and a
    # later process group may have another backend.
    return _compile(change, change.client, message_memory("cuda") if is_cuda else "cpu")


@lru_cache(maxsize=4096)
def _compile(change: LayoutChange, client: int, memory: str) -> RedistributionPlan:
    del client, memory
    source, target, shape, dtype = change.source, change.target, change.shape, change.dtype
    is_rounded = not (dtype.is_floating_point or dtype.is_complex)
    path = plan_path(source, target, shape, is_native=change.device_type != "cpu", is_rounded=is_rounded)
    exchanges: list[Exchange] = []
    for before, after in itertools.pairwise((source, *path)):
        step = LayoutChange(before, after, shape, dtype)
        # A client without a device in this step is in no line of devices of a collective.
        collective = find_collective(step) if step.device_type != "cpu" and step.client in step.clients else None
        exchanges.append(NativeExchange(step, collective) if collective else BoxExchange([step]))
    index_in_next = [
        one.index_in(later) if isinstance(one, BoxExchange) and isinstance(later, BoxExchange) else None
        for one, later in itertools.pairwise(exchanges)
    ]
    last = path[-1] if path else source
    neutral_values: dict[int, complex] = {}
    # In mesh order: the last axis is reduced first, so the value that leaves the other term unchanged counts.
    for axis in (axis for axis in target.mesh.mesh_dim_names if axis in target.partial and axis not in last.partial):
        reduce_op = target.partial[axis]
        value = neutral_term(dtype) if reduce_op == "sum" else _NEUTRAL_VALUES.get(reduce_op)
        for device in target.mesh.local_device_ids():
            if value is not None and target.mesh.coordinate(device)[target.mesh.axis_index(axis)]:
                neutral_values[device] = value
    return RedistributionPlan(change, tuple(exchanges), (*index_in_next, None), neutral_values)


@lru_cache(maxsize=256)
def _merge(exchanges: tuple[BoxExchange, ...]) -> BoxExchange:
    """Return one exchange of the tensors of several, which are among the same clients."""
    return BoxExchange([exchange.changes[0] for exchange in exchanges])


@lru_cache(maxsize=256)
def _fingerprint(plans: tuple[RedistributionPlan, ...]) -> int:
    """Return a number below 2**31 for the tags of all messages of some plans that run together.

    Paths to different layouts may begin with the same exchange. So the tags follow from all changes together: then a
    client never takes a message of one path for a message of another.
    """
    return zlib.crc32(str([plan.change.fingerprint for plan in plans]).encode()) >> 1


class Redistribution:
    """A running redistribution of tensors. The last exchange may still be in progress.

    Args:
        plans: One per tensor.
        tensors: The components of each.
        call: Watches over this client's waits; None if the host never waits.
        count: The number of the call among its clients; it keeps messages of different calls apart.
        into: Buffers for the new components of each. Components that are old ones are not copied there.
        granted: The digest of the clients' agreements and assumptions. Messages of different digests never meet.

    Attributes:
        components: The new components of every tensor, by device id of its target mesh; complete after `wait`.
    """

    def __init__(
        self,
        plans: Sequence[RedistributionPlan],
        tensors: Sequence[Components],
        call: disagreement.RedistributionCall | None = None,
        count: int = 0,
        into: Sequence[Components] | None = None,
        *,
        granted: int = 0,
    ) -> None:
        self._call = call
        self._error: DtckptError | None = None
        self._transfers: list[Transfer] = []
        self._first_tag = (_fingerprint(tuple(plans)) ^ granted) + count * _TAGS_APART
        try:
            # Messages may be under way, and would still write to buffers that this error frees.
            outputs = self._start(plans, tensors, into)
        except BaseException as error:
            self._break_off(error)
            raise
        self.components = [plan.with_neutral_values(output) for plan, output in zip(plans, outputs, strict=True)]

    def _start(
        self, plans: Sequence[RedistributionPlan], tensors: Sequence[Components], into: Sequence[Components] | None
    ) -> list[dict[int, torch.Tensor]]:
        """Run all exchanges but the last, start that, and return its outputs."""
        components = [dict(each) for each in tensors]
        # Per tensor, output buffers of the exchanges to come, the next one last.
        buffers: list[list[OutputBuffers]] = [[] for _ in plans]
        for step in range(max((len(plan.exchanges) for plan in plans), default=0)):
            self._finish()
            # A post of messages may block, too: on the handshake with a new peer, and on the flight before.
            with self._call.watched() if self._call else nullcontext():
                for members, exchange in _exchanges_of(plans, step):
                    for member in members:
                        final = None if into is None else into[member]
                        buffers[member] = buffers[member] or plans[member].output_buffers(step, final)
                    transfer = exchange.start(
                        [components[member] for member in members],
                        (self._first_tag + step) % END_OF_TAGS,
                        [buffers[member].pop() for member in members if buffers[member]],
                    )
                    for member, outputs in zip(members, transfer.outputs, strict=True):
                        components[member] = outputs
                    self._transfers.append(transfer)
        return components

    def wait(self) -> None:
        """Complete the exchange in progress.

        Raises:
            DtckptError: Another client failed, or asked for something else.
            CoordinationError: A client is gone.
        """
        if self._error is not None:
            raise self._error
        try:
            self._finish()
            if self._call is not None:
                # Once: validation also enters the call into the history of returned calls.
                call, self._call = self._call, None
                call.validate()
        except DtckptError as error:
            self._error = error  # raised again by each later wait: the components are no result
            raise

    def _finish(self) -> None:
        with self._call.watched() if self._transfers and self._call else nullcontext():
            try:
                while self._transfers:
                    # Popped only when it is complete, so that `_break_off` also finds a transfer that was interrupted.
                    self._transfers[0].finish()
                    self._transfers.pop(0)
            except BaseException as error:
                self._break_off(error)
                raise

    def _break_off(self, error: BaseException) -> None:
        """Stop all access to memory from now on, also for transfers that have not failed themselves.

        Raises:
            DtckptError: The clients called no more already. This earlier error is the reason why others have left.
        """
        while self._transfers:
            self._transfers.pop().abandon()
        if self._call is not None:
            call, self._call = self._call, None
            earlier = call.break_off(error)
            if earlier is not None and isinstance(error, DtckptError):
                raise earlier from error

    def __del__(self) -> None:
        # Other clients wait for this client's messages, and for its part in their requests, even if this program drops
        # the result.
        if self._error is not None:
            return
        try:
            self.wait()
        except Exception as error:  # no caller is left to raise it to
            _LOG.warning("a redistribution whose result was dropped has failed: %s", error)


def _exchanges_of(plans: Sequence[RedistributionPlan], step: int) -> list[tuple[list[int], Exchange]]:
    """Return the exchanges of one step of all plans, each with the numbers of its plans.

    Exchanges of boxes among the same clients become one.
    """
    result: list[tuple[list[int], Exchange]] = []
    mergeable: dict[tuple[tuple[int, ...], str], list[int]] = {}
    for member, plan in enumerate(plans):
        exchange = plan.exchanges[step] if step < len(plan.exchanges) else None
        if isinstance(exchange, BoxExchange):
            mergeable.setdefault((exchange.clients, exchange.device_type), []).append(member)
        elif exchange is not None:
            # Native collectives come first on all clients: without tags, only their order matches them.
            result.append(([member], exchange))
    for members in mergeable.values():
        # In the order of the plans, which all clients share: the layout of the shared messages follows from it.
        exchanges = tuple(plans[member].exchanges[step] for member in members)
        result.append((members, exchanges[0] if len(exchanges) == 1 else _merge(exchanges)))
    return result


class LocalRedistribution:
    """A redistribution in which no client needs data of another; complete at once.

    Args:
        plans: One per tensor.
        tensors: The components of each.
        into: As for `Redistribution`.

    Attributes:
        components: As in `Redistribution`.
    """

    def __init__(
        self, plans: Sequence[RedistributionPlan], tensors: Sequence[Components], into: Sequence[Components] | None
    ) -> None:
        self.components = [
            _run_locally(plan, components, None if into is None else into[number])
            for number, (plan, components) in enumerate(zip(plans, tensors, strict=True))
        ]

    def wait(self) -> None:
        """Return: all is done."""


def _run_locally(plan: RedistributionPlan, source: Components, into: Components | None) -> dict[int, torch.Tensor]:
    components, buffers = dict(source), list[OutputBuffers]()
    for step, exchange in enumerate(plan.exchanges):
        buffers = buffers or plan.output_buffers(step, into)
        (components,) = exchange.start([components], outputs=[buffers.pop()] if buffers else None).finish()
    return plan.with_neutral_values(components)


class EnqueuedRedistribution:
    """A redistribution that is enqueued on CUDA streams beside the current ones, so the host need not wait.

    Args:
        plans: One per tensor; no plan sends anything through host memory.
        tensors: The components of each.
        gpus: See `_gpus`.

    Attributes:
        components: As in `Redistribution`.
    """

    def __init__(
        self, plans: Sequence[RedistributionPlan], tensors: Sequence[Components], gpus: Sequence[torch.device]
    ) -> None:
        inputs = [part for components in tensors for part in components.values()]
        self._beside = SideStreams(gpus)
        self.components: list[dict[int, torch.Tensor]] = []

        def work() -> list[torch.Tensor]:
            running = Redistribution(plans, tensors)
            running.wait()
            self.components = running.components
            return [part for components in self.components for part in components.values()]

        self._beside.run(work, inputs)

    def wait(self) -> None:
        """Have the current streams wait for the redistribution before they run later work; the host does not wait."""
        self._beside.wait()


RunningRedistribution = Redistribution | LocalRedistribution | EnqueuedRedistribution


def redistribute_into(
    plans: Sequence[RedistributionPlan], tensors: Sequence[Components], into: Sequence[Components]
) -> None:
    """Bring tensors into other layouts, in given buffers. Collective and errors: as `redistribute_components`.

    Args:
        plans: One per tensor; see `plan_redistribution`.
        tensors: The components of each by device id of its source mesh.
        into: Buffers for the new components of each by device id of its target mesh.
    """
    running = redistribute_components(plans, tensors, into=into)
    for components, buffers in zip(running.components, into, strict=True):
        for device, component in components.items():
            if component is not buffers[device]:
                buffers[device].copy_(component)


def redistribute_components(
    plans: Sequence[RedistributionPlan],
    tensors: Sequence[Components],
    *,
    is_async: bool = False,
    into: Sequence[Components] | None = None,
) -> RunningRedistribution:
    """Bring the components of tensors into other layouts.

    Collective: Over the clients of all meshes, with the same changes in the same order, unless no byte moves between
    clients for any of them.

    Args:
        plans: One per tensor; see `plan_redistribution`.
        tensors: The components of each by device id of its source mesh.
        is_async: Return while the last exchange is in progress.
        into: Buffers for the new components of each; see `redistribute_into`.

    Raises:
        DtckptError: Another client failed, or asked for something else.
        CoordinationError: A client is gone.
    """
    if _LOG.isEnabledFor(logging.DEBUG):  # before it starts, so that the log of a client that hangs names the place
        for plan in plans:
            change = plan.change
            _LOG.debug("redistribute %s of %s: %r to %r", change.shape, change.dtype, change.source, change.target)
    # Only a host that waits can notice that others ask for another change, so only such calls are counted. Under a fake
    # process group no client sends messages or waits.
    host_waits = any(not plan.is_local and plan.change.device_type == "cpu" for plan in plans) and not is_fake()
    if is_async and not host_waits and (gpus := _gpus(plans, tensors)):
        return EnqueuedRedistribution(plans, tensors, gpus)
    if all(plan.is_local for plan in plans):
        return LocalRedistribution(plans, tensors, into)
    for plan in plans:
        if not plan.is_local:
            validate_connected(plan.change.clients, "redistribution")
    call = None
    if host_waits:
        call = disagreement.RedistributionCall([plan.change for plan in plans], _plan_participation)
    running = Redistribution(plans, tensors, call, call.count if call else 0, into, granted=call.digest if call else 0)
    if not is_async:
        running.wait()
    elif host_waits:
        # This thread goes on with other work, but other clients wait for this client's messages.
        ensure_progress()
    return running


def _gpus(plans: Sequence[RedistributionPlan], tensors: Sequence[Components]) -> list[torch.device]:
    """Return this client's GPUs from or to which tensors go; other tensors of a batch may lie on the host."""
    sources = (part.device for components in tensors for part in components.values())
    messages = (plan.change.device for plan in plans)
    return [device for device in dict.fromkeys((*sources, *messages)) if device.type == "cuda"]


def _plan_participation(
    changes_for: Callable[[int], Sequence[LayoutChange]], count: int, granted: int
) -> disagreement.Participation:
    """Plan this client's participation, with zeros, in changes that others ask for; see `disagreement.Planner`."""
    own = dist.get_rank()
    changes = changes_for(own)
    # By the same plans as the clients that asked: the messages must match theirs in size and tag.
    plans = [_cached_plan(change) for change in changes]

    @cache
    def exchanges_of(client: int) -> list[tuple[Exchange, ...]]:
        return [_cached_plan(change).exchanges for change in changes_for(client)]

    # Step by step: no client completes an exchange before its peers have begun it. So after each step, the peers of the
    # clients that wait for this client also wait for it.
    waiting, clients = {own}, {client for change in changes for client in change.clients}
    for step in range(max((len(plan.exchanges) for plan in plans), default=0)):
        if waiting < clients:
            exchanges = [each[step] for client in waiting for each in exchanges_of(client) if step < len(each)]
            waiting |= {peer for each in exchanges if isinstance(each, BoxExchange) for peer in each.peers}

    def run() -> None:
        Redistribution(plans, [_zeros(change) for change in changes], count=count, granted=granted).wait()

    return disagreement.Participation(frozenset(waiting - {own}), run)


def _zeros(change: LayoutChange) -> dict[int, torch.Tensor]:
    """Return source components of zeros, by device id."""
    mesh = change.source.mesh
    regions = {device: change.source.region(device, change.shape) for device in mesh.local_device_ids()}
    return {device: torch.zeros(region.shape, dtype=change.dtype) for device, region in regions.items()}


def count_local_call(asked: Sequence[disagreement.Asked], *, is_assumed: bool = False) -> None:
    """Count a public call that sends nothing this time; see `disagreement.count_local_call`."""
    disagreement.count_local_call(asked, _plan_participation, is_assumed=is_assumed)


def report_error(error: DtckptError, meshes: Sequence[Mesh], *, is_numbered: bool = False) -> bool:
    """Report an error that keeps this client from a redistribution to the clients of its meshes.

    Blocks: See `disagreement.report_error`; also for the arguments and the result.
    """
    return disagreement.report_error(error, meshes, _plan_participation, is_numbered=is_numbered)


def cache_info() -> tuple[int, int, int, int]:
    """Return hits, misses, size and bound of the cache of plans."""
    info = _compile.cache_info()
    return info.hits, info.misses, info.currsize, info.maxsize or 0


def clear_cache() -> None:
    """Forget all plans."""
    _compile.cache_clear()
    _merge.cache_clear()
    _fingerprint.cache_clear()
