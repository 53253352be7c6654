"""Check that an operator runs by rule: what it gives, how that lies, what had to move for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from dtckpt import Layout, Mesh, Partial, Placement, Replicate, Shard
from dtckpt.dtensor import DTensor
from dtckpt.dtensor.operators import dispatch

from .arrangements import in_terms
from .tables import GRID, LINE, moves

R, P = Replicate(), Partial()
S0, S1, S2, S3 = map(Shard, range(4))

Placed = Placement | tuple[Placement, ...]


def distributed(tensor: torch.Tensor, placed: Placed, mesh: Mesh | None = None) -> DTensor:
    """Return a DTensor on `LINE` for one placement, on `GRID` for two."""
    placements = placed if isinstance(placed, tuple) else (placed,)
    mesh = mesh or (LINE if len(placements) == 1 else GRID)
    return in_terms(tensor.detach(), Layout.from_placements(mesh, placements, tensor.ndim))


def check(
    function: Callable[..., Any],
    tensors: Sequence[torch.Tensor],
    placed: Sequence[Placed],
    expected: Placed | Sequence[Placed] | None = None,
    *,
    is_still: bool = False,
    has_gradients: bool = True,
    tolerance: float = 1e-4,
) -> None:
    """Compare an operator's results and gradients with those of plain tensors.

    Args:
        function: Of the tensors.
        tensors: Plain ones.
        placed: How each is distributed.
        expected: Placements of the results that are tensors; a list if there are several.
        is_still: Forward, nothing is to be redistributed.
        has_gradients: Compare gradients with regard to all floating-point tensors too.
        tolerance: Absolute and relative.
    """
    ours = [distributed(tensor, one) for tensor, one in zip(tensors, placed, strict=True)]
    plain = [tensor.detach().clone() for tensor in tensors]
    for tensor in (*ours, *plain):
        tensor.requires_grad_(has_gradients and tensor.is_floating_point())
    dispatch.clear()
    with moves() as found:
        made = _tensors(function(*ours))
    assert not is_still or not found, found
    wanted = _tensors(function(*plain))
    _compare(made, wanted, tolerance)
    if expected is not None:
        each = expected if isinstance(expected, list) else [expected]
        assert [one.placements for one in made] == [one if isinstance(one, tuple) else (one,) for one in each]
    results = [(one, other) for one, other in zip(made, wanted, strict=True) if other.requires_grad]
    if results:
        seeds = [torch.randn_like(other.detach()) for _, other in results]
        given = [distributed(seed, one.placements) for seed, (one, _) in zip(seeds, results, strict=True)]
        inputs = [(one, other) for one, other in zip(ours, plain, strict=True) if other.requires_grad]
        made = torch.autograd.grad([one for one, _ in results], [one for one, _ in inputs], given)
        wanted = torch.autograd.grad([other for _, other in results], [other for _, other in inputs], seeds)
        _compare(made, wanted, tolerance)
    replicated = [str(func) for (func, route) in dispatch.counts() if route == "replication"]
    assert not replicated, replicated


def _tensors(results: Any) -> list[Any]:
    return [
        one for one in (results if isinstance(results, list | tuple) else [results]) if isinstance(one, torch.Tensor)
    ]


def _compare(made: Sequence[Any], wanted: Sequence[torch.Tensor], tolerance: float) -> None:
    for one, other in zip(made, wanted, strict=True):
        assert isinstance(one, DTensor)
        torch.testing.assert_close(one.detach().full_tensor(), other.detach(), rtol=tolerance, atol=tolerance)
