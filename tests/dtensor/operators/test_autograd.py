"""Gradients of DTensors: where they lie, what reading them communicates, and what works beside them."""

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, jvp, vjp, vmap
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import checkpoint

from dtckpt import DTensor, Partial, Replicate, Shard, abstract_mesh
from dtckpt.dtensor import distribute_module, distribute_tensor
from dtckpt.errors import LayoutError, LayoutTypeError

from . import operator_cases
from .operator_cases import numbers

LINE = abstract_mesh({"x": 4})
GRID = abstract_mesh({"x": 2, "y": 2})
BATCH, IN, OUT = 1030, 7, 5


def accumulated(tensor: torch.Tensor) -> DTensor:
    """Return the gradient as backward passes have left it."""
    found = torch.Tensor.grad.__get__(tensor)
    assert isinstance(found, DTensor)
    return found


def plain_gradient(times: int = 1) -> torch.Tensor:
    weight = numbers(IN, OUT).requires_grad_()
    (times * (numbers(BATCH, IN) @ weight).pow(2).sum()).backward()
    assert weight.grad is not None
    return weight.grad


PARAMETERS = [
    (LINE, [Replicate()], [Shard(0)]),
    (LINE, [Shard(0)], [Shard(0)]),
    (LINE, [Shard(1)], [Shard(0)]),
    (LINE, [Partial()], [Shard(0)]),
    (LINE, [Partial("avg")], [Replicate()]),
    (GRID, [Replicate(), Shard(1)], [Shard(0), Replicate()]),
    (GRID, [Shard(0), Shard(0)], [Shard(0), Shard(0)]),
    (GRID, [Partial(), Shard(0)], [Shard(0), Shard(1)]),
]


@pytest.mark.parametrize(("mesh", "placements", "batch"), PARAMETERS)
def test_gradients_lie_as_their_parameter_does_when_they_are_read(mesh, placements, batch):
    weight = nn.Parameter(distribute_tensor(numbers(IN, OUT), mesh, placements))
    samples = distribute_tensor(numbers(BATCH, IN), mesh, batch)
    for _ in range(3):
        (samples @ weight).pow(2).sum().backward()
    assert weight.grad.placements == tuple(Replicate() if one.is_partial() else one for one in placements)
    assert accumulated(weight) is weight.grad
    torch.testing.assert_close(weight.grad.full_tensor(), plain_gradient(3))


@pytest.mark.parametrize(("mesh", "placements", "batch"), PARAMETERS)
def test_what_was_read_is_added_to(mesh, placements, batch):
    weight = nn.Parameter(distribute_tensor(numbers(IN, OUT), mesh, placements))
    samples = distribute_tensor(numbers(BATCH, IN), mesh, batch)
    for times in (1, 2, 3):
        (samples @ weight).pow(2).sum().backward()
        torch.testing.assert_close(weight.grad.full_tensor(), plain_gradient(times))


@pytest.mark.processes
def test_weights_on_data_parallel_clients_reduce_once(pool):
    for counts, pending, norms, values in pool.values(operator_cases.data_parallel_steps, clients=2, group=True):
        assert pending == [(Partial("sum"),)] * 4
        assert counts == [0, 4, 0]
        assert norms[0] == pytest.approx(norms[1], rel=1e-5)
        for ours, plain, placements, of_gradient in values:
            assert placements == of_gradient == (Replicate(),)
            torch.testing.assert_close(ours, plain)


@pytest.mark.parametrize(("mesh", "placements", "batch"), PARAMETERS[:3] + PARAMETERS[5:7])
def test_optimizers_see_gradients_in_the_layout_of_the_parameter(mesh, placements, batch):
    weight = nn.Parameter(distribute_tensor(numbers(IN, OUT), mesh, placements))
    plain = nn.Parameter(numbers(IN, OUT))
    for parameter, samples in (
        (weight, distribute_tensor(numbers(BATCH, IN), mesh, batch)),
        (plain, numbers(BATCH, IN)),
    ):
        optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
        for _ in range(2):
            optimizer.zero_grad()
            (samples @ parameter).pow(2).sum().backward()
            clip_grad_norm_([parameter], 0.5)
            optimizer.step()
    assert weight.placements == weight.grad.placements == tuple(placements)
    torch.testing.assert_close(weight.full_tensor(), plain.detach())


