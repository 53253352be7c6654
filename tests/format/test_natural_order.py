from hypothesis import given
from hypothesis import strategies as st

from dtckpt.format.names import natural_key


def test_numbers_count_as_numbers():
    ordered = ["a", "a/b", "layers.02", "layers.2", "layers.10", "layers.10.b", "layers.x", "w1", "w9", "w10"]
    assert sorted(sorted(ordered), key=natural_key) == ordered


@given(st.lists(st.text("019ab./", max_size=6) | st.text(max_size=4), max_size=6))
def test_any_names_have_one_order(names):
    assert sorted(names, key=natural_key) == sorted(sorted(names), key=natural_key)


def test_more_digits_than_an_int_is_converted_from():
    names = ["a" + "9" * 5000, "a" + "1" * 5001]
    assert sorted(names, key=natural_key) == names
