"""The states of optimizers in a conversion, which names their parameters in keys and in lists; pure.

`dtckpt.save` writes names where ``Optimizer.state_dict()`` has numbers (`dtckpt.checkpoint.parameter_names`). New names
of a conversion reach these, and a file for ``Optimizer.load_state_dict`` has numbers again. PyTorch's distributed
checkpoints keep keys as texts, and no empty dicts: there the groups tell which texts are numbers, and that a state is
empty.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from dtckpt.checkpoint.restoring.optimizer_match import SavedOptimizer
from dtckpt.format import tree as trees
from dtckpt.format.names import name_of_key
from dtckpt.format.tree import Node


def with_numbers(structure: Node) -> tuple[Node, dict[str, str]]:
    """Return a state tree whose optimizers number their parameters: as the groups do, else in the order of the groups.

    The names become ``param_names`` of the groups, if these have none.

    Returns:
        The tree, and new name by name of the tensors of the states.
    """
    moved: dict[str, str] = {}

    def numbered(saved: SavedOptimizer, node: Node) -> Node:
        has_names = any(type(each.key) is str for each in saved.parameters)
        keys = {str(each.key): number if has_names else each.key for number, each in enumerate(saved.parameters)}
        is_named = has_names and all(each.has_name for each in saved.parameters)
        names = {each.key: each.label for each in saved.parameters} if is_named else {}
        moved.update(_moved(saved, keys))
        return _rewritten(saved, node, keys, names)

    return trees.relabel(_mapped(_with_empty_states(structure), (), numbered), moved), moved


def with_new_names(structure: Node, names: Mapping[Any, str]) -> tuple[Node, dict[str, str]]:
    """Return a state tree whose optimizers have new names, by the old ones. Returns: as `with_numbers`."""
    moved: dict[str, str] = {}

    def renamed(saved: SavedOptimizer, node: Node) -> Node:
        keys = {str(each.key): names.get(each.key, each.key) for each in saved.parameters}
        if not any(type(each.key) is str for each in saved.parameters):
            return node
        moved.update(_moved(saved, keys))
        return _rewritten(saved, node, keys, {})

    return trees.relabel(_mapped(structure, (), renamed), moved), moved


def _moved(saved: SavedOptimizer, keys: Mapping[str, int | str]) -> Iterator[tuple[str, str]]:
    """Yield the names of the tensors of a state, each with its name under the new key of its parameter."""
    for key, node in saved.state.items():
        old, new = ("/".join((*saved.path, "state", name_of_key(str(each)))) for each in (key, keys.get(key, key)))
        if old != new:
            yield from ((name, new + name.removeprefix(old)) for name in trees.tensor_names(node))


def _mapped(node: Node, path: tuple[str, ...], change: Callable[[SavedOptimizer, Node], Node]) -> Node:
    """Return a tree in which the states of optimizers are changed."""
    saved = SavedOptimizer.of(node, path)
    if saved is not None:
        return change(saved, node)
    return _over_children(node, lambda key, child: _mapped(child, path if key is None else (*path, str(key)), change))


def _over_children(node: Node, change: Callable[[Any, Node], Node]) -> Node:
    """Return a container with other children; the one child of a typed container has the key None."""
    ((kind, content),) = node.items()
    opened = trees.items_of(node)
    if opened is None:
        return node
    if kind == "type":
        return {kind: [*content[:2], change(None, content[2])]}
    below = [change(key, child) for key, child in opened[1]]
    if kind == "dict":
        return {kind: [[key, child] for (key, _), child in zip(content, below, strict=True)]}
    return {kind: below}


def _with_empty_states(node: Node) -> Node:
    """Return a tree in which optimizers that have groups only have an empty state, too."""
    items = {key: child for key, child in node.get("dict", ()) if type(key) is str}
    if "param_groups" in items and "state" not in items:
        whole: Node = {"dict": [["state", {"dict": []}], *node["dict"]]}
        if (saved := SavedOptimizer.of(whole, ())) is not None and saved.groups:
            return whole
    return _over_children(node, lambda _, child: _with_empty_states(child))


def _rewritten(saved: SavedOptimizer, node: Node, keys: Mapping[str, int | str], names: Mapping[Any, str]) -> Node:
    """Return the state of an optimizer with new keys of its parameters.

    Args:
        saved: The groups and parameters of the node.
        node: The state.
        keys: New key by the text of the old one.
        names: By old key, the names for the ``param_names`` of groups without them. If empty, no names are added.
    """
    state = [
        [keys.get(str(key), key) if type(key) in (str, int) else key, child]
        for name, states in node["dict"]
        if name == "state"
        for key, child in states["dict"]
    ]
    groups = []
    for number, group in enumerate(saved.groups):
        members = [each.key for each in saved.parameters if each.group == number]
        items = {**group, "params": {"list": [{"value": keys[str(key)]} for key in members]}}
        if names and "param_names" not in group:
            items["param_names"] = {"list": [{"value": names[key]} for key in members]}
        groups.append({"dict": [[key, child] for key, child in items.items()]})
    changed = {"state": {"dict": state}, "param_groups": {"list": groups}}
    return {"dict": [[key, changed.get(key, child) if type(key) is str else child] for key, child in node["dict"]]}
