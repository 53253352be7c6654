"""Lookups in tables: ``embedding``, and its gradient. Rows may be split: each device looks up those that it has."""

from __future__ import annotations

from collections.abc import Hashable

import torch

from dtckpt.dtensor.operators.call import Call
from dtckpt.dtensor.operators.registry import rule
from dtckpt.dtensor.operators.rule import LINEAR, Rule
from dtckpt.dtensor.operators.rule_builders import DimLabels, from_labels, masked_lookup
from dtckpt.dtensor.operators.rules.indexing import indices_in_component

_aten = torch.ops.aten


@rule(_aten.embedding.default)
def _embedding(call: Call) -> Rule | None:
    """``(v, d), (b) -> (b, d)``; if rows are split, the result waits for a sum."""
    if len(call.shapes[0]) != 2:
        return None
    batch = [("index", dim) for dim in range(len(call.shapes[1]))]
    labels = DimLabels([["v", "d"], batch], [[*batch, "d"]], contracted={"v": "sum"})

    def lookup(
        component: torch.Tensor, start: int, size: int, indices: torch.Tensor, *_: object, **__: object
    ) -> torch.Tensor:
        count = len(component)
        if count == size:
            return torch.embedding(component, indices)
        indices, is_outside = indices_in_component(indices, start, count, size)
        if not count:
            return component.new_zeros([*indices.shape, component.shape[1]])
        return torch.embedding(component, indices).masked_fill_(is_outside.unsqueeze(-1), 0)

    return masked_lookup(from_labels(call, labels, passes=LINEAR), 0, call.shapes[0][0], lookup)


@rule(_aten.embedding_dense_backward.default)
def _embedding_backward(call: Call) -> Rule | None:
    """``(b, d), (b) -> (v, d)``; to scale by the count of a row needs all indices: then b must be whole."""
    batch = [("index", dim) for dim in range(len(call.shapes[1]))]
    contracted: dict[Hashable, str] = {} if call["scale_grad_by_freq"] else dict.fromkeys(batch, "sum")
    return from_labels(call, DimLabels([[*batch, "d"], batch], [[None, "d"]], contracted=contracted), passes=LINEAR)
