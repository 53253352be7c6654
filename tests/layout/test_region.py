import itertools
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtckpt.errors import RegionError
from dtckpt.layout.region import Region


def elements(region):
    return set(itertools.product(*map(range, region.offset, region.stop)))


@st.composite
def regions(draw, count):
    ndim = draw(st.integers(0, 3))
    numbers = st.lists(st.integers(0, 4), min_size=ndim, max_size=ndim)
    return [Region(draw(numbers), draw(numbers)) for _ in range(count)]


@given(regions(2))
def test_algebra_is_that_of_sets(pair):
    a, b = pair
    common = a.intersect(b)
    assert (elements(common) if common else set()) == elements(a) & elements(b)
    assert common == b.intersect(a)
    assert a.contains(b) is (elements(b) <= elements(a))
    pieces = a.subtract(b)
    assert sum(piece.numel for piece in pieces) == len(elements(a) - elements(b))
    assert set().union(*map(elements, pieces)) == elements(a) - elements(b)
    assert not any(piece.is_empty for piece in pieces)


@given(regions(1))
def test_one_region(single):
    (region,) = single
    assert region.numel == len(elements(region))
    assert region.is_empty is (region.numel == 0)
    assert Region.parse(str(region)) == region
    assert hash(Region(list(region.offset), list(region.shape))) == hash(region)
    assert pickle.loads(pickle.dumps(region)) == region
    assert region.relative_to(region) == Region.full(region.shape)
    assert region.translate(region.offset).relative_to(region) == region
    assert Region.full(region.stop).contains(region)


def test_shape_of_the_values():
    region = Region((1, 0), (2, 3))
    assert repr(region) == "Region(offset=(1, 0), shape=(2, 3))"
    assert str(region) == "[1:3, 0:3]"
    assert region.slices() == (slice(1, 3), slice(0, 3))
    assert (region.ndim, region.stop) == (2, (3, 3))


def test_scalar():
    scalar = Region.full(())
    assert (scalar.numel, scalar.is_empty, str(scalar)) == (1, False, "[]")
    assert scalar.intersect(scalar) == scalar
    assert scalar.subtract(scalar) == []


@pytest.mark.parametrize(
    "call",
    [
        lambda: Region((0,), (1, 2)),
        lambda: Region((-1,), (2,)),
        lambda: Region((0,), (-2,)),
        lambda: Region((0.5,), (2,)),
        lambda: Region(0, 2),
        lambda: Region((0,), (2,)).translate((-1,)),
        lambda: Region((0,), (2,)).translate((1, 1)),
        lambda: Region((0,), (2,)).intersect(Region((), ())),
        lambda: Region.parse("0:2"),
        lambda: Region.parse("[2:0]"),
        lambda: Region.parse("[0:2,]"),
        lambda: Region.parse("[-1:2]"),
    ],
)
def test_refusals(call):
    with pytest.raises(RegionError, match=r"got|expected"):
        call()
