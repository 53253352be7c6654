"""State trees: structure, plain values, stateful objects; the values that a target asks for, and gets."""

import io
import math
import tempfile
from collections import Counter as CounterDict
from collections import OrderedDict, UserDict, defaultdict, deque
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.shares import examples
from support.states import tensor_of
from torch._subclasses import FakeTensorMode
from torch.distributed._functional_collectives import AsyncCollectiveTensor

import dtckpt
from dtckpt import RestoreOptions
from dtckpt.errors import (
    DTypeError,
    ShapeMismatchError,
    TensorNotFoundError,
    TreeError,
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


def test_streams_come_back_with_their_position(tmp_path):
    stream = io.BytesIO(b"abc")
    stream.seek(1)
    back = dtckpt.restore(saved(tmp_path, {"stream": stream}))["stream"]
    assert (back.read(), back.getvalue(), stream.tell()) == (b"bc", b"abc", 1)
    with pytest.raises(TreeError, match="as a key or in a set"):
        dtckpt.save(tmp_path / "other", {io.BytesIO(): 1})


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


CONTAINERS = {
    "ordered": OrderedDict(b=torch.ones(2), a=1),
    "default": defaultdict(list, {1: [torch.ones(1)]}),
    "counter": CounterDict({30: 1, 80: 2}),
    "proxy": MappingProxyType({"a": torch.zeros(2)}),
    "deque": deque([torch.ones(1), 2.5], maxlen=3),
    "namespace": SimpleNamespace(w=torch.ones(3), n=None),
    "sets": [{1, "a", None}, frozenset([(1, 2)])],
    "numbers": [1j, complex(math.inf, -0.0), -0.0, range(3, 0, -1), np.float64(0.1), np.int64(7), np.bool_(True)],
    "size": torch.ones(2, 3).shape,
    "keys": {1: "int", "a": "str", None: "none", 2.5: "float", (1, "x"): "tuple", b"k": "bytes"},
}


def text_of(value):
    """Return a container's text without its sets, whose order differs; they are compared as sets."""
    sets = value["sets"] if isinstance(value, dict) and "sets" in value else []
    return repr({**value, "sets": None} if sets else value), sets


def test_containers_keep_their_types(tmp_path):
    back = dtckpt.restore(saved(tmp_path, CONTAINERS))
    assert text_of(back) == text_of(CONTAINERS)
    types = [type(value) for value in (*CONTAINERS.values(), *CONTAINERS["sets"], *CONTAINERS["numbers"])]
    assert [type(value) for value in (*back.values(), *back["sets"], *back["numbers"])] == types
    back["default"]["new"].append(1)
    assert (list(back["ordered"]), back["default"]["new"], back["deque"].maxlen) == (["b", "a"], [1], 3)


leaves = st.integers() | st.floats(allow_nan=False) | st.sampled_from(["float32", "int8", "bool"])


@settings(max_examples=examples(25), deadline=None)
@given(
    st.recursive(
        leaves,
        lambda below: (
            st.lists(below, max_size=3)
            | st.dictionaries(st.sampled_from(["a", 1, (2, 3), None]), below, max_size=3).map(OrderedDict)
            | st.lists(below, max_size=3).map(lambda items: deque(items, 4))
            | below.map(lambda item: SimpleNamespace(x=item))
        ),
        max_leaves=6,
    ),
)
def test_what_comes_back_is_what_went_in(tree):
    def with_tensors(node):
        if isinstance(node, str):
            return tensor_of(node, (2,), node)
        if isinstance(node, dict):
            return OrderedDict((key, with_tensors(child)) for key, child in node.items())
        if isinstance(node, SimpleNamespace):
            return SimpleNamespace(x=with_tensors(node.x))
        return type(node)(map(with_tensors, node), *[4] * isinstance(node, deque)) if hasattr(node, "append") else node

    tree = with_tensors(tree)
    with tempfile.TemporaryDirectory() as folder:
        back = dtckpt.restore(saved(Path(folder), tree))
    assert repr(back) == repr(tree)


def test_a_scheduler_goes_on_after_a_restore_without_a_target(tmp_path):
    """Its milestones are a `collections.Counter`, and it asks them for their elements()."""

    def scheduler():
        optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=1.0)
        return optimizer, torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[1, 3])

    path = saved(tmp_path, scheduler()[1])
    optimizer, other = scheduler()
    other.load_state_dict(dtckpt.restore(path))
    assert sorted(other.milestones.elements()) == [1, 3]
    for _ in range(3):
        optimizer.step()
        other.step()
    assert other.get_last_lr() == [pytest.approx(0.01)]


