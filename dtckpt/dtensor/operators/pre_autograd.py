"""Operators that are taken before autograd, and before PyTorch makes others of them: what is done then, it may follow.

The kernels are for a dispatch key that DTensors alone have; operators without one fall through to the next key.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from dtckpt.dtensor.operators.call import Operator
from dtckpt.dtensor.tensor import EARLY_KEY, EARLY_KEY_NAME

_LIBRARY: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]  # as torch left it
_ALL_OPERATORS: Any = torch.library.Library("_", "IMPL")  # type: ignore[no-untyped-call]
_BELOW = torch._C._dispatch_keyset_full_after(EARLY_KEY)

_F = TypeVar("_F", bound=Callable[..., Any])


def before_autograd(*operators: Operator) -> Callable[[_F], _F]:
    """Register a function for calls with a DTensor among the arguments.

    It gets the operator, the dispatch keys with which it goes on (``operator.redispatch(keys, ...)``), and arguments.
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
