"""`TargetState`: a restore's target as a value; one visit makes it, and asks each object for its state once.

The rest of a restore works on this value: `dtckpt.checkpoint.restoring.match` compares it with the checkpoint, and
`dtckpt.checkpoint.restoring.fill` writes into its tensors. A ``state_dict()`` may be slow, or collective as in FSDP1.

A `Scope` says how a part of the target may differ from the checkpoint. The state of a module has the same tensors
before and after the restore. Any other object takes the saved state, whatever it holds at the moment: an optimizer
before its first step, a data loader that has seen more or fewer samples.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from dtckpt.checkpoint.leaves import FixedState, OpenState, is_stateful, is_tensor, mesh_of
from dtckpt.checkpoint.low_bit_state import close_state, open_state
from dtckpt.checkpoint.parameter_names import ParameterNames, parameters_of, storage_of
from dtckpt.checkpoint.per_client import PerClient
from dtckpt.checkpoint.shards import ShardMark, Shards, marks_in_state, named_tensors, shard_marks
from dtckpt.comm.torch_private import is_fake
from dtckpt.errors import TreeError
from dtckpt.format import tree as trees
from dtckpt.format.containers import TensorParts, fields_of, name_of
from dtckpt.format.names import name_of_key
from dtckpt.format.plain_values import is_plain
from dtckpt.layout.mesh import Mesh

Path = tuple[str, ...]
"""The keys that lead to a place of a tree."""


@dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """One place of a target. This class itself holds a plain value, or a value that no restore can fill.

    Args:
        value: The value at the place.
        path: The keys that lead to the place.
    """

    value: Any
    path: Path

    @property
    def below(self) -> Iterable[Slot]:
        """The places directly below."""
        return ()

    def walk(self, *, enters_optimizers: bool = True) -> Iterator[Slot]:
        """Yield this place and all places below it, in the order of the tree."""
        yield self
        if enters_optimizers or not isinstance(self.value, Optimizer):
            for slot in self.below:
                yield from slot.walk(enters_optimizers=enters_optimizers)

    @property
    def has_meta(self) -> bool:
        """Whether a tensor here or below, or a parameter of an optimizer there, is on the meta device."""
        return any(is_meta(tensor) for slot in self.walk() for tensor in (slot.value, *parameters_of(slot.value)))


@dataclass(frozen=True, slots=True, eq=False)
class TensorSlot(Slot):
    """The place of a tensor of any kind, or of an array of numpy."""


@dataclass(frozen=True, slots=True, eq=False)
class ContainerSlot(Slot):
    """The place of a container.

    Args:
        items: The items, by key or by position.
        slots: The places of the items.
    """

    items: Mapping[Any, Any] | Sequence[Any]
    slots: Mapping[Any, Slot]

    @property
    def below(self) -> Iterable[Slot]:
        """The places of the items."""
        return self.slots.values()

    def by_position(self) -> ContainerSlot:
        """Return the place of a named tuple with its items by position instead of by field."""
        return ContainerSlot(self.value, self.path, self.value, dict(enumerate(self.slots.values())))


@dataclass(frozen=True, slots=True, eq=False)
class PerClientSlot(Slot):
    """The place of a `dtckpt.PerClient`.

    Args:
        inner: The place of its value.
    """

    inner: Slot

    @property
    def below(self) -> Iterable[Slot]:
        """The place of the value."""
        return (self.inner,)


@dataclass(frozen=True, slots=True, eq=False)
class ObjectSlot(Slot):
    """The place of an object that returns and loads its state.

    Args:
        state: The place of its state.
        opened: By id, the tensors in the state of an optimizer that `open_state` replaced by their parts.
    """

    state: Slot
    opened: Mapping[int, tuple[TensorParts, Any]]

    @property
    def scope(self) -> Scope:
        """How the state may differ from the checkpoint."""
        return scope_of_object(self.value, self.state.value)

    @property
    def below(self) -> Iterable[Slot]:
        """The place of the state."""
        return (self.state,)

    def load(self, state: Any) -> None:
        """Let the object load its state with new values."""
        self.value.load_state_dict(close_state(state, self.opened))


@dataclass(frozen=True, eq=False)
class TargetState:
    """A restore's target, as one visit found it.

    Args:
        root: The place of the whole tree.
        marks: The marks of tensors in the states of objects, by their ids; see `dtckpt.checkpoint.shards`.
        shard_marks: The marks of parameters, by their ids.
    """

    root: Slot
    marks: Mapping[int, ShardMark]
    shard_marks: Mapping[int, ShardMark]

    def mark_of(self, tensor: Any) -> ShardMark | None:
        """Return the mark of a tensor in the state of an object; None if it is not marked."""
        return self.marks.get(id(tensor))

    @cached_property
    def tensors(self) -> Sequence[tuple[str, torch.Tensor]]:
        """The tensors, each with its last key, and the parameters of optimizers; of parts, the global tensors."""
        found: list[tuple[str, torch.Tensor]] = []
        for slot in self.root.walk():
            key, value = slot.path[-1] if slot.path else "", slot.value
            if isinstance(value, Shards):
                found.append((key, value.whole(key)))
            elif is_tensor(value):
                found.append((key, _whole(value, self.mark_of(value), key)))
            else:
                parameters = parameters_of(value)
                found.extend(("", _whole(each, self.shard_marks.get(id(each)), key)) for each in parameters)
        return found

    @cached_property
    def meshes(self) -> frozenset[Mesh]:
        """The meshes that the tensors lie on; of slices, the whole meshes."""
        # One tensor on each mesh, as a mesh of PyTorch takes long to be converted.
        tensors = {id(getattr(tensor, "device_mesh", None)): tensor for _, tensor in self.tensors}
        # A tensor on a slice is on another slice elsewhere; so all clients with such a tensor name the same meshes.
        found = (mesh_of(tensor) for tensor in tensors.values())
        return frozenset(mesh.root_offsets[0] for mesh in found if mesh is not None)

    @cached_property
    def parameter_names(self) -> ParameterNames:
        """The names of the tree's tensors, as a save of the tree would store them."""
        names = ParameterNames()
        for slot in self.root.walk(enters_optimizers=False):
            if is_tensor(slot.value):
                names.add_tensors({"/".join(map(name_of_key, slot.path)): slot.value})
            elif isinstance(slot.value, nn.Module):
                names.add_module(slot.value, "/".join(map(name_of_key, slot.path)))
        return names


