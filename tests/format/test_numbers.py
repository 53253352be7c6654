import itertools

import ml_dtypes
import numpy as np
import pytest
import torch
from support.states import tensor_of

from dtckpt.format.dtypes import DTYPES, PACKED, bits_of, common_dtype, numbers_of

FLOATS = sorted(name for name in DTYPES if name.startswith(("float", "bfloat")) and name != PACKED)


@pytest.mark.parametrize("dtype", FLOATS)
def test_floats_keep_their_values(dtype):
    """PyTorch has all of these dtypes, and does not use ml_dtypes."""
    tensor = tensor_of("numbers", (64,), dtype)
    elements = np.frombuffer(tensor.view(torch.uint8).numpy().tobytes(), DTYPES[dtype])
    np.testing.assert_array_equal(numbers_of(elements, dtype).astype(np.float64), tensor.double().numpy())


def test_packed_numbers():
    elements = np.arange(256, dtype=np.uint8)
    low, high = (part.astype(np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32) for part in divide(elements))
    np.testing.assert_array_equal(numbers_of(elements, PACKED), np.stack([low, high], axis=-1))


def divide(elements):
    return elements % 16, elements // 16


def test_halves_of_complex_numbers():
    parts = np.array([[1.5, -2.0], [np.inf, 0.25]], np.float16)
    numbers = numbers_of(parts.view(np.uint32)[:, 0], "complex32")
    assert numbers.tolist() == [1.5 - 2j, complex(np.inf, 0.25)]


NUMBERS = [np.dtype(name) for name in ("bool", "int8", "int64", "uint64", "float16", "float32", "float64", "complex64")]


@pytest.mark.parametrize(("first", "second"), list(itertools.product(NUMBERS, NUMBERS)), ids=str)
def test_a_common_dtype_holds_both(first, second):
    common = common_dtype(first, second)
    assert common == common_dtype(second, first)
    for dtype in (first, second):
        info = np.iinfo(dtype) if dtype.kind in "iu" else None
        values = np.array([info.max, info.min, info.max - 1] if info else [0, 1], dtype)
        wide = values.astype(common)
        assert ((wide.real if dtype.kind != "c" else wide).astype(dtype) == values).all()


def test_bits_of_long_elements():
    assert bits_of(np.ones(3, np.complex128)).shape == (3, 2)
    assert bits_of(np.ones(3, np.float16)).dtype == np.uint16
