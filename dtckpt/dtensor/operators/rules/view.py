"""Views of all elements: ``view``, ``t``, ``transpose``, ``permute``, ``squeeze``, ``expand``, ``conj``.

The operators give the same elements other dims, in another order. Views of some elements are in `slicing`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from dtckpt.dtensor.operators.call import Call
from dtckpt.dtensor.operators.registry import composite, rule
from dtckpt.dtensor.operators.rule import LINEAR, Dims, Factors, Rule, any_reduction
from dtckpt.dtensor.operators.rule_builders import DimLabels, from_labels, pointwise, unlabel_dims, wrap_dims

_aten = torch.ops.aten


# --- dims in another order, of size 1, repeated -------------------------------------------------------------------


def _permuted(call: Call, order: Sequence[int]) -> Rule:
    """Return the rule of a view whose dims are the operand's in this order."""
    factors = Factors()
    dims = factors.dims(call.shapes[0])
    return Rule(factors.sizes, (dims,), (tuple(dims[one] for one in order),), passes=any_reduction())


@rule(_aten.t.default)
def _t(call: Call) -> Rule:
    """``(a, b) -> (b, a)``"""
    return _permuted(call, range(len(call.shapes[0]))[::-1])


@rule(_aten.transpose.int)
def _transpose(call: Call) -> Rule | None:
    """``(a, b, c) -> (c, b, a)``"""
    ndim = len(call.shapes[0])
    one, other = call["dim0"], call["dim1"]
    if not ndim or not all(-ndim <= dim < ndim for dim in (one, other)):
        return None
    order = list(range(ndim))
    order[one], order[other] = order[other], order[one]
    return _permuted(call, order)


@rule(_aten.permute.default)
def _permute(call: Call) -> Rule | None:
    """``(a, b, c) -> (b, c, a)``"""
    ndim = len(call.shapes[0])
    order = [dim % max(ndim, 1) for dim in call["dims"]]
    return _permuted(call, order) if sorted(order) == list(range(ndim)) else None


@rule(_aten.unsqueeze.default)
def _unsqueeze(call: Call) -> Rule | None:
    """``(a, b) -> (a, 1, b)``"""
    factors = Factors()
    dims = factors.dims(call.shapes[0])
    position, count = call["dim"], len(dims) + 1
    if not -count <= position < count:
        return None
    position %= count
    return Rule(factors.sizes, (dims,), ((*dims[:position], (), *dims[position:]),), passes=any_reduction())


@rule(_aten.squeeze.default, _aten.squeeze.dim, _aten.squeeze.dims)
def _squeeze(call: Call) -> Rule | None:
    """``(a, 1, b) -> (a, b)``; a component may have more dims of size 1 than the tensor, and they stay."""
    (shape,) = call.shapes
    named = wrap_dims(call["dim"], len(shape)) if "dim" in call else frozenset(range(len(shape)))
    squeezed = tuple(dim for dim, size in enumerate(shape) if size == 1 and dim in named)
    result = [dim for dim in range(len(shape)) if dim not in squeezed]

    def local(component: torch.Tensor, *_: Any) -> torch.Tensor:
        return component.squeeze(squeezed)

    return from_labels(call, DimLabels([range(len(shape))], [result]), passes=any_reduction(), local=local)


@rule(_aten.expand.default)
def _expand(call: Call) -> Rule | None:
    """``(a, 1) -> (n, a, m)``: every device repeats new dims and dims of size 1."""
    (shape,) = call.shapes
    lead = len(call["size"]) - len(shape)
    result = [None] * lead + [dim if call["size"][lead + dim] in {-1, size} else None for dim, size in enumerate(shape)]
    labels = DimLabels([range(len(shape))], [result])
    return from_labels(call, labels, passes=any_reduction(), local_size_args=(("size", 0),))


# --- other sizes --------------------------------------------------------------------------------------------------


@rule(_aten.view.default, _aten._unsafe_view.default)
def _view(call: Call) -> Rule | None:
    """``(a, b * c) -> (a * b, c)``: the operand's dims and the result's are products of common factors."""
    size = infer_size(call["size"], call.tensors[0].numel())
    if size is None:
        return None
    common = common_factors(call.shapes[0], size)
    if common is None:
        return None
    sizes, dims, result = common
    return Rule(
        sizes, (dims,), (result,), passes=any_reduction(), local_size_args=(("size", 0),), local=_view_or_reshape
    )


def _view_or_reshape(component: torch.Tensor, size: Sequence[int]) -> torch.Tensor:
    """Return a view if the component's strides allow one, else a copy."""
    return component.reshape(size)


