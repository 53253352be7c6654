"""Operators that draw random numbers: one key and the global index make an element, whatever the layout."""

import pytest
import torch
from support.states import gpu_mesh
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from dtckpt import UNSHARDED, DTensor, Layout, abstract_mesh
from dtckpt.comm import torch_private
from dtckpt.dtensor.operators import dispatch, plain_tensors
from dtckpt.dtensor.operators.rules import random as rules

from .operator_checks import S0, S1, P, R, distributed

SHAPE = (6, 5)
PLACED = [R, S0, S1, P, (S0, S1), (S1, S0), (S0, S0), (P, S0)]
IN_PLACE = {
    "bernoulli_": lambda x: x.bernoulli_(0.3),
    "bernoulli_ by tensor": lambda x: x.bernoulli_(x.clone().sigmoid()),
    "cauchy_": lambda x: x.cauchy_(1, 2),
    "exponential_": lambda x: x.exponential_(2),
    "geometric_": lambda x: x.geometric_(0.3),
    "log_normal_": lambda x: x.log_normal_(0.1, 0.2),
    "normal_": lambda x: x.normal_(1, 2),
    "random_": lambda x: x.random_(),
    "random_ to": lambda x: x.random_(7),
    "random_ from": lambda x: x.random_(3, 9),
    "uniform_": lambda x: x.uniform_(2, 3),
}
NEW = {
    "alpha_dropout": lambda x: functional.alpha_dropout(x, 0.4, training=True),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "bernoulli by p": lambda x: torch.ops.aten.bernoulli.p(x, 0.3),
    "dropout": lambda x: functional.dropout(x, 0.4),
    "feature_dropout": lambda x: functional.feature_alpha_dropout(x, 0.4, training=True),
    "gumbel_softmax": lambda x: functional.gumbel_softmax(x, hard=True),
    "multinomial": lambda x: torch.multinomial(x.exp(), 2),
    "multinomial with replacement": lambda x: torch.multinomial(x.exp(), 9, replacement=True),
    "native_dropout": lambda x: torch.native_dropout(x, 0.4, True)[0],
    "normal around": lambda x: torch.normal(x, x.exp()),
    "normal of one deviation": lambda x: torch.normal(x, 2.0),
    "poisson": lambda x: torch.poisson(x.exp()),
    "rand_like": torch.rand_like,
    "randint_like": lambda x: torch.randint_like(x, 3, 9),
    "randn_like": torch.randn_like,
    "rrelu": lambda x: functional.rrelu(x, training=True),
}


def drawn(function, values, placed, seed=7):
    torch.manual_seed(1)
    tensor = distributed(values, placed)
    torch.manual_seed(seed)
    return function(tensor).full_tensor()


@pytest.fixture(scope="module")
def values():
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("name", [*IN_PLACE, *NEW])
def test_numbers_are_those_of_one_device(name, values):
    function = {**IN_PLACE, **NEW}[name]
    alone = abstract_mesh({"x": 1})
    torch.manual_seed(7)
    expected = function(distributed(values, R, alone)).full_tensor()
    for placed in PLACED:
        torch.testing.assert_close(drawn(function, values, placed), expected)
    assert not torch.equal(drawn(function, values, R, seed=8), expected)


@pytest.mark.parametrize("name", IN_PLACE)
def test_in_place_layouts_stay_and_nothing_moves(name, values):
    for placed in (S0, (S1, R)):
        tensor = distributed(values, placed)
        dispatch.clear()
        assert IN_PLACE[name](tensor) is tensor
        assert tensor.placements == (placed if isinstance(placed, tuple) else (placed,))
        assert "replication" not in {route for _, route in dispatch.counts()}


def test_shards_differ(values):
    tensor = distributed(torch.zeros(8, 3), S0).uniform_()
    parts = [component.flatten().tolist() for component in tensor.components]
    assert len({tuple(part) for part in parts}) == 4


@pytest.mark.parametrize("placed", [S0, (S0, S1), P], ids=str)
@pytest.mark.parametrize("function", [functional.dropout, lambda x: torch.native_dropout(x, 0.5, True)[0]])
def test_gradients_of_dropout(function, placed, values):
    tensor = distributed(values, placed).requires_grad_()
    out = function(tensor)
    out.sum().backward()
    kept = out.full_tensor() != 0
    assert 0 < kept.sum() < kept.numel()
    torch.testing.assert_close(tensor.grad.full_tensor(), kept * 2.0)
    torch.testing.assert_close(out.full_tensor(), kept * 2.0 * values)


