"""The union of the structures of several clients' state trees (`dtckpt.format.tree`).

Dicts are united by key, the first client's keys first, and so are the other containers that hold a dict. Everything
else must be equal wherever several clients have it: plain values, and the kinds and lengths of containers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dtckpt.errors import SaveDisagreementError
from dtckpt.format import tree as trees
from dtckpt.format.tree import Node

_SHOWN_CHARS = 80
"""Bound on how much of a value an error shows."""


def value_paths(node: Node) -> Iterator[str]:
    """Yield the path of every plain value below a node."""
    return (path for path, _ in trees.value_nodes(node))


def unite(nodes: Mapping[int, Node]) -> Node:
    """Return the union of structures.

    Args:
        nodes: The structures, by client; the lowest client's comes first.

    Raises:
        SaveDisagreementError: Clients have different things at one path.
    """
    return _unite(list(nodes.items()), ())


def _unite(nodes: Sequence[tuple[int, Node]], path: tuple[str, ...]) -> Node:
    (first, node), *others = nodes
    for client, other in others:
        if _common_facts(other) != _common_facts(node):
            raise _disagreement(first, node, client, other, path)
    ((kind, content),) = node.items()
    if not others or kind not in ("dict", "list", "tuple", "type"):
        return node
    contents = [(client, next(iter(each.values()))) for client, each in nodes]
    if kind == "type":
        return {kind: [*content[:2], _unite([(client, each[2]) for client, each in contents], path)]}
    if kind != "dict":
        columns = ([(client, each[at]) for client, each in contents] for at in range(len(content)))
        return {kind: [_unite(column, (*path, str(at))) for at, column in enumerate(columns)]}
    below: dict[bytes, tuple[Any, str, list[tuple[int, Node]]]] = {}
    for client, each in nodes:
        opened = trees.items_of(each)
        for (key, child), (decoded, _) in zip(each[kind], opened[1] if opened else (), strict=True):
            # By the JSON of the key: 1 and True are equal in Python.
            below.setdefault(trees.dump(key), (key, str(decoded), []))[2].append((client, child))
    return {kind: [[key, _unite(children, (*path, text))] for key, text, children in below.values()]}


def _common_facts(node: Node) -> Any:
    """Return what must be equal of a node and of those that other clients have in its place."""
    ((kind, content),) = node.items()
    if kind == "dict":
        return kind
    if kind in ("list", "tuple"):
        return kind, len(content)
    return (kind, trees.dump(content[:2])) if kind == "type" else trees.dump(node)


def _disagreement(
    client: int, node: Node, other: int, other_node: Node, path: tuple[str, ...]
) -> SaveDisagreementError:
    return SaveDisagreementError(
        f"client {client} and client {other} save different things at {'/'.join(path)!r}; got {_shown(node)} and "
        f"{_shown(other_node)}. Pass the same on every client that has the key; wrap a value that differs by client in "
        "dtckpt.PerClient; of an optimizer pass the state by parameter names, as get_state_dict with "
        "flatten_optimizer_state_dict=True returns it"
    )


def _shown(node: Node) -> str:
    """Return what is at a node, for an error: a value, or the kind of a container and how many items it has."""
    ((kind, content),) = node.items()
    if kind == "type":
        return f"{content[0]} of {_shown(content[2])}"
    if kind in ("dict", "list", "tuple"):
        return f"a {kind} of {len(content)} items"
    if kind == "tensor":
        return f"tensor {content!r}"
    return repr(content)[:_SHOWN_CHARS] if kind == "value" else f"{kind} {content!r}"[:_SHOWN_CHARS]
