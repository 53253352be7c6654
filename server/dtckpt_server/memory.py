"""Memory of the coordinator: how many bytes each owner and all owners take, and which verdicts are forgotten.

The counts are upper estimates of the memory that Python takes, so that their bounds are bounds of memory. Verdicts are
kept only for clients that ask late; everything else is needed. So verdicts are forgotten, oldest first, to make room:
the verdicts of the owner itself, or of the owner that has the most beyond its share. An event for which there is still
no room is refused.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dtckpt_server.quotas import Quotas, Shares

if TYPE_CHECKING:
    from dtckpt_server.state import Barrier, Job

MAX_JOBS = 10_000
MAX_BARRIERS = 1_000_000
"""Bounds of all owners together."""
ALL_BYTES = 384 << 20
"""Bound of all owners together, with their verdicts."""
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
"""Estimates for a job, each task and barrier in it with their names, each arrival without its payload, and each
participant that a barrier names."""


@dataclass(slots=True)
class Owner:
    """The jobs of one owner, and the bytes that they take with their verdicts."""

    jobs: dict[str, Job] = field(default_factory=dict)
    nbytes: int = 0

    @property
    def oldest_verdict(self) -> tuple[Job, Barrier] | None:
        """The oldest verdict of the first job that has any."""
        return next(((job, barrier) for job in self.jobs.values() for barrier in job.verdicts.values()), None)


class Memory:
    """All jobs, and all barriers that are open or whose verdict is kept.

    Args:
        quotas: Limits for one owner.
    """

    def __init__(self, quotas: Quotas) -> None:
        self.jobs: dict[str, Job] = {}
        self.barriers: dict[str, Barrier] = {}
        self.decided: OrderedDict[str, Barrier] = OrderedDict()  # oldest first
        self.nbytes = 0
        self.owners: dict[str, Owner] = {}
        self._quota_nbytes = quotas.nbytes
        self._num_jobs = Shares(
            "jobs", quotas.jobs, MAX_JOBS, "--max-owner-jobs", cure="let clients of jobs that have ended say goodbye"
        )
        self._num_open = Shares(
            "open barriers",
            quotas.barriers,
            MAX_BARRIERS,
            "--max-owner-barriers",
            cure="wait for fewer barriers at one time",
        )
        self._needed = Shares(  # without verdicts, which make room
            "bytes",
            quotas.nbytes,
            ALL_BYTES,
            "--max-owner-mib",
            cure="use fewer clients, open barriers or participants' lists, or smaller payloads",
        )

    def reserve_for(self, num_owners: int) -> None:
        """Reserve shares for so many owners."""
        for shares in (self._num_jobs, self._num_open, self._needed):
            shares.reserve_for(num_owners)

    @property
    def num_open_barriers(self) -> int:
        return len(self.barriers) - len(self.decided)

    def job_that_is_over(self, owner: str) -> Job | None:
        """Return a job of an owner that can end to make room for a new job; None if there is room, or no such job."""
        jobs = self.owners[owner].jobs.values() if self._num_jobs.room(owner) < 1 and owner in self.owners else ()
        return next((job for job in jobs if not job.tasks.num_alive and not job.open), None)

    def add_job(self, job: Job) -> None:
        """Add a job.

        Raises:
            LimitError: The job does not fit.
        """
        self._num_jobs.check(job.owner, 1, f"job {job.name!r}")
        self.make_room(job, JOB_NBYTES + TASK_NBYTES)
        self._num_jobs.note(job.owner, 1)
        self.jobs[job.name] = self.owners.setdefault(job.owner, Owner()).jobs[job.name] = job
        self.resize(job, JOB_NBYTES)

    def remove_job(self, job: Job) -> None:
        """Forget a job without open barriers."""
        for barrier in list(job.verdicts.values()):
            self.forget(job, barrier)
        self.resize(job, -job.nbytes)
        self._num_jobs.note(job.owner, -1)
        del self.jobs[job.name], self.owners[job.owner].jobs[job.name]
        if not self.owners[job.owner].jobs:
            del self.owners[job.owner]

    def add_barrier(self, job: Job, barrier: Barrier, nbytes: int) -> None:
        """Add an open barrier.

        Raises:
            LimitError: The barrier does not fit.
        """
        what = f"barrier {barrier.name!r} of job {job.name!r}"
        self._num_open.check(job.owner, 1, what)
        self.make_room(job, nbytes, what)
        self._num_open.note(job.owner, 1)
        self.resize_barrier(job, barrier, nbytes)
        job.open[barrier.barrier_id] = self.barriers[barrier.barrier_id] = barrier

    def make_room(self, job: Job, nbytes: int, what: str = "") -> None:
        """Forget verdicts until so many more bytes of a job fit.

        There are two limits. For the owner's quota, verdicts of this job go, then verdicts of the owner's other jobs.
        For the bound of all owners together, verdicts of the largest owners go, of each owner only beyond its share.

        Args:
            job: The job.
            nbytes: How many more bytes it needs.
            what: The object that needs them, for the message; default: the job.

        Raises:
            LimitError: The bytes do not fit.
        """
        self._needed.check(job.owner, nbytes, what or f"job {job.name!r}")
        while self.owner(job).nbytes + nbytes > self._quota_nbytes and (oldest := self._verdict_of(job)):
            self.forget(*oldest)
        holders = self.owners.values() if self.nbytes + nbytes > ALL_BYTES else ()
        # Needed bytes fit into the shares and the pool. So if all is full, an owner beyond its share has verdicts.
        for owner in sorted(holders, key=lambda owner: -owner.nbytes):
            while (
                self.nbytes + nbytes > ALL_BYTES
                and owner.nbytes > self._needed.share
                and (oldest := owner.oldest_verdict)
            ):
                self.forget(*oldest)
        while self.nbytes + nbytes > ALL_BYTES and self.decided:  # there are more owners than were expected
            first = next(iter(self.decided.values()))
            self.forget(self.jobs[first.job], first)

    def owner(self, job: Job) -> Owner:
        """Return the owner of a job; an owner without jobs, if this would be its first."""
        return self.owners.get(job.owner) or Owner()

    def _verdict_of(self, job: Job) -> tuple[Job, Barrier] | None:
        """Return a verdict that makes room for its owner: of the job, else of another job."""
        own = next(iter(job.verdicts.values()), None)
        return (job, own) if own is not None else self.owner(job).oldest_verdict

    def resize(self, job: Job, nbytes: int, *, is_kept: bool = False) -> None:
        """Count more bytes of a job, or fewer.

        Args:
            job: The job.
            nbytes: How many.
            is_kept: Whether they are of a verdict.
        """
        job.nbytes += nbytes
        self.nbytes += nbytes
        self.owners[job.owner].nbytes += nbytes
        if not is_kept:
            self._needed.note(job.owner, nbytes)

    def resize_barrier(self, job: Job, barrier: Barrier, nbytes: int, payload_nbytes: int = 0) -> None:
        """Count more bytes of an open barrier."""
        barrier.nbytes += nbytes
        barrier.payload_nbytes += payload_nbytes
        self.resize(job, nbytes + payload_nbytes)

    def keep(self, job: Job, barrier: Barrier) -> None:
        """Keep a new verdict, and no more of the job's older ones than fit.

        The new verdict always fits: its participants are about to be told.
        """
        self._num_open.note(job.owner, -1)
        self._needed.note(job.owner, -barrier.nbytes - barrier.payload_nbytes)
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
        is_kept = job.with_payloads.pop(barrier.barrier_id, None) is not None
        if is_kept:
            job.payload_nbytes -= barrier.payload_nbytes
            barrier.payloads_dropped = True
        self.resize(job, -barrier.payload_nbytes, is_kept=is_kept)
        barrier.payload_nbytes = 0
        barrier.payloads.clear()

    def forget(self, job: Job, barrier: Barrier) -> None:
        """Forget a verdict."""
        self.drop_payloads(job, barrier)
        self.resize(job, -barrier.nbytes, is_kept=True)
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