def test_a_copy_of_what_waits_for_a_reduction_waits_too():
    waiting = distribute_tensor(numbers(64, 64), LINE, [Partial()])
    assert waiting.detach().placements == (Partial(),)
    assert waiting.detach().components[0].data_ptr() == waiting.components[0].data_ptr()


REFUSED = [
    (LayoutTypeError, "the gradient of a DTensor is a DTensor; got Tensor", lambda: numbers(IN, OUT)),
    (LayoutError, "on the mesh of the tensor", lambda: distribute_tensor(numbers(IN, OUT), GRID)),
    (RuntimeError, "size", lambda: distribute_tensor(numbers(IN, OUT + 1), LINE)),
    (RuntimeError, "dtype", lambda: distribute_tensor(numbers(IN, OUT).float(), LINE)),
]


@pytest.mark.parametrize(("error", "words", "make"), REFUSED)
def test_no_other_tensor_becomes_a_gradient(error, words, make):
    weight = nn.Parameter(distribute_tensor(numbers(IN, OUT), LINE))
    with pytest.raises(error, match=words):
        weight.grad = make()
    assert weight.grad is None


def test_a_gradient_may_be_set_and_taken_away():
    weight = nn.Parameter(distribute_tensor(numbers(IN, OUT), LINE))
    weight.grad = distribute_tensor(numbers(IN, OUT), LINE, [Shard(1)])
    assert weight.grad.placements == (Replicate(),)
    torch.testing.assert_close(weight.grad.full_tensor(), numbers(IN, OUT))
    weight.grad = None
    assert weight.grad is None
    weight.grad = distribute_tensor(numbers(IN, OUT), LINE)
    del weight.grad
    assert weight.grad is None


@pytest.mark.parametrize("given", [Replicate(), Shard(0), Partial()], ids=str)
@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(1), Partial()], ids=str)
def test_an_assigned_gradient_keeps_its_values_in_common_with_other_tensors(placement, given):
    """As where gradients are views of one long bucket, whatever the layouts."""
    weight = nn.Parameter(distribute_tensor(numbers(4, 2), LINE).redistribute(LINE, [placement]).detach())
    bucket = distribute_tensor(torch.zeros(8, dtype=torch.float64), LINE).redistribute(LINE, [given]).detach()
    weight.grad = bucket.view(4, 2)
    bucket.add_(1)
    assert (weight.grad.full_tensor() == 1).all()
    (weight * 2).sum().backward()
    assert (bucket.full_tensor() == 3).all()
    weight.grad[0].mul_(2)
    assert bucket.full_tensor().tolist() == [6, 6, 3, 3, 3, 3, 3, 3]
    nn.utils.clip_grad_value_([weight], 4)
    assert bucket.full_tensor().tolist() == [4, 4, 3, 3, 3, 3, 3, 3]
    torch.optim.SGD([weight], lr=1).zero_grad(set_to_none=False)
    assert not bucket.full_tensor().any()


@pytest.mark.parametrize(("mesh", "placements", "batch"), PARAMETERS)
def test_gradients_that_torch_makes_as_plain_zeros_lie_as_their_parameter_too(mesh, placements, batch):
    weight = nn.Parameter(distribute_tensor(numbers(IN, OUT), mesh, placements))
    samples = distribute_tensor(numbers(BATCH, IN), mesh, batch)
    weight.sgn().sum().backward()
    assert weight.grad.placements == tuple(Replicate() if one.is_partial() else one for one in placements)
    assert not weight.grad.full_tensor().any()
    (samples @ weight).pow(2).sum().backward()
    weight.copysign(weight.detach()).sgn().sum().backward()
    torch.testing.assert_close(weight.grad.full_tensor(), plain_gradient())
    torch.optim.SGD([weight], lr=0.1).step()


# --- the rest of autograd, beside plain tensors -------------------------------------------------------------------


def loss_of(weight, samples):
    return (samples @ weight).tanh().pow(3).sum()


def second_order(weight, samples):
    (first,) = torch.autograd.grad(loss_of(weight, samples), weight, create_graph=True)
    (second,) = torch.autograd.grad(first.pow(2).sum(), weight)
    return first.detach(), second


def read_with_a_graph(weight, samples):
    loss_of(weight, samples).backward(create_graph=True)
    first = weight.grad
    weight.grad = None
    first.pow(2).sum().backward()
    return first.detach(), weight.grad


