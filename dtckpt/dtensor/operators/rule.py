"""Factor rules: how the dims of an operator's operands and results belong together.

Every dim is a list of factors, major first; a dim of size 1 that is broadcast has none. A factor that stands in
operands and results may be sharded: what each device then computes from its pieces is its piece of the result. From
this follows everything else, see `dtckpt.dtensor.operators.strategy`. Source of the notion: factor rules of OpenXLA
Shardy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from dtckpt.dtensor.operators.call import Call
from dtckpt.dtensor.tensor import DTensor
from dtckpt.layout.placement import REDUCE_OPS

Dims = tuple[tuple[int, ...], ...]
"""The factors of every dim of a tensor, by their numbers."""

Passes = Mapping[str, tuple[tuple[int, ...], ...]]
"""By reduction: groups of operands that may wait for it together, so that the results wait for it instead."""

BILINEAR: Passes = {"sum": ((0,), (1,)), "avg": ((0,), (1,))}
"""Linear in the first operand, and in the second."""

LINEAR: Passes = {"sum": ((0,),), "avg": ((0,),)}
"""Linear in the first operand."""

MONOTONE: Passes = {"max": ((0,),), "min": ((0,),)}
"""The first operand's order is that of the result."""


@dataclass(frozen=True, slots=True)
class Rule:
    """How an operator's dims belong together, and what each device computes.

    Args:
        sizes: Size of every factor.
        operands: Factors of the dims of every operand, in the order of the arguments.
        results: Factors of the dims of every result that is a tensor.
        contracted: Reduction that the results which do not have a factor wait for when it is sharded.
        whole: Factors that no axis may split.
        filled: Factors that an axis may split only if no piece is empty.
        even: Factors that an axis may split only in pieces of one size.
        passes: See `Passes`.
        added: Operands that are added to what is contracted: they wait for the reduction too, and so count once.
        alike: Results that are the same on every device, though they have no dim of what is split.
        unread: Operands whose values make no difference.
        unseen: Operands of which shapes of pieces make none either.
        staying: Operands that are likely to be large: moving one counts as gathering it and its gradient.
        sized: Arguments that spell a result's shape: name, and number of the result.
        local: What each device runs instead of the operator, with the same arguments. It is kept with the plan, so it
            must not hold the call, and with it its tensors.
        is_located: Whether ``local`` is told as ``offsets``, per operand, where the device's piece begins.
        is_copying: Whether ``local`` never shares memory with the operand, though the operator does. Where pieces are
            empty nobody could tell.
    """

    sizes: tuple[int, ...]
    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    contracted: Mapping[int, str] = field(default_factory=dict)
    whole: frozenset[int] = frozenset()
    filled: frozenset[int] = frozenset()
    even: frozenset[int] = frozenset()
    passes: Passes = field(default_factory=dict)
    added: frozenset[int] = frozenset()
    alike: frozenset[int] = frozenset()
    unread: frozenset[int] = frozenset()
    unseen: frozenset[int] = frozenset()
    staying: frozenset[int] = frozenset()
    sized: tuple[tuple[str, int], ...] = ()
    local: Callable[..., Any] | None = None
    is_located: bool = False
    is_copying: bool = False

    def exact_for(self, call: Call, tensors: Iterable[DTensor]) -> Rule:
        """Return the rule for operands, some of which may wait for reductions, of a call.

        An average of integers is rounded, and a sum of short ones wraps around, before anything is computed with it.
        Terms of a sum may be zero, or differ in sign, and so become NaN times infinity, where the sum does not. What
        lets every reduction pass does not compute: it moves elements.
        """
        waiting = [tensor.dtype for tensor in tensors if tensor._layout.has_partial]
        if not waiting or self.passes.keys() >= set(REDUCE_OPS):
            return self
        whole = [dtype for dtype in waiting if not (dtype.is_floating_point or dtype.is_complex)]
        if not call.keeps_zeros:
            return replace(self, passes={op: groups for op, groups in self.passes.items() if op in {"max", "min"}})
        if not whole:
            return self
        is_short = any(dtype.itemsize < torch.int64.itemsize for dtype in whole)
        inexact = {"avg", "sum", "product"} if is_short else {"avg"}
        return replace(self, passes={op: groups for op, groups in self.passes.items() if op not in inexact})

    def shape(self, result: int) -> tuple[int, ...]:
        """Return the global shape of a result."""
        return tuple(math.prod(self.sizes[factor] for factor in dim) for dim in self.results[result])


