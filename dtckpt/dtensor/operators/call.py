"""Calls of operators: what the schema says of them, and the tensors among their arguments."""

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
    """What an operator's schema says.

    Args:
        names: Of the arguments.
        defaults: By name.
        written: Names of arguments that the operator writes to.
        is_view: Whether results share memory with an argument without being it.
    """

    names: tuple[str, ...]
    defaults: Mapping[str, Any]
    written: tuple[str, ...]
    is_view: bool


@cache  # bounded by the number of operators
def signature_of(func: Operator) -> Signature:
    """Return what an operator's schema says."""
    arguments = func._schema.arguments
    returns = func._schema.returns
    return Signature(
        names=tuple(argument.name for argument in arguments),
        defaults={argument.name: argument.default_value for argument in arguments},
        written=tuple(one.name for one in arguments if one.alias_info is not None and one.alias_info.is_write),
        # PyTorch writes to outputs through unsafe views, which its schema calls copies.
        is_view=func is torch.ops.aten._unsafe_view.default
        or any(one.alias_info is not None and not one.alias_info.is_write for one in returns),
    )


@dataclass(frozen=True)
class Call:
    """A call of an operator with at least one DTensor; plain tensors are DTensors already.

    Rules read shapes, dtypes and arguments that are no tensors. They must not read floats, but
    for whether they are zero or not finite: plans are kept by the types of these alone.
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
        found = numbers_in((*self.args, *self.kwargs.values()))
        return all(number - number == 0 and (number != 0 or not is_division) for number in found)

    def operands(self, /, **by_name: Any) -> tuple[Any, ...]:
        """Return what is given per argument (per tensor of a list: a sequence), in the order of `tensors`.

        Arguments that are None in this call are left out.
        """
        ordered: list[Any] = []
        names = (*signature_of(self.func).names[: len(self.args)], *self.kwargs)
        for name in names:
            value = self[name]
            if isinstance(value, torch.Tensor):
                ordered.append(by_name[name])
            elif isinstance(value, list | tuple) and any(isinstance(item, torch.Tensor) for item in value):
                there = by_name[name]
                ordered += [one for one, item in zip(there, value, strict=True) if isinstance(item, torch.Tensor)]
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
    """Return an argument with its tensors exchanged for the next of an iterator."""
    if isinstance(value, torch.Tensor):
        return next(tensors)
    if isinstance(value, list | tuple):
        return [_replace(item, tensors) for item in value]
    return value


def replace_tensors(
    args: Sequence[Any], kwargs: Mapping[str, Any], tensors: Sequence[Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Return arguments with their tensors exchanged for others, in the order of `tensors_in`."""
    following = iter(tensors)
    positional = [_replace(value, following) for value in args]
    return positional, {name: _replace(value, following) for name, value in kwargs.items()}


@cache  # bounded by the number of operators
def functional_of(func: Operator) -> Operator | None:
    """Return the operator that computes what another one writes to an argument; None if none does."""
    schema = func._schema
    base = schema.name.removeprefix("aten::")
    if not schema.name.startswith("aten::"):
        return None
    writes_out = any(one.is_out for one in schema.arguments)
    name = base if writes_out else base.removesuffix("_")
    packet = getattr(torch.ops.aten, name, None)
    if packet is None or (name == base and not writes_out):
        return None
    wanted = [(one.name, str(one.type)) for one in schema.arguments if not one.is_out]
    for overload in packet.overloads():
        found = getattr(packet, overload)
        arguments = [(one.name, str(one.type)) for one in found._schema.arguments]
        if arguments == wanted and not found._schema.is_mutable:
            return found
    return None
