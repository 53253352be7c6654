"""Calls of operators: arguments by name, the tensors among them, and facts of the operator's schema."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch

from dtckpt.dtensor.tensor import DTensor

Operator = Any
"""A ``torch._ops.OpOverload``."""


@dataclass(frozen=True)
class Signature:
    """Facts of an operator's schema.

    Args:
        names: Names of the arguments.
        defaults: Default values of the arguments, by name.
        written: Names of the arguments that the operator writes to.
        is_view: Whether the operator returns views of an argument.
        is_inplace_view: Whether the operator gives its first argument other sizes and strides.
        returns_one_tensor: Whether the operator returns one tensor, and no list or tuple.
    """

    names: tuple[str, ...]
    defaults: Mapping[str, Any]
    written: tuple[str, ...]
    is_view: bool
    is_inplace_view: bool
    returns_one_tensor: bool


@cache  # bounded by the number of operators
def signature_of(func: Operator) -> Signature:
    """Return the facts of an operator's schema."""
    arguments = func._schema.arguments
    returns = func._schema.returns
    return Signature(
        names=tuple(argument.name for argument in arguments),
        defaults={argument.name: argument.default_value for argument in arguments},
        written=tuple(one.name for one in arguments if one.alias_info is not None and one.alias_info.is_write),
        # The schema of ``_unsafe_view`` promises a copy, but PyTorch writes to its results to reach the source.
        is_view=func is torch.ops.aten._unsafe_view.default
        or any(one.alias_info is not None and not one.alias_info.is_write for one in returns),
        is_inplace_view=torch.Tag.inplace_view in func.tags,
        returns_one_tensor=[str(one.type) for one in returns] == ["Tensor"],
    )


@dataclass(frozen=True)
class Call:
    """A call of an operator with at least one DTensor and no plain tensor.

    Rules read shapes, dtypes and arguments that are no tensors. Of a float they may only read whether it is zero or not
    finite: all other floats share one plan.
    """

    func: Operator
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @cached_property
    def _bound(self) -> dict[str, Any]:
        signature = signature_of(self.func)
        return {**signature.defaults, **dict(zip(signature.names, self.args, strict=False)), **self.kwargs}

    def __getitem__(self, name: str) -> Any:
        """Return an argument by its name, the default if it was not given."""
        return self._bound[name]

    def __contains__(self, name: str) -> bool:
        return name in self._bound

    def get(self, name: str) -> Any:
        """Return an argument by its name, None if this overload has no such argument."""
        return self._bound.get(name)

    @cached_property
    def tensors(self) -> list[DTensor]:
        """The tensors among the arguments, those in lists too, in the order in which they were passed."""
        return list(tensors_in((*self.args, *self.kwargs.values())))

    @property
    def keeps_zeros(self) -> bool:
        """Whether zero, times or divided by any of the numbers among the arguments, is zero."""
        is_division = "div" in self.func.name()
        numbers = numbers_in((*self.args, *self.kwargs.values()))
        # The difference of an infinity or a NaN with itself is NaN.
        return all(number - number == 0 and (number != 0 or not is_division) for number in numbers)

    def operands(self, /, **by_name: Any) -> tuple[Any, ...]:
        """Return values that are given by argument name in the order of `tensors`; for an argument that is None, none.

        Args:
            by_name: A value for every tensor argument; for a list of tensors, a sequence of values.
        """
        ordered: list[Any] = []
        names = (*signature_of(self.func).names[: len(self.args)], *self.kwargs)
        for name in names:
            value = self[name]
            if isinstance(value, torch.Tensor):
                ordered.append(by_name[name])
            elif isinstance(value, list | tuple) and any(isinstance(item, torch.Tensor) for item in value):
                values = by_name[name]
                ordered += [one for one, item in zip(values, value, strict=True) if isinstance(item, torch.Tensor)]
        return tuple(ordered)

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Global shapes of `tensors`."""
        return [tuple(tensor.shape) for tensor in self.tensors]


def tensors_in(values: Sequence[Any]) -> Iterator[Any]:
    """Yield the tensors of arguments, those in lists too."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)


def numbers_in(values: Sequence[Any]) -> Iterator[Any]:
    """Yield the numbers among arguments, those in lists too."""
    for value in values:
        if isinstance(value, int | float | complex):
            yield value
        elif isinstance(value, list | tuple):
            yield from numbers_in(value)


def _replace(value: Any, tensors: Iterator[Any]) -> Any:
    """Return an argument with each of its tensors replaced by the next one of an iterator."""
    if isinstance(value, torch.Tensor):
        return next(tensors)
    if isinstance(value, list | tuple):
        return [_replace(item, tensors) for item in value]
    return value


def replace_tensors(
    args: Sequence[Any], kwargs: Mapping[str, Any], tensors: Sequence[Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Return arguments with their tensors replaced by others, in the order of `tensors_in`."""
    remaining = iter(tensors)
    positional = [_replace(value, remaining) for value in args]
    return positional, {name: _replace(value, remaining) for name, value in kwargs.items()}


@cache  # bounded by the number of operators
def functional_of(func: Operator) -> Operator | None:
    """Return the functional variant of an operator that writes to an argument: ``add`` for ``add_``; else None."""
    schema = func._schema
    base = schema.name.removeprefix("aten::")
    if not schema.name.startswith("aten::"):
        return None
    writes_out = any(one.is_out for one in schema.arguments)
    name = base if writes_out else base.removesuffix("_")
    packet = getattr(torch.ops.aten, name, None)
    if packet is None or (name == base and not writes_out):
        return None
    inputs = [(one.name, str(one.type)) for one in schema.arguments if not one.is_out]
    for overload in packet.overloads():
        candidate = getattr(packet, overload)
        arguments = [(one.name, str(one.type)) for one in candidate._schema.arguments]
        if arguments == inputs and not candidate._schema.is_mutable:
            return candidate
    return None