class Factors:
    """Numbers the factors of a rule that is being made."""

    def __init__(self) -> None:
        self._sizes: list[int] = []

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(self._sizes)

    def new(self, size: int) -> int:
        """Return the number of a new factor."""
        self._sizes.append(size)
        return len(self._sizes) - 1

    def dims(self, shape: Sequence[int]) -> Dims:
        """Return dims of one new factor each."""
        return tuple((self.new(size),) for size in shape)


def einsum(
    text: str,
    *shapes: Sequence[int],
    whole: str = "",
    passes: Passes | None = None,
    contracted: str = "sum",
    local: Callable[..., Any] | None = None,
) -> Rule | None:
    """Return the rule that a text spells, such as ``"mk,kn->mn"``; None if the shapes do not fit it.

    A letter is a factor; one that no result has is contracted. ``"..."`` stands for the same leading dims everywhere.

    Args:
        text: Operands and results.
        shapes: Shape of every operand; those of results follow.
        whole: Letters of factors that no axis may split.
        passes: Default `BILINEAR`.
        contracted: Reduction of contracted factors.
        local: See `Rule`.
    """
    left, _, right = text.partition("->")
    operands, results = left.split(","), right.split(",")
    paired = zip(shapes, operands, strict=True)
    lead = max((len(shape) - len(letters) + 3 for shape, letters in paired if "..." in letters), default=0)
    names = "".join(chr(0x100 + number) for number in range(lead))
    operands = [letters.replace("...", names) for letters in operands]
    results = [letters.replace("...", names) for letters in results]
    sizes: dict[str, int] = {}
    for letters, shape in zip(operands, shapes, strict=True):
        if len(letters) != len(shape):
            return None
        for letter, size in zip(letters, shape, strict=True):
            if sizes.setdefault(letter, size) != size:
                return None
    numbers = {letter: number for number, letter in enumerate(sizes)}
    kept = set("".join(results))
    return Rule(
        sizes=tuple(sizes.values()),
        operands=tuple(tuple((numbers[letter],) for letter in letters) for letters in operands),
        results=tuple(tuple((numbers[letter],) for letter in letters) for letters in results),
        contracted={numbers[letter]: contracted for letter in sizes if letter not in kept and letter not in whole},
        whole=frozenset(numbers[letter] for letter in whole if letter in numbers),
        passes=BILINEAR if passes is None else passes,
        local=local,
    )


def pointwise(shapes: Sequence[Sequence[int]], passes: Passes | None = None) -> Rule | None:
    """Return the rule of an operator that works on elements, operands broadcast; None if they cannot be."""
    rank = max(map(len, shapes), default=0)
    padded = [(1,) * (rank - len(shape)) + tuple(shape) for shape in shapes]
    sizes = []
    for column in zip(*padded, strict=True):
        wide = [size for size in column if size != 1]
        if len(set(wide)) > 1:
            return None
        sizes.append(wide[0] if wide else 1)
    operands = tuple(
        tuple((dim,) if size == sizes[dim] else () for dim, size in enumerate(shape) if dim >= rank - len(own))
        for own, shape in zip(shapes, padded, strict=True)
    )
    result = tuple((dim,) for dim in range(rank))
    return Rule(tuple(sizes), operands, (result,), passes=passes or {})
