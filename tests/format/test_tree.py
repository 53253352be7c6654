"""State trees: every kind of value comes back as it was, and what cannot be saved is refused."""

import contextlib
import datetime
import enum
import json
import math
import pathlib
from collections import Counter, OrderedDict, UserDict, defaultdict, deque, namedtuple
from dataclasses import dataclass, field
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing._internal.two_tensor import TwoTensor

from dtckpt import ClientValues, EnumMember, TensorParts
from dtckpt.errors import CheckpointCorruptError, CheckpointVersionError, TreeError
from dtckpt.format import plain_values
from dtckpt.format import tree as trees


class Leaf:
    """Stands for a tensor."""


def is_leaf(value):
    return isinstance(value, Leaf)


floats = st.floats(allow_nan=True, allow_infinity=True)
numpy_scalars = (
    st.sampled_from([np.bool_, np.int8, np.uint16, np.int64, np.uint64]).flatmap(
        lambda kind: st.integers(0, 1 if kind is np.bool_ else int(np.iinfo(kind).max)).map(kind)
    )
    | st.floats(width=16).map(np.float16)
    | st.floats(width=32).map(np.float32)
    | floats.map(np.float64)
    | st.complex_numbers(width=64).map(np.complex64)
    | st.complex_numbers().map(np.complex128)
)
ZONES = st.integers(-1439, 1439).map(lambda minutes: datetime.timezone(datetime.timedelta(minutes=minutes)))
hashable = (
    st.none()
    | st.booleans()
    | st.integers()
    | floats
    | st.text(st.characters(exclude_categories=()), max_size=8)
    | st.binary(max_size=8)
    | st.builds(complex, floats, floats)
    | st.builds(range, st.integers(), st.integers(), st.integers(1, 5))
    | st.lists(st.integers(0, 2**40), max_size=3).map(torch.Size)
    | numpy_scalars
    | st.sampled_from([torch.float32, torch.float8_e4m3fn, torch.complex32])
    | st.sampled_from(["cpu", "cuda", "cuda:3", "meta"]).map(torch.device)
    | st.text(max_size=8).map(pathlib.PurePosixPath)
    | st.sampled_from(["", "/", "//a", "a/../b", "a\udc80"]).map(pathlib.Path)
    | st.sampled_from(["C:/x", "y", "//host/share/z"]).map(pathlib.PureWindowsPath)
    | st.dates()
    | st.datetimes(timezones=st.none() | ZONES, allow_imaginary=False)
    | st.datetimes().map(lambda value: value.replace(fold=1))
    | st.timedeltas()
)
elements = hashable | st.tuples(hashable, hashable)
members = st.builds(EnumMember, st.text(max_size=4), st.text(max_size=4))
plain = hashable | members | st.sets(elements, max_size=4) | st.frozensets(elements, max_size=4)
keys = (
    st.text(st.characters(exclude_characters="/"), max_size=4)
    | st.integers(-5, 5)
    | st.sampled_from([None, True, 1.5, -math.inf, b"k", (1, "a"), (), 2j, np.int64(3), np.float32(0.1)])
)
fields = st.from_regex(r"[a-z]{1,4}", fullmatch=True).filter(str.isidentifier)
FACTORIES = (None, bool, bytes, complex, dict, float, frozenset, int, list, set, str, tuple)


def dicts(children, names=keys):
    return st.dictionaries(names, children, max_size=4).filter(
        lambda made: len({str(key) for key in made}) == len(made)
    )


state_trees = st.recursive(
    plain | st.builds(Leaf),
    lambda children: (
        st.lists(children, max_size=4)
        | st.lists(children, max_size=4).map(tuple)
        | dicts(children)
        | dicts(children).map(OrderedDict)
        | dicts(children).map(Counter)
        | dicts(children).map(MappingProxyType)
        | st.builds(defaultdict, st.sampled_from(FACTORIES), dicts(children))
        | dicts(children, fields).map(lambda made: SimpleNamespace(**made))
        | st.dictionaries(st.integers(0, 5), children, max_size=3).map(lambda made: ClientValues(made, 6))
        | st.builds(TensorParts, dicts(children, fields), fields, st.just(torch.Size([2])), plain | st.tuples(plain))
        | st.builds(deque, st.lists(children, max_size=4), st.none() | st.integers(0, 5))
    ),
    max_leaves=12,
)


