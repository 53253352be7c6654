"""Find and read PyTorch's distributed checkpoints: the metadata, the files beside them, and from both the index.

A checkpoint is a directory with a file ``.metadata``, and ``.distcp`` files of streams of ``torch.save``. Of the
streams that hold chunks of tensors nothing is read here; `dtckpt.checkpoint.foreign.torch_files` finds their
elements when a client wants them. Each process that saves without collectives writes its own metadata file.

Libraries on top of PyTorch write companions beside it, which are a part of the state, too::

    meta.pt         Lightning    everything but modules and optimizers; its keys are keys of the whole state
    common.pt       Megatron     everything but sharded tensors and objects; likewise
    metadata.json   Megatron     names the format of the directory, and holds no state

From version 0.19 on, Megatron has an item in place of ``common.pt`` (`dtckpt.checkpoint.foreign.megatron`). Both
libraries put the items of their file beside the checkpoint's items when they load it, and so does dtckpt. Any other
file of ``torch.save`` is an item under its own name. A file of an unknown format is listed as unread.

Sources: lightning.fabric.utilities.load, and megatron.core.dist_checkpointing.serialization.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from dtckpt.checkpoint.foreign import megatron, torch_files
from dtckpt.checkpoint.foreign.dcp_metadata import DcpMetadata, Path, StoredItem, merge, parse_metadata, structure_of
from dtckpt.checkpoint.foreign.dcp_processes import (
    Value,
    merge_processes,
    read_value,
    read_values,
    segments_of,
    tensor_of,
)
from dtckpt.checkpoint.foreign.pickle_syntax import MAX_PICKLE_NBYTES, ReadBudget
from dtckpt.checkpoint.reading.pieces import PieceIndex, PieceTensor
from dtckpt.errors import CheckpointCorruptError, CheckpointVersionError, DtckptError, TreeError
from dtckpt.format import tree as trees
from dtckpt.format.names import DCP_METADATA_NAME, name_of_key
from dtckpt.storage.failures import MalformedError
from dtckpt.storage.folder import Folder

KIND = "dcp"
COMMON = "common.pt"
MERGED = ("meta.pt", COMMON)
"""Files whose items are items of the whole state."""
FORMAT_NAME = "metadata.json"
ITEMS_SUFFIX = ".distcp"
MAX_FORMAT_NBYTES = 1 << 16
_HEAD_NBYTES = 64
MARKERS = (DCP_METADATA_NAME, *MERGED, FORMAT_NAME)
"""The metadata, and files that may be beside it."""
_OF_ONE_PROCESS = re.compile(r"__([0-9]{1,9})\.metadata")


def is_file(name: str, head: bytes) -> bool:  # noqa: ARG001  (the name is always this one)
    """Whether a file is the metadata of such a checkpoint."""
    return name == DCP_METADATA_NAME


def is_folder(names: Collection[str]) -> bool:
    """Whether a directory is such a checkpoint, by the names in it."""
    return DCP_METADATA_NAME in names or any(map(_OF_ONE_PROCESS.fullmatch, names))


def read_index(folder: Folder, names: Collection[str]) -> PieceIndex:
    """Read the metadata and the plain values of a distributed checkpoint. Blocks: on storage.

    Args:
        folder: The directory.
        names: The names in it.

    Raises:
        CheckpointCorruptError: The metadata is damaged.
        CheckpointVersionError: The metadata is of a class that this version does not know.
    """
    if DCP_METADATA_NAME in names:
        metadata, common = _without_common(folder, _read_metadata(folder, DCP_METADATA_NAME))
        index = _index(metadata, read_values(folder, metadata), [DCP_METADATA_NAME])
        return with_companions(index, folder, names, common)
    files = {int(match[1]): name for name in names if (match := _OF_ONE_PROCESS.fullmatch(name)) is not None}
    merged = merge_processes(folder, {rank: _read_metadata(folder, files[rank]) for rank in sorted(files)})
    return with_companions(_index(*merged, list(files.values())), folder, names)


def _read_metadata(folder: Folder, name: str) -> DcpMetadata:
    return parse_metadata(folder.read_whole(name, MAX_PICKLE_NBYTES), f"{folder}/{name}")


def _without_common(folder: Folder, metadata: DcpMetadata) -> tuple[DcpMetadata, dict[str, Value | DtckptError]]:
    """Return the metadata without the item of Megatron's common state, and that item's value by its name."""
    item = metadata.values.get(megatron.COMMON_ITEM)
    if item is None or metadata.paths[megatron.COMMON_ITEM] != (megatron.COMMON_ITEM,):
        return metadata, {}
    try:
        budget = ReadBudget(f"{folder}/{item.file}")
        value: Value | DtckptError = read_value(folder, (), item, budget, find=megatron.only_item)
    except FileNotFoundError:
        value = CheckpointCorruptError(f"{folder}/{item.file} is missing; restore another checkpoint")
    values = {name: each for name, each in metadata.values.items() if name != megatron.COMMON_ITEM}
    paths = {name: each for name, each in metadata.paths.items() if name != megatron.COMMON_ITEM}
    return replace(metadata, values=values, paths=paths), {megatron.COMMON_ITEM: value}


def _index(metadata: DcpMetadata, values: Mapping[str, Value | DtckptError], files: Sequence[str]) -> PieceIndex:
    """Return the index of a checkpoint, of its metadata, values by flattened name, and files of the metadata."""
    nodes: dict[Path, trees.Node] = {}
    tensors: dict[str, PieceTensor] = {}
    refused: dict[str, DtckptError] = {}
    for flat, path in metadata.paths.items():
        name = "/".join(segments_of(path))
        value = values.get(flat, metadata.refused.get(flat))
        if isinstance(value, DtckptError):
            refused[name] = value
            continue
        added = {name: tensor_of(name, metadata.tensors[flat])} if value is None else value.tensors
        if twice := added.keys() & tensors.keys():
            refused[name] = TreeError(f"two tensors of the checkpoint would both be named {min(twice)!r}")
            continue
        tensors.update(added)
        nodes[path] = {"tensor": name} if value is None else value.node
        if value is not None:
            refused.update(value.refused)
    return PieceIndex(KIND, tensors, structure_of(nodes), refused, (*files, *sorted(metadata.files)))


def with_companions(
    index: PieceIndex,
    folder: Folder,
    names: Collection[str],
    items: Mapping[str, Value | DtckptError] = MappingProxyType({}),
) -> PieceIndex:
    """Return an index with the files that lie beside those it describes. Blocks: on storage.

    Args:
        index: The index of a distributed checkpoint.
        folder: Its directory.
        names: The names in it.
        items: Values at the top of the tree, as companions have them, by name.
    """
    structure = index.structure
    tensors, refused = dict(index.tensors), dict(index.refused)
    files, unread = list(index.files), list(index.unread)
    companions = dict(items)
    for name in sorted(set(names).difference(index.files)):
        try:
            value = _read(folder, name)
        except (MalformedError, PermissionError):  # a directory, a fifo, or another user's file
            value = None
        if value is None:
            unread.append(name)
            continue
        files.append(name)
        companions[name] = value
    for name, found in companions.items():
        value = _as_items(name, found, tensors)
        if isinstance(value, DtckptError):
            refused[name] = value
            continue
        structure, clashes = merge(structure, value.node)
        refused |= value.refused
        refused |= {
            path: TreeError(f"{path[:200]!r} is in {name}, and in the checkpoint beside it") for path in clashes
        }
        kept = set(trees.tensor_names(structure))
        tensors |= {each: tensor for each, tensor in value.tensors.items() if each in kept}
    notes: tuple[str, ...] = ()
    if FORMAT_NAME in files:
        notes = tuple(megatron.notes_of(tensors, structure))
        if not companions.keys() & {COMMON, megatron.COMMON_ITEM}:
            refused[COMMON] = CheckpointCorruptError(
                f"{folder}/{COMMON} is missing, which Megatron writes beside the tensors; use another copy, or restore "
                "a part of the tree"
            )
    return PieceIndex(index.kind, tensors, structure, refused, tuple(files), tuple(unread), notes)


def _as_items(name: str, value: Value | DtckptError, tensors: Mapping[str, PieceTensor]) -> Value | DtckptError:
    """Return a companion as a dict of items that may lie beside some tensors."""
    if isinstance(value, DtckptError):
        return value
    if (top := trees.dict_of(value.node)) is None:
        return TreeError(f"{name} holds no dict, expected items of the state")
    if twice := value.tensors.keys() & tensors.keys():
        return TreeError(f"{name} has a tensor {min(twice)[:200]!r}, and so has the checkpoint beside it")
    return replace(value, node=top)


def _read(folder: Folder, name: str) -> Value | DtckptError | None:
    """Return the value in a file, or the error that says why it is unreadable; None if its format is unknown."""
    if name == FORMAT_NAME:
        is_format = megatron.is_format(folder.read_whole(name, MAX_FORMAT_NBYTES), f"{folder}/{name}")
        return _NO_STATE if is_format else None
    # An item of another save begins like a file of ``torch.save``, too.
    if name.endswith(ITEMS_SUFFIX) or not torch_files.is_file(name, folder.read(name, 0, _HEAD_NBYTES)):
        return None
    where = f"{folder}/{name}"
    item = StoredItem(name, 0, torch_files.file_nbytes(folder, name))
    if name in MERGED:
        value = read_value(folder, (), item, ReadBudget(where))
        if isinstance(value, Value) and trees.dict_of(value.node) is not None:
            return value
    value = read_value(folder, (name_of_key(name),), item, ReadBudget(where))
    if isinstance(value, Value):
        return replace(value, node={"dict": [[name, value.node]]})
    # A zip of another program, or a file of an old version.
    return None if isinstance(value, CheckpointVersionError) else value


_NO_STATE = Value({"dict": []}, {})
