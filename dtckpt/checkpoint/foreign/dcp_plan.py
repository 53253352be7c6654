"""Plan distributed checkpoints of PyTorch: all bytes of the files but the elements, and where these go; pure.

A state tree is flattened as PyTorch flattens state dicts, so that PyTorch finds each leaf by the name that it expects.
A tensor is cut into rows, since PyTorch reads a chunk whole, even for a process that wants a part of it.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from dtckpt.checkpoint.foreign.dcp_metadata import Path
from dtckpt.checkpoint.foreign.torch_zip_plan import (
    ANY_CLASS,
    Elements,
    Segment,
    build_object,
    plan_zip,
    segment_nbytes,
)
from dtckpt.errors import TreeError
from dtckpt.format import tree as trees
from dtckpt.format.dtypes import DTYPES
from dtckpt.format.names import DCP_METADATA_NAME
from dtckpt.layout.region import Region

CHUNK_NBYTES = 16 << 20
"""Most bytes of a chunk, unless one row is larger."""
FILE_NBYTES = 4 << 30
_VERSION = "1.0.0"
"""Of PyTorch's format."""
_MAPPINGS = ("OrderedDict", "Counter", "defaultdict")
_PROTOCOL = 4


@dataclass(frozen=True, slots=True)
class ShapeAndDtype:
    """The facts of a tensor that the plan needs.

    Args:
        dtype: Name of the element type.
        shape: Global shape.
    """

    dtype: str
    shape: tuple[int, ...]


def flat_leaves(node: trees.Node) -> Iterator[tuple[Path, trees.Node]]:
    """Yield path and node of each leaf, as PyTorch takes state dicts apart.

    PyTorch takes apart dicts, and lists that hold tensors or dicts somewhere below. Everything else is one value:
    tuples, and lists of numbers.

    Raises:
        TreeError: The tree is no dict, or two leaves would have one name.
    """
    if _mapping_items(node) is None:
        raise TreeError("torch.distributed.checkpoint saves dicts; got a state tree that is none")
    names: set[str] = set()
    for path, leaf in _leaves(node, ()):
        if (name := flat_name(path)) in names:
            raise TreeError(f"two leaves of the state tree would both be named {name!r}; rename a key")
        names.add(name)
        yield path, leaf


def empty_dicts(node: trees.Node, path: Path = ()) -> Iterator[Path]:
    """Yield the paths of dicts without items: such a checkpoint has leaves only, so it does not keep them."""
    items = _mapping_items(node)
    if items is None:
        items = [] if _is_terminal(node) else list(enumerate(node["list"]))
    elif not items:
        yield path
    for key, child in items:
        yield from empty_dicts(child, (*path, key))


def flat_name(path: Path) -> str:
    """Return the name of a leaf in a distributed checkpoint."""
    return ".".join(map(str, path))


def _leaves(node: trees.Node, path: Path) -> Iterator[tuple[Path, trees.Node]]:
    if (items := _mapping_items(node)) is not None:
        for key, child in items:
            yield from _leaves(child, (*path, str(key)))
    elif _is_terminal(node):
        yield path, node
    else:
        for position, child in enumerate(node["list"]):
            yield from _leaves(child, (*path, position))


def _mapping_items(node: trees.Node) -> list[tuple[Any, trees.Node]] | None:
    """Return the items of a node that PyTorch would see a mapping in; None for others."""
    if "dict" in node or ("type" in node and node["type"][0] in _MAPPINGS):
        opened = trees.items_of(node)
        return None if opened is None else opened[1]
    return None


def _is_terminal(node: trees.Node) -> bool:
    if "list" not in node:
        return True
    return not any(
        "tensor" in child or _mapping_items(child) is not None or not _is_terminal(child) for child in node["list"]
    )


