"""Element types: every storable one, and which conversions are lossless."""

import itertools

import ml_dtypes
import numpy as np
import pytest
import torch

from dtckpt.errors import DTypeError
from dtckpt.format.dtypes import (
    DTYPES,
    EXTENSIONS,
    UNCONVERTED,
    fill_value,
    is_convertible,
    is_floating,
    is_lossless,
    validate_dtype,
    zarr_data_type,
)

NUMBERS = [name for name in DTYPES if name not in UNCONVERTED]
SMALL = [name for name in NUMBERS if DTYPES[name].itemsize <= 2]


def every_value(name):
    if name == "bool":
        return np.array([False, True])
    size = DTYPES[name].itemsize
    return np.arange(1 << 8 * size, dtype=f"u{size}").view(DTYPES[name])


def edge_values(name):
    """Values of a large type at which conversions break."""
    dtype = DTYPES[name]
    kind = np.dtype(f"f{dtype.itemsize // 2}") if dtype.kind == "c" else dtype
    if kind.kind in "iu":
        info = ml_dtypes.iinfo(kind)
        powers = [value for bit in range(64) for value in (2**bit - 1, 2**bit, 2**bit + 1)]
        found = {info.min, info.max, *(v for p in powers for v in (p, -p) if info.min <= v <= info.max)}
        return np.array(sorted(found), kind)
    info = np.finfo(kind)
    numbers = [0.0, -0.0, 1.0, info.max, info.min, info.tiny, info.smallest_subnormal, 1 + info.eps, np.inf, np.nan]
    values = np.array(numbers, kind)
    if dtype.kind != "c":
        return values
    both = np.zeros(2 * len(values), dtype)
    both.real[: len(values)] = values
    both.imag[len(values) :] = values
    return both


def parts(array):
    if array.dtype.kind == "c":
        return [array.real, array.imag]
    return [array]


@np.errstate(all="ignore")
def keeps(source, target):
    """Whether numpy's conversion keeps every value, compared exactly and with the sign of zeros."""
    values = every_value(source) if source in SMALL else edge_values(source)
    converted = values.astype(DTYPES[target])
    pairs = itertools.zip_longest(parts(values), parts(converted), fillvalue=np.zeros(len(values)))
    return all(_same(have, want) for want, have in pairs)


def _same(have, want):
    for left, right in zip(_exact(have), _exact(want), strict=True):
        if left != right and not (left != left and right != right):
            return False
    floats = [array.astype(np.float64) for array in (have, want) if array.dtype.kind not in "iub"]
    if len(floats) == 2:
        zero = floats[0] == 0
        return bool((np.signbit(floats[0]) == np.signbit(floats[1]))[zero].all())
    return True


def _exact(array):
    if array.dtype.kind in "iub":
        return [int(value) for value in array]
    return array.astype(np.float64).tolist()  # exact for every float of up to 64 bits


@pytest.mark.parametrize("source", NUMBERS)
def test_lossless_means_that_every_value_survives(source):
    for target in NUMBERS:
        if is_lossless(source, target):
            assert keeps(source, target), f"{source} -> {target} loses values"


@pytest.mark.parametrize("source", SMALL)
def test_conversions_that_keep_every_value_need_no_consent(source):
    for target in NUMBERS:
        if keeps(source, target):
            assert is_lossless(source, target), f"{source} -> {target} keeps every value"


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        ("bfloat16", "float32", True),
        ("float32", "bfloat16", False),
        ("float16", "bfloat16", False),
        ("int32", "float32", False),
        ("int32", "float64", True),
        ("int64", "float64", False),
        ("uint32", "int64", True),
        ("uint64", "int64", False),
        ("float32", "complex64", True),
        ("complex64", "float32", False),
        ("complex64", "complex128", True),
        ("float64", "complex64", False),
        ("float8_e4m3fn", "float16", True),
        ("float8_e5m2", "bfloat16", True),
        ("int8", "bool", False),
    ],
)
def test_well_known_conversions(source, target, expected):
    assert is_lossless(source, target) is expected


@pytest.mark.parametrize("name", UNCONVERTED)
def test_some_dtypes_are_never_converted(name):
    for other in DTYPES:
        is_same = other == name
        assert is_convertible(name, other) is is_convertible(other, name) is is_same
        assert is_lossless(name, other) is is_lossless(other, name) is is_same


def test_dtypes_are_torchs_and_zarrs():
    for name, dtype in DTYPES.items():
        assert getattr(torch, name).itemsize == dtype.itemsize
        assert dtype.name == {"float4_e2m1fn_x2": "uint8", "complex32": "uint32"}.get(name, name)
        assert is_floating(name) == (getattr(torch, name).is_floating_point and name not in UNCONVERTED)
    assert (fill_value("bool"), fill_value("complex64"), fill_value("int8")) == (False, [0.0, 0.0], 0)


def test_raw_bits_are_of_zarrs_core():
    core = {
        "bool",
        "complex64",
        "complex128",
        *(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)),
    }
    core |= {"float16", "float32", "float64"}
    for name, dtype in DTYPES.items():
        data_type = zarr_data_type(name, raw_bits=True)
        assert data_type in core
        assert np.dtype(data_type).itemsize == dtype.itemsize
        assert (data_type == zarr_data_type(name)) == (name not in EXTENSIONS)
    assert (zarr_data_type("bfloat16", raw_bits=True), fill_value("uint16")) == ("uint16", 0)


@pytest.mark.parametrize("name", ["qint8", "bits8", "int4", "", "object", "float"])
def test_other_dtypes_are_refused(name):
    with pytest.raises(DTypeError, match="cannot be stored; got"):
        validate_dtype(name)
