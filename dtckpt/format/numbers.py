"""The numbers that stored elements stand for, in dtypes that NumPy prints and calculates with."""

from __future__ import annotations

from typing import Any

import numpy as np

from dtckpt.format.dtypes import EXTENSIONS

SLICE_NUMEL = 1 << 13
"""Numbers to work on at a time, so that they stay in the cache, and in memory that malloc keeps."""
PACKED = "float4_e2m1fn_x2"
"""The dtype with two numbers in each element."""
_FLOAT4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
"""By its four bits, a number of the format E2M1 of the OCP Microscaling specification."""


def numbers_of(elements: np.ndarray[Any, Any], dtype: str) -> np.ndarray[Any, Any]:
    """Return elements as numbers of a dtype that NumPy has; every value is kept.

    Args:
        elements: The elements, as they are stored.
        dtype: Name of their dtype, one of `dtckpt.format.dtypes.DTYPES`.

    Returns:
        An array of the same shape; of `PACKED` elements, one with a further dim of two numbers.
    """
    # NumPy warns of NaNs that become quiet.
    with np.errstate(invalid="ignore"):
        if dtype in EXTENSIONS:
            return elements.astype(np.float32)
        if dtype == "complex32":
            parts = np.ascontiguousarray(elements)[..., np.newaxis].view(np.float16).astype(np.float32)
            return parts.view(np.complex64)[..., 0]
    if dtype == PACKED:
        return _FLOAT4[np.stack([elements & 0xF, elements >> 4], axis=-1)]
    return elements


def bits_of(elements: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """View a flat, contiguous array as unsigned integers; elements of 16 bytes as pairs of integers in a second dim."""
    if elements.dtype.itemsize == 16:
        return elements.view(np.uint64).reshape(-1, 2)
    return elements.view(f"u{elements.dtype.itemsize}")


def common_dtype(first: np.dtype[Any], second: np.dtype[Any]) -> np.dtype[Any]:
    """Return a dtype that holds the numbers of two dtypes of `numbers_of` exactly.

    It is the dtype itself, if both are the same; else an integer type, if there is one that holds both; else a float
    of at least 64 bits, or a complex number of such.
    """
    if first == second:
        return first
    if not {first.kind, second.kind} - set("biu") and (common := np.promote_types(first, second)).kind in "iu":
        return common
    # The mantissa of a float64 has 53 bits; that of a long double holds all integers of 64 bits, where Linux runs.
    is_long = any(dtype.kind in "iu" and dtype.itemsize == 8 for dtype in (first, second))
    if "c" in (first.kind, second.kind):
        return np.dtype(np.clongdouble if is_long else np.complex128)
    return np.dtype(np.longdouble if is_long else np.float64)
