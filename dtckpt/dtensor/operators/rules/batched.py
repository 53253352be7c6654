"""Operators that treat every item of a batch alike: leading dims are free, the others must be whole."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from dtckpt.dtensor.operators.call import Call, Operator
from dtckpt.dtensor.operators.operands import replicated
from dtckpt.dtensor.operators.registry import Builder, composite, rule
from dtckpt.dtensor.operators.rule import Dims, Passes, Rule, pointwise
from dtckpt.dtensor.operators.rule_builders import result_shapes

_aten = torch.ops.aten

_GRADIENT: Passes = {"sum": ((0,),), "avg": ((0,),)}


def batched(
    call: Call,
    cores: Sequence[int],
    *,
    passes: Passes | None = None,
    unread: Sequence[int] = (),
    sized: tuple[tuple[str, int], ...] = (),
) -> Rule | None:
    """Return the rule of an operator whose operands are batches; leading dims are broadcast, as far as they may be.

    Args:
        call: The call.
        cores: By operand, how many of its last dims make up an item.
        passes: See `Rule`.
        unread: See `Rule`.
        sized: See `Rule`.
    """
    if len(cores) != len(call.tensors) or any(
        len(shape) < core for shape, core in zip(call.shapes, cores, strict=True)
    ):
        return None
    lead = pointwise([shape[: len(shape) - core] for shape, core in zip(call.shapes, cores, strict=True)])
    if lead is None:
        return None
    sizes = list(lead.sizes)

    def with_core(dims: Dims, shape: Sequence[int]) -> Dims:
        more = range(len(sizes), len(sizes) + len(shape) - len(dims))
        sizes.extend(shape[len(dims) :])
        return (*dims, *((number,) for number in more))

    operands = tuple(with_core(dims, shape) for dims, shape in zip(lead.operands, call.shapes, strict=True))
    shapes = result_shapes(call)
    if any(shape[: len(lead.sizes)] != lead.sizes for shape in shapes):
        return None
    results = tuple(with_core(lead.results[0], shape) for shape in shapes)
    free = range(len(lead.sizes))
    return replace(
        lead,
        sizes=tuple(sizes),
        operands=operands,
        results=results,
        whole=frozenset(range(len(free), len(sizes))),
        # Many kernels refuse tensors without elements.
        filled=frozenset(free),
        passes=passes or {},
        unread=frozenset(unread),
        sized=sized,
    )


def functional_overloads(*names: str) -> Iterator[Operator]:
    """Yield the overloads of operators that write to no argument."""
    for name in names:
        packet = getattr(_aten, name)
        for overload in map(packet.__getattr__, packet.overloads()):
            if not overload._schema.is_mutable:
                yield overload


def _register(names: str, builder: Builder) -> None:
    rule(*functional_overloads(*names.split()))(builder)


# --- images: batch and channels are free, what is around a place in space is not ---------------------------------


def _of_channels(passes: Passes | None = None, *, unread: Sequence[int] = (), sized: Any = ()) -> Builder:
    def build(call: Call) -> Rule | None:
        """Dims N, C and space, or C and space."""
        space = num_space(call.func)
        return batched(call, [space] * len(call.tensors), passes=passes, unread=unread, sized=sized)

    return build


def num_space(func: Operator) -> int:
    """Return the number of dims of space, which the names of operators on images tell."""
    found = re.search(r"(\d)d(?:_|$)", func._schema.name)
    assert found is not None  # noqa: S101  (such operators alone are asked for)
    return int(found[1])


_register(
    "_adaptive_avg_pool2d _adaptive_avg_pool3d avg_pool2d avg_pool3d "
    "reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d replication_pad3d "
    "upsample_bicubic2d upsample_bilinear2d upsample_linear1d "
    "upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_trilinear3d _upsample_bicubic2d_aa "
    "_upsample_bilinear2d_aa _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d",
    _of_channels(_GRADIENT),
)
_register(
    "_adaptive_avg_pool2d_backward _adaptive_avg_pool3d_backward avg_pool2d_backward avg_pool3d_backward "
    "reflection_pad1d_backward reflection_pad2d_backward reflection_pad3d_backward replication_pad1d_backward "
    "replication_pad2d_backward replication_pad3d_backward",
    _of_channels(_GRADIENT, unread=[1]),
)
_register(
    "upsample_bicubic2d_backward upsample_bilinear2d_backward upsample_linear1d_backward upsample_nearest1d_backward "
    "upsample_nearest2d_backward upsample_nearest3d_backward upsample_trilinear3d_backward "
    "_upsample_bicubic2d_aa_backward _upsample_bilinear2d_aa_backward _upsample_nearest_exact1d_backward "
    "_upsample_nearest_exact2d_backward _upsample_nearest_exact3d_backward",
    _of_channels(_GRADIENT, sized=(("input_size", 0),)),
)
_register(
    "adaptive_max_pool2d adaptive_max_pool3d max_pool2d_with_indices max_pool3d_with_indices max_unpool2d max_unpool3d",
    _of_channels(),
)
_register(
    "adaptive_max_pool2d_backward adaptive_max_pool3d_backward max_pool2d_with_indices_backward "
    "max_pool3d_with_indices_backward fractional_max_pool2d_backward",
    _of_channels(_GRADIENT),
)


@rule(_aten.fractional_max_pool2d.default, _aten.fractional_max_pool3d.default)
def _at_random_places(call: Call) -> Rule | None:
    """Dims N, C and space; the places drawn beforehand stand in N, C and one dim."""
    space = num_space(call.func)
    return batched(call, [space, 1]) if len(call.shapes[0]) == space + 2 else None


def _of_items(passes: Passes | None = None, num_dims: int | None = None) -> Builder:
    def build(call: Call) -> Rule | None:
        """One dim of items, or, if it is known how many dims an item has, any number."""
        cores = [len(shape) - 1 if num_dims is None else num_dims for shape in call.shapes]
        # Without a dim of items the first one is a channel's.
        is_batch = num_dims is not None or all(len(shape) > 2 for shape in call.shapes)
        return batched(call, cores, passes=passes) if is_batch else None

    return build


_register("pixel_shuffle pixel_unshuffle", _of_items(_GRADIENT, 3))
_register("grid_sampler_2d grid_sampler_3d grid_sampler_2d_backward grid_sampler_3d_backward", _of_items())


@rule(*functional_overloads("im2col", "col2im"))
def _columns(call: Call) -> Rule | None:
    """Dims N, C and the rest; without N they are as many as the other way round with it."""
    is_batch = len(call.shapes[0]) == (4 if "im2col" in call.func._schema.name else 3)
    return _of_items(_GRADIENT)(call) if is_batch else None


# --- matrices: what stands before the last two dims is free -------------------------------------------------------


def _of_matrices(*cores: int) -> Builder:
    def build(call: Call) -> Rule | None:
        return batched(call, cores)

    return build


# Not those that raise for some values, as eigh, eig and svd do: all clients are to raise, so all work on all matrices.
_register(
    "_linalg_det _linalg_slogdet geqrf linalg_cholesky_ex linalg_inv_ex linalg_ldl_factor_ex linalg_lu "
    "linalg_lu_factor_ex linalg_matrix_exp linalg_qr",
    _of_matrices(2),
)
_register("_cholesky_solve_helper cholesky_solve linalg_solve_triangular triangular_solve", _of_matrices(2, 2))
_register("linalg_householder_product lu_unpack", _of_matrices(2, 1))
_register("linalg_ldl_solve linalg_lu_solve", _of_matrices(2, 1, 2))
_register("ormqr", _of_matrices(2, 1, 2))


@rule(_aten._linalg_solve_ex.default)
def _solve(call: Call) -> Rule | None:
    """The right side may be a batch of vectors."""
    matrices, right = call.shapes
    is_vectors = len(right) == 1 or (len(matrices) - 1 == len(right) and right == matrices[:-1])
    return batched(call, [2, 1 if is_vectors else 2])


@composite(_aten._linalg_check_errors.default)
def _check_errors(info, api_name, *, is_matrix):  # type: ignore[no-untyped-def]
    """All clients get to know of all matrices, and raise together."""
    for component in replicated([info])[0].components[:1]:
        _aten._linalg_check_errors.default(component, api_name, is_matrix=is_matrix)
