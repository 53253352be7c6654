"""DTensors on the meta device, and DTensors that are made while it is the default."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.states import cluster_mesh, layouts, meshes, shapes
from torch import nn

import dtckpt
from dtckpt import UNSHARDED, DTensor, Layout, Partial, Replicate, Shard, abstract_mesh, copy_to_mesh, pack, unpack
from dtckpt.dtensor import (
    DeviceMesh,
    distribute_module,
    distribute_tensor,
    empty,
    full,
    ones,
    rand,
    randn,
    zeros,
)
from dtckpt.dtensor.redistribute import redistribute
from dtckpt.errors import ComponentError, DTypeError

MESH = abstract_mesh({"x": 2, "y": 2})
ROWS = Layout(["x", UNSHARDED], MESH)
META = torch.device("meta")


def assert_meta(tensor, layout, shape, dtype=torch.float32):
    assert isinstance(tensor, DTensor)
    assert tensor.is_meta
    assert (tensor.layout, tuple(tensor.shape), tensor.dtype) == (layout, tuple(shape), dtype)
    for device, part in zip(layout.mesh.local_device_ids(), unpack(tensor), strict=True):
        assert (part.is_meta, part.dtype, tuple(part.shape)) == (True, dtype, layout.region(device, shape).shape)


@given(st.data())
def test_they_go_into_any_layout(data):
    shape = data.draw(shapes)
    source, target = (data.draw(layouts(data.draw(meshes()), len(shape))) for _ in range(2))
    tensor = copy_to_mesh(torch.empty(shape, device="meta"), source).requires_grad_()
    assert_meta(tensor, source, shape)
    moved = redistribute(tensor, target, forward_dtype=torch.bfloat16)
    assert_meta(moved, target, shape, torch.bfloat16)
    assert moved.full_tensor().is_meta
    moved.backward(copy_to_mesh(torch.empty(shape, device="meta", dtype=torch.bfloat16), target))
    assert_meta(tensor.grad, source, shape)


@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Partial(), Partial("max")], ids=str)
def test_modules_leave_the_meta_device_in_their_layouts(placement):
    module = nn.Module()
    module.register_buffer("sums", distribute_tensor(torch.empty(4, 3, device="meta"), MESH, [placement, Replicate()]))
    module.to_empty(device="cpu")
    assert (module.sums.device.type, module.sums.placements) == ("cpu", (placement, Replicate()))


def test_ways_to_make_them():
    whole = torch.empty(5, 3, device="meta")
    assert_meta(pack([whole[:3], whole[:3], whole[3:], whole[3:]], ROWS), ROWS, (5, 3))
    assert_meta(pack([whole[:3], whole[:3], whole[3:], whole[3:]], ROWS, run_check=True), ROWS, (5, 3))
    assert_meta(zeros(5, 3, device_mesh=MESH, placements=ROWS.placements).to("meta"), ROWS, (5, 3))
    assert_meta(distribute_tensor(whole, MESH, ROWS.placements), ROWS, (5, 3))
    one = abstract_mesh({"x": 1})
    assert_meta(DTensor.from_local(whole, one, [Shard(0)]), Layout(["x", UNSHARDED], one), (5, 3))
    terms = distribute_tensor(whole, MESH, [Partial(), Replicate()])
    assert_meta(terms.redistribute(placements=ROWS.placements), ROWS, (5, 3))


def test_modules_get_memory_later():
    with META:
        model = nn.Linear(3, 5)
    distribute_module(model, MESH, lambda _, module, mesh: None)
    assert_meta(model.weight, Layout.replicated(MESH, 2), (5, 3))
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        assert isinstance(parameter, nn.Parameter)
        assert {part.device.type for part in parameter.components} == {parameter.device.type} == {"cpu"}


def test_some_components_on_it_are_an_error():
    with pytest.raises(ComponentError, match="must all be on the meta device or none"):
        pack([torch.empty(2), torch.empty(2, device="meta")], Layout(["x"], abstract_mesh({"x": 2})))


def test_they_have_nothing_to_save(tmp_path):
    with pytest.raises(DTypeError, match="only dense tensors with data"):
        dtckpt.save(tmp_path / "s", {"w": zeros(4, device_mesh=MESH).to("meta")})


def test_the_mesh_says_where_memory_is_whatever_the_default_device():
    options = {"device_mesh": abstract_mesh({"x": 2, "y": 2}), "placements": [Shard(0), Replicate()]}
    with META:
        made = [make(5, 3, **options) for make in (zeros, ones, empty, rand, randn)] + [full((5, 3), 2.5, **options)]
        made += [pack([[1, 2]] * 4, Layout([UNSHARDED], MESH)), copy_to_mesh([[1.0, 2.0]], Layout.replicated(MESH, 2))]
        ranks = options["device_mesh"].mesh
    assert ranks.tolist() == [[0, 1], [2, 3]]
    assert not any(part.is_meta for tensor in made for part in unpack(tensor))
    sums = [tensor.full_tensor().sum().item() for tensor in made]
    assert (sums[0], sums[1], *sums[5:]) == (0, 15, 37.5, 3, 3)


def over_clients():
    client, clients = dtckpt.client_id(), dtckpt.num_clients()
    mesh = cluster_mesh({"x": clients}, clients, client)
    part = DeviceMesh("cpu", list(range(1, clients)))
    whole = torch.empty(5, 3, device="meta")
    tensor = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)
    on_part = DTensor.from_local(
        whole[:3] if client < clients - 1 else whole[3:], part, [Shard(0)], shape=(5, 3), stride=(3, 1)
    )
    placed = distribute_tensor(whole, part, [Shard(0)], src_data_rank=0)
    assert_meta(placed, on_part.layout, (5, 3))
    for moved, on in (
        (placed.redistribute(mesh, [Shard(1)]), mesh),
        (tensor.redistribute(placements=[Shard(1)]), mesh),
        (on_part.redistribute(mesh, [Shard(1)]), mesh),
        (tensor.redistribute(part, [Shard(1)]), part),
    ):
        assert_meta(moved, Layout([UNSHARDED, on.dim_names[0]], on), (5, 3))
    mine = torch.empty(2, 3, device="meta" if client == 1 else "cpu")
    try:
        DTensor.from_local(mine, mesh, [Shard(0)])
    except ComponentError as error:
        return str(error)
    return None


@pytest.mark.processes
def test_over_clients(pool):
    seen = pool.values(over_clients, clients=3, group=True)
    assert seen == ["clients give different placements; got S(0), S(0) on meta; expected the same"] * 3
