"""DTensors and modules made on a mesh: values, memory, agreement between clients, and what is refused."""

from __future__ import annotations

import math
import random
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from states import cluster_mesh
from torch import nn

import dtckpt
from dtckpt import UNSHARDED, DTensor, Layout, Mesh, Partial, Replicate, Shard, abstract_mesh, run_on
from dtckpt.dtensor import (
    distribute_module,
    distribute_tensor,
    empty,
    full,
    init_device_mesh,
    ones,
    rand,
    randn,
    transport,
    zeros,
)
from dtckpt.errors import LayoutError, LayoutTypeError, MeshError, MeshTypeError

from . import moves

WHOLE = torch.arange(42.0).reshape(6, 7)
FILLED = [(zeros, 0.0), (ones, 1.0), (lambda *size, **options: full(size, 2.5, **options), 2.5)]
RANDOM = [rand, randn]


@pytest.fixture
def mesh():
    return abstract_mesh({"x": 2, "y": 3})


def random_placements(rng, mesh, rank):
    kinds = [Replicate(), *(Partial(op) for op in moves.REDUCE), *(Shard(dim) for dim in range(-rank, rank))]
    return [rng.choice(kinds) for _ in range(mesh.ndim)]


# --- factories -----------------------------------------------------------------------------------------------------


@given(st.integers(0, 2**32))
def test_filled_tensors_have_their_value_in_any_layout(seed):
    rng = random.Random(seed)
    mesh = abstract_mesh(moves.random_axes(rng))
    shape = tuple(rng.randint(0, 7) for _ in range(rng.randint(0, 3)))
    placements = random_placements(rng, mesh, len(shape))
    for make, value in FILLED:
        made = make(*shape, dtype=torch.float64, device_mesh=mesh, placements=placements)
        assert made.layout == Layout.from_placements(mesh, placements, len(shape))
        assert tuple(made.shape) == shape
        torch.testing.assert_close(made.full_tensor(), torch.full(shape, value, dtype=torch.float64))


@pytest.mark.parametrize("make", [*(make for make, _ in FILLED), empty, *RANDOM])
def test_no_client_makes_more_than_its_shards(make):
    sizes = {"data": 64, "model": 32}
    mesh = cluster_mesh(sizes, math.prod(sizes.values()), 5)
    made = make(1 << 20, 1 << 12, device_mesh=mesh, placements=[Shard(0), Shard(1)])  # 16 GiB in all
    (component,) = made.components
    assert tuple(made.shape) == (1 << 20, 1 << 12)
    assert component.shape == (1 << 14, 1 << 7)
    assert component.untyped_storage().nbytes() == component.numel() * 4


@pytest.mark.parametrize("make", [zeros, ones, empty, rand, randn])
def test_sizes_in_every_spelling(mesh, make):
    for size in ((4, 6), (np.int64(4), np.int32(6)), ((4, 6),), ([4, 6],), (torch.Size([4, 6]),)):
        assert make(*size, device_mesh=mesh).shape == (4, 6)
    assert make((), device_mesh=mesh).shape == ()
    assert make(device_mesh=mesh).shape == ()


def test_options(mesh):
    made = ones(4, dtype=torch.int32, device_mesh=mesh, placements=[Shard(-1), Replicate()])
    assert (made.dtype, made.placements) == (torch.int32, (Shard(0), Replicate()))
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
    made = make(6, 50, device_mesh=mesh, placements=[Replicate(), Shard(0)])
    parts = dict(zip(mesh.device_ids, made.components, strict=True))
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


