"""DTensors and modules made on a mesh: values, memory, agreement between clients, and refusals."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from redistribution import redistribution_cases
from support.states import cluster_mesh
from torch import nn

from dtckpt import DTensor, Layout, Partial, Replicate, Shard, abstract_mesh, run_on
from dtckpt.dtensor import (
    distribute_module,
    distribute_tensor,
    empty,
    factories,
    full,
    ones,
    rand,
    randn,
    zeros,
)
from dtckpt.errors import LayoutError, LayoutTypeError

from .factory_cases import (
    FILLED,
    RANDOM,
    REFUSED,
    WHOLE,
    Inner,
    create_over_clients,
    distribute_modules_over_clients,
    distribute_wrongly,
    from_local_wrongly,
    outside,
    random_placements,
    refuse,
    source_values,
    without_communication,
)


@pytest.fixture
def mesh():
    return abstract_mesh({"x": 2, "y": 3})


# --- factories -----------------------------------------------------------------------------------------------------


@given(st.integers(0, 2**32))
def test_filled_tensors_have_their_value_in_any_layout(seed):
    rng = random.Random(seed)
    mesh = abstract_mesh(redistribution_cases.random_axes(rng))
    shape = tuple(rng.randint(0, 7) for _ in range(rng.randint(0, 3)))
    placements = random_placements(rng, mesh, len(shape))
    for make, value in FILLED:
        tensor = make(*shape, dtype=torch.float64, device_mesh=mesh, placements=placements)
        assert tensor.layout == Layout.from_placements(mesh, placements, len(shape))
        assert tuple(tensor.shape) == shape
        torch.testing.assert_close(tensor.full_tensor(), torch.full(shape, value, dtype=torch.float64))


@pytest.mark.parametrize("make", [*(make for make, _ in FILLED), empty, *RANDOM])
def test_no_client_makes_more_than_its_shards(make, monkeypatch):
    monkeypatch.setattr(factories, "agreed_key", lambda _: 7)  # the other clients are not there
    sizes = {"data": 64, "model": 32}
    mesh = cluster_mesh(sizes, math.prod(sizes.values()), 5)
    tensor = make(1 << 20, 1 << 12, device_mesh=mesh, placements=[Shard(0), Shard(1)])  # 16 GiB in all
    (component,) = tensor.components
    assert tuple(tensor.shape) == (1 << 20, 1 << 12)
    assert component.shape == (1 << 14, 1 << 7)
    assert component.untyped_storage().nbytes() == component.numel() * 4


@pytest.mark.parametrize("make", [zeros, ones, empty, rand, randn])
def test_sizes_in_every_spelling(mesh, make):
    for size in ((4, 6), (np.int64(4), np.int32(6)), ((4, 6),), ([4, 6],), (torch.Size([4, 6]),)):
        assert make(*size, device_mesh=mesh).shape == (4, 6)
    assert make((), device_mesh=mesh).shape == ()
    assert make(device_mesh=mesh).shape == ()


def test_options(mesh):
    tensor = ones(4, dtype=torch.int32, device_mesh=mesh, placements=[Shard(-1), Replicate()])
    assert (tensor.dtype, tensor.placements) == (torch.int32, (Shard(0), Replicate()))
    assert full((4,), 7, device_mesh=mesh).dtype == torch.int64
    assert full((4,), True, device_mesh=mesh).dtype == torch.bool
    assert full((4,), 1j, device_mesh=mesh).dtype == torch.complex64
    assert full((4,), 7, dtype=torch.float16, device_mesh=mesh).dtype == torch.float16
    leaf = zeros(4, requires_grad=True, device_mesh=mesh, placements=[Partial(), Shard(0)])
    assert leaf.requires_grad
    assert leaf.is_leaf
    assert not zeros(4, device_mesh=mesh).requires_grad


def test_default_dtype(mesh):
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        assert {make(2, device_mesh=mesh).components[0].dtype for make in (zeros, ones, empty, rand, randn)} == {
            torch.float64
        }
        assert full((2,), 1.0, device_mesh=mesh).dtype == torch.float64
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("make", RANDOM)
def test_copies_agree_and_shards_differ(mesh, make):
    tensor = make(6, 50, device_mesh=mesh, placements=[Replicate(), Shard(0)])
    parts = dict(zip(mesh.device_ids, tensor.components, strict=True))
    for device in range(3):
        assert torch.equal(parts[device], parts[device + 3])
    assert len({tuple(part.flatten().tolist()) for part in parts.values()}) == 3


@pytest.mark.parametrize("make", RANDOM)
def test_a_seed_gives_one_tensor(mesh, make):
    def draw(seed):
        torch.manual_seed(seed)
        options = {"device_mesh": mesh, "placements": [Shard(0), Shard(1)]}
        return make(6, 50, **options).full_tensor(), make(6, 50, **options).full_tensor()

    first, second = draw(1)
    assert not torch.equal(first, second)
    again = draw(1)
    assert torch.equal(first, again[0])
    assert torch.equal(second, again[1])
    assert not torch.equal(first, draw(2)[0])


@pytest.mark.parametrize("make", RANDOM)
def test_random_terms_reduce_to_one_tensor(mesh, make):
    def draw(placements):
        torch.manual_seed(3)
        return make(6, 7, device_mesh=mesh, placements=placements).full_tensor()

    torch.testing.assert_close(draw([Partial(), Shard(0)]), draw([Replicate(), Shard(0)]))
    torch.testing.assert_close(draw([Partial("avg"), Partial("avg")]), draw([Replicate(), Replicate()]))


def test_distributions(mesh):
    options = {"device_mesh": mesh, "placements": [Shard(0), Shard(1)]}
    uniform, normal = rand(300, 300, **options).full_tensor(), randn(300, 300, **options).full_tensor()
    assert uniform.min() >= 0
    assert uniform.max() < 1
    assert abs(uniform.mean() - 0.5) < 0.01
    assert abs(normal.mean()) < 0.02
    assert abs(normal.std() - 1) < 0.02


def test_the_mesh_of_the_block(mesh):
    with run_on(mesh):
        assert zeros(6, placements=[Shard(0), Replicate()]).device_mesh is mesh
        assert full((6,), 1).placements == (Replicate(), Replicate())
        assert distribute_tensor(WHOLE, placements=[Shard(0), Shard(1)]).device_mesh is mesh
        assert distribute_module(nn.Linear(2, 2)).weight.device_mesh is mesh
        assert zeros(6, device_mesh=abstract_mesh({"z": 1})).device_mesh != mesh
    one = abstract_mesh({"z": 1})
    with run_on(one):
        assert DTensor.from_local(WHOLE).device_mesh is one


def test_tensors_are_on_the_very_mesh_that_was_given():
    for name in ("one", "other"):
        mesh = abstract_mesh({"x": 2, "y": 3})
        mesh.flatten(name=name)
        tensor = zeros(6, device_mesh=mesh, placements=[Shard(0), Replicate()], requires_grad=True)
        moved = tensor.redistribute(mesh, [Replicate(), Shard(0)])
        moved.full_tensor().sum().backward()
        for each in (tensor, moved, distribute_tensor(WHOLE, mesh, [Shard(0), Shard(1)]), tensor.grad):
            assert each.device_mesh[name].size() == 6


@pytest.mark.parametrize(("kind", "text", "call"), REFUSED)
def test_what_is_refused(mesh, kind, text, call):
    with pytest.raises(kind, match=text):
        call(mesh)


# --- distribute_tensor ---------------------------------------------------------------------------------------------


@given(st.integers(0, 2**32))
def test_distributed_tensors_keep_their_values(seed):
    rng = random.Random(seed)
    mesh = abstract_mesh(redistribution_cases.random_axes(rng))
    shape = tuple(rng.randint(0, 7) for _ in range(rng.randint(0, 3)))
    whole = torch.as_tensor(np.random.default_rng(seed).integers(-6, 7, shape), dtype=torch.float64)
    placements = random_placements(rng, mesh, len(shape))
    for source in (0, min(mesh.shape) - 1, None):
        tensor = distribute_tensor(whole, mesh, placements, src_data_rank=source)
        assert tensor.layout == Layout.from_placements(mesh, placements, len(shape))
        torch.testing.assert_close(tensor.full_tensor(), whole)


@pytest.mark.parametrize("sizes", [{"x": 2, "y": 3}, {"x": 1, "y": 1}])
def test_the_source_is_left_alone(sizes):
    whole = WHOLE.clone()
    for placements in ([Replicate(), Replicate()], [Shard(0), Replicate()], [Replicate(), Partial()]):
        for source in (0, None):
            tensor = distribute_tensor(whole, abstract_mesh(sizes), placements, src_data_rank=source)
            for component in tensor.components:
                component.zero_()
    assert torch.equal(whole, WHOLE)


def test_copies_share_no_memory(mesh):
    one = distribute_tensor(WHOLE, abstract_mesh({"x": 1}), [Shard(0)])
    for tensor in (
        one.redistribute(mesh, [Replicate(), Replicate()]),
        distribute_tensor(WHOLE, mesh, [Replicate(), Replicate()]),
        distribute_tensor(WHOLE, mesh, [Replicate(), Replicate()], src_data_rank=None),
        zeros(6, 7, device_mesh=mesh),
        distribute_module(nn.Linear(7, 6), mesh).weight,
    ):
        assert len({component.data_ptr() for component in tensor.components}) == mesh.size()
        assert torch.equal(tensor.components[0], tensor.components[-1])


def test_views_and_other_strides(mesh):
    for whole in (WHOLE.T, WHOLE[::2, 1:], WHOLE[:1].expand(5, 7)):
        for on in (mesh, abstract_mesh({"x": 1, "y": 1})):
            tensor = distribute_tensor(whole, on, [Shard(1), Shard(0)])
            assert torch.equal(tensor.full_tensor(), whole)
            assert all(component.is_contiguous() for component in tensor.components)
            assert tensor.stride() == (whole.shape[1], 1)


def test_what_comes_back_is_a_leaf(mesh):
    parameter = nn.Parameter(WHOLE.clone())
    tensor = distribute_tensor(parameter, mesh, [Shard(0), Shard(1)])
    assert tensor.requires_grad
    assert tensor.is_leaf
    (tensor.full_tensor() ** 2).sum().backward()
    assert parameter.grad is None
    assert torch.equal(tensor.grad.full_tensor(), 2 * WHOLE)
    assert distribute_tensor(tensor, mesh, [Shard(-2), Shard(-1)]) is tensor


# --- distribute_module ---------------------------------------------------------------------------------------------


def test_the_function_comes_first_and_the_rest_is_replicated(mesh):
    model = nn.Sequential(Inner(), nn.Sequential(Inner()))
    calls = []

    def partition(name, module, on):
        calls.append((name, module, on))
        if name == "1.0":
            assert type(module.weight) is nn.Parameter
            placed = distribute_tensor(module.weight, on, [Shard(0), Replicate()])
            module.register_parameter("weight", nn.Parameter(placed))
        if name == "1":
            assert isinstance(model[0].weight, DTensor)  # one module after the other

    assert distribute_module(model, mesh, partition) is model
    assert [(name, on) for name, _, on in calls] == [(name, mesh) for name in ("", "0", "1", "1.0")]
    assert [module for _, module, _ in calls] == [model, model[0], model[1], model[1][0]]
    copied = (Replicate(), Replicate())
    assert {name: each.placements for name, each in model.named_parameters()} == {
        "0.weight": copied,
        "0.fixed": copied,
        "1.0.weight": (Shard(0), Replicate()),
        "1.0.fixed": copied,
    }
    assert all(isinstance(each, DTensor) for each in model.buffers())
    assert all(isinstance(each, nn.Parameter) and each.is_leaf for each in model.parameters())
    assert [each.requires_grad for each in model.parameters()] == [True, False] * 2
    assert model[0].absent is None
    assert "0.passing" not in model.state_dict()
    assert torch.equal(model.state_dict()["1.0.weight"].full_tensor(), WHOLE)
    assert torch.equal(model[0].count.full_tensor(), torch.tensor(3))


def test_hooks_see_inputs_and_outputs_of_the_root(mesh):
    seen = []

    def take(module, inputs, on):
        seen.append((module, inputs, on))
        return tuple(each * 2 for each in inputs)

    def give(module, outputs, on):
        seen.append((module, outputs, on))
        return {"out": outputs}

    model = distribute_module(Inner(), mesh, input_fn=take, output_fn=give)
    assert model(1, 10) == {"out": 22}
    assert seen == [(model, (1, 10), mesh), (model, 22, mesh)]


def test_hooks_that_return_nothing_change_nothing(mesh):
    model = distribute_module(Inner(), mesh, None, lambda *_: None, lambda *_: None)
    assert model(1, 10) == 11


def test_a_module_is_distributed_once(mesh):
    model = distribute_module(Inner(), mesh)
    with pytest.raises(LayoutError, match="already"):
        distribute_module(model, mesh)
    assert distribute_module(nn.Sequential(Inner()), mesh)[0].weight.placements == (Replicate(), Replicate())


def test_a_part_may_be_distributed_before_the_whole(mesh):
    part = distribute_module(Inner(), mesh)
    before = part.weight
    distribute_module(nn.Sequential(part), mesh)
    assert part.weight is before


class Tied(nn.Module):
    """One parameter and one buffer, each under two names."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(7, 6, bias=False), nn.Linear(7, 6, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("scale", torch.ones(3))
        self.second.register_buffer("scale", self.scale)