def plan_checkpoint(
    structure: trees.Node,
    tensors: Mapping[str, ShapeAndDtype],
    array: Callable[[str], Any],
    file_nbytes: int = FILE_NBYTES,
) -> dict[str, list[Segment]]:
    """Return the parts of each file of a distributed checkpoint, by file name; the metadata are the last.

    Args:
        structure: The state tree.
        tensors: Its tensors and arrays, by name.
        array: Returns an array of numpy, by name: it becomes a part of a pickle.
        file_nbytes: A file is closed once it has so many bytes.

    Raises:
        TreeError: Something in the tree cannot be in such a checkpoint.
    """
    plan = _Plan(file_nbytes)
    for path, node in flat_leaves(structure):
        name = flat_name(path)
        plan.paths[name] = path
        if "tensor" in node:
            plan.add_tensor(name, node["tensor"], tensors[node["tensor"]])
        else:
            plan.add_value(name, build_object(node, ANY_CLASS, _whole(tensors), array, "/".join(map(str, path))))
    return {**plan.files, DCP_METADATA_NAME: [plan.metadata()]}


def _whole(tensors: Mapping[str, ShapeAndDtype]) -> Callable[[str], Elements]:
    return lambda name: Elements(name, tensors[name].dtype, Region.full(tensors[name].shape))


class _Plan:
    """The files of a checkpoint, and an entry of the metadata for each item in them."""

    def __init__(self, file_nbytes: int) -> None:
        from torch.distributed.checkpoint import metadata  # here: PyTorch takes seconds to import

        self._classes = metadata
        self._file_nbytes = file_nbytes
        self.files: dict[str, list[Segment]] = {}
        self.paths: dict[str, Path] = {}
        self._kinds: dict[str, Any] = {}
        self._places: dict[Any, Any] = {}
        self._position = self._num_elements = 0

    def add_value(self, name: str, value: Any) -> None:
        """Add a plain value, which may hold tensors."""
        self._kinds[name] = self._classes.BytesStorageMetadata()
        self._add(self._classes.MetadataIndex(name), value)

    def add_tensor(self, name: str, source: str, facts: ShapeAndDtype) -> None:
        """Add a tensor.

        Args:
            name: Its name in the checkpoint.
            source: Its name in the source.
            facts: Its dtype and shape.
        """
        import torch  # here: PyTorch takes seconds to import

        chunks: list[Any] = []
        for region in row_boxes(facts):
            index = self._classes.MetadataIndex(name, torch.Size(region.offset), len(chunks))
            chunks.append(self._classes.ChunkStorageMetadata(torch.Size(region.offset), torch.Size(region.shape)))
            self._add(index, Elements(source, facts.dtype, region))
        properties = self._classes.TensorProperties(getattr(torch, facts.dtype))
        self._kinds[name] = self._classes.TensorStorageMetadata(properties, torch.Size(facts.shape), chunks)

    def _add(self, index: Any, value: Any) -> None:
        from dtckpt.comm.torch_private import storage_info  # here, as above

        if not self.files or self._position >= self._file_nbytes:
            self.files[f"__0_{len(self.files)}.distcp"] = []
            self._position = self._num_elements = 0
        name, segments = next(reversed(self.files.items()))
        added = plan_zip(value, self._num_elements)
        nbytes = sum(map(segment_nbytes, added))
        self._places[index] = storage_info(name, self._position, nbytes)
        segments += added
        self._position += nbytes
        self._num_elements += sum(isinstance(each, Elements) for each in added)

    def metadata(self) -> bytes:
        """Return the file of the metadata."""
        facts: dict[str, Any] = {
            "state_dict_metadata": self._kinds,
            "planner_data": self.paths,
            "storage_data": self._places,
            "storage_meta": self._classes.StorageMeta(),
            "version": _VERSION,
        }
        # Older versions of PyTorch have no version here.
        known = {field.name for field in fields(self._classes.Metadata)}
        metadata = self._classes.Metadata(**{name: fact for name, fact in facts.items() if name in known})
        return pickle.dumps(metadata, _PROTOCOL)


def row_boxes(facts: ShapeAndDtype) -> Iterator[Region]:
    """Yield the chunks of a tensor: rows of the first dim, up to `CHUNK_NBYTES`. An empty tensor has one chunk."""
    shape = facts.shape
    if not shape or 0 in shape:
        yield Region.full(shape)
        return
    row_nbytes = math.prod(shape[1:]) * DTYPES[facts.dtype].itemsize
    rows = max(1, CHUNK_NBYTES // row_nbytes)
    for start in range(0, shape[0], rows):
        yield Region((start, *[0] * (len(shape) - 1)), (min(rows, shape[0] - start), *shape[1:]))
