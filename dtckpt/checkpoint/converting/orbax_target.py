"""Plan the folder of an Orbax checkpoint, which Orbax's ``StandardCheckpointer`` restores without this library; pure.

Arrays are plain files of Zarr v2 without compression, as every version of Orbax reads them::

    _CHECKPOINT_METADATA   _METADATA   _strings.json
    <keys joined by dots>/.zarray
    <keys joined by dots>/0.0

Large tensors are cut into chunks, so that a reader of a part need not read everything.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dtckpt.checkpoint.converting.export import Export, ExportedTensor
from dtckpt.checkpoint.converting.file_plan import FilePlan, FileSlot
from dtckpt.checkpoint.foreign.orbax_files import CHECKPOINT_METADATA, OWN_NAMES, STRINGS, TREE_METADATA
from dtckpt.checkpoint.foreign.orbax_metadata import DICT, EMPTY_TYPES, SEQUENCE
from dtckpt.checkpoint.foreign.zarr_arrays import ZARR2_DTYPES, ZarrArray, document_of
from dtckpt.checkpoint.reading.pieces import is_file_name
from dtckpt.errors import DTypeError, RegionNotFoundError, TensorNameError, TreeError
from dtckpt.format import tree as trees
from dtckpt.format.codecs import NO_CODEC
from dtckpt.format.grid import ChunkGrid
from dtckpt.format.plain_values import decode_value

CHUNK_NBYTES = 64 << 20
_HANDLER = "orbax.checkpoint._src.handlers.standard_checkpoint_handler.StandardCheckpointHandler"
_INT64 = 1 << 63

_Keys = tuple[tuple[str, int], ...]
"""The keys of a path, each with its type."""


def is_own(path: Path) -> bool:
    """Whether an entry of a directory is one of such a checkpoint: a file of Orbax, or the folder of an array."""
    return OWN_NAMES.fullmatch(path.name) is not None or next(path.glob("**/.zarray"), None) is not None


def plan_folder(export: Export, max_file_nbytes: int) -> list[FilePlan]:
    """Plan the files.

    Args:
        export: The tensors and values to write.
        max_file_nbytes: Bound on the elements' bytes of a file.

    Raises:
        DTypeError: Zarr v2 lacks the dtype of a tensor.
        RegionNotFoundError: A tensor was saved in part.
        TensorNameError: Two tensors would have one name, or a name is none of a file.
        TreeError: Orbax has no such plain value.
    """
    tensors = {tensor.name: tensor for tensor in export.tensors}
    entries: dict[str, Any] = {}
    strings: dict[str, str] = {}
    plans: dict[str, FilePlan] = {}
    for keys, node in _leaves(export.structure):
        name = ".".join(key for key, _ in keys)
        (kind, content), *_ = node.items()
        if kind in ("tensor", "ndarray"):
            value_type, files = "np.ndarray", _array_plans(name, tensors[content], max_file_nbytes)
        else:
            value_type, value = _value(kind, content, name)
            files = _number_plans(name, value) if value_type == "scalar" else []
            if value_type == "string":
                strings[name] = value
        is_empty = value_type in ("None", *EMPTY_TYPES)
        metadata = {
            "key_metadata": [{"key": key, "key_type": key_type} for key, key_type in keys],
            "value_metadata": {"value_type": value_type, "skip_deserialize": is_empty},
        }
        if not is_empty and (not is_file_name(name) or OWN_NAMES.fullmatch(name.split("/")[0])):
            raise TensorNameError(f"an array of Orbax cannot have the name {name[:200]!r}; give it another by a rename")
        entries[repr(tuple(key for key, _ in keys))] = metadata
        for plan in files:
            if plan.name in plans:
                raise TensorNameError(f"two arrays of Orbax would have the name {name[:200]!r}; rename one")
            plans[plan.name] = plan
    _validate_files(plans)
    tree = {"tree_metadata": entries, "use_ocdbt": False, "use_zarr3": False, "custom_metadata": None}
    checkpoint: dict[str, Any] = {"item_handlers": _HANDLER, "metrics": {}, "performance_metrics": {}}
    checkpoint |= {"init_timestamp_nsecs": None, "commit_timestamp_nsecs": None, "custom_metadata": {}}
    documents: dict[str, Mapping[str, Any]] = {
        TREE_METADATA: tree | {"store_array_data_equal_to_fill_value": True},
        **({STRINGS: strings} if strings else {}),
        CHECKPOINT_METADATA: checkpoint,
    }
    return [*plans.values(), *(_document(name, content) for name, content in documents.items())]


def _leaves(node: trees.Node, keys: _Keys = ()) -> Iterator[tuple[_Keys, trees.Node]]:
    """Yield the keys and the node of every leaf; an empty container is one."""
    opened = trees.items_of(node)
    if opened is None:
        yield keys, node
        return
    kind, items = opened
    if not items:
        yield keys, {kind: []}
    for key, child in items:
        yield from _leaves(child, (*keys, (str(key), DICT if kind == "dict" else SEQUENCE)))


def _value(kind: str, content: Any, name: str) -> tuple[str, Any]:
    """Return Orbax's type of a plain value, and the value."""
    if kind in ("dict", "list", "tuple"):
        return kind.capitalize(), None
    value = decode_value(kind, content)
    if value is None:
        return "None", None
    if isinstance(value, str):
        return "string", value
    if type(value) in (bool, int, float) and not (type(value) is int and not -_INT64 <= value < _INT64):
        return "scalar", value
    raise TreeError(
        f"Orbax keeps numbers of 64 bits, strings and None only; got {type(value).__name__} at {name[:200]!r}; leave "
        "it out by select"
    )