def hooks(weight, samples):
    seen = []
    weight.register_hook(lambda gradient: gradient * 2)
    weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad.clone()))
    output = samples @ weight
    output.register_hook(lambda gradient: gradient + 1)
    output.retain_grad()
    output.sum().backward()
    return weight.grad, output.grad, *seen


def saved_tensor_hooks(weight, samples):
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved * 1, lambda saved: saved):
        loss_of(weight, samples).backward()
    with torch.autograd.graph.save_on_cpu():
        loss_of(weight, samples).backward()
    return (weight.grad,)


def checkpointed(weight, samples, *, use_reentrant):
    checkpoint(loss_of, weight, samples, use_reentrant=use_reentrant).backward()
    return (weight.grad,)


def anomalies(weight, samples):
    with torch.autograd.detect_anomaly(check_nan=True):
        loss_of(weight, samples).backward()
    return (weight.grad,)


def given_gradient(weight, samples):
    output = samples @ weight
    output.backward(gradient=output.detach().sin())
    loss_of(weight, samples).backward(torch.tensor(2.0, dtype=torch.float64), inputs=[weight])
    return (weight.grad,)


def without_gradients(weight, samples):
    with torch.no_grad():
        silent = samples @ weight
    with torch.inference_mode():
        inferred = samples @ weight
        inferred = inferred.clone()
    assert not silent.requires_grad
    assert inferred.is_inference()
    return silent, inferred.clone()


CASES = [
    second_order,
    read_with_a_graph,
    hooks,
    saved_tensor_hooks,
    lambda weight, samples: checkpointed(weight, samples, use_reentrant=True),
    lambda weight, samples: checkpointed(weight, samples, use_reentrant=False),
    given_gradient,
    without_gradients,
    lambda weight, samples: (grad(loss_of)(weight.detach(), samples),),
    lambda weight, samples: vjp(loss_of, weight.detach(), samples)[1](torch.ones((), dtype=torch.float64)),
    lambda weight, samples: jvp(loss_of, (weight.detach(), samples), (weight.detach(), samples.detach())),
    lambda weight, samples: (vmap(lambda row: (row * 2).sum())(samples),),
    lambda weight, samples: (vmap(torch.dot, (1, 1))(weight.detach(), weight.detach().sin()),),
    lambda weight, samples: (vmap(grad(loss_of), (None, 0))(weight.detach(), samples),),
    lambda weight, samples: (torch.func.hessian(loss_of)(weight.detach(), samples[:3]),),
]
ARRANGED = [
    (LINE, [Replicate()], [Shard(0)]),
    (LINE, [Shard(0)], [Shard(1)]),
    (LINE, [Partial()], [Replicate()]),
    (GRID, [Replicate(), Shard(1)], [Shard(0), Replicate()]),
]


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated", "ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("mesh", "placements", "batch"), ARRANGED)
def test_everything_is_as_with_plain_tensors(case, mesh, placements, batch):
    weight = distribute_tensor(numbers(IN, OUT), mesh, placements).requires_grad_()
    samples = distribute_tensor(numbers(10, IN), mesh, batch)
    expected = case(numbers(IN, OUT).requires_grad_(), numbers(10, IN))
    for ours, theirs in zip(case(weight, samples), expected, strict=True):
        assert isinstance(ours, DTensor)
        torch.testing.assert_close(ours.full_tensor(), theirs)


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize(("mesh", "placements", "batch"), ARRANGED)
def test_what_is_computed_again_drops_the_same_elements(mesh, placements, batch, use_reentrant):
    samples = distribute_tensor(numbers(10, IN), mesh, batch)
    gradients = []
    for is_again in (False, True):
        torch.manual_seed(3)
        weight = distribute_tensor(numbers(IN, OUT), mesh, placements).requires_grad_()
        layer = [weight, samples]
        dropped = checkpoint(dropped_of, *layer, use_reentrant=use_reentrant) if is_again else dropped_of(*layer)
        torch.rand(3)  # what comes between is no matter
        dropped.pow(2).sum().backward()
        gradients.append((dropped.full_tensor().detach(), weight.grad.full_tensor()))
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)
    assert 0 < (gradients[0][0] == 0).sum() < gradients[0][0].numel()


