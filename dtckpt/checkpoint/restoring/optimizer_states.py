"""`OptimizerStates`: finds the saved state of a target's optimizers, by the names of their parameters."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.optim import LBFGS, Optimizer

from dtckpt.checkpoint.optimizer_groups import is_numbered
from dtckpt.checkpoint.parameter_names import parameters_of
from dtckpt.checkpoint.restoring.optimizer_match import (
    Match,
    OptimizerParameter,
    SavedOptimizer,
    SavedOptimizers,
    match_optimizer,
    parameters_of_groups,
)
from dtckpt.checkpoint.restoring.optimizer_nodes import EMPTY, Regrouping, RewrittenState, rewrite_state
from dtckpt.checkpoint.restoring.pairs import Notes, Pair, S, Saved, keep_defaults
from dtckpt.checkpoint.restoring.target import ContainerSlot, ObjectSlot, Slot, TargetState
from dtckpt.errors import ShapeMismatchError, TreeError
from dtckpt.format.names import name_of_key
from dtckpt.format.tree import Node, items_of, name_of_tensor


class OptimizerStates:
    """Finds the saved state of the optimizers of one target.

    Args:
        target: The target.
        new_names: New name by name in the checkpoint, of the tensors that are renamed.
        shape_of: Returns the shape of a tensor of the checkpoint, by its name there.
        notes: Gets the names that the states have.
    """

    def __init__(
        self,
        target: TargetState,
        new_names: Mapping[str, str],
        shape_of: Callable[[str], tuple[int, ...]],
        notes: Notes,
    ) -> None:
        self._target = target
        self._shape_of = shape_of
        self._new_names = new_names
        self._notes = notes
        # By id of an optimizer.
        self._pools: dict[int, SavedOptimizers] = {}
        self._groups: dict[int, Regrouping] = {}
        # By id of a scheduler: the saved schedulers of its container, by key.
        self._schedulers: dict[int, dict[str, Saved]] = {}
        # By prefix of names in the target: the prefix of these names in the checkpoint.
        self._clients: dict[str, str] = {}

    def note_client(self, path: Sequence[str], number: int) -> None:
        """Note which client saved the value at a path of a `PerClient`."""
        prefix = "".join(f"{name_of_key(key)}/" for key in path)
        self._clients[prefix] = f"{prefix}{number}/"

    def of_container(self, pair: Pair[ContainerSlot]) -> Pair[ContainerSlot]:
        """Return the pair of a container with the scope of its items, and with the node in which to look for them.

        Optimizers in one container share the saved optimizers, and each has a place in the node. A container may hold
        an optimizer for each parameter, or for each part of a model. A parameter may have moved from one optimizer to
        another since the save. Schedulers share the saved schedulers in the same way. The node of a dict as
        ``Optimizer.state_dict()`` returns it has the saved state in the dict's terms.

        Raises:
            ShapeMismatchError: The saved optimizer has other parameters, without names.
        """
        is_state, items = pair.is_optimizer_state, pair.slot.items
        pair = replace(pair, node=self._pooled(pair), scope=pair.scope_of_items)
        groups = items["param_groups"] if is_state and isinstance(items, Mapping) else None
        if not isinstance(groups, list | tuple) or not all(_is_group(group) for group in groups):
            return pair
        saved = self._saved_at(pair)
        if saved is None:
            return pair
        wanted = parameters_of_groups(groups)
        match = match_optimizer(wanted, len(groups), saved)
        return self._rewritten(pair, rewrite_state(wanted, groups, match, saved, pair.path))

    def _pooled(self, pair: Pair[ContainerSlot]) -> Node:
        """Note the saved optimizers or schedulers of a container that holds these; return a node with their places."""
        children = {key: child.value for key, child in pair.slot.slots.items()}
        node, opened = pair.node, pair.saved_items
        if not children or opened is None or opened[0] not in node:
            return node
        saved = {key: Saved(each, (*pair.path, str(key))) for key, each in opened[1]}
        if all(isinstance(child, Optimizer) for child in children.values()):
            found = {key: SavedOptimizer.of(each.node, each.path) for key, each in saved.items()}
            optimizers = tuple(each.renamed(self._new_names) for each in found.values() if each is not None)
            if not optimizers or len(optimizers) < len(saved):
                return node
            numbers = {key: number for number, key in enumerate(found)}
            self._pools |= {id(each): SavedOptimizers(optimizers, numbers.get(key)) for key, each in children.items()}
            return _with_places(node, children, EMPTY)
        if all(isinstance(slot, ObjectSlot) and slot.is_scheduler for slot in pair.slot.slots.values()):
            shared = {str(key): each for key, each in saved.items()}
            self._schedulers |= {id(child): shared for child in children.values()}
            return _with_places(node, children, {"dict": []})
        return node

    def of_object(self, pair: Pair[ObjectSlot]) -> Pair[Slot]:
        """Return the pair of an object's state, in its terms if it is an optimizer or a scheduler.

        Raises:
            ShapeMismatchError: The saved optimizer has other parameters, without names. Or state that is found by
                position does not fit its parameter. Or a list of a scheduler has not one item for each group.
            TreeError: The state of an optimizer depends on the order of the parameters, and the order differs. Or the
                groups of a scheduler's optimizer come from several saved optimizers, whose schedulers are not found.
        """
        state = Pair(pair.node, pair.path, pair.slot.state, pair.scope_of_state)
        if isinstance(pair.slot.value, Optimizer):
            return self._of_optimizer(pair.slot.value, state)
        return replace(state, node=self._regrouped(pair))

    def _of_optimizer(self, optimizer: Optimizer, pair: Pair[Slot]) -> Pair[Slot]:
        parameters, state = parameters_of(optimizer), pair.slot.value
        if not is_numbered(state, len(parameters)):
            return pair
        groups = state["param_groups"]
        saved = self._pools.get(id(optimizer)) or self._saved_at(pair)
        if saved is None:
            return pair
        wanted = parameters_of_groups(groups, [*map(self._names_of, parameters)])
        match = match_optimizer(wanted, len(groups), saved)
        if isinstance(optimizer, LBFGS):
            _validate_order(match, wanted, saved, pair.where)
        else:
            self._validate_shapes(match, parameters, saved, pair.where)
        self._groups[id(optimizer)] = Regrouping(
            match.groups, saved.own, tuple(len(each.groups) for each in saved.optimizers)
        )
        return self._rewritten(pair, rewrite_state(wanted, groups, match, saved, pair.path))

    def _rewritten(self, pair: Pair[S], found: RewrittenState) -> Pair[S]:
        """Return the pair of an optimizer's state with the saved state in its terms; note the names of that."""
        self._notes.add(found.notes)
        return replace(pair, node=found.node, scope=keep_defaults(pair.scope, found.kept_state, found.kept_options))

    def _names_of(self, parameter: torch.Tensor) -> tuple[str, ...]:
        names = self._target.parameter_names.of(parameter)
        for prefix, saved in self._clients.items():
            names = tuple(saved + name.removeprefix(prefix) if name.startswith(prefix) else name for name in names)
        return names

    def _regrouped(self, pair: Pair[ObjectSlot]) -> Node:
        """Return the saved state of a scheduler for the groups that its optimizer has in the target."""
        target, state = pair.slot.value, pair.slot.state.value
        optimizer = getattr(target, "optimizer", None)
        regrouping = self._groups.get(id(optimizer))
        if regrouping is None or regrouping.is_same or not isinstance(state, Mapping) or not regrouping.optimizers:
            return pair.node
        pool = self._pools.get(id(optimizer), SavedOptimizers((), None))
        keys = [each.path[-1] for each in pool.optimizers]
        siblings = self._schedulers.get(id(target), {})
        parts: dict[int | None, Saved] = {regrouping.own: pair} if regrouping.own in regrouping.optimizers else {}
        for number in regrouping.optimizers:
            if number not in parts:
                if {*siblings} != {*keys}:
                    raise TreeError(
                        f"scheduler at {pair.where!r}: its optimizer has parameters of the saved optimizer at "
                        f"{'/'.join(pool.optimizers[number].path)!r}, whose scheduler cannot be told; keep schedulers "
                        "in a list or dict with the keys of their optimizers"
                    )
                parts[number] = siblings[keys[number]]
        node = regrouping.scheduler({at: parts[at].node for at in regrouping.optimizers}, state, pair.where)
        # Saved values of groups that the target no longer has are not unexpected.
        self._notes.used.update(name for each in (pair, *parts.values()) for name in each.names)
        return node

    def _validate_shapes(
        self, match: Match, parameters: Sequence[torch.Tensor], saved: SavedOptimizers, where: str
    ) -> None:
        """Check that state which is found by position fits the shape of its parameter."""
        for number, (parameter, rule, place) in enumerate(zip(parameters, match.rules, match.sources, strict=True)):
            if rule != "position" or place is None:
                continue
            source, label = saved.optimizers[place[0]], saved.parameter(place).label
            nodes = items_of(source.state.get(str(saved.parameter(place).key), EMPTY)) or ("", [])
            names = [name for _, node in nodes[1] if (name := name_of_tensor(node)) is not None]
            # Other tensors count steps, or hold blocks of a larger whole.
            shapes = [shape for name in names if 0 < len(shape := self._shape_of(name)) == parameter.dim()]
            # Factored state has one row, or one column.
            if shapes and not any(_fits(shape, parameter.shape) for shape in shapes):
                raise ShapeMismatchError(
                    f"optimizer at {where!r}: its parameters are found by their position, and number {number} "
                    f"has another shape; got {tuple(parameter.shape)} in the target, the saved state "
                    f"{'/'.join((*source.path, 'state', name_of_key(label)))!r} has {shapes[0]}; restore into an "
                    "optimizer with the parameters in the saved order"
                )

    def _saved_at(self, part: Saved) -> SavedOptimizers | None:
        saved = SavedOptimizer.of(part.node, part.path)
        return None if saved is None else SavedOptimizers((saved.renamed(self._new_names),), 0)


