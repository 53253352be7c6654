"""The ``.metadata`` file of PyTorch's distributed checkpoints: which tensors there are, and where their chunks are.

The file is a pickle of dataclasses of ``torch.distributed.checkpoint``. This module reads them by their names and
fields, and never imports their classes (`dtckpt.checkpoint.foreign.pickle_syntax`)::

    Metadata.state_dict_metadata   name -> TensorStorageMetadata(properties, size, chunks) | BytesStorageMetadata
            .storage_data          MetadataIndex(name, offset of a chunk) -> _StorageInfo(file, offset, length)
            .planner_data          name -> the path in the state dict; None if the state dict was not flattened

Each item is a stream of ``torch.save`` within one of the ``.distcp`` files, and holds one chunk or one plain value.

PyTorch flattens a state dict before it saves it, so the metadata have the path of each leaf only. `structure_of` makes
the state tree of them. A key of a dict becomes a string in a path, a position in a list an int. Empty dicts and lists
have no path, so they are lost. Where a list lacks a position, `structure_of` puts None::

    ("model", "w")  ("steps", 0)  ("steps", 2)     ->    {"model": {"w": …}, "steps": [… , None, …]}

Megatron-Core of before 0.16 adds a field, ``mcore_data``, and 0.15 has a separate class for it. Its distributed
optimizer cuts a parameter into equal blocks, and flattens each; the field has the shape of the parameter::

    stored: size (2, 1, 2, 24), chunk [1, 0, 1, 9:24]     ->    elements 9 to 24 of the block at (1, 0, 4) of (2, 6, 8)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from dtckpt.checkpoint.foreign import pickle_names
from dtckpt.checkpoint.foreign.pickle_syntax import TENSOR_NBYTES, Global, Pairs, PickledCall, ReadBudget, parse_pickle
from dtckpt.checkpoint.reading.pieces import StreamRange, is_expanded_too_far, is_file_name
from dtckpt.errors import CheckpointCorruptError, CheckpointIncompleteError, CheckpointVersionError, TreeError
from dtckpt.format import tree as trees
from dtckpt.format.dtypes import DTYPES
from dtckpt.format.grid import MAX_RANK
from dtckpt.format.hash_work import validate_hashes
from dtckpt.format.names import name_of_key
from dtckpt.layout.flat_range import flat_boxes
from dtckpt.layout.region import Region

OWN_MARKER = (
    b"\x80\x02ca checkpoint of dtckpt; pass storage_reader=DtckptStorageReader(), from the package dtckpt\nload\n."
)
"""The content of this file in a checkpoint of ours: a pickle of a name in a module that there cannot be.

PyTorch's own reader shows the module's name in its error. No code runs, and dtckpt need not be installed."""

_LOGICAL_SHAPE = "nd_reformulated_orig_global_shape"
"""In ``mcore_data``, the shape of a tensor that is stored flattened."""
_MAX_NUMBER = 1 << 62
_MAX_FIELDS = 64
"""Bound on the fields of an object; PyTorch's have five at most."""
_KEY_NBYTES = 32

Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class StoredItem:
    """A stream of ``torch.save`` within a file.

    Args:
        file: Name of the file, relative to the checkpoint's folder.
        offset: Its first byte.
        nbytes: Its bytes.
        range: Which of its elements are meant; None: all of them.
    """

    file: str
    offset: int
    nbytes: int
    range: StreamRange | None = None

    @property
    def stop(self) -> int:
        """The byte behind it."""
        return self.offset + self.nbytes


@dataclass(frozen=True, slots=True)
class DcpTensor:
    """A tensor of a distributed checkpoint.

    Args:
        dtype: Name of the element type.
        shape: Global shape.
        chunks: The boxes that were saved, each with the item that holds it. Empty boxes are left out.
    """

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[tuple[Region, StoredItem], ...]


@dataclass(frozen=True, slots=True, eq=False)
class DcpMetadata:
    """The content of a ``.metadata`` file.

    Args:
        tensors: The tensors, by their flattened names.
        values: By flattened name, where each plain value is stored.
        paths: The path in the state dict by flattened name; of all tensors and values.
        refused: By flattened name, why a tensor or a value cannot be read.
        files: Names of the files that hold items.
    """

    tensors: Mapping[str, DcpTensor]
    values: Mapping[str, StoredItem]
    paths: Mapping[str, Path]
    refused: Mapping[str, TreeError] = field(default_factory=dict)
    files: frozenset[str] = frozenset()


