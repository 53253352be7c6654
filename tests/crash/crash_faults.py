"""Which faults the crash tests try, and how many: at every file operation, or at a sample of them."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from . import crash_cases
from .forked_clients import Fault, Nursery, Operation

T = TypeVar("T")
R = TypeVar("R")

HEARTBEAT_TIMEOUT_S = 2.0
MAX_PARALLEL_CASES = 6
"""Cases that run at one time; most of the time they wait for the heartbeat of a lost client to time out."""


def record(nursery: Nursery, path: Path, **options: Any) -> list[Operation]:
    """Return the file operations of a save without a fault; options as `Nursery.start`."""
    job = nursery.start(crash_cases.save, str(path), "recorded", folder=str(path.parent), is_recorded=True, **options)
    answers = job.finish()
    assert not any(answer.error or answer.has_died for answer in answers), answers
    return job.operations


def faults_in(operations: Sequence[Operation], kinds: Sequence[str]) -> Iterator[Fault]:
    """Yield every fault of these kinds at every one of these operations."""
    counts = Counter((each.client, kind) for each in operations for kind in kinds if kind != "short" or each.data)
    for (client, kind), count in sorted(counts.items()):
        yield from (Fault(client, kind, at) for at in range(1, count + 1))


def run_each_in_a_folder(parent: Path, tried: Sequence[T], run: Callable[[Path, T], R]) -> list[R]:
    """Return ``run(folder, case)`` of all cases, each with a new empty folder, some at a time."""

    def run_in(number: int, case: T) -> R:
        folder = parent / f"case-{number}"
        folder.mkdir()
        result = run(folder, case)
        shutil.rmtree(folder)
        return result

    with ThreadPoolExecutor(MAX_PARALLEL_CASES) as executor:
        running = [executor.submit(run_in, number, case) for number, case in enumerate(tried)]
        try:
            return [future.result() for future in running]
        finally:
            executor.shutdown(cancel_futures=True)