def same(one, other):
    """Whether two trees are equal, and of the same types all the way down."""
    if type(one) is not type(other):
        return False
    if isinstance(one, SimpleNamespace):
        return same(vars(one), vars(other))
    if isinstance(one, dict | MappingProxyType):
        pairs = zip(one.items(), other.items(), strict=True)
        names = "default_factory", "num_clients", "kind", "shape", "context"
        facts = [tuple(getattr(item, name, None) for name in names) for item in (one, other)]
        return len(one) == len(other) and same(*facts) and all(same(a, b) for a, b in pairs)
    if isinstance(one, list | tuple | deque):
        if len(one) != len(other) or getattr(one, "maxlen", None) != getattr(other, "maxlen", None):
            return False
        return all(same(a, b) for a, b in zip(one, other, strict=True))
    if isinstance(one, set | frozenset):
        return sorted(map(repr, one)) == sorted(map(repr, other))
    # The texts of floats tell NaN from NaN, and zeros by sign.
    return one is other if isinstance(one, Leaf) else repr(one) == repr(other)


@given(state_trees)
def test_trees_come_back_as_they_were(tree):
    leaves, structure = trees.flatten(tree, is_leaf)
    data = trees.dump(structure)
    assert trees.dump(trees.load(data)) == data
    assert same(trees.build(trees.load(data), leaves.__getitem__), tree)


@given(state_trees)
def test_every_leaf_is_a_tensor_or_a_value(tree):
    leaves, structure = trees.flatten(tree, is_leaf)
    found = []

    def count(node):
        node = vars(node) if isinstance(node, SimpleNamespace) else node
        if isinstance(node, dict | MappingProxyType):
            for child in node.values():
                count(child)
        elif isinstance(node, list | deque) or type(node) is tuple:
            for child in node:
                count(child)
        else:
            found.append(node)

    count(tree)
    num_values = sum(1 for _ in trees.values(structure))
    assert len(leaves) == sum(map(is_leaf, found))
    assert num_values == len(found) - len(leaves)


def test_names_are_paths():
    leaf = Leaf()
    assert list(trees.flatten({"a": [leaf, {3: leaf}], "b": (leaf,)}, is_leaf)[0]) == ["a/0", "a/1/3", "b/0"]
    assert list(trees.flatten(leaf, is_leaf)[0]) == ["value"]


class Shout(str):
    __slots__ = ()


class Output(OrderedDict):
    """As the outputs of transformers' models are."""


class Wrapped(TwoTensor):
    """A tensor with a context."""

    def __init__(self, context):
        super().__init__(torch.ones(1), torch.ones(1))
        self.context = context

    def __new__(cls, _):
        return super().__new__(cls, torch.ones(1), torch.ones(1))

    def __tensor_flatten__(self):
        return [], self.context


class Rows(list):
    """A subclass of list."""


class Color(enum.IntEnum):
    RED = 1


class Access(enum.Flag):
    READ = 1
    WRITE = 2


class Loose(enum.IntFlag, boundary=enum.KEEP):
    A = 1


class Corner(namedtuple("Corner", "x y"), enum.Enum):
    LEFT = 0, 1


@dataclass
class Config(dict):
    width: int = 1


@pytest.mark.parametrize(
    ("value", "cure"),
    [
        (Shout("x"), r"pass str\(…\) of it"),
        (Output(a=1), r"pass dict\(…\) of it"),
        (Config(), r"pass dict\(…\) of it"),
        (UserDict(a=1), r"pass dict\(…\) of it"),
        (Rows([1]), r"pass list\(…\) of it"),
        (torch.ones(2).max(0), r"pass tuple\(…\) of it"),
        (np.str_("x"), r"pass its item\(\)"),
        (np.longdouble(1), r"pass its item\(\)"),
        (np.ones(2).view(np.matrix), r"pass numpy.asarray\(…\) of it"),
        (Loose.A | Loose(8), "it has no name; pass its value"),
        (datetime.datetime(2000, 1, 1, tzinfo=ZoneInfo("UTC")), "pass astimezone"),
        (datetime.datetime(2000, 1, 1, tzinfo=datetime.timezone(datetime.timedelta(0), "Z")), "pass astimezone"),
        (bytearray(b"x"), "expected a tensor, an array of numpy, a plain value"),
        (Config, "expected a tensor, an array of numpy, a plain value"),
        (defaultdict(lambda: 1), "only code could make its factory"),
        (defaultdict(Counter), r"pass dict\(…\) of it"),
    ],
)
def test_what_would_come_back_as_something_else_is_refused_with_a_cure(value, cure):
    with pytest.raises(TreeError, match=rf"cannot save .* at 'a/0'.*{cure}"):
        trees.flatten({"a": [value]}, is_leaf)


