"""The graph of the objects of a ``tf.train.Checkpoint``: which object has which others, and the key of its value; pure.

::

    TrackableObjectGraph   1 nodes   1 children       1 node id   2 name of the child
                                     2 attributes     1 name      2 full name   3 key in the checkpoint
                                     5 has values     1 whether it or an object below has a value

The first node is the root. An object may have several paths, as a layer that two models share.

Source: TensorFlow's core/protobuf/trackable_object_graph.proto.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from dtckpt.checkpoint.foreign.protobuf_fields import bytes_field, fields, number_field

VALUE = "VARIABLE_VALUE"
"""The name of the attribute that is a variable's value."""
MAX_DEPTH = 128

Path = tuple[str, ...]


@dataclass(slots=True)
class _TrackedObject:
    """An object: the key of its value, if it has one, and the numbers of its children, by name."""

    key: str | None = None
    children: dict[str, int] = field(default_factory=dict)


def graph_bytes(keys: Iterable[tuple[Path, str]]) -> bytes:
    """Return the graph of a tree of objects.

    Args:
        keys: The path of each object that has a value, and the key of the value.
    """
    nodes = [_TrackedObject()]
    for path, key in keys:
        node = nodes[0]
        for name in path:
            if name not in node.children:
                node.children[name] = len(nodes)
                nodes.append(_TrackedObject())
            node = nodes[node.children[name]]
        node.key = key
    return b"".join(bytes_field(1, _node_bytes(node)) for node in nodes)


def _node_bytes(node: _TrackedObject) -> bytes:
    children = b"".join(
        bytes_field(1, number_field(1, number) + bytes_field(2, _encoded(name)))
        for name, number in node.children.items()
    )
    if node.key is not None:
        key = _encoded(node.key)
        children += bytes_field(2, bytes_field(1, VALUE.encode()) + bytes_field(2, key) + bytes_field(3, key))
    return children + bytes_field(5, number_field(1, 1))


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def paths_of(data: bytes) -> Mapping[str, Path]:
    """Return the first path of each value's object, by the key of the value.

    Raises:
        ValueError, IndexError or struct.error: The graph is damaged.
    """
    nodes = [_node(value) for number, value in fields(data) if number == 1 and isinstance(value, bytes)]
    found: dict[str, Path] = {}
    known = {0}
    level: list[tuple[int, Path]] = [(0, ())] if nodes else []
    while level:  # breadth first, as TensorFlow makes the keys
        below: list[tuple[int, Path]] = []
        for number, path in level:
            node = nodes[number]
            if node.key is not None and path:
                found.setdefault(node.key, path)
            for name, child in node.children.items():
                if child not in known and len(path) < MAX_DEPTH:
                    if not 0 <= child < len(nodes):
                        raise ValueError(f"the graph has no object {child}")
                    known.add(child)
                    below.append((child, (*path, name)))
        level = below
    return found


def _node(data: bytes) -> _TrackedObject:
    node = _TrackedObject()
    for number, value in fields(data):
        if number not in (1, 2):
            continue
        if not isinstance(value, bytes):
            raise ValueError("an object of the graph is damaged")
        inner = dict(fields(value))
        if number == 1:
            node.children[_text(inner.get(2, b""))] = _int(inner.get(1, 0))
        elif _text(inner.get(1, b"")) == VALUE:
            node.key = _text(inner.get(3, b""))
    return node


def _text(value: object) -> str:
    if not isinstance(value, bytes):
        raise ValueError("a name in the graph is none")
    return value.decode("utf-8", "surrogateescape")


def _int(value: object) -> int:
    if type(value) is not int:
        raise ValueError("a number in the graph is none")
    return value
