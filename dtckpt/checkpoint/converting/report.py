"""`ConvertReport`: the result of a conversion, or of its dry run.

Its `SourceAccount` lists every file and key of the source: the conversion takes, renames or leaves it.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from types import MappingProxyType

from dtckpt.checkpoint.foreign.safetensors_index import is_description
from dtckpt.checkpoint.reading.checkpoint import Checkpoint
from dtckpt.errors import CheckpointError, capped
from dtckpt.format import tree as trees
from dtckpt.storage.location import Location


@dataclass(frozen=True, slots=True)
class ConvertedTensor:
    """One tensor before and after a conversion.

    Args:
        name: Its name in the source.
        new_name: Its name in the target, as dtckpt has it; see docs/convert.md for the names in other libraries' files.
        shape: Global shape.
        dtype: Its dtype in the source.
        new_dtype: Its dtype in the target.
        nbytes: Bytes of its elements in the target; 0 if it is tied to another tensor.
        tied_to: The new name of the tensor whose elements it shares in the target.
        content_digest: Digest of its elements in the target, as in `dtckpt.TensorInfo`, which the conversion compared
            with the source's digest; None in a dry run.
    """

    name: str
    new_name: str
    shape: tuple[int, ...]
    dtype: str
    new_dtype: str
    nbytes: int
    tied_to: str | None = None
    content_digest: int | None = None


@dataclass(frozen=True, slots=True)
class ConvertReport:
    """The result of a conversion, or of its dry run.

    Args:
        source: The source.
        target: The target.
        source_format: Format of the source, as `dtckpt.Checkpoint.format`.
        format: Format of the target.
        tensors: The tensors, in the order of the state tree.
        files: Bytes by name of the files that are written; empty for checkpoints of this library.
        values: Paths of the plain values.
        account: The outcome for every file and key of the source.
        max_memory: The bound on the tensor data in memory.
        seconds: Duration; of a dry run, the duration of the planning.
    """

    source: Location
    target: Location
    source_format: str
    format: str
    tensors: Sequence[ConvertedTensor]
    files: Mapping[str, int]
    values: Sequence[str]
    account: SourceAccount
    max_memory: int
    seconds: float

    @property
    def nbytes(self) -> int:
        """Bytes of tensor data in the target."""
        return sum(tensor.nbytes for tensor in self.tensors)


NOT_SELECTED = "not selected"


@dataclass(frozen=True, slots=True)
class SourceAccount:
    """The files and keys of a source.

    Args:
        files: The files of another library that were read; empty for a checkpoint of this library.
        keys: Names of the tensors and paths of the plain values that are taken.
        renamed: New name by old one, of tensors and values that are taken.
        left_files: Files of another library's directory, and notes in files, that dtckpt does not read.
        left_keys: Why a tensor or a value is left, by its path in the source.
    """

    files: Sequence[str]
    keys: Sequence[str]
    renamed: Mapping[str, str]
    left_files: Sequence[str]
    left_keys: Mapping[str, str]

    @classmethod
    def of(
        cls, checkpoint: Checkpoint, taken: Mapping[str, str], dropped: Mapping[str, str] = MappingProxyType({})
    ) -> SourceAccount:
        """Account for a checkpoint.

        Args:
            checkpoint: The source.
            taken: The new name of each taken tensor, by its old name.
            dropped: Why the target does not keep something, by path.
        """
        present = chain(checkpoint.tensors, (path for path, _ in trees.value_nodes(checkpoint.structure)))
        left = {path: NOT_SELECTED for path in present if path not in taken}
        refused = {path: error.message for path, error in checkpoint.refused.items()}
        renamed = {old: new for old, new in taken.items() if new != old}
        return cls(checkpoint.files.files, tuple(taken), renamed, checkpoint.unread, left | refused | dict(dropped))

    @property
    def left(self) -> Collection[str]:
        """The files, notes and keys that are left."""
        return (*self.left_files, *self.left_keys)


def validate_all_read(checkpoint: Checkpoint, select: Sequence[str] = ()) -> None:
    """Check that a conversion leaves nothing of another library's checkpoint that it is to take.

    Args:
        checkpoint: The checkpoint.
        select: Globs over names of tensors and paths of values: only these are to be taken. None: everything.

    Raises:
        TreeError: A value is of a class that only code could make; or another error, if something is damaged.
        CheckpointError: Files or notes would be left, other than descriptions of a published model.
    """
    for path, refusal in checkpoint.refused.items():
        if not select or any(fnmatch.fnmatchcase(path, pattern) for pattern in select):
            # Anew: an error that is raised twice would hold the traces of both.
            raise type(refusal)(f"{refusal.message}; or pass ignore_rest=True to leave it behind")
    left = [name for name in checkpoint.unread if not is_description(name)]
    if left and not select:
        raise CheckpointError(
            f"{checkpoint.path} holds files or notes that dtckpt does not read, so they would be left behind: "
            f"{capped(left)}; pass ignore_rest=True to leave them, and copy the files that you need"
        )
