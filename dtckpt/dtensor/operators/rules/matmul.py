"""Products of vectors, matrices and stacks of matrices, and what is added to them."""

from __future__ import annotations

from dataclasses import replace

import torch

from dtckpt.dtensor.operators.call import Call
from dtckpt.dtensor.operators.registry import Builder, rule
from dtckpt.dtensor.operators.rule import Dims, Passes, Rule, einsum

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


@rule(_aten.ger.default)
def _outer(call: Call) -> Rule | None:
    return einsum("m,n->mn", *call.shapes)


def plus(term: tuple[int, ...], product: Rule | None, place: int = 0) -> Rule | None:
    """Return the rule of a product to which a term is added, broadcast as need be; None if it cannot be.

    Args:
        term: Its shape.
        product: The rule of the product alone; linear in its first two operands.
        place: Where the term stands among the operands.
    """
    if product is None:
        return None
    (result,), shape = product.results, product.shape(0)
    lead = len(shape) - len(term)
    if lead < 0 or any(size not in {1, shape[lead + dim]} for dim, size in enumerate(term)):
        return None
    dims: Dims = tuple(result[lead + dim] if size == shape[lead + dim] else () for dim, size in enumerate(term))
    operands = list(product.operands)
    operands.insert(place, dims)
    first, second = (number for number in range(3) if number != place)
    passes: Passes = dict.fromkeys(("sum", "avg"), ((first, place), (second, place)))
    return replace(product, operands=tuple(operands), passes=passes, added=frozenset({place}))


def _sum(text: str) -> Builder:
    def build(call: Call) -> Rule | None:
        term, *factors = call.shapes
        return plus(term, einsum(text, *factors))

    return build


for _operator, _text in (
    (_aten.addmm.default, "mk,kn->mn"),
    (_aten.baddbmm.default, "bmk,bkn->bmn"),
    (_aten.addbmm.default, "bmk,bkn->mn"),
    (_aten.addmv.default, "mk,k->m"),
    (_aten.addr.default, "m,n->mn"),
):
    rule(_operator)(_sum(_text))


@rule(_aten.linear.default)
def _linear(call: Call) -> Rule | None:
    """As it comes in inference mode; else PyTorch makes products of matrices of it."""
    inputs, weight, *bias = call.shapes
    product = einsum("...k,nk->...n" if len(weight) == 2 else "...k,k->...", inputs, weight)
    return plus(bias[0], product, 2) if bias else product
