"""Find and read files of ``torch.save``: the tree in the pickle, and where each tensor's elements are.

A model of transformers may lie in several, which an index names: ``pytorch_model.bin.index.json``.
"""

from __future__ import annotations

from collections.abc import Collection

from dtckpt.checkpoint.reading.torch_streams import open_stream
from dtckpt.errors import CheckpointCorruptError, DtckptError
from dtckpt.format import tree as trees
from dtckpt.format.pickled_tree import read_tree
from dtckpt.format.safetensors_index import MAX_INDEX_NBYTES, parse_weight_map
from dtckpt.format.stored_pieces import ForeignIndex, ForeignTensor
from dtckpt.storage.folder import Folder

KIND = "torch"
SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
INDEX_SUFFIX = ".bin.index.json"
MARKERS = (f"pytorch_model{INDEX_SUFFIX}",)
_MAX_BITS = 60


def is_file(name: str, head: bytes) -> bool:
    """Whether a file is one of ``torch.save``, as its begin tells: a zip, or pickles of the old format; or an index."""
    is_old = head.startswith(b"\x80\2") and name.endswith(SUFFIXES)
    return head.startswith(b"PK\3\4") or is_old or name.endswith(INDEX_SUFFIX)


def is_folder(names: Collection[str]) -> bool:
    """Whether a directory is such a checkpoint: if it has an index of several files."""
    return any(name.endswith(INDEX_SUFFIX) for name in names)


def read_index(folder: Folder, names: Collection[str]) -> ForeignIndex:
    """Read the tree of a file of ``torch.save``, or of the files that an index names. Blocks: on storage.

    Args:
        folder: The folder that the file is in.
        names: The name of the file or of the index; or all names in the folder, if one of them is an index.

    Raises:
        CheckpointCorruptError: A file is missing, cut short or malformed; or two have a tensor of one name.
        CheckpointVersionError: A file is in the format of an old version, or no file of ``torch.save``.
        TreeError: The object in a file is neither a tensor nor a container nor a plain value.
    """
    indexes = sorted(name for name in names if name.endswith(INDEX_SUFFIX))
    if not indexes:
        (name,) = names
        return _read_file(folder, name)
    if len(indexes) > 1:
        raise CheckpointCorruptError(f"{folder} holds several models: {', '.join(indexes)[:200]}; open one by its path")
    return _read_parts(folder, indexes[0], names)


def _read_file(folder: Folder, name: str) -> ForeignIndex:
    try:
        stream = open_stream(folder, name, 0, file_nbytes(folder, name))
    except FileNotFoundError:
        raise CheckpointCorruptError(f"{folder}/{name} is missing") from None
    tree = read_tree(stream.zip.value, budget=stream.zip.budget)
    return ForeignIndex(KIND, stream.tensors(tree.leaves), tree.node, tree.refused, files=(name,))


def _read_parts(folder: Folder, name: str, names: Collection[str]) -> ForeignIndex:
    index = parse_weight_map(folder.read_whole(name, MAX_INDEX_NBYTES), name)
    tensors: dict[str, ForeignTensor] = {}
    refused: dict[str, DtckptError] = {}
    items = []
    for file in sorted(set(index.weight_map.values())):
        part = _read_file(folder, file)
        if (structure := trees.dict_of(part.structure)) is None:
            raise CheckpointCorruptError(f"{folder}/{file} holds no dict of tensors, which a part of a model is")
        if twice := part.tensors.keys() & tensors.keys():
            raise CheckpointCorruptError(f"tensor {min(twice)[:200]!r} is in two files of {folder}, one is {file}")
        tensors |= part.tensors
        refused |= part.refused
        items += structure["dict"]
    refused |= index.absent(str(folder), {*tensors, *refused})
    files = (*sorted(set(index.weight_map.values())), name)
    unread = (*sorted(set(names).difference(files)), *index.unread())
    return ForeignIndex(KIND, tensors, {"dict": items}, refused, files, unread)


def file_nbytes(folder: Folder, name: str) -> int:
    """Return the size of a file. Storage is asked only whether there are so many bytes, as object stores can tell."""
    nbytes = 0
    for bit in reversed(range(_MAX_BITS)):
        if folder.find_short_file({name: nbytes | 1 << bit}) is None:
            nbytes |= 1 << bit
    return nbytes
