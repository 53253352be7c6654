"""Random distributions: the number of random bits of an element, and the computation of its value from these bits.

All functions work on whole groups of `GROUP` elements, counted from the start of the global tensor. So the numbers of a
group depend on its bits alone. Vectorised functions may round the odd elements at the end of an array differently from
elements in full vectors; here they never see odd elements. Devices may compute logarithms and the like differently;
then their numbers differ in the last bits. Uniform numbers, integers and the numbers of `bernoulli` are the same on all
devices.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dtckpt.comm import torch_private
from dtckpt.dtensor.random.philox import is_carried, multiply, signed
from dtckpt.errors import DTypeError, RandomParameterError, capped

GROUP = 128
"""Elements of a group: two rows (see `_normal`), each of several vectors of the widest kind there is."""

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
"""Bits of each float dtype's significand. A uniform number is made of as many bits, so that it is exact."""
_WORDS = {16: torch.int16, 32: torch.int32, 64: torch.int64}
_WORD = 1 << 64


@dataclass(frozen=True)
class Sampler:
    """How to compute the elements of one random operation from random bits.

    Args:
        bits: Random bits per element: 16, 32, 64 or 128.
        from_words: Returns the elements of whole groups, flat. Takes their random words, int64 and flat, which it may
            overwrite.
        threshold: Of the component's shape. If given, elements are 1 where the number is below it, and 0 elsewhere.
    """

    bits: int
    from_words: Callable[[torch.Tensor], torch.Tensor]
    threshold: torch.Tensor | None = None


@dataclass(frozen=True)
class Distribution:
    """A distribution.

    Args:
        sampler: Returns the `Sampler` for a dtype and the distribution's parameters.
        dtypes: The dtypes in which it has numbers; for complex dtypes see `fill`.
    """

    sampler: Callable[..., Sampler]
    dtypes: frozenset[torch.dtype]


def sampler_of(name: str, dtype: torch.dtype, params: Mapping[str, Any]) -> Sampler:
    """Return the sampler of a distribution.

    Args:
        name: A key of `DISTRIBUTIONS`.
        dtype: The dtype of the elements.
        params: The distribution's parameters by name; default torch's.

    Raises:
        RandomParameterError: There is no distribution of this name, or its parameters are out of range.
        DTypeError: The distribution has no numbers in this dtype.
    """
    if name not in DISTRIBUTIONS:
        raise RandomParameterError(
            f"random numbers: got kind {name!r}, expected one of {capped(sorted(DISTRIBUTIONS), 99)}"
        )
    if dtype not in DISTRIBUTIONS[name].dtypes:
        names = sorted(str(each) for each in DISTRIBUTIONS[name].dtypes)
        raise DTypeError(f"random numbers: got {dtype} for {name}, expected one of {capped(names, 99)}")
    return DISTRIBUTIONS[name].sampler(dtype, **params)


def integer_bounds(dtype: torch.dtype, low: int = 0, high: int | None = None) -> tuple[int, int]:
    """Return the bounds of ``Tensor.random_``, by default up to the largest integer that the dtype has exactly."""
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
    """Return the dtype in which to compute numbers that are rounded to ``dtype`` in the end."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _unit(digits: int) -> tuple[int, Callable[[torch.Tensor], torch.Tensor]]:
    """Return bits per element, and a function from words to multiples of ``2**-digits`` in [0, 1)."""
    bits = next(bits for bits in _WORDS if bits >= digits)
    computed = torch.float64 if bits == 64 else torch.float32

    def from_words(words: torch.Tensor) -> torch.Tensor:
        # Signed, as the words are: exact, and less work than to make them unsigned first.
        return _scaled_sum(words.view(_WORDS[bits]).bitwise_right_shift_(bits - digits).to(computed), 2.0**-digits, 0.5)

    return bits, from_words


def _open(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """Return numbers in (0, 1] from signed words of so many bits, given as floats; small ones keep all their digits."""
    return _scaled_sum(numbers.abs(), 2.0 ** (1 - bits), 2.0**-bits)


def _scaled_sum(numbers: torch.Tensor, factor: float, term: float) -> torch.Tensor:
    """Return ``numbers * factor + term`` in one pass. Factors are powers of two, so fusing changes no result."""
    return torch.add(_scalar(term, numbers.dtype, numbers.device), numbers, alpha=factor)


def _scalar(value: float, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a number as a tensor on a device. On CUDA, `torch.tensor` would copy it there, and the host would wait."""
    return torch.full((), value, dtype=dtype, device=device)


