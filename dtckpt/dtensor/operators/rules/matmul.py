"""Matrix products, and those to which a term is added: ``mm``, ``bmm``, ``mv``, ``dot``, ``addmm``, ``linear``."""

from __future__ import annotations

import torch

from dtckpt.dtensor.operators.call import Call
from dtckpt.dtensor.operators.registry import Builder, rule
from dtckpt.dtensor.operators.rule import Rule
from dtckpt.dtensor.operators.rule_builders import add_term, einsum

_aten = torch.ops.aten


@rule(_aten.mm.default)
def _mm(call: Call) -> Rule | None:
    """``(m, k), (k, n) -> (m, n)``"""
    return einsum("mk,kn->mn", *call.shapes)


@rule(_aten.bmm.default)
def _bmm(call: Call) -> Rule | None:
    """``(b, m, k), (b, k, n) -> (b, m, n)``"""
    return einsum("bmk,bkn->bmn", *call.shapes)


@rule(_aten.mv.default)
def _mv(call: Call) -> Rule | None:
    """``(m, k), (k) -> (m)``"""
    return einsum("mk,k->m", *call.shapes)


@rule(_aten.dot.default, _aten.vdot.default)
def _dot(call: Call) -> Rule | None:
    """``(k), (k) -> ()``"""
    return einsum("k,k->", *call.shapes)


@rule(_aten.ger.default)
def _outer(call: Call) -> Rule | None:
    """``(m), (n) -> (m, n)``"""
    return einsum("m,n->mn", *call.shapes)


def _with_term(text: str) -> Builder:
    def build(call: Call) -> Rule | None:
        """The first operand, broadcast, is added to the product of the others."""
        term, *shapes = call.shapes
        return add_term(term, einsum(text, *shapes))

    return build


for _operator, _text in (
    (_aten.addmm.default, "mk,kn->mn"),
    (_aten.baddbmm.default, "bmk,bkn->bmn"),
    (_aten.addbmm.default, "bmk,bkn->mn"),
    (_aten.addmv.default, "mk,k->m"),
    (_aten.addr.default, "m,n->mn"),
):
    rule(_operator)(_with_term(_text))


@rule(_aten.linear.default)
def _linear(call: Call) -> Rule | None:
    """``(..., k), (n, k), (n) -> (..., n)``; outside inference mode PyTorch decomposes it to ``addmm``."""
    inputs, weight, *bias = call.shapes
    product = einsum("...k,nk->...n" if len(weight) == 2 else "...k,k->...", inputs, weight)
    return add_term(bias[0], product, position=2) if bias else product
