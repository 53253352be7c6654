"""State trees as DCP sees them: a flat dict of items, each by a key.

DCP joins the keys that lead to an item with dots. Dicts, and lists that hold tensors or dicts, are opened; all else is
one item, which DCP would pickle. We keep such an item as a part of the state tree (`dtckpt.format.tree`)::

    {"model": {"w": tensor}, "groups": [{"lr": 0.1}], "betas": (0.9, 0.99)}

    key           path                    tensor       in the tree
    model.w       ("model", "w")          model/w      {"tensor": "model/w"}
    groups.0.lr   ("groups", 0, "lr")                  {"value": 0.1}
    betas         ("betas",)                           {"tuple": [{"value": 0.9}, {"value": 0.99}]}
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from dtckpt.checkpoint.foreign.dcp_metadata import Path, structure_of
from dtckpt.checkpoint.leaves import host_array, is_tensor
from dtckpt.checkpoint.reading.checkpoint import Checkpoint
from dtckpt.checkpoint.shards import Shards
from dtckpt.dtensor import DTensor, torch_interop
from dtckpt.errors import TreeError
from dtckpt.format import tree as trees
from dtckpt.format.names import name_of_key

_OPENED = ("dict", "OrderedDict", "Counter", "defaultdict", "mappingproxy", "PerClient", "TensorParts")
"""Kinds of containers that DCP opens."""


def path_of(key: str, mappings: Iterable[object]) -> Path:
    """Return the path in the state tree of a key.

    Args:
        key: The key.
        mappings: The planners' records of the paths: DCP's planners return ``{key: path}``. The first that has the key
            counts. Without any, as where nothing is flattened, the key itself is the path.
    """
    for mapping in mappings:
        path: Any = mapping.get(key) if isinstance(mapping, Mapping) else None
        if is_path(path):
            return tuple(path)
    return (key,)


def is_path(path: object) -> bool:
    """Whether this is a path in a state tree."""
    return isinstance(path, tuple | list) and len(path) > 0 and all(isinstance(key, str | int) for key in path)


def name_of(path: Path) -> str:
    """Return the name of the tensor at a path."""
    return "/".join(name_of_key(str(key)) for key in path)


def encode_item(value: Any, key: str, path: Path) -> tuple[trees.Node, dict[str, Any]]:
    """Return the node of an item that is no tensor, and the tensors and arrays below it, by name.

    Raises:
        TreeError: A state tree cannot hold the value, or a part of it is on other ranks. The text names the key.
    """
    try:
        leaves, node = trees.flatten(value, is_tensor, at=name_of(path))
    except TreeError as error:
        raise TreeError(f"item {key!r}: {error.message}; nothing is pickled") from None
    for name, leaf in leaves.items():
        if isinstance(leaf, DTensor | Shards) or torch_interop.is_torch_dtensor(leaf):
            raise TreeError(
                f"item {key!r}: DCP has one rank write the {type(value).__name__} as a whole, which holds the sharded "
                f"tensor {name!r}; put a DTensor into a dict or a list, and save with flatten_state_dict=True"
            )
    return node, leaves


def tree_of(nodes: Mapping[Path, trees.Node]) -> trees.Node:
    """Return the state tree of items.

    Raises:
        TreeError: Two items are at one place.
    """
    try:
        return structure_of(nodes)
    except ValueError as error:
        raise TreeError(f"the items of all ranks give no state tree: {error}") from error


@dataclass(frozen=True, slots=True)
class Item:
    """An item of a checkpoint: its path in the state tree, and its node."""

    path: Path
    node: trees.Node


class StateItems:
    """The items of a checkpoint.

    Args:
        checkpoint: The checkpoint, open.

    Attributes:
        by_key: The items by key, as DCP flattens the state tree.
        whole: The containers at the top of the tree, by key, which a planner with ``flatten_state_dict=False`` asks for
            as one item.

    Raises:
        TreeError: Two items have one key.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self.by_key: dict[str, Item] = {}
        for item in _items(checkpoint.structure):
            key = ".".join(map(str, item.path))
            if self.by_key.setdefault(key, item) is not item:
                raise TreeError(
                    f"DCP cannot load {checkpoint.path}: two of its tensors or values have the key {key!r}; use "
                    "dtckpt.restore"
                )
        opened = trees.items_of(checkpoint.structure)
        tops = ((str(key), Item((str(key),), node)) for key, node in (opened[1] if opened else ()))
        self.whole = {key: item for key, item in tops if key not in self.by_key}

    def value(self, key: str) -> Any:
        """Return the value of an item that is no tensor. Tensors and arrays in it are read.

        Raises:
            TreeError: There are sharded tensors in it, which one rank cannot load as a whole.
        """
        item = self.by_key.get(key) or self.whole[key]
        arrays = set(trees.array_names(item.node))

        def read(name: str) -> Any:
            if self._checkpoint.info(name).layout is not None:
                raise TreeError(
                    f"item {key!r} holds the sharded tensor {name!r}, which DCP would load as a whole; load with "
                    "flatten_state_dict=True"
                )
            tensor = self._checkpoint.read(name)
            return host_array(tensor) if name in arrays else tensor

        return trees.build(item.node, read)

    def stream(self, key: str) -> io.BytesIO:
        """Return an item as the bytes that DCP's planner expects: ``torch.save`` makes them here and now."""
        stream = io.BytesIO()
        torch.save(self.value(key), stream)
        stream.seek(0)
        return stream


def _items(structure: trees.Node) -> Iterator[Item]:
    opened = trees.items_of(structure)
    if opened is None:
        name = trees.name_of_tensor(structure) or "value"
        yield Item((name,), structure)
        return
    for key, node in opened[1]:
        yield from _items_below(node, (str(key),))


def _items_below(node: trees.Node, path: Path) -> Iterator[Item]:
    if not _is_opened(node):
        yield Item(path, node)
        return
    kind, below = trees.items_of(node) or ("", [])
    for key, child in below:
        yield from _items_below(child, (*path, str(key) if kind == "dict" else key))


def _is_opened(node: trees.Node) -> bool:
    """Whether DCP opens a container: it does if it is a dict, or a list that holds tensors or something it opens."""
    ((kind, content),) = node.items()
    if kind == "list":
        return any("tensor" in child or _is_opened(child) for child in content)
    return (content[0] if kind == "type" else kind) in _OPENED