@pytest.mark.parametrize(
    ("tree", "reason"),
    [
        ({"a": object()}, "cannot save object at 'a': expected a tensor, an array"),
        ({"a": {Color.RED: 1}}, "cannot save Color as a key or in a set at 'a'; pass its name"),
        ({"a": {EnumMember("Color", "RED")}}, "cannot save EnumMember as a key or in a set at 'a'"),
        ({"a": Wrapped(Leaf())}, "cannot save the tensor at 'a/2', which is part of a context"),
        ({"a": {("b", Leaf()): 1}}, "cannot save Leaf as a key or in a set at 'a'"),
        ([{1, Leaf()}], "cannot save Leaf as a key or in a set at '0'"),
        ({"a": {frozenset(): 1}}, "cannot save frozenset as a key or in a set at 'a'"),
        ({Shout("x"): 1}, "cannot save Shout as a key"),
        ({1: Leaf(), "1": Leaf()}, "would both be named '1'"),
        ({"a/b": Leaf(), "a": {"b": Leaf()}}, "would both be named 'a/b'"),
        ({"a": lambda: 1}, "cannot save function at 'a'"),
        ({"a": 10**5000}, "at 'a'"),
    ],
)
def test_what_cannot_be_saved_is_named(tree, reason):
    with pytest.raises(TreeError, match=reason):
        trees.flatten(tree, is_leaf)


def test_values_under_colliding_paths_are_kept():
    tree = {1: "one", "1": "text", "a/b": 1, "a": {"b": 2}}
    _, structure = trees.flatten(tree, is_leaf)
    assert same(trees.build(trees.load(trees.dump(structure)), {}.get), tree)


def test_a_tree_that_contains_itself():
    tree = {}
    tree["again"] = [tree]
    with pytest.raises(TreeError, match="deeper than 64 levels at 'again/0/again"):
        trees.flatten(tree, is_leaf)


def test_members_of_enums_are_their_names():
    tree = [Color.RED, Corner.LEFT, Access.READ, Access.READ | Access.WRITE, Access(0)]
    back = rebuilt(tree)
    assert back[:2] == [EnumMember("Color", "RED"), EnumMember("Corner", "LEFT")]
    assert [made.of(type(member), "") for made, member in zip(back, tree, strict=True)] == tree
    assert rebuilt(back) == back
    with pytest.raises(TreeError, match=r"has Old.BLUE at 'a/b'; Color of the target has no such member, it has RED"):
        EnumMember("Old", "BLUE").of(Color, "a/b")


def test_arrays_are_leaves():
    array = np.arange(3)
    leaves, structure = trees.flatten({"a": array, "t": Leaf()}, is_leaf)
    assert leaves["a"] is array
    assert structure["dict"][0] == ["a", {"ndarray": "a"}]
    assert (trees.tensor_names(structure), trees.array_names(structure)) == (["a", "t"], ["a"])
    renamed = trees.rename(structure, {"a": "b/c"})
    assert trees.build(renamed, lambda name: name) == {"b": {"c": "a"}, "t": "t"}


def test_tensors_of_subclasses_are_their_parts():
    tensor = TwoTensor(torch.ones(2, 3), torch.zeros(2, 3))
    leaves, structure = trees.flatten({"w": tensor}, lambda value: type(value) is torch.Tensor)
    assert (list(leaves), leaves["w/b"] is tensor.b) == (["w/a", "w/b"], True)
    back = trees.build(trees.load(trees.dump(structure)), leaves.__getitem__)["w"]
    assert (type(back), list(back), back.facts) == (TensorParts, ["a", "b"], ("TwoTensor", (2, 3), None))
    assert trees.dump(trees.flatten({"w": back}, lambda value: type(value) is torch.Tensor)[1]) == trees.dump(structure)
    made = TwoTensor.__tensor_unflatten__(dict(back), back.context, back.shape, tensor.stride())
    assert made.a is tensor.a


