"""`FilesConversion`: write files of another library from any checkpoint, and read them back by the format's reader.

The content of every slot is compared when it is written. At last the reader of the format (`validate_files`) must find
each tensor at its slots, with the same shape and dtype, and the same values at the same paths.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from dtckpt.checkpoint.converting.export import Export, ExportedTensor
from dtckpt.checkpoint.converting.file_plan import FilePlan
from dtckpt.checkpoint.converting.targets import FileTarget
from dtckpt.checkpoint.converting.write_files import FileBudget, FileWriter
from dtckpt.checkpoint.foreign.chunk_files import ChunkIndex, ChunkTensor
from dtckpt.checkpoint.foreign.formats import FORMATS
from dtckpt.checkpoint.foreign.torch_files import PieceLocator
from dtckpt.checkpoint.reading.checkpoint import Checkpoint
from dtckpt.checkpoint.reading.pieces import PieceIndex
from dtckpt.checkpoint.resharding.checkpoint_source import Progress
from dtckpt.errors import CheckpointCorruptError, ConfigError
from dtckpt.format import tree as trees
from dtckpt.format.digest import bytes_digest
from dtckpt.layout.region import Region
from dtckpt.storage.failures import translate_errors
from dtckpt.storage.local_folder import LocalFolder
from dtckpt.storage.location import Location
from dtckpt.storage.new_files import check_new, new_files, validate_free_space


class FilesConversion:
    """A conversion to files of another library, planned.

    Args:
        checkpoint: The source.
        export: The tensors and values to write.
        where: The target.
        target: The format.
        max_memory: Bound on the bytes of tensor data in memory.
        max_file_nbytes: Bound on the bytes of tensor data in one of several files.
        overwrite: Whether files of the same format, or a checkpoint of this library, may be replaced.

    Attributes:
        path: The target.
        plans: The files.
        files: Bytes of each file, by name.

    Raises:
        ConfigError: The target is no path, the format has no such target, or ``max_memory`` is too small.
        DTypeError: The format lacks a tensor's dtype.
        TensorNameError: Two tensors would have one name, or the format cannot store a tensor's name.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        export: Export,
        where: Location,
        target: FileTarget,
        *,
        max_memory: int,
        max_file_nbytes: int,
        overwrite: bool,
    ) -> None:
        if not isinstance(where, Path):
            raise ConfigError(
                f"files of {target.kind} are written to a file system; got {where}; convert to a path, and copy them"
            )
        self._checkpoint = checkpoint
        self._export = export
        self.path = where
        self._target = target
        self._overwrite = overwrite
        self._budget = FileBudget.of(checkpoint, max_memory)
        self._is_file = where.name.endswith(target.suffixes) or target.plan_folder is None
        if self._is_file and target.plan_file is not None:
            self.plans = target.plan_file(export, where.name)
        elif target.plan_folder is not None:
            self.plans = target.plan_folder(export, max_file_nbytes)
        self.files: Mapping[str, int] = {plan.name: plan.nbytes for plan in self.plans}

    def check(self) -> None:
        """Check that the target may be written. Raises: `CheckpointExistsError`."""
        check_new(self.path, self._target.is_own, is_file=self._is_file, overwrite=self._overwrite)

    def run(self, progress: Progress | None) -> Mapping[str, int]:
        """Write and commit; return the content digests of the new tensors by name. Blocks: on storage.

        Raises:
            CheckpointError: Storage refused, the source is damaged, or a tensor would change.
        """
        with new_files(self.path, self.check, is_file=self._is_file) as folder:
            validate_free_space(folder, sum(self.files.values()))
            contents = self.write(folder, self.plans, progress)
            self.validate(folder)
            return contents

    def write(self, folder: Path, plans: Sequence[FilePlan], progress: Progress | None = None) -> Mapping[str, int]:
        """Write some of the files to a folder, durably; return the content digests of their tensors by name."""
        return FileWriter(self._checkpoint, folder, self._budget, progress).write(plans)

    def validate(self, folder: Path) -> None:
        """Check that the files in a folder hold the converted tensors and values. Raises: `CheckpointCorruptError`."""
        validate_files(self._target.kind, folder, self.plans, self._export, self._target.read_back)

    def digest(self, identity: str) -> int:
        """Return a digest of the planned files, by which clients that write them together check that they agree.

        Args:
            identity: The identity of the source.
        """
        tensors = [(each.name, each.info.name, each.dtype) for each in self._export.tensors]
        slots = [(slot.tensor.name, slot.offset) for plan in self.plans for slot in plan.slots]
        facts = identity, self.path.name, sorted(self.files.items()), tensors, slots, sorted(self._export.tied.items())
        return bytes_digest(repr(facts).encode("utf-8", "surrogatepass"))


_Places = set[tuple[Region, str, int]]


def validate_files(
    kind: str,
    folder: Path,
    plans: Sequence[FilePlan],
    export: Export,
    read_back: Callable[[trees.Node], trees.Node] = lambda tree: tree,
) -> None:
    """Check that new files hold the exported tensors and values. Blocks: on storage.

    Args:
        kind: Their format.
        folder: Their folder.
        plans: The files.
        export: The exported tensors and values.
        read_back: As in `dtckpt.checkpoint.converting.targets.FileTarget`.

    Raises:
        CheckpointCorruptError: The files hold something else.
    """
    files = LocalFolder(folder)
    structure = read_back(export.structure)
    with translate_errors("read the new files back", folder, is_read=True):
        index = FORMATS[kind].read_index(files, [plan.name for plan in plans])
        if index.refused or index.tensors.keys() != set(trees.tensor_names(structure)):
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
    if dict(trees.value_nodes(index.structure)) != dict(trees.value_nodes(structure)):
        raise _error("the plain values in them are others")


def _is_at(
    index: PieceIndex | ChunkIndex, files: LocalFolder, export: Export, tensor: ExportedTensor, places: _Places
) -> bool:
    """Whether the reader finds a tensor in C order at these places, or the array that a pickle holds."""
    found = index.tensors[tensor.name]
    if (found.shape, found.dtype) != (tensor.shape, tensor.dtype):
        return False
    if isinstance(found, ChunkTensor):
        return places == set(found.array.plain_places())
    if found.elements is not None:
        return not places and found.elements.tobytes() == np.ascontiguousarray(export.read_array(tensor.name)).tobytes()
    locator = PieceLocator(files)
    pieces = [locator.locate(found, piece) for piece in found.pieces]
    return not any(piece.strides for piece in pieces) and places == {
        (piece.region, piece.file, piece.offset) for piece in pieces
    }


def _error(reason: str) -> CheckpointCorruptError:
    return CheckpointCorruptError(f"the new files differ from the converted state: {reason}; nothing was committed")