class Point(NamedTuple):
    x: Any
    y: Any


class Moved(NamedTuple):
    y: Any
    x: Any


@dataclass(frozen=True, slots=True)
class Moments:
    mean: Any
    count: int = 0


def test_without_a_target_classes_of_their_own_have_stand_ins(tmp_path):
    back = dtckpt.restore(saved(tmp_path, {"p": Point(torch.ones(2), 1), "m": Moments(torch.ones(1), 5)}))
    assert (type(back["p"]).__name__, back["p"]._fields, back["p"].y, back["p"].x.tolist()) == (
        "Point",
        ("x", "y"),
        1,
        [1, 1],
    )
    assert (type(back["m"]), back["m"].count, back["m"].mean.tolist()) == (SimpleNamespace, 5, [1])


def test_a_target_keeps_its_classes_and_takes_fields_by_name(tmp_path):
    path = saved(tmp_path, {"p": Point(torch.ones(2), 1), "m": Moments(torch.ones(1), 5), "c": CONTAINERS["ordered"]})
    mean, x, moments = torch.zeros(1), torch.zeros(2), Moments(torch.zeros(1), 0)
    target = {"p": Moved(0, x), "m": moments, "c": UserDict(b=torch.zeros(2), a=0)}
    back = dtckpt.restore(path, target)
    assert type(back["p"]) is Moved
    assert (back["p"].y, back["p"].x) == (1, x)
    assert x.tolist() == [1, 1]
    assert back["m"] is moments
    assert (moments.count, moments.mean.tolist()) == (5, [1])
    assert (type(back["c"]), back["c"]["a"], back["c"]["b"].tolist()) == (UserDict, 1, [1, 1])
    with pytest.raises(TensorNotFoundError, match="has a namedtuple at 'p'; the target wants a tensor"):
        dtckpt.restore(path, {"p": mean, "m": 0, "c": 0})
    with pytest.raises(TensorNotFoundError, match="nothing at 'm/other'"):
        dtckpt.restore(path, {"p": 0, "m": SimpleNamespace(mean=mean, count=0, other=1), "c": 0})


def test_named_tuples_that_were_saved_as_tuples(tmp_path):
    x = torch.zeros(2)
    back = dtckpt.restore(saved(tmp_path, {"p": (torch.ones(2), 1)}), {"p": Point(x, 0)})
    assert back["p"] == Point(x, 1)
    assert x.tolist() == [1, 1]


def test_containers_of_a_target_are_filled(tmp_path):
    path = saved(tmp_path, CONTAINERS)
    target = {
        "ordered": OrderedDict(a=0, b=torch.zeros(2)),
        "default": defaultdict(dict, {1: [torch.zeros(1)]}),
        "counter": CounterDict(),
        "proxy": MappingProxyType({"a": torch.ones(2)}),
        "deque": deque(maxlen=5),
        "namespace": SimpleNamespace(w=torch.zeros(3), n=0),
        "sets": [],
        "numbers": None,
        "size": None,
        "keys": dict.fromkeys(CONTAINERS["keys"]),
    }
    before = dict(target)
    dtckpt.restore(path, target)
    kept = "ordered", "default", "counter", "deque", "namespace", "sets", "keys"
    assert all(target[name] is before[name] for name in kept)
    assert list(target["ordered"]) == ["a", "b"]
    assert target["default"].default_factory is dict
    assert target["deque"].maxlen == 5
    for name in ("counter", "proxy", "namespace", "sets", "numbers", "size", "keys"):
        assert text_of({name: target[name]}) == text_of({name: CONTAINERS[name]}), name
        assert type(target[name]) is type(CONTAINERS[name]), name
    assert list(target["deque"]) == list(CONTAINERS["deque"])


