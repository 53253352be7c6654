"""Content digests: one number per tensor for all its elements, however they are cut into shards and chunks.

The digest is the CRC-64/NVME (the 64-bit CRC of object stores) of the tensor's bytes: its elements in C
order, as they are stored, little endian.

A CRC, apart from its initial value and its last inversion, is linear over GF(2):

* the CRC of the exclusive or of two messages is the exclusive or of their CRCs;
* zero bytes in front change nothing;
* n zero bytes behind multiply the CRC by ``x**(8 n)`` modulo the polynomial (as `zlib`'s ``crc32_combine`` does).

So a region has a *share* in its tensor's digest: the CRC of the tensor with zeros everywhere else. The exclusive or of
the shares of disjoint regions is the share of their union, and the share of a whole tensor gives its digest. Two
checkpoints of one state have equal digests on any two meshes.

A region's bytes lie in its tensor as *runs* at regular distances. For shape (4, 6), one byte per element, and the
region at (1, 2) of shape (2, 3)::

    . . . . . .
    . . # # # .      2 runs of 3 bytes, 6 bytes from one to the next;
    . . # # # .      7 bytes behind the last
    . . . . . .

The share of a run is its CRC, shifted by the bytes behind it.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from awscrt.checksums import combine_crc64nvme, crc64nvme

from dtckpt.format.digest import as_bytes, buffer_of
from dtckpt.layout.region import Region

_ONES = 2**64 - 1
"""The CRC's initial value, and the mask of its last inversion."""
_RUN_NBYTES = 128
"""Shorter runs are digested together, by tables; each longer run by the processor's CRC instructions."""
_FEW_RUNS = 64
"""Up to so many runs are joined one by one; more runs pair by pair, all pairs at once."""
_GAP_NBYTES = 1 << 10
"""Runs with gaps of at most so many bytes are digested together, with zeros for the gaps: calls would cost more."""
_PART_NBYTES = 1 << 20
"""Elements that must be copied are copied in parts of about so many bytes."""

_Bytes = npt.NDArray[np.uint8]
_Shares = npt.NDArray[np.uint64]


def content_share(elements: np.ndarray[Any, Any], shape: tuple[int, ...], region: Region) -> int:
    """Return the share of a region in its tensor's content digest; shares are joined by exclusive or.

    Args:
        elements: The region's elements, as they are stored; an array of the region's shape.
        shape: The tensor's global shape.
        region: The region; no element of a tensor may be in two shares.
    """
    if region.is_empty:
        return 0
    runs = _ByteRuns.of(shape, region, elements.itemsize)
    is_copied = runs.filled is not None or runs.nbytes < _RUN_NBYTES or not elements.flags.c_contiguous
    # Too much to copy at once: the shares of two halves give the region's share.
    if is_copied and elements.nbytes // runs.nbytes * runs.copied_nbytes > _PART_NBYTES and elements.size > 1:
        halves = ((elements[half.relative_to(region).slices()], shape, half) for half in _halves(region))
        first, second = itertools.starmap(content_share, halves)
        return first ^ second
    # Small gaps: fill them with zeros, so that there are fewer and longer runs.
    if runs.filled is not None:
        whole, inside = runs.filled
        padded = np.zeros(whole.shape, elements.dtype)
        padded[inside] = elements
        return content_share(padded, shape, whole)
    # One run: a call of the library.
    if not runs.lattice:
        return _shifted(crc64nvme(buffer_of(elements), _ONES) ^ _ONES, runs.behind_last)
    data = as_bytes(elements)
    # Few runs: shift each by the bytes behind it.
    if runs.behind:
        return functools.reduce(operator.xor, map(_shifted, _crcs(data, runs.nbytes), runs.behind))
    # Many runs: join neighbours along the innermost dim first, then the results along the next.
    shares = _many_crcs(data, runs.nbytes).reshape([size for size, _ in runs.lattice])
    for _, stride in reversed(runs.lattice):
        shares = _folded(shares, stride)
    return _shifted(int(shares), runs.behind_last)


def content_digest(share: int, shape: tuple[int, ...], itemsize: int) -> int:
    """Return a tensor's content digest from the shares of all its elements.

    Args:
        share: The exclusive or of all shares.
        shape: The tensor's global shape.
        itemsize: Bytes of a stored element.
    """
    return share ^ _frame(itemsize * math.prod(shape))


def share_of_content(content: int, shape: tuple[int, ...], itemsize: int) -> int:
    """Return the share of all elements of a tensor from its content digest; the inverse of `content_digest`."""
    return content_digest(content, shape, itemsize)  # an exclusive or undoes itself


@functools.lru_cache(maxsize=4096)
def _frame(nbytes: int) -> int:
    """Return the contribution of the initial value and last inversion to the CRC of so many bytes."""
    return _shifted(_ONES, nbytes) ^ _ONES


