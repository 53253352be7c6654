"""Numbers that take a dict quadratic time, though no two have the same hash."""

from __future__ import annotations


def colliding_numbers(count: int) -> list[int]:
    """Return numbers of which one half fills the slots that a key of the other half tries one after the other.

    A table has at most two thirds of its slots full, and a key that finds slot ``i`` full goes on to ``5 * i + 1``.
    """
    bits = (3 * count // 2).bit_length()
    slots = [0]
    while len(slots) < count // 2:
        slots.append((5 * slots[-1] + 1) % (1 << bits))
    return slots + [number << bits for number in range(1, count - count // 2)]
