"""Operators on lists, and the optimizers, gradient clipping and scaling that are made of them."""

import copy

import pytest
import torch
from torch import nn

from dtckpt import abstract_mesh
from dtckpt.dtensor import DTensor
from dtckpt.dtensor.operators import dispatch
from dtckpt.errors import MeshMismatchError

from .operator_checks import GRID, S0, S1, P, R, distributed

SHAPES = [(6, 5), (3,), (8, 4), (), (2, 2)]
PLACED = [S0, R, S1, R, S0]
OTHERS = [S0, S0, R, R, P]


def made(placed, *, sign=1.0):
    torch.manual_seed(0)
    plain = [torch.rand(shape) + 0.5 for shape in SHAPES]
    plain = [sign * one for one in plain]
    return plain, [distributed(one, where) for one, where in zip(plain, placed, strict=True)]


def same(ours, plain):
    for one, other in zip(ours, plain, strict=True):
        assert isinstance(one, DTensor)
        torch.testing.assert_close(one.full_tensor(), other, rtol=1e-4, atol=1e-5)


FUNCTIONAL = {
    "add lists": lambda x, y: torch._foreach_add(x, y, alpha=3),
    "add number": lambda x, y: torch._foreach_add(x, 2.5),
    "add numbers": lambda x, y: torch._foreach_add(x, [1.0, 2.0, 3.0, 4.0, 5.0]),
    "mul lists": torch._foreach_mul,
    "mul tensor": lambda x, y: torch._foreach_mul(x, y[3]),
    "div": torch._foreach_div,
    "sqrt": lambda x, y: torch._foreach_sqrt(x),
    "addcdiv": lambda x, y: torch._foreach_addcdiv(x, x, y, value=2.0),
    "lerp": lambda x, y: torch._foreach_lerp(x, y, 0.3),
    "maximum": torch._foreach_maximum,
    "max": lambda x, y: torch._foreach_max(x),
    "pow": lambda x, y: torch._foreach_pow(2.0, x),
}
IN_PLACE = {
    "add_ lists": torch._foreach_add_,
    "mul_ number": lambda x, y: torch._foreach_mul_(x, 3.0),
    "addcmul_": lambda x, y: torch._foreach_addcmul_(x, y, y, value=0.5),
    "copy_": torch._foreach_copy_,
    "zero_": lambda x, y: torch._foreach_zero_(x),
    "exp_": lambda x, y: torch._foreach_exp_(x),
}


@pytest.mark.parametrize("name", FUNCTIONAL)
def test_lists(name):
    (x, ours), (y, theirs) = made(PLACED), made(OTHERS)
    dispatch.clear()
    same(FUNCTIONAL[name](ours, theirs), FUNCTIONAL[name](x, y))
    assert "replication" not in {route for _, route in dispatch.counts()}


@pytest.mark.parametrize("placed", [PLACED, OTHERS], ids=["split", "partial"])
@pytest.mark.parametrize("name", IN_PLACE)
def test_lists_in_place(name, placed):
    (x, ours), (y, theirs) = made(placed), made(PLACED)
    kept = list(ours)
    IN_PLACE[name](x, y)
    IN_PLACE[name](ours, theirs)
    same(kept, x)
    assert [one.placements for one in ours] == [(one,) for one in placed]


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (0, 2, 1)])
def test_a_failure_counts_as_a_write_to_the_tensors_before_it(order):
    def versions(place):
        tensors = [place(torch.ones(4)), place(torch.ones(4, dtype=torch.bool)), place(torch.ones(4))]
        with pytest.raises(RuntimeError, match="can't be cast to the desired output type Bool"):
            torch._foreach_mul_([tensors[number] for number in order], 0.5)
        return [tensor._version for tensor in tensors]

    assert versions(lambda tensor: distributed(tensor, S0)) == versions(lambda tensor: tensor)


def test_results_lie_as_the_first_list():
    _, ours = made(PLACED)
    _, theirs = made(OTHERS)
    assert torch._foreach_add(ours, theirs)[0].placements == (S0,)
    waiting = torch._foreach_mul([theirs[4]], 2.0)
    assert waiting[0].placements == (P,)


