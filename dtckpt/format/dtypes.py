"""Element types by name: which can be stored, which can be converted to which, and whether without loss.

A dtype is represented by its name. torch (``torch.float8_e4m3fn``), ml_dtypes and the Zarr v3 data types that
TensorStore implements spell it alike, so one string serves memory, manifest and ``zarr.json``. Two dtypes of torch
have no name elsewhere: their elements are stored as unsigned integers of the same bits. For readers that know only the
data types of Zarr's core specification, ``zarr.json`` can also describe other types as such integers
(`zarr_data_type`).

`numbers_of` returns elements as numbers that NumPy prints and calculates with.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from dtckpt.errors import DTypeError

_INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
_FLOAT8 = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz")
_FLOATS = ("float16", "bfloat16", "float32", "float64", *_FLOAT8)
_COMPLEX = {"complex64": "float32", "complex128": "float64"}
_BITS = {"float4_e2m1fn_x2": "uint8", "complex32": "uint32"}
"""Dtypes that numpy and Zarr lack, and the integers that hold their bits. A byte of ``float4_e2m1fn_x2`` is two
numbers, the first in its low half; a ``complex32`` is two float16, the real part first."""

EXTENSIONS = ("bfloat16", *_FLOAT8, "float8_e8m0fnu")
"""Dtypes of ml_dtypes. Zarr's core specification lacks them; TensorStore has them, and zarr-python once
`dtckpt.interop.zarr_data_types` is imported."""

UNCONVERTED = ("float8_e8m0fnu", *_BITS)
"""Dtypes without conversions: numpy does not convert them, or not to all others. (The first, for the scales of
microscaling formats, has powers of two, but no zero and no sign.)"""

DTYPES: dict[str, np.dtype[Any]] = {
    "bool": np.dtype(np.bool_),
    **{name: np.dtype(name) for name in (*_INTEGERS, "float16", "float32", "float64", *_COMPLEX)},
    **{name: np.dtype(getattr(ml_dtypes, name)) for name in EXTENSIONS},
    **{name: np.dtype(bits) for name, bits in _BITS.items()},
}
"""Every storable dtype: name -> numpy dtype (from ml_dtypes where numpy has none), whose name is Zarr's; but see
`zarr_data_type`."""

STORED_AS = {"float32": ("bfloat16", "float32")}
"""By a tensor's dtype, the dtypes that it may be rounded to on storage; other tensors are stored unchanged. bfloat16
has the exponents of float32, so rounding, to nearest even, makes only magnitudes above 3.396e38 infinite."""

_finfo: Any = ml_dtypes.finfo
_iinfo: Any = ml_dtypes.iinfo


def validate_dtype(name: str) -> np.dtype[Any]:
    """Return the numpy dtype of a storable dtype name.

    Raises:
        DTypeError: Zarr v3 has no such data type.
    """
    try:
        return DTYPES[name]
    except KeyError:
        raise DTypeError(f"dtype cannot be stored; got {name}, expected one of {', '.join(DTYPES)}") from None


def is_floating(name: str) -> bool:
    """Whether a dtype is a real floating-point type that can be converted to others."""
    return name in _FLOATS


def is_convertible(source: str, target: str) -> bool:
    """Whether elements of ``source`` can be read as ``target``, with or without loss."""
    return source == target or not {source, target}.intersection(UNCONVERTED)


def zarr_data_type(name: str, *, raw_bits: bool = False) -> str:
    """Return the Zarr data type of an array whose elements are of a dtype.

    Args:
        name: The dtype.
        raw_bits: Whether dtypes in `EXTENSIONS` are described as unsigned integers of the same bits.
    """
    dtype = DTYPES[name]
    return f"uint{8 * dtype.itemsize}" if raw_bits and name in EXTENSIONS else dtype.name


def fill_value(data_type: str) -> Any:
    """Return the fill value, zero, of a Zarr data type, as JSON."""
    if data_type == "bool":
        return False
    if data_type in _COMPLEX:
        return [0.0, 0.0]
    return 0 if data_type in _INTEGERS else 0.0


def is_lossless(source: str, target: str) -> bool:
    """Tell whether every value of ``source`` is a value of ``target``; only then a conversion needs no consent."""
    if source == target:
        return True
    if target == "bool" or not is_convertible(source, target):
        return False
    if source == "bool":
        return True
    if target in _COMPLEX:
        return is_lossless(_COMPLEX.get(source, source), _COMPLEX[target])
    if source in _COMPLEX:
        return False
    if source in _INTEGERS:
        integers = _iinfo(DTYPES[source])
        if target in _INTEGERS:
            others = _iinfo(DTYPES[target])
            return bool(others.min <= integers.min and integers.max <= others.max)
        # Floats hold all integers up to 2**(nmant + 1); the largest integer itself must be in range, too.
        floats = _finfo(DTYPES[target])
        return int(integers.max) <= 2 ** (floats.nmant + 1) and int(integers.max) <= float(floats.max)
    if target in _INTEGERS:
        return False
    source_info, target_info = _finfo(DTYPES[source]), _finfo(DTYPES[target])
    # "fn": no infinities; "uz": no negative zero.
    keeps_specials = not (target.endswith("fn") and not source.endswith("fn")) and not target.endswith("fnuz")
    return bool(
        keeps_specials
        and source_info.nmant <= target_info.nmant
        and float(source_info.max) <= float(target_info.max)
        and float(target_info.smallest_subnormal) <= float(source_info.smallest_subnormal)
    )


SLICE_NUMEL = 1 << 13
"""Numbers per step of work, so that they stay in the cache, and in memory that malloc keeps."""
PACKED = "float4_e2m1fn_x2"
"""The dtype with two numbers in each element."""
_FLOAT4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
"""By its four bits, a number of the format E2M1 of the OCP Microscaling specification."""


def numbers_of(elements: np.ndarray[Any, Any], dtype: str) -> np.ndarray[Any, Any]:
    """Return elements as numbers of a dtype that NumPy has, without loss.

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

    If both are the same, the result is that dtype; else an integer type, if any holds both; else a float of at least 64
    bits, or a complex number of such floats.
    """
    if first == second:
        return first
    if not {first.kind, second.kind} - set("biu") and (common := np.promote_types(first, second)).kind in "iu":
        return common
    # The mantissa of a float64 has 53 bits; a long double holds all integers of 64 bits, where Linux runs.
    is_long = any(dtype.kind in "iu" and dtype.itemsize == 8 for dtype in (first, second))
    if "c" in (first.kind, second.kind):
        return np.dtype(np.clongdouble if is_long else np.complex128)
    return np.dtype(np.longdouble if is_long else np.float64)
