import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.states import MESH_MAKERS, bits_of, differences, dtype_names, layouts, meshes, packed, shapes, tensor_of

from dtckpt import MATCH, UNSHARDED, DTensor, Layout, Mesh, abstract_mesh, check_layout, fetch_layout, pack, unpack
from dtckpt.comm.collectives import all_gather_object
from dtckpt.errors import (
    ComponentError,
    CoordinationError,
    LayoutError,
    LayoutTypeError,
    ReplicaMismatchError,
)
from dtckpt.layout.placement import REDUCE_OPS, Replicate, Shard

MESH = abstract_mesh({"x": 2, "y": 2})
ROWS = Layout(["x", UNSHARDED], MESH)
COPIES = Layout.replicated(MESH, 2)


@pytest.mark.parametrize("make_mesh", MESH_MAKERS)
@given(data=st.data())
def test_components_in_components_out(make_mesh, data):
    mesh, shape, dtype = data.draw(meshes(make_mesh=make_mesh)), data.draw(shapes), data.draw(dtype_names)
    layout = data.draw(layouts(mesh, len(shape)))
    whole = tensor_of("w", shape, dtype)
    tensor = packed(whole, layout)
    assert differences(tensor, whole) == []
    assert bits_of(tensor.full_tensor()) == bits_of(whole)
    parts = unpack(tensor)
    again = pack(parts, layout, shape)
    assert all(one.data_ptr() == other.data_ptr() for one, other in zip(parts, unpack(again), strict=True))


@pytest.mark.parametrize("make_mesh", MESH_MAKERS)
@given(data=st.data())
def test_the_global_shape_follows_from_the_components(make_mesh, data):
    mesh, shape = data.draw(meshes(make_mesh=make_mesh)), data.draw(shapes)
    layout = data.draw(layouts(mesh, len(shape)))
    whole = tensor_of("w", shape, "int16")
    parts = [whole[layout.region(device, shape).slices()] for device in mesh.local_device_ids()]
    tensor = pack(parts, layout)
    assert tuple(tensor.shape) == shape
    assert bits_of(tensor.full_tensor()) == bits_of(whole)


def test_a_dtensor_says_what_it_is():
    tensor = packed(torch.arange(12.0).reshape(4, 3), ROWS)
    assert isinstance(tensor, torch.Tensor)
    assert (tuple(tensor.shape), tensor.dtype, tensor.ndim) == ((4, 3), torch.float32, 2)
    assert tensor.device_mesh == MESH
    assert tensor.placements == (Shard(0), Replicate())
    assert fetch_layout(tensor) == tensor.layout == ROWS
    check_layout(tensor, ROWS)
    assert "shape=(4, 3)" in repr(tensor)
    assert "sharding_specs:x,unsharded" in repr(tensor)


def test_what_becomes_a_tensor():
    layout = Layout([UNSHARDED], abstract_mesh({"x": 3}))
    parts = unpack(pack([[1, 2], np.array([1, 2]), torch.tensor([1, 2])], layout))
    assert [part.tolist() for part in parts] == [[1, 2]] * 3
    scalars = pack([1.5, 1.5], Layout([], abstract_mesh({"x": 2})))
    assert (tuple(scalars.shape), scalars.full_tensor().item()) == ((), 1.5)


