"""Elements that differ, against a search in Python."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtckpt import Region
from dtckpt.checkpoint.inspecting.elements import ElementDifferences
from dtckpt.format.dtypes import DTYPES, PACKED, numbers_of

COMPARED = sorted(set(DTYPES) - {PACKED})
dtypes = st.sampled_from(COMPARED)


@st.composite
def elements_of(draw, dtype, count):
    data = draw(st.binary(min_size=count * dtype.itemsize, max_size=count * dtype.itemsize))
    bits = np.frombuffer(data, np.uint8)
    return (bits % 2).view(np.bool_) if dtype == np.bool_ else bits.view(dtype)


@st.composite
def pairs(draw):
    """Two dtypes, the elements of two tensors of shape (n, 3), of which many are alike."""
    first = draw(dtypes)
    second = draw(st.just(first) | dtypes)
    rows = draw(st.integers(0, 4))
    a = draw(elements_of(DTYPES[first], 3 * rows))
    b = draw(elements_of(DTYPES[second], 3 * rows)).copy()
    if first == second:
        same = np.array(draw(st.lists(st.booleans(), min_size=3 * rows, max_size=3 * rows)), bool)
        b[same] = a[same]
    return first, second, a.reshape(rows, 3), b.reshape(rows, 3)


def exact(number):
    """Return a number of NumPy as one of Python."""
    return int(number) if number.dtype.kind in "biu" else number.item()


def expected(first, second, a, b, offset):
    """Return number of elements that differ, number of NaNs, largest absolute error and its index."""
    count = nans = 0
    best = None
    for index in np.ndindex(a.shape):
        x, y = (exact(numbers_of(each[index][None], name)[0]) for each, name in ((a, first), (b, second)))
        is_nan = [value != value for value in (x, y)]
        is_same = x == y or all(is_nan)
        if first == second:
            is_same = a[index].tobytes() == b[index].tobytes()
        if is_same:
            continue
        count += 1
        if any(is_nan):
            nans += 1
            continue
        error = float(abs(x - y)) if isinstance(x, complex | float) or isinstance(y, complex | float) else abs(x - y)
        if best is None or error > best[0]:
            best = error, tuple(np.add(index, offset))
    return count, nans, best


@given(pairs(), st.integers(1, 5))
def test_counts_errors_and_places(pair, step):
    first, second, a, b = pair
    region = Region((4, 2), a.shape)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dtckpt.checkpoint.inspecting.elements.SLICE_NUMEL", step)
        found = ElementDifferences.of(a, b, (first, second), region)
    with np.errstate(all="ignore"):
        count, nans, best = expected(first, second, a, b, region.offset)
    assert (found.count, found.num_different, found.num_nan) == (a.size, count, nans)
    if best is None:
        assert found.max_abs is None
        return
    assert found.max_abs.error == pytest.approx(best[0], rel=1e-6)
    a_there, b_there = (
        exact(numbers_of(each[tuple(np.subtract(found.max_abs.index, region.offset))][None], name)[0])
        for each, name in ((a, first), (b, second))
    )
    assert found.max_abs.a == pytest.approx(a_there, nan_ok=True)
    assert found.max_abs.b == pytest.approx(b_there, nan_ok=True)
    if math.isfinite(best[0]):
        assert 0 <= found.max_rel.error <= 2.0000001


@pytest.mark.parametrize(
    ("a", "b", "dtype", "error"),
    [
        ([-(2**63)], [2**63 - 1], "int64", 2**64 - 1),
        ([2**63], [2**63 + 1], "uint64", 1),
        ([-128], [127], "int8", 255),
        ([False], [True], "bool", 1),
        ([0.0], [-0.0], "float32", 0.0),
        ([np.inf], [-np.inf], "float64", np.inf),
        ([1.0], [np.inf], "float16", np.inf),
        ([1 + 1j], [1 - 1j], "complex64", 2.0),
        ([complex(np.inf, 1)], [complex(np.inf, 2)], "complex128", np.inf),
    ],
)
def test_edges(a, b, dtype, error):
    region = Region((0,), (1,))
    found = ElementDifferences.of(np.array(a, DTYPES[dtype]), np.array(b, DTYPES[dtype]), (dtype, dtype), region)
    assert found.num_different == 1
    assert found.max_abs.error == error


def test_integers_of_64_bits_beside_others_lose_nothing():
    region = Region((0,), (2,))
    a, b = np.array([2**53 + 1, 2**53], np.int64), np.array([2**53, 2**53], np.float64)
    found = ElementDifferences.of(a, b, ("int64", "float64"), region)
    assert (found.num_different, found.max_abs.error, found.max_abs.index) == (1, 1.0, (0,))
    a, b = np.array([2**63, 0], np.uint64), np.array([2**63 - 1, 0], np.int64)
    assert ElementDifferences.of(a, b, ("uint64", "int64"), region).max_abs.error == 1


def test_nans_of_the_same_bits_are_equal_and_others_are_counted():
    bits = np.array([0x7FC00000, 0x7FC00000, 0x7FC00000], np.uint32)
    a, b = bits.view(np.float32), np.array([0x7FC00000, 0x7FC00001, 0x3F800000], np.uint32).view(np.float32)
    found = ElementDifferences.of(a, b, ("float32", "float32"), Region((0,), (3,)))
    assert (found.num_different, found.num_nan, found.max_abs) == (2, 2, None)
    # Of two dtypes every NaN is as good as another.
    found = ElementDifferences.of(a, b.astype(np.float64), ("float32", "float64"), Region((0,), (3,)))
    assert (found.num_different, found.num_nan) == (1, 1)


def test_elements_of_two_numbers():
    a, b = np.array([[0x21, 0x7F]], np.uint8), np.array([[0x21, 0xFF]], np.uint8)
    found = ElementDifferences.of(a, b, (PACKED, PACKED), Region((3, 5), (1, 2)))
    assert (found.count, found.num_different) == (2, 1)
    assert (found.max_abs.error, found.max_abs.index, found.max_abs.a, found.max_abs.b) == (12, (3, 6), 6, -6)


def test_the_first_of_equal_errors():
    a, b = np.zeros(200_000, np.float32), np.zeros(200_000, np.float32)
    b[[70_000, 150_000]] = 1
    parts = [ElementDifferences.of(a[s], b[s], ("float32",) * 2, Region((s.start,), (100_000,))) for s in SLICES]
    for found in (parts[0] + parts[1], parts[1] + parts[0]):
        assert (found.num_different, found.max_abs.index, found.max_rel.index) == (2, (70_000,), (70_000,))


SLICES = (slice(0, 100_000), slice(100_000, 200_000))
