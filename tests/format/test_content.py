"""Content digests: equal for equal elements however they are cut, and different for everything else."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtckpt.format.content import SMALL_NBYTES, ContentSum, ContentSums, content_digest
from dtckpt.region import Region

DTYPES = ("u1", "u2", "u4", "u8", "c16")
# Lines of one dim, of several, of all, and longer than a tile.
SHAPES = [(), (1,), (7,), (5000,), (3, 40), (50, 33), (9, 5, 3), (40, 7, 3, 3), (2, 3, 1100), (6, 4201), (0, 5)]


def total_of(elements, cuts=None, shape=None):
    total = ContentSum(elements.shape if shape is None else shape, elements.itemsize)
    for region in cuts or [Region.full(elements.shape)]:
        inside = region.ndim and region.shape != elements.shape
        total.add(elements[region.slices()] if inside else elements, region)
    return total.total


def random_elements(shape, dtype, seed=0):
    nbytes = math.prod(shape) * np.dtype(dtype).itemsize
    return np.frombuffer(np.random.default_rng(seed).bytes(nbytes), dtype).reshape(shape)


@st.composite
def cut_up(draw, region):
    """Cut a region into boxes, in any order."""
    dims = [dim for dim, size in enumerate(region.shape) if size > 1]
    if not dims or draw(st.integers(0, 3)) == 0:
        return [region]
    dim = draw(st.sampled_from(dims))
    at = draw(st.integers(1, region.shape[dim] - 1))
    offset, first, second = (list(each) for each in (region.offset, region.shape, region.shape))
    offset[dim] += at
    first[dim], second[dim] = at, second[dim] - at
    parts = [Region(region.offset, tuple(first)), Region(tuple(offset), tuple(second))]
    return draw(st.permutations([box for part in parts for box in draw(cut_up(part))]))


@given(st.sampled_from(SHAPES), st.sampled_from(DTYPES), st.data())
@settings(max_examples=300, deadline=None)
def test_regions_add_up_to_the_tensor(shape, dtype, data):
    elements = random_elements(shape, dtype)
    assert total_of(elements, data.draw(cut_up(Region.full(shape)))) == total_of(elements)


@given(st.lists(st.tuples(st.sampled_from(SHAPES), st.sampled_from(DTYPES)), max_size=8), st.data())
@settings(max_examples=100, deadline=None)
def test_tensors_added_up_together_come_to_what_each_does(kinds, data):
    sums, expected = ContentSums(), {}
    for number, (shape, dtype) in enumerate(kinds):
        elements = random_elements(shape, dtype, seed=number)
        for region in data.draw(cut_up(Region.full(shape))):
            part = elements[region.slices()] if region.ndim else elements
            if part.nbytes <= SMALL_NBYTES:
                sums.add(number, shape, part, region)
                expected[number] = (expected.get(number, 0) + total_of(part, [region], shape)) % 2**64
    for _ in range(2):
        assert {number: sums.totals().get(number, 0) for number in expected} == expected


def test_memory_order_and_alignment_do_not_matter():
    elements = random_elements((6, 4201), "u2")
    total = total_of(elements)
    assert total_of(np.asfortranarray(elements)) == total
    shifted = np.empty(elements.nbytes + 1, np.uint8)[1:].view("u2").reshape(elements.shape)
    shifted[...] = elements
    assert total_of(shifted) == total


@given(st.sampled_from([shape for shape in SHAPES if math.prod(shape)]), st.sampled_from(DTYPES), st.data())
@settings(max_examples=300, deadline=None)
def test_every_flipped_bit_shows(shape, dtype, data):
    elements = random_elements(shape, dtype)
    flipped = elements.copy()
    position = data.draw(st.integers(0, elements.nbytes - 1))
    flipped.reshape(-1).view(np.uint8)[position] ^= 1 << data.draw(st.integers(0, 7))
    assert total_of(elements) != total_of(flipped)


KINDS = {
    "random": lambda shape, seed: random_elements(shape, "f4", seed),
    "zeros and ones": lambda shape, seed: np.random.default_rng(seed).integers(0, 2, shape).astype("f4"),
    "one hot": lambda shape, seed: np.eye(math.prod(shape), dtype="f8")[seed].reshape(shape),
    "signs": lambda shape, seed: np.where(np.random.default_rng(seed).integers(0, 2, shape), -0.0, 0.0),
    "small numbers": lambda shape, seed: np.random.default_rng(seed).integers(0, 4, shape).astype("f8"),
    "bools": lambda shape, seed: np.random.default_rng(seed).integers(0, 2, shape).astype("?"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(64, 48), (1, 3072), (32, 32, 3)])
def test_what_changes_places_shows(kind, shape):
    """Swapped elements, rows, columns, blocks; shifts; reversals: of data whose differences are in few bits, too."""
    draw = np.random.default_rng(1)
    for seed in range(40):
        elements = KINDS[kind](shape, seed)
        changed = []
        for dim, size in enumerate(shape):
            order = np.arange(size)
            one, other = draw.integers(0, size, 2)
            order[[one, other]] = order[[other, one]]
            changed += [np.take(elements, order, dim), np.roll(elements, 1, dim), np.flip(elements, dim)]
            changed.append(np.roll(elements, size // 2, dim))
        flat = elements.reshape(-1).copy()
        one, other = draw.integers(0, flat.size, 2)
        flat[[one, other]] = flat[[other, one]]
        changed.append(flat.reshape(shape))
        for after in changed:
            assert (total_of(after) == total_of(elements)) == (after.tobytes() == elements.tobytes())


def test_bits_count_not_values():
    nan = np.array([0x7FC00000, 0x7FC00001, 0xFFC00000, 0], "u4")
    totals = {total_of(np.full(5, bits, "u4").view("f4")) for bits in nan}
    assert len(totals) == 4
    assert total_of(np.zeros(5)) != total_of(-np.zeros(5))


def test_a_digest_is_bound_to_shape_and_dtype():
    digests = {
        content_digest(total, shape, dtype)
        for total in (0, 1, 2**64 - 1)
        for shape in ((6, 4), (4, 6), (24,), (), (0,))
        for dtype in ("float32", "int32")
    }
    assert len(digests) == 3 * 5 * 2


def test_a_digest_belongs_to_the_format():
    # Changing these numbers makes stored digests incomparable.
    elements = np.arange(6 * 1300, dtype="<f4").reshape(6, 1300)
    assert total_of(elements) == 0x65FC7276FDB5B000
    assert content_digest(total_of(elements), elements.shape, "float32") == 0x80EA80AAB6D897AB
    assert content_digest(total_of(np.arange(5, dtype="<i8")), (5,), "int64") == 0x4F0C773A04A50DAE
