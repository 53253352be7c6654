"""`WeightReceiver`: takes versions of a feed into one rank's model, in two steps.

::

    receive   open the version | read this rank's boxes, and the tensors that go in whole | verify      beside the model
    apply     the engine loads the whole ones | copy the boxes into the live parameters                 the model

Ranks need not meet: the caller lets all of them receive before any applies, as vLLM does by two calls to all workers.

The first version goes in whole. Then each box is compared with the memory that it would have gone into. Where the bits
differ, the engine keeps elements in another form than the checkpoint, and the tensor goes on being loaded whole.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from dtckpt.checkpoint.leaves import host_array, new_memory, torch_dtype
from dtckpt.checkpoint.live.version_choice import LiveCheckpoint, open_live
from dtckpt.checkpoint.live.versions import location_of_version, title_of_version
from dtckpt.checkpoint.parts.part_files import PartFiles
from dtckpt.checkpoint.reading.checkpoint import Checkpoint
from dtckpt.coordination.api import Coordination
from dtckpt.coordination.feeds.events import APPLIED, FAILED
from dtckpt.errors import CheckpointError, capped, format_nbytes
from dtckpt.interop.vllm.destinations import DestinationPlan, Weight, plan_destinations
from dtckpt.layout.region import Region

logger = logging.getLogger("dtckpt.live")

_Key = tuple[str, Region]
Reload = Callable[[], AbstractContextManager[object]]
"""The engine's wrapper of a load of whole tensors."""


@dataclass(frozen=True, slots=True)
class ReceivedVersion:
    """The part of a version that a rank took.

    Args:
        number: Number of the version.
        step: Its step.
        nbytes_boxes: Bytes that go into live memory as they are.
        nbytes_whole: Bytes of the tensors that the engine loads.
        whole: The names of these, each with the reason.
        untouched: The parameters of the model to which no loader copies anything; a loader that needs elements before
            its first copy does not show where they go.
        nbytes_received: Bytes from all sources.
        seconds: From the lease until all bytes were verified.
    """

    number: int
    step: int
    nbytes_boxes: int
    nbytes_whole: int
    whole: Mapping[str, str]
    untouched: tuple[str, ...]
    nbytes_received: int
    seconds: float


@dataclass(slots=True)
class _Planned:
    """A plan for the tensors of a version, and whether its boxes were compared with the live memory.

    Args:
        weights: The tensors.
        recorded: The plan as the loaders showed it.
        plan: The rest of it after the comparison.
        is_compared: Whether there was a comparison.
    """

    weights: tuple[Weight, ...]
    recorded: tuple[Any, ...]
    plan: DestinationPlan
    is_compared: bool