def _uniform(dtype: torch.dtype, low: float = 0.0, high: float = 1.0) -> Sampler:
    span = high - low
    _require(
        low <= high and span <= torch.finfo(dtype).max,
        f"bounds {low} and {high} for uniform",
        f"low <= high, no further apart than {dtype} can tell",
    )
    bits, unit = _unit(_DIGITS[dtype])
    if (low, high) == (0.0, 1.0):
        return Sampler(bits, unit)
    top = max(_below(high, dtype), low) if low < high else low

    def from_words(words: torch.Tensor) -> torch.Tensor:
        return unit(words).mul_(span).add_(low).clamp_(max=top)

    return Sampler(bits, from_words)


def _below(value: float, dtype: torch.dtype) -> float:
    """Return the largest number of a dtype below ``value``."""
    nearest = torch.tensor(value, dtype=dtype)
    if nearest.item() < value:
        return float(nearest)
    if dtype == torch.float16:
        return float(np.nextafter(nearest.numpy(), np.float16(-np.inf)))
    return float(torch.nextafter(nearest, torch.tensor(-math.inf, dtype=dtype)))


# --- the distributions -------------------------------------------------------------------------------------------


def _normal(dtype: torch.dtype, mean: float = 0.0, std: float = 1.0) -> Sampler:
    """Apply the Box-Muller transformation: of each group, the first row gives radii and the second one angles."""
    _require(std >= 0, f"std {std} for normal", "zero or greater")
    bits = 64 if dtype == torch.float64 else 32
    computed = _computed(dtype)

    def from_words(words: torch.Tensor) -> torch.Tensor:
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

    return Sampler(bits, from_words)


def _log_normal(dtype: torch.dtype, mean: float = 1.0, std: float = 2.0) -> Sampler:
    _require(std > 0, f"std {std} for log_normal", "greater than zero")
    normal = _normal(dtype, mean, std)
    return Sampler(normal.bits, lambda words: normal.from_words(words).exp_())


def _exponential(dtype: torch.dtype, lambd: float = 1.0) -> Sampler:
    _require(lambd > 0, f"lambd {lambd} for exponential", "greater than zero")
    bits = 64 if dtype == torch.float64 else 32
    below_one = 1 - 2.0 ** -_DIGITS[_computed(dtype)]
    limits = torch.finfo(dtype)
    # Half has a small range: some numbers are below its smallest normal number, so subnormal numbers are allowed.
    smallest = limits.tiny * limits.eps if dtype == torch.float16 else limits.tiny

    def from_words(words: torch.Tensor) -> torch.Tensor:
        # Programs divide by these numbers, so no number is zero or infinite, even after the cast.
        numbers = (
            _open(words.view(_WORDS[bits]).to(_computed(dtype)), bits).clamp_(max=below_one).log_().mul_(-1 / lambd)
        )
        return numbers.clamp_(smallest, limits.max)

    return Sampler(bits, from_words)


def _cauchy(dtype: torch.dtype, median: float = 0.0, sigma: float = 1.0) -> Sampler:
    """Compute in float64 for every dtype: a float32 cannot tell the angles of far tails from a right angle."""
    _require(sigma > 0, f"sigma {sigma} for cauchy", "greater than zero")
    limits = torch.finfo(dtype)

    def from_words(words: torch.Tensor) -> torch.Tensor:
        numbers = words.to(torch.float64).add_(0.5).mul_(math.pi / _WORD).tan_().mul_(sigma).add_(median)
        return numbers.clamp_(limits.min, limits.max)

    return Sampler(64, from_words)


def _geometric(dtype: torch.dtype, p: float) -> Sampler:
    """Compute in float64 for every dtype: for a small ``p``, one step of a float32 near 1 skips integers."""
    _require(0 < p <= 1, f"p {p} for geometric", "0 < p <= 1")
    largest = float(torch.finfo(dtype).max) if dtype.is_floating_point else _largest(dtype)
    # The largest float64 that does not overflow: 2**63 would.
    largest = largest if largest <= 1 << 53 or dtype.is_floating_point else _below(largest + 1, torch.float64)
    log_of_failure = math.log1p(-p) if p < 1 else -math.inf

    def from_words(words: torch.Tensor) -> torch.Tensor:
        return _open(words.to(torch.float64), 64).log_().div_(log_of_failure).ceil_().clamp_(1, largest)

    return Sampler(64, from_words)


