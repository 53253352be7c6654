"""Work of any length, done in small steps on the event loop, between which everyone else gets a turn."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Iterator
from itertools import islice

logger = logging.getLogger("dtckpt_server")

STEPS = 128
"""How many steps are taken at one time. One is a line of the log, or a message to one client."""


class Chores:
    """What is still to be done for each job: in order for one job, by turns for many."""

    def __init__(self) -> None:
        self._by_job: dict[str, deque[Iterator[object]]] = {}
        self._working: asyncio.Task[None] | None = None

    def add(self, job: str, work: Iterator[object]) -> None:
        """Do the first steps of some work now, if the job has none before it, and the others later."""
        is_first = job not in self._by_job
        self._by_job.setdefault(job, deque()).append(work)
        if is_first:
            self._take_steps(job)
        if self._by_job and (self._working is None or self._working.done()):
            self._working = asyncio.ensure_future(self._work())

    def num_waiting(self, job: str) -> int:
        """Return how much of the job's work is not done, counted as it was added."""
        return len(self._by_job.get(job, ()))

    async def finish(self) -> None:
        """Wait until all is done."""
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
        except Exception:  # a bug of ours, that must not keep the rest from being done
            logger.exception("work for job %r failed", job)
            num_taken = 0
        if num_taken < STEPS:
            queue.popleft()
            if not queue:
                del self._by_job[job]
