"""The union of the structures of several clients' trees."""

import re
from collections import OrderedDict, deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtckpt.errors import SaveDisagreementError
from dtckpt.format import tree as trees
from dtckpt.format import tree_union

LEAVES = st.none() | st.booleans() | st.integers(0, 2) | st.floats() | st.text("ab", max_size=2) | st.binary(max_size=2)
TREES = st.recursive(
    LEAVES,
    lambda below: (
        st.dictionaries(st.text("ab/", min_size=1, max_size=2) | st.integers(0, 1) | st.booleans(), below, max_size=3)
        | st.lists(below, max_size=2)
        | st.dictionaries(st.text("cd", min_size=1, max_size=2), below, max_size=2).map(OrderedDict)
    ),
    max_leaves=8,
)


def node_of(tree):
    return trees.flatten(tree, lambda value: isinstance(value, Tensor))[1]


class Tensor:
    pass


def united(*tree):
    return trees.build(tree_union.unite(dict(enumerate(map(node_of, tree)))), lambda name: f"tensor {name}")


def test_dicts_are_united_in_the_order_of_the_first_client():
    first = {"b": {"x": 1, "w": Tensor()}, "a": [{"p": 1}, ()], True: 1}
    second = {"c": None, "b": {"y": 2, "x": 1, "v": Tensor()}, "a": [{"q": 2}, ()], 1: 2}
    expected = {"b": {"x": 1, "w": "tensor b/w", "y": 2, "v": "tensor b/v"}, "a": [{"p": 1, "q": 2}, ()], "c": None}
    node = tree_union.unite({0: node_of(first), 4: node_of(second)})
    keys = [key for key, _ in node["dict"]]
    assert keys == ["b", "a", {"value": True}, "c", 1]
    node["dict"] = [pair for pair in node["dict"] if isinstance(pair[0], str)]
    assert trees.build(node, lambda name: f"tensor {name}") == expected
    assert list(trees.build(node, str)) == list(expected)


@given(TREES)
def test_a_tree_united_with_itself_is_itself(tree):
    node = node_of(tree)
    assert trees.dump(tree_union.unite({0: node, 1: node_of(tree)})) == trees.dump(node)


@given(st.dictionaries(st.text("abc", min_size=1, max_size=2), TREES, max_size=6), st.sets(st.text("abc", max_size=2)))
def test_parts_of_a_dict_unite_to_it(tree, left_out):
    one = {key: value for key, value in tree.items() if key not in left_out}
    other = {key: value for key, value in tree.items() if key in left_out or len(key) == 1}
    node = tree_union.unite({0: node_of(one), 1: node_of(other)})
    assert {key: trees.dump(child) for key, child in node["dict"]} == {
        key: trees.dump(node_of(value)) for key, value in tree.items()
    }


@pytest.mark.parametrize(
    ("one", "other", "shown"),
    [
        (1, 2, "1 and 2"),
        (1, True, "1 and True"),
        (1, 1.0, "1 and 1.0"),
        (0.0, -0.0, "0.0 and -0.0"),
        (Tensor(), 1, "tensor 'k/a b' and 1"),
        ({}, [], "a dict of 0 items and a list of 0 items"),
        ([1], [1, 2], "a list of 1 items and a list of 2 items"),
        ([1], (1,), "a list of 1 items and a tuple of 1 items"),
        ({"x": 1}, OrderedDict(x=1), "a dict of 1 items and OrderedDict of a dict of 1 items"),
        (deque([1], 2), deque([1], 3), "deque of a list of 1 items and deque of a list of 1 items"),
        ("x" * 1000, "y", "'xxx"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_differs_is_named(one, other, shown):
    with pytest.raises(SaveDisagreementError, match=re.escape(f"at 'k/a b'; got {shown}")) as caught:
        united({"k": {"a b": one}}, {"k": {"a b": one}}, {"k": {"a b": other}, "other": 1})
    assert "client 0 and client 2" in str(caught.value)
    assert len(str(caught.value)) < 600
