import contextlib
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtckpt.errors import CheckpointCorruptError, TreeError
from dtckpt.format import tree as trees


class Leaf:
    """Stands for a tensor."""


def is_leaf(value):
    return isinstance(value, Leaf)


plain = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=True, allow_infinity=True)
    | st.text(st.characters(exclude_categories=()))
    | st.binary()
)
keys = st.text(st.characters(exclude_characters="/"), max_size=4) | st.integers(-5, 5)
state_trees = st.recursive(
    plain | st.builds(Leaf),
    lambda children: (
        st.lists(children, max_size=4)
        | st.lists(children, max_size=4).map(tuple)
        | st.dictionaries(keys, children, max_size=4).filter(lambda made: len({str(key) for key in made}) == len(made))
    ),
    max_leaves=12,
)


def same(one, other):
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        pairs = zip(one.items(), other.items(), strict=True)
        return len(one) == len(other) and all(type(a) is type(b) and a == b and same(c, d) for (a, c), (b, d) in pairs)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    if isinstance(one, float):
        return (math.isnan(one) and math.isnan(other)) or (
            one == other and math.copysign(1, one) == math.copysign(1, other)
        )
    return one is other if isinstance(one, Leaf) else one == other


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
        if isinstance(node, dict):
            for child in node.values():
                count(child)
        elif isinstance(node, list | tuple):
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


@pytest.mark.parametrize(
    ("tree", "reason"),
    [
        ({"a": {1, 2}}, "cannot save set at 'a'"),
        ({"a": object()}, "cannot save object at 'a'"),
        ([{"a": 1j}], "cannot save complex at '0/a'"),
        ({1.5: 1}, r"keys must be str or int; got 1.5 \(float\)"),
        ({True: 1}, r"keys must be str or int; got True \(bool\)"),
        ({None: 1}, "keys must be str or int; got None"),
        ({"a": {("b",): 1}}, "keys must be str or int"),
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


def test_trees_run_no_code():
    class Shout(str):
        __slots__ = ()

    with pytest.raises(TreeError, match="cannot save Shout"):
        trees.flatten({"a": Shout("x")}, is_leaf)


nodes = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda children: (
        st.lists(children, max_size=3)
        | st.dictionaries(
            st.sampled_from(["dict", "list", "tuple", "tensor", "value", "float", "bytes", "x"]), children, max_size=2
        )
    ),
    max_leaves=8,
)


@given(nodes)
def test_a_malformed_structure_is_corruption_and_nothing_else(document):
    data = json.dumps(document).encode()

    def read():
        node = trees.load(data)
        list(trees.values(node))
        return trees.build(node, lambda name: ("tensor", name))

    with contextlib.suppress(CheckpointCorruptError):
        read()


@pytest.mark.parametrize("data", [b"", b"{", b"[1]", b"null", b"\xff\xfe", b'{"value": 1, "list": []}', b'{"odd": 1}'])
def test_a_malformed_document(data):
    with pytest.raises(CheckpointCorruptError, match="the manifest's state tree"):
        trees.build(trees.load(data), {}.get)
