"""Triangles of matrices: ``tril``, ``triu``. Rows and columns may be split: each device shifts the diagonal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from dtckpt.dtensor.operators.call import Call
from dtckpt.dtensor.operators.registry import rule
from dtckpt.dtensor.operators.rule import Rule, any_reduction
from dtckpt.dtensor.operators.rule_builders import DimLabels, from_labels

_aten = torch.ops.aten


@rule(_aten.tril.default, _aten.triu.default)
def _triangle(call: Call) -> Rule | None:
    """All dims may be split; a component shifts the diagonal by its first row less its first column."""
    dims, func = range(len(call.shapes[0])), call.func
    all_dims = from_labels(call, DimLabels([dims], [dims]), passes=any_reduction())

    def local(component: torch.Tensor, diagonal: int = 0, *, offsets: Sequence[tuple[int, ...]]) -> torch.Tensor:
        (*_, row, column) = offsets[0]
        triangle: torch.Tensor = func(component, diagonal + row - column)
        return triangle

    return None if all_dims is None else replace(all_dims, local=local, takes_offsets=True)
