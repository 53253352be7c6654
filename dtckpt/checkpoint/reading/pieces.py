"""Checkpoints as values: every tensor is made of pieces, and a piece is a range of bytes in a file; pure.

A safetensors file, a ``.distcp`` file of PyTorch and the zip of ``torch.save`` all hold raw elements at known places.
So do the parts of a save in the local tier. One value, `PieceIndex`, describes each of them. The parsers of
`dtckpt.checkpoint.foreign` return it, and its `PieceFiles` reads it; `dtckpt.checkpoint.tiers` builds its own::

    tensor "w", shape (4, 6)         pieces
    +-------+-----------+            rows 0:4, columns 0:2 in __0_0.distcp, from byte 512
    |  __0  |   __1     |            rows 0:4, columns 2:6 in __1_0.distcp, from byte 64
    +-------+-----------+

An index comes from an untrusted file. Its claims are checked here, when the values are built; the lengths of files
are checked before memory is taken. Sharded tensors have up to tens of thousands of pieces, so a
`RegionIndex` finds the pieces that share elements with a region, or with each other.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import combinations, islice
from types import MappingProxyType
from typing import Any

import numpy as np

from dtckpt.errors import CheckpointCorruptError, DtckptError
from dtckpt.format import tree as trees
from dtckpt.format.dtypes import DTYPES
from dtckpt.format.grid import MAX_NUMEL, MAX_RANK
from dtckpt.layout.layout import Layout
from dtckpt.layout.region import Region

MAX_PIECES = 1 << 16
"""Bound on the pieces of one tensor: as many as there are processes in the largest jobs."""
UNEXPANDED_NBYTES = 256 << 20
"""Bytes of tensors that a file of any size may hold: expanded tensors of this size are common."""
MAX_EXPANSION = 64
"""How many tensors may be made of the same bytes, on average, as tied and expanded tensors are."""
_MAX_NBYTES = 1 << 62
MAX_SHOWN = 4
"""Regions that a message shows."""


@dataclass(frozen=True, slots=True)
class CheckedBytes:
    """Bytes of a file whose checksum the file tells; they may hold several pieces.

    Args:
        start: The first byte.
        nbytes: Their number.
        crc: Their CRC-32.
        is_castagnoli: Whether it is a CRC-32C.
    """

    start: int
    nbytes: int
    crc: int
    is_castagnoli: bool = False


@dataclass(frozen=True, slots=True)
class StreamRange:
    """Place of a piece in a stream of ``torch.save`` that holds several pieces.

    Args:
        shape: The shape of the tensor in the stream, whose elements are in C order.
        start: The piece's first element among the elements of the stream.
    """

    shape: tuple[int, ...]
    start: int


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a tensor's elements, as raw little-endian bytes in one file.

    Args:
        region: The box.
        file: The file's name, relative to the checkpoint's folder.
        offset: The first byte of the box's first element.
        strides: Elements from one element to the next, per dim; None: C order, without gaps.
        stream_nbytes: Bytes of a stream of ``torch.save`` that begins at ``offset`` and holds the box. Where in it the
            elements are, and with which strides, is found out when they are read
            (`dtckpt.checkpoint.foreign.torch_files`): an index of a million streams is then one small file. None:
            the elements themselves begin at ``offset``.
        stream_range: The elements of the stream that the box has; None: all elements.
        checked: The bytes with a checksum that contain the piece, if there are any.
    """

    region: Region
    file: str
    offset: int
    strides: tuple[int, ...] | None = None
    stream_nbytes: int | None = None
    stream_range: StreamRange | None = None
    checked: CheckedBytes | None = None

    @property
    def element_strides(self) -> tuple[int, ...]:
        """Elements from one element to the next, per dim; in a stream, as in C order."""
        return c_strides(self.region.shape) if self.strides is None else self.strides

    def stop(self, itemsize: int) -> int:
        """Return the byte behind the last element of the box, or behind the stream."""
        if self.stream_nbytes is not None:
            return self.offset + self.stream_nbytes
        if self.strides is None:
            return self.offset + itemsize * self.region.numel
        last = sum((size - 1) * step for size, step in zip(self.region.shape, self.strides, strict=True))
        return self.offset + itemsize * (last + 1)


Extent = tuple[str, int, int]
"""A range of a file: its name, the first byte, and the byte behind the last byte."""


class RulePieces(ABC):
    """The pieces of a whole tensor that follow from a rule, and are made only when they are asked for.

    A checkpoint may have many pieces for each process, and a command that lists its tensors needs none. The rule
    promises what `PieceTensor` checks of other pieces: they fill the tensor, do not overlap, and lie in the extents.
    """

    extents: Sequence[Extent]
    """The ranges of files that hold the pieces; one object for all tensors with equal extents."""
    key: object
    """The identity of the pieces among tensors with the same extents and shape."""

    largest_shape: tuple[int, ...]
    """The shape of the largest piece."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of the pieces, without making them."""

    @abstractmethod
    def __iter__(self) -> Iterator[Piece]:
        """Make the pieces."""


