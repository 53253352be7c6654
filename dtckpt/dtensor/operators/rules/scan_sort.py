"""Scans, sorting and search along a dim: ``cumsum``, ``sort``, ``topk``, ``searchsorted``, ``bucketize``.

That dim must be whole; all others may be split.
"""

from __future__ import annotations

import torch

from dtckpt.dtensor.operators.call import Call
from dtckpt.dtensor.operators.registry import rule
from dtckpt.dtensor.operators.rule import LINEAR, Rule
from dtckpt.dtensor.operators.rule_builders import DimLabels, along_dim, from_labels, unlabel_dims

_aten = torch.ops.aten


@rule(_aten.cumsum.default)
def _cumsum(call: Call) -> Rule | None:
    """The dim must be whole; linear."""
    return along_dim(call, passes=LINEAR)


@rule(_aten.cumprod.default, _aten.logcumsumexp.default)
def _scan(call: Call) -> Rule | None:
    """The dim must be whole."""
    return along_dim(call)


@rule(_aten.cummax.default, _aten.cummin.default, _aten.sort.default, _aten.sort.stable)
def _sort(call: Call) -> Rule | None:
    """The dim must be whole; values and indices."""
    return along_dim(call, num_results=2)


@rule(_aten.topk.default)
def _topk(call: Call) -> Rule | None:
    """The dim must be whole; values and indices, ``k`` of them."""
    return along_dim(call, num_results=2, size=call["k"])


@rule(_aten.bucketize.Tensor)
def _bucketize(call: Call) -> Rule | None:
    """``(a), boundaries (n) -> (a)``; the boundaries must be whole."""
    dims = range(len(call.shapes[0]))
    return from_labels(call, DimLabels([dims, [None]], [dims]))


@rule(_aten.searchsorted.Tensor)
def _searchsorted(call: Call) -> Rule | None:
    """``(a, n), (a, v) -> (a, v)``, or ``(n), (v) -> (v)``; the sorted dim must be whole."""
    dims = range(call["self"].ndim)
    sequence = [None] if call["sorted_sequence"].ndim == 1 else unlabel_dims(len(dims) - 1, len(dims))
    operands = call.operands(sorted_sequence=sequence, self=dims, sorter=sequence)
    return from_labels(call, DimLabels(operands, [dims]))
