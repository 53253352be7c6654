"""Tensors in other layouts: same values, same gradients, nothing sent twice."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.shares import examples
from support.states import CLIENTS_WITH_GPUS, MESH_MAKERS, cluster_mesh, packed

from dtckpt import (
    MATCH,
    UNSHARDED,
    DTensor,
    Layout,
    Mesh,
    Partial,
    Replicate,
    Shard,
    abstract_mesh,
    call_with_layout,
    copy_to_mesh,
    pack,
    relayout,
    run_on,
    unpack,
)
from dtckpt.dtensor.redistribute import redistribute
from dtckpt.errors import ComponentError, LayoutError, LayoutTypeError, MeshTypeError
from dtckpt.layout.mesh import get_default_mesh
from dtckpt.redistribution import execute
from dtckpt.redistribution.exchange import BoxExchange
from dtckpt.redistribution.exchange_plan import plan_exchange
from dtckpt.redistribution.execute import plan_redistribution
from dtckpt.redistribution.layout_change import LayoutChange
from dtckpt.redistribution.native_collective import NativeExchange, find_collective

from . import redistribution_cases

WHOLE = torch.arange(42.0, dtype=torch.float64).reshape(6, 7)


@pytest.mark.parametrize("make_mesh", MESH_MAKERS)
@given(seed=st.integers(0, 2**32))
@settings(max_examples=examples(120))
def test_any_layout_to_any_other(make_mesh, seed):
    redistribution_cases.check_one_process(seed, make_mesh)


@pytest.mark.parametrize("make_mesh", MESH_MAKERS)
def test_what_was_brought_to_the_host_is_moved_as_well(make_mesh):
    mesh = make_mesh({"x": 3})
    moved = packed(WHOLE, Layout(["x", UNSHARDED], mesh)).cpu().redistribute(placements=[Shard(1)])
    assert torch.equal(moved.full_tensor().cpu(), WHOLE)


@given(st.integers(0, 2**32))
def test_gradients_come_back_from_any_layout_to_any_other(seed):
    redistribution_cases.check_gradient(seed)


@pytest.mark.share(2)
@pytest.mark.processes
@pytest.mark.parametrize(("clients", "devices"), [(2, 1), (3, 1), (4, 1), (2, 3)])
def test_any_layout_to_any_other_over_clients(pool, clients, devices):
    found = pool.values(redistribution_cases.check_clients, range(120), devices, clients=clients, group=True)
    assert found == [[]] * clients


@pytest.mark.processes
@pytest.mark.parametrize(("clients", "devices"), [(4, 1), (2, 3)])
def test_many_messages_one_after_the_other(pool, clients, devices):
    found = pool.values(
        redistribution_cases.check_clients_in_many_messages, range(1000, 1060), devices, clients=clients, group=True
    )
    assert found == [[]] * clients


@pytest.mark.processes
@pytest.mark.parametrize(("clients", "devices"), [(3, 1), (2, 3)])
def test_gradients_come_back_from_any_layout_over_clients(pool, clients, devices):
    assert (
        pool.values(redistribution_cases.check_gradients, range(40), devices, clients=clients, group=True)
        == [None] * clients
    )


@pytest.mark.processes
@pytest.mark.parametrize("clients", [2, 3])
def test_gradients_go_back_over_clients(pool, clients):
    assert pool.values(redistribution_cases.gradients_over_clients, clients=clients, group=True) == [[]] * clients


@pytest.mark.processes
@pytest.mark.parametrize(("clients", "backend"), CLIENTS_WITH_GPUS)
def test_clients_with_gpus(pool, clients, backend):
    how = {"clients": clients, "group": True, "backend": backend}
    assert pool.values(redistribution_cases.check_clients, range(120), 1, "GPU", **how) == [[]] * clients
    assert pool.values(redistribution_cases.gradients_over_clients, "GPU", **how) == [[]] * clients


@pytest.mark.processes
def test_copies_that_differ_between_clients_are_found_and_left_alone(pool):
    answers = pool.run(redistribution_cases.copies_that_differ, clients=3, group=True)
    assert {answer.error for answer in answers} == {"ReplicaMismatchError"}, answers
    assert len({answer.text for answer in answers}) == 1


# --- plans ---------------------------------------------------------------------------------------------------------


def seen_by(axes, num_clients, client):
    from support.states import cluster_mesh

    return cluster_mesh(axes, num_clients, client)


@given(st.integers(0, 2**32))
def test_both_sides_plan_the_same_messages_and_nothing_is_sent_twice(seed):
    import random

    rng = random.Random(seed)
    clients, devices = rng.randint(1, 4), rng.randint(1, 3)
    axes = [redistribution_cases.random_axes(rng, clients * devices) for _ in range(2)]
    shape = tuple(rng.randint(0, 9) for _ in range(rng.randint(0, 3)))
    state = rng.getstate()
    plans, layouts = [], []
    for client in range(clients):
        rng.setstate(state)
        source = redistribution_cases.random_layout(rng, seen_by(axes[0], clients, client), len(shape))
        source = Layout(source.sharding_specs, source.mesh)
        target = redistribution_cases.random_layout(rng, seen_by(axes[1], clients, client), len(shape))
        target = Layout(target.sharding_specs, target.mesh)
        plans.append(plan_exchange(source, target, shape, client))
        layouts.append((source, target))
    for sender, plan in enumerate(plans):
        for receiver, sent in plan.sends.items():
            assert plans[receiver].receives[sender] == sent
    for receiver, plan in enumerate(plans):
        source, target = layouts[receiver]
        for sender, received in plan.receives.items():
            assert plans[sender].sends[receiver] == received
        # The lower bound: what the client's new boxes need and its old boxes lack, each element once.
        needed = torch.zeros(shape, dtype=torch.bool)
        for device in target.mesh.devices_of(receiver):
            needed[target.region(device, shape).slices()] = True
        boxes = {target.region(device, shape) for device in target.mesh.devices_of(receiver)}
        for device in source.mesh.devices_of(receiver):
            needed[source.region(device, shape).slices()] = False
        bound = sum(int(needed[box.slices()].sum()) for box in boxes)
        assert plan.num_received <= bound


def test_a_client_without_messages_takes_part():
    for client in range(3):
        mesh = cluster_mesh({"x": 3}, 3, client)
        source, target = Layout(["x", UNSHARDED], mesh), Layout([UNSHARDED, "x"], mesh)
        (exchange,) = plan_redistribution(source, target, (1, 2), torch.float32).exchanges
        assert not exchange.is_local
        assert [len(flight.sends) + len(flight.receives) for flight in exchange.flights] == [(1, 1, 0)[client]]


@pytest.mark.parametrize("kind", ["CPU", "GPU"])
def test_a_client_outside_waits_for_nothing(kind):
    names = [f"/job:worker/replica:0/task:{client}/device:{kind}:0" for client in range(2)]
    mesh = Mesh(["x"], np.arange(2), [], [], "", names)
    exchange = BoxExchange(
        [LayoutChange(Layout([UNSHARDED], mesh, {"x": "sum"}), Layout(["x"], mesh), (4,), torch.float32)]
    )
    assert (exchange.is_local, exchange.flights, exchange.collectives.members) == (False, [], (0, 1))


def test_a_process_group_with_another_backend_gets_plans_of_its_own(monkeypatch):
    names = [f"/job:worker/replica:0/task:{client}/device:GPU:0" for client in range(2)]
    mesh = Mesh(["x"], np.arange(2), [], [], "", names)
    change = Layout(["x"], mesh), Layout([UNSHARDED], mesh), (4,), torch.float32
    plans = []
    for memory in ("cuda", "cpu", "cuda"):
        monkeypatch.setattr(execute, "message_memory", lambda _, memory=memory: memory)
        plans.append(plan_redistribution(*change))
    assert plans[0] is plans[2] is not plans[1]


def test_a_plan_for_one_of_many_clients_is_cheap():
    mesh = abstract_mesh({"data": 64, "model": 64})
    other = abstract_mesh({"model": 128, "data": 32})
    source, target = Layout(["data", "model"], mesh), Layout([("model", "data"), UNSHARDED], other)
    plan = plan_exchange(source, target, (4096, 4096), 0)
    assert len(plan.copies) >= 4096


# --- the calls -----------------------------------------------------------------------------------------------------


@pytest.fixture
def mesh():
    return abstract_mesh({"x": 2, "y": 3})


@pytest.fixture
def tensor(mesh):
    return packed(WHOLE, Layout(["x", UNSHARDED], mesh))


def values(tensor):
    return tensor.full_tensor()


def test_placements_and_none(tensor):
    moved = tensor.redistribute(placements=[Shard(-1), Shard(0)])
    assert moved.placements == (Shard(1), Shard(0))
    assert torch.equal(values(moved), WHOLE)
    assert tensor.redistribute().placements == (Replicate(), Replicate())


def test_another_mesh_also_with_the_same_placements(tensor):
    other = abstract_mesh({"x": 2, "y": 3}, "other")
    moved = tensor.redistribute(other, [Shard(0), Replicate()])
    assert moved.device_mesh == other
    assert moved.device_mesh != tensor.device_mesh
    assert torch.equal(values(moved), WHOLE)


def test_nothing_to_do_gives_another_tensor_in_the_same_memory(tensor):
    for again in (
        tensor.redistribute(placements=tensor.placements),
        tensor.redistribute(tensor.device_mesh, tensor.placements),
    ):
        assert again is not tensor
        assert list(map(id, again.components)) == list(map(id, tensor.components))
    assert relayout(tensor, tensor.layout) is tensor


def test_the_other_tensor_is_free(tensor):
    leaf = tensor.detach().requires_grad_()
    with torch.no_grad():
        leaf.redistribute(placements=leaf.placements).requires_grad_(False)
    assert leaf.requires_grad
    doubled = leaf.redistribute(placements=leaf.placements)
    assert not doubled.is_leaf
    doubled.mul_(2)
    assert torch.equal(values(leaf), WHOLE * 2)
    doubled.sum().backward()
    assert torch.equal(values(leaf.grad), torch.full_like(WHOLE, 2))


def test_autograd_notices_writes_in_the_same_memory(tensor):
    leaf = tensor.detach().requires_grad_()
    squares = leaf.redistribute(placements=leaf.placements).square()
    with torch.no_grad():
        leaf.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squares.sum().backward()


def test_gradients_of_a_tensor_that_stays_are_in_its_layout(tensor):
    terms = tensor.detach().redistribute(placements=[Partial(), Shard(1)]).requires_grad_()
    again = terms.redistribute(placements=terms.placements)
    (gradient,) = torch.autograd.grad(again.redistribute(placements=[Shard(0), Replicate()]).sum(), terms)
    assert gradient.placements == (Replicate(), Shard(1))


@pytest.mark.parametrize("reduce_op", ["sum", "avg", "min", "max", "product"])
def test_to_partial_and_back(tensor, reduce_op):
    terms = tensor.redistribute(placements=[Partial(reduce_op), Shard(1)])
    assert terms.placements == (Partial(reduce_op), Shard(1))
    assert torch.equal(values(terms), WHOLE)
    assert torch.equal(values(terms.redistribute(placements=[Shard(1), Shard(1)])), WHOLE)


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64])
@pytest.mark.parametrize(("reduce_op", "reduced"), [("sum", 9), ("product", 24), ("band", 0), ("bor", 7), ("bxor", 5)])
def test_wide_unsigned_integers_are_reduced(reduce_op, reduced, dtype):
    terms = [torch.tensor([value, 1], dtype=torch.int64).to(dtype) for value in (2, 3, 4)]
    mesh = abstract_mesh({"x": 3})
    tensor = pack(terms, Layout([UNSHARDED], mesh, {"x": reduce_op}), (2,))
    assert tensor.full_tensor()[0].item() == reduced


@pytest.mark.parametrize(
    ("reduce_op", "dtype"),
    [
        ("avg", torch.uint16),
        ("min", torch.uint64),
        ("max", torch.uint32),
        ("max", torch.complex64),
        ("sum", torch.float8_e5m2),
        ("product", torch.float8_e4m3fn),
    ],
)
@pytest.mark.parametrize("clients", [1, 2])
def test_reductions_that_cannot_be_made_everywhere_are_refused_before_anything_is_sent(reduce_op, dtype, clients):
    mesh = abstract_mesh({"x": 2}, devices_per_client=2 // clients)
    change = LayoutChange(Layout([UNSHARDED], mesh, {"x": reduce_op}), Layout([UNSHARDED], mesh), (4,), dtype)
    with pytest.raises(LayoutError, match=f"cannot reduce {dtype} by '{reduce_op}': .*; convert it first"):
        BoxExchange([change])
    if clients == 2:
        with pytest.raises(LayoutError, match=f"cannot reduce {dtype} by '{reduce_op}': .*; convert it first"):
            NativeExchange(change, find_collective(change))


def test_match_keeps_a_dims_spec(mesh, tensor):
    assert relayout(tensor, Layout([MATCH, "y"], mesh)).layout == Layout(["x", "y"], mesh)
    with pytest.raises(LayoutError, match="more than once"):
        relayout(tensor, Layout([MATCH, "x"], mesh))


def test_plain_tensors_are_cut(mesh):
    layout = Layout([("y", "x"), UNSHARDED], mesh)
    cut = copy_to_mesh(WHOLE, layout)
    assert cut.layout == layout
    assert torch.equal(values(cut), WHOLE)
    assert relayout([1.0, 2.0, 3.0], Layout(["y"], mesh)).shape == (3,)
    assert copy_to_mesh(WHOLE, Layout([MATCH, "x"], mesh)).layout == Layout([UNSHARDED, "x"], mesh)
    assert call_with_layout(torch.ones, layout, 6, 2).layout == layout
    assert type(call_with_layout(torch.ones, None, 6)) is torch.Tensor


def test_run_on_brings_the_outer_mesh_back(mesh):
    inner = abstract_mesh({"z": 1})
    assert get_default_mesh() is None

    def fail():
        with run_on(inner):
            assert get_default_mesh() is inner
            raise KeyError

    with run_on(mesh):
        with pytest.raises(KeyError):
            fail()
        assert get_default_mesh() is mesh
    assert get_default_mesh() is None
    with pytest.raises(MeshTypeError), run_on("x"):
        pass


def test_dtypes_on_the_way(tensor):
    moved = tensor.redistribute(placements=[Replicate(), Shard(1)], forward_dtype=torch.bfloat16)
    assert moved.dtype == torch.bfloat16
    assert torch.equal(values(moved), WHOLE.bfloat16())


def local_tensor():
    return WHOLE.clone().requires_grad_(), abstract_mesh({"x": 1})


def test_gradients():
    local, mesh = local_tensor()
    moved = DTensor.from_local(local, mesh, [Shard(0)]).redistribute(placements=[Shard(1)])
    assert moved.requires_grad
    (moved.to_local() ** 2).sum().backward()
    assert torch.equal(local.grad, 2 * WHOLE)


def test_gradients_of_gradients():
    local, mesh = local_tensor()
    moved = DTensor.from_local(local, mesh, [Shard(0)]).redistribute(placements=[Replicate()]).to_local()
    (first,) = torch.autograd.grad((moved**3).sum(), local, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), local)
    assert torch.equal(second, 6 * WHOLE)


def test_gradients_add_up_and_take_a_dtype():
    local, mesh = local_tensor()
    tensor = DTensor.from_local(local, mesh, [Shard(0)])
    once = tensor.redistribute(placements=[Shard(1)], backward_dtype=torch.float32).to_local()
    twice = tensor.full_tensor()
    (once + 2 * twice).sum().backward()
    assert local.grad.dtype == torch.float64
    assert torch.equal(local.grad, torch.full_like(WHOLE, 3))


def test_gradients_accumulate_in_a_leaf():
    mesh = abstract_mesh({"x": 1})
    leaf = DTensor.from_local(WHOLE.clone(), mesh, [Shard(0)]).requires_grad_()
    for _ in range(3):
        (leaf.redistribute(placements=[Shard(1)]).to_local() * 2).sum().backward()
    assert leaf.grad.layout == leaf.layout
    assert torch.equal(leaf.grad.full_tensor(), torch.full_like(WHOLE, 6))
    other = DTensor.from_local(torch.ones_like(WHOLE), mesh, [Shard(0)])
    with torch.no_grad():
        leaf.copy_(other)
    assert torch.equal(leaf.full_tensor().detach(), torch.ones_like(WHOLE))


def test_no_grad_gives_the_component_itself():
    local, mesh = local_tensor()
    tensor = DTensor.from_local(local, mesh, [Shard(0)])
    with torch.no_grad():
        assert tensor.to_local() is tensor.components[0]
    assert tensor.to_local().grad_fn is not None


def test_what_is_refused(mesh, tensor):
    with pytest.raises(LayoutError, match="expected one per axis"):
        tensor.redistribute(placements=[Shard(0)])
    with pytest.raises(LayoutError, match="expected a dim below 2"):
        tensor.redistribute(placements=[Shard(2), Replicate()])
    with pytest.raises(LayoutError, match="got rank 1, expected 2"):
        relayout(tensor, Layout(["x"], mesh))
    with pytest.raises(LayoutTypeError, match="needs a DTensor"):
        redistribute(WHOLE, tensor.layout)
    with pytest.raises(LayoutTypeError, match="needs a Layout"):
        relayout(tensor, "x")
    with pytest.raises(LayoutError, match="reduce op"):
        Partial("median")
    with pytest.raises(ComponentError, match="needs one local device; got 6"):
        tensor.to_local()
    with pytest.raises(LayoutError, match="no terms"):
        copy_to_mesh(WHOLE, Layout([UNSHARDED, UNSHARDED], mesh, {"x": "sum"}))
    assert isinstance(mesh, Mesh)
    assert pack(unpack(tensor), tensor.layout, tensor.shape).shape == (6, 7)
