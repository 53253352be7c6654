"""State trees: nested dicts, lists and tuples of tensors and plain values, and their JSON form.

A tree is saved as its tensors, named by their keys joined with ``/``, plus one JSON document that holds the
structure and the plain values. Nodes are one-key objects: ``{"dict": [[key, node], …]}``, ``{"list": [node, …]}``,
``{"tuple": [node, …]}``, ``{"tensor": name}``, ``{"value": JSON}``, ``{"float": text}`` for the floats that JSON
lacks, ``{"bytes": base64}``. No class names, no pickle: reading a tree can run no code.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from dtckpt.errors import CheckpointCorruptError, TensorNameError, TreeError

MAX_DEPTH = 64
"""Deepest nesting; also what stops a tree that contains itself."""

MAX_INT_BITS = 8192
"""Largest int; longer decimal numbers are refused by Python's own parser."""

Node = dict[str, Any]


def flatten(tree: Any, is_leaf: Callable[[Any], bool]) -> tuple[dict[str, Any], Node]:
    """Take the tensors out of a tree.

    Args:
        tree: Nested dicts (str or int keys), lists, tuples; leaves are tensors and plain values.
        is_leaf: Whether an object is a tensor, to be stored as an array.

    Returns:
        The tensors by name, and the structure for `dump`.

    Raises:
        TreeError: A node or key cannot be saved, or two paths give one name.
    """
    leaves: dict[str, Any] = {}
    return leaves, _visit(tree, (), is_leaf, leaves)


# No function inside `flatten`: one that calls itself is a cycle, which would keep all tensors alive until it is found.
def _visit(node: Any, path: tuple[str, ...], is_leaf: Callable[[Any], bool], leaves: dict[str, Any]) -> Node:
    where = "/".join(path)
    if len(path) > MAX_DEPTH:
        raise TreeError(f"state tree is deeper than {MAX_DEPTH} levels at {where[:200]!r}; does it contain itself?")
    if is_leaf(node):
        name = where or "value"
        if name in leaves:
            raise TreeError(f"two tensors of the state tree would both be named {name!r}; rename a key")
        leaves[name] = node
        return {"tensor": name}
    if isinstance(node, Mapping):
        for key in node:
            if not (isinstance(key, str) or type(key) is int):
                raise TreeError(f"keys must be str or int; got {key!r} ({type(key).__name__}) at {where!r}")
            _validate_int(key, where)
        children = [[key, _visit(child, (*path, str(key)), is_leaf, leaves)] for key, child in node.items()]
        return {"dict": children}
    if isinstance(node, list | tuple):
        kind = "list" if isinstance(node, list) else "tuple"
        return {kind: [_visit(child, (*path, str(at)), is_leaf, leaves) for at, child in enumerate(node)]}
    return _value_node(node, where)


def _value_node(value: Any, where: str) -> Node:
    if type(value) is float and not math.isfinite(value):
        return {"float": repr(value)}
    if value is None or type(value) in (bool, int, float, str):
        _validate_int(value, where)
        return {"value": value}
    if type(value) is bytes:
        return {"bytes": base64.b64encode(value).decode()}
    raise TreeError(
        f"cannot save {type(value).__name__} at {where!r}; expected a tensor, None, bool, int, float, str, bytes, "
        "dict, list, tuple, or an object with state_dict() and load_state_dict()"
    )


def _validate_int(value: object, where: str) -> None:
    if type(value) is int and value.bit_length() > MAX_INT_BITS:
        raise TreeError(
            f"int at {where!r} is too large; got {value.bit_length()} bits, expected at most {MAX_INT_BITS}"
        )


def dump(node: Node) -> bytes:
    """Return a structure as JSON; equal structures give equal bytes."""
    return json.dumps(node, separators=(",", ":"), allow_nan=False).encode()


def load(data: bytes) -> Node:
    """Read a structure from JSON.

    Raises:
        CheckpointCorruptError: It is no structure that `dump` writes.
    """
    try:
        node: Node = json.loads(data)
        _validate(node, 0)
    except (ValueError, RecursionError) as error:
        raise CheckpointCorruptError(f"the manifest's state tree cannot be read: {error}") from error
    return node


