"""`OptimizerStates`: finds the saved state of a target's optimizers, by the names of their parameters."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
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
from dtckpt.checkpoint.restoring.target import ContainerSlot, ObjectSlot, TargetState
from dtckpt.errors import ShapeMismatchError, TreeError
from dtckpt.format.names import name_of_key
from dtckpt.format.tree import Node, items_of, name_of_tensor

Saved = tuple[tuple[str, ...], Node]
"""The keys that lead to a part of a checkpoint, and the part."""


def is_scheduler(target: Any) -> bool:
    """Whether an object's state depends on the groups of an optimizer that it holds."""
    return isinstance(getattr(target, "optimizer", None), Optimizer)


class OptimizerStates:
    """Finds the saved state of the optimizers of one target.

    Args:
        target: The target.
        new_names: New name by name in the checkpoint, of the tensors that are renamed.
        shape_of: Returns the shape of a tensor of the checkpoint, by its name there.
    """

    def __init__(
        self, target: TargetState, new_names: Mapping[str, str], shape_of: Callable[[str], tuple[int, ...]]
    ) -> None:
        self._target = target
        self._shape_of = shape_of
        self._new_names = new_names
        # By id of an optimizer.
        self._pools: dict[int, SavedOptimizers] = {}
        self._groups: dict[int, Regrouping] = {}
        # By id of a scheduler: the saved schedulers of its container, by key, each with its path.
        self._schedulers: dict[int, dict[str, Saved]] = {}
        # By prefix of names in the target: the prefix of these names in the checkpoint.
        self._clients: dict[str, str] = {}

    def note_client(self, path: Sequence[str], number: int) -> None:
        """Note which client saved the value at a path of a `PerClient`."""
        prefix = "".join(f"{name_of_key(key)}/" for key in path)
        self._clients[prefix] = f"{prefix}{number}/"

    def pool(self, slot: ContainerSlot, node: Node, path: tuple[str, ...]) -> Node:
        """Note that optimizers in one container share the saved optimizers; return a node with a place for each.

        A container may hold an optimizer for each parameter, or for each part of a model; a parameter may have moved
        from one optimizer to another since the save. Schedulers share the saved schedulers in the same way.
        """
        children = {key: child.value for key, child in slot.slots.items()}
        opened = items_of(node)
        if not children or opened is None or opened[0] not in node:
            return node
        nodes = dict(opened[1])
        if all(isinstance(child, Optimizer) for child in children.values()):
            return self._pool_optimizers(children, nodes, node, path)
        if all(map(is_scheduler, children.values())):
            shared = {str(key): ((*path, str(key)), each) for key, each in nodes.items()}
            self._schedulers |= {id(child): shared for child in children.values()}
            return _with_places(node, children, {"dict": []})
        return node

    def _pool_optimizers(
        self, children: Mapping[Any, Any], nodes: Mapping[Any, Node], node: Node, path: tuple[str, ...]
    ) -> Node:
        saved = {key: SavedOptimizer.of(each, (*path, str(key))) for key, each in nodes.items()}
        found = {key: each.renamed(self._new_names) for key, each in saved.items() if each is not None}
        if not found or len(found) < len(saved):
            return node
        numbers = {key: number for number, key in enumerate(found)}
        for key, child in children.items():
            self._pools[id(child)] = SavedOptimizers(tuple(found.values()), numbers.get(key))
        return _with_places(node, children, EMPTY)

    def match_object(self, slot: ObjectSlot, node: Node, path: tuple[str, ...]) -> RewrittenState | None:
        """Return the saved state of an optimizer in its terms; None if the node is not the state of an optimizer.

        Raises:
            ShapeMismatchError: The saved optimizer has other parameters, and no names to tell which; or state that is
                found by position does not fit its parameter.
            TreeError: Its state depends on the order of the parameters, which is another one.
        """
        optimizer, state = slot.value, slot.state.value
        parameters = parameters_of(optimizer)
        if not is_numbered(state, len(parameters)):
            return None
        wanted = parameters_of_groups(state["param_groups"], [*map(self._names_of, parameters)])
        saved = self._pools.get(id(optimizer)) or self._saved_at(node, path)
        if saved is None:
            return None
        match = match_optimizer(wanted, len(state["param_groups"]), saved)
        if isinstance(optimizer, LBFGS):
            _validate_order(match, wanted, saved, path)
        else:
            self._validate_shapes(match, parameters, saved, path)
        self._groups[id(optimizer)] = Regrouping(
            match.groups, saved.own, tuple(len(each.groups) for each in saved.optimizers)
        )
        return rewrite_state(wanted, state["param_groups"], match, saved, path)

    def _names_of(self, parameter: torch.Tensor) -> tuple[str, ...]:
        names = self._target.parameter_names.of(parameter)
        for prefix, saved in self._clients.items():
            names = tuple(saved + name.removeprefix(prefix) if name.startswith(prefix) else name for name in names)
        return names

    def match_dict(self, items: Mapping[Any, Any], node: Node, path: tuple[str, ...]) -> RewrittenState | None:
        """Return the saved state for a dict as ``Optimizer.state_dict()`` returns it. Otherwise as `match_object`."""
        groups = items["param_groups"]
        if not isinstance(groups, list | tuple) or not all(_is_group(group) for group in groups):
            return None
        saved = self._saved_at(node, path)
        if saved is None:
            return None
        wanted = parameters_of_groups(groups)
        return rewrite_state(wanted, groups, match_optimizer(wanted, len(groups), saved), saved, path)

    def regroup(self, slot: ObjectSlot, node: Node, path: tuple[str, ...]) -> tuple[Node, Sequence[Saved]]:
        """Return the saved state of a scheduler for the groups that its optimizer has in the target.

        Returns:
            The state, and the saved nodes that it is made of; no nodes if the state is the node itself.

        Raises:
            ShapeMismatchError: A list of the state has not one item for each group.
            TreeError: The groups are of several saved optimizers, whose schedulers are not found.
        """
        target, state = slot.value, slot.state.value
        optimizer = getattr(target, "optimizer", None)
        regrouping = self._groups.get(id(optimizer))
        if regrouping is None or regrouping.is_same or not isinstance(state, Mapping) or not regrouping.optimizers:
            return node, ()
        pool = self._pools.get(id(optimizer), SavedOptimizers((), None))
        keys = [each.path[-1] for each in pool.optimizers]
        siblings = self._schedulers.get(id(target), {})
        parts = {regrouping.own: (path, node)} if regrouping.own in regrouping.optimizers else {}
        for number in regrouping.optimizers:
            if number not in parts:
                if {*siblings} != {*keys}:
                    raise TreeError(
                        f"scheduler at {'/'.join(path)!r}: its optimizer has parameters of the saved optimizer at "
                        f"{'/'.join(pool.optimizers[number].path)!r}, whose scheduler cannot be told; keep schedulers "
                        "in a list or dict with the keys of their optimizers"
                    )
                parts[number] = siblings[keys[number]]
        in_order = {number: parts[number][1] for number in regrouping.optimizers}
        # Saved values of groups that the target no longer has are not unexpected.
        return regrouping.scheduler(in_order, state, "/".join(path)), [(path, node), *parts.values()]

    def _validate_shapes(
        self, match: Match, parameters: Sequence[torch.Tensor], saved: SavedOptimizers, path: tuple[str, ...]
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
                    f"optimizer at {'/'.join(path)!r}: its parameters are found by their position, and number {number} "
                    f"has another shape; got {tuple(parameter.shape)} in the target, the saved state "
                    f"{'/'.join((*source.path, 'state', name_of_key(label)))!r} has {shapes[0]}; restore into an "
                    "optimizer with the parameters in the saved order"
                )

    def _saved_at(self, node: Node, path: tuple[str, ...]) -> SavedOptimizers | None:
        saved = SavedOptimizer.of(node, path)
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


def _validate_order(
    match: Match, wanted: Sequence[OptimizerParameter], saved: SavedOptimizers, path: tuple[str, ...]
) -> None:
    """Check that an optimizer whose state is of all parameters in order has the saved parameters in their order."""
    sources = [None if place is None else saved.parameter(place).label for place in match.sources]
    numbers = {place[0] for place in match.sources if place is not None}
    old = [each.label for number in sorted(numbers) for each in saved.optimizers[number].parameters]
    if len(numbers) > 1 or (numbers and sources != old):
        at = next((at for at, pair in enumerate(zip(sources, old, strict=False)) if pair[0] != pair[1]), len(old))
        got, expected = (repr(some[at]) if at < len(some) else "none" for some in ([e.label for e in wanted], old))
        raise TreeError(
            f"optimizer at {'/'.join(path)!r}: the state of LBFGS is of all parameters in their order, which is "
            f"another one; got {got} as number {at} in the target, saved {expected}; make the optimizer of the saved "
            "parameters in the saved order"
        )