def parse_metadata(data: bytes, where: str) -> DcpMetadata:
    """Parse a ``.metadata`` file.

    Args:
        data: Its content.
        where: Its name, for messages.

    Raises:
        CheckpointCorruptError: The metadata is malformed, or contradicts itself.
        CheckpointIncompleteError: The file marks a checkpoint of this library, whose manifest is not beside it.
        CheckpointVersionError: The metadata is of a class that this version does not know.
    """
    if data == OWN_MARKER:
        raise CheckpointIncompleteError(
            f"{where} marks a checkpoint of dtckpt, and its manifest is not there; pass the directory or URL that the "
            "checkpoint was saved to, or a copy of all files in it"
        )
    budget = ReadBudget(where)
    value = parse_pickle(data, where, budget)
    try:
        return _metadata(value, where, budget)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, CheckpointCorruptError | CheckpointVersionError):
            raise
        raise CheckpointCorruptError(f"{where} is malformed: {str(error)[:200]}; restore another checkpoint") from error


def _metadata(value: Any, where: str, budget: ReadBudget) -> DcpMetadata:
    metadata = _fields(
        value,
        pickle_names.DCP_OF_MEGATRON if _name(value) == pickle_names.DCP_OF_MEGATRON else pickle_names.DCP_METADATA,
    )
    shapes = _logical_shapes(metadata.get("mcore_data"))
    stored = [(_key(index), info) for index, info in _pairs(metadata["storage_data"])]
    validate_hashes([key for key, _ in stored])
    items = dict(stored)
    tensors: dict[str, DcpTensor] = {}
    values: dict[str, StoredItem] = {}
    refused: dict[str, TreeError] = {}
    for name, facts in _pairs(metadata["state_dict_metadata"]):
        try:
            if _name(facts) == pickle_names.DCP_BYTES:
                values[_text(name)] = _item(items, (name, None), where)
            else:
                tensor = _tensor(name, facts, items, where, budget)
                tensors[name] = _unflattened(name, tensor, shapes[name], budget) if name in shapes else tensor
        except TreeError as error:
            refused[name] = error
    names = [*tensors, *values, *refused]
    if len(set(names)) != len(names):
        raise ValueError("it names a tensor twice")
    planned = metadata.get("planner_data")
    given = {name: path for name, path in planned if type(name) is str} if type(planned) is Pairs else {}
    paths = {name: _path(given.get(name), name, budget) for name in names}
    validate_hashes(paths.values())
    validate_hashes([key for path in paths.values() for key in path if type(key) is int])
    files = frozenset(_text(_fields(info, pickle_names.DCP_INFO)["relative_path"]) for info in items.values())
    return DcpMetadata(tensors, values, paths, refused, files)


def _tensor(name: str, facts: Any, items: Mapping[Any, Any], where: str, budget: ReadBudget) -> DcpTensor:
    tensor = _fields(facts, pickle_names.DCP_TENSOR)
    _text(name)
    # dtype, layout, requires_grad, memory_format, pin_memory
    dtype = tensor["properties"]
    if _name(dtype) != pickle_names.DCP_PROPERTIES:
        raise TypeError(f"the properties of {name[:80]!r} are {_name(dtype)[:80]}")
    dtype = _global(dtype.state[0]).removeprefix("torch.")
    if dtype not in DTYPES:
        raise TreeError(f"cannot read tensor {name[:200]!r}: its dtype is {dtype[:40]}")
    shape = _sizes(tensor["size"])
    chunks = []
    for chunk in tensor["chunks"]:
        budget.take(TENSOR_NBYTES)
        box = _fields(chunk, pickle_names.DCP_CHUNK)
        region = Region(_sizes(box["offsets"]), _sizes(box["sizes"]))
        if not region.is_empty:
            chunks.append((region, _item(items, (name, region.offset), where)))
    nbytes = sum(region.numel for region, _ in chunks) * DTYPES[dtype].itemsize
    if is_expanded_too_far(nbytes, stored := sum(item.nbytes for _, item in chunks)):
        raise TreeError(f"cannot read tensor {name[:200]!r}: of its {nbytes} bytes, {stored} are stored")
    return DcpTensor(dtype, shape, tuple(chunks))


