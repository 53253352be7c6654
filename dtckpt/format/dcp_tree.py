"""The state tree of a distributed checkpoint of PyTorch, which has the path of each leaf only.

PyTorch flattens a state dict before it saves it. A key of a dict becomes a string in a path, a position in a list an
int; dicts and lists that hold nothing leave no trace, and in a list None takes their place::

    ("model", "w")  ("steps", 0)  ("steps", 2)     ->    {"model": {"w": …}, "steps": [… , None, …]}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dtckpt.errors import CheckpointCorruptError
from dtckpt.format import tree as trees
from dtckpt.format.names import name_of_key

MAX_GAP = 1 << 16
"""Bound on the items that a list lacks, of those that its positions tell of."""

Path = tuple[str | int, ...]


def structure_of(nodes: Mapping[Path, trees.Node]) -> trees.Node:
    """Return the tree of leaves at these paths.

    Raises:
        CheckpointCorruptError: A path leads through a leaf, or is too deep; or a dict would be a list, too.
    """
    root: dict[str | int, Any] = {}
    for path, node in nodes.items():
        if len(path) > trees.MAX_DEPTH:
            raise _malformed(path, f"it has more than {trees.MAX_DEPTH} keys")
        level = root
        for key in path[:-1]:
            level = level.setdefault(key, {})
            if type(level) is not dict:
                raise _malformed(path, "it leads through a tensor or a value")
        if path[-1] in level:
            raise _malformed(path, "there is something at it already")
        level[path[-1]] = _Leaf(node)
    return _node(root, ())


def merge(node: trees.Node, other: trees.Node, path: str = "") -> tuple[trees.Node, list[str]]:
    """Return a dict with the items of another one, and dicts in both merged likewise.

    Args:
        node: The dict.
        other: The other dict.
        path: Where they are in the tree.

    Returns:
        The dict; and the paths at which both have a node, and one of the nodes is no dict: the first node counts.
    """
    items = [[key, child] for key, child in node["dict"]]
    # By text, as in paths: a number and its text are one name there.
    found = {str(key): item for item in items if type(key := item[0]) in (str, int)}
    clashes: list[str] = []
    for key, child in other["dict"]:
        below = "/".join(filter(None, (path, name_of_key(str(key)))))
        item = found.get(str(key)) if type(key) in (str, int) else None
        if item is None:
            items.append([key, child])
        elif "dict" in item[1] and "dict" in child:
            item[1], more = merge(item[1], child, below)
            clashes += more
        else:
            clashes.append(below)
    return {"dict": items}, clashes


class _Leaf:
    """A leaf; its node is a dict, too, and must not be taken for a level."""

    __slots__ = ("node",)

    def __init__(self, node: trees.Node) -> None:
        self.node = node


def _node(level: dict[str | int, Any] | _Leaf, path: Path) -> trees.Node:
    if isinstance(level, _Leaf):
        return level.node
    positions = sorted(key for key in level if type(key) is int)
    # The root of an empty checkpoint has no keys, and is a dict.
    if not positions:
        return {"dict": [[key, _node(child, (*path, key))] for key, child in level.items()]}
    if len(positions) != len(level):
        raise _malformed(path, "it is a dict and a list")
    if positions[0] < 0 or positions[-1] > len(positions) + MAX_GAP:
        raise _malformed(path, f"its list has an item {positions[-1]}")
    missing: trees.Node = {"value": None}
    return {
        "list": [
            _node(level[position], (*path, position)) if position in level else missing
            for position in range(positions[-1] + 1)
        ]
    }


def _malformed(path: Path, reason: str) -> CheckpointCorruptError:
    text = "/".join(map(str, path[:8]))
    return CheckpointCorruptError(f"the checkpoint's path {text[:200]!r} is malformed: {reason}")
