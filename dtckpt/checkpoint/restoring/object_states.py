"""The states of objects in a restore's target: which of their parts may differ from what the object has now.

A module's state is as large as the module. Any other object gets what was saved, whatever it holds at the moment: an
optimizer that has not made a step yet, a loader that has seen more or fewer samples.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from dtckpt.checkpoint.leaves import mesh_of
from dtckpt.checkpoint.parameter_names import parameters_of, storage_of


class FixedState:
    """Base of objects whose state, as that of a module, has what the object has and nothing else."""


class OpenState:
    """Base of objects whose state has some parts at some times only, and that load it without those, too."""


@dataclass(frozen=True, slots=True)
class Scope:
    """A part of a target, and what may differ there from the checkpoint. By default nothing may.

    Args:
        adds: Saved items that the target lacks are taken.
        drops: Items of the target that were not saved go, and what has another kind, length or shape is replaced.
        is_optimizer: It is the state of an optimizer's parameters.
        parameter: The parameter whose state it is, if known.
        optimizer: The class of the optimizer whose state it is, if known.
        is_numbered: Its keys number the parameters of a single group, most likely in the order of the model's tensors.
        fixed: The storages of modules that the object holds; their tensors neither come, go nor change their shape.
        by_key: The scopes of items, where they differ from `inner`.
        keeps: Keys of items that stay as they are where they were not saved.
        fills: Whether a container that is still empty is filled with what was saved.
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
        """Return the scope of a container: one that has a tensor of a module has all of them."""
        has_module = self.adds and not self.is_optimizer and any(map(self.is_fixed, items))
        return Scope(by_key=self.by_key) if has_module else self

    def is_fixed(self, value: Any) -> bool:
        """Whether a value is a tensor that cannot change its shape: a module's or an optimizer's, or a DTensor."""
        if not isinstance(value, torch.Tensor):
            return False
        return self.is_optimizer or mesh_of(value) is not None or storage_of(value) in self.fixed


CLOSED = Scope()
"""The scope of a target tree: what it asks for must be in the checkpoint, and nothing else may be."""
_OPEN = Scope(adds=True, drops=True)


def scope_of_object(target: Any, state: Any) -> Scope:
    """Return the scope of an object's state.

    Args:
        target: The object.
        state: What its ``state_dict()`` returned.
    """
    if isinstance(target, nn.Module | FixedState):
        # What a module adds to its state may be anything.
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
    """Return the scope of an optimizer's state in which some parts stay as they are.

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
    """Whether a dict is what ``Optimizer.state_dict()`` returns."""
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
    # The number of groups and of their parameters is the optimizer's own; what else is in them may grow.
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