@pytest.mark.parametrize(
    ("target", "error", "reason"),
    [
        ({"d": deque(maxlen=2)}, ShapeMismatchError, "deque at 'd' is too short; got maxlen 2"),
        ({"d": np.ma.ones(2)}, TreeError, r"cannot restore into MaskedArray at 'd': .*; pass numpy.asarray\(…\) of it"),
        ({"d": torch.ones(2).max(0)}, TreeError, "cannot restore into max at 'd'"),
    ],
)
def test_targets_that_cannot_be_filled(tmp_path, target, error, reason):
    path = saved(tmp_path, {"d": deque([1, 2, 3])})
    before = repr(target)
    with pytest.raises(error, match=reason):
        dtckpt.restore(path, target)
    assert repr(target) == before


class Named(torch.Tensor):
    """A subclass that is its memory."""


def test_tensors_are_their_values_shape_and_dtype(tmp_path):
    weight = torch.arange(6.0).reshape(1, 2, 3, 1)
    tree = {
        "parameter": torch.nn.Parameter(weight),
        "buffer": torch.nn.Buffer(weight),
        "subclass": weight.as_subclass(Named),
        "channels_last": weight.to(memory_format=torch.channels_last),
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "negative": torch.tensor([1 + 2j]).conj().imag,
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "expanded": torch.ones(1).expand(3),
        "again": weight,
    }
    back = dtckpt.restore(saved(tmp_path, tree))
    for name, tensor in tree.items():
        made = back[name]
        assert (made.dtype, made.shape) == (tensor.dtype, tensor.shape), name
        assert made.equal(tensor.detach()), name
        assert (type(made), made.requires_grad, made.is_contiguous(), made.is_conj()) == (
            torch.Tensor,
            False,
            True,
            False,
        )
    del tree["expanded"]
    target = {name: tensor.detach().clone() if name == "again" else tensor for name, tensor in tree.items()}
    assert dtckpt.restore(saved(tmp_path / "two", tree), target)["parameter"] is tree["parameter"]


def test_results_of_collectives_are_waited_for(tmp_path):
    pending = AsyncCollectiveTensor(torch.ones(2))
    assert dtckpt.restore(saved(tmp_path, {"a": pending}))["a"].tolist() == [1, 1]


def fake():
    with FakeTensorMode():
        return torch.ones(2)


class Computed(torch.Tensor):
    """A subclass that computes its elements, and that cannot be taken apart."""

    def __new__(cls, hidden):
        return torch.Tensor._make_wrapper_subclass(cls, hidden.shape)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return Computed(torch.ones(2)) if func is torch.ops.aten.detach.default else NotImplemented


ODD = {
    "fake": (fake, "got FakeTensor; leave FakeTensorMode"),
    "subclass": (lambda: Computed(torch.ones(2)), "got Computed, a subclass .* the tensors that it is"),
    "parameter": (lambda: torch.nn.Parameter(Computed(torch.ones(2))), "got Computed, a subclass"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2)]), r"nested; pass the tensors of its unbind\(\)"),
    "jagged": (lambda: torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged), "nested; pass"),
    "lazy": (torch.nn.parameter.UninitializedParameter, "without a shape; run the module once"),
    "lazy buffer": (torch.nn.parameter.UninitializedBuffer, "without a shape; run the module once"),
    "sparse": (lambda: torch.ones(2).to_sparse(), r"torch.sparse_coo; pass its to_dense\(\)"),
    "meta": (lambda: torch.ones(2, device="meta"), "on meta; give it elements first"),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@pytest.mark.parametrize(("make", "reason"), ODD.values(), ids=ODD)
