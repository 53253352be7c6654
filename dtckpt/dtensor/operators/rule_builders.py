"""Rules from labels: dims of operands and results that bear the same label are the same factor.

The shapes of results are PyTorch's own, found on meta tensors, so that a rule cannot get them wrong, and arguments that
PyTorch refuses are refused in its words before anything moves.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any

import torch

from dtckpt.dtensor.operators.call import Call, tensors_in
from dtckpt.dtensor.operators.plans import on_meta
from dtckpt.dtensor.operators.rule import Dims, Factors, Passes, Rule
from dtckpt.layout.placement import REDUCE_OPS

Labels = Sequence[Hashable | None]
"""A label per dim; None for a dim that is like no other and must be whole."""


class UnknownShapeError(Exception):
    """PyTorch cannot tell the shapes of an operator's results without computing them."""


def result_shapes(call: Call) -> list[tuple[int, ...]]:
    """Return the shapes of a call's results; raises what the operator raises for such arguments.

    Raises:
        UnknownShapeError: Nobody knows them.
    """
    try:
        made = on_meta(call.func, call.args, call.kwargs, call.tensors)
    except NotImplementedError as error:  # of PyTorch: the operator has no kernel for tensors without data
        raise UnknownShapeError from error
    return [tuple(one.shape) for one in tensors_in([made])]


def every(*group: int) -> Passes:
    """Return the passes of an operator that moves elements of these operands and puts nothing but zeros beside them."""
    return dict.fromkeys(REDUCE_OPS, (group or (0,),))


def linked(
    call: Call,
    operands: Sequence[Labels],
    results: Sequence[Labels],
    *,
    whole: Collection[Hashable] = (),
    broadcast: Collection[Hashable] = (),
    contracted: Mapping[Hashable, str] | None = None,
    passes: Passes | None = None,
    unread: Collection[int] = (),
    sized: tuple[tuple[str, int], ...] = (),
    local: Callable[..., Any] | None = None,
) -> Rule | None:
    """Return the rule of a call; None if the labels do not fit its shapes.

    A label whose dims differ in size is that of dims that must be whole.

    Args:
        call: The call.
        operands: Labels of every operand's dims.
        results: Labels of every result's dims.
        whole: Labels that no axis may split.
        broadcast: Labels whose dims of size 1 stand for any size.
        contracted: Reduction that results wait for when a label which they do not have is split.
        passes: See `Rule`.
        unread: See `Rule`.
        sized: See `Rule`.
        local: See `Rule`.
    """
    shapes = [*call.shapes, *result_shapes(call)]
    labels = [*operands, *results]
    if [len(one) for one in labels] != [len(shape) for shape in shapes]:
        return None
    sizes: dict[Hashable, set[int]] = {}
    for names, shape in zip(labels, shapes, strict=True):
        for name, size in zip(names, shape, strict=True):
            if name is not None and not (name in broadcast and size == 1):
                sizes.setdefault(name, set()).add(size)
    factors = Factors()
    numbers = {name: factors.new(next(iter(found))) for name, found in sizes.items() if len(found) == 1}

    def dims_of(names: Labels, shape: Sequence[int]) -> Dims:
        return tuple(_dim(name, size, numbers, factors) for name, size in zip(names, shape, strict=True))

    dims = [dims_of(names, shape) for names, shape in zip(labels, shapes, strict=True)]
    return Rule(
        factors.sizes,
        tuple(dims[: len(operands)]),
        tuple(dims[len(operands) :]),
        contracted={numbers[name]: op for name, op in (contracted or {}).items() if name in numbers},
        whole=frozenset(numbers[name] for name in whole if name in numbers),
        passes=passes or {},
        unread=frozenset(unread),
        sized=sized,
        local=local,
    )


def _dim(name: Hashable | None, size: int, numbers: Mapping[Hashable, int], factors: Factors) -> tuple[int, ...]:
    if name in numbers and factors.sizes[numbers[name]] == size:
        return (numbers[name],)
    # No other dim has this factor, so that no axis may split it.
    return () if size == 1 else (factors.new(size),)


def place_of(dim: int, ndim: int) -> int:
    """Return a dim that may be counted from the end; one that is out of range is left to PyTorch to refuse."""
    return dim % max(ndim, 1)


def places_of(dims: int | Sequence[int], ndim: int) -> frozenset[int]:
    """Return dims, each as `place_of`."""
    return frozenset(place_of(dim, ndim) for dim in ([dims] if isinstance(dims, int) else dims))


def but(dims: int | Collection[int], ndim: int) -> list[int | None]:
    """Return labels of a tensor's dims, by number, with None for some."""
    gone = {dims} if isinstance(dims, int) else dims
    return [None if dim in gone else dim for dim in range(ndim)]


def without(dim: int, ndim: int) -> list[int]:
    """Return labels of a tensor's dims, by number, less one dim."""
    return [one for one in range(ndim) if one != dim]


def aliased(tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """Return a view of all of a component."""
    made: torch.Tensor = torch.ops.aten.alias(tensor)
    return made
