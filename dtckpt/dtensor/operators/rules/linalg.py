"""Linear algebra on batches of matrices: ``linalg_qr``, ``linalg_inv_ex``, ``cholesky_solve``, ``linalg_lu``.

The batch, which is all dims before the last two, may be split; the matrices must be whole.
"""

from __future__ import annotations

import torch

from dtckpt.dtensor.operators.call import Call
from dtckpt.dtensor.operators.operands import to_replicated
from dtckpt.dtensor.operators.registry import composite, functional_overloads, rule
from dtckpt.dtensor.operators.rule import Rule
from dtckpt.dtensor.operators.rule_builders import batched

_aten = torch.ops.aten


def _register(names: str, *item_ndims: int) -> None:
    """Register operators whose operands are batches of items with so many dims: 2 for matrices, 1 for vectors."""

    @rule(*functional_overloads(*names.split()))
    def build(call: Call) -> Rule | None:
        """The batch may be split; matrices must be whole."""
        return batched(call, item_ndims)


# Not those that raise for some values, as eigh, eig and svd do: all clients are to raise, so all work on all matrices.
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
