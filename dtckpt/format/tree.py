"""State trees: nested containers of tensors and plain values, and their JSON form.

A tree is saved as its tensors, whose names are their keys (each as `dtckpt.format.names.name_of_key` returns it) joined
with ``/``, plus one JSON document that holds the structure and the plain values::

    {"model": {"w": tensor}, "step": 7}   ->   tensor model/w, and
    {"dict": [["model", {"dict": [["w", {"tensor": "model/w"}]]}], ["step", {"value": 7}]]}

Nodes are one-key objects: ``{"dict": [[key, node], …]}``, ``{"list": [node, …]}``,
``{"tuple": [node, …]}``, ``{"type": [name, argument, node]}`` for other containers (`dtckpt.format.containers`),
``{"tensor": name}``, ``{"ndarray": name}`` for an array of numpy, which is stored as a tensor is, and plain values
(`dtckpt.format.plain_values`). A key is a str, an int, or the node of another plain value. Names stand for entries of
closed tables, never for classes, and nothing is pickled. So reading a tree runs no code of the checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dtckpt.errors import CheckpointCorruptError, CheckpointVersionError, TensorNameError, TreeError
from dtckpt.format import plain_values
from dtckpt.format.containers import CONTAINERS, name_of
from dtckpt.format.hash_work import validate_hashes
from dtckpt.format.names import name_of_key
from dtckpt.format.plain_values import (
    decode_hashable,
    decode_value,
    encode_hashable,
    encode_value,
    is_plain,
    peek_value,
    refusal,
)

Node = plain_values.Node

MAX_DEPTH = 64
"""Deepest nesting. The limit also ends the walk through a tree that contains itself."""

_LEAVES = ("tensor", "ndarray")
_BASES = (dict, list, tuple)
_BASE_NAMES = tuple(base.__name__ for base in _BASES)


@dataclass(frozen=True, slots=True)
class Late:
    """A state that `flatten` asks for after it has named the tensors of other objects.

    Args:
        rank: Objects of a lower rank come first.
        state: Returns the state, given the tensors and arrays of the tree so far, by name.
    """

    rank: int
    state: Callable[[Mapping[str, Any]], Any]


def _own_state(value: Any, path: str) -> Any:
    del path
    return value


def flatten(
    tree: Any, is_leaf: Callable[[Any], bool], state_of: Callable[[Any, str], Any] = _own_state, at: str = ""
) -> tuple[dict[str, Any], Node]:
    """Split a tree into its tensors and its structure.

    Args:
        tree: Nested containers; leaves are tensors, arrays of numpy and plain values.
        is_leaf: Whether an object is a tensor, to be stored as an array.
        state_of: Returns the state of a stateful object at a path, as a tree, or as `Late`; any other object as it is.
        at: The tree's path, if it is a part of a larger one.

    Returns:
        The tensors and arrays by name, and the structure for `dump`.

    Raises:
        TreeError: A node or key cannot be saved, or two paths give one name.
    """
    flattening = _Flattening(is_leaf, state_of)
    node = flattening.visit(tree, f"{at}/" if at else "", 0)
    flattening.visit_late()
    return flattening.leaves, node


# A class, not a function inside `flatten`: such a function refers to itself, and this cycle would keep all tensors
# alive until the garbage collector frees it.
@dataclass(slots=True)
class _Flattening:
    is_leaf: Callable[[Any], bool]
    state_of: Callable[[Any, str], Any]
    leaves: dict[str, Any] = field(default_factory=dict)
    late: list[tuple[Late, Node, str, int]] = field(default_factory=list)

    def visit(self, value: Any, prefix: str, depth: int) -> Node:
        """Return the node of a value, and note the tensors below it.

        Args:
            value: The value.
            prefix: Its path, with a ``/`` behind each key.
            depth: Its level; 0 for the whole tree.
        """
        where = prefix[:-1]
        if depth > MAX_DEPTH:
            raise TreeError(f"state tree is deeper than {MAX_DEPTH} levels at {where[:200]!r}; does it contain itself?")
        if self.is_leaf(value):
            return {"tensor": self._name(value, where)}
        # The exact type: a subclass would come back as its base.
        if type(value) in _BASES:
            return self._items(value, prefix, depth)
        if is_plain(value):
            return encode_value(value, where)
        if type(value) is np.ndarray:
            return {"ndarray": self._name(value, where)}
        # One level deeper: so `MAX_DEPTH` ends an endless chain of objects whose states are further objects.
        if (state := self.state_of(value, where)) is not value:
            if not isinstance(state, Late):
                return self.visit(state, prefix, depth + 1)
            late: Node = {}
            self.late.append((state, late, prefix, depth + 1))
            return late
        kind = name_of(value)
        if kind is None:
            raise refusal(value, where)
        container = CONTAINERS[kind]
        items = container.base(container.items(value))
        argument = container.argument(value, where)
        if container.has_tree_argument:
            argument = self._argument(argument, where)
        return {"type": [kind, argument, self._items(items, prefix, depth)]}

    def visit_late(self) -> None:
        """Complete the nodes of late objects."""
        for late, node, prefix, depth in sorted(self.late, key=lambda each: each[0].rank):
            node.update(self.visit(late.state(self.leaves), prefix, depth))

    def _name(self, leaf: Any, where: str) -> str:
        """Note a tensor or an array; return its name."""
        # A tree that is one tensor has an empty path; arrays need a name.
        name = where or "value"
        # As in {"a": {"b": t}, "a/b": t}.
        if name in self.leaves:
            raise TreeError(f"two tensors of the state tree would both be named {name!r}; rename a key")
        self.leaves[name] = leaf
        return name

    def _argument(self, argument: Any, where: str) -> Node:
        """Return the node of a container's argument that is a tree of plain values."""
        flattening = _Flattening(self.is_leaf, self.state_of)
        node = flattening.visit(argument, f"{where}/", 0)
        if flattening.leaves:
            raise TreeError(f"cannot save the tensor at {next(iter(flattening.leaves))!r}, which is part of a context")
        return node

    def _items(self, items: Any, prefix: str, depth: int) -> Node:
        kind = type(items)
        if kind is dict:
            return {
                "dict": [
                    [_encode_key(key, prefix), self.visit(child, f"{prefix}{name_of_key(str(key))}/", depth + 1)]
                    for key, child in items.items()
                ]
            }
        return {
            kind.__name__: [
                self.visit(child, f"{prefix}{position}/", depth + 1) for position, child in enumerate(items)
            ]
        }


