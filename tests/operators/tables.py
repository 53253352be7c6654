"""Tables of calls: each is compared with plain tensors, forward and backward, and must not have gathered anything."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._pytree import tree_leaves

from dtckpt import Layout, Mesh, Partial, Placement, Replicate, Shard, abstract_mesh
from dtckpt.dtensor import DTensor, functional
from dtckpt.dtensor.operators import dispatch

from .arrangements import in_terms

LINE = abstract_mesh({"x": 4})
GRID = abstract_mesh({"x": 2, "y": 2})


@dataclass(frozen=True)
class Row:
    """A call.

    Args:
        call: Gets the operands.
        operands: Plain ones.
        name: Of the test.
        is_differentiable: Whether gradients are compared too.
        tolerance: Relative and absolute.
    """

    call: Callable[..., Any]
    operands: tuple[torch.Tensor, ...]
    name: str
    is_differentiable: bool = True
    tolerance: float = 2e-5


def placed(whole: torch.Tensor, mesh: Mesh, placements: Sequence[Placement]) -> DTensor:
    """Return a DTensor of these values; of Partial ones the sum is the value."""
    return in_terms(whole.detach(), Layout.from_placements(mesh, placements, whole.ndim))


def placements_of(mesh: Mesh, whole: torch.Tensor, *, is_partial: bool = True) -> list[tuple[Placement, ...]]:
    """Return all ways to place a tensor, sums pending included."""
    kinds: list[Placement] = [Replicate(), *(Shard(dim) for dim in range(whole.ndim))]
    if is_partial and whole.dtype != torch.bool:
        kinds.append(Partial("sum"))
    return list(itertools.product(kinds, repeat=mesh.ndim))


def some_placements(row: Row, mesh: Mesh, count: int, seed: int = 3) -> Iterator[list[tuple[Placement, ...]]]:
    """Yield some of the ways to place a row's operands."""
    ways = [placements_of(mesh, operand) for operand in row.operands]
    every = list(itertools.product(*ways))
    random.Random(seed).shuffle(every)
    yield from map(list, every[:count])


def check(row: Row, mesh: Mesh, placements: Sequence[Sequence[Placement]]) -> Any:
    """Compare a call on DTensors with that on plain tensors; return its result."""
    wanted = _run(row, [operand.detach().clone() for operand in row.operands])
    given = [placed(*pair) for pair in zip(row.operands, itertools.repeat(mesh), placements, strict=False)]
    got = _run(row, given)
    for one, other in zip(tree_leaves(got), tree_leaves(wanted), strict=True):
        _compare(one, other, row.tolerance)
    return got[0]


def _run(row: Row, operands: list[Any]) -> tuple[Any, list[Any]]:
    if not row.is_differentiable:
        return row.call(*operands), []
    inputs = [operand.requires_grad_() for operand in operands if operand.is_floating_point()]
    made = row.call(*operands)
    outputs = [leaf for leaf in tree_leaves(made) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    total = sum(((output * _weights(output)).sum() for output in outputs), start=torch.zeros(()))
    return made, list(torch.autograd.grad(total, inputs, allow_unused=True))


def _weights(tensor: torch.Tensor) -> torch.Tensor:
    numel = tensor.numel()
    return (torch.arange(numel, dtype=torch.float32).cos() + 0.1).view(tensor.shape).to(tensor.dtype)


def _compare(one: Any, other: Any, tolerance: float) -> None:
    if isinstance(other, torch.Tensor):
        assert isinstance(one, DTensor)
        assert one.shape == other.shape
        whole = one.detach().full_tensor()
        torch.testing.assert_close(whole, other.detach(), rtol=tolerance, atol=tolerance, equal_nan=True)
    else:
        assert type(one) is type(other)
        assert one == other


def replicated() -> set[str]:
    """Return the operators that ran on whole tensors since counts were cleared."""
    return {func.name() for (func, route), count in dispatch.COUNTS.items() if route == "replication" and count}


@contextlib.contextmanager
def moves() -> Iterator[list[tuple[int, tuple[Placement, ...], tuple[Placement, ...]]]]:
    """Collect what is redistributed in a context: number of elements, from where, to where."""
    found = []
    move = functional.redistribute_all

    def noted(tensors: Any, layouts: Any) -> Any:
        found.extend((t.numel(), t.placements, to.placements) for t, to in zip(tensors, layouts, strict=True))
        return move(tensors, layouts)

    with patch.object(functional, "redistribute_all", noted):
        yield found


def check_still(row: Row, mesh: Mesh, placements: Sequence[Sequence[Placement]], most: int) -> Any:
    """As `check`, forward, and tensors that are redistributed have no more than ``most`` elements; none is replicated.

    Returns:
        The result.
    """
    given = [placed(*pair) for pair in zip(row.operands, itertools.repeat(mesh), placements, strict=False)]
    dispatch.clear()
    with moves() as found:
        made = row.call(*given)
    assert max((numel for numel, _, _ in found), default=0) <= most, found
    assert not replicated()
    check(row, mesh, placements)
    return made
