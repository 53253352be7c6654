"""Views: other sizes and orders of dims for the same elements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from dtckpt.dtensor.operators.call import Call
from dtckpt.dtensor.operators.registry import rule
from dtckpt.dtensor.operators.rule import LINEAR, Dims, Factors, Passes, Rule, pointwise
from dtckpt.layout.placement import REDUCE_OPS

_aten = torch.ops.aten

_ALL: Passes = dict.fromkeys(REDUCE_OPS, ((0,),))


def _moved(call: Call, order: Sequence[int]) -> Rule:
    factors = Factors()
    dims = factors.dims(call.shapes[0])
    return Rule(factors.sizes, (dims,), (tuple(dims[one] for one in order),), passes=_ALL)


@rule(_aten.t.default)
def _transpose_matrix(call: Call) -> Rule:
    return _moved(call, range(len(call.shapes[0]))[::-1])


@rule(_aten.transpose.int)
def _transpose(call: Call) -> Rule | None:
    ndim = len(call.shapes[0])
    one, other = call["dim0"], call["dim1"]
    if not ndim or not all(-ndim <= dim < ndim for dim in (one, other)):
        return None
    order = list(range(ndim))
    order[one], order[other] = order[other], order[one]
    return _moved(call, order)


@rule(_aten.permute.default)
def _permute(call: Call) -> Rule | None:
    ndim = len(call.shapes[0])
    order = [dim % max(ndim, 1) for dim in call["dims"]]
    return _moved(call, order) if sorted(order) == list(range(ndim)) else None


@rule(_aten.unsqueeze.default)
def _unsqueeze(call: Call) -> Rule | None:
    factors = Factors()
    dims = factors.dims(call.shapes[0])
    place, count = call["dim"], len(dims) + 1
    if not -count <= place < count:
        return None
    place %= count
    return Rule(factors.sizes, (dims,), ((*dims[:place], (), *dims[place:]),), passes=_ALL)


@rule(_aten.view.default, _aten._unsafe_view.default)
def _view(call: Call) -> Rule | None:
    """Pieces of the operand's dims multiply up to pieces of the result's; a piece of both is a factor."""
    size = inferred(call["size"], call.tensors[0].numel())
    if size is None:
        return None
    matched = matched_dims(call.shapes[0], size)
    if matched is None:
        return None
    sizes, dims, result = matched
    return Rule(sizes, (dims,), (result,), passes=_ALL, sized=(("size", 0),), local=_reshaped)


def _reshaped(tensor: torch.Tensor, size: Sequence[int]) -> torch.Tensor:
    """Return a view if the component's strides allow one, else a copy."""
    return tensor.reshape(size)


def inferred(size: Sequence[int], numel: int) -> tuple[int, ...] | None:
    """Return sizes with -1 resolved; None if they do not hold so many elements."""
    known = 1
    for one in size:
        known *= one if one >= 0 else 1
    free = [number for number, one in enumerate(size) if one < 0]
    if not free:
        return tuple(size) if known == numel else None
    if len(free) > 1 or known == 0 or numel % known:
        return None
    return tuple(numel // known if number == free[0] else one for number, one in enumerate(size))


def matched_dims(old: Sequence[int], new: Sequence[int]) -> tuple[tuple[int, ...], Dims, Dims] | None:
    """Cut dims into factors that both shapes are products of.

    Returns:
        Sizes of the factors, and the factors of every old and of every new dim; None for tensors without elements.
    """
    if 0 in old or 0 in new:
        return None
    factors = Factors()
    before: list[list[int]] = [[] for _ in old]
    after: list[list[int]] = [[] for _ in new]
    olds, news = _Sizes(old), _Sizes(new)
    while True:
        while olds.is_at_one() and news.is_at_one():  # a dim of size 1 may be split, too: its only element is somewhere
            factor = factors.new(1)
            before[olds.pass_one()].append(factor)
            after[news.pass_one()].append(factor)
        if olds.left() == 1 or news.left() == 1:
            break
        small, large = sorted((olds.left(), news.left()))
        if large % small == 0:
            factor = factors.new(small)
            before[olds.dim].append(factor)
            after[news.dim].append(factor)
            olds.take(small)
            news.take(small)
        else:
            _part(olds, news, factors, before, after)
    return factors.sizes, tuple(map(tuple, before)), tuple(map(tuple, after))


class _Sizes:
    """The sizes of dims, of which factors are taken from the left."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._whole = tuple(sizes)
        self._sizes = list(sizes)
        self.dim = 0

    def is_at_one(self) -> bool:
        """Return whether the next dim has size 1, and nothing is left of the one before."""
        if self.dim < len(self._sizes) and self._sizes[self.dim] == 1 < self._whole[self.dim]:
            self.dim += 1
        return self.dim < len(self._sizes) and self._whole[self.dim] == 1

    def pass_one(self) -> int:
        """Go past a dim of size 1, and return which it was."""
        self.dim += 1
        return self.dim - 1

    def left(self) -> int:
        """Return what is left of the first dim of which something is; 1 at the end."""
        while self.dim < len(self._sizes) and self._sizes[self.dim] == 1:
            self.dim += 1
        return self._sizes[self.dim] if self.dim < len(self._sizes) else 1

    def take(self, factor: int) -> None:
        self._sizes[self.dim] //= factor


def _part(
    olds: _Sizes, news: _Sizes, factors: Factors, before: Sequence[list[int]], after: Sequence[list[int]]
) -> None:
    """Give dims that have no factors in common factors of their own, up to where both shapes meet again."""
    counts = [1, 1]
    while counts[0] != counts[1] or counts[0] == 1:
        side = 0 if counts[0] <= counts[1] else 1
        sizes, dims = ((olds, before), (news, after))[side]
        size = sizes.left()
        dims[sizes.dim].append(factors.new(size))
        counts[side] *= size
        sizes.take(size)


@rule(_aten._conj.default)
def _conjugate(call: Call) -> Rule | None:
    """Components are conjugated at once: what runs on them takes no notice of PyTorch's mark for it."""
    found = pointwise(call.shapes, LINEAR)
    return found and replace(found, local=torch.conj_physical, is_copying=True)


@rule(_aten._neg_view.default)
def _negate(call: Call) -> Rule | None:
    """As for conjugates."""
    found = pointwise(call.shapes, LINEAR)
    return found and replace(found, local=torch.neg, is_copying=True)
