"""Map ranges of DeepSpeed's flat vectors to parameters; pure.

ZeRO 1 and 2 join the parameters of a group, and cut the vector in equal parts. ZeRO 3 cuts every parameter in equal
parts, the last of them padded, and joins the parts of a process::

    ZeRO 1, 2     rank 0: | p | q..   rank 1: ..q | r |pad|      part r has elements r * S to (r + 1) * S
    ZeRO 3        rank 0: | p0 | q0 | r0 |   rank 1: | p1 | q1 | r1+pad |      p0 and p1 have ceil(numel / N) elements

Sources: deepspeed.runtime.zero.stage_1_and_2, .stage3, and deepspeed.utils.zero_to_fp32.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate

from dtckpt.checkpoint.foreign.flat_vectors import BoxCounts, FlatPieces, FlatRange, FlatVectors
from dtckpt.checkpoint.reading.pieces import MAX_SHOWN, PieceTensor
from dtckpt.errors import CheckpointCorruptError
from dtckpt.layout.flat_range import flat_boxes

FP32 = "fp32"
"""The kind of the vectors that hold the parameters themselves."""
Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]
"""The parameters of one group in their order: shapes, by name."""


@dataclass(frozen=True, slots=True)
class RankVectors:
    """The vectors of one process's optimizer file.

    Args:
        file: The file.
        groups: By group (ZeRO 3: by sub-group) the vectors by kind: ``fp32``, ``exp_avg`` and so on. A kind may be a
            number instead, or a tensor of one element, as steps are.
        slices: By group, the place of each parameter as the file tells it: first element in the vector, and number of
            elements. Empty in old files, and with ZeRO 3.
        gaps: By group, the elements behind each parameter that align the next one. Empty in old files.
    """

    file: str
    groups: Sequence[Mapping[str, PieceTensor | float]]
    slices: Sequence[Mapping[str, tuple[int, int]]] = ()
    gaps: Sequence[Sequence[int]] = field(default=())


def scalar_of(value: PieceTensor | float | None) -> PieceTensor | float | None:
    """Return the value of a kind that all parameters of a group share; None if it is a vector."""
    return None if isinstance(value, PieceTensor) and value.shape else value


def vector_of(rank: RankVectors, group: int, kind: str) -> PieceTensor:
    """Return a vector of a process's file.

    Raises:
        CheckpointCorruptError: The file does not have it.
    """
    value = rank.groups[group].get(kind) if group < len(rank.groups) else None
    if not isinstance(value, PieceTensor) or len(value.shape) != 1:
        raise CheckpointCorruptError(f"{rank.file} lacks {kind[:80]} of group {group}, which other files have")
    return value


def joined_pieces(
    shapes: Shapes, group: int, kind: str, ranks: Sequence[RankVectors], counts: BoxCounts
) -> Iterator[tuple[str, FlatPieces]]:
    """Yield the pieces of the parameters of a group of ZeRO 1 or 2.

    Args:
        shapes: The parameters of the group.
        group: Its number.
        kind: The kind of vectors.
        ranks: The files of all processes, in their order.
        counts: Counts the pieces.

    Raises:
        CheckpointCorruptError: The files contradict themselves or each other.
    """
    vectors = [vector_of(rank, group, kind) for rank in ranks]
    sources = FlatVectors(vectors, vectors[0].dtype)
    # Padding may be left out, but only the last parts have any.
    size = max(1, *(vector_of(rank, group, FP32).shape[0] for rank in ranks))
    gaps = ranks[0].gaps[group] if group < len(ranks[0].gaps) else [0] * len(shapes)
    if len(gaps) != len(shapes):
        raise CheckpointCorruptError(f"{ranks[0].file} has {len(gaps)} gaps, expected {len(shapes)}")
    start = stop = 0
    for (name, shape), gap in zip(shapes.items(), gaps, strict=True):
        numel = math.prod(shape)
        stop = start + numel
        if stop > size * len(ranks):
            raise CheckpointCorruptError(
                f"the optimizer's files have {size * len(ranks)} elements of group {group}, expected more than {stop}; "
                "is the file of a process missing?"
            )
        ranges = partial(_joined_ranges, vectors, size, start, stop)
        if numel and kind == FP32 and any(rank.slices for rank in ranks):  # other kinds lie at the same places
            for number, found in enumerate(ranges(), start // size):
                _validate_slice(ranks[number], group, name, found)
        last = (stop - 1) // size
        if numel and vectors[last].shape[0] < stop - last * size:
            raise CheckpointCorruptError(
                f"{ranks[last].file} has {vectors[last].shape[0]} elements of {kind[:80]} of group {group}, expected "
                f"{stop - last * size} at least"
            )
        edges = range((start // size + 1) * size, stop, size)
        cuts = (0, *(edge - start for edge in edges), numel) if numel else (0,)
        yield name, FlatPieces(shape, counts.of(shape, cuts), ranges, sources, start)
        start = stop + gap
    for number, vector in enumerate(vectors[: max(0, stop - 1) // size]):
        if vector.shape[0] < size:
            raise CheckpointCorruptError(
                f"{ranks[number].file} has {vector.shape[0]} elements of {kind[:80]} of group {group}, expected {size}"
            )


def _joined_ranges(vectors: Sequence[PieceTensor], size: int, start: int, stop: int) -> Iterator[FlatRange]:
    """Yield the ranges of a parameter that has elements ``start`` to ``stop`` of vectors of ``size`` elements."""
    for number in range(start // size, -(-stop // size)):
        first, last = max(start, number * size), min(stop, (number + 1) * size)
        if first < last:
            yield FlatRange(vectors[number], first - number * size, first - start, last - start)


def _validate_slice(rank: RankVectors, group: int, name: str, found: FlatRange) -> None:
    """Compare a range with the range that the file tells."""
    place = found.first, found.stop - found.start
    told = rank.slices[group].get(name) if group < len(rank.slices) else None
    if rank.slices and told != place:
        raise CheckpointCorruptError(
            f"{rank.file} has {name[:200]!r} at {told} of group {group} (first element, number "
            f"of elements), expected {place}; are the files of one save?"
        )


def cut_pieces(
    shapes: Shapes, vectors: Sequence[Sequence[PieceTensor]], file: str, counts: BoxCounts
) -> Iterator[tuple[str, FlatPieces]]:
    """Yield the pieces of parameters that are cut in equal parts, as ZeRO 3 does.

    Args:
        shapes: All parameters, in the order of the vectors.
        vectors: By process, the vectors that follow each other; a parameter may begin in one and end in the next.
        file: A file, for messages.
        counts: Counts the pieces.

    Raises:
        CheckpointCorruptError: The vectors do not have the elements of all parameters.
    """
    count = len(vectors)
    every = [vector for own in vectors for vector in own]
    sources = FlatVectors(every, every[0].dtype if every else "float32")
    ends = [list(accumulate(vector.shape[0] for vector in own)) for own in vectors]
    parts = [-(-math.prod(shape) // count) for shape in shapes.values()]
    if wrong := [each[-1:] for each in ends if (each or [0])[-1] != sum(parts)]:
        raise CheckpointCorruptError(
            f"the vectors of a process have {wrong[0]} elements, expected {sum(parts)} as {file} describes; are the "
            "files of one save?"
        )
    borders = sorted({end for own in ends for end in own})
    even: dict[int, tuple[int, ...]] = {}
    position = 0
    for (name, shape), part in zip(shapes.items(), parts, strict=True):
        numel = math.prod(shape)
        ranges = partial(_cut_ranges, vectors, ends, position, part, numel)
        border = bisect_right(borders, position)
        if border < len(borders) and borders[border] < position + part:
            cuts = (*(each.start for each in ranges()), numel)
        else:
            cuts = even.get(numel) or even.setdefault(numel, (*range(0, numel, max(1, part)), numel))
        yield name, FlatPieces(shape, counts.of(shape, cuts), ranges, sources, position)
        position += part


def _cut_ranges(
    vectors: Sequence[Sequence[PieceTensor]], ends: Sequence[Sequence[int]], position: int, part: int, numel: int
) -> Iterator[FlatRange]:
    """Yield the ranges of a parameter of which each process has ``part`` elements from ``position`` on."""
    for number, own in enumerate(vectors):
        start, stop = (min(each * part, numel) for each in (number, number + 1))
        first = position
        while start < stop:
            which = bisect_right(ends[number], first)
            begin = ends[number][which] - own[which].shape[0]
            length = min(stop - start, ends[number][which] - first)
            yield FlatRange(own[which], first - begin, start, start + length)
            start, first = start + length, first + length


def missing_regions(shapes: Sequence[Shapes], count: int, rank: int, *, is_cut: bool) -> str:
    """Return a text of the regions that the file of a process would hold, for a message: of the first parameters.

    Args:
        shapes: The parameters, by group.
        count: The number of processes.
        rank: The process.
        is_cut: Whether every parameter is cut, as with ZeRO 3.
    """
    texts = []
    for group in shapes:
        size = -(-sum(map(math.prod, group.values())) // count)
        size += -size % 2  # parts begin at even elements
        position = 0
        for name, shape in group.items():
            numel = math.prod(shape)
            part = -(-numel // count) if is_cut else size
            first = rank * part - (0 if is_cut else position)
            start, stop = (min(max(each, 0), numel) for each in (first, first + part))
            if start < stop:
                texts.append(f"{name[:80]} {next(flat_boxes(shape, start, stop))}")
            position += numel
            if len(texts) > MAX_SHOWN:
                return ", ".join([*texts[:MAX_SHOWN], "and more"])
    return ", ".join(texts) or "none"