def _whole(tensor: torch.Tensor, mark: ShardMark | None, name: str) -> torch.Tensor:
    return tensor if mark is None else mark.whole(tensor, name)


def visit_target(target: Any, root: Path = ()) -> TargetState:
    """Visit a target: look at every place of it, and ask each of its objects for its state once.

    Args:
        target: The tree.
        root: The keys that lead to it in a larger tree.

    Raises:
        TreeError: The tree is too deep.
    """
    visitor = _Visitor()
    slot = visitor.visit(target, root, 0)
    if visitor.has_asked:
        # A `state_dict` may have changed containers that the visitor had passed.
        slot = visitor.visit(target, root, 0)
    return TargetState(slot, visitor.marks, visitor.shard_marks)


class _Visitor:
    """Makes the slots of one target."""

    def __init__(self) -> None:
        self.shard_marks = shard_marks()
        self.marks: dict[int, ShardMark] = {}
        # By id, with the object itself, so that no other one gets its id: a tree may hold an object twice.
        self._states: dict[int, tuple[Any, Any, Mapping[int, tuple[TensorParts, Any]]]] = {}

    @property
    def has_asked(self) -> bool:
        """Whether the visitor has asked an object for its state."""
        return bool(self._states)

    def visit(self, value: Any, path: Path, depth: int) -> Slot:
        """Return the slot of a value."""
        if depth > trees.MAX_DEPTH:
            raise TreeError(f"the target is deeper than {trees.MAX_DEPTH} levels; does it contain itself?")
        if is_tensor(value) or type(value) is np.ndarray:
            return TensorSlot(value, path)
        if is_plain(value):
            return Slot(value, path)
        if isinstance(value, PerClient):
            return PerClientSlot(value, path, self.visit(value.value, path, depth + 1))
        if is_stateful_target(value):
            state, opened = self._state_of(value)
            return ObjectSlot(value, path, self.visit(state, path, depth + 1), opened)
        items = items_of_target(value)
        if items is None:
            return Slot(value, path)
        pairs = items.items() if isinstance(items, Mapping) else enumerate(items)
        slots = {key: self.visit(child, (*path, str(key)), depth + 1) for key, child in pairs}
        return ContainerSlot(value, path, items, slots)

    def _state_of(self, value: Any) -> tuple[Any, Mapping[int, tuple[TensorParts, Any]]]:
        """Return the state of an object, and the tensors in it that were taken apart."""
        if id(value) not in self._states:
            # A module on the meta device returns its own tensors then, not detached ones: they are to get memory.
            keep_vars = isinstance(value, nn.Module) and any(is_meta(tensor) for _, tensor in named_tensors(value))
            state = value.state_dict(keep_vars=True) if keep_vars else value.state_dict()
            opened: Mapping[int, tuple[TensorParts, Any]] = {}
            if isinstance(value, Optimizer):
                state, opened = open_state(state)
            self.marks |= marks_in_state(value, state, self.shard_marks)
            self._states[id(value)] = value, state, opened
        return self._states[id(value)][1:]


