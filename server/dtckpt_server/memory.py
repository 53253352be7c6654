"""Memory of the coordinator: how many bytes each job and all jobs take, their bounds, and which verdicts are forgotten.

The counts are upper estimates of the memory that Python takes, so that their bounds are bounds of memory. Verdicts are
kept only for clients that ask late; everything else is needed. So verdicts are forgotten, oldest first, to make room.
An event for which there is still no room is refused.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from dtckpt import errors

if TYPE_CHECKING:
    from dtckpt_server.state import Barrier, Job

JOB_BYTES = 192 << 20
"""Bound of one job: room for as many clients as a job may have, all of which wait at two barriers."""
ALL_BYTES = 320 << 20
"""Bound of all jobs."""
KEPT_BYTES = 32 << 20
"""Bound of one job's verdicts."""
KEPT_PAYLOAD_BYTES = 32 << 20
"""Bound of the payloads of one job's decided barriers; the oldest are dropped before their verdicts."""
KEPT_VERDICTS = 10_000
"""Bound on the number of one job's verdicts."""
KEPT_VERDICTS_S = 3600.0
MAX_FORGOTTEN = 1000
"""How many old verdicts one `Tick` forgets."""
JOB_NBYTES, TASK_NBYTES, BARRIER_NBYTES, ARRIVAL_NBYTES, PARTICIPANT_NBYTES = 4096, 1024, 3072, 320, 64
"""Estimates for a job, for each task and barrier in it with their names, for each arrival without its payload, and for
each participant of a barrier that names its participants."""


class LimitError(errors.CoordinationError):
    """A limit of the coordinator is reached."""


class Memory:
    """All jobs, and all barriers that are open or whose verdict is kept."""

    def __init__(self) -> None:
        self.jobs: dict[str, Job] = {}
        self.barriers: dict[str, Barrier] = {}
        self.decided: OrderedDict[str, Barrier] = OrderedDict()  # oldest first
        self.nbytes = 0

    @property
    def num_open_barriers(self) -> int:
        return len(self.barriers) - len(self.decided)

    def add_job(self, job: Job) -> None:
        """Add a job.

        Raises:
            LimitError: It does not fit.
        """
        self.make_room(job, JOB_NBYTES + TASK_NBYTES)
        self.jobs[job.name] = job
        self.resize(job, JOB_NBYTES)

    def remove_job(self, job: Job) -> None:
        """Forget a job without open barriers."""
        for barrier in list(job.verdicts.values()):
            self.forget(job, barrier)
        del self.jobs[job.name]
        self.resize(job, -job.nbytes)

    def make_room(self, job: Job, nbytes: int) -> None:
        """Forget verdicts until so many more bytes of a job fit: first its own, then the oldest of all.

        Raises:
            LimitError: They do not fit.
        """
        while job.nbytes + nbytes > JOB_BYTES and job.verdicts:
            self.forget(job, next(iter(job.verdicts.values())))
        while self.nbytes + nbytes > ALL_BYTES and self.decided:
            oldest = next(iter(self.decided.values()))
            self.forget(self.jobs[oldest.job], oldest)
        for what, size, limit in ("the job has", job.nbytes, JOB_BYTES), ("all jobs have", self.nbytes, ALL_BYTES):
            if size + nbytes > limit:
                raise LimitError(
                    f"no room for {nbytes} bytes of job {job.name!r} at the coordinator: {what} {size} of at most "
                    f"{limit}; use fewer clients, open barriers or participants' lists, or smaller payloads"
                )

    def resize(self, job: Job, nbytes: int) -> None:
        """Count more bytes of a job, or fewer."""
        job.nbytes += nbytes
        self.nbytes += nbytes

    def resize_barrier(self, job: Job, barrier: Barrier, nbytes: int, payload_nbytes: int = 0) -> None:
        """Count more bytes of an open barrier."""
        barrier.nbytes += nbytes
        barrier.payload_nbytes += payload_nbytes
        self.resize(job, nbytes + payload_nbytes)

    def keep(self, job: Job, barrier: Barrier) -> None:
        """Keep a new verdict, and no more of the job's older ones than fit.

        The new one always fits: its participants are about to be told.
        """
        self.decided[barrier.barrier_id] = job.verdicts[barrier.barrier_id] = barrier
        job.verdict_nbytes += barrier.nbytes
        if barrier.payload_nbytes:
            job.with_payloads[barrier.barrier_id] = barrier
            job.payload_nbytes += barrier.payload_nbytes
        while job.payload_nbytes > KEPT_PAYLOAD_BYTES and len(job.with_payloads) > 1:
            self.drop_payloads(job, next(iter(job.with_payloads.values())))
        while len(job.verdicts) > 1 and (len(job.verdicts) > KEPT_VERDICTS or job.verdict_nbytes > KEPT_BYTES):
            self.forget(job, next(iter(job.verdicts.values())))

    def drop_payloads(self, job: Job, barrier: Barrier) -> None:
        """Drop a barrier's payloads, which no client needs any more."""
        if job.with_payloads.pop(barrier.barrier_id, None) is not None:
            job.payload_nbytes -= barrier.payload_nbytes
            barrier.payloads_dropped = True
        self.resize(job, -barrier.payload_nbytes)
        barrier.payload_nbytes = 0
        barrier.payloads.clear()

    def forget(self, job: Job, barrier: Barrier) -> None:
        """Forget a verdict."""
        self.drop_payloads(job, barrier)
        self.resize(job, -barrier.nbytes)
        job.verdict_nbytes -= barrier.nbytes
        del self.decided[barrier.barrier_id], self.barriers[barrier.barrier_id], job.verdicts[barrier.barrier_id]
        job.forget(barrier)

    def forget_old(self, now: float) -> None:
        """Forget some of the verdicts that are older than `KEPT_VERDICTS_S`."""
        for _ in range(MAX_FORGOTTEN):
            oldest = next(iter(self.decided.values()), None)
            if oldest is None or oldest.decided_at is None or now - oldest.decided_at <= KEPT_VERDICTS_S:
                return
            self.forget(self.jobs[oldest.job], oldest)