def shard(*names, dim=0):
    """Return a partition function that shards the weights of some submodules."""

    def partition(name, module, on):
        if name in names:
            module.weight = nn.Parameter(distribute_tensor(module.weight, on, [Shard(dim), Replicate()]))

    return partition


@pytest.mark.parametrize(
    ("partition", "placements"),
    [
        (None, (Replicate(), Replicate())),
        (shard("first"), (Shard(0), Replicate())),
        (shard("first", "second"), (Shard(0), Replicate())),
        (lambda name, module, on: name or shard("")("", module.second, on), (Shard(0), Replicate())),
    ],
)
def test_tied_parameters_stay_tied(mesh, partition, placements):
    model = Tied()
    whole = model.first.weight.detach().clone()
    distribute_module(model, mesh, partition)
    assert model.first.weight is model.second.weight
    assert model.scale is model.second.scale
    assert len(list(model.parameters())) == 1
    assert model.first.weight.placements == placements
    assert isinstance(model.first.weight, nn.Parameter)
    assert torch.equal(model.second.weight.full_tensor(), whole)


def test_tied_parameters_have_one_layout(mesh):
    def partition(name, module, on):
        shard("first")(name, module, on)
        shard("second", dim=1)(name, module, on)

    with pytest.raises(LayoutError, match=r"got layouts .*x,unsharded.*unsharded,x.* registered as weight, weight"):
        distribute_module(Tied(), mesh, partition)


