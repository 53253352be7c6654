"""`FilesConversion`: write files of another library from any checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from dtckpt.checkpoint.converting.export import Export
from dtckpt.checkpoint.converting.file_plan import FilePlan
from dtckpt.checkpoint.converting.targets import FileTarget
from dtckpt.checkpoint.converting.validate_files import validate_files
from dtckpt.checkpoint.converting.write_files import FileBudget, FileWriter
from dtckpt.checkpoint.reading.checkpoint import Checkpoint
from dtckpt.checkpoint.resharding.checkpoint_source import Progress
from dtckpt.errors import ConfigError
from dtckpt.format.digest import bytes_digest
from dtckpt.storage.location import Location
from dtckpt.storage.new_files import check_new, new_files, validate_free_space


class FilesConversion:
    """A conversion to files of another library, planned.

    Args:
        checkpoint: The source.
        export: What is written.
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
        TensorNameError: Two tensors would have one name, or one has a name that the format lacks.
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
        """Check that the files in a folder hold what is converted. Raises: `CheckpointCorruptError`."""
        validate_files(self._target.kind, folder, self.plans, self._export)

    def digest(self, identity: str) -> int:
        """Return a digest of what is written, by which several who write it together see that they agree.

        Args:
            identity: The identity of the source.
        """
        tensors = [(each.name, each.info.name, each.dtype) for each in self._export.tensors]
        slots = [(slot.tensor.name, slot.offset) for plan in self.plans for slot in plan.slots]
        facts = identity, self.path.name, sorted(self.files.items()), tensors, slots, sorted(self._export.tied.items())
        return bytes_digest(repr(facts).encode("utf-8", "surrogatepass"))
