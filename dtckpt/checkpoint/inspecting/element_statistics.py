"""`Statistics` of elements: extremes, mean and spread of the finite ones, and how many are not; pure."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np

from dtckpt.format.dtypes import SLICE_NUMEL, numbers_of


@dataclass(frozen=True, slots=True)
class Statistics:
    """Statistics of numbers; those of two sets of numbers are joined by ``+``.

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
