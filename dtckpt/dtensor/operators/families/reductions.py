"""Reductions over dims."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dtckpt.dtensor.operators.call import Call
from dtckpt.dtensor.operators.rule import LINEAR, MONOTONE, Factors, Passes, Rule
from dtckpt.dtensor.operators.table import rule

_aten = torch.ops.aten


def reduced_dims(dim: int | Sequence[int] | None, ndim: int) -> frozenset[int] | None:
    """Return the dims that an argument names, all for None and none; None if they are no dims of the tensor."""
    named = [dim] if isinstance(dim, int) else list(dim or range(ndim))
    if not all(-max(ndim, 1) <= one < max(ndim, 1) for one in named):
        return None
    return frozenset(one % max(ndim, 1) for one in named)


def over_dims(
    call: Call,
    dim: int | Sequence[int] | None,
    *,
    is_kept: bool,
    reduction: str | None,
    passes: Passes,
    num_results: int = 1,
    is_filled: bool = False,
) -> Rule | None:
    """Return the rule of a reduction of the first operand.

    Args:
        call: The call.
        dim: The dims that go; None for all.
        is_kept: Whether they stay as dims of size 1.
        reduction: What results wait for when such a dim is sharded; None if it must be whole.
        passes: See `Rule`.
        num_results: Number of results, all of one shape.
        is_filled: Whether there is no result for an empty piece.
    """
    (shape,) = call.shapes
    gone = reduced_dims(dim, len(shape))
    if gone is None:
        return None
    factors = Factors()
    dims = factors.dims(shape)
    result = tuple(() if number in gone else one for number, one in enumerate(dims) if is_kept or number not in gone)
    numbers = frozenset(dims[one][0] for one in gone if one < len(dims))
    return Rule(
        factors.sizes,
        (dims,),
        (result,) * num_results,
        contracted={} if reduction is None else dict.fromkeys(numbers, reduction),
        filled=numbers if is_filled else frozenset(),
        passes=passes,
    )


@rule(_aten.sum.default)
def _sum_all(call: Call) -> Rule | None:
    return over_dims(call, None, is_kept=False, reduction="sum", passes=LINEAR)


@rule(_aten.sum.dim_IntList)
def _sum(call: Call) -> Rule | None:
    return over_dims(call, call["dim"], is_kept=call["keepdim"], reduction="sum", passes=LINEAR)


@rule(_aten.amax.default)
def _amax(call: Call) -> Rule | None:
    passes = {"max": MONOTONE["max"]}
    return over_dims(call, call["dim"], is_kept=call["keepdim"], reduction="max", passes=passes, is_filled=True)


@rule(_aten.amin.default)
def _amin(call: Call) -> Rule | None:
    passes = {"min": MONOTONE["min"]}
    return over_dims(call, call["dim"], is_kept=call["keepdim"], reduction="min", passes=passes, is_filled=True)
