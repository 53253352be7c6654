"""Reductions, scans, orders and softmax: right however operands lie, and without gathering where dims are split."""

from __future__ import annotations

import math

import pytest
import torch
from support.states import IS_DEVELOPMENT_TORCH

from dtckpt.dtensor import Partial, Replicate, Shard, distribute_tensor
from dtckpt.dtensor.operators import dispatch

from .operator_checks import GRID, LINE, check, distributed, replicated_operators, sample_placements

_aten = torch.ops.aten
_made = torch.Generator().manual_seed(5)
_CUBE = torch.randn(5, 6, 3, generator=_made)
_FLAT = torch.randn(3, 5, generator=_made)
_TIES = torch.randint(0, 3, (6, 5), generator=_made).float()
_WHOLE = torch.randint(0, 4, (5, 6), generator=_made)
_PAIR = torch.randn(2, generator=_made)
"""Over four devices, two of which have nothing of it."""
_NANS = torch.tensor([[0.5, math.nan, 2.0], [1.0, -1.0, 3.0], [math.nan, math.nan, 0.0]])
_INFS = torch.tensor([[-math.inf, -math.inf, -math.inf], [0.0, math.inf, 2.0], [-math.inf, 1.0, 2.0]])


def _row(name, call, *operands, differentiable=True, tolerance=2e-5):
    return pytest.param(call, operands, differentiable, tolerance, id=name)


def _fixed(name, call, *operands):
    return _row(name, call, *operands, differentiable=False)