def _view_or_copy(view: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return a function that views a component, or a copy of it if only the global tensor's strides allow the view."""

    def local(component: torch.Tensor, *args: Any) -> torch.Tensor:
        try:
            return view(component, *args)
        except RuntimeError:
            return view(component.clone(memory_format=torch.contiguous_format), *args)

    return local


_as_complex = _view_or_copy(_aten.view_as_complex.default)
_as_dtype = _view_or_copy(_aten.view.dtype)


def infer_size(size: Sequence[int], numel: int) -> tuple[int, ...] | None:
    """Return sizes with -1 inferred; None if no size fits so many elements."""
    known = 1
    for one in size:
        known *= one if one >= 0 else 1
    free = [number for number, one in enumerate(size) if one < 0]
    if not free:
        return tuple(size) if known == numel else None
    if len(free) > 1 or known == 0 or numel % known:
        return None
    return tuple(numel // known if number == free[0] else one for number, one in enumerate(size))


def common_factors(old: Sequence[int], new: Sequence[int]) -> tuple[tuple[int, ...], Dims, Dims] | None:
    """Cut the dims of two shapes into common factors, from the left.

    Both shapes lay the same elements out in one row, so a factor of both is the same run of that row::

        old  |----- 6 -----|- 4 -|          6 = 2 * 3
        new  |- 2 -|------ 12 -----|       12 = 3 * 4
              2       3       4            factors

    Dims that have no common factor, as 2 and 3 in (2, 3) -> (3, 2), get separate factors; no axis may split those.

    Returns:
        Sizes of the factors, and the factors of every old and of every new dim; None for tensors without elements.
    """
    if 0 in old or 0 in new:
        return None
    factors = Factors()
    old_dims: list[list[int]] = [[] for _ in old]
    new_dims: list[list[int]] = [[] for _ in new]
    olds, news = _Sizes(old), _Sizes(new)
    while True:
        # An axis may split a dim of size 1, too: one device then has its only element. So it gets a factor.
        while olds.is_at_one() and news.is_at_one():
            factor = factors.new(1)
            old_dims[olds.pass_one()].append(factor)
            new_dims[news.pass_one()].append(factor)
        if olds.remainder() == 1 or news.remainder() == 1:
            break
        small, large = sorted((olds.remainder(), news.remainder()))
        if large % small == 0:
            factor = factors.new(small)
            old_dims[olds.dim].append(factor)
            new_dims[news.dim].append(factor)
            olds.take(small)
            news.take(small)
        else:
            _add_own_factors(olds, news, factors, old_dims, new_dims)
    return factors.sizes, tuple(map(tuple, old_dims)), tuple(map(tuple, new_dims))


class _Sizes:
    """The sizes of dims; `common_factors` takes factors from them, from the left."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._whole = tuple(sizes)
        self._remainders = list(sizes)
        self.dim = 0

    def is_at_one(self) -> bool:
        """Whether the next dim has size 1, and nothing of the dim before remains."""
        if self.dim < len(self._remainders) and self._remainders[self.dim] == 1 < self._whole[self.dim]:
            self.dim += 1
        return self.dim < len(self._remainders) and self._whole[self.dim] == 1

    def pass_one(self) -> int:
        """Step over a dim of size 1, and return its number."""
        self.dim += 1
        return self.dim - 1

    def remainder(self) -> int:
        """Step to the first dim of which something remains, and return how much; 1 at the end."""
        while self.dim < len(self._remainders) and self._remainders[self.dim] == 1:
            self.dim += 1
        return self._remainders[self.dim] if self.dim < len(self._remainders) else 1

    def take(self, factor: int) -> None:
        """Take a factor from the current dim."""
        self._remainders[self.dim] //= factor


def _add_own_factors(
    olds: _Sizes, news: _Sizes, factors: Factors, old_dims: Sequence[list[int]], new_dims: Sequence[list[int]]
) -> None:
    """Give separate factors to dims without a common factor, up to where both shapes meet again."""
    counts = [1, 1]
    while counts[0] != counts[1] or counts[0] == 1:
        side = 0 if counts[0] <= counts[1] else 1
        sizes, dims = ((olds, old_dims), (news, new_dims))[side]
        size = sizes.remainder()
        dims[sizes.dim].append(factors.new(size))
        counts[side] *= size
        sizes.take(size)


# --- other dtypes -------------------------------------------------------------------------------------------------


@rule(_aten.view_as_real.default)
def _view_as_real(call: Call) -> Rule | None:
    """``(a) -> (a, 2)``"""
    dims = range(len(call.shapes[0]))
    return from_labels(call, DimLabels([dims], [[*dims, None]]), passes=LINEAR)


@rule(_aten.view_as_complex.default)
def _view_as_complex(call: Call) -> Rule | None:
    """``(a, 2) -> (a)``"""
    dims = range(len(call.shapes[0]))
    return from_labels(call, DimLabels([dims], [dims[:-1]]), passes=LINEAR, local=_as_complex)


@rule(_aten.view.dtype)
def _view_dtype(call: Call) -> Rule | None:
    """``(a, n) -> (a, m)``: the last dim changes in size if the dtypes differ in size."""
    ndim = len(call.shapes[0])
    is_same = call["dtype"].itemsize == call.tensors[0].dtype.itemsize
    labels = DimLabels([range(ndim)], [range(ndim) if is_same else unlabel_dims(ndim - 1, ndim)])
    return from_labels(call, labels, local=_as_dtype)


@rule(_aten._conj.default)
def _conjugate(call: Call) -> Rule | None:
    """Components are conjugated at once: the kernels that run on them later do not see PyTorch's lazy conjugate bit."""
    linear = pointwise(call.shapes, LINEAR)
    return linear and replace(linear, local=torch.conj_physical, makes_copy=True)


@rule(_aten._neg_view.default)
def _negate(call: Call) -> Rule | None:
    """Components are negated at once: the kernels that run on them later do not see PyTorch's lazy negative bit."""
    linear = pointwise(call.shapes, LINEAR)
    return linear and replace(linear, local=torch.neg, makes_copy=True)


# --- copies of views ----------------------------------------------------------------------------------------------


def _contiguous(view: torch.Tensor) -> torch.Tensor:
    return view.clone(memory_format=torch.contiguous_format)


def _clone_of(view: Any) -> Callable[..., Any]:
    def clone(*args: Any, **kwargs: Any) -> Any:
        """Clone the view."""
        views = view(*args, **kwargs)
        return _contiguous(views) if isinstance(views, torch.Tensor) else [_contiguous(one) for one in views]

    return clone


for _copy, _view_of in {
    _aten.alias_copy.default: _aten.alias.default,
    _aten.as_strided_copy.default: _aten.as_strided.default,
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
    _aten.view_copy.default: torch.reshape,
    _aten.view_copy.dtype: _aten.view.dtype,
}.items():
    composite(_copy)(_clone_of(_view_of))
