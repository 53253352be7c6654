"""`Statistics` of a tensor's elements, and `ElementDifferences` between two tensors; pure.

Elements of one dtype are equal if their bits are: NaNs of the same bits are equal, 0.0 and -0.0 are not. Elements of
two dtypes are equal if they are the same number, or both are NaN.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np

from dtckpt.format.dtypes import SLICE_NUMEL, bits_of, common_dtype, numbers_of
from dtckpt.layout.region import Region

_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}

_Numbers = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Extreme:
    """The largest error of two tensors.

    Args:
        error: The error.
        index: The first element, in row-major order, that has it.
        a: The first tensor's number there.
        b: The second tensor's number there.
    """

    error: float | int
    index: tuple[int, ...]
    a: complex | float | int
    b: complex | float | int


@dataclass(frozen=True, slots=True)
class ElementDifferences:
    """Differences between the elements of two tensors of one shape. ``+`` joins the differences of disjoint parts.

    Args:
        count: How many elements were compared.
        num_different: How many differ.
        num_nan: Number of elements that differ and are NaN in one tensor or both. NaNs have no error.
        max_abs: The largest ``|a - b|``; None if no elements differ but such with a NaN.
        max_rel: The largest ``|a - b| / max(|a|, |b|)``, which is at most 2 for finite numbers.
    """

    count: int = 0
    num_different: int = 0
    num_nan: int = 0
    max_abs: Extreme | None = None
    max_rel: Extreme | None = None

    @classmethod
    def of(cls, a: _Numbers, b: _Numbers, dtypes: tuple[str, str], region: Region) -> ElementDifferences:
        """Compare a region of two tensors.

        Args:
            a: The first tensor's elements, as they are stored; of the region's shape, in C order.
            b: The second tensor's.
            dtypes: Names of their dtypes; `PACKED` on both sides, or on none.
            region: The region.
        """
        flat_a, flat_b = a.reshape(-1), b.reshape(-1)
        found = cls()
        # Infinities and NaNs are meant.
        with np.errstate(all="ignore"):
            for start in range(0, flat_a.size, SLICE_NUMEL):
                part = slice(start, start + SLICE_NUMEL)
                found += _compare(flat_a[part], flat_b[part], dtypes, start, region)
        return found

    def __add__(self, other: ElementDifferences) -> ElementDifferences:
        """Return the differences of both parts together."""
        return ElementDifferences(
            count=self.count + other.count,
            num_different=self.num_different + other.num_different,
            num_nan=self.num_nan + other.num_nan,
            max_abs=_larger(self.max_abs, other.max_abs),
            max_rel=_larger(self.max_rel, other.max_rel),
        )


def _larger(first: Extreme | None, second: Extreme | None) -> Extreme | None:
    if first is None or second is None:
        return second if first is None else first
    return max(first, second, key=lambda extreme: (extreme.error, tuple(-position for position in extreme.index)))


def _compare(a: _Numbers, b: _Numbers, dtypes: tuple[str, str], start: int, region: Region) -> ElementDifferences:
    """Compare flat parts of a region that begin at its element ``start``."""
    count = a.size
    if dtypes[0] == dtypes[1]:
        is_different = bits_of(a) != bits_of(b)
        if is_different.ndim > 1:
            is_different = is_different.any(axis=1)
        positions = np.flatnonzero(is_different)
        if not positions.size:
            return ElementDifferences(count)
        if positions.size < a.size:
            a, b = a[positions], b[positions]
        a_numbers, b_numbers = numbers_of(a, dtypes[0]), numbers_of(b, dtypes[0])
    else:
        a_all, b_all = (numbers_of(each, dtype) for each, dtype in zip((a, b), dtypes, strict=True))
        common = common_dtype(a_all.dtype, b_all.dtype)
        a_all, b_all = a_all.astype(common), b_all.astype(common)
        positions = np.flatnonzero((a_all != b_all) & ~(np.isnan(a_all) & np.isnan(b_all)))
        a_numbers, b_numbers = a_all[positions], b_all[positions]
    num_nan, errors = _errors(a_numbers.reshape(-1), b_numbers.reshape(-1))

    def extreme(each: _Numbers) -> Extreme | None:
        if not each.size or each[at := int(each.argmax())] < 0:  # the first of equal ones
            return None
        # An element of two numbers has two errors, one for each number.
        position = start + int(positions[at * positions.size // each.size])
        return Extreme(
            _item(each[at]),
            _index(position, region),
            _item(a_numbers.reshape(-1)[at]),
            _item(b_numbers.reshape(-1)[at]),
        )

    return ElementDifferences(count, positions.size, num_nan, *map(extreme, errors))


def _errors(a: _Numbers, b: _Numbers) -> tuple[int, tuple[_Numbers, _Numbers]]:
    """Return how many pairs have a NaN, and the absolute and the relative errors, which are -1 of such pairs."""
    if a.dtype.kind in "biu":
        # Differences of signed integers may not fit their type, but they fit the unsigned one of the same size.
        unsigned = _UNSIGNED[a.dtype.itemsize]
        absolute: _Numbers = np.maximum(a, b).view(unsigned) - np.minimum(a, b).view(unsigned)
        a, b = a.astype(np.float64), b.astype(np.float64)
    else:
        wide = np.result_type(a.dtype, np.float64)
        a, b = a.astype(wide, copy=False), b.astype(wide, copy=False)
        absolute = np.abs(a - b)
    relative = absolute / np.maximum(np.abs(a), np.abs(b))
    if np.isfinite(relative.max(initial=0)):
        return 0, (absolute, relative)
    # Rare numbers: two zeros, whose quotient is none; infinities, whose difference and quotient are none; and NaNs.
    has_nan = np.isnan(a) | np.isnan(b)
    relative[absolute == 0] = 0
    if absolute.dtype.kind == "f":
        absolute[np.isnan(absolute)] = np.inf
        relative[np.isinf(absolute)] = np.inf
        absolute[has_nan] = relative[has_nan] = -1
    return int(has_nan.sum()), (absolute, relative)


def _index(position: int, region: Region) -> tuple[int, ...]:
    """Return the index in the tensor of an element of a region, given its row-major position there."""
    local = np.unravel_index(position, region.shape) if region.ndim else ()
    return tuple(offset + int(each) for offset, each in zip(region.offset, local, strict=True))


def _item(number: Any) -> Any:
    """Return a number of NumPy as one of Python; long doubles are rounded."""
    if number.dtype.kind == "f":
        return float(number)
    return complex(number) if number.dtype.kind == "c" else number.item()


@dataclass(frozen=True, slots=True)
class Statistics:
    """Statistics of numbers. ``+`` joins the statistics of two sets of numbers.

    The magnitudes of complex numbers count.

    Args:
        count: How many numbers there are.
        num_nan: How many are NaN.
        num_inf: How many are positive or negative infinity.
        num_zeros: How many are zero.
        minimum: The smallest finite number; None if there is none.
        maximum: The largest finite number; None if there is none.
        mean: Mean of the finite numbers; 0 if there are none.
        squares: Sum of the squared distances of the finite numbers from their mean.
    """

    count: int = 0
    num_nan: int = 0
    num_inf: int = 0
    num_zeros: int = 0
    minimum: float | int | None = None
    maximum: float | int | None = None
    mean: float = 0.0
    squares: float = 0.0

    @classmethod
    def of(cls, elements: np.ndarray[Any, Any], dtype: str) -> Statistics:
        """Return the statistics of elements as they are stored, given the name of their dtype."""
        flat = elements.reshape(-1)
        slices = (flat[start : start + SLICE_NUMEL] for start in range(0, flat.size, SLICE_NUMEL))
        return reduce(cls.__add__, (cls._of_numbers(numbers_of(part, dtype).reshape(-1)) for part in slices), cls())

    @classmethod
    def _of_numbers(cls, numbers: np.ndarray[Any, Any]) -> Statistics:
        with np.errstate(all="ignore"):
            if numbers.dtype.kind == "c":
                numbers = np.abs(numbers)
            is_finite = np.isfinite(numbers)
            finite = numbers if is_finite.all() else numbers[is_finite]
            num_nan = 0 if finite is numbers else int(np.isnan(numbers).sum())
            facts = {
                "count": numbers.size,
                "num_nan": num_nan,
                "num_inf": numbers.size - finite.size - num_nan,
                "num_zeros": numbers.size - int(np.count_nonzero(numbers)),
            }
            if not finite.size:
                return cls(**facts)
            wide = finite.astype(np.float64)
            mean = float(wide.mean())
            minimum, maximum = finite.min().item(), finite.max().item()
            return cls(**facts, minimum=minimum, maximum=maximum, mean=mean, squares=float(((wide - mean) ** 2).sum()))

    @property
    def num_finite(self) -> int:
        """How many numbers are finite."""
        return self.count - self.num_nan - self.num_inf

    @property
    def deviation(self) -> float:
        """Standard deviation of the finite numbers, as `numpy.std`."""
        return math.sqrt(self.squares / self.num_finite) if self.num_finite else 0.0

    def __add__(self, other: Statistics) -> Statistics:
        """Return the statistics of both sets of numbers together."""
        num_finite = self.num_finite + other.num_finite
        # Means and squares by the formulas of Chan, Golub and LeVeque for two samples.
        share = other.num_finite / num_finite if num_finite else 0.0
        distance = other.mean - self.mean
        return Statistics(
            count=self.count + other.count,
            num_nan=self.num_nan + other.num_nan,
            num_inf=self.num_inf + other.num_inf,
            num_zeros=self.num_zeros + other.num_zeros,
            minimum=min(_known(self.minimum, other.minimum), default=None),
            maximum=max(_known(self.maximum, other.maximum), default=None),
            mean=self.mean + distance * share,
            squares=self.squares + other.squares + distance * distance * share * self.num_finite,
        )


def _known(*numbers: float | int | None) -> Iterator[float | int]:
    return (number for number in numbers if number is not None)
