"""Look-ups in tables, and their gradients. A table may be split by rows: each device looks up those that it has."""

from __future__ import annotations

from collections.abc import Hashable

import torch

from dtckpt.dtensor.operators.call import Call
from dtckpt.dtensor.operators.registry import rule
from dtckpt.dtensor.operators.rule import LINEAR, Rule
from dtckpt.dtensor.operators.rule_builders import linked
from dtckpt.dtensor.operators.rules.indexing import by_part, inside

_aten = torch.ops.aten


@rule(_aten.embedding.default)
def _embedding(call: Call) -> Rule | None:
    """``(v, d), (b) -> (b, d)``"""
    if len(call.shapes[0]) != 2:
        return None
    batch = [("index", dim) for dim in range(len(call.shapes[1]))]
    found = linked(call, [["v", "d"], batch], [[*batch, "d"]], contracted={"v": "sum"}, passes=LINEAR)

    def lookup(
        piece: torch.Tensor, start: int, size: int, sign: bool, indices: torch.Tensor, *_: object, **__: object
    ) -> torch.Tensor:
        count = len(piece)
        if count == size:
            return torch.embedding(piece, indices)
        indices, absent = inside(indices, start, count, size, sign)
        if not count:
            return piece.new_zeros([*indices.shape, piece.shape[1]])
        return torch.embedding(piece, indices).masked_fill_(absent.unsqueeze(-1), 0)

    return by_part(found, 0, call.shapes[0][0], lookup)


@rule(_aten.embedding_dense_backward.default)
def _embedding_backward(call: Call) -> Rule | None:
    """``(b, d), (b) -> (v, d)``; how often a row occurs, if that counts, is known of all indices only."""
    batch = [("index", dim) for dim in range(len(call.shapes[1]))]
    contracted: dict[Hashable, str] = {} if call["scale_grad_by_freq"] else dict.fromkeys(batch, "sum")
    return linked(call, [[*batch, "d"], batch], [[None, "d"]], contracted=contracted, passes=LINEAR)
