"""Sharding rules: which dims of an operator's operands and results belong together.

A rule names *factors*. A factor is a direction in which the operator does independent work. Every dim of an operand or
a result is a list of factors, major first. Matrix multiplication has three::

    mm:  (m, k) x (k, n) -> (m, n)        factors 0 = m, 1 = k, 2 = n

         operands = (((0,), (1,)), ((1,), (2,)))
         results = (((0,), (2,)),)
         contracted = {1: "sum"}

A mesh axis may shard a factor. The axis then splits every dim that has the factor, and each device runs the operator on
its components: if an axis shards ``m``, each device computes its rows of the result. A result that lacks the sharded
factor, as here ``k``, is the pending reduction (`Partial`) of the devices' results.

A dim with several factors is their product, as in ``view`` from (a, b) to (a * b). A dim of size 1 that is broadcast
has no factor. `dtckpt.dtensor.operators.strategy` chooses from a rule which axis shards which factor;
`dtckpt.dtensor.operators.rule_builders` lists the ways to write one. OpenXLA Shardy's rules use the same notion.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dtckpt.layout.placement import REDUCE_OPS

Dims = tuple[tuple[int, ...], ...]
"""The factors of every dim of a tensor, by number."""

Passes = Mapping[str, tuple[tuple[int, ...], ...]]
"""Reductions that may stay pending through the operator: by reduction, groups of operands.

While all operands of a group are pending, the operator runs on the terms, and the results are pending instead. An
operand that is not pending becomes pending first; for a replicated tensor this needs no communication. The sum of two
tensors has ``{"sum": ((0, 1),)}``: both or none. Their product has ``{"sum": ((0,), (1,))}``: one of them.

These groups hold for numbers that are never rounded. `dtckpt.dtensor.operators.pending_passes` leaves out the groups
that the dtypes of a call do not allow.
"""

BILINEAR: Passes = {"sum": ((0,), (1,)), "avg": ((0,), (1,))}
"""The operator is linear in the first operand, and in the second: ``mm``, ``mul``."""

LINEAR: Passes = {"sum": ((0,),), "avg": ((0,),)}
"""The operator is linear in the first operand: ``neg``, ``cumsum``."""

MONOTONE: Passes = {"max": ((0,),), "min": ((0,),)}
"""The operator keeps the order of the first operand's elements: ``exp``, ``relu``."""


def any_reduction(*operands: int) -> Passes:
    """Return the passes of an operator that only moves elements of these operands, or puts zeros beside them: ``cat``.

    Args:
        operands: Their numbers; by default the first operand.
    """
    return dict.fromkeys(REDUCE_OPS, (operands or (0,),))


@dataclass(frozen=True, slots=True)
class Rule:
    """How an operator's dims belong together, and which function each device runs on its components.

    Operands are the tensors among the arguments, numbered in the order in which the caller passes them; results are the
    tensors that the operator returns.

    Args:
        sizes: Global size of every factor. ``mm`` of (4, 6) and (6, 2): ``(4, 6, 2)``.
        operands: Factors of every operand's dims. ``mm``: ``(((0,), (1,)), ((1,), (2,)))``.
        results: Factors of every result's dims. ``mm``: ``(((0,), (2,)),)``.
        contracted: Factors that a result may lack although an axis shards them, with the reduction that the result then
            waits for. ``mm``: ``{1: "sum"}``; ``amax``: ``"max"`` for the dims that it reduces.
        whole: Factors that no axis may shard. ``sort``: the factor of the dim along which it sorts.
        nonempty_pieces: Factors that an axis may shard only if every device gets at least one element, because the
            kernel refuses empty tensors. ``convolution``: the batch.
        passes: Reductions that may stay pending through the operator, see `Passes`. ``neg``: `LINEAR`.
        counted_once: Operands that are added to a contraction. While the contraction is pending they must be pending
            too, else each device would add them once. ``addmm``: the first operand.
        replicated_results: Results that every device computes alike, although they lack the sharded factors. Flash
            attention: the seed of its dropout.
        shape_only_operands: Operands of which the operator reads only the shape, so any reduction of theirs may be
            pending. ``zeros_like``: the first operand.
        any_layout_operands: Operands of which the operator reads neither values nor the shape of components, so they
            stay in any layout. ``new_zeros`` with another shape: the first operand.
        costly_to_move: Operands that are likely to be large, as tables are. If such an operand must move, its cost is
            the cost of gathering the operand and its gradient. ``embedding``: the table.
        local_size_args: Arguments that spell a result's shape, each with that result's number: every device passes
            the shape of its component instead. ``view``: ``(("size", 0),)``.
        local: Function that each device runs instead of the operator, with the same arguments. The plan keeps it, so it
            must not hold the call, and with it the call's tensors. ``mean``: the sum of the component over the global
            count.
        takes_offsets: Whether ``local`` takes ``offsets``: for every operand, the global index at which the device's
            component begins. ``triu``: it shifts the diagonal.
        makes_copy: Whether ``local`` returns new memory although the operator returns a view. The rule has to declare
            this, because empty components do not show it. ``_conj``: components are conjugated at once.
    """

    sizes: tuple[int, ...]
    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    contracted: Mapping[int, str] = field(default_factory=dict)
    whole: frozenset[int] = frozenset()
    nonempty_pieces: frozenset[int] = frozenset()
    passes: Passes = field(default_factory=dict)
    counted_once: frozenset[int] = frozenset()
    replicated_results: frozenset[int] = frozenset()
    shape_only_operands: frozenset[int] = frozenset()
    any_layout_operands: frozenset[int] = frozenset()
    costly_to_move: frozenset[int] = frozenset()
    local_size_args: tuple[tuple[str, int], ...] = ()
    local: Callable[..., Any] | None = None
    takes_offsets: bool = False
    makes_copy: bool = False

    def shape(self, result: int) -> tuple[int, ...]:
        """Return the global shape of a result."""
        return tuple(math.prod(self.sizes[factor] for factor in dim) for dim in self.results[result])


class Factors:
    """Hands out the numbers of a new rule's factors, and collects their sizes."""

    def __init__(self) -> None:
        self._sizes: list[int] = []

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes of all factors so far, as `Rule.sizes`."""
        return tuple(self._sizes)

    def new(self, size: int) -> int:
        """Return the number of a new factor."""
        self._sizes.append(size)
        return len(self._sizes) - 1

    def dims(self, shape: Sequence[int]) -> Dims:
        """Return dims of this shape with one new factor each."""
        return tuple((self.new(size),) for size in shape)