def test_conversions_of_a_module_reach_its_components(mesh):
    model = distribute_module(Inner(), mesh)
    before = model.weight
    model.to(torch.float64)
    assert model.weight is before
    for each in (model.weight, model.fixed, model.passing):
        assert each.dtype == torch.float64
        assert {component.dtype for component in each.components} == {torch.float64}
    assert torch.equal(model.weight.full_tensor(), WHOLE.double())
    (model.weight.full_tensor() ** 2).sum().backward()
    assert torch.equal(model.weight.grad.full_tensor(), 2 * WHOLE.double())


def test_data_that_is_set_brings_its_layout(mesh):
    tensor = zeros(6, 7, requires_grad=True, device_mesh=mesh)
    other = distribute_tensor(WHOLE[:5], mesh, [Shard(0), Replicate()])
    tensor.data = other
    assert tensor.layout == other.layout
    assert tensor.shape == (5, 7)
    assert tensor.is_leaf
    assert tensor.requires_grad
    assert torch.equal(tensor.full_tensor(), WHOLE[:5])
    assert torch.equal(tensor.data.full_tensor(), WHOLE[:5])
    with pytest.raises(LayoutTypeError, match="got Tensor"):
        tensor.data = WHOLE


# --- over clients --------------------------------------------------------------------------------------------------

