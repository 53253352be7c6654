"""Long work in small steps on the event loop: log lines, wake-ups and notices of a big job do not block the others."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Iterator
from itertools import islice

logger = logging.getLogger("dtckpt_server")

STEPS = 128
"""How many steps are taken at one time. A step is a line of the log, or a message to one client."""


class Chores:
    """Queues of work, one for each job. The work of one job is done in order; jobs take turns."""

    def __init__(self) -> None:
        self._by_job: dict[str, deque[Iterator[object]]] = {}
        self._working: asyncio.Task[None] | None = None

    def add(self, job: str, work: Iterator[object]) -> None:
        """Queue some work. If it is the job's only work, do its first steps now.

        Args:
            job: Name of the job.
            work: Each ``next`` does one step.
        """
        is_first = job not in self._by_job
        self._by_job.setdefault(job, deque()).append(work)
        if is_first:
            self._take_steps(job)
        if self._by_job and (self._working is None or self._working.done()):
            self._working = asyncio.ensure_future(self._work())

    def num_waiting(self, job: str) -> int:
        """Return how many pieces of the job's work, as they were added, are not done."""
        return len(self._by_job.get(job, ()))

    async def finish(self) -> None:
        """Wait until all work is done."""
        if self._working is not None:
            await asyncio.shield(self._working)

    async def _work(self) -> None:
        while self._by_job:
            for job in list(self._by_job):
                await asyncio.sleep(0)
                self._take_steps(job)

    def _take_steps(self, job: str) -> None:
        queue = self._by_job[job]
        try:
            num_taken = sum(1 for _ in islice(queue[0], STEPS))
        except Exception:  # a bug of ours, which must not stop the other work
            logger.exception("work for job %r failed", job)
            num_taken = 0
        if num_taken < STEPS:
            queue.popleft()
            if not queue:
                del self._by_job[job]
