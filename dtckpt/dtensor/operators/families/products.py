"""Products of matrices."""

from __future__ import annotations

import torch

from dtckpt.dtensor.operators.call import Call
from dtckpt.dtensor.operators.rule import Rule, einsum
from dtckpt.dtensor.operators.table import composite, rule

_aten = torch.ops.aten


@rule(_aten.mm.default)
def _mm(call: Call) -> Rule | None:
    return einsum("mk,kn->mn", *call.shapes)


@rule(_aten.bmm.default)
def _bmm(call: Call) -> Rule | None:
    return einsum("bmk,bkn->bmn", *call.shapes)


@rule(_aten.mv.default)
def _mv(call: Call) -> Rule | None:
    return einsum("mk,k->m", *call.shapes)


@rule(_aten.dot.default, _aten.vdot.default)
def _dot(call: Call) -> Rule | None:
    return einsum("k,k->", *call.shapes)


@composite(_aten.addmm.default)
def _addmm(input, mat1, mat2, *, beta=1, alpha=1):  # type: ignore[no-untyped-def]  # noqa: A002
    product = torch.mm(mat1, mat2)
    product = product if alpha == 1 else product * alpha
    return product if beta == 0 else torch.add(product, input if beta == 1 else input * beta)
