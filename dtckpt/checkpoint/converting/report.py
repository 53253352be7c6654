"""`ConvertReport`: the result of a conversion, or of its dry run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dtckpt.checkpoint.converting.source_account import SourceAccount
from dtckpt.storage.location import Location


@dataclass(frozen=True, slots=True)
class ConvertedTensor:
    """One tensor before and after a conversion.

    Args:
        name: Its name in the source.
        new_name: Its name in the target, as dtckpt has it; see docs/convert.md for those in other libraries' files.
        shape: Global shape.
        dtype: Its dtype in the source.
        new_dtype: Its dtype in the target.
        nbytes: Bytes of its elements in the target; 0 if it is tied to another one.
        tied_to: The new name of the tensor whose elements it shares in the target.
        content_digest: Digest of its elements in the target, as in `dtckpt.TensorInfo`, which the conversion compared
            with that of the source; None in a dry run.
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
        seconds: Duration; of a dry run, that of the plan.
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