def _logical_shapes(data: Any) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors that Megatron stored flattened, by name."""
    facts = [(_text(name), _named(_pairs(each))) for name, each in _pairs(Pairs() if data is None else data)]
    return {name: _numbers(each[_LOGICAL_SHAPE]) for name, each in facts if each.get(_LOGICAL_SHAPE) is not None}


def _unflattened(name: str, tensor: DcpTensor, shape: tuple[int, ...], budget: ReadBudget) -> DcpTensor:
    """Return a tensor that was stored in flattened blocks in its logical shape."""
    *grid, numel = tensor.shape or (0,)
    is_grid = len(grid) == len(shape) and all(
        parts and size % parts == 0 for parts, size in zip(grid, shape, strict=True)
    )
    block = tuple(size // parts for parts, size in zip(grid, shape, strict=True)) if is_grid else ()
    if not is_grid or math.prod(block) != numel:
        raise ValueError(f"{name[:80]!r} of shape {shape} cannot be stored as {tensor.shape}")
    chunks = []
    for region, item in tensor.chunks:
        *index, start = region.offset
        if set(region.shape[:-1]) - {1}:
            raise ValueError(f"a chunk of {name[:80]!r} is in several of its blocks")
        origin = tuple(position * size for position, size in zip(index, block, strict=True))
        first = 0
        for box in flat_boxes(block, start, start + region.shape[-1]):
            budget.take(TENSOR_NBYTES)
            chunks.append((box.translate(origin), replace(item, range=StreamRange(region.shape, first))))
            first += box.numel
    return DcpTensor(tensor.dtype, shape, tuple(chunks))


def _key(index: Any) -> tuple[str, tuple[int, ...] | None]:
    """Return the name and the offset of a ``MetadataIndex``; its third field is only a hint."""
    fields = _fields(index, pickle_names.DCP_INDEX)
    offset = fields.get("offset")
    return _text(fields["fqn"]), None if offset is None else _sizes(offset)


def _item(items: Mapping[Any, Any], key: tuple[str, tuple[int, ...] | None], where: str) -> StoredItem:
    if key not in items:
        at = "" if key[1] is None else f" at {key[1]}"
        raise CheckpointCorruptError(
            f"{where} contradicts itself: it names {key[0][:200]!r}{at}, and no file for it; restore another checkpoint"
        )
    info = _fields(items[key], pickle_names.DCP_INFO)
    if info.get("transform_descriptors"):
        raise TreeError(
            f"cannot read {key[0][:200]!r}: it was saved through extensions of the writer; load it with PyTorch, and "
            "save it without"
        )
    file = _text(info["relative_path"])
    if not is_file_name(file):
        raise ValueError(f"{file[:80]!r} is no file of the checkpoint")
    return StoredItem(file, _number(info["offset"]), _number(info["length"]))


def _path(path: Any, name: str, budget: ReadBudget) -> Path:
    if path is None:
        return (name,)
    if type(path) is not tuple or not path or any(type(key) not in (str, int) for key in path):
        raise TypeError(f"the path of {name[:80]!r} is no tuple of keys")
    # Paths of many tensors may share one text, and are joined.
    budget.take(sum(len(key) if type(key) is str else _KEY_NBYTES for key in path))
    return path


def _sizes(value: Any) -> tuple[int, ...]:
    if _name(value) != "torch.Size":
        raise TypeError("a shape is no torch.Size")
    (sizes,) = value.arguments
    return _numbers(sizes)


def _numbers(sizes: Any) -> tuple[int, ...]:
    if type(sizes) is not tuple or len(sizes) > MAX_RANK:
        raise ValueError("a shape is no tuple of sizes")
    return tuple(map(_number, sizes))


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= _MAX_NUMBER:
        raise ValueError("a size or an offset is none")
    return value


def _text(value: Any) -> str:
    # Never shown if it is something else: the text of a hostile tuple takes for ever.
    if type(value) is not str:
        raise TypeError(f"{type(value).__name__} where a name should be")
    return value


def _pairs(value: Any) -> Pairs:
    if type(value) is not Pairs:
        raise TypeError(f"{type(value).__name__} where a dict should be")
    return value


def _fields(value: Any, kind: str) -> dict[str, Any]:
    """Return the fields of a dataclass of this name."""
    if _name(value) != kind:
        raise CheckpointVersionError(
            f"the checkpoint's .metadata holds {_name(value)[:120] or type(value).__name__}, expected {kind}; upgrade "
            "dtckpt, or convert the checkpoint with the library that wrote it"
        )
    return _named(_pairs(value.state))


def _named(pairs: Pairs) -> dict[str, Any]:
    # Many objects may have the same state.
    if len(pairs) > _MAX_FIELDS:
        raise ValueError(f"an object has {len(pairs)} fields")
    return {name: field for name, field in pairs if type(name) is str}


def _name(value: Any) -> str:
    return value.name if type(value) is PickledCall else ""


def _global(value: Any) -> str:
    if type(value) is not Global:
        raise TypeError("a dtype is no name")
    return value.name


MAX_GAP = 1 << 16
"""Bound on the missing items of a list, by the positions of the other items."""


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
    """Return a dict with the items of another dict, and dicts in both merged likewise.

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
