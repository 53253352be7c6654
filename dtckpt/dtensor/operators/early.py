"""Operators that are taken before autograd, and before PyTorch makes others of them: what is done then, it may follow.

The kernels are for the dispatch key that all tensors have which dispatch in Python, and no others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from dtckpt.dtensor.operators.call import Operator, tensors_in
from dtckpt.dtensor.tensor import DTensor

_LIBRARY: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]  # as torch left it
_KEY = torch._C.DispatchKey.PythonTLSSnapshot
_BELOW = torch._C._dispatch_keyset_full_after(_KEY)

_F = TypeVar("_F", bound=Callable[..., Any])


def taken_early(*operators: Operator) -> Callable[[_F], _F]:
    """Register a function for calls with a DTensor.

    It gets the operator, the dispatch keys with which it goes on (``operator.redispatch(keys, ...)``), and arguments.
    """

    def register(function: _F) -> _F:
        for operator in operators:
            _LIBRARY.impl(operator.name(), _kernel(operator, function), _KEY.name, with_keyset=True)
        return function

    return register


def _kernel(operator: Operator, function: Callable[..., Any]) -> Callable[..., Any]:
    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(one, DTensor) for one in tensors_in((*args, *kwargs.values()))):
            return function(operator, keys & _BELOW, *args, **kwargs)
        return operator.redispatch(keys & _BELOW, *args, **kwargs)

    return kernel
