"""Random bits by position: Philox4x64-10 of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC11).

Block ``b`` of the stream of a key is the cipher's output for the counter ``(b, 0, 0, 0)`` and the key ``(key, 0)``:
four words of 64 bits. Narrower words are parts of those, the low ones first. On CPUs NumPy computes the blocks, several
times as fast as integer operations of torch, which compute them on all other devices.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

WORDS_PER_BLOCK = 4
_MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
_WEYL = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
_ROUNDS = 10
_LOW = 0xFFFFFFFF
_WORD = 1 << 64
_COUNTERS = 1 << 256


class BitStream(Protocol):
    """The blocks of one key. Threads must not share a stream."""

    def words(self, first: int, count: int) -> torch.Tensor:
        """Return the words of ``count`` blocks from block ``first`` on, int64 and flat."""


class _NumpyStream:
    """A `BitStream` in host memory."""

    def __init__(self, key: int) -> None:
        self._next = 0
        # NumPy counts up before it makes a block, so start with the counter before the first block.
        self._generator = np.random.Philox(key=key, counter=_COUNTERS - 1)

    def words(self, first: int, count: int) -> torch.Tensor:
        if first != self._next:
            self._generator.advance((first - self._next) % _COUNTERS)
        self._next = first + count
        return torch.from_numpy(self._generator.random_raw(count * WORDS_PER_BLOCK).view(np.int64))


class TensorStream:
    """A `BitStream` on any device, by integer operations of torch."""

    def __init__(self, key: int, device: torch.device) -> None:
        self._key, self._device = key, device

    def words(self, first: int, count: int) -> torch.Tensor:
        zeros = torch.zeros(count, dtype=torch.int64, device=self._device)
        words = [torch.arange(first, first + count, device=self._device), zeros, zeros, zeros]
        key = (self._key, 0)
        for _ in range(_ROUNDS):
            products = [multiply(words[index], by) for index, by in zip((0, 2), _MULTIPLIERS, strict=True)]
            (high0, low0), (high1, low1) = products
            words = [high1 ^ words[1] ^ signed(key[0]), low1, high0 ^ words[3] ^ signed(key[1]), low0]
            key = ((key[0] + _WEYL[0]) % _WORD, (key[1] + _WEYL[1]) % _WORD)
        return torch.stack(words, dim=1).view(-1)


def stream_of(key: int, device: torch.device) -> BitStream:
    """Return the fastest `BitStream` for tensors on a device; ``key``: 0 to 2**64 - 1."""
    return _NumpyStream(key) if device.type == "cpu" else TensorStream(key, device)


def signed(word: int) -> int:
    """Return the int64 that has the bits of an unsigned word."""
    return word - _WORD if word >= _WORD // 2 else word


def multiply(words: torch.Tensor, by: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the upper and the lower 64 bits of the products of unsigned words with one below 2**64.

    An int64 product has only the lower bits right, and shifts keep the sign. So the function adds products of halves.
    """
    low, high = words & _LOW, _upper_half(words)
    by_low, by_high = by & _LOW, by >> 32
    crosses = low * by_high, high * by_low
    middle = _upper_half(low * by_low) + (crosses[0] & _LOW) + (crosses[1] & _LOW)
    upper = high * by_high + _upper_half(crosses[0]) + _upper_half(crosses[1]) + (middle >> 32)
    return upper, words * signed(by)


def is_carried(total: torch.Tensor, term: torch.Tensor) -> torch.Tensor:
    """Tell where the sum of two unsigned words has overflowed, given one of them."""
    smallest = signed(_WORD // 2)
    return (total ^ smallest) < (term ^ smallest)


def _upper_half(words: torch.Tensor) -> torch.Tensor:
    return (words >> 32) & _LOW