ROWS = [
    _row("sum", lambda t: t.sum(), _CUBE),
    _row("sum of dims, kept", lambda t: t.sum((0, -1), keepdim=True), _CUBE),
    _fixed("sum of integers", lambda t: t.sum(0), _WHOLE),
    _row("mean", lambda t: t.mean(), _CUBE),
    _row("mean of a dim", lambda t: t.mean(1), _CUBE),
    _row("mean of few", lambda t: t.mean(), _PAIR),
    _row("mean in halves", lambda t: t.mean(0, dtype=torch.bfloat16), _CUBE, differentiable=False, tolerance=1e-2),
    _row("prod", lambda t: t.prod(), _FLAT),
    _row("prod of a dim", lambda t: t.prod(0), _FLAT),
    _fixed("prod of integers", lambda t: t.prod(1), _WHOLE),
    _fixed("any", lambda t: (t > 2).any(1), _WHOLE),
    _fixed("any of numbers", lambda t: t.any((0, 1)), _WHOLE),
    _fixed("all", lambda t: (t >= 0).all(), _WHOLE),
    _fixed("all of bytes", lambda t: t.to(torch.uint8).all(0), _WHOLE),
    _fixed("any of few", lambda t: (t > 9).any(), _PAIR),
    _row("amax", lambda t: t.amax(0), _FLAT),
    _row("amax with ties", lambda t: t.amax((0, 1)), _TIES),
    _row("amin of few", lambda t: t.amin(), _PAIR),
    _fixed("amax of integers", lambda t: t.amax(0), _WHOLE),
    _fixed("amax with NaN", lambda t: t.amax(1), _NANS),
    _row("max", lambda t: t.max(), _TIES),
    _row("min", lambda t: t.min(), _TIES),
    # PyTorch 2.11 has no derivative of it.
    _row("aminmax", lambda t: t.aminmax(), _FLAT, differentiable=IS_DEVELOPMENT_TORCH),
    _row("aminmax of a dim", lambda t: t.aminmax(dim=1, keepdim=True), _FLAT, differentiable=IS_DEVELOPMENT_TORCH),
    _row("max of a dim", lambda t: t.max(0), _TIES),
    _row("max of few", lambda t: t.max(0), _PAIR),
    _row("min of a dim", lambda t: t.min(-1, keepdim=True), _TIES),
    _fixed("max of a dim with NaN", lambda t: t.max(1), _NANS),
    _fixed("argmax", lambda t: t.argmax(), _TIES),
    _fixed("argmax, kept", lambda t: t.argmax(keepdim=True), _TIES),
    _fixed("argmax of a dim", lambda t: t.argmax(1), _WHOLE),
    _fixed("argmax with NaN", lambda t: t.argmax(0), _NANS),
    _fixed("argmax of infinities", lambda t: t.argmax(1), _INFS),
    _fixed("argmin of a dim, kept", lambda t: t.argmin(0, keepdim=True), _TIES),
    _fixed("argmin of few", lambda t: t.argmin(), _PAIR),
    _row("nansum", lambda t: t.nansum(0), _CUBE),
    _fixed("nansum with NaN", lambda t: t.nansum(), _NANS),
    _fixed("nanmean", lambda t: t.nanmean(1), _NANS),
    _fixed("count_nonzero", lambda t: t.count_nonzero(), _WHOLE),
    _fixed("count_nonzero of a dim", lambda t: t.count_nonzero((1,)), _WHOLE),
    _row("cumsum", lambda t: t.cumsum(1), _CUBE),
    _row("cumprod", lambda t: t.cumprod(0), _FLAT),
    _row("logcumsumexp", lambda t: t.logcumsumexp(1), _FLAT),
    _row("cummax", lambda t: t.cummax(0), _FLAT),
    _row("sort", lambda t: t.sort(-1), _FLAT),
    _fixed("stable sort", lambda t: t.sort(dim=0, stable=True, descending=True), _TIES),
    _row("topk", lambda t: t.topk(2, 0), _FLAT),
    _row("kthvalue", lambda t: t.kthvalue(2, 0), _FLAT),
    _row("median", lambda t: t.median(), _FLAT),
    _row("median of a dim", lambda t: t.median(0, keepdim=True), _FLAT),
    _row("mode", lambda t: t.mode(1), _FLAT),
    _row("quantile", lambda t: t.quantile(0.3, dim=1), _FLAT),
    _row("softmax", lambda t: t.softmax(-1), _CUBE),
    _row("softmax of few", lambda t: t.softmax(0), _PAIR),
    _row("softmax in halves", lambda t: t.bfloat16().softmax(1), _CUBE, differentiable=False, tolerance=1e-2),
    _row("log_softmax", lambda t: t.log_softmax(1), _CUBE),
    _fixed("log_softmax of infinities", lambda t: t.log_softmax(1), _INFS),
    _fixed("safe softmax", lambda t: _aten._safe_softmax(t, 1), _INFS),
    _row("logsumexp", lambda t: t.logsumexp((0, 2)), _CUBE),
    _row("logsumexp, kept", lambda t: t.logsumexp(1, keepdim=True), _FLAT),
    _fixed("logsumexp of infinities", lambda t: t.logsumexp(1), _INFS),
    _fixed("equal", torch.equal, _FLAT, _FLAT),
    _fixed("not equal", torch.equal, _FLAT, _FLAT.index_fill(1, torch.tensor([4]), 7.0)),
    _fixed("of other shapes", torch.equal, _FLAT, _PAIR),
    _fixed("allclose", torch.allclose, _FLAT, _FLAT + 1e-9),
    _fixed("allclose with NaN", lambda t, u: torch.allclose(t, u, equal_nan=True), _NANS, _NANS),
]


@pytest.mark.share(18)
@pytest.mark.parametrize("mesh", [LINE, GRID], ids=["line", "grid"])
@pytest.mark.parametrize(("call", "operands", "is_differentiable", "tolerance"), ROWS)
def test_like_plain_tensors(call, operands, is_differentiable, tolerance, mesh):
    for placements in sample_placements(operands, mesh, 10):
        check(call, operands, placements, may_replicate=True, has_gradients=is_differentiable, tolerance=tolerance)


_X = torch.randn(6, 10, generator=_made)

