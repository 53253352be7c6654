"""`Difference`: one thing in which two checkpoints differ, and the report of all; values without I/O."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dtckpt.checkpoint.inspecting.elements import ElementDifferences
from dtckpt.layout.layout import Layout

if TYPE_CHECKING:  # the comparison of tensors is pure, and imports this module
    from dtckpt.storage.location import Location


class DifferenceKind(enum.StrEnum):
    """The kind of a difference between two checkpoints at one path."""

    MISSING = "missing"
    """The path is in the first checkpoint only."""
    EXTRA = "extra"
    """The path is in the second checkpoint only."""
    TYPE = "type"
    """A tensor, an array of numpy, a value, or a container of another type."""
    VALUE = "value"
    SHAPE = "shape"
    DTYPE = "dtype"
    """The tensor's dtype, or the dtype of its elements on storage."""
    LAYOUT = "layout"
    """Sharding specs, or the axes of the mesh."""
    PART = "part"
    """Which part of the tensor was saved."""
    ELEMENTS = "elements"
    FILE = "file"
    """A file beside another library's checkpoint, or a note in one, that is not read, and so was not compared."""
    UNKNOWN = "unknown"
    """Whether it differs was not found out."""


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """The facts about a tensor that is in one checkpoint only."""

    shape: tuple[int, ...]
    dtype: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class StoredDtype:
    """A tensor's dtype, and the dtype of its elements on storage."""

    dtype: str
    stored: str

    def __str__(self) -> str:
        return self.dtype if self.dtype == self.stored else f"{self.dtype} (stored {self.stored})"


@dataclass(frozen=True, slots=True)
class PlainValue:
    """A plain value, as the node that `dtckpt.format.plain_values` makes of it, in JSON."""

    node: str


@dataclass(frozen=True, slots=True)
class ContentDigest:
    """A tensor's content digest."""

    digest: int


Fact = TensorFacts | PlainValue | StoredDtype | ContentDigest | Layout | tuple[int, ...] | str | int | None


@dataclass(frozen=True, slots=True)
class Difference:
    """One difference.

    Args:
        path: Name of the tensor, or path of the value or container.
        kind: The kind of the difference.
        a: The fact in the first checkpoint, by kind: the facts about a tensor or a value that the other checkpoint
            lacks; a type's name; a value; a shape; a dtype; a layout; the number of saved elements; a content digest,
            if digests tell.
        b: The fact in the second checkpoint.
        elements: How the elements differ, if they were read.
        reason: Why it is not known whether it differs.
    """

    path: str
    kind: DifferenceKind
    a: Fact = None
    b: Fact = None
    elements: ElementDifferences | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class DiffReport:
    """The result of a comparison.

    Args:
        a: The first checkpoint.
        b: The second checkpoint.
        differences: The differences, in natural order of their paths.
        num_tensors: Tensors that both checkpoints have.
        num_values: Plain values that both have.
        num_by_digest: Of how many tensors digests told whether the elements differ.
        num_read: Of how many tensors elements were read.
        nbytes: Bytes of elements that were read, of both checkpoints.
        seconds: Time that the comparison took.
    """

    a: Location
    b: Location
    differences: tuple[Difference, ...]
    num_tensors: int
    num_values: int
    num_by_digest: int
    num_read: int
    nbytes: int
    seconds: float

    @property
    def is_same(self) -> bool:
        """Whether everything was compared, and nothing differs."""
        return not self.differences
