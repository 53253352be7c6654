"""Operators that are taken before autograd, beside what `test_database` tries of them."""

import pytest
import torch
from support.states import needs_newer_torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from dtckpt.dtensor import DTensor

from .operator_checks import S0, R, distributed

SQUARE = torch.randn(5, 5, generator=torch.Generator().manual_seed(1))


def zero_rank(placed=R):
    return distributed(torch.zeros((), dtype=torch.int64), placed)


def test_ranks_reach_what_they_are_written_to():
    ours, plain = zero_rank(), torch.zeros((), dtype=torch.int64)
    assert torch.linalg.matrix_rank(distributed(SQUARE, S0), out=ours) is ours
    assert torch.linalg.matrix_rank(distributed(SQUARE, S0).requires_grad_(), out=plain) is plain
    with torch.inference_mode():
        beside = zero_rank()
        torch.linalg.matrix_rank(SQUARE, out=beside)
    assert [ours.item(), plain.item(), beside.item()] == [5, 5, 5]


def test_products_written_to_what_has_other_strides():
    one, other = torch.randn(2, 3, 4), torch.randn(4, 5)
    made = distributed(torch.zeros(5, 2, 3), S0).permute(1, 2, 0)
    torch.matmul(distributed(one, S0), distributed(other, R), out=made)
    torch.testing.assert_close(made.full_tensor(), one @ other)


def test_products_are_not_written_where_a_gradient_would_have_to_pass():
    fixed, learned = distributed(SQUARE, S0), distributed(SQUARE, S0).requires_grad_()
    for operand, made in ((learned, fixed.clone()), (fixed, learned)):
        with pytest.raises(RuntimeError, match="automatic differentiation"):
            torch.matmul(operand, fixed, out=made)
    with torch.no_grad():
        torch.matmul(learned, fixed, out=fixed.clone())


@pytest.mark.parametrize("is_inference", [False, True])
def test_splits_at_indices_of_any_kind(is_inference):
    plain, at = SQUARE, torch.tensor([1, 4])
    wanted = torch.tensor_split(plain, at)
    with torch.inference_mode(is_inference):
        for given in (at, distributed(at, S0), distributed(at, R)):
            made = torch.tensor_split(distributed(plain, S0), given)
            assert all(isinstance(one, DTensor) for one in made)
            assert all(torch.equal(one.full_tensor(), other) for one, other in zip(made, wanted, strict=True))
            assert torch.equal(torch.tensor_split(plain, given)[1], wanted[1])


def test_splits_at_what_is_no_index_are_refused():
    with pytest.raises((RuntimeError, AssertionError), match=r"long|int64"):
        torch.tensor_split(distributed(SQUARE, S0), distributed(torch.tensor([1.0]), R))


@pytest.mark.parametrize("is_inference", [False, True])
def test_other_kinds_of_tensors_go_their_way(is_inference):
    with FakeTensorMode() as mode, torch.inference_mode(is_inference):
        square = mode.from_tensor(SQUARE)
        assert isinstance(torch.linalg.matrix_rank(square), FakeTensor)
        assert isinstance(torch.matmul(square, square, out=torch.empty_like(square)), FakeTensor)
    assert torch.vmap(torch.linalg.matrix_rank)(SQUARE.expand(2, 5, 5)).tolist() == [5, 5]


def test_masks_beside_plain_tensors():
    mask = SQUARE > 0
    wanted = torch.masked.sum(SQUARE, 0, mask=mask)
    for tensor, given in ((distributed(SQUARE, S0), mask), (SQUARE, distributed(mask, S0))):
        torch.testing.assert_close(torch.masked.sum(tensor, 0, mask=given).full_tensor(), wanted)
    with pytest.raises(IndexError, match="broadcastable"):
        torch.masked.sum(distributed(SQUARE, S0), 0, mask=mask[None])


@pytest.mark.parametrize(
    "function",
    [
        torch.copysign,
        pytest.param(torch.nextafter, marks=needs_newer_torch("it has no derivative of nextafter")),
        lambda _, given: given.sgn(),
        lambda _, given: torch.normal(given, 1.0),
    ],
)
def test_gradients_that_are_zero_are_distributed(function):
    values = [distributed(SQUARE, S0).requires_grad_() for _ in range(2)]
    made = function(*(2 * one for one in values))
    gradient = torch.autograd.grad(made.sum(), values[1])[0]
    assert isinstance(gradient, DTensor)
    assert not gradient.full_tensor().any()


def test_operators_taken_early_go_on_without_gradients():
    with torch.no_grad():
        assert torch.equal(torch.copysign(distributed(SQUARE, S0), distributed(SQUARE, S0)).full_tensor(), SQUARE)