def test_values_of_clients_need_numbers_of_clients():
    assert repr(ClientValues({1: "b"}, 2)) == "ClientValues({1: 'b'}, num_clients=2)"
    for values, num_clients in (({2: 1}, 2), ({True: 1}, 2), ({"0": 1}, 1), ({-1: 1}, 2), ({}, "1")):
        with pytest.raises(TreeError, match=r"number of clients must be|need keys from 0 to"):
            ClientValues(values, num_clients)


class Point(NamedTuple):
    x: Any
    y: Any = 0


@dataclass(frozen=True, slots=True)
class Moments:
    mean: Any
    unset: Any = field(init=False)


def rebuilt(tree):
    leaves, structure = trees.flatten(tree, is_leaf)
    return trees.build(trees.load(trees.dump(structure)), leaves.__getitem__)


def test_named_tuples_come_back_as_stand_ins():
    leaf = Leaf()
    back = rebuilt({"p": Point(leaf, [1])})["p"]
    assert back == Point(leaf, [1])
    assert (type(back).__name__, back._fields, back.y) == ("Point", ("x", "y"), [1])
    odd = namedtuple("Odd", ["class", "a"], rename=True)(1, 2)
    assert rebuilt(odd)._fields == ("_0", "a")
    assert list(trees.flatten({"p": Point(leaf)}, is_leaf)[0]) == ["p/x"]


def test_dataclasses_come_back_as_namespaces_of_their_fields():
    leaf = Leaf()
    assert rebuilt([Moments(leaf)]) == [SimpleNamespace(mean=leaf)]
    assert list(trees.flatten({"m": Moments(leaf)}, is_leaf)[0]) == ["m/mean"]


def test_what_was_written_once_is_read_for_ever():
    """As the golden checkpoints are: the kinds of values that came after them."""
    date = datetime.datetime(2030, 1, 2, 3, tzinfo=datetime.UTC)
    document = (
        b'{"list":[{"torch.dtype":"bfloat16"},{"torch.device":"cuda:1"},{"PosixPath":"a/b"},{"PureWindowsPath":"C:\\\\x"},'
        b'{"date":"2030-01-02"},{"datetime":["2030-01-02T03:00:00+00:00",0]},{"timedelta":[1,2,3]},{"enum":["C","A|B"]},'
        b'{"ndarray":"n"},{"type":["PerClient",2,{"dict":[[1,{"tensor":"p/1"}]]}]},'
        b'{"type":["TensorParts",{"tuple":[{"value":"K"},{"torch.Size":[2]},{"value":null}]},{"dict":[["q",{"tensor":"w/q"}]]}]}]}'
    )
    parts = TensorParts({"q": "w/q"}, "K", torch.Size([2]), None)
    values = [
        *(torch.bfloat16, torch.device("cuda:1"), pathlib.PosixPath("a/b"), pathlib.PureWindowsPath("C:/x")),
        *(
            date.date(),
            date,
            datetime.timedelta(1, 2, 3),
            EnumMember("C", "A|B"),
            "n",
            ClientValues({1: "p/1"}, 2),
            parts,
        ),
    ]
    assert same(trees.build(trees.load(document), lambda name: name), values)


def test_sets_have_one_form_on_every_client():
    tree = [{"b", "a", "c"}, frozenset([3, 1])]
    _, structure = trees.flatten(tree, is_leaf)
    assert [node["value"] for node in structure["list"][0]["set"]] == ["a", "b", "c"]
    assert dict(trees.values(structure)) == {"0": {"a", "b", "c"}, "1": {1, 3}}


def test_every_scalar_of_numpy():
    for name, kind in plain_values.NUMPY_TYPES.items():
        back = rebuilt(kind(1))
        assert (type(back), back, np.dtype(kind).name) == (kind, 1, name)