def _validate(node: Any, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise CheckpointCorruptError(f"the manifest's state tree is deeper than {MAX_DEPTH} levels")
    kind, content = _only(node)
    if kind == "dict":
        for pair in _items(kind, content):
            if not (isinstance(pair, list) and len(pair) == 2 and type(pair[0]) in (str, int)):
                raise CheckpointCorruptError("the manifest's state tree holds a malformed dict")
            _validate(pair[1], depth + 1)
    elif kind in ("list", "tuple"):
        for below in _items(kind, content):
            _validate(below, depth + 1)
    elif kind == "tensor":
        if not isinstance(content, str):
            raise CheckpointCorruptError("the manifest's state tree holds a malformed tensor name")
    else:
        _value(kind, content)


def _items(kind: str, content: Any) -> list[Any]:
    if not isinstance(content, list):
        raise CheckpointCorruptError(f"the manifest's state tree holds a malformed {kind}")
    return content


def build(node: Node, tensor: Callable[[str], Any]) -> Any:
    """Rebuild a tree; ``tensor`` gives the leaf of a tensor name."""
    kind, content = _only(node)
    if kind == "tensor":
        return tensor(content)
    if kind == "dict":
        return {key: build(child, tensor) for key, child in content}
    if kind == "list":
        return [build(child, tensor) for child in content]
    if kind == "tuple":
        return tuple(build(child, tensor) for child in content)
    return _value(kind, content)


def rename(node: Node, names: Mapping[str, str]) -> Node:
    """Move tensors and values to other paths; parts of a new name between ``/`` are keys.

    Containers that keep all of their items keep their kind; others become dicts.

    Raises:
        TensorNameError: A tensor or value would be at a path that others lead through.
    """
    leaves: list[tuple[tuple[str, ...], Node]] = []
    before: dict[tuple[str, ...], tuple[str, dict[str, Any]]] = {}

    def collect(node: Node, path: tuple[str, ...]) -> None:
        kind, content = _only(node)
        if kind in ("dict", "list", "tuple"):
            pairs = content if kind == "dict" else list(enumerate(content))
            before[path] = kind, {str(key): key for key, _ in pairs}
            for key, below in pairs:
                collect(below, (*path, str(key)))
        if kind not in ("dict", "list", "tuple") or not pairs:
            name = content if kind == "tensor" else "/".join(path)
            leaves.append((tuple(names[name].split("/")) if name in names else path, node))

    def grow(items: list[tuple[tuple[str, ...], Node]], path: tuple[str, ...]) -> Node:
        if any(rest == () for rest, _ in items):
            if len(items) > 1:
                raise TensorNameError(f"names lead through {'/'.join(path)!r}, which is a tensor or a value itself")
            return items[0][1]
        below: dict[str, list[tuple[tuple[str, ...], Node]]] = {}
        for (first, *rest), leaf in items:
            below.setdefault(first, []).append((tuple(rest), leaf))
        kind, keys = before.get(path, ("dict", {}))
        children = {key: grow(group, (*path, key)) for key, group in below.items()}
        if kind != "dict" and list(keys) == list(children):
            return {kind: list(children.values())}
        return {"dict": [[keys.get(key, key) if kind == "dict" else key, child] for key, child in children.items()]}

    collect(node, ())
    return grow(leaves, ()) if leaves else node


def _value(kind: str, content: Any) -> Any:
    if kind == "value" and not isinstance(content, list | dict):
        return content
    try:
        if kind == "float" and isinstance(content, str):
            return float(content)
        if kind == "bytes":
            return base64.b64decode(content, validate=True)
    except (ValueError, TypeError, binascii.Error) as error:
        raise CheckpointCorruptError(f"the manifest's state tree holds a bad {kind}: {error}") from error
    raise CheckpointCorruptError(f"the manifest's state tree holds an unknown or malformed {kind!r}")


def tensor_names(node: Node) -> list[str]:
    """Return the tensor names below a node; a key that occurs twice in one dict is damage."""
    found: list[str] = []
    _find_names(node, found)
    return found


def _find_names(node: Node, found: list[str]) -> None:
    kind, content = _only(node)
    if kind == "tensor":
        found.append(content)
    elif kind == "dict":
        if len({key for key, _ in content}) != len(content):
            raise CheckpointCorruptError("the manifest's state tree holds a key twice")
        for _, below in content:
            _find_names(below, found)
    elif kind in ("list", "tuple"):
        for below in content:
            _find_names(below, found)


def values(node: Node) -> Iterator[tuple[str, Any]]:
    """Yield ``(path, value)`` of every plain value below a node."""
    yield from _walk(node, ())


def _walk(node: Node, path: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    kind, content = _only(node)
    if kind in ("dict", "list", "tuple"):
        for key, child in content if kind == "dict" else enumerate(content):
            if "tensor" not in child:  # there may be many
                yield from _walk(child, (*path, str(key)))
    elif kind != "tensor":
        yield "/".join(path), _value(kind, content)


def _only(node: Node) -> tuple[str, Any]:
    if not isinstance(node, dict) or len(node) != 1:
        raise CheckpointCorruptError("the manifest's state tree holds a malformed node")
    return next(iter(node.items()))
