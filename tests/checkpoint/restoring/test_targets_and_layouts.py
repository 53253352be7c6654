"""What a target asks for and a checkpoint lacks, and layouts by name, pattern and function."""

import pytest
import torch

import dtckpt
from dtckpt import Layout, RestoreOptions, abstract_mesh
from dtckpt.errors import (
    DTypeError,
    LayoutError,
    LayoutTypeError,
    ShapeMismatchError,
    TensorNotFoundError,
    TreeError,
    UnexpectedTensorError,
)


def saved(tmp_path, tree):
    dtckpt.save(tmp_path / "s", tree)
    return tmp_path / "s"


SAVED = {"w": torch.ones(4, 3), "n": {"step": 5}, "l": [1, 2]}


def target_with(**changes):
    return {"w": torch.zeros(4, 3), "n": {"step": 0}, "l": [0, 0]} | changes


MISFITS = {
    "missing tensor": (target_with(v=torch.zeros(2)), TensorNotFoundError, "has nothing at 'v'; .*allow_missing"),
    "missing value": (target_with(n={"step": 0, "lr": 1.0}), TensorNotFoundError, "has nothing at 'n/lr'"),
    "extra tensor": ({"n": {"step": 0}, "l": [0, 0]}, UnexpectedTensorError, "does not ask for: 'w'; .*unexpected"),
    "extra value": ({"w": torch.zeros(4, 3), "l": [0, 0]}, UnexpectedTensorError, "'n/step'"),
    "shape": (target_with(w=torch.zeros(3, 4)), ShapeMismatchError, r"'w'.*got \(3, 4\) .*expected \(4, 3\)"),
    "rank": (target_with(w=torch.zeros(12)), ShapeMismatchError, r"got \(12,\)"),
    "narrower dtype": (
        target_with(w=torch.zeros(4, 3).half()),
        DTypeError,
        "got float16 .*saved as float32.*cast='any'",
    ),
    "length": (target_with(l=[0]), ShapeMismatchError, "'l' has another length; got 1 .*expected 2"),
    "value for a tensor": (target_with(n=torch.zeros(2)), TensorNotFoundError, "has a dict at 'n'; .* a tensor"),
    "sequence for a dict": (target_with(n=[1]), TensorNotFoundError, "has a dict at 'n'"),
    "dict for a sequence": (target_with(l={}), TensorNotFoundError, "has a list at 'l'"),
}


@pytest.mark.parametrize(("target", "error", "reason"), MISFITS.values(), ids=MISFITS)
def test_a_target_that_does_not_fit_stays_as_it_is(tmp_path, target, error, reason):
    path = saved(tmp_path, SAVED)
    before = repr(target)
    with pytest.raises(error, match=reason):
        dtckpt.restore(path, target)
    assert repr(target) == before


def test_consent_to_what_does_not_fit(tmp_path):
    path = saved(tmp_path, SAVED)
    more = target_with(v=torch.zeros(2), x=9)
    dtckpt.restore(path, more, options=RestoreOptions(allow_missing=True))
    assert more["w"].equal(SAVED["w"])
    assert (more["v"].tolist(), more["x"], more["n"]) == ([0, 0], 9, {"step": 5})
    less = {"n": {"step": 0}}
    assert dtckpt.restore(path, less, options=RestoreOptions(allow_unexpected=True)) == {"n": {"step": 5}}
    half = target_with(w=torch.zeros(4, 3).half())
    dtckpt.restore(path, half, options=RestoreOptions(cast="any"))
    assert half["w"].equal(torch.ones(4, 3).half())
    double = target_with(w=torch.zeros(4, 3).double())
    dtckpt.restore(path, double)
    assert double["w"].equal(torch.ones(4, 3).double())
    with pytest.raises(DTypeError, match="conversions allowed now: exact"):
        dtckpt.restore(path, target_with(w=torch.zeros(4, 3).double()), options=RestoreOptions(cast="exact"))


def test_memory_that_overlaps_itself_cannot_be_filled(tmp_path):
    path = saved(tmp_path, {"w": torch.arange(3)})
    with pytest.raises(LayoutError, match=r"'w'.*overlap"):
        dtckpt.restore(path, {"w": torch.zeros(1, dtype=torch.int64).expand(3)})


def test_target_or_mesh_but_not_both(tmp_path):
    path = saved(tmp_path, SAVED)
    with pytest.raises(TreeError, match="got both"):
        dtckpt.restore(path, target_with(), mesh=abstract_mesh({"x": 2}))


def test_layouts_by_name_glob_and_function(tmp_path):
    mesh = abstract_mesh({"x": 2, "y": 2})
    path = saved(tmp_path, {"a": {"w": torch.ones(4, 3), "b": torch.ones(4)}, "c": torch.ones(4, 2), "n": 1})
    rows, cols, vector = Layout(["x", "unsharded"], mesh), Layout(["unsharded", "y"], mesh), Layout(["y"], mesh)

    back = dtckpt.restore(path, layouts={"c": cols, "a/w": rows, "a/*": vector})
    assert (back["c"].layout, back["a"]["w"].layout, back["a"]["b"].layout, back["n"]) == (cols, rows, vector, 1)

    back = dtckpt.restore(path, layouts={"c": cols})
    assert back["c"].layout == cols
    assert type(back["a"]["w"]) is torch.Tensor

    back = dtckpt.restore(path, mesh=mesh, layouts=lambda name, info: rows if len(info.shape) == 2 else vector)
    assert (back["c"].layout, back["a"]["b"].layout) == (rows, vector)

    back = dtckpt.restore(
        path, layouts={"*": lambda name, info: Layout(["x"] + ["unsharded"] * (len(info.shape) - 1), mesh)}
    )
    assert back["c"].layout == rows
    assert all(tensor.full_tensor().eq(1).all() for tensor in (back["c"], back["a"]["w"], back["a"]["b"]))

    back = dtckpt.restore(path, mesh=mesh)
    assert back["c"].layout == Layout.replicated(mesh, 2)


def test_saved_specs_are_kept_as_far_as_the_mesh_has_the_axes(tmp_path):
    mesh = abstract_mesh({"x": 2, "y": 2})
    tensor = dtckpt.pack([torch.ones(2, 2)] * 4, Layout([("x", "y"), "unsharded"], mesh), (8, 2))
    path = saved(tmp_path, {"w": tensor})
    for axes, spec in (({"y": 3}, ("y",)), ({"y": 2, "x": 2}, ("x", "y")), ({"z": 2}, "unsharded")):
        other = abstract_mesh(axes)
        assert dtckpt.restore(path, mesh=other)["w"].layout == Layout([spec, "unsharded"], other)


@pytest.mark.parametrize(
    ("choice", "error", "reason"),
    [
        (Layout(["x"], abstract_mesh({"x": 2})), LayoutError, "'w' does not fit; got rank 1, expected 2 dims"),
        ("x", LayoutTypeError, "'w' must be a Layout or placements; got str"),
        (lambda name, info: "x", LayoutTypeError, "'w' must be a Layout or placements; got str"),
        (Layout(["x", "match"], abstract_mesh({"x": 2})), LayoutError, "match"),
        (Layout(["unsharded"] * 2, abstract_mesh({"x": 2}), {"x": "sum"}), LayoutError, "pending reductions"),
    ],
)
def test_layouts_that_do_not_fit(tmp_path, choice, error, reason):
    path = saved(tmp_path, {"w": torch.ones(4, 3)})
    with pytest.raises(error, match=reason):
        dtckpt.restore(path, layouts={"w": choice})
