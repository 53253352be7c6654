"""Comparisons with one answer, which all clients get: ``equal``, ``allclose``, ``is_same_size``."""

from __future__ import annotations

from typing import Any

import torch

from dtckpt.dtensor.operators.call import Call
from dtckpt.dtensor.operators.composite_helpers import are_replicated
from dtckpt.dtensor.operators.registry import composite, rule
from dtckpt.dtensor.tensor import DTensor

_aten = torch.ops.aten


@composite(_aten.equal.default)
def _equal(self: DTensor, other: DTensor) -> Any:
    """Whether all components are equal; every client gets the answer."""
    if self.shape != other.shape or self.dtype != other.dtype or are_replicated(self, other):
        return NotImplemented
    return bool(_aten._local_scalar_dense(torch.eq(self, other).all()))


@composite(_aten.allclose.default)
def _allclose(self: DTensor, other: DTensor, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False) -> Any:
    """Whether all components are close; every client gets the answer."""
    if self.dtype != other.dtype or are_replicated(self, other):
        return NotImplemented
    return bool(_aten._local_scalar_dense(torch.isclose(self, other, rtol, atol, equal_nan).all()))


@composite(_aten.is_same_size.default)
def _is_same_size(self: DTensor, other: DTensor) -> Any:
    """The global shapes are compared; nothing moves."""
    return self.shape == other.shape


@rule(_aten.equal.default)
def _equal_of_whole(call: Call) -> None:
    """No rule: it returns no tensor, though PyTorch tags it as pointwise."""
    del call
