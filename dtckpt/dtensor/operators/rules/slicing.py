"""Slicing, joining, padding: ``select``, ``split``, ``diagonal``, ``select_scatter``, ``cat``, ``repeat``, ``flip``.

Dims along which an operator picks elements must be whole, but for ``select`` and ``slice``; so must dims that grow or
get another order. All other dims may be split. Views of all elements are in `view`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from dtckpt.comm.collectives import neutral_term
from dtckpt.dtensor.operators.call import Call
from dtckpt.dtensor.operators.composite_helpers import is_split
from dtckpt.dtensor.operators.registry import rule
from dtckpt.dtensor.operators.rule import LINEAR, Passes, Rule, any_reduction
from dtckpt.dtensor.operators.rule_builders import (
    LOOKUP_PASSES,
    DimLabels,
    Labels,
    batched_images,
    completed_by_sum,
    drop_dim,
    from_labels,
    unlabel_dims,
    wrap_dim,
    wrap_dims,
)
from dtckpt.dtensor.operators.view_tracking import intersect, viewed_indices

_aten = torch.ops.aten


def _view(call: Call, *results: Labels, local: Callable[..., Any] | None = None) -> Rule | None:
    return from_labels(call, DimLabels([range(len(call.shapes[0]))], results), passes=any_reduction(), local=local)


def _alias(component: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    view: torch.Tensor = _aten.alias(component)
    return view


# --- views --------------------------------------------------------------------------------------------------------


def _indices_along(call: Call, dim: int, result: Labels) -> Rule | None:
    """Return the rule of a view of some indices along a dim, which may be split.

    If the dim is split and the dtype has sums, each device puts zeros for the elements that it lacks, and the result is
    pending a sum.
    """
    (source,), (shape,) = call.tensors, call.shapes
    contracted = completed_by_sum(call, dim)
    if not (shape and contracted and is_split(source, [dim])):
        return _view(call, result)
    labels = DimLabels([range(len(shape))], [result], contracted=contracted)
    summed = from_labels(call, labels, passes=LOOKUP_PASSES)
    indices, func = viewed_indices(call, shape), call.func

    def local(component: torch.Tensor, *_: Any, offsets: Sequence[tuple[int, ...]], **__: Any) -> torch.Tensor:
        sizes = [*component.shape[:dim], len(indices), *component.shape[dim + 1 :]]
        output = component.new_full(sizes, neutral_term(component.dtype))
        in_view, in_component = intersect(indices, offsets[0][dim], component.shape[dim])
        output[(slice(None),) * dim + (in_view,)] = component[(slice(None),) * dim + (in_component,)]
        return output.squeeze(dim) if func is _aten.select.int else output

    return summed and replace(summed, local=local, takes_offsets=True, makes_copy=True)


@rule(_aten.select.int)
def _select(call: Call) -> Rule | None:
    """``(a, n) -> (a)``; if the dim is split, the result is pending a sum."""
    ndim = len(call.shapes[0])
    dim = wrap_dim(call["dim"], ndim)
    return _indices_along(call, dim, drop_dim(dim, ndim))


@rule(_aten.slice.Tensor)
def _slice(call: Call) -> Rule | None:
    """``(a, n) -> (a, k)``; a slice of the whole dim keeps it; another slice of a split dim is pending a sum."""
    (shape,) = call.shapes
    dim = wrap_dim(call["dim"], len(shape))
    size = shape[dim] if shape else 0
    start, end, step = call["start"] or 0, call["end"], call["step"]
    if (start == 0 or start <= -size) and (end is None or end >= size) and step == 1:
        return _view(call, range(len(shape)), local=_alias)
    return _indices_along(call, dim, unlabel_dims(dim, len(shape)))


@rule(
    _aten.split.Tensor, _aten.split_with_sizes.default, _aten.unsafe_split.Tensor, _aten.unsafe_split_with_sizes.default
)
def _split(call: Call) -> Rule | None:
    """``(a, n + m) -> (a, n), (a, m)``; a single part is everything and leaves the dim as it is."""
    (shape,) = call.shapes
    dim = wrap_dim(call["dim"], len(shape))
    size = shape[dim] if shape else 0
    count = len(call["split_sizes"]) if "split_sizes" in call else max(1, -(-size // max(call["split_size"], 1)))
    if count == 1:
        return _view(call, range(len(shape)), local=lambda component, *_: [_alias(component)])
    return _view(call, *[unlabel_dims(dim, len(shape))] * count)


@rule(_aten.unbind.int)
def _unbind(call: Call) -> Rule | None:
    """``(a, 2) -> (a), (a)``"""
    (shape,) = call.shapes
    dim = wrap_dim(call["dim"], len(shape))
    return _view(call, *[drop_dim(dim, len(shape))] * (shape[dim] if shape else 0))


def _diagonal_labels(call: Call, ndim: int) -> Labels:
    """Return labels of a diagonal's dims: the tensor's labels without the two dims, then the diagonal's label."""
    pair = wrap_dims((call["dim1"], call["dim2"]), ndim)
    return [*(dim for dim in range(ndim) if dim not in pair), None]


