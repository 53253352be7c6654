"""`OptimizerStates`: finds the saved state of a target's optimizers, by the names of their parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim import LBFGS, Optimizer

from dtckpt.checkpoint.parameter_names import is_numbered, parameters_of
from dtckpt.checkpoint.restoring.optimizer_match import (
    Match,
    Parameter,
    SavedOptimizer,
    SavedOptimizers,
    match_optimizer,
    parameters_of_groups,
)
from dtckpt.checkpoint.restoring.optimizer_nodes import EMPTY, Regrouping, TargetState, rewrite_state
from dtckpt.checkpoint.restoring.target_tree import TargetTree
from dtckpt.errors import TreeError
from dtckpt.format.tree import Node, items_of


class OptimizerStates:
    """Finds the saved state of the optimizers of one target.

    Args:
        target: The target.
        new_names: New name by name in the checkpoint, of the tensors that are renamed.
    """

    def __init__(self, target: TargetTree, new_names: Mapping[str, str]) -> None:
        self._target = target
        self._new_names = new_names
        # By id of an optimizer.
        self._pools: dict[int, SavedOptimizers] = {}
        self._groups: dict[int, Regrouping] = {}

    def pool(self, items: Any, node: Node, path: tuple[str, ...]) -> Node:
        """Note that optimizers in one container share what was saved in it; return a node with a place for each.

        An optimizer for each parameter or for each part of a model: which of them has a parameter may have changed.
        """
        children = dict(items) if isinstance(items, Mapping) else dict(enumerate(items))
        opened = items_of(node)
        if not children or opened is None or not all(isinstance(child, Optimizer) for child in children.values()):
            return node
        kind, nodes = opened[0], dict(opened[1])
        saved = {key: SavedOptimizer.of(each, (*path, str(key))) for key, each in nodes.items()}
        found = {key: each.renamed(self._new_names) for key, each in saved.items() if each is not None}
        if kind not in node or not found or len(found) < len(saved):
            return node
        numbers = {key: number for number, key in enumerate(found)}
        for key, child in children.items():
            self._pools[id(child)] = SavedOptimizers(tuple(found.values()), numbers.get(key))
        if kind == "dict":
            return {"dict": [*node["dict"], *([key, EMPTY] for key in children if key not in nodes)]}
        return {kind: [nodes.get(number, EMPTY) for number in children]}

    def match_object(self, optimizer: Optimizer, node: Node, path: tuple[str, ...]) -> TargetState | None:
        """Return the saved state of an optimizer in its terms; None if the node is not the state of an optimizer.

        Raises:
            ShapeMismatchError: It has other parameters, and no names to tell which.
            TreeError: Its state depends on the order of the parameters, which is another one.
        """
        state, parameters = self._target.state_of(optimizer), parameters_of(optimizer)
        if not is_numbered(state, len(parameters)):
            return None
        names = self._target.parameter_names
        wanted = parameters_of_groups(state["param_groups"], [names.of(each) for each in parameters])
        saved = self._pools.get(id(optimizer)) or self._saved_at(node, path)
        if saved is None:
            return None
        match = match_optimizer(wanted, len(state["param_groups"]), saved)
        if isinstance(optimizer, LBFGS):
            _validate_order(match, wanted, path)
        if saved.own is not None:
            sources = (place[1] if place is not None and place[0] == saved.own else None for place in match.groups)
            self._groups[id(optimizer)] = Regrouping(tuple(sources), len(saved.optimizers[saved.own].groups))
        return rewrite_state(wanted, state["param_groups"], match, saved, path)

    def match_dict(self, items: Mapping[Any, Any], node: Node, path: tuple[str, ...]) -> TargetState | None:
        """Return the saved state for a dict as ``Optimizer.state_dict()`` returns it. Otherwise as `match_object`."""
        groups = items["param_groups"]
        if not isinstance(groups, list | tuple) or not all(_is_group(group) for group in groups):
            return None
        saved = self._saved_at(node, path)
        if saved is None:
            return None
        wanted = parameters_of_groups(groups)
        return rewrite_state(wanted, groups, match_optimizer(wanted, len(groups), saved), saved, path)

    def regroup(self, target: Any, state: Any, node: Node, path: tuple[str, ...]) -> Node:
        """Return the saved state of a scheduler, in the order of the groups that its optimizer has in the target."""
        regrouping = self._groups.get(id(getattr(target, "optimizer", None)))
        if regrouping is None or regrouping.is_same or not isinstance(state, Mapping):
            return node
        return regrouping.scheduler(node, state, "/".join(path))

    def _saved_at(self, node: Node, path: tuple[str, ...]) -> SavedOptimizers | None:
        saved = SavedOptimizer.of(node, path)
        return None if saved is None else SavedOptimizers((saved.renamed(self._new_names),), 0)


def _is_group(group: Any) -> bool:
    return isinstance(group, Mapping) and isinstance(group.get("params"), list | tuple)


def _validate_order(match: Match, wanted: Sequence[Parameter], path: tuple[str, ...]) -> None:
    """Check that an optimizer whose state is of all parameters in order has the order that was saved."""
    for number, (parameter, place) in enumerate(zip(wanted, match.sources, strict=True)):
        if place is not None and place[1] != number:
            raise TreeError(
                f"optimizer at {'/'.join(path)!r}: the state of LBFGS is of all parameters in their order, which is "
                f"another one; got {parameter.label!r} as number {number} in the target, saved as number {place[1]}; "
                "make the optimizer of the parameters in the saved order"
            )
