"""Join the slices of tensor parallelism, by the patterns of names that DeepSpeed's files may have; pure.

``universal_checkpoint_info`` in a model file has lists of patterns. A parameter that matches none is cut by rows::

    tp_replicated_parameter_patterns           each slice has the whole parameter
    parameter_with_row_parallelism_patterns    cut along dim 1
    parameter_with_2_sub_params_cat_dim_0      two matrices, each cut by rows:  | gate 0 | up 0 |  | gate 1 | up 1 |
    parameter_to_average_patterns              the parameter is the mean of its slices

Sources: deepspeed.checkpoint.constants, and merge_tp_slices in deepspeed.checkpoint.ds_to_universal.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dtckpt.checkpoint.foreign.deepspeed_fields import items_of
from dtckpt.checkpoint.foreign.pickle_syntax import STEP_NBYTES, TENSOR_NBYTES, ReadBudget
from dtckpt.checkpoint.reading.pieces import Piece, PieceTensor
from dtckpt.errors import CheckpointVersionError, TreeError
from dtckpt.layout.region import Region

INFO = "universal_checkpoint_info"
VERSION = "universal_checkpoint_version"
VERSIONS = (0.1, 0.2, 0.3, 0.4)
SAME, MEAN, HALVES, COLUMNS, ROWS = "same", "mean", "halves", "columns", "rows"
"""The ways in which slices make up a parameter."""
_LISTS = {
    SAME: "tp_replicated_parameter_patterns",
    MEAN: "parameter_to_average_patterns",
    HALVES: "parameter_with_2_sub_params_cat_dim_0",
    COLUMNS: "parameter_with_row_parallelism_patterns",
}
"""By way, its list of patterns; the first list with a match counts."""
_PADDED = "vocabulary_parameter_patterns"
_OTHER_LISTS = ("parameter_with_sub_params",)
"""Lists that are not understood."""
_PATTERN = re.compile(r"\^?((\\[dw]|\\[^a-zA-Z0-9]|[^\\^$*+?{}\[\]|()])[+*?]?)*\$?")
_REPEAT = re.compile(r"(?<!\\)[+*?]")
_MAX_REPEATS = 2
_MAX_LENGTH = 512
"""Characters of a pattern or a name. A match takes as many steps as their square at most."""


@dataclass(frozen=True, slots=True)
class SliceRules:
    """How slices make up parameters.

    Args:
        patterns: By way, the patterns of the names.
        padded: The patterns of parameters with rows of padding.
        budget: Bounds the time that matches take.
    """

    patterns: Mapping[str, Sequence[re.Pattern[str]]]
    padded: Sequence[re.Pattern[str]]
    budget: ReadBudget

    def way(self, name: str) -> str:
        """Return the way of a parameter. Raises: `TreeError`: The name is too long to be matched."""
        if len(name) > _MAX_LENGTH:
            raise TreeError(f"cannot join the slices of {name[:200]!r}: its name has {len(name)} characters")
        self.budget.take(STEP_NBYTES * sum(map(len, self.patterns.values())))
        return next((way for way, own in self.patterns.items() if any(each.match(name) for each in own)), ROWS)

    def is_padded(self, name: str) -> bool:
        """Whether the last rows of a parameter may be padding."""
        self.budget.take(STEP_NBYTES * len(self.padded))
        return len(name) <= _MAX_LENGTH and any(each.match(name) for each in self.padded)


def validate_version(info: Any, where: str, budget: ReadBudget) -> None:
    """Check the version of ``universal_checkpoint_info``. Raises: `CheckpointVersionError`."""
    version = items_of(info, f"{where}: {INFO}", budget).get(VERSION)
    if version is not None and version not in VERSIONS:
        raise CheckpointVersionError(
            f"{where} has {VERSION} {str(version)[:40]}, expected one of {', '.join(map(str, VERSIONS))}; upgrade "
            "dtckpt"
        )


def slice_rules(info: Any, where: str, budget: ReadBudget) -> SliceRules | str:
    """Return the rules of ``universal_checkpoint_info``, or why they are not understood.

    Args:
        info: The pickled value; None: there is none.
        where: The file, for messages.
        budget: Bounds the time that matches take.

    Raises:
        CheckpointCorruptError: The value is malformed.
        CheckpointVersionError: The value is of a version that is not known.
    """
    if info is None:
        return "no file tells how to join them"
    validate_version(info, where, budget)
    given = items_of(info, f"{where}: {INFO}", budget)
    if other := next((name for name in _OTHER_LISTS if given.get(name)), None):
        return f"dtckpt does not know how {other} cuts them"
    patterns: dict[str, list[re.Pattern[str]]] = {}
    for way, name in (*_LISTS.items(), (_PADDED, _PADDED)):
        texts = given.get(name) or []
        if type(texts) is not list:
            return f"{name} is no list"
        for text in texts:
            if not _is_simple(text):
                return f"dtckpt does not know the pattern {str(text)[:80]!r} in {name}"
            budget.take(TENSOR_NBYTES)
            patterns.setdefault(way, []).append(re.compile(text))
    return SliceRules(patterns, patterns.pop(_PADDED, []), budget)


def _is_simple(text: Any) -> bool:
    """Whether a pattern has only characters, classes of them, and few repeats: others may take for ever to match."""
    if type(text) is not str or len(text) > _MAX_LENGTH or _PATTERN.fullmatch(text) is None:
        return False
    return len(_REPEAT.findall(text)) <= _MAX_REPEATS


def joined_tensor(slices: Sequence[PieceTensor], way: str, budget: ReadBudget) -> PieceTensor:
    """Return a tensor, under the name of its first slice.

    Args:
        slices: The slices, in the order of their ranks.
        way: The way in which they make up the tensor.
        budget: Bounds the pieces.

    Raises:
        TreeError: The slices do not fit each other, or are to be averaged.
    """
    first = slices[0]
    dim = 1 if way == COLUMNS else 0
    sizes = [each.shape[dim] if len(each.shape) > dim else -1 for each in slices]
    others = {(each.dtype, *each.shape[:dim], *each.shape[dim + 1 :]) for each in slices}
    if way == MEAN or (way == SAME and len({each.shape for each in slices}) > 1):
        reason = "it is the mean of its slices, and these are not summed" if way == MEAN else "its slices differ"
        raise TreeError(f"cannot read parameter {first.name[:200]!r}: {reason}; convert it with ds_to_universal.py")
    if way == SAME:
        return first
    if len(others) > 1 or min(sizes) < 0 or (way == HALVES and any(size % 2 for size in sizes)):
        shapes = ", ".join(str(each.shape) for each in slices[:4])
        raise TreeError(f"cannot read parameter {first.name[:200]!r}: slices of shapes {shapes} do not make up {way}")
    count = 2 if way == HALVES else 1
    pieces: list[Piece] = []
    start = 0
    for part in range(count):
        for each, size in zip(slices, sizes, strict=True):
            length = size // count
            offset, shape = [0] * len(each.shape), list(each.shape)
            offset[dim], shape[dim] = part * length, length
            moved = [0] * len(each.shape)
            moved[dim] = start - part * length
            for piece in _pieces(each, Region(tuple(offset), tuple(shape)), moved):
                budget.take(TENSOR_NBYTES)
                pieces.append(piece)
            start += length
    shape = list(first.shape)
    shape[dim] = start
    return PieceTensor(first.name, tuple(shape), first.dtype, tuple(pieces))


def _pieces(tensor: PieceTensor, box: Region, by: Sequence[int]) -> Iterator[Piece]:
    """Yield what the pieces of a tensor have of a box, moved."""
    for piece in tensor.pieces_in(box):
        common = piece.region.intersect(box)
        if common is None:
            continue
        first = common.relative_to(piece.region).offset
        strides = piece.element_strides
        offset = piece.offset + tensor.itemsize * sum(at * step for at, step in zip(first, strides, strict=True))
        is_whole = common == piece.region
        yield replace(piece, region=common.translate(by), offset=offset, strides=piece.strides if is_whole else strides)