def test_states_of_objects_are_part_of_the_tree():
    states = {"o": {"deep": 1j}}
    _, structure = trees.flatten({"a": "x", "o": is_leaf}, is_leaf, lambda value, path: states[path])
    assert trees.build(structure, {}.get) == {"a": "x", "o": {"deep": 1j}}


def test_late_objects_know_the_names_of_the_tensors_of_others():
    tensor, seen = torch.ones(2), []

    def late(value, path):
        def state(leaves):
            seen.append((path, list(leaves)))
            return {"own": torch.ones(1)}

        return trees.Late(int(path == "rng"), state)

    tree = {"rng": object(), "optimizer": object(), "model": {"w": tensor}}
    leaves, structure = trees.flatten(tree, lambda value: isinstance(value, torch.Tensor), late)
    assert seen == [("optimizer", ["model/w"]), ("rng", ["model/w", "optimizer/own"])]
    assert list(trees.build(structure, leaves.get)) == ["rng", "optimizer", "model"]


def test_names_of_a_checkpoint_run_no_code():
    """Python makes code of the names of a named tuple."""
    evil = "x=__import__('os').abort()"
    for names, expected in (([evil, "y"], ("_0", "y")), (["class", "__new__"], ("_0", "_1"))):
        items = {"dict": [[name, {"value": 1}] for name in names]}
        made = trees.build(trees.load(json.dumps({"type": ["namedtuple", evil, items]}).encode()), {}.get)
        assert (type(made).__name__, made._fields) == ("namedtuple", expected)
    namespace = {"type": ["SimpleNamespace", None, {"dict": [["__class__", {"value": 1}]]}]}
    assert type(trees.build(trees.load(json.dumps(namespace).encode()), {}.get)) is SimpleNamespace


def test_renamed_containers_keep_their_types():
    tree = {"o": OrderedDict(a=1, b=2), "d": deque([1, 2], 3), "p": Point(1, 2), 1.5: {(1, 2): 3}}
    _, structure = trees.flatten(tree, is_leaf)
    back = trees.build(trees.rename(structure, {"o/a": "o/z"}), {}.get)
    assert same(back["o"], OrderedDict(z=1, b=2))
    assert same(back["d"], tree["d"])
    assert back["p"] == tree["p"]
    assert back[1.5] == {(1, 2): 3}
    back = trees.build(trees.rename(structure, {"d/0": "e/0"}), {}.get)
    assert (back["d"], back["e"]) == ({"1": 2}, {"0": 1})


def test_containers_that_move_as_a_whole_keep_their_types():
    tree = {
        "rng": ClientValues({0: Leaf(), 1: 5}),
        "w": TensorParts({"a": Leaf()}, "K", torch.Size([2]), None),
        "l": [1, [2, 3]],
        "o": OrderedDict(a=1, b=2),
    }
    leaves, structure = trees.flatten(tree, is_leaf)
    names = {
        **{path: f"moved/{path}" for path, _ in trees.values(structure)},
        **{name: f"moved/{name}" for name in leaves},
    }
    assert same(trees.build(trees.rename(structure, names), leaves.__getitem__), {"moved": tree})
    renamed = {"rng/0": "x/0", "rng/1": "x/1", "l/1/0": "l/1/0", "l/1/1": "l/1/2", "o/a": "p/a"}
    back = trees.build(trees.rename(structure, renamed), leaves.__getitem__)
    assert same(back["x"], tree["rng"])
    assert (back["l"], back["o"], back["p"]) == ([1, {"0": 2, "2": 3}], {"b": 2}, {"a": 1})


KINDS = [*plain_values._DECODERS, "dict", "list", "tuple", "type", "tensor", "ndarray", "x"]
nodes = st.recursive(
    st.sampled_from(
        ["OrderedDict", "PerClient", "TensorParts", "deque", "defaultdict", "namedtuple", "int32", "nan", "cpu:1"]
    )
    | st.none()
    | st.booleans()
    | st.integers()
    | st.text(max_size=5),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.sampled_from(KINDS), children, max_size=2),
    max_leaves=8,
)


@given(nodes)
def test_a_malformed_structure_is_corruption_and_nothing_else(document):
    data = json.dumps(document).encode()

    def read():
        node = trees.load(data)
        list(trees.values(node))
        return trees.build(node, lambda name: ("tensor", name))

    with contextlib.suppress(CheckpointCorruptError, CheckpointVersionError):
        read()


