"""The tables of operators: those with a rule, those done by other operators, those with a planner.

All others run by replication. `rule` and `composite` are the decorators that the modules of `rules` use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any, TypeVar

import torch

from dtckpt.dtensor.operators.call import Call, Operator
from dtckpt.dtensor.operators.rule import Rule
from dtckpt.dtensor.operators.rule_builders import pointwise

Builder = Callable[[Call], Rule | None]
"""Makes the rule of a call; returns None if there is none for such arguments."""

RULES: dict[Operator, Builder] = {}
"""Operators with a rule, as ``mm``."""
COMPOSITES: dict[Operator, Callable[..., Any]] = {}
"""Operators that a function of DTensors does by other operators, as ``native_dropout``."""
PLANNERS: dict[Operator, Callable[[Call], Any]] = {}
"""Operators whose calls need a plan of their own, as ``_foreach_add``: the function makes it from a call."""
BY_INDEX: set[Operator] = set()
"""Operators on lists that treat one index after another, as ``_foreach_norm``: each index may be on another mesh."""

_B = TypeVar("_B", bound=Builder)
_F = TypeVar("_F", bound=Callable[..., Any])


def rule(*operators: Operator) -> Callable[[_B], _B]:
    """Register a function that makes the rules of operators, and of their variants in place and with ``out``."""

    def register(builder: _B) -> _B:
        for operator in operators:
            RULES[operator] = builder
        return builder

    return register


def composite(*operators: Operator) -> Callable[[_F], _F]:
    """Register a function of DTensors that does the work of operators by other operators.

    The function gets the operator's arguments. It may decline a call: it then returns ``NotImplemented`` before it has
    done anything. Whether it declines may depend on shapes, dtypes, layouts and on arguments that are no floats: the
    first call decides for all of its kind.
    """

    def register(function: _F) -> _F:
        for operator in operators:
            COMPOSITES[operator] = function
        return function

    return register


def functional_overloads(*names: str) -> Iterator[Operator]:
    """Yield the overloads of operators that write to no argument.

    Args:
        names: Names of operators, without ``aten::``.
    """
    for name in names:
        packet = getattr(torch.ops.aten, name)
        for overload in map(packet.__getattr__, packet.overloads()):
            if not overload._schema.is_mutable:
                yield overload


def builder_of(func: Operator) -> Builder | None:
    """Return the function that makes an operator's rules; None if there is none."""
    return RULES.get(func) or (_pointwise_rule if _is_tagged_pointwise(func) else None)


@cache  # bounded by the number of operators
def _is_tagged_pointwise(func: Operator) -> bool:
    """Whether PyTorch tags an operator as pointwise; not if it draws random numbers, or returns other than tensors."""
    is_marked = torch.Tag.pointwise in func.tags and torch.Tag.nondeterministic_seeded not in func.tags
    returns = func._schema.returns
    return is_marked and not func._schema.is_mutable and all(str(one.type) == "Tensor" for one in returns)


def _pointwise_rule(call: Call) -> Rule | None:
    """Return the rule of an operator that PyTorch tags as pointwise; it may have several results."""
    one_result = pointwise(call.shapes)
    count = len(call.func._schema.returns)
    return one_result and replace(one_result, results=one_result.results * count)