def _number_plans(name: str, value: float) -> list[FilePlan]:
    elements = np.asarray(value)
    array = ZarrArray(name, ChunkGrid((), ()), elements.dtype.name, NO_CODEC)
    data = elements.tobytes()
    chunk = FilePlan(array.key(()), len(data), frame=lambda _: [(0, data)])
    return [_document(f"{name}/.zarray", document_of(array)), chunk]


def _array_plans(name: str, tensor: ExportedTensor, max_file_nbytes: int) -> list[FilePlan]:
    if tensor.dtype not in ZARR2_DTYPES:
        raise DTypeError(
            f"Orbax cannot hold tensor {tensor.name!r} of dtype {tensor.dtype}; expected one of "
            f"{', '.join(ZARR2_DTYPES)}; leave it out, or convert it"
        )
    if not tensor.info.is_whole:
        raise RegionNotFoundError(f"tensor {tensor.info.name!r} was saved in part; leave it out")
    grid = _grid(tensor.shape, tensor.itemsize, min(CHUNK_NBYTES, max_file_nbytes))
    array = ZarrArray(name, grid, tensor.dtype, NO_CODEC)
    plans = [_document(f"{name}/.zarray", document_of(array))]
    for number in range(grid.num_chunks):
        index = grid.index(number)
        # The chunk at an edge is padded: the bytes behind the slot are zeros.
        plans.append(FilePlan(array.key(index), array.chunk_nbytes, (FileSlot(tensor, grid.region(index), 0),)))
    return plans


def _grid(shape: Sequence[int], itemsize: int, max_nbytes: int) -> ChunkGrid:
    """Return a grid whose chunks are runs of rows: it cuts one dim and leaves all later dims whole."""
    chunk = [max(1, size) for size in shape]
    for dim in range(len(shape)):
        row_nbytes = math.prod(chunk[dim + 1 :]) * itemsize
        if row_nbytes * chunk[dim] <= max_nbytes:
            break
        chunk[dim] = max(1, max_nbytes // row_nbytes)
    return ChunkGrid(tuple(shape), tuple(chunk))


def _document(name: str, content: Mapping[str, Any]) -> FilePlan:
    data = json.dumps(content).encode()
    return FilePlan(name, len(data), frame=lambda _: [(0, data)])


def _validate_files(names: Mapping[str, FilePlan]) -> None:
    """Refuse names of arrays that would make one path a file and a folder."""
    for name in names:
        parts = name.split("/")
        for end in range(1, len(parts)):
            if (above := "/".join(parts[:end])) in names:
                raise TensorNameError(f"Orbax would need {above[:200]!r} as a file and as a folder; rename an array")