@dataclass(frozen=True, slots=True)
class _ByteRuns:
    """The runs of bytes of a region in its tensor, at regular distances; see the drawing above.

    Args:
        nbytes: Bytes per run.
        lattice: Per dim that numbers the runs: how many there are, and the bytes from one to the next.
        behind_last: Bytes of the tensor behind the last run.
        behind: Bytes of the tensor behind each run, in the order of the runs; empty if there are more than `_FEW_RUNS`.
        filled: The region with its gaps, and the slices of the region in it, if the gaps are small enough to fill them
            with zeros. Zeros do not change the share.
    """

    nbytes: int
    lattice: tuple[tuple[int, int], ...]
    behind_last: int
    behind: tuple[int, ...]
    filled: tuple[Region, tuple[slice, ...]] | None

    @property
    def copied_nbytes(self) -> int:
        """Bytes that a run takes in a copy of the runs."""
        return self.lattice[-1][1] if self.filled is not None else max(8, self.nbytes)

    @classmethod
    @functools.lru_cache(maxsize=4096)
    def of(cls, shape: tuple[int, ...], region: Region, itemsize: int) -> _ByteRuns:
        """Return the runs of a region that is not empty."""
        strides = [itemsize * math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
        # Dims after ``inner`` are whole in the region, so a run goes through ``inner`` and all of them.
        inner = next((dim for dim in range(len(shape)) if region.shape[dim + 1 :] == shape[dim + 1 :]), 0)
        lattice = tuple(zip(region.shape[:inner], strides[:inner], strict=True))
        num_runs = math.prod(region.shape[:inner])
        start_of_last = sum((stop - 1) * stride for stop, stride in zip(region.stop, strides, strict=True))
        behind_last = itemsize * (math.prod(shape) - 1) - start_of_last
        behind = [behind_last] if num_runs <= _FEW_RUNS else []
        for size, stride in lattice:
            behind = [nbytes + stride * position for nbytes in behind for position in reversed(range(size))]
        nbytes, distance = itemsize * region.numel // num_runs, lattice[-1][1] if lattice else 0
        filled = None
        if num_runs > 1 and distance - nbytes <= _GAP_NBYTES:
            whole = Region(
                (*region.offset[:inner], *[0] * (len(shape) - inner)), (*region.shape[:inner], *shape[inner:])
            )
            filled = whole, region.relative_to(whole).slices()
        return cls(nbytes, lattice, behind_last, tuple(behind), filled)


def _halves(region: Region) -> Iterator[Region]:
    """Yield the two halves of a region along its first dim that is longer than one."""
    dim = next(dim for dim, size in enumerate(region.shape) if size > 1)
    length = region.shape[dim]
    for start, stop in ((0, length // 2), (length // 2, length)):
        offset, shape = list(region.offset), list(region.shape)
        offset[dim] += start
        shape[dim] = stop - start
        yield Region(tuple(offset), tuple(shape))


def _shifted(share: int, nbytes: int) -> int:
    """Return a share with ``nbytes`` zero bytes behind it."""
    shifted: int = combine_crc64nvme(share, 0, nbytes)
    return shifted


def _crcs(data: _Bytes, nbytes: int) -> list[int]:
    """Return the CRC of each run of ``nbytes`` bytes, with initial value zero and without the last inversion."""
    view = data.data
    runs = (view[start : start + nbytes] for start in range(0, data.size, nbytes))
    return [crc64nvme(run, _ONES) ^ _ONES for run in runs]


def _many_crcs(data: _Bytes, nbytes: int) -> _Shares:
    """Return the CRCs of `_crcs` for many runs, which may be short."""
    if nbytes >= _RUN_NBYTES:
        return np.array(_crcs(data, nbytes), np.uint64)
    padded = np.zeros((data.size // nbytes, -(-nbytes // 8) * 8), np.uint8)
    padded[:, -nbytes:] = data.reshape(-1, nbytes)
    # A word of 8 bytes is a polynomial of 64 bits; its CRC is that polynomial with 64 zero bits behind it.
    return _all_shifted(_folded(padded.view("<u8"), 8), 8)


def _folded(shares: _Shares, stride: int) -> _Shares:
    """Join shares along the last dim, pair by pair, until a single share remains.

    Args:
        shares: Shares whose last dim numbers runs.
        stride: Bytes from one run to the next.
    """
    while shares.shape[-1] > 1:
        if shares.shape[-1] % 2:
            # A share of zero in front stands for zero bytes there, which change nothing.
            shares = np.concatenate([np.zeros_like(shares[..., :1]), shares], axis=-1)
        shares = _all_shifted(shares[..., ::2], stride) ^ shares[..., 1::2]
        stride *= 2
    return shares[..., 0]


def _all_shifted(shares: _Shares, nbytes: int) -> _Shares:
    """Return shares with ``nbytes`` zero bytes behind each."""
    octets = np.ascontiguousarray(shares).reshape(-1).view(np.uint8).reshape(*shares.shape, 8)
    tables = _tables(nbytes)
    shifted: _Shares = tables[0][octets[..., 0]]
    for position in range(1, 8):
        shifted ^= tables[position][octets[..., position]]
    return shifted


@functools.lru_cache(maxsize=256)
def _tables(nbytes: int) -> _Shares:
    """Return the tables of `_all_shifted`: per position of a byte in a share (8) and value of that byte (256), a share.

    By linearity, a shifted share is the exclusive or of its shifted bytes.
    """
    bits = np.array([_shifted(1 << bit, nbytes) for bit in range(64)], np.uint64).reshape(8, 8)
    tables = np.zeros((8, 256), np.uint64)
    for bit in range(8):
        tables[:, 1 << bit : 2 << bit] = tables[:, : 1 << bit] ^ bits[:, bit : bit + 1]
    return tables