STILL = [
    ("sum", lambda t: t.sum(1), (Partial("sum"),)),
    ("mean", lambda t: t.mean(1), (Partial("sum"),)),
    ("amax", lambda t: t.amax(1), (Partial("max"),)),
    ("any", lambda t: (t > 0).any(1), (Partial("max"),)),
    ("prod", lambda t: t.prod(1), (Partial("product"),)),
    ("count_nonzero", lambda t: t.count_nonzero((1,)), (Partial("sum"),)),
    ("argmax", lambda t: t.argmax(1), None),
    ("max", lambda t: t.max(1), None),
    ("softmax", lambda t: t.softmax(1), (Shard(1),)),
    ("log_softmax", lambda t: t.log_softmax(1), (Shard(1),)),
    ("logsumexp", lambda t: t.logsumexp(1), None),
    ("cumsum along the other dim", lambda t: t.cumsum(0), (Shard(1),)),
    ("softmax along the other dim", lambda t: t.softmax(0), (Shard(1),)),
]


@pytest.mark.parametrize(("call", "expected"), [row[1:] for row in STILL], ids=[row[0] for row in STILL])
def test_split_dims_are_not_gathered(call, expected):
    """No more than one number for each row travels."""
    made = check(call, [_X], [(Shard(1),)], most=len(_X), has_gradients=False)
    if expected is not None:
        assert made.placements == expected


def test_gradient_of_softmax_is_not_gathered():
    x = distributed(_X, (Shard(1),)).requires_grad_()
    dispatch.clear()
    x.log_softmax(1).backward(distributed(_X, (Shard(1),)))
    assert not replicated_operators()
    assert x.grad.placements == (Shard(1),)


def test_ties_on_different_devices_share_the_gradient_of_a_maximum():
    x = distributed(torch.tensor([0.0, 3.0, 3.0, 0.0]), (Shard(0),)).requires_grad_()
    x.amax().backward(distributed(torch.tensor(6.0), (Replicate(),)))
    assert x.grad.full_tensor().tolist() == [0.0, 3.0, 3.0, 0.0]


@pytest.mark.parametrize("call", [torch.amax, torch.max, torch.argmax], ids=["amax", "max", "argmax"])
def test_a_maximum_of_nothing_is_refused_as_of_plain_tensors(call):
    with pytest.raises((RuntimeError, IndexError)) as plain:
        call(torch.empty(0, 3), 0)
    with pytest.raises(type(plain.value)):
        call(distributed(torch.empty(0, 3), (Shard(1),)), 0)


def test_sums_of_halves_do_not_overflow_before_they_are_divided():
    x = torch.full((8,), 60000.0, dtype=torch.float16)
    assert distributed(x, (Shard(0),)).mean().full_tensor() == 60000.0


@pytest.mark.parametrize("operate", [torch.add, torch.sub])
@pytest.mark.parametrize("number", [2, 2.0, 2j], ids=str)
def test_numbers_are_added_to_a_pending_maximum(operate, number):
    """Complex numbers have no order, so the maximum cannot stay pending then."""
    x = torch.tensor([1.0, -3.0, 2.0, 0.0])
    pending = distributed(x, (Shard(0),)).redistribute(placements=[Partial("max")])
    torch.testing.assert_close(operate(pending, number).full_tensor(), operate(x, number))


@pytest.mark.parametrize("name", ["median", "nanmedian", "kthvalue", "mode"])
@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(1)])
def test_expanded_tensors_have_the_medians_of_their_copies(name, placement):
    """PyTorch returns uninitialized memory for some expanded tensors."""
    arguments = (1,) if name == "kthvalue" else ()
    for shape in ((1, 1), (4, 1), (1, 3)):
        whole = torch.arange(1.0, 13.0)[: torch.Size(shape).numel()].reshape(shape)
        expected = getattr(whole.expand(4, 3).clone(), name)(*arguments, 0)
        expanded = distribute_tensor(whole, LINE, [Replicate()]).expand(4, 3).redistribute(placements=[placement])
        assert getattr(expanded, name)(*arguments, 0).values.full_tensor().equal(expected.values)
