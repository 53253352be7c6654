"""Slice strings: parsed and printed as TensorFlow does, or refused with a reason."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtckpt.errors import SliceError
from dtckpt.layout.region import Region
from dtckpt.layout.text_format import SliceSpec, parse_slice_spec


@pytest.mark.parametrize(
    ("text", "shape", "full", "offset"),
    [
        ("", (3, 4), (3, 4), (0, 0)),
        ("", (), (), ()),
        ("4 5 0,2:-", (2, 5), (4, 5), (0, 0)),
        ("4 5 2,2:1,4", (2, 4), (4, 5), (2, 1)),
        ("4 5 -:-", (4, 5), (4, 5), (0, 0)),
        ("7 3,0", (0,), (7,), (3,)),
        ("0 -", (0,), (0,), (0,)),
    ],
)
def test_what_tensorflow_means(text, shape, full, offset):
    assert parse_slice_spec(text, shape) == SliceSpec(full, Region(offset, shape))


@pytest.mark.parametrize(
    ("text", "shape", "reason"),
    [
        ("4 5", (4, 5), "1 dims and 1 slices|not a number|no comma"),
        ("4 5 0,2", (2, 5), "2 dims and 1 slices"),
        ("4 0,2:-", (2, 5), "1 dims and 2 slices"),
        ("4 5 0,2:x", (2, 5), "'x' has no comma"),
        ("4 5 0,2:0,", (2, 5), "'' is not a number"),
        ("4 -5 0,2:-", (2, 5), "'-5' is not a number"),
        ("4  5 0,2:-", (2, 5), "'' is not a number"),
        ("٤ -", (4,), "is not a number"),
        ("4 5 0,2:-,3", (2, 5), "'-' is not a number"),
        ("4 5 3,2:-", (2, 5), r"leaves dim 0; got \[3, 5\), size 4"),
        ("4 5 0,2:-", (2, 4), r"got shape \(2, 4\), expected \(2, 5\)"),
        ("4 5 0,2:-", (2, 5, 1), "does not fit its tensor"),
        (None, (4,), "must be str; got NoneType"),
        (b"4 -", (4,), "must be str; got bytes"),
        ("9" * 5000 + " -", (4,), "slice string"),
    ],
)
def test_bad_slices_are_refused(text, shape, reason):
    with pytest.raises(SliceError, match=reason):
        parse_slice_spec(text, shape)


@given(st.data())
def test_text_and_back(data):
    full = data.draw(st.lists(st.integers(0, 20), max_size=4).map(tuple))
    starts = tuple(data.draw(st.integers(0, size)) for size in full)
    shape = tuple(data.draw(st.integers(0, size - start)) for size, start in zip(full, starts, strict=True))
    spec = SliceSpec(full, Region(starts, shape))
    assert parse_slice_spec(str(spec), shape) == spec


@given(st.text("0123456789 ,:-x", max_size=15), st.lists(st.integers(0, 3), max_size=3))
def test_any_text_is_read_or_refused(text, shape):
    try:
        spec = parse_slice_spec(text, shape)
    except SliceError:
        return
    assert spec.region.shape == tuple(shape)
    assert Region.full(spec.full_shape).contains(spec.region)
