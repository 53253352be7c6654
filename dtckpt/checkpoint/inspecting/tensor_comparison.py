"""Differences of two checkpoints: `compare_tensors` finds the differences that need no element, and plans the reads for
the others; pure."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from typing import TYPE_CHECKING

from dtckpt.checkpoint.inspecting.elements import ElementDifferences
from dtckpt.checkpoint.reading.tensor_info import ChunkInfo, TensorInfo
from dtckpt.format.dtypes import DTYPES, PACKED
from dtckpt.layout.layout import Layout
from dtckpt.layout.region import Region

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
        a: The fact in the first checkpoint. The kind decides which: all facts about a tensor or a value that the other
            checkpoint lacks; a type's name; a value, shape, dtype or layout; the number of saved elements; a content
            digest, if digests tell.
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


SMALL_CHUNK_NBYTES = 1 << 20
"""Tensors of smaller chunks are read without regard to them."""


class Reads(Enum):
    """Which elements are read."""

    NEEDED = auto()
    """The elements of tensors whose digests do not tell whether they differ."""
    DIFFERENT = auto()
    """Also the elements of tensors whose digests differ, to tell how many elements differ, and by how much."""
    NONE = auto()
    """No elements."""


@dataclass(frozen=True, slots=True, eq=False)
class TensorComparison:
    """The comparison of two tensors, before elements are read.

    Args:
        path: Their name.
        infos: The tensors.
        differences: The differences that are known.
        regions: The regions whose elements are read; they do not overlap.
        is_by_digest: Whether digests tell if the elements differ.
        is_known_different: Whether elements are read though content digests tell that they differ.
    """

    path: str
    infos: tuple[TensorInfo, TensorInfo]
    differences: Sequence[Difference]
    regions: Sequence[Region] = ()
    is_by_digest: bool = False
    is_known_different: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of the elements that are read, of both tensors."""
        itemsize = sum(DTYPES[info.stored_dtype_name].itemsize for info in self.infos)
        return itemsize * sum(region.numel for region in self.regions)


def compare_tensors(
    path: str, a: TensorInfo, b: TensorInfo, reads: Reads, *, has_trusted_contents: bool
) -> TensorComparison:
    """Compare two tensors as far as their descriptions tell.

    Args:
        path: Their name.
        a: The first tensor.
        b: The second tensor.
        reads: Which elements are read.
        has_trusted_contents: Whether content digests count, if both have one. Other programs may change the elements
            of a safetensors file and keep the digests that are noted in it.
    """
    result, difference = partial(TensorComparison, path, (a, b)), partial(Difference, path)
    known = _described_differences(path, a, b)
    if a.shape != b.shape:
        return result(known)
    is_one_dtype = a.stored_dtype_name == b.stored_dtype_name
    if not is_one_dtype and PACKED in (a.stored_dtype_name, b.stored_dtype_name):
        reason = "elements of these dtypes are not compared"
        return result([*known, difference(DifferenceKind.UNKNOWN, reason=reason)])
    is_one_part, regions = (True, None) if a.is_whole and b.is_whole else _saved_in_both(a, b)
    if not is_one_part:
        known.append(difference(DifferenceKind.PART, _num_saved(a), _num_saved(b)))
    digests = [ContentDigest(info.content_digest) for info in (a, b) if info.content_digest is not None]
    is_told_by_content = has_trusted_contents and is_one_dtype and is_one_part and len(digests) == 2
    if is_told_by_content and digests[0] == digests[1]:
        return result(known, is_by_digest=True)
    if is_told_by_content and reads is not Reads.DIFFERENT:
        return result([*known, difference(DifferenceKind.ELEMENTS, digests[0], digests[1])], is_by_digest=True)
    if is_one_dtype and (changed := _changed_chunks(a, b)) is not None:
        if not changed and not is_told_by_content:
            return result(known, is_by_digest=True)
        if reads is not Reads.DIFFERENT:
            return result([*known, difference(DifferenceKind.ELEMENTS)], is_by_digest=True)
        regions = changed
    if reads is Reads.NONE:
        reason = "no digests tell" if is_one_dtype else "digests of other dtypes cannot be compared"
        return result([*known, difference(DifferenceKind.UNKNOWN, reason=f"elements were not read, and {reason}")])
    if regions is None:
        regions = _regions_of_larger_chunks(a, b)
    return result(known, regions, is_known_different=is_told_by_content)


def _described_differences(path: str, a: TensorInfo, b: TensorInfo) -> list[Difference]:
    """Return the differences in shape, dtype and layout."""
    facts: list[tuple[DifferenceKind, Fact, Fact]] = [
        (DifferenceKind.SHAPE, a.shape, b.shape),
        (
            DifferenceKind.DTYPE,
            StoredDtype(a.dtype_name, a.stored_dtype_name),
            StoredDtype(b.dtype_name, b.stored_dtype_name),
        ),
    ]
    found = [Difference(path, kind, first, second) for kind, first, second in facts if first != second]
    if _placement(a.layout) != _placement(b.layout):
        found.append(Difference(path, DifferenceKind.LAYOUT, a.layout, b.layout))
    return found


def _placement(layout: Layout | None) -> object:
    """Return the parts of a layout that are compared: all but the devices of the mesh."""
    return None if layout is None else (layout.sharding_specs, tuple(layout.mesh.axis_sizes.items()))


def _saved_regions(info: TensorInfo) -> list[Region]:
    """Return boxes that cover the saved part of a tensor."""
    # The index of another library's checkpoint may hold the elements itself; then there are no chunks.
    return [chunk.region for chunk in info.chunks] or [Region.full(info.shape)] * info.is_whole


def _num_saved(info: TensorInfo) -> int:
    return sum(region.numel for region in _saved_regions(info))


def _saved_in_both(a: TensorInfo, b: TensorInfo) -> tuple[bool, list[Region]]:
    """Return whether two tensors have the same saved part, and boxes that cover the part that both have."""
    regions_a, regions_b = _saved_regions(a), _saved_regions(b)
    if regions_a == regions_b:
        return True, regions_a
    common = [both for one in regions_a for other in regions_b if (both := one.intersect(other)) is not None]
    numel = sum(region.numel for region in common)
    return numel == _num_saved(a) == _num_saved(b), common


def _regions_of_larger_chunks(a: TensorInfo, b: TensorInfo) -> list[Region]:
    """Return boxes that cover two whole tensors: the chunks of one of them, unless these are small."""
    larger = max(a, b, key=lambda info: info.max_chunk_nbytes)
    return [Region.full(a.shape)] if larger.max_chunk_nbytes < SMALL_CHUNK_NBYTES else _saved_regions(larger)


def _changed_chunks(a: TensorInfo, b: TensorInfo) -> list[Region] | None:
    """Return the chunks whose digests differ; None if digests do not tell."""
    # A chunk's digest depends on the tensor's name.
    if a.name != b.name or a.chunk_shape != b.chunk_shape or a.num_chunks != b.num_chunks:
        return None
    chunks_a, chunks_b = a.chunks, b.chunks
    if not chunks_a or not all(map(_is_comparable, chunks_a, chunks_b)):
        return None
    return [one.region for one, other in zip(chunks_a, chunks_b, strict=True) if one.digest != other.digest]


def _is_comparable(one: ChunkInfo, other: ChunkInfo) -> bool:
    return None not in (one.digest, other.digest) and one.region == other.region
