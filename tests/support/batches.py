"""Deal the tests of a run to workers in batches, and bound how many run tests with client processes at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import TypeVar

T = TypeVar("T")

SIZE = 16
"""Tests of a batch at most: few enough that the last workers end together."""


def neighbours(tests: Sequence[T], group_of: Callable[[T], object]) -> list[tuple[T, ...]]:
    """Return batches of tests that follow each other and have the same group, so that they share its fixtures.

    Args:
        tests: All tests.
        group_of: Function from a test to its group: a file, or names in a tuple, whose tests stay one batch.
    """
    batches = []
    for group, run in groupby(tests, group_of):
        tests_of_run = tuple(run)
        size = len(tests_of_run) if isinstance(group, tuple) else SIZE
        batches += [tests_of_run[start : start + size] for start in range(0, len(tests_of_run), size)]
    return batches


class Dealer:
    """Hands out batches, batches with client processes first.

    ::

        with clients:  b0 b1 b2 b3 ...   at most so many workers have one of these
        others:        b7 b8 b9 ...      each other worker, and each that finds no batch with clients left, has these

    Args:
        with_clients: Batches whose tests start client processes.
        others: All other batches.
        most_with_clients: How many workers may run tests with client processes at the same time: each such test
            starts several processes.
    """

    def __init__(
        self, with_clients: Iterable[tuple[T, ...]], others: Iterable[tuple[T, ...]], most_with_clients: int
    ) -> None:
        self._with_clients, self._others = deque(with_clients), deque(others)
        self._most_with_clients = most_with_clients
        self._holders: set[int] = set()

    def take(self, worker: int) -> tuple[T, ...] | None:
        """Return a worker's next batch, after it has done its last one; None if there is none now."""
        self._holders.discard(worker)
        if self._with_clients and len(self._holders) < self._most_with_clients:
            self._holders.add(worker)
            return self._with_clients.popleft()
        return self._others.popleft() if self._others else None

    def give_back(self, worker: int, rest: tuple[T, ...]) -> None:
        """Take back what a worker that died has not run of its batch."""
        queue = self._with_clients if worker in self._holders else self._others
        if rest:
            queue.appendleft(rest)
        self._holders.discard(worker)

    def clear(self) -> None:
        """Hand out nothing more."""
        self._with_clients.clear()
        self._others.clear()

    @property
    def is_empty(self) -> bool:
        """Whether there are no more batches."""
        return not self._with_clients and not self._others