@pytest.mark.parametrize("order", [2.0, 1.0, 3.0, float("inf"), 0.0, -float("inf")])
def test_norms(order):
    (x, ours), (y, theirs) = made(PLACED, sign=-1.0), made(OTHERS)
    same(torch._foreach_norm(ours + theirs, order), torch._foreach_norm(x + y, order))


def test_norms_of_large_numbers_and_of_empty_pieces():
    plain = [torch.full((2, 2), 1e25), torch.zeros(0)]
    ours = [distributed(one, S0) for one in plain]
    same(torch._foreach_norm(ours), torch._foreach_norm(plain))


def test_shapes_that_do_not_fit():
    _, ours = made(PLACED)
    with pytest.raises(RuntimeError):
        torch._foreach_add_(ours, ours[::-1])
    with pytest.raises(RuntimeError):
        torch._foreach_add(ours, ours[:2])


# --- several meshes -----------------------------------------------------------------------------------------------

COLUMN = abstract_mesh({"z": 2})
ON_OTHERS = [None, COLUMN, GRID, COLUMN, None]
"""Meshes of `SHAPES`; None stands for the mesh that ``made`` takes."""


def on_several_meshes(placed):
    plain, ours = made(placed)
    for index, mesh in enumerate(ON_OTHERS):
        if mesh is not None:
            ours[index] = distributed(plain[index], (placed[index], R)[: mesh.ndim], mesh)
    return plain, ours


@pytest.mark.parametrize("name", [name for name in FUNCTIONAL if name != "mul tensor"])
def test_lists_on_several_meshes(name):
    (x, ours), (y, theirs) = on_several_meshes(PLACED), on_several_meshes(OTHERS)
    results = FUNCTIONAL[name](ours, theirs)
    same(results, FUNCTIONAL[name](x, y))
    assert [one.device_mesh for one in results] == [one.device_mesh for one in ours]


@pytest.mark.parametrize("name", IN_PLACE)
def test_lists_on_several_meshes_in_place(name):
    (x, ours), (y, theirs) = on_several_meshes(PLACED), on_several_meshes(PLACED)
    IN_PLACE[name](x, y)
    IN_PLACE[name](ours, theirs)
    same(ours, x)


def test_norms_on_several_meshes():
    plain, ours = on_several_meshes(PLACED)
    same(torch._foreach_norm(ours), torch._foreach_norm(plain))


def test_meshes_that_differ_at_one_index_change_nothing():
    (x, ours), (_, theirs) = on_several_meshes(PLACED), made(OTHERS)
    with pytest.raises(MeshMismatchError, match="different meshes"):
        torch._foreach_add_(ours, theirs)
    same(ours, x)


# --- training -----------------------------------------------------------------------------------------------------

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.1, foreach=False),
    "sgd foreach": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, foreach=True),
    "sgd fused": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, fused=True),
    "adam": lambda p: torch.optim.Adam(p, 0.1, foreach=False),
    "adam foreach": lambda p: torch.optim.Adam(p, 0.1, amsgrad=True, foreach=True),
    "adam fused": lambda p: torch.optim.Adam(p, 0.1, amsgrad=True, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, 0.1, foreach=False),
    "adamw foreach": lambda p: torch.optim.AdamW(p, 0.1, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, 0.1, fused=True),
    "adamw of a tensor's rate": lambda p: torch.optim.AdamW(p, torch.tensor(0.1), fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.1, foreach=False),
    "adagrad foreach": lambda p: torch.optim.Adagrad(p, 0.1, foreach=True),
    "adagrad fused": lambda p: torch.optim.Adagrad(p, 0.1, fused=True),
    "adadelta": lambda p: torch.optim.Adadelta(p, foreach=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, 0.1, foreach=False),
    "adamax": lambda p: torch.optim.Adamax(p, foreach=True),
    "asgd": lambda p: torch.optim.ASGD(p, foreach=False),
    "nadam": lambda p: torch.optim.NAdam(p, foreach=True),
    "radam": lambda p: torch.optim.RAdam(p, foreach=False),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 0.1, momentum=0.9, centered=True, foreach=True),
    "rprop": lambda p: torch.optim.Rprop(p, foreach=False),
}


