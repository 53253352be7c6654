"""Find and read files of ``torch.save``: the tree in the pickle, and where each tensor's elements are."""

from __future__ import annotations

from collections.abc import Collection

from dtckpt.checkpoint.reading.torch_streams import open_stream
from dtckpt.format.pickled_tree import read_tree
from dtckpt.format.stored_pieces import ForeignIndex
from dtckpt.storage.folder import Folder

KIND = "torch"
SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
_MAX_BITS = 60


def is_file(name: str, head: bytes) -> bool:
    """Whether a file is one of ``torch.save``: it begins as a zip, or as the pickles of the old format."""
    return head.startswith(b"PK\3\4") or (head.startswith(b"\x80\2") and name.endswith(SUFFIXES))


def is_folder(names: Collection[str]) -> bool:  # noqa: ARG001  (one file is one checkpoint)
    """Whether a directory is such a checkpoint: never."""
    return False


def read_index(folder: Folder, names: Collection[str]) -> ForeignIndex:
    """Read the tree of a file of ``torch.save``. Blocks: on storage.

    Args:
        folder: The folder that the file is in.
        names: Its name.

    Raises:
        CheckpointCorruptError: The file is cut short or malformed.
        CheckpointVersionError: It is in the format of an old version, or not one of ``torch.save``.
        TreeError: The object in it is neither a tensor nor a container nor a plain value.
    """
    (name,) = names
    stream = open_stream(folder, name, 0, _nbytes(folder, name))
    tree = read_tree(stream.zip.value, budget=stream.zip.budget)
    return ForeignIndex(KIND, stream.tensors(tree.leaves), tree.node, tree.refused)


def _nbytes(folder: Folder, name: str) -> int:
    """Return the size of a file. Storage is asked only whether there are so many bytes, as object stores can tell."""
    nbytes = 0
    for bit in reversed(range(_MAX_BITS)):
        if folder.find_short_file({name: nbytes | 1 << bit}) is None:
            nbytes |= 1 << bit
    return nbytes