class WeightReceiver:
    """Takes versions of a feed into a model.

    Args:
        feed: Name of the feed.
        coordination: The connection of this rank, which stays the caller's.
        prefix: Prefix that is cut off names; tensors of the version without it are not taken.
        reload: Wraps the engine's loads of whole tensors. Default: nothing.
        direct: Whether boxes go into live memory; else all is loaded whole.
        timeout_s: Longest wait for a version.
    """

    def __init__(
        self,
        feed: str,
        coordination: Coordination,
        *,
        prefix: str = "",
        reload: Reload = nullcontext,
        direct: bool = True,
        timeout_s: float = 60.0,
    ) -> None:
        self.feed = feed
        self.version: ReceivedVersion | None = None
        self.is_mixed = False
        self._coordination = coordination
        self._prefix = prefix
        self._reload = reload
        self._direct = direct
        self._timeout_s = timeout_s
        self._plans: dict[int, _Planned] = {}
        self._memory: dict[_Key, torch.Tensor] = {}
        self._received: tuple[Any, _Planned, DestinationPlan, ReceivedVersion] | None = None
        self._tell_use: Callable[[str], object] = lambda _: None

    def receive(self, model: Any, *, step: int | None = None) -> ReceivedVersion:
        """Read a version beside a model, and verify every byte. The model stays as it is.

        Args:
            model: A module with ``load_weights(iterable of names and tensors)``.
            step: The newest version of this step; default: the newest of all.

        Raises:
            CheckpointNotFoundError: There is no such version in time.
            CheckpointError: No name begins with the prefix.
            SourceLostError: The publisher's clients that have it are lost.
            CheckpointCorruptError: A byte differs from the published byte.
        """
        start, self._received = time.monotonic(), None
        location = location_of_version(self.feed, step)
        with open_live(location, coordination=self._coordination, wait_s=self._timeout_s) as checkpoint:
            assert isinstance(checkpoint, LiveCheckpoint)  # noqa: S101  it is what was opened
            planned = self._plan_for(model, self._weights(checkpoint))
            plan = planned.plan
            if not planned.is_compared:
                # Every tensor is loaded whole once, before its boxes are trusted.
                plan = DestinationPlan((), dict.fromkeys((each.name for each in planned.weights), "first version"))
                plan = plan if planned.plan.boxes else planned.plan
            self._read(checkpoint, planned, plan)
            lease, files = checkpoint.lease, checkpoint.files
            assert isinstance(files, PartFiles)  # noqa: S101  as of every live version
            version = ReceivedVersion(
                lease.number,
                lease.step,
                sum(self._box(each.name, each.view.region).nbytes for each in plan.boxes),
                sum(self._box(name).nbytes for name in plan.whole),
                plan.whole,
                planned.plan.untouched,
                files.traffic.local + files.traffic.received,
                time.monotonic() - start,
            )
        self._received, self._tell_use = (model, planned, plan, version), checkpoint.tell_use
        logger.info(
            "%s is verified: %s in %.3f s; %d tensors go in whole",
            title_of_version(self.feed, version.number, version.step),
            format_nbytes(version.nbytes_received),
            version.seconds,
            len(plan.whole),
        )
        return version

    def apply(self) -> ReceivedVersion:
        """Put the version that was received last into its model; every parameter keeps its address.

        If this fails, `is_mixed` is true until a whole version is in.

        Raises:
            CheckpointError: Nothing was received since the last call.
        """
        if self._received is None:
            raise CheckpointError(f"no version of feed {self.feed!r} was received since the last was applied")
        (model, planned, plan, version), self._received = self._received, None
        self.version, self.is_mixed = None, True
        try:
            self._put(model, planned, plan)
        except BaseException:
            self._tell_use(FAILED)
            raise
        self._tell_use(APPLIED)
        self.version, self.is_mixed = version, False
        logger.info("%s is applied", title_of_version(self.feed, version.number, version.step))
        return version

    def _put(self, model: Any, planned: _Planned, plan: DestinationPlan) -> None:
        with torch.no_grad():
            if plan.whole:
                with self._reload():
                    model.load_weights(self._whole(model, plan))
            for each in plan.boxes:
                each.memory.copy_(each.view.of(self._box(each.name, each.view.region)))
            if not planned.is_compared and planned.plan.boxes:
                self._compare(planned)

    def clear(self) -> None:
        """Free the memory beside the model, and forget the plans."""
        self._received = None
        self._memory.clear()
        self._plans.clear()

    # --- plans --------------------------------------------------------------------------------------------------------

    def _weights(self, checkpoint: Checkpoint) -> tuple[Weight, ...]:
        found = tuple(
            Weight(name.removeprefix(self._prefix), tuple(info.shape), torch_dtype(info.dtype_name))
            for name, info in checkpoint.tensors.items()
            if name.startswith(self._prefix)
        )
        if not found:
            raise CheckpointError(f"no tensor of {checkpoint.path} has a name that begins with {self._prefix!r}")
        return found

    def _plan_for(self, model: Any, weights: tuple[Weight, ...]) -> _Planned:
        """Return the plan for a model. The loaders run each time: an engine may have moved experts meanwhile."""
        every = DestinationPlan((), dict.fromkeys((each.name for each in weights), "as it was asked"))
        plan = plan_destinations(model, weights) if self._direct else every
        planned = self._plans.get(id(model))
        if planned is None or (planned.weights, planned.recorded) != (weights, plan.identity):
            if plan.untouched:
                logger.warning(
                    "versions of feed %r have nothing for parameters %s", self.feed, capped(map(repr, plan.untouched))
                )
            planned = _Planned(weights, plan.identity, plan, is_compared=not plan.boxes)
            self._plans[id(model)] = planned
        return planned

    def _compare(self, planned: _Planned) -> None:
        """Let tensors whose boxes differ from the memory in which the engine has them be loaded whole from now on."""
        others = []
        for each in planned.plan.boxes:
            region = each.view.region
            whole = self._box(each.name)
            box = whole[region.slices()]
            if not _has_bits(each.memory, each.view.of(box)):
                others.append(each.name)
        planned.plan = planned.plan.without(others, "the engine keeps its elements in another form")
        planned.is_compared = True
        self._memory.clear()

    # --- memory -------------------------------------------------------------------------------------------------------

    def _read(self, checkpoint: Checkpoint, planned: _Planned, plan: DestinationPlan) -> None:
        weights = {each.name: each for each in planned.weights}
        wanted = [(each.name, each.view.region) for each in plan.boxes]
        wanted += [(name, Region.full(weights[name].shape)) for name in plan.whole]
        self._memory = {key: memory for key, memory in self._memory.items() if key in set(wanted)}
        checkpoint.validate_stored([(self._prefix + name, region) for name, region in wanted])
        requests: dict[str, dict[Region, Any]] = {}
        for name, region in wanted:
            if (name, region) not in self._memory:
                self._memory[name, region] = new_memory(name, region.shape, weights[name].dtype)
            requests.setdefault(self._prefix + name, {})[region] = host_array(self._memory[name, region])
        checkpoint.read_all((name, list(buffers.items())) for name, buffers in requests.items())

    def _box(self, name: str, region: Region | None = None) -> torch.Tensor:
        if region is not None:
            return self._memory[name, region]
        return next(memory for (each, _), memory in self._memory.items() if each == name)

    def _whole(self, model: Any, plan: DestinationPlan) -> Iterator[tuple[str, torch.Tensor]]:
        device = next((each.device for each in model.parameters()), torch.device("cpu"))
        for name in plan.whole:
            yield name, self._box(name).to(device)


def _has_bits(memory: torch.Tensor, expected: torch.Tensor) -> bool:
    one, other = memory.cpu().contiguous(), expected.contiguous()
    return torch.equal(one.view(-1).view(torch.uint8), other.view(-1).view(torch.uint8))
