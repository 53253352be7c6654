"""Kernels that run before autograd and before PyTorch decomposes an operator; autograd sees the operators they call.

::

    torch operator  ->  early key of DTensors (this module)  ->  autograd, decomposition  ->  `dispatch`
                        without a kernel: falls through

DTensors alone have the dispatch key, so plain tensors pay nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from dtckpt.comm import torch_private
from dtckpt.dtensor.operators.call import Operator
from dtckpt.dtensor.tensor import EARLY_KEY, EARLY_KEY_NAME

_LIBRARY: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]  # as torch left it
_ALL_OPERATORS: Any = torch.library.Library("_", "IMPL")  # type: ignore[no-untyped-call]
_BELOW = torch_private.dispatch_keys_after(EARLY_KEY)

_F = TypeVar("_F", bound=Callable[..., Any])


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
