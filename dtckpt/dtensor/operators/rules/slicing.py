"""Views of parts of a tensor, or with other dims, and what is done with their gradients.

The dims that such an operator works along are whole; the others are as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from dtckpt.dtensor.operators.call import Call
from dtckpt.dtensor.operators.composite_helpers import is_split
from dtckpt.dtensor.operators.registry import composite, rule
from dtckpt.dtensor.operators.rule import LINEAR, Rule
from dtckpt.dtensor.operators.rule_builders import Labels, aliased, but, every, linked, place_of, places_of, without
from dtckpt.dtensor.operators.view_tracking import meeting, places_in

_aten = torch.ops.aten


def _view(call: Call, *results: Labels, local: Callable[..., Any] | None = None) -> Rule | None:
    return linked(call, [range(len(call.shapes[0]))], results, passes=every(), local=local)


@rule(_aten.squeeze.default, _aten.squeeze.dim, _aten.squeeze.dims)
def _squeeze(call: Call) -> Rule | None:
    """``(a, 1, b) -> (a, b)``; a piece's dims of size 1 may be more than the tensor's."""
    (shape,) = call.shapes
    named = places_of(call["dim"], len(shape)) if "dim" in call else frozenset(range(len(shape)))
    gone = tuple(dim for dim, size in enumerate(shape) if size == 1 and dim in named)
    kept = [dim for dim in range(len(shape)) if dim not in gone]

    def local(tensor: torch.Tensor, *_: Any) -> torch.Tensor:
        return tensor.squeeze(gone)

    return _view(call, kept, local=local)


@rule(_aten.expand.default)
def _expand(call: Call) -> Rule | None:
    """``(a, 1) -> (n, a, m)``: new dims and those of size 1 are repeated on every device."""
    (shape,) = call.shapes
    lead = len(call["size"]) - len(shape)
    result = [None] * lead + [dim if call["size"][lead + dim] in {-1, size} else None for dim, size in enumerate(shape)]
    return linked(call, [range(len(shape))], [result], passes=every(), sized=(("size", 0),))


def _chosen(call: Call, dim: int, result: Labels) -> Rule | None:
    """Return the rule of a view of places along a dim. Where it is split, each device gives those that it has."""
    (source,), (shape,) = call.tensors, call.shapes
    if not shape or source.dtype == torch.bool or not is_split(source, [dim]):
        return _view(call, result)
    found = linked(call, [range(len(shape))], [result], contracted={dim: "sum"}, passes=every())
    places, func = places_in(call, shape), call.func

    def local(piece: torch.Tensor, *_: Any, offsets: Sequence[tuple[int, ...]], **__: Any) -> torch.Tensor:
        sizes = [*piece.shape[:dim], len(places), *piece.shape[dim + 1 :]]
        made = piece.new_zeros(sizes)
        there, here = meeting(places, offsets[0][dim], piece.shape[dim])
        made[(slice(None),) * dim + (there,)] = piece[(slice(None),) * dim + (here,)]
        return made.squeeze(dim) if func is _aten.select.int else made

    return found and replace(found, local=local, is_located=True, is_copying=True)


@rule(_aten.select.int)
def _select(call: Call) -> Rule | None:
    ndim = len(call.shapes[0])
    dim = place_of(call["dim"], ndim)
    return _chosen(call, dim, without(dim, ndim))


@rule(_aten.slice.Tensor)
def _slice(call: Call) -> Rule | None:
    """A slice of everything leaves the dim as it is."""
    (shape,) = call.shapes
    dim = place_of(call["dim"], len(shape))
    size = shape[dim] if shape else 0
    start, end, step = call["start"] or 0, call["end"], call["step"]
    if (start == 0 or start <= -size) and (end is None or end >= size) and step == 1:
        return _view(call, range(len(shape)), local=aliased)
    return _chosen(call, dim, but(dim, len(shape)))


@rule(
    _aten.split.Tensor, _aten.split_with_sizes.default, _aten.unsafe_split.Tensor, _aten.unsafe_split_with_sizes.default
)
def _split(call: Call) -> Rule | None:
    """A single part is everything and leaves the dim as it is."""
    (shape,) = call.shapes
    dim = place_of(call["dim"], len(shape))
    size = shape[dim] if shape else 0
    count = len(call["split_sizes"]) if "split_sizes" in call else max(1, -(-size // max(call["split_size"], 1)))
    if count == 1:
        return _view(call, range(len(shape)), local=lambda tensor, *_: [aliased(tensor)])
    return _view(call, *[but(dim, len(shape))] * count)


@rule(_aten.unbind.int)
def _unbind(call: Call) -> Rule | None:
    (shape,) = call.shapes
    dim = place_of(call["dim"], len(shape))
    return _view(call, *[without(dim, len(shape))] * (shape[dim] if shape else 0))


@rule(_aten.diagonal.default)
def _diagonal(call: Call) -> Rule | None:
    """``(a, n, m) -> (a, k)``"""
    ndim = len(call.shapes[0])
    gone = places_of((call["dim1"], call["dim2"]), ndim)
    return _view(call, [*(dim for dim in range(ndim) if dim not in gone), None])


@rule(_aten.unfold.default)
def _unfold(call: Call) -> Rule | None:
    """``(a, n) -> (a, windows, size)``"""
    ndim = len(call.shapes[0])
    return _view(call, [*but(place_of(call["dimension"], ndim), ndim), None])


@rule(_aten.view_as_real.default)
def _view_as_real(call: Call) -> Rule | None:
    """``(a) -> (a, 2)``"""
    return linked(call, [range(len(call.shapes[0]))], [[*range(len(call.shapes[0])), None]], passes=LINEAR)


@rule(_aten.view_as_complex.default)
def _view_as_complex(call: Call) -> Rule | None:
    """``(a, 2) -> (a)``"""
    return linked(call, [range(len(call.shapes[0]))], [range(len(call.shapes[0]) - 1)], passes=LINEAR)


@rule(_aten.view.dtype)
def _view_dtype(call: Call) -> Rule | None:
    """Between dtypes of different sizes the last dim grows or shrinks."""
    ndim = len(call.shapes[0])
    is_same = call["dtype"].itemsize == call.tensors[0].dtype.itemsize
    return linked(call, [range(ndim)], [range(ndim) if is_same else but(ndim - 1, ndim)])


# --- gradients: zeros, but for what was viewed --------------------------------------------------------------------


def _placed(call: Call, gradient: Labels) -> Rule | None:
    ndim = len(call["input_sizes"])
    return linked(call, [gradient], [range(ndim)], passes=every(), sized=(("input_sizes", 0),))


@rule(_aten.select_backward.default)
def _select_backward(call: Call) -> Rule | None:
    ndim = len(call["input_sizes"])
    return _placed(call, without(place_of(call["dim"], ndim), ndim))


@rule(_aten.slice_backward.default)
def _slice_backward(call: Call) -> Rule | None:
    ndim = len(call["input_sizes"])
    dim = place_of(call["dim"], ndim)
    if tuple(call["input_sizes"]) == call.shapes[0] and call["step"] == 1:
        return linked(call, [range(ndim)], [range(ndim)], passes=every(), local=lambda tensor, *_: tensor.clone())
    return _placed(call, but(dim, ndim))


@rule(_aten.diagonal_backward.default)
def _diagonal_backward(call: Call) -> Rule | None:
    ndim = len(call["input_sizes"])
    gone = places_of((call["dim1"], call["dim2"]), ndim)
    return _placed(call, [*(dim for dim in range(ndim) if dim not in gone), None])


@rule(_aten.unfold_backward.default)
def _unfold_backward(call: Call) -> Rule | None:
    """Windows overlap: what they have in common is added up."""
    ndim = len(call["input_sizes"])
    gradient = [*but(place_of(call["dim"], ndim), ndim), None]
    return linked(call, [gradient], [range(ndim)], passes=LINEAR, sized=(("input_sizes", 0),))


# --- a part exchanged for other values ----------------------------------------------------------------------------


def _exchanged(call: Call, source: Labels, *whole: int) -> Rule | None:
    dims = range(len(call.shapes[0]))
    return linked(call, [dims, source], [dims], whole=whole, passes=every(0, 1))


@rule(_aten.select_scatter.default)
def _select_scatter(call: Call) -> Rule | None:
    ndim = len(call.shapes[0])
    dim = place_of(call["dim"], ndim)
    return _exchanged(call, without(dim, ndim), dim)


@rule(_aten.slice_scatter.default)
def _slice_scatter(call: Call) -> Rule | None:
    ndim = len(call.shapes[0])
    dim = place_of(call["dim"], ndim)
    return _exchanged(call, but(dim, ndim), dim)


@rule(_aten.diagonal_scatter.default)
def _diagonal_scatter(call: Call) -> Rule | None:
    ndim = len(call.shapes[0])
    gone = places_of((call["dim1"], call["dim2"]), ndim)
    return _exchanged(call, [*(dim for dim in range(ndim) if dim not in gone), None], *gone)


# --- copies of views ----------------------------------------------------------------------------------------------


def _copying(view: Any) -> Callable[..., Any]:
    def copied(*args: Any, **kwargs: Any) -> Any:
        made = view(*args, **kwargs)
        return made.clone() if isinstance(made, torch.Tensor) else [one.clone() for one in made]

    return copied


for _copy, _of in {
    _aten.alias_copy.default: _aten.alias.default,
    _aten.detach_copy.default: _aten.alias.default,
    _aten.diagonal_copy.default: _aten.diagonal.default,
    _aten.expand_copy.default: _aten.expand.default,
    _aten.permute_copy.default: _aten.permute.default,
    _aten.select_copy.int: _aten.select.int,
    _aten.slice_copy.Tensor: _aten.slice.Tensor,
    _aten.split_copy.Tensor: _aten.split.Tensor,
    _aten.split_with_sizes_copy.default: _aten.split_with_sizes.default,
    _aten.squeeze_copy.default: _aten.squeeze.default,
    _aten.squeeze_copy.dim: _aten.squeeze.dim,
    _aten.squeeze_copy.dims: _aten.squeeze.dims,
    _aten.t_copy.default: _aten.t.default,
    _aten.transpose_copy.int: _aten.transpose.int,
    _aten.unbind_copy.int: _aten.unbind.int,
    _aten.unfold_copy.default: _aten.unfold.default,
    _aten.unsqueeze_copy.default: _aten.unsqueeze.default,
    _aten.view_as_complex_copy.default: _aten.view_as_complex.default,
    _aten.view_as_real_copy.default: _aten.view_as_real.default,
    _aten.view_copy.default: _aten.view.default,
    _aten.view_copy.dtype: _aten.view.dtype,
}.items():
    composite(_copy)(_copying(_of))