@pytest.mark.parametrize("reduce_op", REDUCE_OPS)
def test_full_tensor_does_the_pending_reductions(reduce_op):
    layout = Layout([UNSHARDED], abstract_mesh({"x": 2, "y": 3}), partial={"x": reduce_op})
    parts = [torch.tensor([device // 3 + 5, 6]) for device in range(6)]
    expected = {
        "sum": [11, 12],
        "avg": [5, 6],
        "min": [5, 6],
        "max": [6, 6],
        "product": [30, 36],
        "band": [4, 6],
        "bor": [7, 6],
        "bxor": [3, 0],
    }
    assert pack(parts, layout).full_tensor().tolist() == expected[reduce_op]


def test_two_pending_reductions():
    layout = Layout([UNSHARDED], MESH, partial={"x": "sum", "y": "max"})
    parts = [torch.tensor([value]) for value in (1.0, 2.0, 30.0, 4.0)]
    assert pack(parts, layout).full_tensor().item() in (32.0, 34.0)
    alone = Layout([UNSHARDED], MESH, partial={"x": "sum", "y": "sum"})
    assert pack(parts, alone).full_tensor().item() == 37.0


def parts_of(*shapes, dtype=torch.float32):
    return [torch.zeros(shape, dtype=dtype) for shape in shapes]


BAD_COMPONENTS = {
    "too few": (parts_of((2, 3)) * 3, ROWS, None, ComponentError, "got 3, expected 4"),
    "too many": (parts_of((2, 3)) * 5, ROWS, None, ComponentError, "got 5, expected 4"),
    "none": ([], ROWS, None, ComponentError, "got 0, expected 4"),
    "rank": (parts_of((2, 3)) * 3 + parts_of((2,)), ROWS, None, ComponentError, r"component 3 .*got shape \(2,\)"),
    "shape": (parts_of((2, 3), (2, 3), (2, 3), (2, 4)), ROWS, None, ComponentError, "component of device"),
    "copies of other shapes": (parts_of((2, 3), (1, 3), (2, 3), (2, 3)), COPIES, None, ComponentError, "device"),
    "dtypes": (
        parts_of((2, 3)) * 3 + parts_of((2, 3), dtype=torch.float64),
        ROWS,
        None,
        ComponentError,
        "one dtype; got float32, float64",
    ),
    "global shape": (parts_of((2, 3)) * 4, ROWS, (5, 3), ComponentError, r"global shape \(5, 3\)"),
    "rank of the global shape": (parts_of((2, 3)) * 4, ROWS, (4,), ComponentError, "expected 2 dims"),
    "no global shape": (parts_of((2, 3)) * 4, ROWS, 4, LayoutTypeError, "expected a sequence of integers"),
    "global shape of numbers": (parts_of((2, 3)) * 4, ROWS, (4.5, 3), LayoutTypeError, "expected a sequence of integ"),
    "negative global shape": (parts_of((2, 3)) * 4, ROWS, (-4, 3), (ComponentError, LayoutError), "-4"),
    "first shard shorter": (parts_of((1, 3), (1, 3), (3, 3), (3, 3)), ROWS, None, ComponentError, "torch.chunk"),
    "a DTensor": ([pack(parts_of((2, 3)) * 4, ROWS)] * 4, ROWS, None, ComponentError, "plain tensor; got DTensor"),
    "nothing": ([None] * 4, ROWS, None, ComponentError, "got NoneType"),
    "text": (["abc"] * 4, ROWS, None, ComponentError, "cannot become a tensor"),
    "ragged": ([[[1, 2], [3]]] * 4, ROWS, None, ComponentError, "cannot become a tensor"),
    "sparse": ([torch.zeros(2, 3).to_sparse()] * 4, ROWS, None, ComponentError, "must be dense"),
    "one tensor": (torch.zeros(4, 2, 3), ROWS, None, LayoutTypeError, "sequence of components; got Tensor"),
    "an array": (np.zeros((4, 2, 3)), ROWS, None, LayoutTypeError, "sequence of components; got ndarray"),
    "a generator": ((part for part in parts_of((2, 3)) * 4), ROWS, None, LayoutTypeError, "got generator"),
    "no layout": (parts_of((2, 3)) * 4, "x", None, LayoutTypeError, "needs a Layout; got str"),
    "match": (parts_of((2, 3)) * 4, Layout([MATCH, UNSHARDED], MESH), None, LayoutError, "got 'match'"),
    "single device": (
        parts_of((2, 3)),
        Layout.from_single_device_mesh(Mesh.from_device("/job:localhost/replica:0/task:0/device:CPU:0")),
        None,
        LayoutError,
        "mesh of devices",
    ),
}


@pytest.mark.parametrize(
    ("components", "layout", "shape", "error", "reason"), BAD_COMPONENTS.values(), ids=BAD_COMPONENTS
)
def test_components_that_do_not_fit(components, layout, shape, error, reason):
    with pytest.raises(error, match=reason):
        pack(components, layout, shape)


def test_copies_that_differ_are_found_when_asked():
    parts = [torch.zeros(2, 3) for _ in range(4)]
    parts[3][1, 2] = 1e-30
    pack(parts, ROWS)
    with pytest.raises(ReplicaMismatchError, match=r"CPU:2 and .*CPU:3 must be copies"):
        pack(parts, ROWS, run_check=True)
    nans = [torch.full((2, 3), float("nan")) for _ in range(4)]
    pack(nans, ROWS, run_check=True)
    pack(parts, Layout([UNSHARDED, UNSHARDED], MESH, partial={"x": "sum", "y": "sum"}), run_check=True)


def test_local_devices_that_are_not_there():
    mesh = Mesh(["x"], np.arange(1), [0], ["/job:localhost/replica:0/task:0/device:GPU:0"], "")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(LayoutError, match="no torch device for mesh device"):
        pack([torch.zeros(2)], Layout([UNSHARDED], mesh))


def test_wrong_arguments():
    for function in (unpack, fetch_layout):
        with pytest.raises(LayoutError, match="needs a DTensor; got Tensor"):
            function(torch.zeros(2))
    assert [fetch_layout(value) for value in (3, None, np.zeros(2))] == [None] * 3
    with pytest.raises(LayoutTypeError, match="check_layout needs a DTensor; got int"):
        check_layout(3, ROWS)
    tensor = packed(torch.zeros(4, 3), ROWS)
    with pytest.raises(LayoutError, match=r"got .*sharding_specs:x,unsharded.* expected .*unsharded,unsharded"):
        check_layout(tensor, COPIES)
    with pytest.raises(ComponentError, match="to_local needs one local device; got 4; unpack"):
        tensor.to_local()


def test_one_local_device():
    layout = Layout(["x"], abstract_mesh({"x": 1}))
    part = torch.arange(3)
    assert pack([part], layout).to_local().data_ptr() == part.data_ptr()


def test_operators_that_work_on_components():
    tensor = packed(torch.arange(12.0).reshape(4, 3), ROWS)
    for result in (tensor.detach(), tensor.clone(), torch.zeros_like(tensor), tensor.to(torch.bfloat16)):
        assert isinstance(result, DTensor)
        assert result.layout == ROWS
        assert tuple(result.shape) == (4, 3)
    assert tensor.to(torch.bfloat16).dtype == torch.bfloat16
    assert tensor.to(torch.bfloat16).full_tensor().dtype == torch.bfloat16
    assert tensor.zero_().full_tensor().abs().sum() == 0


def test_exchanges_need_a_process_group():
    with pytest.raises(
        CoordinationError, match="got clients 0, 1, expected clients that a default process group spans"
    ):
        all_gather_object(0, [0, 1])
