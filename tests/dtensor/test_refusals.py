"""What DTensors refuse, and that every client of one call says the same."""

import pytest
import torch
from support.states import cluster_mesh

import dtckpt
from dtckpt import (
    MATCH,
    UNSHARDED,
    DTensor,
    DVariable,
    Layout,
    Partial,
    Replicate,
    Shard,
    abstract_mesh,
    check_layout,
    copy_to_mesh,
    pack,
)
from dtckpt.dtensor import distribute_tensor, ones, zeros
from dtckpt.errors import ComponentError, LayoutError

from .test_factories import alike

MESH = abstract_mesh({"x": 2, "y": 2})
OTHER = abstract_mesh({"z": 3})
ROWS = Layout(["x", UNSHARDED], MESH)
WHOLE = torch.arange(15.0).reshape(5, 3)


# --- operators ----------------------------------------------------------------------------------------------------

TENSOR = copy_to_mesh(WHOLE, ROWS)
ELSEWHERE = copy_to_mesh(WHOLE, Layout(["z", UNSHARDED], OTHER))
COLUMNS = copy_to_mesh(WHOLE, Layout([UNSHARDED, "x"], MESH))
TALL = copy_to_mesh(torch.zeros(6, 3), ROWS)


@pytest.mark.parametrize(
    ("operate", "error", "texts"),
    [
        (
            lambda: TENSOR + ELSEWHERE,
            LayoutError,
            ["different meshes", "'x': 2, 'y': 2", "'z': 3", "redistribute moves"],
        ),
        (lambda: torch.cat([TENSOR, ELSEWHERE]), LayoutError, ["different meshes", "'z': 3"]),
        (lambda: TENSOR.clone().copy_(ELSEWHERE), LayoutError, ["different meshes"]),
        (lambda: TENSOR.clone().copy_(TALL), RuntimeError, ["size of tensor a (5) must match"]),
        (lambda: TENSOR.clone().add_(TALL), RuntimeError, ["size of tensor a (5) must match"]),
        (lambda: TENSOR[0].clone().add_(TENSOR), RuntimeError, ["doesn't match the broadcast shape"]),
        (lambda: TENSOR.to(torch.int32).add_(TENSOR), RuntimeError, ["can't be cast to the desired output type Int"]),
        (lambda: TENSOR @ TENSOR, RuntimeError, ["mat1 and mat2 shapes cannot be multiplied"]),
        (
            lambda: torch.add(TENSOR, TENSOR, out=TALL),
            LayoutError,
            ["writes to a DTensor of shape (6, 3)", "shape (5, 3)"],
        ),
    ],
)
def test_operators_that_cannot_be_run(operate, error, texts):
    before = [part.clone() for tensor in (TENSOR, TALL) for part in tensor.components]
    with pytest.raises(error) as raised:
        operate()
    for text in texts:
        assert text in str(raised.value)
    assert all(map(torch.equal, before, [part for tensor in (TENSOR, TALL) for part in tensor.components]))


# --- bitwise reductions -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("reduce_op", ["band", "bor", "bxor"])
def test_bitwise_reductions_are_for_integers(dtype, reduce_op):
    terms, one = [Partial(reduce_op), Replicate()], abstract_mesh({"x": 1})
    integers = ones(4, dtype=torch.int32, device_mesh=MESH, placements=terms)
    for make in (
        lambda: pack([torch.ones(4, dtype=dtype)] * 4, Layout([UNSHARDED], MESH, {"x": reduce_op})),
        lambda: pack([torch.ones(4, dtype=dtype)] * 4, Layout([UNSHARDED], MESH, {"x": reduce_op}), (4,)),
        lambda: DTensor.from_local(torch.ones(4, dtype=dtype), one, [Partial(reduce_op)]),
        lambda: ones(4, dtype=dtype, device_mesh=MESH, placements=terms),
        lambda: ones(4, dtype=dtype, device_mesh=MESH).redistribute(placements=terms),
        lambda: ones(4, dtype=torch.int8, device_mesh=MESH).redistribute(placements=terms, forward_dtype=dtype),
    ):
        with pytest.raises(LayoutError, match=f"got .*'x': '{reduce_op}'.* for a tensor of {dtype}, expected integers"):
            make()
    assert integers.to(dtype).layout.partial == {}  # reduced first
    assert ones(4, dtype=torch.bool, device_mesh=MESH, placements=terms).full_tensor().all()


# --- leaves -------------------------------------------------------------------------------------------------------


