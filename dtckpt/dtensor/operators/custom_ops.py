"""Operators of our own, ``torch.ops.dtckpt``: what composites need and PyTorch has no operator for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from dtckpt.dtensor.operators.call import Operator

_LIBRARY: Any = torch.library.Library("dtckpt", "FRAGMENT")  # type: ignore[no-untyped-call]  # as torch left it

_F = TypeVar("_F", bound=Callable[..., Any])


def kernel(signature: str) -> Callable[[_F], _F]:
    """Make an operator of a function of plain tensors; run by rule it may be told where pieces begin, as ``offsets``.

    Args:
        signature: In the language of PyTorch's schemas.
    """
    _LIBRARY.define(signature)
    name = signature.partition("(")[0]

    def register(function: _F) -> _F:
        _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        return function

    return register


def custom_op(name: str) -> Operator:
    """Return the operator of this name."""
    return getattr(torch.ops.dtckpt, name).default
