"""Changes from one array to another: applied, they give the new one; they are short; malformed ones change nothing."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtckpt.checkpoint.parts.changes import apply_changes, changes_between

HEAD = 9


def applied(changes, old):
    result = bytearray(np.ascontiguousarray(old).tobytes())
    apply_changes(changes, memoryview(result), old.itemsize)
    return bytes(result)


@given(
    itemsize=st.sampled_from([1, 2, 4, 8]),
    shape=st.lists(st.integers(1, 40), max_size=3),
    share=st.sampled_from([0.0, 0.01, 0.1, 0.3, 1.0]),
    seed=st.integers(0, 1000),
    is_transposed=st.booleans(),
)
def test_there(itemsize, shape, share, seed, is_transposed):
    draw = np.random.default_rng(seed)
    old, other = (draw.integers(0, 2**62, shape).astype(f"u{itemsize}") for _ in range(2))
    new = np.where(draw.random(shape) < share, other, old)
    if is_transposed:
        old, new = old.T, new.T
    changes = changes_between(old, new)
    if changes is None:
        assert (old != new).mean() > 0.25 or new.nbytes <= HEAD + (old != new).sum() * (itemsize + 8)
    else:
        assert len(changes) < new.nbytes
        assert applied(changes, old) == np.ascontiguousarray(new).tobytes()


@pytest.mark.parametrize("itemsize", [2, 4])
def test_one_percent_costs_less_than_five(itemsize):
    draw = np.random.default_rng(0)
    old = draw.integers(0, 2**15, (1000, 1000)).astype(f"u{itemsize}")
    new = np.where(draw.random(old.shape) < 0.01, old + 1, old).astype(old.dtype)
    changes = changes_between(old, new)
    assert len(changes) < 0.025 * new.nbytes
    assert applied(changes, old) == new.tobytes()


def test_few_samples_tell_that_all_changed(monkeypatch):
    """Then nothing else is compared. Changes near each other are found all the same, if there are few."""
    old = np.zeros((64, 64 << 10), np.uint16)
    new = old.copy()
    new[1:4, :1000] = 1
    assert applied(changes_between(old, new), old) == new.tobytes()
    monkeypatch.setattr(np, "flatnonzero", None)
    assert changes_between(old, old + np.uint16(1)) is None


def test_bits_count_not_values():
    """Zero and minus zero are equal, and a NaN is unequal to itself; their bits say otherwise."""
    old = np.full(100, np.nan, np.float32)
    new = old.copy()
    old[3], new[3] = 0.0, -0.0
    changes = changes_between(old, new)
    assert len(changes) == HEAD + 1 + 4
    assert applied(changes, old) == new.tobytes()


def test_to_apply_twice_does_no_harm():
    old = np.arange(1000, dtype=np.uint16)
    new = old.copy()
    new[[5, 900]] = 7
    changes = changes_between(old, new)
    assert applied(changes, new) == new.tobytes()


def malformed():
    old = np.arange(1000, dtype=np.uint16)
    new = old.copy()
    new[[5, 900, 999]] = 7
    good = changes_between(old, new)
    yield b""
    yield good[:-1]
    yield good + b"\0"
    yield bytes([3]) + good[1:]
    yield bytes([0]) + good[1:]
    yield good[:1] + (2**63).to_bytes(8, "little") + good[9:]
    yield good[:9] + (2000).to_bytes(2, "little") + good[11:]
    # Gaps whose sum is more than 64 bits have.
    gaps = np.full(4, 2**63 - 1, np.uint64).tobytes()
    yield bytes([8]) + (4).to_bytes(8, "little") + gaps + bytes(8)


@pytest.mark.parametrize("changes", list(malformed()), ids=len)
def test_malformed_changes(changes):
    elements = bytearray(np.arange(1000, dtype=np.uint16).tobytes())
    before = bytes(elements)
    with pytest.raises(ValueError, match=r"they|them"):
        apply_changes(changes, memoryview(elements), 2)
    assert elements == before
