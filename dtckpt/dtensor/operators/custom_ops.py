"""Custom operators, ``torch.ops.dtckpt``: kernels that composites need and PyTorch does not have.

`rules.minmax` defines ``positions``, `rules.nll_loss` defines ``pick`` and ``put``; each gets a rule as any operator
does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from dtckpt.dtensor.operators.call import Operator

_LIBRARY: Any = torch.library.Library("dtckpt", "FRAGMENT")  # type: ignore[no-untyped-call]  # as torch left it

_F = TypeVar("_F", bound=Callable[..., Any])


def kernel(signature: str) -> Callable[[_F], _F]:
    """Define an operator by a function of plain tensors.

    Its rule may name the same function as ``local``, to have it called with ``offsets``.

    Args:
        signature: PyTorch's schema of the operator, such as ``"pick(Tensor self, int dim) -> Tensor"``.
    """
    _LIBRARY.define(signature)
    name = signature.partition("(")[0]

    def register(function: _F) -> _F:
        _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        return function

    return register


def custom_op(name: str) -> Operator:
    """Return the custom operator of this name."""
    return getattr(torch.ops.dtckpt, name).default