@dataclass(frozen=True, slots=True)
class PieceTensor:
    """One tensor that is made of pieces. Elements that no piece has were not saved.

    Args:
        name: The tensor's name.
        shape: Global shape.
        dtype: Name of the element type, one of `dtckpt.format.dtypes.DTYPES`.
        pieces: The pieces, which do not overlap. A tensor without elements has none.
        layout: Layout at the time of the save, if the checkpoint tells it.
        content: Content digest (`dtckpt.format.content`), if the checkpoint notes one.
        elements: All elements, if the index itself holds them, as it does for a pickled array. There are no
            pieces then.

    Raises:
        CheckpointCorruptError: The pieces do not fit the tensor or each other, or a number is out of bounds.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[Piece, ...] | RulePieces
    layout: Layout | None = None
    content: int | None = None
    elements: np.ndarray[Any, Any] | None = field(default=None, compare=False, repr=False)
    is_whole: bool = field(init=False, compare=False, repr=False)
    """Whether all elements were saved."""
    stored_nbytes: int = field(init=False, compare=False, repr=False)
    """Bytes of the elements that were saved in pieces."""
    _made: _MadePieces | None = field(init=False, compare=False, repr=False)
    """The pieces, and how they are found; None until they are needed."""

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise self._error(f"its dtype {self.dtype!r} is unknown, expected one of {', '.join(DTYPES)}")
        is_sane = len(self.shape) <= MAX_RANK and min(self.shape, default=0) >= 0
        if not is_sane or math.prod(filter(None, self.shape)) > MAX_NUMEL:
            raise self._error(f"nothing can have shape {self.shape}")
        object.__setattr__(self, "_made", None)
        if not isinstance(self.pieces, tuple):
            object.__setattr__(self, "stored_nbytes", self.nbytes)
            object.__setattr__(self, "is_whole", True)
            return
        if len(self.pieces) > MAX_PIECES:
            raise self._error(f"it has {len(self.pieces)} pieces, expected at most {MAX_PIECES}")
        if self.elements is not None:
            is_same = self.elements.shape == self.shape and self.elements.dtype == DTYPES[self.dtype]
            if self.pieces or not is_same:
                raise self._error("its elements differ from its description")
        if len(self.pieces) > 1:
            self._make()
        else:
            self._validate_pieces()
        stored = self.itemsize * sum(piece.region.numel for piece in self.pieces)
        object.__setattr__(self, "stored_nbytes", stored)
        object.__setattr__(self, "is_whole", self.elements is not None or stored == self.nbytes)

    def _make(self) -> _MadePieces:
        """Make the pieces that a rule tells, check them, and make the index of them."""
        pieces = self._validate_pieces()
        index = RegionIndex([piece.region for piece in pieces])
        if (clash := index.clash()) is not None:
            first, second = (pieces[position].region for position in clash)
            raise self._error(f"its pieces {first} and {second} overlap")
        made = _MadePieces(pieces, index, {piece.region: position for position, piece in enumerate(pieces)})
        object.__setattr__(self, "_made", made)
        return made

    def _validate_pieces(self) -> tuple[Piece, ...]:
        pieces = tuple(self.pieces)
        for piece in pieces:
            self.validate_piece(piece)
        return pieces

    def validate_piece(self, piece: Piece) -> None:
        """Raise `CheckpointCorruptError` if a piece does not fit the tensor, or a number of it is out of bounds."""
        region, strides = piece.region, piece.strides
        if not self.contains(region) or region.is_empty:
            raise self._error(f"its piece {region} is not inside shape {self.shape}")
        if strides is not None and (len(strides) != region.ndim or min(strides, default=0) < 0):
            raise self._error(f"its piece {region} has strides {strides}")
        if not 0 <= piece.offset <= piece.stop(self.itemsize) <= _MAX_NBYTES:
            raise self._error(f"its piece {region} would begin at byte {piece.offset} of {piece.file!r}")
        if not is_file_name(piece.file):
            raise self._error(f"its piece {region} is in {piece.file!r}, which is no file of the checkpoint")

    def renamed(self, name: str) -> PieceTensor:
        """Return the tensor under another name, without checks."""
        tensor = copy.copy(self)
        object.__setattr__(tensor, "name", name)
        return tensor

    def _error(self, reason: str) -> CheckpointCorruptError:
        return CheckpointCorruptError(f"tensor {self.name[:200]!r} cannot be read: {reason}")

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return DTYPES[self.dtype].itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return math.prod(self.shape) * self.itemsize

    def contains(self, region: Region) -> bool:
        """Whether a region is inside the tensor."""
        if region.shape == self.shape:
            return not any(region.offset)
        return region.ndim == len(self.shape) and all(
            start + size <= limit for start, size, limit in zip(region.offset, region.shape, self.shape, strict=True)
        )

    def pieces_in(self, region: Region) -> list[Piece]:
        """Return the pieces that share an element with a region, in their order."""
        made = self._make() if self._made is None else self._made
        if (position := made.positions.get(region)) is not None:
            return [made.pieces[position]]  # pieces do not overlap
        return [made.pieces[position] for position in made.index.meeting(region)]


@dataclass(frozen=True, slots=True)
class _MadePieces:
    """Pieces with an index of their regions, and the position of the piece of each region."""

    pieces: tuple[Piece, ...]
    index: RegionIndex
    positions: Mapping[Region, int]


@dataclass(frozen=True, slots=True)
class PieceIndex:
    """The description of a checkpoint whose tensors are made of pieces.

    Args:
        kind: The format: a key of `dtckpt.checkpoint.foreign.formats.FORMATS`, or the local tier's.
        tensors: By name.
        structure: The state tree of its tensors and plain values, as a node of `dtckpt.format.tree`.
        refused: By path, why something in the checkpoint cannot be read, such as a value of a class that only code
            could make. Such a path is not in the tree, and an error for a caller that asks for it.
        files: Names of the files that it describes or was read from.
        unread: The rest: names of other files beside them, and notes in them that the index does not have.
        notes: Notes for the reader about tensors that dtckpt keeps as they are stored.

    Raises:
        CheckpointCorruptError: The structure is malformed, or does not name every tensor once; or the tensors have far
            more bytes than they are made of.
    """

    kind: str
    tensors: Mapping[str, PieceTensor]
    structure: trees.Node
    refused: Mapping[str, DtckptError] = field(default_factory=dict)
    files: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    file_nbytes: Mapping[str, int] = field(init=False, repr=False, compare=False)
    """By file, the bytes that it must have at least."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "tensors", MappingProxyType(dict(self.tensors)))
        # Lists, not sets: a name that occurs twice is refused, too.
        if sorted(trees.tensor_names(self.structure)) != sorted(self.tensors):
            raise CheckpointCorruptError("the checkpoint contradicts itself: its tree does not name every tensor once")
        sizes: dict[str, int] = {}
        for file, _, stop in self.extents():
            if stop > sizes.get(file, -1):
                sizes[file] = stop
        object.__setattr__(self, "file_nbytes", sizes)
        # Checked here for all readers: tensors may share bytes, and one tensor may repeat the same bytes many times.
        nbytes = sum(tensor.stored_nbytes for tensor in self.tensors.values())
        if is_expanded_too_far(nbytes, stored := sum(sizes.values())):
            raise CheckpointCorruptError(
                f"the checkpoint and its index disagree: {nbytes} bytes of tensors would be made of "
                f"{stored} bytes of files; restore another checkpoint"
            )

    def with_rest(self, *, files: Iterable[str] | None = None, unread: Iterable[str] = ()) -> PieceIndex:
        """Return the same index with other names of files, and more names that are not read; checks nothing again."""
        index = copy.copy(self)
        object.__setattr__(index, "files", self.files if files is None else tuple(files))
        object.__setattr__(index, "unread", (*unread, *self.unread))
        return index

    def held_in(self, file: str) -> str:
        """Return a text of the regions that a file holds, for a message: of the first tensors."""
        held = (
            f"{name[:80]} {piece.region}"
            for name, tensor in self.tensors.items()
            for piece in tensor.pieces
            if piece.file == file
        )
        some = list(islice(held, MAX_SHOWN + 1))
        return ", ".join([*some[:MAX_SHOWN], "and more"] if len(some) > MAX_SHOWN else some)

    def extents(self) -> Iterator[Extent]:
        """Yield the bytes of all pieces; bytes that tensors share by a rule come once."""
        shared: dict[int, Sequence[Extent]] = {}
        for tensor in self.tensors.values():
            # Not `isinstance` of `RulePieces`: that takes ten times as long for an abstract class.
            if isinstance(tensor.pieces, tuple):
                for piece in tensor.pieces:
                    yield piece.file, piece.offset, piece.stop(tensor.itemsize)
            else:
                shared[id(tensor.pieces.extents)] = tensor.pieces.extents
        for extents in shared.values():
            yield from extents


