"""The files beside a distributed checkpoint of PyTorch that libraries on top of it write: a part of the state, too.

::

    meta.pt         Lightning    everything but modules and optimizers; its keys are keys of the whole state
    common.pt       Megatron     everything but sharded tensors and objects; likewise
    metadata.json   Megatron     names the format of the directory, and holds no state

Both libraries put the items of their file beside the checkpoint's items when they load it, and so does dtckpt.
Any other file of ``torch.save`` is an item under its own name. A file of an unknown format is listed as unread.

Sources: lightning.fabric.utilities.load, and megatron.core.dist_checkpointing.serialization.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from contextlib import suppress
from dataclasses import replace

from dtckpt.checkpoint.reading import torch_files
from dtckpt.checkpoint.reading.dcp_values import Value, read_value
from dtckpt.errors import CheckpointVersionError, DtckptError, TreeError
from dtckpt.format import tree as trees
from dtckpt.format.dcp_metadata import StoredItem
from dtckpt.format.dcp_tree import merge
from dtckpt.format.names import name_of_key
from dtckpt.format.read_budget import ReadBudget
from dtckpt.format.stored_pieces import ForeignIndex
from dtckpt.storage.failures import MalformedError
from dtckpt.storage.folder import Folder

MERGED = ("meta.pt", "common.pt")
"""Files whose items are items of the whole state."""
FORMAT_NAME = "metadata.json"
ITEMS_SUFFIX = ".distcp"
MAX_FORMAT_NBYTES = 1 << 16
_HEAD_NBYTES = 64


def with_companions(index: ForeignIndex, folder: Folder, names: Collection[str]) -> ForeignIndex:
    """Return an index with the files that lie beside those it describes. Blocks: on storage.

    Args:
        index: The index of a distributed checkpoint.
        folder: Its directory.
        names: The names in it.
    """
    structure = index.structure
    tensors, refused = dict(index.tensors), dict(index.refused)
    files, unread = list(index.files), list(index.unread)
    for name in sorted(set(names).difference(index.files)):
        try:
            value = _read(folder, name)
        except (MalformedError, PermissionError):  # a directory, a fifo, or another user's file
            value = None
        if value is None:
            unread.append(name)
            continue
        files.append(name)
        if isinstance(value, Value) and (twice := value.tensors.keys() & tensors.keys()):
            value = TreeError(f"{name} has a tensor {min(twice)[:200]!r}, and so has the checkpoint beside it")
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
    return ForeignIndex(index.kind, tensors, structure, refused, tuple(files), tuple(unread))


def _read(folder: Folder, name: str) -> Value | DtckptError | None:
    """Return the value in a file, or the error that says why it is unreadable; None if its format is unknown."""
    if name == FORMAT_NAME:
        return _NO_STATE if _is_format(folder.read_whole(name, MAX_FORMAT_NBYTES)) else None
    # An item of another save begins like a file of ``torch.save``, too.
    if name.endswith(ITEMS_SUFFIX) or not torch_files.is_file(name, folder.read(name, 0, _HEAD_NBYTES)):
        return None
    where = f"{folder}/{name}"
    item = StoredItem(name, 0, torch_files.file_nbytes(folder, name))
    if name in MERGED and isinstance(value := read_value(folder, (), item, ReadBudget(where)), Value):
        items = trees.dict_of(value.node)
        if items is not None:
            return replace(value, node=items)
    value = read_value(folder, (name_of_key(name),), item, ReadBudget(where))
    if isinstance(value, Value):
        return replace(value, node={"dict": [[name, value.node]]})
    # A zip of another program, or a file of an old version.
    return None if isinstance(value, CheckpointVersionError) else value


def _is_format(data: bytes) -> bool:
    with suppress(ValueError, RecursionError):
        content = json.loads(data)
        return isinstance(content, dict) and isinstance(content.get("sharded_backend"), str)
    return False


_NO_STATE = Value({"dict": []}, {})
