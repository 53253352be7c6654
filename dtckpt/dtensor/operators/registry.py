"""The table of operators: which has a rule, which is made of others. What is in neither is run on whole tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, TypeVar

import torch

from dtckpt.dtensor.operators.call import Call, Operator
from dtckpt.dtensor.operators.rule import Rule
from dtckpt.dtensor.operators.rule_builders import pointwise

Builder = Callable[[Call], Rule | None]
"""Makes the rule of a call; None if there is none for such arguments."""

RULES: dict[Operator, Builder] = {}
COMPOSITES: dict[Operator, Callable[..., Any]] = {}
PLANNERS: dict[Operator, Callable[[Call], Any]] = {}
"""What makes a plan of a call by itself, where neither one rule nor other operators will do."""

_B = TypeVar("_B", bound=Builder)
_F = TypeVar("_F", bound=Callable[..., Any])


def rule(*operators: Operator) -> Callable[[_B], _B]:
    """Register a function that makes the rules of operators. Their variants in place and with ``out`` follow it too."""

    def register(builder: _B) -> _B:
        for operator in operators:
            RULES[operator] = builder
        return builder

    return register


def composite(*operators: Operator) -> Callable[[_F], _F]:
    """Register a function of DTensors that does what operators do, by other operators.

    It gets the operator's arguments. It declines a call with ``NotImplemented`` before it has done anything; whether
    it does so must depend on shapes, dtypes, layouts and arguments other than floats alone.
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
    """Return what makes an operator's rules; None if nothing does."""
    return RULES.get(func) or (_pointwise_rule if _is_tagged_pointwise(func) else None)


def _is_tagged_pointwise(func: Operator) -> bool:
    """Whether PyTorch says of an operator that each element of the results depends on one of each operand."""
    is_marked = torch.Tag.pointwise in func.tags and torch.Tag.nondeterministic_seeded not in func.tags
    returns = func._schema.returns
    return is_marked and not func._schema.is_mutable and all(str(one.type) == "Tensor" for one in returns)


def _pointwise_rule(call: Call) -> Rule | None:
    found = pointwise(call.shapes)
    count = len(call.func._schema.returns)
    return None if found is None else replace(found, results=found.results * count)
