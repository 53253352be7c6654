"""Element types by name.

A dtype is its name, spelled alike by torch (``torch.float8_e4m3fn``), by ml_dtypes and by the Zarr v3 data types
that TensorStore implements, so one string serves memory, manifest and ``zarr.json``.
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

DTYPES: dict[str, np.dtype[Any]] = {
    "bool": np.dtype(np.bool_),
    **{name: np.dtype(name) for name in (*_INTEGERS, "float16", "float32", "float64", *_COMPLEX)},
    **{name: np.dtype(getattr(ml_dtypes, name)) for name in ("bfloat16", *_FLOAT8)},
}
"""Every storable dtype: name -> numpy dtype (from ml_dtypes where numpy has none)."""


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
    """Whether a dtype is a real floating-point type."""
    return name in _FLOATS


def fill_value(name: str) -> Any:
    """Zarr's fill value (zero) in the JSON form that the data type asks for."""
    if name == "bool":
        return False
    if name in _COMPLEX:
        return [0.0, 0.0]
    return 0 if name in _INTEGERS else 0.0


def is_lossless(source: str, target: str) -> bool:
    """Whether every value of ``source`` is a value of ``target`` (so that a conversion needs no consent)."""
    if source in (target, "bool"):
        return True
    if target == "bool":
        return False
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
