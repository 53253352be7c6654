"""The tables of operators: with a rule, by other operators (composites), and with a planner.

All other operators run by replication. `rule`, `composite`, `before_autograd` and `kernel` are the decorators that the
modules of `rules` use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any, TypeVar

import torch

from dtckpt.comm import torch_private
from dtckpt.dtensor.operators.call import Call, Operator
from dtckpt.dtensor.operators.rule import Rule
from dtckpt.dtensor.operators.rule_builders import pointwise
from dtckpt.dtensor.tensor import EARLY_KEY, EARLY_KEY_NAME

Builder = Callable[[Call], Rule | None]
"""Makes the rule of a call; returns None if there is no rule for such arguments."""

RULES: dict[Operator, Builder] = {}
"""Operators with a rule, as ``mm``."""
COMPOSITES: dict[Operator, Callable[..., Any]] = {}
"""Operators that a function of DTensors does by other operators, as ``native_dropout``."""
PLANNERS: dict[Operator, Callable[[Call], Any]] = {}
"""Operators whose calls need a special plan, as ``_foreach_add``: the function makes it from a call."""
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

    The function gets the operator's arguments. To decline a call, the function returns ``NotImplemented`` before any
    other work. This decision may depend on shapes, dtypes, layouts and on arguments that are no floats, because the
    first call of a kind decides for all.
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


# --- custom operators, ``torch.ops.dtckpt``: kernels that composites need and PyTorch does not have -------------------
#
# `rules.sorting` defines ``positions``, `rules.losses` defines ``pick`` and ``put``. Each gets a rule as any operator
# does.

_CUSTOM: Any = torch.library.Library("dtckpt", "FRAGMENT")  # type: ignore[no-untyped-call]  # as torch left it


def kernel(signature: str) -> Callable[[_F], _F]:
    """Define an operator by a function of plain tensors.

    Its rule may name the same function as ``local``, to have it called with ``offsets``.

    Args:
        signature: PyTorch's schema of the operator, such as ``"pick(Tensor self, int dim) -> Tensor"``.
    """
    _CUSTOM.define(signature)
    name = signature.partition("(")[0]

    def register(function: _F) -> _F:
        _CUSTOM.impl(name, function, "CompositeExplicitAutograd")
        return function

    return register


def custom_op(name: str) -> Operator:
    """Return the custom operator of this name."""
    return getattr(torch.ops.dtckpt, name).default


# --- kernels that run before autograd ---------------------------------------------------------------------------------
#
# They run before PyTorch decomposes an operator, too; autograd sees the operators that they call:
#
#     torch operator  ->  early key of DTensors, this module  ->  autograd, decomposition  ->  `dispatch`
#                         without a kernel: falls through
#
# DTensors alone have the dispatch key, so plain tensors pay nothing.

_LIBRARY: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]  # as torch left it
_ALL_OPERATORS: Any = torch.library.Library("_", "IMPL")  # type: ignore[no-untyped-call]
_BELOW = torch_private.dispatch_keys_after(EARLY_KEY)


def before_autograd(*operators: Operator) -> Callable[[_F], _F]:
    """Register a function that runs calls of operators with a DTensor among the arguments, before autograd.

    The function gets the operator, the dispatch keys that remain, and the arguments. ``operator.redispatch(keys, ...)``
    goes on as if the function were not there.
    """

    def register(function: _F) -> _F:
        for operator in operators:
            _LIBRARY.impl(operator.name(), _kernel(operator, function), EARLY_KEY_NAME, with_keyset=True)
        return function

    return register


def _kernel(operator: Operator, function: Callable[..., Any]) -> Callable[..., Any]:
    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        return function(operator, keys & _BELOW, *args, **kwargs)

    return kernel


_ALL_OPERATORS.fallback(torch.library.fallthrough_kernel, EARLY_KEY_NAME)