def test_tensors_that_are_not_their_own_memory(tmp_path, make, reason):
    path = saved(tmp_path, {"a": torch.ones(2)})
    for call in (
        lambda: dtckpt.save(tmp_path / "t", {"a": make()}),
        lambda: dtckpt.save_async(tmp_path / "t", {"a": make()}),
        lambda: dtckpt.restore(path, {"a": make()}),
    )[: 2 if make is ODD["meta"][0] else 3]:  # a restore gives a meta tensor memory
        with pytest.raises(DTypeError, match=f"tensor 'a': only dense tensors with data can be stored; .*{reason}"):
            call()
    assert not (tmp_path / "t").exists()


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vmap, torch.func.functionalize])
def test_tensors_inside_of_a_transform(tmp_path, transform):
    path = saved(tmp_path, {"a": torch.ones(2)})

    def body(x):
        for call in (lambda: dtckpt.save(tmp_path / "t", {"a": x}), lambda: dtckpt.restore(path, {"a": x})):
            with pytest.raises(DTypeError, match="stands for another one; leave torch"):
                call()
        return x.sum()

    transform(body)(torch.ones(2, 2))


def test_nothing_is_saved_or_restored_in_fake_mode(tmp_path):
    weight = torch.ones(2)
    path = saved(tmp_path, {"a": weight})
    with FakeTensorMode():
        for call in (
            lambda: dtckpt.save(tmp_path / "t", {"a": weight}),
            lambda: dtckpt.restore(path),
            lambda: dtckpt.restore(path, {"a": weight}),
        ):
            with pytest.raises(DTypeError, match="inside of FakeTensorMode; leave it first"):
                call()


@pytest.mark.parametrize("dtype", ["float8_e8m0fnu", "float4_e2m1fn_x2", "complex32"])
def test_dtypes_that_are_never_converted(tmp_path, dtype):
    whole = tensor_of("w", (4, 3), dtype)
    path = saved(tmp_path, {"w": whole})
    for other in (torch.float32, torch.uint8, torch.complex64):
        with pytest.raises(
            DTypeError, match=f"'w' cannot be converted; got .*, saved as {dtype}; restore it as {dtype}"
        ):
            dtckpt.restore(path, {"w": torch.zeros(4, 3, dtype=other)}, options=RestoreOptions(cast="any"))
        with dtckpt.open_checkpoint(path) as checkpoint, pytest.raises(DTypeError, match=f"of dtype {dtype} is not"):
            checkpoint.read_into("w", dtckpt.Region.full((4, 3)), np.zeros((4, 3), np.float64))
    with dtckpt.open_checkpoint(saved(tmp_path / "f", {"w": torch.ones(4, 3)})) as checkpoint:
        target = {"w": whole.clone()}
    with pytest.raises(DTypeError, match="'w' cannot be converted"):
        dtckpt.restore(checkpoint.path, target, options=RestoreOptions(cast="any"))


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


def test_a_stateful_root(tmp_path):
    model, other = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    path = saved(tmp_path, model)
    assert list(dtckpt.restore(path)) == ["weight", "bias"]
    with dtckpt.open_checkpoint(path) as checkpoint:
        assert sorted(checkpoint.tensors) == ["bias", "weight"]
    assert dtckpt.restore(path, other) is other
    assert other.weight.equal(model.weight)
    with pytest.raises(TreeError, match="cannot save type at 'class'"):
        dtckpt.save(tmp_path / "t", {"class": torch.nn.Linear})


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
        ({"a": {1, torch.ones(2)}}, "cannot save Tensor as a key or in a set at 'a'"),
        (
            {"w": torch.ones(2), "n": np.ma.ones(2)},
            r"cannot save MaskedArray at 'n': .*; pass numpy.asarray\(…\) of it",
        ),
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