REFUSED = [
    (
        LayoutError,
        "only dense tensors are made; got layout",
        lambda mesh: zeros(2, layout=torch.sparse_coo, device_mesh=mesh),
    ),
    (LayoutError, "got 1 for axes", lambda mesh: ones(2, device_mesh=mesh, placements=[Shard(0)])),
    (LayoutError, "got 3 for axes", lambda mesh: rand(2, device_mesh=mesh, placements=[Replicate()] * 3)),
    (LayoutError, "expected a dim below 1", lambda mesh: empty(2, device_mesh=mesh, placements=[Shard(1), Shard(0)])),
    (LayoutError, "expected a dim below 0", lambda mesh: zeros((), device_mesh=mesh, placements=[Shard(0)] * 2)),
    (LayoutTypeError, "expected a sequence", lambda mesh: zeros(2, device_mesh=mesh, placements=Shard(0))),
    (LayoutTypeError, "expected a Placement", lambda mesh: zeros(2, device_mesh=mesh, placements=[0, 1])),
    (LayoutTypeError, r"got \(-1,\)", lambda mesh: zeros(-1, device_mesh=mesh)),
    (LayoutTypeError, r"got \(2.5,\)", lambda mesh: randn(2.5, device_mesh=mesh)),
    (LayoutTypeError, "got", lambda mesh: ones("ab", device_mesh=mesh)),
    (LayoutTypeError, "got", lambda mesh: ones((2, 2), 3, device_mesh=mesh)),
    (LayoutTypeError, "got", lambda mesh: full(None, 3, device_mesh=mesh)),
    (MeshError, "no mesh was given and none is active", lambda mesh: zeros(2)),
    (MeshError, "no mesh was given and none is active", lambda mesh: distribute_tensor(WHOLE)),
    (MeshError, "no mesh was given and none is active", lambda mesh: distribute_module(nn.Linear(1, 1))),
    (MeshError, "no mesh was given and none is active", lambda mesh: DTensor.from_local(WHOLE)),
    (MeshTypeError, "got str, expected Mesh", lambda mesh: zeros(2, device_mesh="x")),
    (MeshTypeError, "got int, expected Mesh", lambda mesh: distribute_tensor(WHOLE, 0, [Shard(0)])),
    (MeshTypeError, "got list, expected Mesh", lambda mesh: distribute_module(nn.Linear(1, 1), [])),
    (MeshTypeError, "got str, expected Mesh", lambda mesh: zeros(2, device_mesh=mesh).redistribute("x", [Shard(0)])),
    (LayoutError, "got 1 for axes", lambda mesh: distribute_tensor(WHOLE, mesh, [Shard(0)])),
    (LayoutError, "expected a dim below 2", lambda mesh: distribute_tensor(WHOLE, mesh, [Shard(2)] * 2)),
    (LayoutTypeError, "needs a tensor; got list", lambda mesh: distribute_tensor([1.0], mesh)),
    (LayoutError, "expected a leaf", lambda mesh: distribute_tensor(WHOLE.clone().requires_grad_() * 2, mesh)),
    (LayoutError, "got layout torch.sparse_coo", lambda mesh: distribute_tensor(WHOLE.to_sparse(), mesh)),
    (LayoutError, "grid of devices", lambda mesh: distribute_tensor(WHOLE, Mesh.empty())),
    (LayoutError, "grid of devices", lambda mesh: zeros(2, device_mesh=Mesh.from_device("CPU:0"))),
    (LayoutError, "grid of devices", lambda mesh: DTensor.from_local(WHOLE, Mesh.from_device("CPU:0"))),
    (LayoutError, "got a meta tensor", lambda mesh: distribute_tensor(WHOLE.to("meta"), mesh)),
    (MeshError, "src_data_rank is 2", lambda mesh: distribute_tensor(WHOLE, mesh, src_data_rank=2)),
    (MeshError, "src_data_rank is -1", lambda mesh: distribute_tensor(WHOLE, mesh, src_data_rank=-1)),
    (MeshError, "src_data_rank is '0'", lambda mesh: distribute_tensor(WHOLE, mesh, src_data_rank="0")),
    (
        LayoutError,
        "distributed already",
        lambda mesh: distribute_tensor(zeros(2, device_mesh=mesh), mesh, [Shard(0)] * 2),
    ),
]


@pytest.mark.parametrize(("kind", "text", "call"), REFUSED)
def test_what_is_refused(mesh, kind, text, call):
    with pytest.raises(kind, match=text):
        call(mesh)


# --- distribute_tensor ---------------------------------------------------------------------------------------------


@given(st.integers(0, 2**32))
def test_distributed_tensors_keep_their_values(seed):
    rng = random.Random(seed)
    mesh = abstract_mesh(moves.random_axes(rng))
    shape = tuple(rng.randint(0, 7) for _ in range(rng.randint(0, 3)))
    whole = torch.as_tensor(np.random.default_rng(seed).integers(-6, 7, shape), dtype=torch.float64)
    placements = random_placements(rng, mesh, len(shape))
    for source in (0, min(mesh.shape) - 1, None):
        made = distribute_tensor(whole, mesh, placements, src_data_rank=source)
        assert made.layout == Layout.from_placements(mesh, placements, len(shape))
        torch.testing.assert_close(made.full_tensor(), whole)


@pytest.mark.parametrize("sizes", [{"x": 2, "y": 3}, {"x": 1, "y": 1}])
def test_the_source_is_left_alone(sizes):
    whole = WHOLE.clone()
    for placements in ([Replicate(), Replicate()], [Shard(0), Replicate()], [Replicate(), Partial()]):
        for source in (0, None):
            made = distribute_tensor(whole, abstract_mesh(sizes), placements, src_data_rank=source)
            for component in made.components:
                component.zero_()
    assert torch.equal(whole, WHOLE)


