"""Operators that arrange elements anew: joined, repeated, turned, padded, or only those beside a diagonal.

The dims that such an operator works along are whole; the others are as they were.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from dtckpt.dtensor.operators.call import Call
from dtckpt.dtensor.operators.registry import rule
from dtckpt.dtensor.operators.rule import Passes, Rule
from dtckpt.dtensor.operators.rule_builders import Labels, but, every, linked, place_of, places_of

_aten = torch.ops.aten

_PADDED: Passes = {"avg": ((0,),), "max": ((0,),), "min": ((0,),)}
"""A number beside the elements is the same in every term; in a sum it would count too often."""


def _arranged(call: Call, result: Labels, passes: Passes | None = None) -> Rule | None:
    return linked(call, [range(len(call.shapes[0]))], [result], passes=every() if passes is None else passes)


@rule(_aten.cat.default)
def _cat(call: Call) -> Rule | None:
    """``(a, n), (a, m) -> (a, n + m)``; a tensor of shape (0,) beside others of more dims counts for nothing."""
    ndim = max(map(len, call.shapes))
    if ndim == 1:
        return linked(call, [[None]] * len(call.tensors), [[None]], passes=every(*range(len(call.tensors))))
    dims = but(place_of(call["dim"], ndim), ndim)
    operands: list[Labels] = [[None] if shape == (0,) else dims for shape in call.shapes]
    return linked(call, operands, [dims], passes=every(*range(len(operands))))


@rule(_aten.stack.default)
def _stack(call: Call) -> Rule | None:
    """``(a), (a) -> (2, a)``"""
    ndim, count = len(call.shapes[0]), len(call.tensors)
    result: list[int | None] = [*range(ndim)]
    result.insert(place_of(call["dim"], ndim + 1), None)
    return linked(call, [range(ndim)] * count, [result], passes=every(*range(count)))


@rule(_aten.repeat.default)
def _repeat(call: Call) -> Rule | None:
    """``(a, b) -> (n, a, m * b)``"""
    ndim = len(call.shapes[0])
    lead = len(call["repeats"]) - ndim
    kept = [dim if times == 1 else None for dim, times in enumerate(call["repeats"][lead:])]
    return _arranged(call, [*[None] * lead, *kept])


@rule(_aten.roll.default)
def _roll(call: Call) -> Rule | None:
    ndim = len(call.shapes[0])
    return _arranged(call, but(places_of(call["dims"] or range(ndim), ndim), ndim))


@rule(_aten.flip.default)
def _flip(call: Call) -> Rule | None:
    ndim = len(call.shapes[0])
    return _arranged(call, but(places_of(call["dims"], ndim), ndim))


@rule(_aten.rot90.default)
def _rot90(call: Call) -> Rule | None:
    ndim = len(call.shapes[0])
    return _arranged(call, but(places_of(call["dims"], ndim), ndim))


@rule(_aten.tril.default, _aten.triu.default)
def _triangle(call: Call) -> Rule | None:
    """A piece's diagonal lies as far off its own as the piece lies off the tensor's."""
    found, func = _arranged(call, range(len(call.shapes[0]))), call.func

    def local(tensor: torch.Tensor, diagonal: int = 0, *, offsets: Sequence[tuple[int, ...]]) -> torch.Tensor:
        (*_, row, column) = offsets[0]
        made: torch.Tensor = func(tensor, diagonal + row - column)
        return made

    return None if found is None else replace(found, local=local, is_located=True)


@rule(_aten.diag_embed.default)
def _diag_embed(call: Call) -> Rule | None:
    """``(a, n) -> (a, m, m)``"""
    ndim = len(call.shapes[0])
    new = sorted(places_of((call["dim1"], call["dim2"]), ndim + 1))
    result: list[int | None] = [*range(ndim - 1)]
    for place in new:
        result.insert(place, None)
    return _arranged(call, result)


@rule(_aten.constant_pad_nd.default)
def _pad(call: Call) -> Rule | None:
    """Pairs of numbers, those of the last dim first; pairs of zeros leave a dim as it is."""
    ndim, pad = len(call.shapes[0]), call["pad"]
    padded = {ndim - 1 - number for number in range(len(pad) // 2) if any(pad[2 * number : 2 * number + 2])}
    return _arranged(call, but(padded, ndim), _PADDED)
