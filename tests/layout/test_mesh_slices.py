"""Slicing and flattening meshes, seen from clients that need not be there."""

import itertools
import math
import pickle
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtckpt.errors import MeshError, MeshTypeError
from dtckpt.layout.create_mesh import abstract_mesh, create_distributed_mesh
from dtckpt.layout.mesh import Mesh

GRID = np.arange(8).reshape(2, 2, 2)
NAMES = ["dp", "cp", "tp"]


@pytest.mark.parametrize(
    ("names", "ranks"),
    [
        ("dp", [1, 5]),
        ("cp", [5, 7]),
        (("tp",), [4, 5]),
        (["dp", "tp"], [[0, 1], [4, 5]]),
        (("tp", "dp"), [[0, 4], [1, 5]]),
        (("tp", "cp", "dp"), GRID.T.tolist()),
    ],
)
def test_the_slice_that_the_client_stands_in(seen_by, names, ranks):
    part = seen_by(5, GRID, NAMES, "job")[names]
    expected_names = [names] if isinstance(names, str) else list(names)
    assert (part.dim_names, part.mesh.tolist(), part.name) == (expected_names, ranks, "job")
    assert part.device_ids == tuple(range(part.size()))
    assert part.global_devices() == [f"/job:w/replica:0/task:{rank}/device:CPU:0" for rank in np.ravel(ranks)]
    assert part.local_devices() == ["/job:w/replica:0/task:5/device:CPU:0"]
    assert np.array(ranks)[part.get_coordinate()] == 5
    assert part.get_rank() == 5


def test_all_axes_in_mesh_order_are_the_mesh_itself(seen_by):
    mesh = seen_by(5, GRID, NAMES)
    assert mesh["dp", "cp", "tp"] is mesh
    assert mesh[NAMES] is mesh
    assert mesh["dp"]["dp"] == mesh["dp", "tp"]["dp"] == mesh["dp"]


@st.composite
def grids(draw):
    shape = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    owners = np.array(draw(st.permutations(range(math.prod(shape))))).reshape(shape)
    axes = draw(st.permutations(range(len(shape))))[: draw(st.integers(1, len(shape)))]
    return owners, axes


@given(grids())
def test_slices_partition_the_mesh_and_are_equal_within(case):
    owners, axes = case
    names = [f"a{axis}" for axis in range(owners.ndim)]
    devices = [f"/job:w/task:{owner}/device:CPU:0" for owner in owners.ravel()]
    slices = {}
    for index, owner in enumerate(owners.ravel().tolist()):
        mesh = Mesh(
            names, np.arange(owners.size).reshape(owners.shape), [index], devices[index : index + 1], "", devices
        )
        part = mesh[[names[axis] for axis in axes]]
        place = np.argwhere(owners == owner)[0]
        assert part.get_coordinate() == tuple(place[axis] for axis in axes)
        rest = tuple(slice(None) if axis in axes else place[axis] for axis in range(owners.ndim))
        order = [sorted(axes).index(axis) for axis in axes]
        assert np.array_equal(part.mesh.numpy(), owners[rest].transpose(order))
        slices.setdefault(part, set()).add(owner)
    for part, owners_that_see_it in slices.items():
        assert owners_that_see_it == set(part.clients)
    assert sum(part.size() for part in slices) == owners.size


def test_slices_of_equal_meshes_are_equal(seen_by):
    slices = [seen_by(client, GRID, NAMES)["dp", "tp"] for client in range(8)]
    assert [a == b for a, b in itertools.combinations(slices, 2)].count(True) == 12
    assert len(set(slices)) == 2
    assert slices[0] == seen_by(1, [[0, 1], [4, 5]], ["dp", "tp"])
    assert slices[0] != seen_by(0, GRID, NAMES, "job")["dp", "tp"]


def test_several_local_devices(seen_by):
    owners = [[0, 0], [1, 1]]
    mesh = seen_by(1, owners, ["across", "within"])
    assert mesh["within"].local_device_ids() == [0, 1]
    assert mesh["within"].clients == (1,)
    assert mesh["within", "across"].local_device_ids() == [1, 3]
    assert mesh["within", "across"].mesh.tolist() == [[0, 1], [2, 3]]
    with pytest.raises(MeshError, match=r"got 2 local devices in 2 slices along \['across'\], expected .*exactly one"):
        mesh["across"]
    assert mesh.clients_along("across") == (0, 1)
    assert mesh.clients_along("within") == (1,)
    with pytest.raises(MeshError, match="see 2 sets of clients along axis 'x'"):
        seen_by(0, [[0, 1], [0, 2], [1, 2]], ["y", "x"]).clients_along("x")


def test_a_client_without_devices(seen_by):
    mesh = seen_by(9, GRID, NAMES)
    assert mesh.get_coordinate() is None
    for refused in (lambda: mesh["dp"], lambda: mesh.get_group("dp"), lambda: mesh.get_local_rank("dp")):
        with pytest.raises(MeshError, match=r"got .*expected"):
            refused()
    assert mesh["tp", "cp", "dp"].get_coordinate() is None
    assert mesh.flatten() == seen_by(0, GRID, NAMES).flatten()