def test_copies_share_no_memory(mesh):
    one = distribute_tensor(WHOLE, abstract_mesh({"x": 1}), [Shard(0)])
    for made in (
        one.redistribute(mesh, [Replicate(), Replicate()]),
        distribute_tensor(WHOLE, mesh, [Replicate(), Replicate()]),
        distribute_tensor(WHOLE, mesh, [Replicate(), Replicate()], src_data_rank=None),
        zeros(6, 7, device_mesh=mesh),
        distribute_module(nn.Linear(7, 6), mesh).weight,
    ):
        assert len({component.data_ptr() for component in made.components}) == mesh.size()
        assert torch.equal(made.components[0], made.components[-1])


def test_views_and_other_strides(mesh):
    for whole in (WHOLE.T, WHOLE[::2, 1:], WHOLE[:1].expand(5, 7)):
        for on in (mesh, abstract_mesh({"x": 1, "y": 1})):
            made = distribute_tensor(whole, on, [Shard(1), Shard(0)])
            assert torch.equal(made.full_tensor(), whole)
            assert all(component.is_contiguous() for component in made.components)
            assert made.stride() == (whole.shape[1], 1)


def test_what_comes_back_is_a_leaf(mesh):
    parameter = nn.Parameter(WHOLE.clone())
    made = distribute_tensor(parameter, mesh, [Shard(0), Shard(1)])
    assert made.requires_grad
    assert made.is_leaf
    (made.full_tensor() ** 2).sum().backward()
    assert parameter.grad is None
    assert torch.equal(made.grad.full_tensor(), 2 * WHOLE)
    assert distribute_tensor(made, mesh, [Shard(-2), Shard(-1)]) is made


# --- distribute_module ---------------------------------------------------------------------------------------------


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(WHOLE.clone())
        self.fixed = nn.Parameter(WHOLE.clone(), requires_grad=False)
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("passing", torch.ones(2), persistent=False)
        self.register_parameter("absent", None)

    def forward(self, first, second):
        return first + second


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
    assert pool.values(values_of_the_source, clients=clients, group=True) == [[]] * clients


@processes
def test_without_a_source_nothing_is_sent(pool):
    assert pool.values(nothing_is_sent, clients=3, group=True) == [[]] * 3
    assert pool.values(nothing_is_sent, clients=3) == [[]] * 3


@processes
@pytest.mark.parametrize("clients", [2, 3])
def test_filled_and_random_tensors_over_clients(pool, clients):
    seen = pool.values(tensors_over_clients, clients=clients, group=True)
    assert [found for found, *_ in seen] == [[]] * clients
    assert len({whole for _, whole, _ in seen}) == 1
    assert len({part for _, _, part in seen}) == clients


@processes
def test_modules_over_clients(pool):
    assert pool.values(modules_over_clients, clients=3, group=True) == [[]] * 3


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
    error, message = alike(pool.run(give_wrongly, wrong, guilty, clients=3, group=True))
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


# --- in client processes -------------------------------------------------------------------------------------------


def line():
    return init_device_mesh("cpu", (dtckpt.num_clients(),))


def values_of_the_source():
    client, clients = dtckpt.client_id(), dtckpt.num_clients()
    found = []
    for sizes in ({"x": clients}, {"x": 2, "y": clients}):  # the second one has two devices per client
        mesh = cluster_mesh(sizes, clients, client)
        for source in range(min(mesh.shape)):
            owner = mesh.client_of(int(np.ravel_multi_index((source,) * mesh.ndim, mesh.shape)))
            for seed in range(10):
                rng = random.Random(seed)
                placements = random_placements(rng, mesh, 2)
                made = distribute_tensor(WHOLE + 100 * client, mesh, placements, src_data_rank=source)
                if not torch.allclose(made.full_tensor(), WHOLE + 100 * owner):
                    found.append(f"{placements} from {source}: {made.full_tensor()}")
    return found


def nothing_is_sent():
    def send(*_, **__):
        raise AssertionError("a message was sent")

    kept = {name: getattr(transport, name) for name in ("all_gather", "all_gather_object", "all_reduce", "swap")}
    client, clients = dtckpt.client_id(), dtckpt.num_clients()
    mesh = cluster_mesh({"x": clients}, clients, client)
    own, found = WHOLE + 100 * client, []
    try:
        for name in kept:
            setattr(transport, name, send)
        for placements in ([Shard(0)], [Shard(1)], [Replicate()], [Partial()], None):
            made = distribute_tensor(own, mesh, placements, src_data_rank=None)
            for make in (zeros, ones, empty, rand, randn):
                make(6, 7, device_mesh=mesh, placements=placements)
            region = made.layout.region(client, (6, 7))
            wanted = own[region.slices()] if placements != [Partial()] or not client else torch.zeros(6, 7)
            if not torch.equal(made.to_local(), wanted):
                found.append(f"{placements}: {made.to_local()}")
    finally:
        for name, function in kept.items():
            setattr(transport, name, function)
    return found