def test_leaves_and_their_gradients():
    tensor = copy_to_mesh(WHOLE, ROWS)
    assert (tensor.is_leaf, tensor.requires_grad) == (True, False)
    assert tensor.requires_grad_() is tensor
    for part in (tensor.detach(), tensor.data):
        assert (type(part), part.layout, part.is_leaf, part.requires_grad) == (DTensor, ROWS, True, False)
        assert part.components[0].data_ptr() == tensor.components[0].data_ptr()
    moved = tensor.redistribute(placements=[Replicate(), Shard(1)])
    assert (moved.is_leaf, moved.requires_grad) == (False, True)
    with pytest.raises(RuntimeError, match="you can only change requires_grad flags of leaf"):
        moved.requires_grad_(False)
    (moved.full_tensor() ** 2).sum().backward()
    assert tensor.grad.layout == ROWS
    assert torch.equal(tensor.grad.full_tensor(), 2 * WHOLE)
    terms = zeros(5, 3, requires_grad=True, device_mesh=MESH, placements=[Partial(), Shard(0)])
    terms.full_tensor().sum().backward()
    assert terms.grad.placements == (Replicate(), Shard(0))
    gradient = copy_to_mesh(WHOLE, ROWS)
    leaf = zeros(5, 3, requires_grad=True, device_mesh=MESH, placements=ROWS.placements)
    for count in (1, 2, 3):
        leaf.backward(gradient)
        assert leaf.grad.layout == ROWS
        assert torch.equal(leaf.grad.full_tensor(), count * WHOLE)
    assert torch.equal(gradient.full_tensor(), WHOLE)
    with pytest.raises(RuntimeError, match="floating point"):
        zeros(4, dtype=torch.int8, device_mesh=MESH).requires_grad_()
    parameter = torch.nn.Parameter(tensor, requires_grad=False)
    assert (parameter.is_leaf, parameter.requires_grad, parameter.layout) == (True, False, ROWS)


# --- between clients ----------------------------------------------------------------------------------------------


def line():
    clients = dtckpt.num_clients()
    return cluster_mesh({"x": clients}, clients, dtckpt.client_id())


def pack_wrongly(wrong, guilty, **options):
    mesh, is_guilty = line(), dtckpt.client_id() in guilty
    layout, part = Layout(["x", UNSHARDED], mesh), torch.zeros(2, 3)
    if is_guilty:
        layout = Layout([MATCH, UNSHARDED], mesh) if wrong == "match" else layout
        part = {"rank": part[0], "dtype": part.double(), "meta": part.to("meta"), "none": None}.get(wrong, part)
    parts = [] if is_guilty and wrong == "count" else [part]
    pack(parts, layout, **options)


@pytest.mark.processes
@pytest.mark.parametrize("options", [{}, {"run_check": True}, {"shape": (6, 3), "run_check": True}])
@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ("match", "needs a spec for every dim; got 'match'"),
        ("rank", "got shape (3,), expected 2 dims"),
        ("dtype", "got float32, float64"),
        ("meta", "got S(0), S(0) on meta"),
        ("none", "must be a plain tensor; got NoneType"),
        ("count", "got 0, expected 1"),
    ],
)
def test_all_clients_of_pack_raise_the_same(pool, wrong, text, options):
    error, message = alike(pool.run(pack_wrongly, wrong, [1], clients=3, group=True, **options))
    assert error in ("ComponentError", "LayoutError")
    assert text in message


