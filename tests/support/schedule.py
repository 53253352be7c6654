"""Order the tests for the workers of xdist, and bound how many tests with client processes run at a time."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

SLOTS = 3
"""Tests with client processes that run at the same time."""
WAIT_S = 1800.0
LOOK_S = 0.02


def dealt(tests: Sequence[T], num_workers: int, has_clients: Callable[[T], bool]) -> list[T]:
    """Return tests in an order in which the first workers begin with those that start client processes.

    ``--dist worksteal`` gives each worker a run of neighbouring tests, of equal length:

        worker 0: clients, clients, ..., others | worker 1: clients, clients, ..., others | worker 2: others, ...

    A worker that is done takes tests from the end of another one's run, so those that wait for a slot come last.
    """
    clients = [test for test in tests if has_clients(test)]
    others = [test for test in tests if not has_clients(test)]
    each = -(-len(clients) // SLOTS)
    ordered = []
    for worker in range(num_workers):
        length = len(tests) // num_workers + (worker < len(tests) % num_workers)
        own = clients[worker * each :][:each]
        num_others = max(0, length - len(own))
        ordered += [*own, *others[:num_others]]
        others = others[num_others:]
    return ordered + others


@contextmanager
def slot(folder: Path) -> Iterator[None]:
    """Hold one of the slots for tests with client processes; the kernel frees that of a worker that dies.

    Args:
        folder: Where the workers of a run have the files that they lock.

    Raises:
        TimeoutError: No slot became free.
    """
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        for number in range(SLOTS):
            with (folder / f"slot-{number}").open("w") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    continue
                try:
                    yield
                finally:
                    fcntl.flock(file, fcntl.LOCK_UN)  # closing is not enough while a process forked from this one lives
                return
        time.sleep(LOOK_S)
    raise TimeoutError(f"no test with client processes ended for {WAIT_S} s")