def test_dropout_at_the_ends(values):
    tensor = distributed(values, S0)
    for p, factor in ((0.0, 1.0), (1.0, 0.0)):
        torch.testing.assert_close(functional.dropout(tensor, p).full_tensor(), values * factor)
        torch.testing.assert_close(torch.native_dropout(tensor, p, True)[0].full_tensor(), values * factor)
    out, mask = torch.native_dropout(tensor, 0.5, False)
    torch.testing.assert_close(out.full_tensor(), values)
    assert mask.full_tensor().all()


def test_generators_have_states(values):
    tensor = distributed(values, S0)
    generator = torch.Generator().manual_seed(3)
    state = generator.get_state()
    first, second = (tensor.normal_(generator=generator).full_tensor().clone() for _ in range(2))
    assert not torch.equal(first, second)
    generator.set_state(state)
    assert torch.equal(tensor.normal_(generator=generator).full_tensor(), first)
    state = torch.get_rng_state()
    first = functional.dropout(tensor).full_tensor()
    torch.set_rng_state(state)
    assert torch.equal(functional.dropout(tensor).full_tensor(), first)


def test_views_of_what_is_filled_follow():
    tensor = distributed(torch.zeros(6, 4), S0)
    tensor.view(24).uniform_(1, 2)
    assert (tensor.full_tensor() >= 1).all()


def test_multinomial_draws_by_weight_and_none_twice():
    torch.manual_seed(0)
    weights = distributed(torch.tensor([1.0, 2.0, 0.0, 5.0]).expand(8000, 4).contiguous(), S0)
    first = torch.multinomial(weights, 1)
    assert first.placements == (S0,)
    shares = torch.bincount(first.full_tensor().flatten(), minlength=4) / 8000
    torch.testing.assert_close(shares, torch.tensor([1.0, 2.0, 0.0, 5.0]) / 8, atol=0.03, rtol=0)
    three = torch.multinomial(weights, 3).full_tensor().sort(-1).values
    assert torch.equal(three, torch.tensor([0, 1, 3]).expand(8000, 3))
    with pytest.raises(RuntimeError, match="element < 0"):
        torch.multinomial(-weights, 1)
    with pytest.raises(RuntimeError, match="sum of probabilities"):
        torch.multinomial(weights * 0, 1)
    with pytest.raises(RuntimeError):
        torch.multinomial(weights, 5)


def test_parameters_out_of_range(values):
    tensor = distributed(values, S0)
    with pytest.raises(RuntimeError):
        tensor.bernoulli_(1.5)
    with pytest.raises(RuntimeError):
        torch.normal(tensor, -tensor.abs())


def test_the_host_does_not_wait_for_a_gpu_to_check_parameters(monkeypatch):
    """Numbers of fake tensors cannot be read: a call that asks for a number raises."""
    monkeypatch.setattr(plain_tensors, "device_of", lambda name: torch.device("cuda", 0))
    monkeypatch.setattr(rules, "refill", lambda tensor, *_: tensor)
    checked = []
    monkeypatch.setattr(torch_private, "assert_async", lambda is_right, expected: checked.append((is_right, expected)))
    layout = Layout(["x", UNSHARDED], gpu_mesh({"x": 2}))
    with FakeTensorMode():
        components = [torch.rand(3, 5, device="cuda") for _ in range(2)]
        tensor = DTensor(components, layout, SHAPE, torch.float32, device=components[0].device)
        for draw in (torch.normal, lambda mean, _: torch.normal(mean, components[0].new_ones(()))):
            checked.clear()
            assert draw(tensor, tensor).shape == SHAPE
            assert {expected for _, expected in checked} == {"normal expects all elements of std >= 0.0"}
            assert [is_right.shape for is_right, _ in checked] == [()] * 2
        checked.clear()
        assert torch.multinomial(tensor, 2).shape == (6, 2)
    assert [expected.partition(" ")[0] for _, expected in checked] == ["probability"] * 2 + ["invalid"] * 2


def test_draws_on_the_meta_device():
    tensor = distributed(torch.rand(SHAPE), S0).to("meta")
    assert torch.normal(tensor, tensor).shape == SHAPE
    assert torch.multinomial(tensor, 2).shape == (6, 2)
