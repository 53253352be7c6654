"""Random numbers by element: each part, on any device, has the numbers of the whole tensor."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from redistribution import redistribution_cases
from support.states import NUM_GPUS, bits_of
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from dtckpt import Region, abstract_mesh, dtensor
from dtckpt.dtensor.random import agreed_key, draw_key, fill, fill_component, integer_bounds, permutation
from dtckpt.dtensor.random.distributions import sampler_of
from dtckpt.dtensor.random.fill_component import pieces_of
from dtckpt.dtensor.random.philox import TensorStream, stream_of
from dtckpt.errors import ComponentError, DTypeError, RandomParameterError, RegionError

from . import random_key_cases

CPU = torch.device("cpu")
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INTEGERS = [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64]
COMPLEX = [torch.complex64, torch.complex128]
CASES = [
    *[("uniform", dtype, {}) for dtype in FLOATS + COMPLEX],
    *[("normal", dtype, {"mean": 1.0, "std": 3.0}) for dtype in FLOATS + COMPLEX],
    *[("exponential", dtype, {"lambd": 2.0}) for dtype in FLOATS],
    *[("cauchy", dtype, {}) for dtype in FLOATS],
    *[("log_normal", dtype, {}) for dtype in FLOATS],
    *[("geometric", dtype, {"p": 0.2}) for dtype in FLOATS + INTEGERS],
    *[("bernoulli", dtype, {"p": 0.3}) for dtype in FLOATS + INTEGERS + [torch.bool]],
    *[("integers", dtype, {}) for dtype in FLOATS + INTEGERS + [torch.bool]],
    ("integers", torch.int64, {"low": -(2**63), "high": 2**63 - 5}),
    ("uniform", torch.float32, {"low": -2.0, "high": 5.0}),
]
EXACT = {"uniform", "bernoulli", "integers"}


def whole_of(kind, shape, key=5, dtype=torch.float32, **params):
    made = torch.empty(shape, dtype=dtype)
    fill(kind, made, Region.full(shape), shape, key, **params)
    return made


# --- bits ----------------------------------------------------------------------------------------------------------


def philox4x64(counter, key):
    """The cipher as the paper has it."""
    word = 1 << 64
    (a, b, c, d), (k, m) = counter, key
    for _ in range(10):
        first, second = 0xD2E7470EE14C6C93 * a, 0xCA5A826395121157 * c
        a, b, c, d = second // word ^ b ^ k, second % word, first // word ^ d ^ m, first % word
        k, m = (k + 0x9E3779B97F4A7C15) % word, (m + 0xBB67AE8584CAA73B) % word
    return [a, b, c, d]


def test_the_cipher_of_the_paper():
    """A known answer of the authors' Random123."""
    ones = 2**64 - 1
    answer = [0x87B092C3013FE90B, 0x438C3C67BE8D0224, 0x9CC7D7C69CD777B6, 0xA09CAEBF594F0BA0]
    assert philox4x64([ones] * 4, [ones] * 2) == answer


@given(st.integers(0, 2**63 - 1), st.one_of(st.integers(0, 2**20), st.integers(2**40, 2**60)), st.integers(1, 20))
def test_words_by_position(key, first, count):
    expected = [word for block in range(first, first + count) for word in philox4x64([block, 0, 0, 0], [key, 0])]
    for stream in (stream_of(key, CPU), TensorStream(key, CPU)):
        stream.words(3, 2)
        assert [word % 2**64 for word in stream.words(first, count).tolist()] == expected
        assert [word % 2**64 for word in stream.words(first + 1, 1).tolist()] == philox4x64(
            [first + 1, 0, 0, 0], [key, 0]
        )


# --- parts -----------------------------------------------------------------------------------------------------------