MALFORMED = [
    b'{"type": ["deque", 1, {"list": [{"value": 1}, {"value": 2}]}]}',
    b'{"type": ["deque", -1, {"list": []}]}',
    b'{"type": ["deque", null, {"tensor": "abc"}]}',
    b'{"type": ["Counter", null, {"list": []}]}',
    b'{"type": ["namedtuple", null, {"dict": [[1, {"value": 1}]]}]}',
    b'{"type": [["x"], null, {"dict": []}]}',
    b'{"type": ["SimpleNamespace", null, {"dict": [[1, {"value": 1}]]}]}',
    b'{"dict": [[1.5, {"value": 1}]]}',
    b'{"dict": [[{"set": []}, {"value": 1}]]}',
    b'{"dict": [[{"value": 1}, {"value": 1}], [1, {"value": 1}]]}',
    b'{"set": [{"set": []}]}',
    b'{"set": [{"frozenset": []}]}',
    b'{"dict": [[{"enum": ["Color", "RED"]}, {"value": 1}]]}',
    b'{"numpy": ["object", {"value": 1}]}',
    b'{"numpy": ["uint8", {"value": 300}]}',
    b'{"complex": ["x", "0"]}',
    b'{"range": [0, 1, 0]}',
    b'{"torch.Size": ["x"]}',
    b'{"value": []}',
    b'{"torch.dtype": 1}',
    b'{"torch.device": "tpu:x"}',
    b'{"torch.device": 0}',
    b'{"PosixPath": 3}',
    b'{"date": "2000-13-01"}',
    b'{"datetime": ["2000-01-01", 7]}',
    b'{"datetime": ["2000-01-01"]}',
    b'{"timedelta": [1e99, 0, 0]}',
    b'{"timedelta": [1, 0, 0, 5]}',
    b'{"timedelta": [1e12]}',
    b'{"BytesIO": ["YQ==", -1]}',
    b'{"BytesIO": ["YQ==", 1000000000000000000000000]}',
    b'{"BytesIO": ["Y", 0]}',
    b'{"BytesIO": "YQ"}',
    b'{"enum": ["Color", 3]}',
    b'{"enum": ["Color"]}',
    b'{"enum": "ab c"}',
    b'{"ndarray": 1}',
    b'{"type": ["PerClient", -1, {"dict": [[0, {"value": 1}]]}]}',
    b'{"type": ["PerClient", 1, {"dict": [["0", {"value": 1}]]}]}',
    b'{"type": ["PerClient", 1, {"dict": [[{"value": true}, {"value": 1}]]}]}',
    b'{"type": ["PerClient", null, {"dict": []}]}',
    b'{"type": ["TensorParts", null, {"dict": []}]}',
    b'{"type": ["TensorParts", {"tensor": "a"}, {"dict": []}]}',
    b'{"type": ["TensorParts", {"list": []}, {"dict": []}]}',
    b'{"type": ["TensorParts", {"list": [{"value": "K"}, {"value": 1}, {"value": null}]}, {"dict": []}]}',
    b'{"tensor": 1}',
]


@pytest.mark.parametrize("data", [b"", b"{", b"[1]", b"null", b"\xff\xfe", b'{"value": 1, "list": []}', *MALFORMED])
def test_a_malformed_document(data):
    with pytest.raises(CheckpointCorruptError, match="the manifest's state tree"):
        trees.build(trees.load(data), {}.get)


@pytest.mark.parametrize(
    "node",
    [
        {"odd": 1},
        {"type": ["frozendict", None, {"dict": []}]},
        {"type": ["defaultdict", "deque", {"dict": []}]},
        {"type": ["TensorParts", {"list": [{"odd": 1}]}, {"dict": []}]},
    ],
)
def test_what_only_a_newer_version_knows(node):
    with pytest.raises(CheckpointVersionError, match=r"'(odd|frozendict|deque)', which this version does not know"):
        trees.load(json.dumps({"list": [node]}).encode())


def test_a_dtype_that_only_a_newer_pytorch_has():
    with pytest.raises(CheckpointVersionError, match=r"torch\.float2, which PyTorch .* does not have"):
        trees.load(b'{"torch.dtype": "float2"}')