processes = pytest.mark.processes


@processes
@pytest.mark.parametrize("clients", [2, 3, 4])
def test_the_values_of_the_source_count(pool, clients):
    assert pool.values(source_values, clients=clients, group=True) == [[]] * clients


@processes
def test_without_a_source_nothing_is_sent(pool):
    assert pool.values(without_communication, clients=3, group=True) == [[]] * 3
    assert pool.values(without_communication, clients=3) == [[]] * 3


@processes
@pytest.mark.parametrize("clients", [2, 3])
def test_filled_and_random_tensors_over_clients(pool, clients):
    seen = pool.values(create_over_clients, clients=clients, group=True)
    assert [found for found, *_ in seen] == [[]] * clients
    assert len({whole for _, whole, _ in seen}) == 1
    assert len({part for _, _, part in seen}) == clients


@processes
def test_modules_over_clients(pool):
    assert pool.values(distribute_modules_over_clients, clients=3, group=True) == [[]] * 3


def alike(answers):
    """Return what all clients raise, which must be one thing, and soon."""
    assert len({(answer.error, answer.text) for answer in answers}) == 1, answers
    assert max(answer.seconds for answer in answers) < 10
    return answers[0].error, answers[0].text


DIFFERENT = "clients differ in shape, dtype, placements or src_data_rank"