def model_of(placed):
    """Return two layers, plain (for no placements) or of DTensors, with the same values."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    if placed is not None:
        for layer, (weight, bias) in zip((layers[0], layers[2]), placed, strict=True):
            layer.weight = nn.Parameter(distributed(layer.weight, weight))
            layer.bias = nn.Parameter(distributed(layer.bias, bias))
    return layers


FULLY_SHARDED = ((S0, S0), (S0, S0))
TENSOR_PARALLEL = ((S0, S0), (S1, R))
MIXED = (((S0, S1), (S0, R)), ((R, S0), (R, R)))
ON_TWO_MESHES = ["sgd foreach", "sgd fused", "adam foreach", "adamw fused", "rmsprop"]


@pytest.mark.share(12)
@pytest.mark.parametrize("placed", [FULLY_SHARDED, TENSOR_PARALLEL, MIXED], ids=["sharded", "rows and columns", "grid"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name, placed):
    ours, plain = model_of(placed), model_of(None)
    batches = torch.randn(4, 8, 6)
    optimizers = [OPTIMIZERS[name](model.parameters()) for model in (ours, plain)]
    where = (S0, R) if placed is MIXED else S0
    for batch in batches:
        for model, optimizer, values in (
            (ours, optimizers[0], distributed(batch, where)),
            (plain, optimizers[1], batch),
        ):
            optimizer.zero_grad()
            (model(values) ** 2).mean().backward()
            optimizer.step()
    for one, other in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.detach().full_tensor(), other.detach(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ON_TWO_MESHES)
def test_optimizers_of_parameters_on_two_meshes(name):
    plain = [torch.ones(6, 4), torch.full((4,), 2.0)]
    ours = [distributed(plain[0], S0), distributed(plain[1], (R, S0))]
    for parameters in (plain, ours):
        for parameter in parameters:
            parameter.requires_grad_()
        optimizer = OPTIMIZERS[name](parameters)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        for _ in range(3):
            optimizer.zero_grad()
            for parameter in parameters:
                scaler.scale((parameter**2).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
    same([one.detach() for one in ours], [one.detach() for one in plain])


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("order", [2.0, float("inf")])
def test_clipping_of_gradients(foreach, order):
    ours, plain = model_of(MIXED), model_of(None)
    batch = torch.randn(8, 6)
    (ours(distributed(batch, (S0, R))) ** 2).sum().backward()
    (plain(batch) ** 2).sum().backward()
    norm = nn.utils.clip_grad_norm_(ours.parameters(), 0.5, norm_type=order, foreach=foreach)
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.5, norm_type=order)
    torch.testing.assert_close(norm.full_tensor(), expected, rtol=1e-4, atol=1e-5)
    for one, other in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad.full_tensor(), other.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("place", [None, (0, 0), (7, 5)], ids=str)
def test_scaling_of_gradients(place, fused):
    """One value that is not finite, wherever it lies, and no device takes the step."""
    ours, plain = model_of(FULLY_SHARDED), model_of(None)
    before = copy.deepcopy(plain.state_dict())
    results = []
    for model in (ours, plain):
        optimizer = torch.optim.AdamW(model.parameters(), 0.1, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        batch = torch.ones(8, 6)
        scaler.scale((model(distributed(batch, S0) if model is ours else batch) ** 2).mean()).backward()
        if place is not None:
            bad = torch.zeros(8, 6)
            bad[place] = torch.inf
            gradient = model[0].weight.grad
            gradient += distributed(bad, S0) if model is ours else bad
        scaler.step(optimizer)
        scaler.update()
        results.append(scaler.get_scale())
    assert results[0] == results[1] == (64.0 if place is None else 32.0)
    for one, (name, other) in zip(ours.parameters(), plain.named_parameters(), strict=True):
        torch.testing.assert_close(one.detach().full_tensor(), other.detach(), rtol=1e-4, atol=1e-5)
        assert torch.equal(other, before[name]) == (place is not None)


def test_steps_make_no_new_plans():
    model = model_of(FULLY_SHARDED)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1, foreach=True)
    batch = distributed(torch.randn(8, 6), S0)
    sizes = []
    for step in range(6):
        optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)
        optimizer.zero_grad()
        (model(batch) ** 2).mean().backward()
        optimizer.step()
        sizes.append(len(dispatch._PLANS))
    assert sizes[2:] == sizes[2:3] * 4
