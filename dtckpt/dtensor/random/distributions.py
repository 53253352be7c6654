"""What random bits become: one row per distribution, of how many bits an element takes and what is made of them.

Everything is done on whole groups of `GROUP` elements, counted from the start of the global tensor. A group's numbers
depend on its bits alone, and vectorised functions, which round the odd elements at an end otherwise than those in
vectors, see no odd elements. Where one device computes logarithms and the like otherwise than another, numbers differ
in the last bits between the two; uniform numbers, integers and those of `bernoulli` are the same on all devices.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dtckpt.dtensor.random.philox import is_carried, multiply, signed
from dtckpt.errors import DTypeError, RandomParameterError, capped

GROUP = 128
"""Elements that are made together: two rows of several vectors of the widest kind there is."""

_FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_INTEGERS = frozenset(
    {
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.uint16,
        torch.uint32,
        torch.uint64,
        torch.bool,
    }
)
_DIGITS = {torch.float16: 11, torch.bfloat16: 8, torch.float32: 24, torch.float64: 53}
"""Bits of a float's significand; as many bits make a uniform number, so that it is exact."""
_WORDS = {16: torch.int16, 32: torch.int32, 64: torch.int64}
_WORD = 1 << 64


@dataclass(frozen=True)
class Draw:
    """How the elements of one operation are made.

    Args:
        bits: Random bits per element: 16, 32, 64 or 128.
        values: Makes whole groups' elements, flat, of their words (int64, flat; may be overwritten).
        limit: If given, of the part's shape: elements are 1 where the number made is below it, 0 elsewhere.
    """

    bits: int
    values: Callable[[torch.Tensor], torch.Tensor]
    limit: torch.Tensor | None = None


@dataclass(frozen=True)
class Kind:
    """A distribution.

    Args:
        make: Returns the `Draw` for a dtype and the distribution's parameters.
        dtypes: Those that it is made in; of complex ones see `fill`.
    """

    make: Callable[..., Draw]
    dtypes: frozenset[torch.dtype]


def draw_of(kind: str, dtype: torch.dtype, params: Mapping[str, Any]) -> Draw:
    """Look a distribution up.

    Raises:
        RandomParameterError: There is none of this name, or its parameters are out of range.
        DTypeError: It is not made in this dtype.
    """
    if kind not in KINDS:
        raise RandomParameterError(f"random numbers: got kind {kind!r}, expected one of {capped(sorted(KINDS), 99)}")
    if dtype not in KINDS[kind].dtypes:
        names = sorted(str(each) for each in KINDS[kind].dtypes)
        raise DTypeError(f"random numbers: got {dtype} for {kind}, expected one of {capped(names, 99)}")
    return KINDS[kind].make(dtype, **params)


def integer_bounds(dtype: torch.dtype, low: int = 0, high: int | None = None) -> tuple[int, int]:
    """Return the bounds that ``Tensor.random_`` takes where none is given: to the largest integer that is exact."""
    if high is None:
        high = (1 << _DIGITS[dtype]) + 1 if dtype in _DIGITS else _largest(dtype) + 1
    return low, high


def _largest(dtype: torch.dtype) -> int:
    return 1 if dtype == torch.bool else int(torch.iinfo(dtype).max)


def _require(is_right: bool, what: str, expected: str) -> None:
    if not is_right:
        raise RandomParameterError(f"random numbers: got {what}, expected {expected}")


# --- numbers in [0, 1) and (0, 1] --------------------------------------------------------------------------------