def test_flatten(seen_by):
    mesh = seen_by(5, GRID, NAMES)
    flat = mesh["dp", "tp"]._flatten()
    assert (flat.dim_names, flat.mesh.tolist(), flat.get_coordinate()) == (["dp_tp"], [0, 1, 4, 5], (3,))
    assert mesh["dp_tp"] == flat == mesh.flatten(("dp", "tp")) == mesh["dp", "tp"]["dp_tp"]
    assert mesh["dp_tp", "cp"].mesh.tolist() == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert mesh["dp_tp", "cp"].flatten(name="all").mesh.tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    assert mesh["all"].mesh.tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    assert mesh.get_local_rank("dp_tp") == 3
    assert mesh.clients_along("dp_tp") == (0, 1, 4, 5)
    backwards = mesh.flatten(("tp", "dp"), "back")
    assert backwards.mesh.tolist() == mesh["back"].mesh.tolist() == [0, 4, 1, 5]
    assert mesh["cp"].flatten() is mesh["cp"]
    assert mesh["cp"].flatten(name="other").dim_names == ["other"]
    assert mesh["other"].mesh.tolist() == mesh["cp"].mesh.tolist()


def test_names_of_flattened_axes_mean_one_thing(seen_by):
    mesh = seen_by(5, GRID, NAMES)
    mesh.flatten(("dp", "cp"), "fsdp")
    assert mesh["cp", "dp", "tp"].flatten(("dp", "cp"), "fsdp").size() == 4
    for axes, name in ((("cp", "dp"), "fsdp"), (("dp", "tp"), "fsdp"), (("dp", "tp"), "cp"), (("cp",), "dp")):
        with pytest.raises(MeshError, match=rf"got {name!r} as name for axes .*expected another"):
            mesh.flatten(axes, name)
    with pytest.raises(MeshError, match="expected another than the reserved"):
        mesh.flatten(name="any")
    assert "any" not in mesh.origins
    with pytest.raises(MeshError, match=r"got axis 'fsdp', expected one of \['tp'\]"):
        mesh["tp"]["fsdp"]
    with pytest.raises(MeshError, match="each once"):
        mesh["fsdp", "dp"]
    assert pickle.loads(pickle.dumps(mesh["fsdp"])) == mesh["fsdp"]


@pytest.mark.parametrize("names", ["x", ("dp", "x"), (), ("dp", "dp"), "dp_tp", ""])
def test_refused_names(seen_by, names):
    with pytest.raises(MeshError, match=r"mesh '' \(dp=2,cp=2,tp=2\): got .*expected"):
        seen_by(5, GRID, NAMES)[names]


@pytest.mark.parametrize("names", [0, None, (0, 1), b"dp"])
def test_names_of_wrong_types(seen_by, names):
    with pytest.raises(MeshTypeError, match=r"got .*expected"):
        seen_by(5, GRID, NAMES)[names]


def test_meshes_without_a_grid_have_no_slices():
    for mesh in (Mesh.empty(), Mesh.from_device("CPU:0")):
        with pytest.raises(MeshError, match="got axis 'x'"):
            mesh["x"]


def test_one_client_that_owns_all():
    mesh = abstract_mesh({"x": 2, "y": 2})
    with pytest.raises(MeshError, match="4 local devices in 2 slices"):
        mesh["x"]
    assert mesh["y", "x"].local_devices() == [mesh.local_devices()[index] for index in (0, 1, 2, 3)]
    assert mesh["y", "x"].local_device_ids() == [0, 2, 1, 3]
    assert mesh["y", "x"]["x", "y"] == mesh.portable()
    assert mesh.flatten().size() == 4


def test_slices_of_a_mesh_that_names_its_own_devices_only(monkeypatch):
    slices = []
    for client in range(4):
        monkeypatch.setenv("DTENSOR_CLIENT_ID", str(client))
        monkeypatch.setenv("DTENSOR_NUM_CLIENTS", "4")
        mesh = create_distributed_mesh({"dp": 2, "tp": 2})
        assert mesh.get_rank() == client
        slices.append(mesh["tp"])
    assert slices[0] == slices[1] != slices[2] == slices[3]
    assert slices[3].clients == (2, 3)


def test_ranks_and_ids(seen_by):
    assert seen_by(5, [[5, 3]], ["a", "b"]).mesh.tolist() == [[5, 3]]
    assert seen_by(5, [[5, 5], [3, 3]], ["a", "b"]).mesh.tolist() == [[0, 1], [2, 3]]


def test_large_meshes_are_cheap(seen_by):
    mesh = seen_by(77, np.arange(16384).reshape(16, 8, 128), NAMES)
    started = time.process_time()
    assert mesh["dp", "tp"].size() == 2048
    assert mesh.flatten(("dp", "cp")).size() == 128
    assert mesh["dp"] is mesh["dp"]
    assert time.process_time() - started < 2