def give_another_shape():
    part = torch.zeros(2, 3)
    DTensor.from_local(part, line(), [Shard(0)], shape=(6 - dtckpt.client_id() // 2, 3), run_check=True)


def give_a_wrong_placement():
    placements = [Shard(2 if dtckpt.client_id() == 2 else 0)]
    DTensor.from_local(torch.zeros(2, 3), line(), placements, shape=(6, 3), run_check=True)


def need_gradients_on_one_client():
    part = torch.zeros(2, 3, requires_grad=dtckpt.client_id() == 1)
    DTensor.from_local(part, line(), [Shard(0)], run_check=True)


def reduce_bits_of_floats():
    DTensor.from_local(torch.zeros(2, 3), line(), [Partial("bor")])


def check_another_layout():
    check_layout(zeros(6, 3, device_mesh=line()), Layout(["x", UNSHARDED], line()))


def ask_for_a_gradient_elsewhere():
    zeros(6, 3, device_mesh=line()).to_local(grad_placements=[Shard(0), Shard(1)])


def ask_for_whole_gradients_elsewhere():
    zeros(2, 3, device_mesh=line(), placements=[Shard(0)]).full_tensor(grad_placements=[Replicate(), Shard(0)])


def ask_alone_for_whole_gradients_elsewhere():
    placements = [Replicate()] * (2 if dtckpt.client_id() == 1 else 1)
    zeros(2, 3, device_mesh=line(), placements=[Shard(0)]).full_tensor(grad_placements=placements)


def shard_gradients_of_the_whole():
    zeros(2, 3, device_mesh=line(), placements=[Shard(0)]).full_tensor(grad_placements=[Shard(0)])


def ask_for_gradients_of_other_shapes():
    zeros(2, 3, device_mesh=line(), placements=[Shard(0)]).to_local(grad_placements=[Shard(1)])


def give_gradients_of_other_shapes():
    part = torch.zeros(int(dtckpt.client_id() < 2), 3, requires_grad=True)
    DTensor.from_local(part, line(), [Shard(0)], grad_placements=[Replicate()])


def mix_meshes():
    clients = dtckpt.num_clients()
    other = cluster_mesh({"y": clients, "z": 2}, clients, dtckpt.client_id())
    zeros(6, 3, device_mesh=line()) + zeros(6, 3, device_mesh=other)


def distribute_where_a_device_is_missing():
    dtckpt.configure_virtual_devices("TPU", 1)
    mesh = dtckpt.create_distributed_mesh({"x": dtckpt.num_clients()}, device_type="TPU")
    distribute_tensor(torch.zeros(6, 3), mesh, [Shard(0)], src_data_rank=1)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("case", "kind", "text"),
    [
        (give_another_shape, "ComponentError", "clients give different global shapes; got (6, 3), (5, 3)"),
        (give_a_wrong_placement, "LayoutError", "expected a dim below 2"),
        (need_gradients_on_one_client, "ComponentError", "got S(0), S(0) with requires_grad"),
        (reduce_bits_of_floats, "LayoutError", "expected integers or bool for bitwise ones"),
        (check_another_layout, "LayoutError", "on cpu mesh '' {'x': 3} of clients 0, 1, 2"),
        (ask_for_a_gradient_elsewhere, "LayoutError", "got 2 for axes ['x']"),
        (ask_for_whole_gradients_elsewhere, "LayoutError", "got 2 for axes ['x']"),
        (shard_gradients_of_the_whole, "LayoutError", "expected Replicate or Partial along every axis"),
        (ask_for_gradients_of_other_shapes, "LayoutError", "gradient placements: got sharding_specs:unsharded,x"),
        (give_gradients_of_other_shapes, "LayoutError", "gradient placements: got sharding_specs:unsharded,unsharded"),
        (mix_meshes, "MeshMismatchError", "got DTensors on different meshes"),
        (distribute_where_a_device_is_missing, "LayoutError", "task:0/device:TPU:0' on its client"),
    ],
)
def test_texts_are_the_same_on_every_client(pool, case, kind, text):
    error, message = alike(pool.run(case, clients=3, group=True))
    assert error == kind
    assert text in message


@pytest.mark.processes
def test_all_clients_learn_of_one_whose_whole_gradient_is_to_be_elsewhere(pool):
    first, guilty, third = pool.run(ask_alone_for_whole_gradients_elsewhere, clients=3, group=True)
    assert {answer.error for answer in (first, guilty, third)} == {"LayoutError"}
    assert first.text == third.text == f"client 1: {guilty.text}"


def test_gradients_of_the_whole_where_clients_have_several_devices():
    leaf = copy_to_mesh(WHOLE, ROWS).requires_grad_()
    leaf.full_tensor(grad_placements=[Partial(), Partial()]).sum().backward()
    assert torch.equal(leaf.grad.full_tensor(), torch.ones_like(WHOLE))
    with pytest.raises(LayoutError, match="expected one placement along all axes"):
        leaf.full_tensor(grad_placements=[Partial(), Replicate()])


def test_outside_the_mesh():
    outside = cluster_mesh({"x": 2}, 2, 0).portable()
    for make in (copy_to_mesh, DVariable):
        tensor = make(WHOLE.double(), Layout(["x", UNSHARDED], outside))
        assert (tensor.dtype, tensor.shape, tensor.components) == (torch.float64, WHOLE.shape, ())
    layout = Layout(["x"], outside)
    with pytest.raises(ComponentError, match="no device in mesh"):
        pack([], layout)
    assert pack([], layout, (4,)).shape == (4,)


@pytest.mark.parametrize("ask", [lambda x: x.sum().item(), lambda x: bool(x.sum()), lambda x: x.equal(x + 1)])
def test_values_of_a_tensor_outside_the_mesh_are_not_known(ask):
    outside = cluster_mesh({"x": 2}, 2, 0).portable()
    tensor = copy_to_mesh(WHOLE, Layout.replicated(outside, 2))
    with pytest.raises(
        ComponentError, match=r"no device in mesh '' {'x': 2} of clients 0, 1, .* no tensor but a value"
    ):
        ask(tensor)
    assert tensor.is_same_size(tensor + 1)