def _encode_key(key: Any, prefix: str) -> str | int | Node:
    if type(key) is str:
        return key
    node = encode_hashable(key, prefix[:-1])
    return key if type(key) is int else node


def _decode_key(key: Any) -> Any:
    return key if type(key) in (str, int) else decode_hashable(key)


def dump(node: Node) -> bytes:
    """Return a structure as JSON; equal structures give equal bytes."""
    # JSON has no NaN; a float that JSON lacks is a node of another kind.
    return json.dumps(node, separators=(",", ":"), allow_nan=False).encode()


def load(data: bytes) -> Node:
    """Parse a structure from JSON.

    Raises:
        CheckpointCorruptError: `dump` writes no such structure.
        CheckpointVersionError: The structure names a kind of node or of container that this version does not know.
    """
    try:
        node: Node = json.loads(data)
        # Build it once, with names in place of tensors: so a malformed tree fails when the checkpoint is opened, and
        # not in the middle of a restore.
        build(node, lambda name: name, decode=peek_value)
    # Looked up in closed tables: a name that they lack comes from a newer version.
    except KeyError as error:
        raise CheckpointVersionError(
            f"the manifest's state tree holds {error}, which this version does not know; upgrade dtckpt"
        ) from error
    except (CheckpointCorruptError, CheckpointVersionError):
        raise
    except (ArithmeticError, AttributeError, TypeError, ValueError, RecursionError) as error:
        raise CheckpointCorruptError(f"the manifest's state tree cannot be read: {error}") from error
    return node


def build(
    node: Node,
    tensor: Callable[[str], Any],
    depth: int = 0,
    decode: Callable[[str, Any], Any] = decode_value,
) -> Any:
    """Rebuild a tree from its structure.

    Args:
        node: The structure.
        tensor: Returns the tensor of a name.
        depth: Levels above the node.
        decode: Returns the plain value of a node, given the kind and the content.

    Raises:
        CheckpointCorruptError: The structure is malformed.
        KeyError: The node names a kind of node or of container that this version does not know.
    """
    if depth > MAX_DEPTH:
        raise CheckpointCorruptError(f"the manifest's state tree is deeper than {MAX_DEPTH} levels")
    kind, content = _only(node)
    if kind in _LEAVES:
        if not isinstance(content, str):
            raise CheckpointCorruptError("the manifest's state tree holds a malformed tensor name")
        return tensor(content)
    if kind == "type":
        name, argument, items = content
        container = CONTAINERS[name]
        # A type must not be directly inside a type, either: such a chain would not count as levels.
        if _only(items)[0] != container.base.__name__:
            raise CheckpointCorruptError(f"the manifest's state tree holds a malformed {name}")
        if container.has_tree_argument:
            argument = build(argument, _no_tensor, depth + 1, decode)
        return container.make(argument, build(items, tensor, depth, decode))
    if kind not in _BASE_NAMES:
        return decode(kind, content)
    if not isinstance(content, list):
        raise CheckpointCorruptError(f"the manifest's state tree holds a malformed {kind}")
    if kind != "dict":
        children = [build(child, tensor, depth + 1, decode) for child in content]
        return children if kind == "list" else tuple(children)
    keys = [_decode_key(key) for key, _ in content]
    validate_hashes(keys)
    built = {key: build(child, tensor, depth + 1, decode) for key, (_, child) in zip(keys, content, strict=True)}
    # Two keys may be equal in Python and not in JSON, as 1 and True are.
    if len(built) != len(content):
        raise CheckpointCorruptError("the manifest's state tree holds a key twice")
    return built


