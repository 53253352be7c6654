"""Choose today's share of an exhaustive sweep; ``DTCKPT_TESTS=all`` chooses all of it.

A sweep has more cases than a run of the tests has time for: operators in every layout, a fault at every file
operation, random histories. Its cases are shuffled once and dealt to the days like cards, so that no case is left out
for ever. The seed is the number of the day. pytest prints it, and ``DTCKPT_TESTS_SEED`` sets it, to repeat a failure.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import TypeVar

import pytest

T = TypeVar("T")

IS_ALL = os.environ.get("DTCKPT_TESTS") == "all"
"""Whether the tests try all cases of every sweep."""
SEED = int(os.environ.setdefault("DTCKPT_TESTS_SEED", str(datetime.now(UTC).date().toordinal())))
"""Decides which share is today's. Set in the environment, so that the workers of one run agree at midnight too."""


def share(cases: Sequence[T], count: int, key: str, seed: int = SEED) -> list[T]:
    """Return today's ``count`` cases of a sweep, or all of them, in their order.

    The shuffled cases are dealt in hands, and each day has one. Days come in rounds of as many days as there are hands;
    in each round every case has its turn:

        shuffled  | 4 0 7 | 2 5 1 | 6 3 (4) |
        hand          0       1       2          first round: days 0 1 2 take hands 1 0 2, second round: 2 0 1, ...

    Each round takes the hands in another order. So a sweep within a case of another sweep does not meet the same hands
    again and again on the days on which that case has its turn.

    Args:
        cases: All cases.
        count: How many of them one run tries.
        key: Names the sweep; sweeps with different keys are shuffled in different ways.
        seed: Which day.
    """
    if IS_ALL or count >= len(cases):
        return list(cases)
    shuffled = random.Random(key).sample(range(len(cases)), len(cases))
    hands = -(-len(cases) // count)
    order = random.Random(f"{key} {seed // hands}").sample(range(hands), hands)
    first = order[seed % hands] * count
    hand = (shuffled[(first + offset) % len(cases)] for offset in range(count))
    return [cases[position] for position in sorted(hand)]


def todays(tests: Iterable[pytest.Item]) -> set[pytest.Item]:
    """Return the tests of this run: of a sweep, today's cases; of all other test functions, every case.

    The cases of a test function marked ``share(count)`` are a sweep. Functions marked ``share(count, of="name")`` are
    one sweep together.
    """
    chosen = set()
    sweeps: dict[tuple[int, str], list[pytest.Item]] = {}
    for test in tests:
        marker = test.get_closest_marker("share")
        if marker is None:
            chosen.add(test)
        else:
            name = marker.kwargs.get("of", test.nodeid.partition("[")[0])
            sweeps.setdefault((*marker.args, name), []).append(test)
    for (count, name), cases in sweeps.items():
        chosen.update(share(cases, count, name))
    return chosen


def amount(some: int, most: int) -> int:
    """Return how often something random is repeated: ``some`` times, or ``most`` with ``DTCKPT_TESTS=all``."""
    return most if IS_ALL else some


def examples(count: int) -> int:
    """Return how many examples of a property Hypothesis tries; they are others in every run."""
    return amount(count, 10 * count)


def header() -> str:
    """Return the line that says which cases this run tries."""
    if IS_ALL:
        return "sweeps: all cases (DTCKPT_TESTS=all)"
    return f"sweeps: shares of seed {SEED} (DTCKPT_TESTS_SEED={SEED} tries the same ones, DTCKPT_TESTS=all all cases)"
