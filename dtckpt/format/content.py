"""Content digests: one number per tensor that says what it holds, however it is cut into shards and chunks.

The digest is a sum over the tensor's bits, mod 2**64, in which every bit has a weight of its own place. So the sums of
disjoint regions add up to that of the tensor, whatever the regions, and two checkpoints of one state have equal
digests on any two meshes.

A tensor is taken as lines: its trailing dims, as many as it takes to fill `MIN_LINE_NBYTES`, in C order. The bytes of a
line make little-endian words of 64 bits, the last one filled up with zeros. Word ``j`` of line ``i``, with high half
``h``, adds ``A(i) * C(j // T) * (B(j % T) * word + D(j % T) * h)``, where T is `TILE`, and A to D are odd random
numbers. (Multilinear hashing, Lemire and Kaser, "Strongly universal string hashing is fast", section 3: products mod
2**64 say little of a word's high bits, hence the term of its high half.)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from dtckpt.region import Region

MIN_LINE_NBYTES = 128
"""Shorter lines would be slow; dims inside a line are cut at the price of a copy."""
TILE = 512
"""Words after which the weights of a line's words repeat, but for one factor."""

_Words = npt.NDArray[np.uint64]
_PART_NBYTES = 4 << 20
"""Elements that must be copied are, this many bytes at a time."""
_FEW_WORDS = 4096
"""Tensors of no more words are often alike in shape: their weights are kept."""
SMALL_NBYTES = 8 * _FEW_WORDS
"""Most bytes of a region that `ContentSums` takes."""
_BATCH_NBYTES = 1 << 20
"""Stays in the cache between the two passes."""
_HALF = np.uint64(32)


def _computed_weights(stream: int, numbers: npt.ArrayLike) -> _Words:
    """Return odd random numbers by number: the finalizer of SplitMix64 (Steele, Lea, Flood, 2014)."""
    mixed = np.asarray(numbers, np.uint64) + np.uint64(stream * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF)
    mixed *= np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed ^= mixed >> np.uint64(shift)
        mixed *= np.uint64(factor)
    mixed ^= mixed >> np.uint64(31)
    return mixed | np.uint64(1)


_LINE, _TILE, _LOW, _HIGH = range(1, 5)
_FIRST_WEIGHTS = {stream: _computed_weights(stream, np.arange(4096)) for stream in (_LINE, _TILE, _LOW, _HIGH)}
"""The first of each stream; small tensors need no others."""


def _weights(stream: int, numbers: _Words) -> _Words:
    first = _FIRST_WEIGHTS[stream]
    return first[numbers] if numbers.max() < first.size else _computed_weights(stream, numbers)


class ContentSum:
    """Adds up the content of one tensor, region by region. Not thread-safe.

    Args:
        shape: The tensor's global shape.
        itemsize: Bytes of a stored element.
    """

    def __init__(self, shape: Sequence[int], itemsize: int) -> None:
        self._shape = tuple(shape)
        self._first = _first_dim_of_line(self._shape, itemsize)
        self.total = 0

    def add(self, elements: np.ndarray[Any, Any], region: Region) -> None:
        """Add the elements of a region; no element of a tensor may be added twice."""
        for part in _parts(region, elements):
            words, position = _words(self._shape, self._first, elements[part.relative_to(region).slices()][None], part)
            if words.size <= _FEW_WORDS:
                (total,) = _sums_of_few(self._shape[: self._first], part, words, position, 1)
            else:
                total = _sum(words, position, _line_weights(self._shape[: self._first], part))
            self.total = (self.total + total) % 2**64


class ContentSums:
    """Adds up the content of many tensors of small regions, taking those that are alike together. Not thread-safe."""

    def __init__(self) -> None:
        self._alike: dict[tuple[tuple[int, ...], Region, np.dtype[Any]], list[tuple[int, np.ndarray[Any, Any]]]] = {}
        self._waiting_nbytes = 0
        self._totals: dict[int, int] = {}

    def add(self, tensor: int, shape: tuple[int, ...], elements: np.ndarray[Any, Any], region: Region) -> None:
        """Add the elements of a region of at most `SMALL_NBYTES`, which must not change before `totals`.

        Args:
            tensor: Any number for the tensor.
            shape: Its global shape.
            elements: What the region holds, as it is stored.
            region: The region; no element of a tensor may be added twice.
        """
        if not elements.size:
            return
        self._alike.setdefault((shape, region, elements.dtype), []).append((tensor, elements))
        self._waiting_nbytes += elements.nbytes
        if self._waiting_nbytes > _BATCH_NBYTES:
            self._flush()

    def _flush(self) -> None:
        for (shape, region, dtype), waiting in self._alike.items():
            first = _first_dim_of_line(shape, dtype.itemsize)
            stack = np.concatenate([elements.reshape(-1) for _, elements in waiting])
            words, position = _words(shape, first, stack.reshape(-1, *region.shape), region)
            totals = _sums_of_few(shape[:first], region, words, position, len(waiting))
            for (tensor, _), total in zip(waiting, totals, strict=True):
                self._totals[tensor] = (self._totals.get(tensor, 0) + total) % 2**64
        self._alike.clear()
        self._waiting_nbytes = 0

    def totals(self) -> dict[int, int]:
        """Return the sum of all that was added, by tensor."""
        self._flush()
        return self._totals


@lru_cache(maxsize=4096)
def _first_dim_of_line(shape: tuple[int, ...], itemsize: int) -> int:
    first = len(shape)
    while first > 0 and itemsize * math.prod(shape[first:]) < MIN_LINE_NBYTES:
        first -= 1
    return first