def is_meta(tensor: object) -> bool:
    """Whether a tensor is on the meta device by its own choice."""
    return isinstance(tensor, torch.Tensor) and tensor.is_meta and not is_lazy(tensor) and not is_fake(tensor)


def is_stateful_target(target: Any) -> bool:
    """Whether a target is an object that returns and loads its state, and neither a container nor a plain value."""
    return type(target) not in (dict, list, tuple) and not is_plain(target) and is_stateful(target)


def items_of_target(target: Any) -> Mapping[Any, Any] | Sequence[Any] | None:
    """Return the items of a target that is a container, by key or by position; None for all else.

    A container of a class that is not Python's must be mutable: it is changed in place, which keeps its class.
    """
    if name_of(target) in ("namedtuple", "dataclass", "SimpleNamespace"):
        return fields_of(target)
    if name_of(target) == "TensorParts":
        return TensorParts.of(target)
    if type(target) in (tuple, MappingProxyType) or isinstance(target, MutableMapping | list | deque):
        return target  # type: ignore[no-any-return]
    return None


@dataclass(frozen=True, slots=True)
class Scope:
    """A part of a target, and how it may differ from the checkpoint. By default it may not.

    Args:
        adds: Saved items that the target lacks are taken.
        drops: Items of the target that were not saved go, and items of another kind, length or shape are replaced.
        is_optimizer: The part is the state of an optimizer's parameters.
        parameter: The parameter whose state it is, if known.
        optimizer: The class of the optimizer whose state it is, if known.
        is_numbered: Its keys number the parameters of a single group, most likely in the order of the model's tensors.
        fixed: The storages of modules that the object holds; their tensors neither come, go nor change their shape.
        by_key: The scopes of items, where they differ from `inner`.
        keeps: Keys of items that keep the target's value if the checkpoint lacks them.
        fills: Whether an empty container takes the saved items.
    """

    adds: bool = False
    drops: bool = False
    is_optimizer: bool = False
    parameter: torch.Tensor | None = None
    fixed: frozenset[int] = frozenset()
    is_numbered: bool = False
    by_key: Mapping[Any, Scope] = field(default_factory=dict)
    keeps: frozenset[Any] = frozenset()
    fills: bool = True
    optimizer: type | None = None

    def below(self, key: Any) -> Scope:
        """Return the scope of an item."""
        if key in self.by_key:
            return self.by_key[key]
        # The first level of an object's state has the names of its parts; below, anything may come and go.
        return Scope(
            self.adds,
            self.adds,
            self.is_optimizer,
            self.parameter,
            self.fixed,
            self.is_numbered,
            optimizer=self.optimizer,
        )

    def closed(self) -> Scope:
        """Return the scope of a container that cannot grow or shrink."""
        return replace(self, adds=False, drops=False)

    def of_items(self, items: Iterable[Any]) -> Scope:
        """Return the scope of a container; it cannot grow or shrink if it has a tensor of a module."""
        has_module = self.adds and not self.is_optimizer and any(map(self.is_fixed, items))
        return Scope(by_key=self.by_key) if has_module else self

    def is_fixed(self, value: Any) -> bool:
        """Whether a value is a tensor that cannot change its shape: a module's or an optimizer's, or a DTensor."""
        if not isinstance(value, torch.Tensor):
            return False
        return self.is_optimizer or mesh_of(value) is not None or storage_of(value) in self.fixed


CLOSED = Scope()
"""The scope of a target tree: the checkpoint must have every name that it asks for, and no others."""
_OPEN = Scope(adds=True, drops=True)


