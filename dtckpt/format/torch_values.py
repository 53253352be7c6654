"""State trees as objects for PyTorch's formats: which of their values PyTorch reads, and the objects themselves.

``torch.load`` makes by default only objects of some classes of its own and of Python's (``weights_only``).
``torch.distributed.checkpoint`` reads a plain value with all classes there are. Neither can make those of which a state
tree has the name of the class only, as dataclasses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dtckpt.errors import TreeError
from dtckpt.format import tree as trees
from dtckpt.format.containers import CONTAINERS

WEIGHTS_ONLY = frozenset(
    {
        *("dict", "list", "tuple", "set", "OrderedDict", "Counter"),
        *("value", "float", "complex", "bytes", "torch.Size", "torch.dtype", "torch.device"),
    }
)
"""The kinds of nodes, and of containers, that ``torch.load(weights_only=True)`` makes."""

ANY_CLASS = WEIGHTS_ONLY | {
    *("frozenset", "range", "numpy", "date", "datetime", "timedelta", "BytesIO"),
    *("PosixPath", "PurePosixPath", "PureWindowsPath"),
    *("defaultdict", "deque", "SimpleNamespace"),
}
"""Those that Python and numpy make."""


def build_object(
    node: trees.Node, kinds: frozenset[str], tensor: Callable[[str], Any], array: Callable[[str], Any], path: str = ""
) -> Any:
    """Return the object of a node.

    Args:
        node: The node.
        kinds: What may be in it: `WEIGHTS_ONLY` or `ANY_CLASS`.
        tensor: Returns what stands for a tensor, by name.
        array: Returns what stands for an array of numpy, by name.
        path: Where the node is in the tree.

    Raises:
        TreeError: Something else is in it.
    """
    ((kind, content),) = node.items()
    if kind == "tensor":
        return tensor(content)
    if kind == "ndarray":
        return array(content)
    if kind == "type":
        kind = content[0]
    if kind not in kinds:
        raise TreeError(
            f"cannot write the {kind} at {path!r}: PyTorch would not read it; convert without it, or save a plain "
            "value in its place"
        )
    if (opened := trees.items_of(node)) is None:
        return trees.build(node, tensor)
    base, items = opened
    children = {
        key: build_object(child, kinds, tensor, array, f"{path}/{key}" if path else str(key)) for key, child in items
    }
    made = children if base == "dict" else (list if base == "list" else tuple)(children.values())
    return CONTAINERS[kind].make(content[1], made) if "type" in node else made