def tensors_over_clients():
    client, clients = dtckpt.client_id(), dtckpt.num_clients()
    found = []
    for seed in range(20):
        rng = random.Random(seed)
        mesh = cluster_mesh(moves.random_axes(rng, 2 * clients), clients, client)
        shape = tuple(rng.randint(0, 7) for _ in range(rng.randint(0, 3)))
        placements = random_placements(rng, mesh, len(shape))
        for make, value in FILLED:
            made = make(*shape, dtype=torch.float64, device_mesh=mesh, placements=placements)
            if not torch.allclose(made.full_tensor(), torch.full(shape, value, dtype=torch.float64)):
                found.append(f"{make} {shape} {placements}")
    torch.manual_seed(11)
    mesh = line()
    copies = [make(4, 5, device_mesh=mesh) for make in RANDOM]
    shards = [make(4 * clients, 5, device_mesh=mesh, placements=[Shard(0)]) for make in RANDOM]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for each in copies:
            DTensor.from_local(each.to_local(), mesh, run_check=True)
    whole = tuple(tuple(each.full_tensor().flatten().tolist()) for each in (*copies, *shards))
    return found, whole, tuple(tuple(each.to_local().flatten().tolist()) for each in shards)


def modules_over_clients():
    client, found, mesh = dtckpt.client_id(), [], line()
    model = Inner()
    with torch.no_grad():
        for each in (*model.parameters(), *model.buffers()):
            each.add_(100 * client)

    def partition(name, module, on):
        module.weight = nn.Parameter(distribute_tensor(module.weight, on, [Shard(0)]))

    distribute_module(model, mesh, partition)
    for name, each in (*model.named_parameters(), *model.named_buffers()):
        wanted = dict(Inner().named_parameters()) | dict(Inner().named_buffers())
        if not torch.equal(each.full_tensor(), wanted[name]):
            found.append(f"{name}: {each.full_tensor()}")
    if (
        model.weight.to_local().shape
        != Layout(["x", UNSHARDED], cluster_mesh({"x": 3}, 3, client)).region(client, (6, 7)).shape
    ):
        found.append(f"weight: {model.weight.to_local().shape}")
    return found


def distribute_wrongly(wrong, guilty):
    tensor, placements, source = WHOLE, [Shard(0)], 0
    if dtckpt.client_id() in guilty:
        tensor = {
            "shape": WHOLE[1:],
            "rank": WHOLE[0],
            "dtype": WHOLE.double(),
            "no tensor": None,
            "no leaf": WHOLE.clone().requires_grad_() * 2,
        }.get(wrong, WHOLE)
        placements = {"placements": [Shard(1)], "dim": [Shard(2)], "count": [Shard(0)] * 2}.get(wrong, placements)
        source = {"source": 1, "source beyond": 3}.get(wrong, source)
    distribute_tensor(tensor, line(), placements, src_data_rank=source)


def give_wrongly(wrong, guilty):
    tensor, placements, gradient = WHOLE, [Shard(0)], None
    if dtckpt.client_id() in guilty:
        tensor = {
            "shape": WHOLE[:4],
            "dtype": WHOLE.double(),
            "no tensor": None,
            "dtensor": ones(6, 7, device_mesh=abstract_mesh({"z": 1})),
        }.get(wrong, WHOLE)
        placements = {
            "placements": [Shard(1)],
            "rank": [Shard(-1)],
            "partial": [Partial()],
            "dim": [Shard(2)],
            "count": [Shard(0)] * 2,
        }.get(wrong, placements)
        gradient = [] if wrong == "gradient" else None
    DTensor.from_local(tensor, line(), placements, grad_placements=gradient)


def refuse(number):
    REFUSED[number][2](cluster_mesh({"x": 2, "y": 3}, 2, dtckpt.client_id()))


def outside():
    from dtckpt.dtensor import DeviceMesh

    mesh = DeviceMesh("cpu", [2, 0])
    made = distribute_tensor(WHOLE + dtckpt.client_id(), mesh, [Shard(0)], src_data_rank=1)
    if mesh.get_coordinate() is not None:
        assert torch.equal(made.full_tensor(), WHOLE)
        assert torch.equal(made.to_local(), WHOLE.chunk(2)[mesh.get_local_rank()])
    part = WHOLE.double().chunk(2)[mesh.get_local_rank() if mesh.get_coordinate() else 0]
    given = DTensor.from_local(part, mesh, [Shard(0)], shape=(6, 7), stride=(7, 1), run_check=True)
    assert torch.equal(given.redistribute(line(), [Replicate()]).to_local(), WHOLE.double())
    return tuple(made.shape), tuple(made.to_local().shape)
