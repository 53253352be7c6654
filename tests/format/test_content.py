"""Content digests: equal for equal elements however they are cut, and different for everything else."""

import functools
import math
import operator
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.shares import examples

from dtckpt.format.content import content_digest, content_share
from dtckpt.layout.region import Region

DTYPES = ("u1", "u2", "u4", "u8", "c16")
# Lines of one dim, of several, of all, and longer than a tile.
SHAPES = [(), (1,), (7,), (5000,), (3, 40), (50, 33), (9, 5, 3), (40, 7, 3, 3), (2, 3, 1100), (6, 4201), (0, 5)]


def share_of(elements, cuts=None, shape=None):
    shape = elements.shape if shape is None else shape
    shares = [
        content_share(elements[cut.slices()] if shape else elements, shape, cut) for cut in cuts or [Region.full(shape)]
    ]
    return functools.reduce(operator.xor, shares, 0)


def digest_of(elements):
    return content_digest(share_of(elements), elements.shape, elements.itemsize)


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
@settings(max_examples=examples(30), deadline=None)
def test_regions_add_up_to_the_tensor(shape, dtype, data):
    elements = random_elements(shape, dtype)
    assert share_of(elements, data.draw(cut_up(Region.full(shape)))) == share_of(elements)


def test_memory_order_and_alignment_do_not_matter():
    elements = random_elements((6, 4201), "u2")
    total = digest_of(elements)
    assert digest_of(np.asfortranarray(elements)) == total
    shifted = np.empty(elements.nbytes + 1, np.uint8)[1:].view("u2").reshape(elements.shape)
    shifted[...] = elements
    assert digest_of(shifted) == total


@given(st.sampled_from([shape for shape in SHAPES if math.prod(shape)]), st.sampled_from(DTYPES), st.data())
@settings(max_examples=examples(30), deadline=None)
def test_every_flipped_bit_shows(shape, dtype, data):
    elements = random_elements(shape, dtype)
    flipped = elements.copy()
    position = data.draw(st.integers(0, elements.nbytes - 1))
    flipped.reshape(-1).view(np.uint8)[position] ^= 1 << data.draw(st.integers(0, 7))
    assert digest_of(elements) != digest_of(flipped)


KINDS = {
    "random": lambda shape, seed: random_elements(shape, "f4", seed),
    "zeros and ones": lambda shape, seed: np.random.default_rng(seed).integers(0, 2, shape).astype("f4"),
    "one hot": lambda shape, seed: np.eye(math.prod(shape), dtype="f8")[seed].reshape(shape),
    "signs": lambda shape, seed: np.where(np.random.default_rng(seed).integers(0, 2, shape), -0.0, 0.0),
    "small numbers": lambda shape, seed: np.random.default_rng(seed).integers(0, 4, shape).astype("f8"),
    "bools": lambda shape, seed: np.random.default_rng(seed).integers(0, 2, shape).astype("?"),
}


@pytest.mark.share(6)
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
            assert (digest_of(after) == digest_of(elements)) == (after.tobytes() == elements.tobytes())


def test_bits_count_not_values():
    nan = np.array([0x7FC00000, 0x7FC00001, 0xFFC00000, 0], "u4")
    totals = {digest_of(np.full(5, bits, "u4").view("f4")) for bits in nan}
    assert len(totals) == 4
    assert digest_of(np.zeros(5)) != digest_of(-np.zeros(5))


@given(st.sampled_from(SHAPES), st.sampled_from(DTYPES))
def test_a_digest_is_the_crc_of_the_bytes(shape, dtype):
    """Bit by bit, as the catalogue of CRCs defines CRC-64/NVME; so any other program can compare it."""
    elements = random_elements(shape, dtype)[:5] if shape else random_elements(shape, dtype)
    register = 2**64 - 1
    for byte in elements.tobytes():
        register ^= byte
        for _ in range(8):
            register = register >> 1 ^ (register & 1) * 0x9A6C9329AC4BC9B5
    assert digest_of(elements) == register ^ (2**64 - 1)


def test_the_check_value_of_the_catalogue():
    assert digest_of(np.frombuffer(b"123456789", "u1")) == 0xAE8B14860A799888


@pytest.mark.parametrize("width", [1, 2, 31, 128, 5000])
@pytest.mark.parametrize("rows", [3, 64, 65, 4099])
def test_many_runs_and_few_long_ones_and_short(rows, width):
    whole = random_elements((rows, width + 40), "u1")
    cuts = [Region((0, 0), (rows, 33)), Region((0, 33), (rows, width)), Region((0, 33 + width), (rows, 7))]
    assert share_of(whole, cuts) == share_of(whole)


@pytest.mark.share(1)
@pytest.mark.parametrize("width", [1, 2, 2000])
def test_copies_that_are_made_are_bounded(width):
    """Of runs that are taken with what lies between them, that are not, and of a transposed tensor."""
    whole = random_elements(((24 << 20) // width, width), "u1")
    narrow, wide = (len(whole), 2 * width), (len(whole), 2000 * width)
    beside_zeros = np.concatenate([np.zeros_like(whole), whole], axis=1)
    expected = share_of(whole.T.copy()), share_of(beside_zeros)
    tracemalloc.start()
    try:
        assert share_of(whole.T) == expected[0]
        assert content_share(whole, narrow, Region((0, width), whole.shape)) == expected[1]
        content_share(whole, wide, Region((0, width), whole.shape))
        assert tracemalloc.get_traced_memory()[1] < 12 << 20
    finally:
        tracemalloc.stop()


def test_a_tensor_too_large_for_any_machine():
    """Only the distance to the tensor's end counts, not what lies there."""
    one, other = np.ones(3, "u1"), np.ones(5, "u1")
    shape = (1 << 29, 1 << 29)
    at = content_share(one[None], shape, Region((0, 0), (1, 3)))
    rest = content_share(other[None], shape, Region((0, 3), (1, 5)))
    assert at ^ rest == content_share(np.ones((1, 8), "u1"), shape, Region((0, 0), (1, 8)))
