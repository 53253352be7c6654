"""Running sums and orders along a dim: that dim is whole, the others are free."""

from __future__ import annotations

import torch

from dtckpt.dtensor.operators.call import Call
from dtckpt.dtensor.operators.registry import rule
from dtckpt.dtensor.operators.rule import LINEAR, Factors, Passes, Rule

_aten = torch.ops.aten


def along(
    call: Call, *, num_operands: int = 1, num_results: int = 1, passes: Passes | None = None, size: int | None = None
) -> Rule | None:
    """Return the rule of an operator that works along the dim that its argument ``dim`` names.

    Args:
        call: The call; its operands are of one shape.
        num_operands: Number of operands.
        num_results: Number of results, of the operands' shape too.
        passes: See `Rule`.
        size: Size that the results' dim has instead.
    """
    shape, dim = call.shapes[0], call["dim"]
    if not -len(shape) <= dim < len(shape) or any(other != shape for other in call.shapes):
        return None
    factors = Factors()
    dims = factors.dims(shape)
    whole = dims[dim]
    made = list(dims)
    if size is not None:
        made[dim] = (factors.new(size),)
    return Rule(
        factors.sizes,
        (dims,) * num_operands,
        (tuple(made),) * num_results,
        whole=frozenset((*whole, *made[dim])),
        passes=passes or {},
    )


@rule(_aten.cumsum.default)
def _sum(call: Call) -> Rule | None:
    """The dim is whole; linear."""
    return along(call, passes=LINEAR)


@rule(_aten.cumprod.default, _aten.logcumsumexp.default)
def _scan(call: Call) -> Rule | None:
    """The dim is whole."""
    return along(call)


@rule(_aten.cummax.default, _aten.cummin.default, _aten.sort.default, _aten.sort.stable)
def _with_places(call: Call) -> Rule | None:
    """The dim is whole; values and places."""
    return along(call, num_results=2)


@rule(_aten.topk.default)
def _topk(call: Call) -> Rule | None:
    """The dim is whole; values and places, ``k`` of them."""
    return along(call, num_results=2, size=call["k"])
