"""Linear algebra: products (``mm``, ``linear``), ``linalg_qr``, ``linalg_inv_ex``, triangles, Fourier transforms.

The batch, which is all dims before the last two, may be split; the matrices must be whole, except in products and
triangles, of which each device computes its part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from dtckpt.dtensor.operators.call import Call
from dtckpt.dtensor.operators.operands import to_replicated
from dtckpt.dtensor.operators.registry import Builder, composite, functional_overloads, rule
from dtckpt.dtensor.operators.rule import LINEAR, Factors, Rule, any_reduction
from dtckpt.dtensor.operators.rule_builders import DimLabels, add_term, batched, einsum, from_labels, result_shapes

_aten = torch.ops.aten


def _register(names: str, *item_ndims: int) -> None:
    """Register operators whose operands are batches of items with so many dims: 2 for matrices, 1 for vectors."""

    @rule(*functional_overloads(*names.split()))
    def build(call: Call) -> Rule | None:
        """The batch may be split; matrices must be whole."""
        return batched(call, item_ndims)


# Without operators that raise for some values (eigh, eig, svd): every client must raise, so each works on all matrices.
_register(
    "_linalg_det _linalg_slogdet geqrf linalg_cholesky_ex linalg_inv_ex linalg_ldl_factor_ex linalg_lu "
    "linalg_lu_factor_ex linalg_matrix_exp linalg_qr",
    2,
)
_register("_cholesky_solve_helper cholesky_solve linalg_solve_triangular triangular_solve", 2, 2)
_register("linalg_householder_product lu_unpack", 2, 1)
_register("linalg_ldl_solve linalg_lu_solve ormqr", 2, 1, 2)


@rule(_aten._linalg_solve_ex.default)
def _solve(call: Call) -> Rule | None:
    """The batch may be split; the right side may be a batch of vectors."""
    matrices, right = call.shapes
    is_vectors = len(right) == 1 or (len(matrices) - 1 == len(right) and right == matrices[:-1])
    return batched(call, [2, 1 if is_vectors else 2])


@composite(_aten._linalg_check_errors.default)
def _check_errors(info, api_name, *, is_matrix):  # type: ignore[no-untyped-def]
    """All clients get the error codes of all matrices, and raise together."""
    for component in to_replicated([info])[0].components[:1]:
        _aten._linalg_check_errors.default(component, api_name, is_matrix=is_matrix)


# --- products --------------------------------------------------------------------------------------------------------


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


# --- triangles -------------------------------------------------------------------------------------------------------


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


# --- Fourier transforms ----------------------------------------------------------------------------------------------


@rule(_aten._fft_c2c.default, _aten._fft_c2r.default, _aten._fft_r2c.default)
def _transform(call: Call) -> Rule | None:
    """The dims that are transformed must be whole, and may change in size; linear."""
    (shape,), (result,) = call.shapes, result_shapes(call)
    transformed = {dim % len(shape) for dim in call["dim"]} if shape else set()
    factors = Factors()
    dims = factors.dims(shape)
    results = tuple(
        (factors.new(size),) if number in transformed else dims[number] for number, size in enumerate(result)
    )
    splittable = [dims[number][0] for number in range(len(shape)) if number not in transformed]
    return Rule(
        factors.sizes,
        (dims,),
        (results,),
        whole=frozenset(range(len(factors.sizes))) - frozenset(splittable),
        nonempty_pieces=frozenset(splittable),
        passes=LINEAR,
    )
