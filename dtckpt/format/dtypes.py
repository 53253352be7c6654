"""Element types by name.

A dtype is its name, spelled alike by torch (``torch.float8_e4m3fn``), by ml_dtypes and by the Zarr v3 data types
that TensorStore implements, so one string serves memory, manifest and ``zarr.json``. Two dtypes of torch have no name
elsewhere: their elements are kept as unsigned integers of the same bits.
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

UNCONVERTED = ("float8_e8m0fnu", *_BITS)
"""Dtypes that are read as they were saved only: numpy does not convert them, or not to all others. (The first, the
scales of microscaling formats, has powers of two, but no zero and no sign.)"""

DTYPES: dict[str, np.dtype[Any]] = {
    "bool": np.dtype(np.bool_),
    **{name: np.dtype(name) for name in (*_INTEGERS, "float16", "float32", "float64", *_COMPLEX)},
    **{name: np.dtype(getattr(ml_dtypes, name)) for name in ("bfloat16", *_FLOAT8, "float8_e8m0fnu")},
    **{name: np.dtype(bits) for name, bits in _BITS.items()},
}
"""Every storable dtype: name -> numpy dtype (from ml_dtypes where numpy has none), whose name is Zarr's."""


STORED_AS = {"float32": ("bfloat16", "float32")}
"""What tensors may be rounded to on storage, by their dtype; others are stored as they are. bfloat16 has the range of
float32, so that rounding, to nearest even, makes no finite value infinite."""

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


def fill_value(name: str) -> Any:
    """Zarr's fill value (zero) in the JSON form that the data type asks for."""
    if name == "bool":
        return False
    if name in _COMPLEX:
        return [0.0, 0.0]
    return 0 if name in (*_INTEGERS, *_BITS) else 0.0


def is_lossless(source: str, target: str) -> bool:
    """Whether every value of ``source`` is a value of ``target`` (so that a conversion needs no consent)."""
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
        bits = _iinfo(DTYPES[source])
        if target in _INTEGERS:
            into = _iinfo(DTYPES[target])
            return bool(into.min <= bits.min and bits.max <= into.max)
        # 2**nmant is the first gap in the integers; the extreme integer itself must be in range too.
        info = _finfo(DTYPES[target])
        return int(bits.max) <= 2 ** (info.nmant + 1) and int(bits.max) <= float(info.max)
    if target in _INTEGERS:
        return False
    have, want = _finfo(DTYPES[source]), _finfo(DTYPES[target])
    specials = not (target.endswith("fn") and not source.endswith("fn")) and not target.endswith("fnuz")
    return bool(
        specials
        and have.nmant <= want.nmant
        and float(have.max) <= float(want.max)
        and float(want.smallest_subnormal) <= float(have.smallest_subnormal)
    )
