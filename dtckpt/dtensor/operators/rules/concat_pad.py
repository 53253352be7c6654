"""Joining, repeating, padding, another order: ``cat``, ``stack``, ``repeat``, ``constant_pad_nd``, ``flip``, ``roll``.

The dims that grow or are reordered must be whole; all others may be split.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dtckpt.dtensor.operators.call import Call
from dtckpt.dtensor.operators.registry import rule
from dtckpt.dtensor.operators.rule import LINEAR, Passes, Rule, any_reduction
from dtckpt.dtensor.operators.rule_builders import (
    DimLabels,
    Labels,
    batched_images,
    from_labels,
    unlabel_dims,
    wrap_dim,
    wrap_dims,
)

_aten = torch.ops.aten

_PADDED: Passes = {"avg": ((0,),), "max": ((0,),), "min": ((0,),)}
"""The padding is the same in every term: averages and extremes keep it, a sum would add it once per term."""


@rule(_aten.cat.default)
def _cat(call: Call) -> Rule | None:
    """``(a, n), (a, m) -> (a, n + m)``; PyTorch skips a tensor of shape (0,) beside others of more dims."""
    ndim = max(map(len, call.shapes))
    passes = any_reduction(*range(len(call.tensors)))
    if ndim == 1:
        return from_labels(call, DimLabels([[None]] * len(call.tensors), [[None]]), passes=passes)
    dims = unlabel_dims(wrap_dim(call["dim"], ndim), ndim)
    operands: list[Labels] = [[None] if shape == (0,) else dims for shape in call.shapes]
    return from_labels(call, DimLabels(operands, [dims]), passes=passes)


@rule(_aten.stack.default)
def _stack(call: Call) -> Rule | None:
    """``(a), (a) -> (2, a)``"""
    ndim, count = len(call.shapes[0]), len(call.tensors)
    result: list[int | None] = [*range(ndim)]
    result.insert(wrap_dim(call["dim"], ndim + 1), None)
    return from_labels(call, DimLabels([range(ndim)] * count, [result]), passes=any_reduction(*range(count)))


@rule(_aten.repeat.default)
def _repeat(call: Call) -> Rule | None:
    """``(a, b) -> (n, a, m * b)``"""
    ndim = len(call.shapes[0])
    lead = len(call["repeats"]) - ndim
    kept = [dim if times == 1 else None for dim, times in enumerate(call["repeats"][lead:])]
    return from_labels(call, DimLabels([range(ndim)], [[*[None] * lead, *kept]]), passes=any_reduction())


@rule(_aten.constant_pad_nd.default)
def _constant_pad(call: Call) -> Rule | None:
    """``(a, n) -> (a, k + n + m)``; a dim without padding may be split."""
    ndim, pad = len(call.shapes[0]), call["pad"]
    # Pairs of numbers; the last dim comes first.
    padded = {ndim - 1 - number for number in range(len(pad) // 2) if any(pad[2 * number : 2 * number + 2])}
    return from_labels(call, DimLabels([range(ndim)], [unlabel_dims(padded, ndim)]), passes=_PADDED)


@rule(
    _aten.reflection_pad1d.default,
    _aten.reflection_pad2d.default,
    _aten.reflection_pad3d.default,
    _aten.replication_pad1d.default,
    _aten.replication_pad2d.default,
    _aten.replication_pad3d.default,
)
def _pad_image(call: Call) -> Rule | None:
    """Batch and channels may be split; dims of space must be whole."""
    return batched_images(call, LINEAR)


@rule(
    _aten.reflection_pad1d_backward.default,
    _aten.reflection_pad2d_backward.default,
    _aten.reflection_pad3d_backward.default,
    _aten.replication_pad1d_backward.default,
    _aten.replication_pad2d_backward.default,
    _aten.replication_pad3d_backward.default,
)
def _pad_image_backward(call: Call) -> Rule | None:
    """Batch and channels may be split; linear in the gradient, and the padded tensor's values are not read."""
    return batched_images(call, LINEAR, shape_only_operands=[1])


# --- other orders ----------------------------------------------------------------------------------------------------


def _reordered(call: Call, dims: Sequence[int]) -> Rule | None:
    """Return the rule of an operator that moves elements along these dims."""
    ndim = len(call.shapes[0])
    result = unlabel_dims(wrap_dims(dims, ndim), ndim)
    return from_labels(call, DimLabels([range(ndim)], [result]), passes=any_reduction())


@rule(_aten.roll.default)
def _roll(call: Call) -> Rule | None:
    """The dims that it rolls must be whole, or, of the flattened tensor, all."""
    return _reordered(call, call["dims"] or range(len(call.shapes[0])))


@rule(_aten.flip.default, _aten.rot90.default)
def _flip(call: Call) -> Rule | None:
    """The dims that it turns must be whole."""
    return _reordered(call, call["dims"])