def _no_tensor(name: str) -> Any:
    raise CheckpointCorruptError(f"the manifest's state tree holds a tensor {name[:80]!r} where only values may be")


def items_of(node: Node) -> tuple[str, list[tuple[Any, Node]]] | None:
    """Return the kind of a container's items (``dict``, ``list`` or ``tuple``) and the items; None for other nodes.

    Items are pairs of key, or position, and node.
    """
    kind, content = _only(node)
    if kind == "type":
        return items_of(content[2])
    if kind == "dict":
        return kind, [(_decode_key(key), child) for key, child in content]
    return (kind, list(enumerate(content))) if kind in _BASE_NAMES else None


def dict_of(node: Node) -> Node | None:
    """Return a dict, or the dict with the items of an ``OrderedDict``; None for other nodes."""
    inner = node["type"][2] if "type" in node and node["type"][0] == "OrderedDict" else node
    return inner if "dict" in inner else None


def rename(node: Node, names: Mapping[str, str]) -> Node:
    """Return a structure whose tensors and values are at other paths.

    A container keeps its kind if all its items move to one new place. A list or tuple that loses items becomes a dict.

    Args:
        node: The structure.
        names: By old name, the new name; its parts between ``/`` are keys. Leaves without a new name stay.

    Raises:
        TensorNameError: A tensor or value would be at a path that leads to others.
    """
    leaves: list[tuple[tuple[str, ...], Node]] = []
    before: dict[tuple[str, ...], tuple[Node, dict[str, Any]]] = {}
    # By path of a container, its new paths as each of its leaves has them.
    places: dict[tuple[str, ...], set[tuple[str, ...] | None]] = {}

    def collect(node: Node, path: tuple[str, ...]) -> None:
        opened = items_of(node)
        if opened is not None:
            before[path] = node, {str(key): key for key, _ in opened[1]}
            for key, below in opened[1]:
                collect(below, (*path, str(key)))
        # An empty container is a leaf: nothing below would bring it back.
        if opened is None or not opened[1]:
            name = name_of_tensor(node) or "/".join(path)
            new = _split_at_keys(names[name], path) if name in names else path
            leaves.append((new, node))
            for level in range(len(path)):
                is_same_below = new[level - len(path) :] == path[level:]
                places.setdefault(path[:level], set()).add(new[: level - len(path)] if is_same_below else None)

    def grow(items: list[tuple[tuple[str, ...], Node]], path: tuple[str, ...]) -> Node:
        if any(rest == () for rest, _ in items):
            if len(items) > 1:
                raise TensorNameError(f"names lead through {'/'.join(path)!r}, which is a tensor or a value itself")
            return items[0][1]
        # Grouped by the first key, in the order of the walk, so that a partly renamed tree keeps its order:
        #     a/x -> b/x       {"a": {"x", "y"}}   becomes   {"b": {"x"}, "a": {"y"}}
        below: dict[str, list[tuple[tuple[str, ...], Node]]] = {}
        for (first, *rest), leaf in items:
            below.setdefault(first, []).append((tuple(rest), leaf))
        children = {key: grow(group, (*path, key)) for key, group in below.items()}
        return _with_items(*before.get(path, ({"dict": []}, {})), children)

    collect(node, ())
    for path, new_paths in places.items():
        new_path = new_paths.pop()
        if not new_paths and new_path is not None and path in before:
            before.setdefault(new_path, before[path])
    return grow(leaves, ()) if leaves else node


def _split_at_keys(name: str, path: tuple[str, ...]) -> tuple[str, ...]:
    """Return the keys of a new name: its segments; an end shared with the old path keeps its keys, with any ``/``."""
    for end in range(len(path), 0, -1):
        if name == path[end - 1]:
            return path[end - 1 :]
        if not name.endswith(f"/{path[end - 1]}"):
            return (*name.split("/"), *path[end:])
        name = name.removesuffix(f"/{path[end - 1]}")
    return (*name.split("/"), *path)


