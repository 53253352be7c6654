"""State trees: structure, plain values, stateful objects; what a target asks for and what it gets."""

import math
from types import MappingProxyType

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

VALUES = {
    "none": None,
    "yes": True,
    "int": 2**70,
    "float": 0.1,
    "nan": math.nan,
    "-inf": -math.inf,
    "text": "é\ud800\0",
    "bytes": b"\0\xff",
    "empty": {"list": [], "tuple": (), "dict": {}},
    3: [1, (2.0, {"deep": "x"})],
}


def saved(tmp_path, tree):
    dtckpt.save(tmp_path / "s", tree)
    return tmp_path / "s"


def test_values_come_back_as_they_were(tmp_path):
    back = dtckpt.restore(saved(tmp_path, VALUES))
    assert math.isnan(back.pop("nan"))
    assert back == {key: value for key, value in VALUES.items() if key != "nan"}
    assert list(back) == [key for key in VALUES if key != "nan"]
    assert type(back["yes"]) is bool
    assert type(back[3][1]) is tuple
    with dtckpt.open_checkpoint(tmp_path / "s") as checkpoint:
        assert checkpoint.values["3/1/1/deep"] == "x"


@pytest.mark.parametrize("tree", [5, None, "x", [], {}, (), [1, 2], {"a": {}}, torch.ones(3), [torch.ones(2)]])
def test_any_root_will_do(tmp_path, tree):
    path = saved(tmp_path, tree)
    back = dtckpt.restore(path)
    if isinstance(tree, torch.Tensor):
        assert back.equal(tree)
        target = torch.zeros(3)
        assert dtckpt.restore(path, target) is target
        assert target.equal(tree)
    elif isinstance(tree, list) and tree and isinstance(tree[0], torch.Tensor):
        assert back[0].equal(tree[0])
    else:
        assert back == tree
        assert type(back) is type(tree)


@pytest.mark.parametrize("tree", [5, "x", [1, 2], (1, (2,)), {"a": {"b": 1}}])
def test_plain_values_of_a_target_are_replaced(tmp_path, tree):
    def blank(node):
        if isinstance(node, dict):
            return {key: blank(child) for key, child in node.items()}
        if isinstance(node, list | tuple):
            return type(node)(map(blank, node))
        return 0

    assert dtckpt.restore(saved(tmp_path, tree), blank(tree)) == tree


def test_containers_of_a_target_stay_the_same_objects(tmp_path):
    path = saved(tmp_path, {"a": [1, {"b": 2}], "t": (3, [4])})
    inner, listed = {"b": 0}, [0]
    target = {"a": [0, inner], "t": (0, listed)}
    assert dtckpt.restore(path, target) is target
    assert target == {"a": [1, {"b": 2}], "t": (3, [4])}
    assert target["a"][1] is inner
    assert target["t"][1] is listed


def test_a_read_only_mapping_is_returned_anew(tmp_path):
    path = saved(tmp_path, {"a": 1, "w": torch.ones(2)})
    weight = torch.zeros(2)
    back = dtckpt.restore(path, MappingProxyType({"a": 0, "w": weight}))
    assert back["a"] == 1
    assert back["w"] is weight
    assert weight.tolist() == [1, 1]


def test_a_plain_value_may_stand_for_a_subtree(tmp_path):
    path = saved(tmp_path, {"config": {"lr": 0.1, "sizes": [1, 2], "t": torch.ones(2)}, "n": None})
    back = dtckpt.restore(path, {"config": None, "n": 5})
    assert back["config"]["lr"] == 0.1
    assert back["config"]["sizes"] == [1, 2]
    assert back["config"]["t"].tolist() == [1, 1]
    assert back["n"] is None


class Counter:
    def __init__(self):
        self.count, self.loads = 0, 0

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]
        self.loads += 1


def test_stateful_objects_give_and_take_their_state(tmp_path):
    counter = Counter()
    counter.count = 7
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    path = saved(tmp_path, {"counter": counter, "model": model, "list": [counter]})
    other, fresh = Counter(), torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    target = {"counter": other, "model": fresh, "list": [Counter()]}
    dtckpt.restore(path, target)
    assert (target["counter"], target["model"]) == (other, fresh)
    assert (other.count, other.loads, target["list"][0].count) == (7, 1, 7)
    for name, tensor in model.state_dict().items():
        assert fresh.state_dict()[name].equal(tensor), name
    with dtckpt.open_checkpoint(path) as checkpoint:
        assert "model/0.weight" in checkpoint.tensors


def test_an_optimizer_that_has_no_state_yet(tmp_path):
    def trained(steps):
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
        return model, optimizer

    model, optimizer = trained(3)
    path = saved(tmp_path, {"model": model, "optimizer": optimizer})
    fresh_model, fresh = trained(0)
    dtckpt.restore(path, {"model": fresh_model, "optimizer": fresh})
    want, have = optimizer.state_dict(), fresh.state_dict()
    assert have["param_groups"] == want["param_groups"]
    for key, state in want["state"].items():
        for name, tensor in state.items():
            assert have["state"][key][name].equal(tensor), (key, name)


@pytest.mark.parametrize(
    ("tree", "reason"),
    [
        ({"a": {1, 2}}, "cannot save set at 'a'"),
        ({"w": torch.ones(2), 1.5: 1}, "keys must be str or int"),
    ],
)
def test_what_cannot_be_saved(tmp_path, tree, reason):
    with pytest.raises(TreeError, match=reason):
        dtckpt.save(tmp_path / "s", tree)
    assert list(tmp_path.iterdir()) == []


def test_a_tree_that_contains_itself(tmp_path):
    for tree in ({}, []):
        tree.update(again=tree) if isinstance(tree, dict) else tree.append(tree)
        with pytest.raises(TreeError, match="deeper than 64 levels"):
            dtckpt.save(tmp_path / "s", tree)
    assert list(tmp_path.iterdir()) == []


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
        ("x", LayoutTypeError, "'w' must be a Layout; got str"),
        (lambda name, info: "x", LayoutTypeError, "'w' must be a Layout; got str"),
        (Layout(["x", "match"], abstract_mesh({"x": 2})), LayoutError, "match"),
        (Layout(["unsharded"] * 2, abstract_mesh({"x": 2}), {"x": "sum"}), LayoutError, "pending reductions"),
    ],
)
def test_layouts_that_do_not_fit(tmp_path, choice, error, reason):
    path = saved(tmp_path, {"w": torch.ones(4, 3)})
    with pytest.raises(error, match=reason):
        dtckpt.restore(path, layouts={"w": choice})
