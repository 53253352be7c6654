"""Compare calls on DTensors with calls on plain tensors: values, layouts of results, and which tensors moved."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._pytree import tree_leaves

from dtckpt import Layout, Mesh, Partial, Placement, Replicate, Shard, abstract_mesh
from dtckpt.dtensor import DTensor, redistribute
from dtckpt.dtensor.operators import dispatch

from .arrangements import distribute_terms

LINE = abstract_mesh({"x": 4})
GRID = abstract_mesh({"x": 2, "y": 2})

R, P = Replicate(), Partial()
S0, S1, S2, S3 = map(Shard, range(4))

Placed = Placement | tuple[Placement, ...]


def distributed(tensor: torch.Tensor, placed: Placed, mesh: Mesh | None = None) -> DTensor:
    """Return a DTensor on `LINE` for one placement, on `GRID` for two; of Partial ones the sum is the value."""
    placements = placed if isinstance(placed, tuple) else (placed,)
    mesh = mesh or (LINE if len(placements) == 1 else GRID)
    return distribute_terms(tensor.detach(), Layout.from_placements(mesh, placements, tensor.ndim))


def sample_placements(
    tensors: Sequence[torch.Tensor], mesh: Mesh, count: int, seed: int = 3
) -> Iterator[list[tuple[Placement, ...]]]:
    """Yield some of the ways to place tensors on a mesh, sums pending included."""
    every = list(itertools.product(*(_placements_of(mesh, tensor) for tensor in tensors)))
    random.Random(seed).shuffle(every)
    yield from map(list, every[:count])


def _placements_of(mesh: Mesh, tensor: torch.Tensor) -> list[tuple[Placement, ...]]:
    kinds: list[Placement] = [Replicate(), *(Shard(dim) for dim in range(tensor.ndim))]
    if tensor.dtype != torch.bool:
        kinds.append(Partial("sum"))
    return list(itertools.product(kinds, repeat=mesh.ndim))


def check(
    function: Callable[..., Any],
    tensors: Sequence[torch.Tensor],
    placed: Sequence[Placed],
    expected: Placed | Sequence[Placed] | None = None,
    *,
    most: int | None = None,
    may_replicate: bool = False,
    has_gradients: bool = True,
    tolerance: float = 1e-4,
) -> Any:
    """Compare an operator's results and gradients on DTensors with the same on plain tensors.

    Args:
        function: Of the tensors.
        tensors: Plain ones.
        placed: How each is distributed.
        expected: Placements of the results that are tensors; a list if there are several.
        most: Forward, tensors that are redistributed have no more elements.
        may_replicate: Operators may run on whole tensors.
        has_gradients: Compare gradients with regard to all floating-point tensors too.
        tolerance: Absolute and relative.

    Returns:
        The result.
    """
    ours = [distributed(tensor, one) for tensor, one in zip(tensors, placed, strict=True)]
    plain = [tensor.detach().clone() for tensor in tensors]
    for tensor in (*ours, *plain):
        tensor.requires_grad_(has_gradients and tensor.is_floating_point())
    dispatch.clear()
    with record_redistributions() as found:
        result = function(*ours)
    assert most is None or max((numel for numel, _, _ in found), default=0) <= most, found
    made, wanted = tree_leaves(result), tree_leaves(function(*plain))
    _compare(made, wanted, tolerance)
    if expected is not None:
        each = expected if isinstance(expected, list) else [expected]
        assert [one.placements for one in made] == [one if isinstance(one, tuple) else (one,) for one in each]
    pairs = zip(made, wanted, strict=True)
    results = [(one, other) for one, other in pairs if isinstance(other, torch.Tensor) and other.requires_grad]
    if results:
        seeds = [torch.randn_like(other.detach()) for _, other in results]
        given = [
            distributed(seed, _with_sums_only(one.placements)) for seed, (one, _) in zip(seeds, results, strict=True)
        ]
        inputs = [(one, other) for one, other in zip(ours, plain, strict=True) if other.requires_grad]
        _compare(
            torch.autograd.grad([one for one, _ in results], [one for one, _ in inputs], given, allow_unused=True),
            torch.autograd.grad([one for _, one in results], [one for _, one in inputs], seeds, allow_unused=True),
            tolerance,
        )
    assert may_replicate or not replicated_operators()
    return result


def _with_sums_only(placements: Sequence[Placement]) -> tuple[Placement, ...]:
    """Return placements that a gradient can have: it waits for nothing but a sum."""
    return tuple(R if isinstance(one, Partial) and one != P else one for one in placements)


def _compare(made: Sequence[Any], wanted: Sequence[Any], tolerance: float) -> None:
    for one, other in zip(made, wanted, strict=True):
        if isinstance(other, torch.Tensor):
            assert isinstance(one, DTensor)
            whole = one.detach().full_tensor()
            torch.testing.assert_close(whole, other.detach(), rtol=tolerance, atol=tolerance, equal_nan=True)
        else:
            assert type(one) is type(other)
            assert one == other


def replicated_operators() -> set[str]:
    """Return the operators that ran on whole tensors since counts were cleared."""
    return {func.name() for (func, route), count in dispatch.counts().items() if route == "replication" and count}


@contextlib.contextmanager
def record_redistributions() -> Iterator[list[tuple[int, tuple[Placement, ...], tuple[Placement, ...]]]]:
    """Collect the redistributions in a context: number of elements, from where, to where."""
    found = []
    move = redistribute.redistribute_all

    def noted(tensors: Any, layouts: Any) -> Any:
        found.extend((t.numel(), t.placements, to.placements) for t, to in zip(tensors, layouts, strict=True))
        return move(tensors, layouts)

    with patch.object(redistribute, "redistribute_all", noted):
        yield found