def relabel(node: Node, names: Mapping[str, str]) -> Node:
    """Return a structure whose tensors have other names, at the same paths.

    Args:
        node: The structure.
        names: By old name, the new name; tensors without a new name keep theirs.
    """
    kind, content = _only(node)
    if kind in _LEAVES:
        return {kind: names.get(content, content)}
    if kind == "type":
        name, argument, items = content
        return {kind: [name, argument, relabel(items, names)]}
    if kind == "dict":
        return {kind: [[key, relabel(child, names)] for key, child in content]}
    return {kind: [relabel(child, names) for child in content]} if kind in _BASE_NAMES else node


def select(node: Node, is_wanted: Callable[[str], bool], path: tuple[str, ...] = ()) -> Node | None:
    """Return a structure with some of its tensors and values; None if there are none.

    A list or tuple that does not keep all of its items becomes a dict, as in `rename`.

    Args:
        node: The structure.
        is_wanted: Whether a tensor of a name, or a value at a path, stays.
        path: The path of the structure.
    """
    opened = items_of(node)
    if opened is None or not opened[1]:
        return node if is_wanted(name_of_tensor(node) or "/".join(path)) else None
    children = {str(key): select(child, is_wanted, (*path, str(key))) for key, child in opened[1]}
    kept = {key: child for key, child in children.items() if child is not None}
    return _with_items(node, {str(key): key for key, _ in opened[1]}, kept) if kept else None


def _with_items(container: Node, keys: Mapping[str, Any], children: Mapping[str, Node]) -> Node:
    """Return a container of the same kind with other items, if its kind can hold them; else a dict.

    Args:
        container: The container's node.
        keys: The container's own keys, by their text.
        children: The new items, by the text of their keys.
    """
    kind, content = _only(container)
    if kind == "type":
        name, argument, items = content
        renewed = _with_items(items, keys, children)
        return {kind: [name, argument, renewed]} if renewed.keys() == items.keys() else renewed
    # Only with the same positions, none missing and none new: otherwise items would move up.
    if kind != "dict" and list(keys) == list(children):
        return {kind: list(children.values())}
    same = keys if kind == "dict" else {}
    return {"dict": [[_encode_key(same.get(key, key), ""), child] for key, child in children.items()]}


def name_of_tensor(node: Node) -> str | None:
    """Return the name of the tensor or array that a node stands for; None for other nodes."""
    return node["tensor"] if "tensor" in node else node.get("ndarray")


def tensor_names(node: Node) -> list[str]:
    """Return the names of the tensors and arrays below a node."""
    leaves: list[Node] = []
    _collect_leaves(node, leaves)
    return [name for leaf in leaves for name in leaf.values()]


def array_names(node: Node) -> list[str]:
    """Return the names of the numpy arrays below a node."""
    leaves: list[Node] = []
    _collect_leaves(node, leaves)
    return [leaf["ndarray"] for leaf in leaves if "ndarray" in leaf]


def per_client_nodes(node: Node, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Node]]:
    """Yield ``(path, node)`` of each value that differs by client (`dtckpt.PerClient`) at and below a node."""
    if "type" in node and node["type"][0] == "PerClient":
        yield "/".join(path), node
    elif (opened := items_of(node)) is not None:
        for key, below in opened[1]:
            if "tensor" not in below:
                yield from per_client_nodes(below, (*path, str(key)))


def _collect_leaves(node: Node, leaves: list[Node]) -> None:
    if name_of_tensor(node) is not None:
        leaves.append(node)
    elif (opened := items_of(node)) is not None:
        for _, below in opened[1]:
            _collect_leaves(below, leaves)


def values(node: Node) -> Iterator[tuple[str, Any]]:
    """Yield ``(path, value)`` of every plain value below a node."""
    return ((path, decode_value(*_only(node))) for path, node in value_nodes(node))


def value_nodes(node: Node, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Node]]:
    """Yield ``(path, node)`` of every plain value at and below a node."""
    opened = items_of(node)
    if opened is not None:
        for key, child in opened[1]:
            if "tensor" not in child:  # spares a call for each of many tensors
                yield from value_nodes(child, (*path, str(key)))
    elif name_of_tensor(node) is None:
        yield "/".join(path), node


def _only(node: Node) -> tuple[str, Any]:
    """Return the one key of a node, its kind, and the content. Raises: `CheckpointCorruptError`."""
    if not isinstance(node, dict) or len(node) != 1:
        raise CheckpointCorruptError("the manifest's state tree holds a malformed node")
    return next(iter(node.items()))
