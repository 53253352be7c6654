"""`tree_leaves`: the leaves and containers of a state tree by path, as texts that can be compared; pure."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

from dtckpt.format import tree as trees

VALUE = "value"
_TENSOR = "tensor"


@dataclass(frozen=True, slots=True)
class Leaf:
    """A leaf of a tree, or a container.

    Args:
        type: ``tensor``, ``ndarray``, ``value``, or the type of a container.
        node: The node of a plain value, as JSON; else empty.
        is_container: Whether there are others below it.
    """

    type: str
    node: str = ""
    is_container: bool = False

    @property
    def is_tensor(self) -> bool:
        """Whether it is a tensor, or an array that is stored as one."""
        return self.type in (_TENSOR, "ndarray")


def tree_leaves(node: trees.Node, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Leaf]]:
    """Yield ``(path, leaf)`` of all nodes at and below a node. The path of a tensor is its name."""
    opened = trees.items_of(node)
    if opened is None:
        name = trees.name_of_tensor(node)
        if name is not None:
            yield name, Leaf(next(iter(node)))
        else:
            yield "/".join(path), Leaf(VALUE, json.dumps(node, sort_keys=True))
        return
    base, items = opened
    yield "/".join(path), Leaf(_container_type(node, base, items), is_container=bool(items))
    for key, child in items:
        if "tensor" in child:  # spares a call for each of many tensors
            yield child["tensor"], Leaf(_TENSOR)
        else:
            yield from tree_leaves(child, (*path, str(key)))


def _container_type(node: trees.Node, base: str, items: list[tuple[object, trees.Node]]) -> str:
    """Return the name of a container's type, with its argument, and with types of keys that paths do not show."""
    if "type" in node:
        name, argument, _ = node["type"]
        return name if argument is None else f"{name} {json.dumps(argument, sort_keys=True)}"
    # The keys 1 and "1" have one path.
    keys = sorted({type(key).__name__ for key, _ in items if base == "dict" and type(key) is not str})
    return f"{base} with keys of type {', '.join(keys)}" if keys else base
