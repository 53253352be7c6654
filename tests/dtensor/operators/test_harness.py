"""The trials themselves: plain tensors pass them, and whatever is wrong shows."""

import pytest
import torch
from torch.nn import functional

from dtckpt import Partial, Replicate, Shard
from dtckpt.dtensor import DTensor

from .arrangements import ARRANGEMENTS, Placed, Plain
from .operator_database import (
    BACKWARD,
    QUICK,
    RIGHT,
    Expected,
    Form,
    WrongResult,
    compare,
    is_determined,
    outcomes_of,
    run_backward,
    verdict_of,
)
from .operator_samples import NOT_TRIED, Sample, op_db, operators, samples_of

MIXED = next(each for each in ARRANGEMENTS if each.name == "mixed")
SUMS = Placed("sums", (("x", 2), ("y", 3)), ((Partial("sum"), Replicate()), (Replicate(), Partial("sum"))))


@pytest.mark.parametrize("name", ["add", "nn_functional_linear", "sort", "nn_functional_dropout", "empty_like", "svd"])
def test_plain_tensors_are_right(name):
    outcomes = list(outcomes_of(name, QUICK, among=[Plain()]))
    assert outcomes
    assert {outcome.verdict for outcome in outcomes} == {RIGHT}


def test_all_operators_but_those_with_a_reason_are_tried():
    assert set(operators()) | set(NOT_TRIED) == {op.formatted_name for op in op_db}
    assert not set(operators()) & set(NOT_TRIED)


def test_samples_are_the_same_each_time():
    for name in ("add", "nn_functional_dropout", "index_put"):
        first, second = (samples_of(operators()[name], 4) for _ in range(2))
        assert len(first) > 1
        for one, other in zip(first, second, strict=True):
            assert all(map(torch.equal, one.tensors, other.tensors))


@pytest.mark.parametrize("arrangement", [*ARRANGEMENTS, SUMS], ids=lambda arrangement: arrangement.name)
@pytest.mark.parametrize("shape", [(), (5,), (2, 1), (0, 3), (7, 4, 2)])
def test_arguments_keep_their_values(arrangement, shape):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    for tensor in (values, values.to(torch.complex64), (values * 10).long(), values > 0):
        for position in range(4):
            made = arrangement.distribute(tensor, position)
            assert isinstance(made, DTensor)
            assert torch.equal(arrangement.whole(made), tensor)


def test_terms_of_extreme_numbers():
    values = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, 3e38, 1.0])
    whole = SUMS.whole(SUMS.distribute(values, 0))
    assert torch.equal(whole, values)
    assert torch.equal(whole.signbit(), values.signbit())


def test_terms_differ_in_sign():
    made = SUMS.distribute(torch.ones(3), 0)
    assert {tuple(component.sign().tolist()) for component in made.components} == {(1.0,) * 3, (-1.0,) * 3}


def test_positions_have_their_own_placements():
    found = [MIXED.distribute(torch.ones(4, 4), position).placements for position in range(5)]
    assert found == [(Shard(0),), (Shard(1),), (Replicate(),), (Partial("sum"),), (Shard(0),)]


WRONG = [
    ("wrong value", torch.ones(2, 2), torch.tensor([[1.0, 1.0], [1.0, 1.001]])),
    ("wrong value", torch.tensor([1.0, torch.nan]), torch.tensor([1.0, 1.0])),
    ("wrong value", torch.tensor([1000, 1001]), torch.tensor([1000, 1000])),
    ("wrong value", 2, 3),
    ("wrong value", 2.0, 2.01),
    ("wrong shape", torch.ones(2), torch.ones(1, 2)),
    ("wrong dtype", torch.ones(2), torch.ones(2, dtype=torch.float64)),
    ("wrong kind", torch.ones(2), 2.0),
    ("wrong kind", 2.0, torch.ones(2)),
    ("wrong kind", 2, 2.0),
    ("wrong kind", (torch.ones(2), None), (torch.ones(2), torch.ones(2))),
    ("wrong kind", (torch.ones(2),), (torch.ones(2), torch.ones(2))),
]


@pytest.mark.parametrize(("verdict", "got", "expected"), WRONG)
def test_what_is_wrong_shows(verdict, got, expected):
    with pytest.raises(WrongResult) as caught:
        compare(got, expected, Plain())
    assert caught.value.verdict == verdict


def test_plain_results_show():
    with pytest.raises(WrongResult, match="a plain Tensor"):
        compare(torch.ones(2), torch.ones(2), MIXED)


def test_values_that_nothing_determines_are_not_compared():
    compare(torch.ones(2), torch.zeros(2), Plain(), by_value=False)
    with pytest.raises(WrongResult):
        compare(torch.ones(2), torch.zeros(3), Plain(), by_value=False)


def test_operators_that_draw_numbers_are_found():
    drawn = ["nn_functional_dropout", "uniform", "multinomial", "empty_like"]
    assert not any(map(is_determined, drawn))
    assert all(map(is_determined, ["add", "nn_functional_linear", "sort"]))


def test_errors_show():
    def fail(_):
        raise RuntimeError("of the operator")

    sample = Sample((torch.ones(2), (), {}), lambda results: results)
    form = Form("forward", "function", fail, lambda form, sample, *_: form.call(sample.arguments[0]))
    verdict = verdict_of(form, sample, Plain(), Expected(None, None, is_determined=True))
    assert verdict == ("error", "RuntimeError: of the operator")


def test_gradients_are_those_of_the_given_ones():
    sample = Sample((torch.randn(3, 4).requires_grad_(), (torch.randn(2, 4).requires_grad_(),), {}), lambda out: out)
    given = [torch.randn(3, 2)]
    form = Form(BACKWARD, "function", functional.linear, run_backward)
    inputs, weight = run_backward(form, sample, Plain(), given)
    assert torch.allclose(inputs, given[0] @ sample.tensors[1])
    assert torch.allclose(weight, given[0].T @ sample.tensors[0])
