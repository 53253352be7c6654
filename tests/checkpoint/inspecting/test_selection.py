"""Slices, against NumPy's own."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtckpt import Region
from dtckpt.checkpoint.inspecting.selection import Selection
from dtckpt.errors import RegionError

bounds = st.none() | st.integers(-9, 9)
items = st.one_of(
    st.integers(-7, 6).map(str),
    st.tuples(bounds, bounds, st.none() | st.integers(-4, 4).filter(bool)).map(
        lambda parts: ":".join("" if part is None else str(part) for part in parts)
    ),
    st.just("..."),
)
shapes = st.lists(st.integers(0, 7), max_size=4).map(tuple)


def array_of(shape):
    return np.arange(np.prod(shape, dtype=int)).reshape(shape)


def read(selection, array):
    """Return what a selection selects, from the box that it says must be read."""
    return array[selection.region.slices()][selection.slices].reshape(selection.shape)


@given(shapes, st.lists(items, min_size=1, max_size=5), st.data())
def test_slices_select_what_numpy_selects(shape, parts, data):
    array, text = array_of(shape), ", ".join(parts)
    try:
        expected = array[eval(f"np.s_[{text}]")]
    except IndexError:
        with pytest.raises(RegionError):
            Selection.parse(text, shape)
        return
    selection = Selection.parse(text, shape)
    assert selection.shape == expected.shape
    assert selection.numel == expected.size
    np.testing.assert_array_equal(read(selection, array), expected)
    # In pieces of any size.
    result = np.full([len(each) for each in selection.ranges], -1)
    max_nbytes = data.draw(st.integers(8, 200))
    ends = []
    for position, piece in selection.pieces(shape, 8, max_nbytes):
        assert piece.numel == 1 or 8 * piece.region.numel <= max_nbytes
        assert (result[position] == -1).all()
        result[position] = array[piece.region.slices()][piece.slices]
        ends.append([each.start for each in position])
    assert ends == sorted(ends)
    np.testing.assert_array_equal(result.reshape(selection.shape), expected)
    # In the parts of a grid.
    found = []
    for start in range(0, shape[0] if shape else 1, 3):
        part = selection.clip(Region((start, *[0] * len(shape[1:])), (3, *shape[1:])) if shape else Region((), ()))
        found += read(part, array).reshape(-1).tolist() if part.numel else []
    assert sorted(found) == sorted(expected.reshape(-1).tolist())


def test_gaps_that_are_worth_it_are_not_read():
    shape = (100_000, 1000)
    rows = [piece for _, piece in Selection.parse("::1000, 5", shape).pieces(shape, 4, 16 << 20)]
    assert [piece.region for piece in rows] == [Region((row, 5), (1, 1)) for row in range(0, 100_000, 1000)]
    # A column is close to the next one.
    (columns,) = [piece for _, piece in Selection.parse("7, ::10", shape).pieces(shape, 4, 16 << 20)]
    assert columns.region == Region((7, 0), (1, 991))
    dense = Selection.parse("3:9000", shape)
    assert sum(piece.region.numel for _, piece in dense.pieces(shape, 4, 16 << 20)) == dense.numel


@pytest.mark.parametrize(
    ("text", "shape", "message"),
    [
        ("", (3,), "got '' for dim 0"),
        ("a", (3,), "got 'a' for dim 0, expected what NumPy takes"),
        ("1:2:3:4", (3,), "got '1:2:3:4'"),
        ("1.5", (3,), "got '1.5'"),
        ("None", (3,), "got 'None'"),
        ("1_0", (3,), "got '1_0'"),
        ("٣", (9,), "for dim 0"),
        ("9" * 5000, (3,), "for dim 0"),
        ("0:0:0", (3,), "the step of dim 0 is zero"),
        ("..., ...", (3,), "'...' may be there once"),
        ("0, 0", (3,), r"got 2, expected at most 1, as the shape is \(3,\)"),
        ("0", (), "too many indices"),
        ("..., 3", (3, 3), "index 3 is out of bounds for dim 1 of size 3"),
        ("-4", (3,), "index -4 is out of bounds"),
        ("0", (0,), "out of bounds for dim 0 of size 0"),
        ("0,,0", (3, 3, 3), "got '' for dim 1"),
    ],
)
def test_slices_that_cannot_be_used(text, shape, message):
    with pytest.raises(RegionError, match=message):
        Selection.parse(text, shape)
