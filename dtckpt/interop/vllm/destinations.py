"""`plan_destinations`: where each tensor of a version goes in an engine's model, learnt from the engine's own loaders.

The loaders know how a model fuses and cuts weights: q, k and v into one, gate and up into one, each rank its rows. They
run once per name on tensors without elements. The copies that they would make become the plan: boxes of the version,
each with the live memory that takes it. So a rank reads its boxes only. Names whose loaders do anything else are read
whole, and loaded as the engine loads checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from dtckpt.interop.vllm.recorded_tensor import BoxView, NotRecordedError, RecordedTensor, Recording, box_of_view

UNQUANTIZED = "Unquantized"
"""Begins the names of vLLM's methods whose layers keep a checkpoint's elements."""
PROCESS = "process_weights_after_loading"


@dataclass(frozen=True, slots=True)
class Weight:
    """A tensor of a version.

    Args:
        name: Its name for the loaders.
        shape: Its shape.
        dtype: Its dtype.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, eq=False)
class Destination:
    """A box of a tensor of the version, and the live memory that takes it.

    Args:
        name: Of the tensor.
        view: The box, and the order of its dims in the memory.
        memory: A view of a live parameter.
        module: Name of the module whose parameter it is.
    """

    name: str
    view: BoxView
    memory: torch.Tensor
    module: str


@dataclass(frozen=True, slots=True, eq=False)
class DestinationPlan:
    """Where the tensors of a version go.

    Args:
        boxes: The boxes that go into live memory.
        whole: The names that are read whole and loaded by the engine, each with the reason.
        untouched: The parameters of the model to which no loader copies anything.
    """

    boxes: tuple[Destination, ...]
    whole: Mapping[str, str]
    untouched: tuple[str, ...] = ()

    @property
    def identity(self) -> tuple[Any, ...]:
        """A value that is equal for plans that take the same boxes into the same memory."""
        return tuple(
            (each.name, each.view, each.memory.data_ptr(), each.memory.stride(), each.memory.dtype)
            for each in self.boxes
        )

    def without(self, names: Iterable[str], reason: str) -> DestinationPlan:
        """Return the plan that reads some tensors whole, and with them all others of the same modules."""
        names = set(names)
        while more := self._beside(names) - names:
            names |= more
        boxes = tuple(each for each in self.boxes if each.name not in names)
        return replace(self, boxes=boxes, whole={**self.whole, **dict.fromkeys(sorted(names - {*self.whole}), reason)})

    def _beside(self, names: set[str]) -> set[str]:
        """Return the names of tensors that go into the modules of others, too."""
        modules = {each.module for each in self.boxes if each.name in names}
        return {each.name for each in self.boxes if each.module in modules}


@dataclass(slots=True)
class _Live:
    """The live parameters and buffers of a model, by the address of their storage.

    Args:
        owners: Name of the module of each; "" also stands for several modules.
        reasons: Why a module's parameters must be loaded by the engine; "": they need not.
    """

    owners: dict[int, str] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, model: nn.Module) -> _Live:
        live = cls()
        processed = {id(below) for module in model.modules() if hasattr(module, PROCESS) for below in module.modules()}
        for name, module in model.named_modules():
            method = getattr(module, "quant_method", None)
            if id(module) in processed:
                live.reasons[name] = f"the engine makes other tensors of it, by {PROCESS}"
            elif method is not None and not type(method).__name__.startswith(UNQUANTIZED):
                live.reasons[name] = f"its layer is quantized, by {type(method).__name__}"
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                if tensor is not None and tensor.numel():
                    live.owners.setdefault(_address(tensor), name)
        return live


def plan_destinations(model: Any, weights: Iterable[Weight]) -> DestinationPlan:
    """Return where the tensors of a version go in a model.

    Args:
        model: A module with ``load_weights(iterable of names and tensors)``. It stays as it is.
        weights: The tensors.
    """
    live, boxes, whole = _Live.of(model), list[Destination](), dict[str, str]()
    touched: dict[str, set[str]] = {}
    left = {_address(tensor): name for name, tensor in model.named_parameters() if tensor.numel()}
    for weight, recording in _record(model, list(weights)):
        for copy in recording.copies:
            left.pop(_address(copy.target), None)
        try:
            boxes += list(_destinations(weight, recording, live))
        except NotRecordedError as error:
            whole[weight.name] = error.message
            touched[weight.name] = {live.owners.get(_address(copy.target), "") for copy in recording.copies}
    plan = DestinationPlan(tuple(boxes), {}, tuple(left.values()))
    for name, reason in whole.items():
        plan = plan.without([name, *_of_one_module(name, touched[name], boxes)], reason)
    return plan


def _record(model: Any, weights: list[Weight]) -> Iterator[tuple[Weight, Recording]]:
    """Yield the recorded copies of each tensor, from one run of the loaders, or if it fails from a run per tensor."""
    every = [RecordedTensor.of(weight.shape, weight.dtype) for weight in weights]
    if not _run(model, [(weight.name, each) for weight, each in zip(weights, every, strict=True)]):
        yield from ((weight, each.recording) for weight, each in zip(weights, every, strict=True))
        return
    for weight in weights:
        recorded = RecordedTensor.of(weight.shape, weight.dtype)
        if reason := _run(model, [(weight.name, recorded)]):
            recorded.recording.reason = recorded.recording.reason or reason
        yield weight, recorded.recording


def _run(model: Any, recorded: list[tuple[str, RecordedTensor]]) -> str:
    """Run the loaders; return why they failed, empty if they did not."""
    try:
        with torch.no_grad():
            model.load_weights(recorded)
    except Exception as error:  # a loader may raise anything when it finds no elements
        return str(error) or type(error).__name__
    return ""


def _of_one_module(name: str, modules: set[str], boxes: Iterable[Destination]) -> Iterator[str]:
    """Yield the names of tensors that go into the module of a tensor that is read whole.

    If its loader made no copy, any module beside the named module counts: q.scale may belong to a fused qkv.
    """
    above = name.split(".")[:-1]
    beside = ".".join(above[:-1] or above) + "."
    for each in boxes:
        if each.module in modules or (not modules and above and each.name.startswith(beside)):
            yield each.name


def _destinations(weight: Weight, recording: Recording, live: _Live) -> Iterator[Destination]:
    """Yield the destinations of a tensor. Raises: NotRecordedError: One of the copies is not of a box as it is."""
    if recording.reason:
        raise NotRecordedError(recording.reason)
    if not recording.copies:
        raise NotRecordedError("no loader copies it")
    found = []
    for copy in recording.copies:
        memory, view = copy.target.detach(), box_of_view(copy.source, weight.shape)
        module = live.owners.get(_address(memory))
        if view is None:
            raise NotRecordedError("a loader takes elements of it that are no box")
        if memory.dtype != weight.dtype:
            raise NotRecordedError(f"it is cast, from {weight.dtype} to {memory.dtype}")
        if tuple(memory.shape) != view.shape:
            raise NotRecordedError("a loader repeats its elements")
        if module is None:
            raise NotRecordedError("it goes into memory that is no parameter of the model")
        if reason := live.reasons.get(module):
            raise NotRecordedError(reason)
        found.append(Destination(weight.name, view, memory, module))
    yield from found


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
