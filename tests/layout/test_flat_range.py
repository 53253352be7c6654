"""Ranges of elements in C order as boxes."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtckpt.layout.flat_range import flat_boxes


@st.composite
def ranges(draw):
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=5)))
    start = draw(st.integers(0, math.prod(shape)))
    return shape, start, draw(st.integers(start, math.prod(shape)))


@given(ranges())
def test_the_boxes_are_the_range_in_its_order(drawn):
    shape, start, stop = drawn
    elements = np.arange(math.prod(shape)).reshape(shape)
    boxes = list(flat_boxes(shape, start, stop))
    assert [each for box in boxes for each in elements[box.slices()].ravel()] == list(range(start, stop))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


@pytest.mark.parametrize(
    ("shape", "start", "stop", "boxes"),
    [
        ((), 0, 1, ["[]"]),
        ((), 0, 0, []),
        ((0, 3), 0, 0, []),
        ((5,), 1, 4, ["[1:4]"]),
        ((2, 3, 4), 0, 24, ["[0:2, 0:3, 0:4]"]),
        ((2, 3, 4), 5, 23, ["[0:1, 1:2, 1:4]", "[0:1, 2:3, 0:4]", "[1:2, 0:2, 0:4]", "[1:2, 2:3, 0:3]"]),
    ],
)
def test_examples(shape, start, stop, boxes):
    assert list(map(str, flat_boxes(shape, start, stop))) == boxes


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (0, 25)])
def test_a_range_outside(start, stop):
    with pytest.raises(ValueError, match="are not inside shape"):
        list(flat_boxes((2, 3, 4), start, stop))
