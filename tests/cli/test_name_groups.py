"""Groups of names, expanded as a shell expands them."""

import itertools
import re

from hypothesis import given
from hypothesis import strategies as st

from dtckpt.cli.name_groups import group_names

_BRACES = re.compile(r"\{([0-9.,]+)\}")


def expanded(name):
    """Return all names that a group's name stands for."""
    parts = _BRACES.split(name)
    parts[1::2] = [
        [str(number) for run in part.split(",") for number in numbers(*run.split(".."))] for part in parts[1::2]
    ]
    parts[::2] = [[part] for part in parts[::2]]
    return ["".join(each) for each in itertools.product(*parts)]


def numbers(first, last=None):
    return range(int(first), int(last or first) + 1)


def grouped(names, facts=lambda name: None):
    groups = group_names(names, lambda name: name, facts)
    return {group.name: group.items for group in groups}


names_of_layers = st.builds(
    "{}{}{}.{}{}".format,
    st.sampled_from(["layers.", "h", ""]),
    st.integers(0, 12) | st.just("x"),
    st.sampled_from(["", "/w"]),
    st.sampled_from(["norm", "expert", "0"]),
    st.just("") | st.integers(0, 3) | st.just("07"),
)


@given(st.lists(names_of_layers, unique=True, max_size=30))
def test_groups_stand_for_their_names_and_for_no_others(names):
    def facts(name):
        return name.endswith("3")

    groups = grouped(names, facts)
    assert sorted(name for items in groups.values() for name in items) == sorted(names)
    for name, items in groups.items():
        assert sorted(expanded(name)) == sorted(items)
        assert len(set(map(facts, items))) == 1


def test_layers_of_a_model():
    names = [f"layers.{layer}.experts.{expert}.w" for layer in range(12) for expert in range(4)]
    names += [f"layers.{layer}.norm" for layer in (0, 1, 2, 7, 9, 10, 11)] + ["embed", "bias_007", "bias_008"]
    assert list(grouped(names)) == [
        "bias_007",
        "bias_008",
        "embed",
        "layers.{0..11}.experts.{0..3}.w",
        "layers.{0..2,7,9..11}.norm",
    ]


def test_what_differs_stands_alone():
    names = [f"layers.{layer}.w" for layer in range(5)]
    assert list(grouped(names, lambda name: name == "layers.3.w")) == ["layers.{0..2,4}.w", "layers.3.w"]
    assert grouped([]) == {}