def dropped_of(weight, samples):
    return nn.functional.dropout(samples @ weight, 0.5)


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_anomaly_detection():
    weight = distribute_tensor(numbers(IN, OUT), LINE, [Shard(0)]).requires_grad_()
    (ours,) = anomalies(weight, distribute_tensor(numbers(10, IN), LINE, [Shard(0)]))
    (theirs,) = anomalies(numbers(IN, OUT).requires_grad_(), numbers(10, IN))
    torch.testing.assert_close(ours.full_tensor(), theirs)
    broken = distribute_tensor(-numbers(4, 4).abs(), LINE, [Shard(0)]).requires_grad_()
    with pytest.raises(RuntimeError, match="returned nan"), torch.autograd.detect_anomaly(check_nan=True):
        broken.sqrt().sum().backward()


# --- modules ------------------------------------------------------------------------------------------------------


def module_on(mesh):
    torch.manual_seed(1)
    made = nn.Sequential(nn.Linear(IN, OUT), nn.LayerNorm(OUT), nn.Linear(OUT, 3))
    return copy.deepcopy(made), distribute_module(made, mesh, shard_rows)


def shard_rows(name, module, mesh):
    for key, parameter in module.named_parameters(recurse=False):
        placements = [Shard(0)] * mesh.ndim
        setattr(module, key, nn.Parameter(distribute_tensor(parameter.data, mesh, placements)))


def test_copies_of_modules_have_their_gradients():
    plain, ours = module_on(LINE)
    ours(numbers(10, IN).float()).sum().backward()
    plain(numbers(10, IN).float()).sum().backward()
    again = copy.deepcopy(ours)
    names = [name for name, _ in plain.named_parameters()]
    assert [name for name, _ in again.named_parameters()] == names
    for one, parameter in zip(again.parameters(), plain.parameters(), strict=True):
        assert isinstance(one, DTensor)
        assert isinstance(one, nn.Parameter)
        assert one.placements == one.grad.placements == (Shard(0),)
        torch.testing.assert_close(one.grad.full_tensor(), parameter.grad)
    for parameter in again.parameters():
        parameter.grad.zero_()
    assert all(parameter.grad.full_tensor().abs().sum() for parameter in ours.parameters())


@pytest.mark.parametrize("convert", [nn.Module.half, nn.Module.double, lambda module: module.to(torch.bfloat16)])
def test_converted_modules_keep_parameters_layouts_and_gradients(convert):
    plain, ours = module_on(GRID)
    for module in (plain, ours):
        module(numbers(10, IN).float()).sum().backward()
    before = [id(parameter) for parameter in ours.parameters()]
    convert(ours)
    convert(plain)
    assert [id(parameter) for parameter in ours.parameters()] == before
    for one, parameter in zip(ours.parameters(), plain.parameters(), strict=True):
        assert one.dtype == parameter.dtype == one.components[0].dtype
        assert one.placements == one.grad.placements == (Shard(0), Shard(0))
        torch.testing.assert_close(one.full_tensor(), parameter)
        torch.testing.assert_close(one.grad.full_tensor(), parameter.grad, rtol=1e-2, atol=1e-5)


def test_modules_may_be_called_with_other_parameters():
    plain, ours = module_on(LINE)
    samples = numbers(10, IN).float()

    def loss(parameters, module):
        return functional_call(module, parameters, (samples,)).pow(2).sum()

    theirs = grad(loss)({name: value.detach() for name, value in plain.named_parameters()}, plain)
    found = grad(loss)({name: value.detach() for name, value in ours.named_parameters()}, ours)
    for name, value in theirs.items():
        torch.testing.assert_close(found[name].full_tensor(), value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["copysign_", "nextafter_", "eq_", "ge_", "gt_", "le_", "lt_", "ne_"])
@pytest.mark.parametrize("make", [lambda x: x * 2, lambda x: x.view(2, 2), lambda x: x.mul(1)])
def test_zeros_that_pytorch_makes_of_a_shape_go_on_as_dtensors(name, make):
    def gradient(place, move):
        leaf = place(torch.ones(4)).requires_grad_()
        made = make(move(leaf.clone()))
        getattr(made, name)(torch.ones_like(made.detach()))
        return torch.autograd.grad(made.sum(), [leaf])[0]

    mesh = abstract_mesh({"x": 2})
    found = gradient(
        lambda tensor: distribute_tensor(tensor, mesh, [Shard(0)]),
        lambda tensor: tensor.redistribute(placements=[Replicate()]),
    )
    assert isinstance(found, DTensor)
    assert found.full_tensor().equal(gradient(lambda tensor: tensor, lambda tensor: tensor))