def c_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides, in elements, of a dense array in C order."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


@lru_cache(maxsize=1 << 12)
def is_file_name(name: str) -> bool:
    """Whether a name can only belong to a file in or below the checkpoint's folder, and to no file elsewhere."""
    is_text = name.isprintable() and "\\" not in name and ":" not in name
    return is_text and all(part not in ("", ".", "..") for part in name.split("/"))


Positions = np.ndarray[Any, np.dtype[np.int64]]

FEW = 8
"""Regions up to which to compare each with each is fastest."""
MAX_SORTED = 64
"""How often `RegionIndex.clash` may sort a region, on average, before it compares the rest in pairs."""
_COMPARED = 1 << 20
"""Pairs of regions that are compared in one call."""


class RegionIndex:
    """An index of regions, none of which is empty.

    Args:
        regions: The regions, of one rank, with numbers of 63 bits.
    """

    def __init__(self, regions: Sequence[Region]) -> None:
        self._regions = tuple(regions)
        self._is_few = len(regions) <= FEW
        if self._is_few:
            return
        shape = len(regions), regions[0].ndim
        self._starts = np.array([region.offset for region in regions], np.int64).reshape(shape)
        self._stops = np.array([region.stop for region in regions], np.int64).reshape(shape)
        everything = np.arange(shape[0])
        # By the dim in which the regions begin at the most places, so that a search is left with the fewest.
        self._dim = max(range(shape[1]), key=lambda dim: len(np.unique(self._starts[:, dim])), default=None)
        self._order = everything if self._dim is None else np.argsort(self._starts[:, self._dim], kind="stable")
        if self._dim is not None:
            self._sorted_starts = self._starts[self._order, self._dim]
            self._reach = np.maximum.accumulate(self._stops[self._order, self._dim])

    def meeting(self, region: Region) -> list[int]:
        """Return the positions of the regions that share an element with a region, ascending."""
        if self._is_few:
            return [position for position, each in enumerate(self._regions) if each.intersect(region) is not None]
        if region.is_empty:
            return []
        if self._dim is None:
            return list(range(len(self._regions)))
        start, stop = region.offset[self._dim], region.stop[self._dim]
        first = np.searchsorted(self._reach, start, "right")
        near = self._order[first : np.searchsorted(self._sorted_starts, stop, "left")]
        meets = (self._starts[near] < np.array(region.stop)) & (self._stops[near] > np.array(region.offset))
        return sorted(near[meets.all(axis=1)].tolist())

    def clash(self) -> tuple[int, int] | None:
        """Return the positions of two regions that share an element; None if no two do.

        Regions that a plane separates need not be compared::

            |  a  | b | c |         the planes in one dim part a from {b, d} from {c, e},
            |     | d | e |         and the planes in the other dim part b from d, c from e
        """
        if self._is_few:
            pairs = combinations(range(len(self._regions)), 2)
            return next(
                (pair for pair in pairs if self._regions[pair[0]].intersect(self._regions[pair[1]]) is not None), None
            )
        budget, groups = MAX_SORTED * len(self._order), [self._order]
        while groups:
            group = groups.pop()
            budget -= len(group) * self._starts.shape[1]
            parts = max((self._parts(group, dim) for dim in range(self._starts.shape[1])), key=len, default=[group])
            if len(parts) > 1 and budget > 0:
                groups += [part for part in parts if len(part) > 1]
            elif (found := self._compare(group)) is not None:
                return found
        return None

    def _parts(self, group: Positions, dim: int) -> list[Positions]:
        """Cut a group of regions at all places along a dim that no region crosses."""
        group = group[np.argsort(self._starts[group, dim], kind="stable")]
        reach = np.maximum.accumulate(self._stops[group, dim])
        return np.split(group, np.flatnonzero(self._starts[group[1:], dim] >= reach[:-1]) + 1)

    def _compare(self, group: Positions) -> tuple[int, int] | None:
        for rows in _blocks(len(group)):
            one, meet = group[rows], np.ones((rows.stop - rows.start, len(group)), np.bool_)
            for starts, stops in zip(self._starts.T, self._stops.T, strict=True):
                meet &= (starts[one, None] < stops[group]) & (starts[group] < stops[one, None])
            meet[np.arange(len(one)), np.arange(rows.start, rows.stop)] = False  # itself
            if meet.any():
                first, second = np.argwhere(meet)[0].tolist()
                return int(one[first]), int(group[second])
        return None


def _blocks(count: int) -> Iterator[slice]:
    step = max(1, _COMPARED // count)
    return (slice(start, min(start + step, count)) for start in range(0, count, step))


def is_expanded_too_far(nbytes: int, stored_nbytes: int) -> bool:
    """Whether so many bytes of tensors are more than may be made of ``stored_nbytes`` bytes of files."""
    return nbytes > max(UNEXPANDED_NBYTES, MAX_EXPANSION * stored_nbytes)
