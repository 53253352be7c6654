"""The union of the structures of several clients' state trees (`dtckpt.format.tree`).

The union joins dicts, and other containers that hold a dict, by key, with the first client's keys first. All other
facts must be equal if several clients have them: plain values, and the kinds and lengths of containers.

The union also joins states of optimizers whose parameters have names, for example over the stages of a pipeline::

    client 0    {"state": {"a": …}, "param_groups": [{"lr": 1, "params": ["a"]}]}
    client 1    {"state": {"b": …}, "param_groups": [{"lr": 1, "params": ["b"]}, {"lr": 2, "params": ["c"]}]}
    union       {"state": …, "param_groups": [{"lr": 1, "params": ["a", "b"]}, {"lr": 2, "params": ["c"]}]}

and so are lists of optimizers, which may differ in length.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dtckpt.errors import SaveDisagreementError
from dtckpt.format import tree as trees
from dtckpt.format.tree import Node

_SHOWN_CHARS = 80
"""Most characters of a value that an error shows."""


def value_paths(node: Node) -> Iterator[str]:
    """Yield the path of every plain value below a node."""
    return (path for path, _ in trees.value_nodes(node))


def unite(nodes: Mapping[int, Node]) -> Node:
    """Return the union of structures.

    Args:
        nodes: The structures, by client; the lowest client's comes first.

    Raises:
        SaveDisagreementError: Clients have different values or structures at one path.
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
        longest = max(len(each) for _, each in contents)
        columns = ([(client, each[at]) for client, each in contents if at < len(each)] for at in range(longest))
        return {kind: [_unite(column, (*path, str(at))) for at, column in enumerate(columns)]}
    below: dict[bytes, tuple[Any, str, list[tuple[int, Node]]]] = {}
    for client, each in nodes:
        opened = trees.items_of(each)
        for (key, child), (decoded, _) in zip(each[kind], opened[1] if opened else (), strict=True):
            # By the JSON of the key: 1 and True are equal in Python.
            below.setdefault(trees.dump(key), (key, str(decoded), []))[2].append((client, child))
    if all(_has_named_parameters(each) for _, each in nodes):
        key, _, groups = below[_GROUPS]
        below[_GROUPS] = key, "param_groups", [(first, _unite_groups([each for _, each in groups]))]
    return {kind: [[key, _unite(children, (*path, text))] for key, text, children in below.values()]}


_GROUPS = trees.dump("param_groups")  # type: ignore[arg-type]  # a key, in JSON


def _has_named_parameters(node: Node) -> bool:
    """Tell whether a node is the state of an optimizer whose parameters all have names."""
    items = _items(node)
    if not {"state", "param_groups"} <= items.keys() or "list" not in items["param_groups"]:
        return False
    groups = [_items(group) for group in items["param_groups"]["list"]]
    return all(
        "list" in group.get("params", {}) and all(type(each.get("value")) is str for each in group["params"]["list"])
        for group in groups
    )


def _items(node: Node) -> dict[str, Node]:
    """Return the items of a dict whose keys are text."""
    return {key: child for key, child in node.get("dict", ()) if type(key) is str}


def _unite_groups(nodes: Sequence[Node]) -> Node:
    """Return the union of the groups of optimizers; join groups with equal options, in their order.

    A restore finds the options of a parameter by its name, so the choice of joined groups makes no difference.
    """
    united: list[tuple[bytes, list[Any], dict[str, Any]]] = []
    for node in nodes:
        free = list(united)
        for group in node["list"]:
            items = _items(group)
            options = [item for item in group["dict"] if item[0] not in _MEMBERS]
            facts = trees.dump({"dict": sorted(options, key=lambda item: str(item[0]))})
            found = next((each for each in free if each[0] == facts), None)
            if found is None:
                united.append(found := (facts, options, {}))
            else:
                free.remove(found)
            own = items.get("param_names", {}).get("list") or [None] * len(items["params"]["list"])
            for member, name in zip(items["params"]["list"], own, strict=True):
                found[2].setdefault(member["value"], name)
    return {"list": [_group(options, members) for _, options, members in united]}


_MEMBERS = ("params", "param_names")


def _group(options: Sequence[Any], members: Mapping[str, Any]) -> Node:
    items = [*options, ["params", {"list": [{"value": name} for name in members]}]]
    if members and None not in members.values():
        items.append(["param_names", {"list": [*members.values()]}])
    return {"dict": items}


def _common_facts(node: Node) -> Any:
    """Return the facts of a node that must be equal on all clients with a node at this path."""
    ((kind, content),) = node.items()
    if kind == "dict":
        return kind
    if kind in ("list", "tuple"):
        are_optimizers = bool(content) and all(map(_has_named_parameters, content))
        return kind, "optimizers" if are_optimizers else len(content)
    return (kind, trees.dump(content[:2])) if kind == "type" else trees.dump(node)


def _disagreement(
    client: int, node: Node, other: int, other_node: Node, path: tuple[str, ...]
) -> SaveDisagreementError:
    return SaveDisagreementError(
        f"client {client} and client {other} save different things at {'/'.join(path)!r}; got {_shown(node)} and "
        f"{_shown(other_node)}. Pass the same on every client that has the key; wrap a value that differs by client in "
        "dtckpt.PerClient; pass an optimizer itself, together with its module, and not its state_dict(), which numbers "
        "the parameters of each client anew"
    )


def _shown(node: Node) -> str:
    """Return a node as text for an error: a value, or the kind of a container and its number of items."""
    ((kind, content),) = node.items()
    if kind == "type":
        return f"{content[0]} of {_shown(content[2])}"
    if kind in ("dict", "list", "tuple"):
        return f"a {kind} of {len(content)} items"
    if kind == "tensor":
        return f"tensor {content!r}"
    return repr(content)[:_SHOWN_CHARS] if kind == "value" else f"{kind} {content!r}"[:_SHOWN_CHARS]