@given(st.integers(0, 2**32))
def test_parts_of_any_layout_are_cut_from_the_whole(seed):
    rng = random.Random(seed)
    mesh = abstract_mesh(redistribution_cases.random_axes(rng))
    kind, dtype, params = rng.choice(CASES)
    shape = tuple(rng.choice([rng.randint(0, 7), rng.randint(1, 40), 130]) for _ in range(rng.randint(0, 3)))
    layout, key = redistribution_cases.random_layout(rng, mesh, len(shape)), rng.getrandbits(63)
    whole = whole_of(kind, shape, key, dtype, **params)
    for device in mesh.local_device_ids():
        region = layout.region(device, shape)
        part = torch.empty(region.shape, dtype=dtype)
        fill(kind, part, region, shape, key, **params)
        assert bits_of(part) == bits_of(whole[region.slices()])


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(
    ("kind", "dtype"), [("uniform", torch.bfloat16), ("normal", torch.float32), ("normal", torch.float64)]
)
def test_large_parts(kind, dtype, threads, monkeypatch):
    """Long rows, gaps that are skipped and gaps that are not, odd ends, and several threads."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    shape = (3, 5, 70_001)
    whole = whole_of(kind, shape, 9, dtype)
    for offset, size in [
        ((0, 0, 0), shape),
        ((1, 1, 1), (2, 3, 69_999)),
        ((0, 2, 31), (3, 2, 50)),
        ((1, 0, 5), (1, 5, 66_000)),
    ]:
        part = torch.empty(size[::-1], dtype=dtype).permute(2, 1, 0)
        fill(kind, part, Region(offset, size), shape, 9)
        assert bits_of(part) == bits_of(whole[Region(offset, size).slices()])


@given(
    st.lists(st.tuples(st.integers(1, 60), st.floats(0, 1), st.floats(0, 1)), max_size=4),
    st.integers(1, 3000),
    st.integers(0, 3000),
)
def test_pieces_cover_a_region_once_and_no_more_than_the_whole(dims, block, seek):
    shape = tuple(size for size, *_ in dims)
    offset = tuple(int(start * (size - 1)) for size, start, _ in dims)
    left = [size - begin for size, begin in zip(shape, offset, strict=True)]
    region = Region(offset, tuple(1 + int(part * (size - 1)) for size, (*_, part) in zip(left, dims, strict=True)))
    numbers = torch.arange(math.prod(shape)).reshape(shape)
    seen, end = torch.full(region.shape, -1), 0
    for piece in pieces_of(region, shape, block, seek):
        assert piece.count <= block
        assert piece.first >= end, "an element is made twice"
        end = piece.first + piece.count
        run = torch.arange(piece.first, end)
        box = tuple(slice(start, start + size) for start, size in zip(piece.offset, piece.shape, strict=True))
        assert bool((seen[box] == -1).all())
        seen[box] = run.as_strided(piece.shape, piece.strides)
    assert torch.equal(seen, numbers[region.slices()])


def test_long_gaps_are_skipped():
    pieces = list(pieces_of(Region((0, 7), (4, 10)), (4, 1_000_000), 30_000))
    assert [piece.count for piece in pieces] == [10] * 4


def test_a_gpu_starts_few_runs():
    half = Region((0, 0), (8192, 16384))
    assert (
        len(list(pieces_of(half, (8192, 32768), fill_component._DEVICE_BLOCK, fill_component._DEVICE_SEEK)))
        <= 8192 / 16
    )


@pytest.mark.parametrize(("kind", "dtype", "params"), CASES)
def test_other_devices_make_the_same_numbers(kind, dtype, params, monkeypatch):
    shape = (37, 129)
    expected = whole_of(kind, shape, 77, dtype, **params)
    monkeypatch.setattr("dtckpt.dtensor.random.fill_component.stream_of", TensorStream)
    assert bits_of(whole_of(kind, shape, 77, dtype, **params)) == bits_of(expected)


@pytest.mark.cuda
@pytest.mark.skipif(not NUM_GPUS, reason="the numbers of a GPU are to be seen on one")
@pytest.mark.parametrize(("kind", "dtype", "params"), CASES)
def test_gpus_make_the_same_numbers(kind, dtype, params):
    shape = (300, 7001)
    made = torch.empty(shape, dtype=dtype, device="cuda")
    fill(kind, made, Region.full(shape), shape, 77, **params)
    expected = whole_of(kind, shape, 77, dtype, **params)
    if kind in EXACT:
        assert bits_of(made) == bits_of(expected)
    elif (kind, dtype) == ("log_normal", torch.float32):
        # A GPU's expf, logf and cosf are off by up to two units in the last place. The exponential function makes of
        # an absolute error a relative one, several units large where the normal number is.
        torch.testing.assert_close(made.cpu(), expected, rtol=1e-5, atol=1e-5)
    else:
        torch.testing.assert_close(made.cpu(), expected)


class Calls(TorchDispatchMode):
    """Notes which operators run."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("kind", "params"), [("uniform", {}), ("exponential", {}), ("bernoulli", {"p": ...}), ("integers", {"high": 9})]
)
def test_the_host_does_not_wait_for_a_gpu(kind, params):
    with FakeTensorMode(), Calls() as calls:
        params = {
            name: torch.full((1024,), 0.5, device="cuda") if value is ... else value for name, value in params.items()
        }
        sampler = sampler_of(kind, torch.float32, params)
        sampler.from_words(TensorStream(5, torch.device("cuda")).words(0, 1024 * sampler.bits // 256))
    # The first brings a number of Python's to the GPU, the second one from there.
    assert not calls.names & {"aten::lift_fresh", "aten::_local_scalar_dense"}


def test_no_graph_repeats_the_same_numbers(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    before = torch.get_rng_state()
    with pytest.raises(RandomParameterError, match="a CUDA graph that draws them cannot be captured"):
        dtensor.rand(4, device_mesh=abstract_mesh({"x": 2}))
    assert torch.equal(torch.get_rng_state(), before)


def test_meta_and_empty_parts():
    fill("normal", torch.empty(3, device="meta"), Region((0,), (3,)), (5,), 1)
    fill("normal", torch.empty(0), Region((5,), (0,)), (5,), 1)


def test_parts_that_need_gradients_or_come_of_inference(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    expected = whole_of("normal", (200_000,), 1)
    leaf = torch.empty(200_000, requires_grad=True)
    fill("normal", leaf, Region((0,), (200_000,)), (200_000,), 1)
    assert torch.equal(leaf.detach(), expected)
    with torch.inference_mode():
        assert torch.equal(whole_of("normal", (200_000,), 1), expected)


# --- distributions ---------------------------------------------------------------------------------------------------

SAMPLES = 1 << 20


def distance(samples, distribution):
    """Kolmogorov's distance, times the root of the number: above 1.95 in one case of 1000."""
    ordered = np.sort(samples.to(torch.float64).numpy())
    expected = distribution(ordered)
    steps = np.arange(len(ordered) + 1) / len(ordered)
    return max((steps[1:] - expected).max(), (expected - steps[:-1]).max()) * math.sqrt(len(ordered))


def normal_cdf(values):
    return torch.special.ndtr(torch.from_numpy(values)).numpy()


CONTINUOUS = {
    "uniform": ({"low": -1.0, "high": 3.0}, lambda x: np.clip((x + 1) / 4, 0, 1)),
    "normal": ({"mean": 2.0, "std": 3.0}, lambda x: normal_cdf((x - 2) / 3)),
    "log_normal": ({"mean": 0.5, "std": 1.5}, lambda x: normal_cdf((np.log(x) - 0.5) / 1.5)),
    "exponential": ({"lambd": 2.5}, lambda x: 1 - np.exp(-2.5 * x)),
    "cauchy": ({"median": 1.0, "sigma": 2.0}, lambda x: np.arctan((x - 1) / 2) / math.pi + 0.5),
}


@pytest.mark.share(8)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", CONTINUOUS)
@pytest.mark.parametrize("key", [1, 2, 2**62])
def test_continuous_distributions(kind, dtype, key):
    params, distribution = CONTINUOUS[kind]
    assert distance(whole_of(kind, (SAMPLES,), key, dtype, **params), distribution) < 1.95


def excess(counts, expected):
    """Chi-square's distance from its mean, in standard deviations."""
    expected = torch.as_tensor(expected, dtype=torch.float64)
    square = float(((counts - expected) ** 2 / expected).sum())
    return (square - (len(counts) - 1)) / math.sqrt(2 * (len(counts) - 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.int32])
@pytest.mark.parametrize("p", [0.5, 0.05])
def test_geometric(dtype, p):
    made = whole_of("geometric", (SAMPLES,), 3, dtype, p=p).to(torch.int64)
    top = int(math.log(100 / SAMPLES) / math.log1p(-p))
    counts = torch.bincount(made.clamp(max=top + 1), minlength=top + 2)
    chances = [(1 - p) ** (k - 1) * p for k in range(1, top + 1)]
    assert counts[0] == 0
    assert abs(excess(counts[1:], [SAMPLES * chance for chance in [*chances, 1 - sum(chances)]])) < 4


@pytest.mark.share(5)
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.uint8])
@pytest.mark.parametrize("p", [0.0, 1e-3, 0.1, 0.5, 0.9, 1.0])
def test_bernoulli(dtype, p):
    made = whole_of("bernoulli", (SAMPLES,), 3, dtype, p=p).to(torch.float64)
    assert set(made.tolist()) <= {0.0, 1.0}
    assert abs(made.mean() - p) <= 4 * math.sqrt(p * (1 - p) / SAMPLES)
    chances = torch.full((SAMPLES,), p, dtype=torch.float64 if dtype == torch.uint8 else torch.float32)
    made = whole_of("bernoulli", (SAMPLES,), 3, dtype, p=chances).to(torch.float64)
    assert abs(made.mean() - p) <= 4 * math.sqrt(p * (1 - p) / SAMPLES)


def test_bernoulli_by_element():
    chances = torch.linspace(0, 1, 60_000).reshape(3, 200, 100)
    whole = whole_of("bernoulli", chances.shape, 8, p=chances)
    assert abs(float((whole - chances).mean())) < 0.01
    assert abs(float(whole[0].mean()) - 1 / 6) < 0.02
    region = Region((1, 50, 20), (2, 100, 30))
    part = torch.empty(region.shape)
    fill("bernoulli", part, region, chances.shape, 8, p=chances[region.slices()])
    assert torch.equal(part, whole[region.slices()])


@pytest.mark.parametrize("span", [1, 2, 7, 100, 1000])
def test_integers(span):
    made = whole_of("integers", (SAMPLES,), 4, torch.int64, low=-3, high=span - 3)
    counts = torch.bincount(made + 3, minlength=span)
    assert len(counts) == span
    assert span == 1 or abs(excess(counts, [SAMPLES / span] * span)) < 4


@pytest.mark.parametrize(
    ("low", "high"),
    [(0, 2**32), (-5, 2**32 - 4), (0, 3 << 61), (-(2**63), 2**63), (-(2**63), 2**63 - 1), (2**62, 2**63), (-7, 2**40)],
)
def test_integers_of_long_ranges(low, high):
    """Into eight equal parts of the range fall equally many; the product's upper word would be off by half."""
    made = whole_of("integers", (SAMPLES,), 5, torch.int64, low=low, high=high)
    assert low <= int(made.min())
    assert int(made.max()) < high
    assert distance((made.to(torch.float64) - float(low)) / float(high - low), lambda x: x) < 1.95
    assert made.unique().numel() > 0.99 * SAMPLES


def test_wide_products_are_exact():
    """Against integers of any length."""
    span, count = 3**40 - 1, 64
    made = whole_of("integers", (count,), 6, torch.int64, low=-(2**63), high=span - 2**63)
    words = [word % 2**64 for word in stream_of(6, CPU).words(0, count // 2).tolist()]
    assert made.tolist() == [
        ((high << 64 | low) * span >> 128) - 2**63 for high, low in zip(words[::2], words[1::2], strict=True)
    ]


@pytest.mark.parametrize(("kind", "params"), [("uniform", {}), ("normal", {}), ("exponential", {})])
def test_neighbours_and_keys_are_independent(kind, params):
    def correlation(one, other):
        return abs(float(torch.corrcoef(torch.stack([one, other]).to(torch.float64))[0, 1])) * math.sqrt(len(one))

    made = whole_of(kind, (SAMPLES,), 10, **params)
    for distance_ in (1, 2, 4, 8, 32, 64, 128):
        assert correlation(made[distance_:], made[:-distance_]) < 4
        assert correlation(made[distance_:] ** 2, made[:-distance_] ** 2) < 4
    for key in (11, 12, 10 + 2**32):
        other = whole_of(kind, (SAMPLES,), key, **params)
        assert correlation(made, other) < 4
        assert not torch.equal(made, other)


@pytest.mark.parametrize(("dtype", "sigmas"), [(torch.float32, 6), (torch.float64, 9)])
def test_tails_of_the_normal_distribution(dtype, sigmas):
    """The smallest word gives the farthest number, and a finite one; the largest gives zero, whatever the angle."""
    sampler = sampler_of("normal", dtype, {})
    bits = torch.zeros(128 * sampler.bits // 64, dtype=torch.int64)
    assert sigmas < float(sampler.from_words(bits.clone())[0]) < sigmas + 1
    largest = -(2**63) if dtype == torch.float64 else -0x7FFFFFFF80000000
    assert sampler.from_words(torch.full_like(bits, largest)).abs().max() == 0


@pytest.mark.parametrize("dtype", FLOATS)
def test_extremes(dtype):
    """What all-zero and all-one words, and those at the middle, become."""
    by_width = [0x7FFF7FFF7FFF7FFF, -0x7FFF7FFF7FFF8000, 0x7FFFFFFF7FFFFFFF, -0x7FFFFFFF80000000]
    patterns = [0, -1, 2**63 - 1, -(2**63), *by_width]
    for kind, params in [
        ("uniform", {}),
        ("uniform", {"low": 1.0, "high": 2.0}),
        ("uniform", {"low": -1.0, "high": 0.1}),
        ("exponential", {}),
        ("exponential", {"lambd": 1e6}),
        ("exponential", {"lambd": 1e-30}),
        ("cauchy", {}),
        ("geometric", {"p": 1e-12}),
        ("geometric", {"p": 1.0}),
    ]:
        sampler = sampler_of(kind, dtype, params)
        for pattern in patterns:
            made = sampler.from_words(torch.full((128 * sampler.bits // 64,), pattern)).to(dtype)
            assert bool(made.isfinite().all()), (kind, params, hex(pattern))
            if kind == "uniform":
                assert params.get("low", 0.0) <= float(made.min())
                assert float(made.max()) < params.get("high", 1.0)
            if kind == "exponential":
                assert float(made.min()) > 0
            if kind == "geometric":
                assert float(made.min()) >= 1


@pytest.mark.parametrize("dtype", FLOATS)
def test_uniform_numbers_take_all_values_of_their_grid(dtype):
    made = whole_of("uniform", (SAMPLES,), 2, dtype).to(torch.float64)
    digits = {torch.float16: 11, torch.bfloat16: 8}.get(dtype)
    assert 0 <= float(made.min()) < 0.001
    assert 0.99 < float(made.max()) < 1
    if digits:
        counts = torch.bincount((made * 2**digits).to(torch.int64), minlength=2**digits)
        assert len(counts) == 2**digits
        assert abs(excess(counts, [SAMPLES / 2**digits] * 2**digits)) < 4
    else:
        assert made.unique().numel() > 0.96 * SAMPLES


@pytest.mark.parametrize("dtype", COMPLEX)
def test_complex_numbers(dtype):
    made = whole_of("normal", (SAMPLES,), 2, dtype)
    assert abs(float(made.abs().square().mean()) - 1) < 0.01
    for part in (made.real, made.imag):
        assert distance(part, lambda x: normal_cdf(x * math.sqrt(2))) < 1.95


def test_bounds_of_integers():
    assert integer_bounds(torch.int8) == (0, 128)
    assert integer_bounds(torch.bool) == (0, 2)
    assert integer_bounds(torch.float32) == (0, 2**24 + 1)
    assert integer_bounds(torch.int64, -4, 9) == (-4, 9)
    assert set(whole_of("integers", (10_000,), 1, torch.uint8).tolist()) == set(range(256))
    assert set(whole_of("integers", (10_000,), 1, torch.int8, low=-128, high=128).tolist()) == set(range(-128, 128))
    assert int(whole_of("integers", (10_000,), 1, torch.uint64).to(torch.float64).max()) > 2**63


# --- permutations ----------------------------------------------------------------------------------------------------


def test_permutations():
    for length in (0, 1, 2, 1000, 70_001):
        made = permutation(length, 3, CPU)
        assert torch.equal(made.sort().values, torch.arange(length))
        assert torch.equal(made, permutation(length, 3, CPU))
    assert not torch.equal(permutation(1000, 3, CPU), permutation(1000, 4, CPU))


def test_permutations_are_equally_likely():
    codes = [int("".join(map(str, permutation(4, key, CPU).tolist()))) for key in range(12_000)]
    _, counts = torch.tensor(codes).unique(return_counts=True)
    assert len(counts) == 24
    assert abs(excess(counts, [500.0] * 24)) < 4


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "text", "kind", "dtype", "params"),
    [
        (RandomParameterError, "got kind 'poisson'", "poisson", torch.float32, {}),
        (DTypeError, "got torch.int64 for normal", "normal", torch.int64, {}),
        (DTypeError, "got torch.bool for geometric", "geometric", torch.bool, {"p": 0.5}),
        (RandomParameterError, "std -1", "normal", torch.float32, {"std": -1.0}),
        (RandomParameterError, "std nan", "normal", torch.float32, {"std": math.nan}),
        (RandomParameterError, "bounds 2 and 1", "uniform", torch.float32, {"low": 2, "high": 1}),
        (RandomParameterError, "no further apart", "uniform", torch.float16, {"low": -6e4, "high": 6e4}),
        (RandomParameterError, "bounds 1 and 1", "integers", torch.int64, {"low": 1, "high": 1}),
        (RandomParameterError, "integers that torch.int8 has", "integers", torch.int8, {"high": 129}),
        (RandomParameterError, "integers that torch.uint8 has", "integers", torch.uint8, {"low": -1}),
        (RandomParameterError, "2\\*\\*64 apart", "integers", torch.float32, {"high": 2**65}),
        (RandomParameterError, "p 1.5", "bernoulli", torch.float32, {"p": 1.5}),
        (RandomParameterError, "floats from 0 to 1", "bernoulli", torch.float32, {"p": torch.tensor([0, 0.5, 1.1])}),
        (RandomParameterError, "floats from 0 to 1", "bernoulli", torch.float32, {"p": torch.tensor([0, 1, 1])}),
        (ComponentError, "got shape \\(2,\\)", "bernoulli", torch.float32, {"p": torch.zeros(2)}),
        (RandomParameterError, "p 0", "geometric", torch.float32, {"p": 0}),
        (RandomParameterError, "lambd 0", "exponential", torch.float32, {"lambd": 0}),
        (RandomParameterError, "sigma 0", "cauchy", torch.float32, {"sigma": 0}),
        (RandomParameterError, "std 0", "log_normal", torch.float32, {"std": 0}),
    ],
)
def test_what_is_refused(error, text, kind, dtype, params):
    with pytest.raises(error, match=text):
        whole_of(kind, (3,), 1, dtype, **params)


def test_regions_and_keys_that_are_refused():
    with pytest.raises(ComponentError, match="part of shape"):
        fill("normal", torch.empty(3), Region((0,), (4,)), (9,), 1)
    for region, shape in [(Region((7,), (3,)), (9,)), (Region((7,), (3,)), (9, 9))]:
        with pytest.raises(RegionError, match="expected one of a tensor of shape"):
            fill("normal", torch.empty(3), region, shape, 1)
    for key in (-1, 2**63):
        with pytest.raises(RandomParameterError, match="got key"):
            whole_of("normal", (3,), key)
    with pytest.raises(RandomParameterError, match="got length -1"):
        permutation(-1, 0, CPU)


# --- keys ------------------------------------------------------------------------------------------------------------


def test_keys_follow_from_the_generator():
    torch.manual_seed(4)
    state = torch.get_rng_state()
    keys = [draw_key() for _ in range(5)]
    assert len(set(keys)) == 5
    assert all(0 <= key < 2**63 for key in keys)
    torch.set_rng_state(state)
    assert [draw_key() for _ in range(5)] == keys
    assert draw_key(torch.Generator().manual_seed(4)) == keys[0]
    torch.manual_seed(4)
    with torch.random.fork_rng(devices=[]):
        draw_key()
    assert agreed_key(abstract_mesh({"x": 2})) == keys[0]


@pytest.mark.parametrize("make", [dtensor.rand, dtensor.randn])
@given(st.integers(0, 2**32))
def test_layouts_give_one_tensor(make, seed):
    rng = random.Random(seed)
    mesh = abstract_mesh(redistribution_cases.random_axes(rng))
    shape = tuple(rng.randint(0, 9) for _ in range(rng.randint(0, 3)))
    torch.manual_seed(seed)
    layout = redistribution_cases.random_layout(rng, mesh, len(shape))
    placements = [dtensor.Replicate() if each.is_partial() else each for each in layout.placements]
    made = make(*shape, device_mesh=mesh, placements=placements).full_tensor()
    torch.manual_seed(seed)
    alone = make(*shape, device_mesh=abstract_mesh({"x": 1})).full_tensor()
    assert bits_of(made) == bits_of(alone)


# --- several clients -------------------------------------------------------------------------------------------------


def agreed(pool, seeds, draws, **options):
    answers = pool.run(
        random_key_cases.draw_and_recover,
        draws,
        clients=len(seeds),
        group=True,
        by_client={client: (seed,) for client, seed in enumerate(seeds)},
        **options,
    )
    assert [answer.trace for answer in answers] == [""] * len(seeds)
    return [answer.value for answer in answers]


@pytest.mark.processes
def test_clients_with_one_seed_agree(pool):
    seen = agreed(pool, [3, 3], 70)
    assert seen[0] == seen[1]
    assert seen[0].errors == []
    assert seen[0].compared == [1, 2, 3, 4, 64]


@pytest.mark.processes
def test_clients_with_several_seeds_take_the_keys_of_the_first(pool):
    seen = agreed(pool, [3, 4, 3], 70)
    assert [one.errors for one in seen] == [[], [], []]
    torch.manual_seed(3)
    assert [one.keys for one in seen] == [[draw_key() for _ in range(70)]] * 3
    assert seen[0].compared == list(range(1, 71)), "each of them is asked for"
    assert len({one.after for one in seen}) == 1, "seeded alike, they agree again"


@pytest.mark.processes
def test_clients_that_go_apart_later_are_found_at_the_next_comparison(pool):
    seen = agreed(pool, [3, 3], 64, apart_at=20)
    assert [len(one.errors) for one in seen] == [1, 1]
    assert seen[0].errors == seen[1].errors
    assert seen[0].errors[0].startswith("GeneratorMismatchError: random numbers: clients [0], [1] drew different keys")
    assert "torch.manual_seed" in seen[0].errors[0]
    assert seen[0].compared == [1, 2, 3, 4, 64]


@pytest.mark.processes
def test_every_process_group_is_compared_anew(pool):
    for _ in range(2):
        assert [one.compared for one in agreed(pool, [5, 5], 3)] == [[1, 2, 3]] * 2


@pytest.mark.processes
def test_a_client_that_does_not_come_is_an_error(pool):
    alone, absent = pool.values(random_key_cases.draw_alone, clients=2, group=True)
    assert alone.startswith("CoordinationError: comparing random keys among clients 0, 1 failed")
    assert absent == ""