def _computed(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which numbers are computed that become ``dtype``."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _unit(digits: int) -> tuple[int, Callable[[torch.Tensor], torch.Tensor]]:
    """Return bits per element, and what makes the multiples of ``2**-digits`` in [0, 1) of words."""
    bits = next(bits for bits in _WORDS if bits >= digits)
    computed = torch.float64 if bits == 64 else torch.float32

    def values(words: torch.Tensor) -> torch.Tensor:
        # Signed, as the words are: exact, and less work than to make them unsigned first.
        return _scaled_sum(words.view(_WORDS[bits]).bitwise_right_shift_(bits - digits).to(computed), 2.0**-digits, 0.5)

    return bits, values


def _open(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """Return numbers in (0, 1] of signed words of so many bits, as floats; the small ones have all their digits."""
    return _scaled_sum(numbers.abs(), 2.0 ** (1 - bits), 2.0**-bits)


def _scaled_sum(numbers: torch.Tensor, factor: float, term: float) -> torch.Tensor:
    """Return ``numbers * factor + term`` in one pass; factors are powers of two, so fused or not, it is the same."""
    return torch.add(_scalar(term, numbers.dtype, numbers.device), numbers, alpha=factor)


def _scalar(value: float, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a number on a device; `torch.tensor` would copy it there, for which the host waits on CUDA."""
    return torch.full((), value, dtype=dtype, device=device)


def _uniform(dtype: torch.dtype, low: float = 0.0, high: float = 1.0) -> Draw:
    span = high - low
    _require(
        low <= high and span <= torch.finfo(dtype).max,
        f"bounds {low} and {high} for uniform",
        f"low <= high, no further apart than {dtype} can tell",
    )
    bits, unit = _unit(_DIGITS[dtype])
    if (low, high) == (0.0, 1.0):
        return Draw(bits, unit)
    top = max(_below(high, dtype), low) if low < high else low

    def values(words: torch.Tensor) -> torch.Tensor:
        return unit(words).mul_(span).add_(low).clamp_(max=top)

    return Draw(bits, values)


def _below(value: float, dtype: torch.dtype) -> float:
    """Return the largest number of a dtype below ``value``."""
    nearest = torch.tensor(value, dtype=dtype)
    if nearest.item() < value:
        return float(nearest)
    if dtype == torch.float16:
        return float(np.nextafter(nearest.numpy(), np.float16(-np.inf)))
    return float(torch.nextafter(nearest, torch.tensor(-math.inf, dtype=dtype)))


# --- the distributions -------------------------------------------------------------------------------------------


def _normal(dtype: torch.dtype, mean: float = 0.0, std: float = 1.0) -> Draw:
    """Box and Muller's transformation, of the two rows of each group."""
    _require(std >= 0, f"std {std} for normal", "zero or greater")
    bits = 64 if dtype == torch.float64 else 32
    computed = _computed(dtype)

    def values(words: torch.Tensor) -> torch.Tensor:
        made = words.view(_WORDS[bits]).to(computed).view(-1, 2, GROUP // 2)
        radius = _open(made[:, 0], bits).log_().mul_(-2).sqrt_()
        angle = made[:, 1] * (math.pi * 2.0 ** (1 - bits))
        torch.mul(radius, angle.cos(), out=made[:, 0])
        torch.mul(radius, angle.sin_(), out=made[:, 1])
        if std != 1:
            made.mul_(std)
        if mean != 0:
            made.add_(mean)
        return made.view(-1)

    return Draw(bits, values)


def _log_normal(dtype: torch.dtype, mean: float = 1.0, std: float = 2.0) -> Draw:
    _require(std > 0, f"std {std} for log_normal", "greater than zero")
    normal = _normal(dtype, mean, std)
    return Draw(normal.bits, lambda words: normal.values(words).exp_())


def _exponential(dtype: torch.dtype, lambd: float = 1.0) -> Draw:
    _require(lambd > 0, f"lambd {lambd} for exponential", "greater than zero")
    bits = 64 if dtype == torch.float64 else 32
    below_one = 1 - 2.0 ** -_DIGITS[_computed(dtype)]
    limits = torch.finfo(dtype)
    # Half's normal numbers end where some are drawn; other dtypes' do not.
    smallest = limits.tiny * limits.eps if dtype == torch.float16 else limits.tiny

    def values(words: torch.Tensor) -> torch.Tensor:
        # People divide by these numbers: neither zero nor infinity, even after the cast.
        numbers = (
            _open(words.view(_WORDS[bits]).to(_computed(dtype)), bits).clamp_(max=below_one).log_().mul_(-1 / lambd)
        )
        return numbers.clamp_(smallest, limits.max)

    return Draw(bits, values)


def _cauchy(dtype: torch.dtype, median: float = 0.0, sigma: float = 1.0) -> Draw:
    """In float64 whatever the dtype: far tails are angles that a float32 cannot tell from the right one."""
    _require(sigma > 0, f"sigma {sigma} for cauchy", "greater than zero")
    limits = torch.finfo(dtype)

    def values(words: torch.Tensor) -> torch.Tensor:
        numbers = words.to(torch.float64).add_(0.5).mul_(math.pi / _WORD).tan_().mul_(sigma).add_(median)
        return numbers.clamp_(limits.min, limits.max)

    return Draw(64, values)


def _geometric(dtype: torch.dtype, p: float) -> Draw:
    """In float64 whatever the dtype: small ``p`` make a float32's steps near 1 longer than an integer's."""
    _require(0 < p <= 1, f"p {p} for geometric", "0 < p <= 1")
    largest = float(torch.finfo(dtype).max) if dtype.is_floating_point else _largest(dtype)
    # The largest float64 that does not overflow: 2**63 would.
    largest = largest if largest <= 1 << 53 or dtype.is_floating_point else _below(largest + 1, torch.float64)
    log_of_failure = math.log1p(-p) if p < 1 else -math.inf

    def values(words: torch.Tensor) -> torch.Tensor:
        return _open(words.to(torch.float64), 64).log_().div_(log_of_failure).ceil_().clamp_(1, largest)

    return Draw(64, values)


def _bernoulli(dtype: torch.dtype, p: float | torch.Tensor = 0.5) -> Draw:
    del dtype
    if isinstance(p, torch.Tensor):
        _require(p.dtype in _FLOATS, f"a tensor p of {p.dtype} for bernoulli", "floats from 0 to 1")
        is_right = ((p >= 0) & (p <= 1)).all()
        if p.is_cuda:  # the host need not wait
            torch._assert_async(is_right, "random numbers: p for bernoulli is not from 0 to 1")
        else:
            _require(bool(is_right), f"a tensor p of {p.dtype} for bernoulli", "floats from 0 to 1")
        return Draw(*_unit(53 if p.dtype == torch.float64 else 24), limit=p)
    _require(0 <= p <= 1, f"p {p} for bernoulli", "0 <= p <= 1")
    largest = round(p * 2.0**32) - 2**31 - 1

    def values(words: torch.Tensor) -> torch.Tensor:
        numbers = words.view(torch.int32)
        return numbers <= largest if largest >= -(2**31) else torch.zeros_like(numbers, dtype=torch.bool)

    return Draw(32, values)


def _integers(dtype: torch.dtype, low: int = 0, high: int | None = None) -> Draw:
    """Scale a word to the range by a product, whose upper half is the number.

    Some numbers come up more often than others: by one part in 4096 at most in short ranges, which take half a word
    (PyTorch's remainders: by one in 16), and by one in 2**32 in others, of which the longest take two words.
    """
    low, high = integer_bounds(dtype, operator.index(low), None if high is None else operator.index(high))
    span = high - low
    _require(0 < span <= _WORD, f"bounds {low} and {high} for integers", "low < high, 2**64 apart at most")
    if not dtype.is_floating_point:
        smallest = 0 if dtype == torch.bool else torch.iinfo(dtype).min
        _require(
            smallest <= low and high - 1 <= _largest(dtype),
            f"bounds {low} and {high} for integers",
            f"integers that {dtype} has",
        )
    start = signed(low % _WORD)
    if span <= 1 << 31 and max(-low, high) <= 1 << 31:
        if span <= 1 << 20:
            return Draw(32, lambda words: _scaled_briefly(words.view(torch.int32), low, span))
        return Draw(64, lambda words: _scaled(words, low, span))
    if span == _WORD:
        return Draw(64, lambda words: words.add_(start))
    if span <= 1 << 31:
        return Draw(64, lambda words: _scaled(words, 0, span).add_(start))
    return Draw(128, lambda words: _scaled_finely(words.view(-1, 2), span).add_(start))


def _scaled_briefly(words: torch.Tensor, low: int, span: int) -> torch.Tensor:
    """Return ``low`` and the upper halves of products of unsigned words of 32 bits, given as signed ones."""
    first = _scalar((low << 32) + (span << 31), torch.int64, words.device)
    return torch.add(first, words.to(torch.int64), alpha=span).bitwise_right_shift_(32)


def _scaled(words: torch.Tensor, low: int, span: int) -> torch.Tensor:
    """Return ``low`` and the upper words of products; the upper halves of the words are signed, the lower ones not."""
    lower = (words & 0xFFFFFFFF).mul_(span).bitwise_right_shift_(32).add_((low << 32) + (span << 31))
    return lower.add_(words.bitwise_right_shift_(32), alpha=span).bitwise_right_shift_(32)


def _scaled_finely(words: torch.Tensor, span: int) -> torch.Tensor:
    upper, lower = multiply(words[:, 0], span)
    total = lower + multiply(words[:, 1], span)[0]
    return upper + is_carried(total, lower)


KINDS: dict[str, Kind] = {
    "bernoulli": Kind(_bernoulli, _FLOATS | _INTEGERS),
    "cauchy": Kind(_cauchy, _FLOATS),
    "exponential": Kind(_exponential, _FLOATS),
    "geometric": Kind(_geometric, _FLOATS | _INTEGERS - {torch.bool}),
    "integers": Kind(_integers, _FLOATS | _INTEGERS),
    "log_normal": Kind(_log_normal, _FLOATS),
    "normal": Kind(_normal, _FLOATS),
    "uniform": Kind(_uniform, _FLOATS),
}
"""By name: bernoulli(p), cauchy(median, sigma), exponential(lambd), geometric(p), integers(low, high),
log_normal(mean, std), normal(mean, std), uniform(low, high). Defaults are those of torch."""
