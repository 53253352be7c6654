import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from dtckpt.checkpoint.inspecting.elements import Statistics
from dtckpt.format.dtypes import DTYPES, numbers_of

floats = st.floats(width=32) | st.sampled_from([0.0, -0.0, np.nan, np.inf, -np.inf])


@given(arrays.arrays(np.float32, st.integers(0, 40), elements=floats), st.integers(0, 40), st.integers(1, 9))
def test_parts_together_are_what_numpy_says_of_the_whole(values, at, step):
    at = min(at, values.size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dtckpt.checkpoint.inspecting.elements.SLICE_NUMEL", step)
        found = Statistics.of(values[:at], "float32") + Statistics.of(values[at:], "float32")
    finite = values[np.isfinite(values)].astype(np.float64)
    assert found.count == values.size
    assert found.num_finite == finite.size
    assert found.num_nan == np.isnan(values).sum()
    assert found.num_inf == np.isinf(values).sum()
    assert found.num_zeros == (values == 0).sum()
    if finite.size:
        assert (found.minimum, found.maximum) == (finite.min(), finite.max())
        scale = np.abs(finite).max()
        assert found.mean == pytest.approx(finite.mean(), rel=1e-12, abs=1e-12 * scale)
        assert found.deviation == pytest.approx(finite.std(), rel=1e-9, abs=1e-9 * scale)
    else:
        assert (found.minimum, found.maximum, found.deviation) == (None, None, 0.0)


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_every_dtype(dtype):
    elements = np.arange(24, dtype=np.uint8).repeat(DTYPES[dtype].itemsize).view(DTYPES[dtype])
    if dtype == "bool":
        elements = elements > 5
    found = Statistics.of(elements, dtype)
    numbers = numbers_of(elements, dtype)
    numbers = np.abs(numbers) if numbers.dtype.kind == "c" else numbers
    assert found.count == numbers.size
    assert (found.minimum, found.maximum) == (numbers.min(), numbers.max())
    assert found.num_zeros == (numbers == 0).sum()
    assert found.mean == pytest.approx(numbers.astype(np.float64).mean())


def test_integers_are_exact():
    found = Statistics.of(np.array([2**64 - 1, 1], np.uint64), "uint64")
    assert (found.minimum, found.maximum) == (1, 2**64 - 1)