@processes
@pytest.mark.parametrize(
    ("wrong", "guilty", "kind", "text"),
    [
        ("shape", [1], "ComponentError", DIFFERENT),
        ("rank", [0], "ComponentError", DIFFERENT),
        ("dtype", [1, 2], "ComponentError", "torch.float64"),
        ("placements", [1], "ComponentError", "Shard(dim=1)"),
        ("source", [2], "ComponentError", DIFFERENT),
        ("no tensor", [1, 2], "LayoutTypeError", "needs a tensor; got NoneType"),
        ("no leaf", [1], "LayoutError", "expected a leaf"),
        ("dim", [1], "LayoutError", "expected a dim below 2"),
        ("count", [2], "LayoutError", "got 2 for axes"),
        ("count", [0, 1, 2], "LayoutError", "got 2 for axes"),
        ("source beyond", [1], "MeshError", "src_data_rank is 3"),
    ],
)
def test_all_clients_learn_what_is_wrong_with_one(pool, wrong, guilty, kind, text):
    error, message = alike(pool.run(distribute_wrongly, wrong, guilty, clients=3, group=True))
    assert error == kind
    assert text in message


@processes
@pytest.mark.parametrize(
    ("wrong", "guilty", "kind", "text"),
    [
        ("placements", [1], "ComponentError", "clients give different placements; got S(0), S(1)"),
        ("partial", [0], "ComponentError", "got P(sum), S(0)"),
        ("no tensor", [1, 2], "LayoutTypeError", "needs a tensor; got NoneType"),
        ("dtensor", [2], "ComponentError", "must be a plain tensor; got DTensor"),
        ("rank", [0], "ComponentError", "clients give different placements; got S(0), S(1)"),
        ("dim", [1], "LayoutError", "expected a dim below 2"),
        ("count", [2], "LayoutError", "got 2 for axes"),
        ("count", [0, 1, 2], "LayoutError", "got 2 for axes"),
        ("gradient", [1], "LayoutError", "got 0 for axes"),
        ("dtype", [1], "ComponentError", "must have one dtype; got float32, float64"),
        ("shape", [1], "ComponentError", "does not fit global shape (16, 7)"),
    ],
)
def test_all_clients_learn_what_is_wrong_with_one_local_tensor(pool, wrong, guilty, kind, text):
    error, message = alike(pool.run(from_local_wrongly, wrong, guilty, clients=3, group=True))
    assert error == kind
    assert text in message


@processes
@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_clients_refuse_alike(pool, number):
    error, text = alike(pool.run(refuse, number, clients=2, group=True))
    assert error == REFUSED[number][0].__name__, text


@processes
def test_clients_outside_the_mesh(pool):
    seen = pool.values(outside, clients=3, group=True)
    assert seen == [((6, 7), (3, 7)), ((6, 7), (0,)), ((6, 7), (3, 7))]
