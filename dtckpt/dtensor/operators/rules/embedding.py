"""Lookups in tables: ``embedding``, and its gradient. Rows may be split: each device looks up those that it has."""

from __future__ import annotations

from collections.abc import Hashable

import torch

from dtckpt.comm.collectives import neutral_term
from dtckpt.dtensor.operators.call import Call
from dtckpt.dtensor.operators.registry import rule
from dtckpt.dtensor.operators.rule import LINEAR, Rule
from dtckpt.dtensor.operators.rule_builders import DimLabels, completed_by_sum, from_labels, masked_lookup
from dtckpt.dtensor.operators.rules.indexing import indices_in_component

_aten = torch.ops.aten


@rule(_aten.embedding.default)
def _embedding(call: Call) -> Rule | None:
    """``(v, d), (b) -> (b, d)``; if rows are split, the result waits for a sum."""
    if len(call.shapes[0]) != 2:
        return None
    batch = [("index", dim) for dim in range(len(call.shapes[1]))]
    labels = DimLabels([["v", "d"], batch], [[*batch, "d"]], contracted=completed_by_sum(call, "v"))

    def lookup(
        component: torch.Tensor, start: int, size: int, indices: torch.Tensor, *_: object, **__: object
    ) -> torch.Tensor:
        count = len(component)
        if count == size:
            return torch.embedding(component, indices)
        indices, is_outside = indices_in_component(indices, start, count, size)
        neutral = neutral_term(component.dtype)
        if not count:
            return component.new_full([*indices.shape, component.shape[1]], neutral)
        return torch.embedding(component, indices).masked_fill_(is_outside.unsqueeze(-1), neutral)

    return masked_lookup(from_labels(call, labels), 0, call.shapes[0][0], lookup)


@rule(_aten.embedding_dense_backward.default)
def _embedding_backward(call: Call) -> Rule | None:
    """``(b, d), (b) -> (v, d)``; to scale by the count of a row needs all indices: then b must be whole."""
    batch = [("index", dim) for dim in range(len(call.shapes[1]))]
    contracted: dict[Hashable, str] = {} if call["scale_grad_by_freq"] else dict.fromkeys(batch, "sum")
    return from_labels(call, DimLabels([[*batch, "d"], batch], [[None, "d"]], contracted=contracted), passes=LINEAR)
