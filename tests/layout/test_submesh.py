"""Cutting axes in several, putting parts of a mesh together, meshes as context managers, and pickling."""

import copy
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtckpt import Layout, abstract_mesh, run_on
from dtckpt.errors import MeshError, MeshTypeError
from dtckpt.layout.mesh import Mesh, get_default_mesh

GRID = np.arange(8).reshape(2, 2, 2)
NAMES = ["dp", "cp", "tp"]


def test_an_axis_is_cut_in_several(seen_by):
    line = seen_by(5, np.arange(8), ["world"])
    mesh = line._unflatten("world", (2, 2, 2), NAMES)
    assert (
        mesh == seen_by(5, GRID, NAMES) == line._unflatten(-1, [2, 4], ("dp", "x"))._unflatten("x", (2, 2), NAMES[1:])
    )
    assert mesh["tp"] == seen_by(5, GRID, NAMES)["tp"]
    assert mesh.get_coordinate() == (1, 0, 1)


@pytest.mark.parametrize(
    ("dim", "sizes", "names", "text"),
    [
        (1, (2, 2), ("a", "b"), "got axis 1, expected one of"),
        ("x", (2, 2), ("a", "b"), "got axis 'x', expected one of"),
        (0, (2, 2), ("a", "b"), "expected one name per size, and sizes whose product is 8"),
        (0, (2, 4), ("a",), "expected one name per size"),
        (0, (2, 4), ("a", "a"), "expected each name once"),
        (0, (-2, -4), ("a", "b"), "expected their product"),
        (0, (2.0, 4), ("a", "b"), "expected a sequence of integers"),
    ],
)
def test_cuts_that_do_not_fit(seen_by, dim, sizes, names, text):
    with pytest.raises(MeshError, match=text):
        seen_by(5, np.arange(8), ["world"])._unflatten(dim, sizes, names)


@given(st.permutations(NAMES), st.integers(1, 2), st.integers(0, 7))
def test_parts_are_put_together(order, cut, client):
    names = [f"/job:w/task:{owner}/device:CPU:0" for owner in range(8)]
    mesh = Mesh(NAMES, GRID, [client], [names[client]], "", names)
    assert Mesh._concatenate([mesh[order[:cut]], mesh[order[cut:]]]) == mesh[order]
    assert Mesh._concatenate([mesh[axis] for axis in order[:cut]]) == mesh[order[:cut]]


def test_parts_that_were_cut_and_flattened(seen_by):
    line = seen_by(5, np.arange(8), ["world"])
    dense, sparse = line._unflatten(0, (2, 2, 2), NAMES), line._unflatten(0, (2, 4), ("ep", "rest"))
    assert Mesh._concatenate([sparse["ep"], dense["cp", "tp"]]).mesh.tolist() == GRID.tolist()
    assert Mesh._concatenate([dense["tp"], dense["dp", "cp"]._flatten()]).mesh.tolist() == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_parts_with_several_local_devices(seen_by):
    mesh = seen_by(1, [[0, 0], [1, 1]], ["across", "within"])
    assert Mesh._concatenate([mesh["within"]]) == mesh["within"]
    copies = abstract_mesh({"x": 2, "y": 2})
    assert Mesh._concatenate([copies["y", "x"]]) == copies["y", "x"]


def test_parts_that_do_not_fit_together(seen_by):
    mesh, line = seen_by(5, GRID, NAMES), seen_by(5, np.arange(8), ["world"])
    flat = mesh["dp", "cp"]._flatten()
    for parts in ([mesh["tp"], mesh["tp"]], [flat, mesh["dp"]], [mesh, mesh["cp"]]):
        with pytest.raises(MeshError, match="that overlap"):
            Mesh._concatenate(parts)
    for parts in ([mesh["tp"], line], []):
        with pytest.raises(MeshError, match="expected parts of one"):
            Mesh._concatenate(parts)
    with pytest.raises(MeshError, match="expected this client to have a device in them"):
        Mesh._concatenate([seen_by(9, GRID, NAMES)])


def test_a_mesh_is_the_default_of_its_block():
    outer, inner = abstract_mesh({"x": 2}), abstract_mesh({"y": 3})
    assert get_default_mesh() is None
    with outer as entered:
        assert entered is get_default_mesh() is outer
        with run_on(inner), outer, outer:
            assert get_default_mesh() is outer
        with pytest.raises(MeshTypeError), inner:
            run_on("inner").__enter__()
        assert get_default_mesh() is outer
    assert get_default_mesh() is None


def test_backends_of_axes(seen_by):
    mesh, options = seen_by(5, np.arange(8), ["world"]), object()
    cut = mesh._unflatten(0, (2, 4), ("a", "b"), {0: "gloo", "b": ("nccl", options)})
    assert cut.backends == {"a": ("gloo", None), "b": ("nccl", options)}
    assert (cut["b"].backends, mesh.backends) == (cut.backends, {})
    cut._flatten("ab", options)
    assert cut["ab"].backends["ab"] == (None, options)
    assert cut["b"]._flatten("b", "gloo") is cut["b"]
    assert Mesh._concatenate([cut["b"], cut["a"]]).backends == cut.backends
    for wrong in ({2: "gloo"}, {"c": "gloo"}, {0: "gloo", "a": "gloo"}, {-1: "gloo"}, ["gloo"] * 3):
        with pytest.raises(MeshError, match="expected names or positions of the axes"):
            mesh._unflatten(0, (2, 4), ("a", "b"), wrong)


def test_names_given_by_flattening_are_pickled(seen_by):
    mesh = seen_by(5, GRID, NAMES)
    mesh["dp", "cp"].flatten(name="fsdp")
    for again, part in (pickle.loads(pickle.dumps((mesh, mesh["tp"]))), copy.deepcopy((mesh, mesh["tp"]))):
        assert (again, part) == (mesh, mesh["tp"])
        assert again.local_devices() == mesh.local_devices()
        assert again["fsdp"] == mesh["fsdp"]
        again.flatten(("cp", "tp"), "sp")
        assert part.flatten(name="tp2").dim_names == ["tp2"]
        assert again["tp2"] == part["tp2"]
        with pytest.raises(MeshError):
            mesh["sp"]


def test_layouts_pickled_together_share_their_mesh(seen_by):
    mesh = seen_by(5, GRID, NAMES)
    layouts = [Layout(["dp", ("tp", "cp")], mesh), Layout([], mesh, {"tp": "sum"}), Layout(["dp"], mesh).to_parted()]
    layouts += [Layout.from_single_device_mesh(Mesh.from_device("/job:w/task:0/device:CPU:0"))]
    again = pickle.loads(pickle.dumps(layouts))
    assert again == layouts
    assert again[0].mesh is again[1].mesh