def _with_places(node: Node, keys: Collection[Any], empty: Node) -> Node:
    """Return the node of a container with a place for each key of a target's container."""
    ((kind, content),) = node.items()
    if kind == "dict":
        known = [key for key, _ in content]
        return {"dict": [*content, *([key, empty] for key in keys if type(key) in (int, str) and key not in known)]}
    return {kind: [*content, *(empty for _ in keys)][: len(keys)]}


def _fits(shape: Sequence[int], parameter: Sequence[int]) -> bool:
    return all(size in (1, wanted) for size, wanted in zip(shape, parameter, strict=True))


def _is_group(group: Any) -> bool:
    return isinstance(group, Mapping) and isinstance(group.get("params"), list | tuple)


def _validate_order(match: Match, wanted: Sequence[OptimizerParameter], saved: SavedOptimizers, where: str) -> None:
    """Check that an optimizer whose state covers all parameters in order has the saved parameters in this order."""
    sources = [None if place is None else saved.parameter(place).label for place in match.sources]
    numbers = {place[0] for place in match.sources if place is not None}
    old = [each.label for number in sorted(numbers) for each in saved.optimizers[number].parameters]
    if len(numbers) > 1 or (numbers and sources != old):
        at = next((at for at, pair in enumerate(zip(sources, old, strict=False)) if pair[0] != pair[1]), len(old))
        got, expected = (repr(some[at]) if at < len(some) else "none" for some in ([e.label for e in wanted], old))
        raise TreeError(
            f"optimizer at {where!r}: the state of LBFGS is of all parameters in their order, which is "
            f"another one; got {got} as number {at} in the target, saved {expected}; make the optimizer of the saved "
            "parameters in the saved order"
        )