def scope_of_object(target: Any, state: Any) -> Scope:
    """Return the scope of an object's state.

    Args:
        target: The object.
        state: The value that its ``state_dict()`` returned.
    """
    if isinstance(target, nn.Module | FixedState):
        # The extra state of a module may be anything.
        extra = [key for key in state if str(key).rpartition(".")[2] == "_extra_state"]
        return Scope(by_key=dict.fromkeys(extra, _OPEN), fills=False)
    if isinstance(target, OpenState):
        return _OPEN
    if isinstance(target, Optimizer) and isinstance(state, Mapping) and "param_groups" in state:
        return _scope_of_optimizer(target, state)
    tensors = chain.from_iterable(map(_tensors, _modules_in(target)))
    return Scope(adds=True, fixed=frozenset(map(storage_of, tensors)) - {0})


_OF_RANK = re.compile(r"(.*rank[^0-9a-zA-Z]?)\d+")
"""Keys by the number of a rank, as ``dp_rank_3`` of torchtitan's loaders."""


def keys_of_other_ranks(own: Iterable[Any], saved: Iterable[Any]) -> set[Any]:
    """Return the saved keys that other ranks have in the place of a key of an object's own state."""

    def start(key: Any) -> str | None:
        match = _OF_RANK.fullmatch(key) if isinstance(key, str) else None
        return match and match[1]

    own = set(own)
    starts = {start(key) for key in own} - {None}
    return {key for key in saved if key not in own and start(key) in starts}


def keep_defaults(scope: Scope, state: frozenset[Any], options: Sequence[frozenset[str]]) -> Scope:
    """Return the scope of an optimizer's state in which some parts keep the target's value if they were not saved.

    Args:
        scope: The scope without them.
        state: Keys of parameters whose state stays.
        options: For each group, the options that stay.
    """
    groups = scope.by_key.get("param_groups", scope.below("param_groups"))
    by_number = {number: replace(groups.below(number), keeps=kept) for number, kept in enumerate(options) if kept}
    by_key = {
        **scope.by_key,
        "state": replace(scope.below("state"), keeps=state),
        "param_groups": replace(groups, by_key={**groups.by_key, **by_number}),
    }
    return replace(scope, by_key=by_key)


def is_optimizer_state(items: Mapping[Any, Any]) -> bool:
    """Whether a dict has the form of a value from ``Optimizer.state_dict()``."""
    return "state" in items and "param_groups" in items


def scope_of_dict(items: Mapping[Any, Any], scope: Scope) -> Scope:
    """Return the scope of a dict of a target, in which an optimizer's state is recognized by its form."""
    scope = scope.of_items(items.values())
    if is_optimizer_state(items) and not scope.by_key:
        state = replace(scope.below("state"), is_optimizer=True, is_numbered=len(items["param_groups"]) == 1)
        # All alike; but with their keys, which a new name does not tell: 0 or "0".
        state = replace(state, by_key=dict.fromkeys(_keys_of_parameters(items), state))
        return Scope(scope.adds, scope.drops, fixed=scope.fixed, by_key={"state": state})
    return scope


def _scope_of_optimizer(optimizer: Optimizer, state: Mapping[Any, Any]) -> Scope:
    by_key = {
        key: Scope(adds=True, drops=True, is_optimizer=True, parameter=parameter, optimizer=type(optimizer))
        for key, parameter in zip(_keys_of_parameters(state), parameters_of(optimizer), strict=False)
    }
    # The optimizer itself decides the number of groups and of their parameters; a group may get more options.
    group = Scope(adds=True, by_key={"params": CLOSED})
    groups = Scope(by_key=dict.fromkeys(range(len(state["param_groups"])), group))
    return Scope(
        adds=True,
        by_key={"state": Scope(adds=True, drops=True, is_optimizer=True, by_key=by_key), "param_groups": groups},
    )


def _keys_of_parameters(state: Mapping[Any, Any]) -> list[Any]:
    """Return the keys of an optimizer's parameters in its state: numbers, or the names that some classes use."""
    groups = state["param_groups"]
    if not isinstance(groups, list | tuple):
        return []
    return [key for group in groups if isinstance(group, Mapping) for key in group.get("params", ())]


def _modules_in(target: Any) -> Iterable[nn.Module]:
    """Yield the modules in the attributes of an object, also in lists and dicts there."""
    for value in getattr(target, "__dict__", {}).values():
        inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else [value]
        yield from (each for each in inner if isinstance(each, nn.Module))


def _tensors(module: nn.Module) -> Iterable[torch.Tensor]:
    return chain(module.parameters(), module.buffers())