@rule(_aten.diagonal.default)
def _diagonal(call: Call) -> Rule | None:
    """``(a, n, m) -> (a, k)``"""
    return _view(call, _diagonal_labels(call, len(call.shapes[0])))


@rule(_aten.diag_embed.default)
def _diag_embed(call: Call) -> Rule | None:
    """``(a, n) -> (a, m, m)``"""
    ndim = len(call.shapes[0])
    result: list[int | None] = [*range(ndim - 1)]
    for position in sorted(wrap_dims((call["dim1"], call["dim2"]), ndim + 1)):
        result.insert(position, None)
    return _view(call, result)


@rule(_aten.unfold.default)
def _unfold(call: Call) -> Rule | None:
    """``(a, n) -> (a, windows, size)``"""
    ndim = len(call.shapes[0])
    return _view(call, [*unlabel_dims(wrap_dim(call["dimension"], ndim), ndim), None])


# --- gradients: zeros, except for the elements in the view --------------------------------------------------------


def _gradient(call: Call, gradient: Labels, *, is_sum: bool = False) -> Rule | None:
    """Return the rule of a view's gradient with regard to its source.

    Args:
        call: The call.
        gradient: Labels of the gradient with regard to the view; the labels of the source are numbers of dims.
        is_sum: Whether elements of the source are in the view several times, so that their gradients add up.
    """
    labels = DimLabels([gradient], [range(len(call["input_sizes"]))])
    passes = LINEAR if is_sum else any_reduction()
    return from_labels(call, labels, passes=passes, local_size_args=(("input_sizes", 0),))


@rule(_aten.select_backward.default)
def _select_backward(call: Call) -> Rule | None:
    """``(a) -> (a, n)``"""
    ndim = len(call["input_sizes"])
    return _gradient(call, drop_dim(wrap_dim(call["dim"], ndim), ndim))


@rule(_aten.slice_backward.default)
def _slice_backward(call: Call) -> Rule | None:
    """``(a, k) -> (a, n)``; of a slice of everything the gradient is a copy."""
    ndim = len(call["input_sizes"])
    dim = wrap_dim(call["dim"], ndim)
    if tuple(call["input_sizes"]) == call.shapes[0] and call["step"] == 1:
        labels = DimLabels([range(ndim)], [range(ndim)])
        return from_labels(call, labels, passes=any_reduction(), local=lambda component, *_: component.clone())
    return _gradient(call, unlabel_dims(dim, ndim))


@rule(_aten.diagonal_backward.default)
def _diagonal_backward(call: Call) -> Rule | None:
    """``(a, k) -> (a, n, m)``"""
    return _gradient(call, _diagonal_labels(call, len(call["input_sizes"])))


@rule(_aten.unfold_backward.default)
def _unfold_backward(call: Call) -> Rule | None:
    """``(a, windows, size) -> (a, n)``: windows overlap, and the gradients of an element add up."""
    ndim = len(call["input_sizes"])
    return _gradient(call, [*unlabel_dims(wrap_dim(call["dim"], ndim), ndim), None], is_sum=True)


# --- a tensor with other values in place of a view's --------------------------------------------------------------


def _scattered(call: Call, source: Labels, *whole: int) -> Rule | None:
    """Return the rule of an operator that copies its first operand, with ``source`` along dims that must be whole."""
    dims = range(len(call.shapes[0]))
    return from_labels(call, DimLabels([dims, source], [dims], whole=whole), passes=any_reduction(0, 1))


@rule(_aten.select_scatter.default)
def _select_scatter(call: Call) -> Rule | None:
    """``(a, n), (a) -> (a, n)``"""
    ndim = len(call.shapes[0])
    dim = wrap_dim(call["dim"], ndim)
    return _scattered(call, drop_dim(dim, ndim), dim)


@rule(_aten.slice_scatter.default)
def _slice_scatter(call: Call) -> Rule | None:
    """``(a, n), (a, k) -> (a, n)``"""
    ndim = len(call.shapes[0])
    dim = wrap_dim(call["dim"], ndim)
    return _scattered(call, unlabel_dims(dim, ndim), dim)


@rule(_aten.diagonal_scatter.default)
def _diagonal_scatter(call: Call) -> Rule | None:
    """``(a, n, m), (a, k) -> (a, n, m)``"""
    ndim = len(call.shapes[0])
    return _scattered(call, _diagonal_labels(call, ndim), *wrap_dims((call["dim1"], call["dim2"]), ndim))


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
    """Rolled dims must be whole; without ``dims``, which rolls the flattened tensor, all dims must be."""
    return _reordered(call, call["dims"] or range(len(call.shapes[0])))


@rule(_aten.flip.default, _aten.rot90.default)
def _flip(call: Call) -> Rule | None:
    """Rotated dims must be whole."""
    return _reordered(call, call["dims"])