def _bernoulli(dtype: torch.dtype, p: float | torch.Tensor = 0.5) -> Sampler:
    del dtype
    if isinstance(p, torch.Tensor):
        _require(p.dtype in _FLOATS, f"a tensor p of {p.dtype} for bernoulli", "floats from 0 to 1")
        is_right = ((p >= 0) & (p <= 1)).all()
        if p.is_cuda:  # so that the host need not wait
            torch_private.assert_async(is_right, "random numbers: p for bernoulli is not from 0 to 1")
        else:
            _require(bool(is_right), f"a tensor p of {p.dtype} for bernoulli", "floats from 0 to 1")
        return Sampler(*_unit(53 if p.dtype == torch.float64 else 24), threshold=p)
    _require(0 <= p <= 1, f"p {p} for bernoulli", "0 <= p <= 1")
    largest = round(p * 2.0**32) - 2**31 - 1

    def from_words(words: torch.Tensor) -> torch.Tensor:
        numbers = words.view(torch.int32)
        return numbers <= largest if largest >= -(2**31) else torch.zeros_like(numbers, dtype=torch.bool)

    return Sampler(32, from_words)


def _integers(dtype: torch.dtype, low: int = 0, high: int | None = None) -> Sampler:
    """Multiply a random word by the length of the range; the upper half of the product is the number.

    Some numbers are a little more likely than others. In short ranges, which take half a word, the difference is at
    most one part in 4096 (PyTorch's remainders: one in 16). In longer ranges, which take one word or two, it is at most
    one in 2**32.
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
            return Sampler(32, lambda words: _scaled_briefly(words.view(torch.int32), low, span))
        return Sampler(64, lambda words: _scaled(words, low, span))
    if span == _WORD:
        return Sampler(64, lambda words: words.add_(start))
    if span <= 1 << 31:
        return Sampler(64, lambda words: _scaled(words, 0, span).add_(start))
    return Sampler(128, lambda words: _scaled_finely(words.view(-1, 2), span).add_(start))


def _scaled_briefly(words: torch.Tensor, low: int, span: int) -> torch.Tensor:
    """Return ``low`` plus the upper halves of products of unsigned words of 32 bits, given as signed ones."""
    first = _scalar((low << 32) + (span << 31), torch.int64, words.device)
    return torch.add(first, words.to(torch.int64), alpha=span).bitwise_right_shift_(32)


def _scaled(words: torch.Tensor, low: int, span: int) -> torch.Tensor:
    """Return ``low`` plus the upper words of products; the upper halves of the words are signed, the lower ones not."""
    lower = (words & 0xFFFFFFFF).mul_(span).bitwise_right_shift_(32).add_((low << 32) + (span << 31))
    return lower.add_(words.bitwise_right_shift_(32), alpha=span).bitwise_right_shift_(32)


def _scaled_finely(words: torch.Tensor, span: int) -> torch.Tensor:
    upper, lower = multiply(words[:, 0], span)
    total = lower + multiply(words[:, 1], span)[0]
    return upper + is_carried(total, lower)


DISTRIBUTIONS: dict[str, Distribution] = {
    "bernoulli": Distribution(_bernoulli, _FLOATS | _INTEGERS),
    "cauchy": Distribution(_cauchy, _FLOATS),
    "exponential": Distribution(_exponential, _FLOATS),
    "geometric": Distribution(_geometric, _FLOATS | _INTEGERS - {torch.bool}),
    "integers": Distribution(_integers, _FLOATS | _INTEGERS),
    "log_normal": Distribution(_log_normal, _FLOATS),
    "normal": Distribution(_normal, _FLOATS),
    "uniform": Distribution(_uniform, _FLOATS),
}
"""Distributions by name, with these parameters, whose defaults are torch's: bernoulli(p), cauchy(median, sigma),
exponential(lambd), geometric(p), integers(low, high), log_normal(mean, std), normal(mean, std), uniform(low, high)."""