def _words(shape: tuple[int, ...], first: int, stack: np.ndarray[Any, Any], region: Region) -> tuple[_Words, int]:
    """Return the words of each line of a region of tensors of one shape, and the number of the first in the line.

    Args:
        shape: Global shape.
        first: The first dim of a line.
        stack: Elements of the region, tensor by tensor.
        region: The region.
    """
    inner = shape[first + 1 :]
    if region.shape[first + 1 :] != inner:
        # Zeros add nothing, so the cut dims may be filled up with them.
        whole = np.zeros((len(stack), *region.shape[: first + 1], *inner), stack.dtype)
        whole[(slice(None),) * (first + 2) + region.slices()[first + 1 :]] = stack
        stack = whole
    count = len(stack) * math.prod(region.shape[:first])
    start = region.offset[first] * math.prod(inner) * stack.itemsize if first < len(shape) else 0
    return _aligned(np.ascontiguousarray(stack).reshape(-1).view(np.uint8).reshape(count, -1), start)


def _sums_of_few(shape: tuple[int, ...], region: Region, words: _Words, position: int, count: int) -> list[int]:
    """Add up small regions, ``count`` of them; ``shape`` is that of the dims that number lines."""
    low, high = _weights_of_words(shape, region, position, words.shape[1])
    words = words.reshape(count, -1)
    sums = np.einsum("ij,j->i", words, low)
    sums += np.einsum("ij,j->i", np.right_shift(words, _HALF), high)
    found: list[int] = sums.tolist()
    return found


def _line_weights(shape: tuple[int, ...], region: Region) -> _Words:
    """Return the weight of each line of a region, as a column; ``shape`` is that of the dims that number lines."""
    numbers = np.zeros(1, np.uint64)
    for size, start, length in zip(shape, region.offset, region.shape, strict=False):
        along = np.arange(start, start + length, dtype=np.uint64)
        numbers = np.add.outer(numbers * np.uint64(size), along).reshape(-1)
    return _weights(_LINE, numbers)[:, None]


@lru_cache(maxsize=64)
def _weights_of_words(shape: tuple[int, ...], region: Region, position: int, width: int) -> tuple[_Words, _Words]:
    """Return the weights of every word of a small region, and those of its high half."""
    words = np.arange(position, position + width, dtype=np.uint64)
    shared = _line_weights(shape, region) * _weights(_TILE, words // np.uint64(TILE))
    low, high = ((shared * _FIRST_WEIGHTS[stream][words % np.uint64(TILE)]).reshape(-1) for stream in (_LOW, _HIGH))
    return low, high


def _sum(words: _Words, position: int, factors: _Words) -> int:
    """Add up lines of words, the first of which is the line's word ``position``."""
    stop = position + words.shape[1]
    head = min(stop, -(-position // TILE) * TILE)
    body = max(head, stop // TILE * TILE)
    total = 0
    for begin, end in ((position, head), (head, body), (body, stop)):
        if begin < end:
            width = min(TILE, end - begin)
            tiles = np.arange(begin // TILE, -(-end // TILE), dtype=np.uint64)
            part = words[:, begin - position : end - position].reshape(-1, width)
            total += _dot(part, begin % TILE, (factors * _weights(_TILE, tiles)).reshape(-1))
    return total


def _dot(rows: _Words, start: int, factors: _Words) -> int:
    """Return the sum of rows that begin ``start`` words after the begin of a tile, each times a factor."""
    width, total = rows.shape[1], 0
    low, high = (_FIRST_WEIGHTS[stream][start : start + width] for stream in (_LOW, _HIGH))
    batch = max(1, _BATCH_NBYTES // (8 * width))
    scratch = np.empty((min(batch, len(rows)), width), np.uint64)
    for first in range(0, len(rows), batch):
        some = rows[first : first + batch]
        halves = np.right_shift(some, _HALF, out=scratch[: len(some)])
        sums = np.einsum("ij,j->i", some, low)
        sums += np.einsum("ij,j->i", halves, high)
        total += int(np.einsum("i,i->", sums, factors[first : first + batch]))
    return total


def _parts(region: Region, elements: np.ndarray[Any, Any]) -> Iterator[Region]:
    """Cut a region into boxes that are copied one at a time; whole, where no copy is needed."""
    dim = next((dim for dim, size in enumerate(region.shape) if size > 1), None)
    if region.is_empty:
        return
    if dim is None or elements.flags.c_contiguous:
        yield region
        return
    rows = max(1, _PART_NBYTES * region.shape[dim] // elements.nbytes)
    for start in range(0, region.shape[dim], rows):
        offset, shape = list(region.offset), list(region.shape)
        offset[dim] += start
        shape[dim] = min(rows, shape[dim] - start)
        yield Region(tuple(offset), tuple(shape))


def _aligned(lines: npt.NDArray[np.uint8], start: int) -> tuple[_Words, int]:
    """Return the 64-bit words of lines that begin at byte ``start``, and the number of the first."""
    lead = start % 8
    nbytes = lead + lines.shape[1]
    if nbytes % 8 or lead or lines.__array_interface__["data"][0] % 8:
        padded = np.zeros((len(lines), -(-nbytes // 8) * 8), np.uint8)
        padded[:, lead:nbytes] = lines
        lines = padded
    return lines.view("<u8"), start // 8


def content_digest(total: int, shape: tuple[int, ...], stored_dtype: str) -> int:
    """Return a tensor's content digest from the sum over all its elements; binds it to shape and dtype."""
    return xxhash.xxh3_64_intdigest(_kind(shape, stored_dtype), seed=total)


@lru_cache(maxsize=4096)
def _kind(shape: tuple[int, ...], stored_dtype: str) -> bytes:
    return f"{stored_dtype}\0{','.join(map(str, shape))}".encode()
