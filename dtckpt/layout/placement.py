"""Placements: how one mesh axis treats a tensor (`Shard`, `Replicate`, `Partial`), and the names of reductions."""

from __future__ import annotations

import operator
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dtckpt.errors import LayoutError, LayoutTypeError

if TYPE_CHECKING:
    import torch

REDUCE_OPS = ("sum", "avg", "min", "max", "product", "band", "bor", "bxor")
"""Reductions that a `Partial` may wait for; the last three are bitwise and for integers only."""

BITWISE_OPS = REDUCE_OPS[-3:]


def validate_reduce_op(reduce_op: object) -> str:
    """Return the name of a reduction.

    Raises:
        LayoutError: There is no reduction of this name.
    """
    if not isinstance(reduce_op, str) or reduce_op not in REDUCE_OPS:
        raise LayoutError(f"reduce op: got {reduce_op!r}, expected one of {', '.join(REDUCE_OPS)}")
    return reduce_op


def validate_reductions(partial: Mapping[str, str], dtype: torch.dtype) -> None:
    """Refuse bitwise reductions of floating-point or complex tensors.

    Args:
        partial: Pending reductions by axis.
        dtype: The tensor's dtype.

    Raises:
        LayoutError: There is one; the message has its axis.
    """
    wrong = {axis: op for axis, op in partial.items() if op in BITWISE_OPS}
    if wrong and (dtype.is_floating_point or dtype.is_complex):
        raise LayoutError(
            f"pending reductions: got {wrong} for a tensor of {dtype}, expected integers or bool for bitwise ones; use "
            "another reduction or dtype"
        )


class Placement:
    """Base of `Shard`, `Replicate` and `Partial`, which are immutable and hashable."""

    __slots__ = ()

    def is_shard(self, dim: int | None = None) -> bool:
        """Tell whether this is a `Shard` (of this dim, if given)."""
        return isinstance(self, Shard) and dim in (None, self.dim)

    def is_replicate(self) -> bool:
        return isinstance(self, Replicate)

    def is_partial(self, reduce_op: str | None = None) -> bool:
        """Tell whether this is a `Partial` (of this reduction, if given)."""
        return isinstance(self, Partial) and reduce_op in (None, self.reduce_op)


@dataclass(frozen=True, slots=True)
class Shard(Placement):
    """The axis splits tensor dim ``dim`` into chunks of ``ceil(size / devices)``; the last may be short or empty."""

    dim: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "dim", _dim(self.dim))

    def __str__(self) -> str:
        return f"S({self.dim})"


@dataclass(frozen=True, slots=True)
class Replicate(Placement):
    """Every device along the axis holds the same values."""

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True, slots=True, repr=False)
class Partial(Placement):
    """Every device along the axis holds a contribution; their reduction with ``reduce_op`` is the tensor."""

    reduce_op: str = "sum"

    def __post_init__(self) -> None:
        validate_reduce_op(self.reduce_op)

    def __repr__(self) -> str:
        return f"Partial({self.reduce_op})"

    def __str__(self) -> str:
        return f"P({self.reduce_op})"


@dataclass(frozen=True, slots=True, repr=False)
class _StridedShard(Placement):
    """The axis splits dim ``dim`` after axes to its right in the mesh have already cut it into ``split_factor`` pieces.

    Each device along the axis holds its chunk of each of these pieces. `Layout` converts this placement to an
    equivalent ordered tuple of axes.
    """

    dim: int
    split_factor: int = field(default=1, kw_only=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "dim", _dim(self.dim))
        if not isinstance(self.split_factor, int) or self.split_factor < 1:
            raise LayoutError(f"split_factor: got {self.split_factor!r}, expected an integer of at least 1")

    def __repr__(self) -> str:
        return f"_StridedShard(dim={self.dim}, sf={self.split_factor})"

    def __str__(self) -> str:
        return f"_S({self.dim}, {self.split_factor})"


def placement_of(value: Any) -> Any:
    """Convert a placement of PyTorch to the placement of this library; return any other value unchanged.

    A subclass of PyTorch's placements stays unchanged, too, because its additions have no counterpart here. So
    ``_NormPartial``, whose terms are norms, does not become a pending sum.
    """
    if value is None or isinstance(value, Placement):
        return value
    # Only a program that has imported PyTorch's placements can pass one.
    theirs = sys.modules.get("torch.distributed.tensor.placement_types")
    if theirs is None:
        return value
    if type(value) is theirs.Replicate:
        return Replicate()
    if type(value) is theirs.Shard:
        return Shard(value.dim)
    if type(value) is theirs.Partial:
        return Partial(value.reduce_op)
    if type(value) is theirs._StridedShard:
        return _StridedShard(value.dim, split_factor=value.split_factor)
    return value


def _dim(dim: object) -> int:
    try:
        return operator.index(dim)  # type: ignore[arg-type]
    except TypeError:
        raise LayoutTypeError(f"shard dim: got {dim!r}, expected an integer") from None
