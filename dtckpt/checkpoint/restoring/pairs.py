"""`Pair`: a place of a target with the saved part that fills it; and `Scope`: how the two may differ.

The state of a module has the same tensors before and after the restore. Any other object takes the saved state, with
any state before: an optimizer before its first step, a data loader that has seen more or fewer samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Generic, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from dtckpt.checkpoint.leaves import FixedState, OpenState, mesh_of
from dtckpt.checkpoint.parameter_names import parameters_of, storage_of
from dtckpt.checkpoint.restoring.optimizer_match import Rule
from dtckpt.checkpoint.restoring.target import ContainerSlot, ObjectSlot, Path, Slot
from dtckpt.format import tree as trees


@dataclass(frozen=True, slots=True)
class Scope:
    """A part of a target, and its allowed differences from the checkpoint; by default none.

    Args:
        adds: Take saved items that the target lacks.
        drops: Drop items of the target that were not saved, and replace items of another kind, length or shape.
        is_optimizer: The part is the state of an optimizer's parameters.
        parameter: The parameter whose state it is, if known.
        optimizer: The class of the optimizer whose state it is, if known.
        is_numbered: Its keys number the parameters of a single group, most likely in the order of the model's tensors.
        fixed: The storages of modules that the object holds; their tensors must all stay, with their shapes.
        by_key: The scopes of items that differ from `inner`.
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
        return self.by_key.get(key) or self.inner

    @property
    def inner(self) -> Scope:
        """The scope of the items that are not in `by_key`."""
        # The first level of an object's state has the names of its parts; below it, items may come and go.
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
"""The scope of a target tree: the checkpoint must have exactly the names that the tree asks for."""
_OPEN = Scope(adds=True, drops=True)


@dataclass(frozen=True, slots=True, eq=False)
class Saved:
    """A part of a checkpoint.

    Args:
        node: The node in the saved structure.
        path: The keys that lead to it in the checkpoint.
    """

    node: trees.Node
    path: Path

    @property
    def where(self) -> str:
        """The path, as one text."""
        return "/".join(self.path)

    @property
    def type_name(self) -> str | None:
        """The name of a container in `CONTAINERS`; None for other nodes."""
        return self.node["type"][0] if "type" in self.node else None

    @property
    def saved_items(self) -> tuple[str, list[tuple[Any, trees.Node]]] | None:
        """The kind and the items of a container; None for other nodes."""
        return trees.items_of(self.node)

    @property
    def tensor_name(self) -> str | None:
        """The name of a tensor or an array; None for other nodes."""
        return trees.name_of_tensor(self.node)

    @property
    def tensor_names(self) -> list[str]:
        """The names of the tensors and arrays at and below the node."""
        return trees.tensor_names(self.node)

    @property
    def names(self) -> list[str]:
        """The names of the tensors, and the paths of the plain values, at and below the node."""
        below = (path for path, _ in trees.value_nodes(self.node))
        return [*self.tensor_names, *("/".join((*self.path, path) if path else self.path) for path in below)]


S = TypeVar("S", bound=Slot | None)


@dataclass(frozen=True, slots=True, eq=False)
class Pair(Saved, Generic[S]):
    """A place of a target, and the part of a checkpoint that fills it.

    Args:
        slot: The place; None if the target lacks the place, or if the saved part replaces it as a whole.
        scope: How the place may differ from the saved part.
    """

    slot: S
    scope: Scope

    @property
    def is_optimizer_state(self: Pair[ContainerSlot]) -> bool:
        """Whether the place is a dict as ``Optimizer.state_dict()`` returns it, and not a part of an object's state."""
        items = self.slot.items
        return isinstance(items, Mapping) and is_optimizer_state(items) and not self.scope.by_key

    @property
    def scope_of_state(self: Pair[ObjectSlot]) -> Scope:
        """The allowed differences of an object's state."""
        return scope_of_object(self.slot.value, self.slot.state.value)

    @property
    def scope_of_items(self: Pair[ContainerSlot]) -> Scope:
        """How the items of a container may come, go and differ."""
        items = self.slot.items
        if not isinstance(items, Mapping):
            return self.scope.of_items(items)
        return scope_of_dict(items, self.scope if isinstance(self.slot.value, MutableMapping) else self.scope.closed())


@dataclass(slots=True)
class Notes:
    """The names that a match of a target with a checkpoint has met.

    Args:
        used: Names of tensors, and paths of plain values, that the target takes from the checkpoint, or replaces by its
            order of parameters.
        renamed: By name in the checkpoint, the name in the target, for tensors whose names differ.
        missing: Paths of the target, but for plain values, that the checkpoint lacks.
        defaulted: Paths of plain values of the target that the checkpoint lacks.
        owners: By path, the rule that found a part of an optimizer's state.
    """

    used: set[str] = field(default_factory=set)
    renamed: dict[str, str] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    defaulted: list[str] = field(default_factory=list)
    owners: dict[str, Rule] = field(default_factory=dict)

    def add(self, more: Notes) -> None:
        """Add the names of another part of the match."""
        self.used |= more.used
        self.renamed |= more.renamed
        self.missing += more.missing
        self.defaulted += more.defaulted
        self.owners |= more.owners


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
        # Equal scopes, but with keys: a new name does not show whether a key is 0 or "0".
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
