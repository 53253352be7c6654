"""The last part of the proof of a conversion: the new files are read as anyone will read them.

The content of every slot has been compared when it was written. Here the reader of the format must find each tensor
at its slots, of the same shape and dtype, and the same values at the same paths.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dtckpt.checkpoint.converting.export import Export, ExportedTensor
from dtckpt.checkpoint.converting.file_plan import FilePlan
from dtckpt.checkpoint.reading.foreign_formats import FORMATS
from dtckpt.checkpoint.reading.torch_streams import PieceLocator
from dtckpt.errors import CheckpointCorruptError
from dtckpt.format import tree as trees
from dtckpt.format.stored_pieces import ForeignIndex
from dtckpt.layout.region import Region
from dtckpt.storage.failures import translate_errors
from dtckpt.storage.local_folder import LocalFolder

_Places = set[tuple[Region, str, int]]


def validate_files(kind: str, folder: Path, plans: Sequence[FilePlan], export: Export) -> None:
    """Check that new files hold what was exported. Blocks: on storage.

    Args:
        kind: Their format.
        folder: Their folder.
        plans: The files.
        export: What was exported.

    Raises:
        CheckpointCorruptError: They hold something else.
    """
    files = LocalFolder(folder)
    with translate_errors("read the new files back", folder, is_read=True):
        index = FORMATS[kind].read_index(files, [plan.name for plan in plans])
        if index.refused or index.tensors.keys() != {tensor.name for tensor in export.tensors}:
            raise _error("the tensors in them are others")
        slots: dict[str, _Places] = {}
        for plan in plans:
            for slot in plan.slots:
                if slot.nbytes:
                    slots.setdefault(slot.tensor.name, set()).add((slot.region, plan.name, slot.offset))
        for tensor in export.tensors:
            if not _is_at(index, files, export, tensor, slots.get(export.tied.get(tensor.name, tensor.name), set())):
                # Tied tensors may be stored each by itself.
                places = slots.get(tensor.name, set())
                if not _is_at(index, files, export, tensor, places):
                    raise _error(f"tensor {tensor.name!r} is not where it was written")
    if dict(trees.value_nodes(index.structure)) != dict(trees.value_nodes(export.structure)):
        raise _error("the plain values in them are others")


def _is_at(index: ForeignIndex, files: LocalFolder, export: Export, tensor: ExportedTensor, places: _Places) -> bool:
    """Whether the reader finds a tensor in C order at these places, or the array that a pickle holds."""
    found = index.tensors[tensor.name]
    if (found.shape, found.dtype) != (tensor.shape, tensor.dtype):
        return False
    if found.elements is not None:
        return not places and found.elements.tobytes() == np.ascontiguousarray(export.read_array(tensor.name)).tobytes()
    locator = PieceLocator(files)
    pieces = [locator.locate(found, piece) for piece in found.pieces]
    return not any(piece.strides for piece in pieces) and places == {
        (piece.region, piece.file, piece.offset) for piece in pieces
    }


def _error(reason: str) -> CheckpointCorruptError:
    return CheckpointCorruptError(f"the new files do not hold what was converted: {reason}; nothing was committed")
