"""Find and read PyTorch's distributed checkpoints: the metadata, and from them the index.

A checkpoint is a directory with a file ``.metadata``, and ``.distcp`` files of streams of ``torch.save``. Of the
streams that hold chunks of tensors nothing is read here; `dtckpt.checkpoint.reading.torch_streams` finds their
elements when a client wants them. Processes that save without collectives write metadata of their own, one file each.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

from dtckpt.checkpoint.reading.dcp_companions import FORMAT_NAME, MERGED, with_companions
from dtckpt.checkpoint.reading.dcp_processes import merge_processes
from dtckpt.checkpoint.reading.dcp_values import Value, read_values, segments_of, tensor_of
from dtckpt.errors import DtckptError, TreeError
from dtckpt.format import tree as trees
from dtckpt.format.dcp_metadata import METADATA_NAME, DcpMetadata, parse_metadata
from dtckpt.format.dcp_tree import Path, structure_of
from dtckpt.format.pickle_syntax import MAX_PICKLE_NBYTES
from dtckpt.format.stored_pieces import ForeignIndex, ForeignTensor
from dtckpt.storage.folder import Folder

KIND = "dcp"
MARKERS = (METADATA_NAME, *MERGED, FORMAT_NAME)
"""The metadata, and files that may lie beside it."""
_OF_ONE_PROCESS = re.compile(r"__([0-9]{1,9})\.metadata")


def is_file(name: str, head: bytes) -> bool:  # noqa: ARG001  (the name is always this one)
    """Whether a file is the metadata of such a checkpoint."""
    return name == METADATA_NAME


def is_folder(names: Collection[str]) -> bool:
    """Whether a directory is such a checkpoint, by the names in it."""
    return METADATA_NAME in names or any(map(_OF_ONE_PROCESS.fullmatch, names))


def read_index(folder: Folder, names: Collection[str]) -> ForeignIndex:
    """Read the metadata and the plain values of a distributed checkpoint. Blocks: on storage.

    Args:
        folder: The directory.
        names: The names in it.

    Raises:
        CheckpointCorruptError: The metadata is damaged.
        CheckpointVersionError: It is of a class that this version does not know.
    """
    if METADATA_NAME in names:
        metadata = _read_metadata(folder, METADATA_NAME)
        index = _index(metadata, read_values(folder, metadata), [METADATA_NAME])
        return with_companions(index, folder, names)
    files = {int(match[1]): name for name in names if (match := _OF_ONE_PROCESS.fullmatch(name)) is not None}
    merged = merge_processes(folder, {rank: _read_metadata(folder, files[rank]) for rank in sorted(files)})
    return with_companions(_index(*merged, list(files.values())), folder, names)


def _read_metadata(folder: Folder, name: str) -> DcpMetadata:
    return parse_metadata(folder.read_whole(name, MAX_PICKLE_NBYTES), f"{folder}/{name}")


def _index(metadata: DcpMetadata, values: Mapping[str, Value | DtckptError], files: Sequence[str]) -> ForeignIndex:
    """Return the index of a checkpoint, of its metadata, values by flattened name, and files of the metadata."""
    nodes: dict[Path, trees.Node] = {}
    tensors: dict[str, ForeignTensor] = {}
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
    return ForeignIndex(KIND, tensors, structure_of(nodes), refused, (*files, *sorted(metadata.files)))
