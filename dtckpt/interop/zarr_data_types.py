"""zarr-python's data types for bfloat16 and the float8 types; importing this module registers them.

The package has them as entry points, too (group ``zarr.data_type``), each by its name. zarr-python 3.1 and 3.2 collect
these entry points, but never load them; so there a program imports this module, or `dtckpt.interop.zarr_store`. This
module needs neither torch nor TensorStore.

The names, the JSON of fill values and the bytes of elements follow TensorStore and the Zarr extensions. Zarr version 2
has no such types; TensorStore writes them there under the same names, and these classes read that, too.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
from zarr.core.dtype.common import HasEndianness, HasItemSize
from zarr.dtype import ZDType, data_type_registry

from dtckpt.format.dtypes import DTYPES

try:
    from zarr.errors import DataTypeValidationError  # type: ignore[attr-defined, unused-ignore]
except ImportError:  # zarr-python 3.1; since 3.4 its former place is deprecated
    from zarr.dtype import DataTypeValidationError

_WORDS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


@dataclass(frozen=True, kw_only=True)
class ExtensionFloat(ZDType[Any, Any], HasItemSize):
    """A floating-point type of ml_dtypes as a Zarr data type, named like the dtype; base of the classes below."""

    dtype_cls: ClassVar[Any]
    _zarr_v3_name: ClassVar[str]

    @property
    def item_size(self) -> int:
        """Bytes of an element."""
        return self.to_native_dtype().itemsize

    @classmethod
    def from_native_dtype(cls, dtype: np.dtype[Any]) -> Self:
        """Return the data type of a numpy dtype.

        Raises:
            DataTypeValidationError: The argument is another dtype.
        """
        if not cls._check_native_dtype(dtype):
            raise DataTypeValidationError(f"numpy dtype does not fit; got {dtype}, expected {cls._zarr_v3_name}")
        return cls()

    def to_native_dtype(self) -> np.dtype[Any]:
        """Return the numpy dtype."""
        dtype: np.dtype[Any] = self.dtype_cls()
        return dtype

    @classmethod
    def _from_name(cls, name: object) -> Self:
        if name != cls._zarr_v3_name:
            raise DataTypeValidationError(f"data type does not fit; got {name!r}, expected {cls._zarr_v3_name!r}")
        return cls()

    @classmethod
    def _from_json_v3(cls, data: Any) -> Self:
        return cls._from_name(data)

    @classmethod
    def _from_json_v2(cls, data: Any) -> Self:
        return cls._from_name(data.get("name") if isinstance(data, dict) else data)

    def to_json(self, zarr_format: int) -> Any:
        """Return the data type as in the metadata of an array."""
        return self._zarr_v3_name if zarr_format == 3 else {"name": self._zarr_v3_name, "object_codec_id": None}

    def _check_scalar(self, data: object) -> bool:
        return isinstance(data, (int, float, np.number, np.bool_, self.dtype_cls.type))

    def cast_scalar(self, data: object) -> Any:
        """Return a number, or the text of one, as a scalar of the dtype.

        Raises:
            TypeError: The value is neither.
            ValueError: The text is no number.
        """
        # By way of a float: the types of ml_dtypes end the process if a text is no number.
        if isinstance(data, str):
            data = _WORDS[data] if data in _WORDS else float(data)
        if not self._check_scalar(data):
            raise TypeError(f"fill value does not fit {self._zarr_v3_name}; got {data!r}, expected a number")
        return self.dtype_cls.type(data)

    def default_scalar(self) -> Any:
        """Return zero; `float8_e8m0fnu` has none, and so NaN."""
        return self.dtype_cls.type(0)

    def from_json_scalar(self, data: Any, *, zarr_format: int) -> Any:  # noqa: ARG002  (alike in both)
        """Return the scalar of a fill value: a number, ``NaN``, ``Infinity``, ``-Infinity``, or its bits (``0x7fc0``).

        Raises:
            TypeError: The value has another type.
            ValueError: The text is no number.
        """
        if isinstance(data, str) and data.startswith("0x"):
            bits = int(data, 16).to_bytes(self.item_size, sys.byteorder)
            return np.frombuffer(bits, self.to_native_dtype())[0]
        return self.cast_scalar(data)

    def to_json_scalar(self, data: object, *, zarr_format: int) -> Any:  # noqa: ARG002  (alike in both)
        """Return a scalar as the JSON of a fill value."""
        number = float(self.cast_scalar(data))
        return next((word for word, value in _WORDS.items() if str(value) == str(number)), number)


@dataclass(frozen=True, kw_only=True)
class BFloat16(ExtensionFloat, HasEndianness):
    """Data type ``bfloat16``. Of several bytes, so that Zarr asks for their order."""

    dtype_cls = type(DTYPES["bfloat16"])
    _zarr_v3_name = "bfloat16"

    def to_native_dtype(self) -> np.dtype[Any]:
        """Return the numpy dtype.

        Raises:
            ValueError: The bytes of elements are in the other order than this machine's; ml_dtypes lacks that.
        """
        if self.endianness != sys.byteorder:
            raise ValueError(f"bfloat16 can be read in {sys.byteorder}-endian order only; got {self.endianness}")
        return super().to_native_dtype()


@dataclass(frozen=True, kw_only=True)
class Float8E4M3FN(ExtensionFloat):
    """Data type ``float8_e4m3fn``."""

    dtype_cls = type(DTYPES["float8_e4m3fn"])
    _zarr_v3_name = "float8_e4m3fn"


@dataclass(frozen=True, kw_only=True)
class Float8E4M3FNUZ(ExtensionFloat):
    """Data type ``float8_e4m3fnuz``."""

    dtype_cls = type(DTYPES["float8_e4m3fnuz"])
    _zarr_v3_name = "float8_e4m3fnuz"


@dataclass(frozen=True, kw_only=True)
class Float8E5M2(ExtensionFloat):
    """Data type ``float8_e5m2``."""

    dtype_cls = type(DTYPES["float8_e5m2"])
    _zarr_v3_name = "float8_e5m2"


@dataclass(frozen=True, kw_only=True)
class Float8E5M2FNUZ(ExtensionFloat):
    """Data type ``float8_e5m2fnuz``."""

    dtype_cls = type(DTYPES["float8_e5m2fnuz"])
    _zarr_v3_name = "float8_e5m2fnuz"


@dataclass(frozen=True, kw_only=True)
class Float8E8M0FNU(ExtensionFloat):
    """Data type ``float8_e8m0fnu``."""

    dtype_cls = type(DTYPES["float8_e8m0fnu"])
    _zarr_v3_name = "float8_e8m0fnu"


DATA_TYPES: tuple[type[ExtensionFloat], ...] = (
    BFloat16,
    Float8E4M3FN,
    Float8E4M3FNUZ,
    Float8E5M2,
    Float8E5M2FNUZ,
    Float8E8M0FNU,
)
"""A data type for each of `dtckpt.format.dtypes.EXTENSIONS`."""


def register_data_types() -> None:
    """Register `DATA_TYPES` with zarr-python; a name that another package has registered stays as it is."""
    for data_type in DATA_TYPES:
        if data_type._zarr_v3_name not in data_type_registry.contents:
            data_type_registry.register(data_type._zarr_v3_name, data_type)


register_data_types()
