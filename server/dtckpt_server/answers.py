"""Build the coordinator's answers about barriers, tasks and jobs: gRPC messages of at most 1 MiB, in pages."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from google.protobuf.message import Message

from dtckpt import errors
from dtckpt._proto import coordinator_pb2 as pb
from dtckpt_server.failures import Failure
from dtckpt_server.rules import Rules
from dtckpt_server.state import Barrier, Job

PAGE_NBYTES = 512 << 10
"""A page ends with the entry by which it outgrows this; one entry is smaller than as much again."""
MAX_PAGE_NBYTES = 2 * PAGE_NBYTES
PAGE_ENTRIES = 1000
LOOKS_PER_ENTRY = 20
"""Looking up so many participants of a barrier takes as long as describing one task."""
MAX_MISSING_SHOWN = 1000
"""How many missing tasks a page about a job lists of each barrier."""


class Answers:
    """Builds answers about barriers, and keeps the last one.

    All participants ask the same question at the same time. To copy all payloads for each of them would be most of the
    cost of a barrier.
    """

    def __init__(self) -> None:
        self._key: tuple[str, int, bool] = ("", 0, False)
        self._answer = pb.ArriveResponse()
        self._packed = b""
        self._waiting_key: tuple[str, int, int] = ("", 0, 0)
        self._waiting_for = ""

    def packed(self, barrier: Barrier, incarnation: int, *, collect: bool) -> bytes:
        """Return the answer of `of`, serialized."""
        answer = self.of(barrier, incarnation, collect=collect)
        self._packed = self._packed or answer.SerializeToString()
        return self._packed

    def of(self, barrier: Barrier, incarnation: int, *, collect: bool) -> pb.ArriveResponse:
        """Return an answer with the verdict, and with the payloads if asked to; nothing in it may be changed.

        Raises:
            BarrierConflictError: The payloads are not kept any more.
        """
        if collect and barrier.payloads_dropped:
            raise errors.BarrierConflictError(f"barrier {barrier.name!r} passed, but its payloads are no longer kept")
        key = barrier.barrier_id, _state(barrier), collect
        if key != self._key:
            verdict = _verdict(barrier, collect=collect)
            self._key, self._packed = key, b""
            self._answer = pb.ArriveResponse(
                coordinator_incarnation=incarnation,
                barrier_id=barrier.barrier_id,
                verdict=verdict,
                generation=barrier.generation,
            )
        return self._answer

    def waiting_for(self, rules: Rules, barrier: Barrier, now: float) -> str:
        """Return a description of the tasks that a barrier waits for, at most a second old; "" if it is decided."""
        key = barrier.barrier_id, len(barrier.arrived), int(now)
        if key != self._waiting_key:
            self._waiting_key, self._waiting_for = key, rules.waiting_for(barrier, now)
        return self._waiting_for if barrier.is_open else ""


def failure_message(failure: Failure) -> pb.Failure:
    return pb.Failure(
        cause=pb.Failure.Cause.Value(f"CAUSE_{failure.cause}"),
        code=failure.code,
        message=failure.message,
        clients=failure.clients,
        missing=failure.missing,
    )


def _state(barrier: Barrier) -> pb.BarrierState.ValueType:
    if barrier.is_open:
        return pb.BARRIER_STATE_OPEN
    return pb.BARRIER_STATE_PASSED if barrier.is_passed else pb.BARRIER_STATE_FAILED


def _verdict(barrier: Barrier, *, collect: bool) -> pb.Verdict:
    return pb.Verdict(
        state=_state(barrier),
        failure=failure_message(barrier.failure) if barrier.failure else None,
        payloads=barrier.payloads if collect and barrier.is_passed else {},
        cut_off=sorted(barrier.cut_off) if barrier.is_passed else (),
    )


# --- page by page -----------------------------------------------------------------------------------------------------


class Page:
    """Counts the size of a page."""

    def __init__(self) -> None:
        self._nbytes = self._num_entries = 0

    @property
    def is_full(self) -> bool:
        return self._nbytes >= PAGE_NBYTES or self._num_entries >= PAGE_ENTRIES

    def note(self, entry: Message, num_looks: int = 0) -> None:
        self._nbytes += entry.ByteSize()
        self._num_entries += 1 + num_looks // LOOKS_PER_ENTRY


def job_page(job: Job, token: str, now: float) -> pb.GetJobResponse:
    """Return a page about a job: its tasks by number, then its open barriers from the oldest on.

    Args:
        token: ``<next task>.<serial of the last barrier shown>``; "": the first page.

    Raises:
        ConfigError: This function did not make the token.
    """
    next_task, last_serial = _position(token)
    answer, page = pb.GetJobResponse(num_clients=job.num_clients, attempt=job.attempt), Page()
    for number in range(next_task, job.num_clients):
        if page.is_full:
            answer.next_page_token = f"{number}.{last_serial}"
            return answer
        status = _task_status(job, number, now)
        answer.tasks.append(status)
        page.note(status)
    for barrier in job.open.values():
        if barrier.serial > last_serial:
            if page.is_full:
                answer.next_page_token = f"{job.num_clients}.{last_serial}"
                return answer
            shown = barrier_status(barrier, now, MAX_MISSING_SHOWN)
            answer.open_barriers.append(shown)
            page.note(shown, len(barrier.arrived) + len(shown.missing))
            last_serial = barrier.serial
    return answer


def _position(token: str) -> tuple[int, int]:
    task, dot, serial = (token or "0.0").partition(".")
    if not dot or not task.isdecimal() or not serial.isdecimal() or len(token) > 32:
        raise errors.ConfigError(f"page token is {token[:32]!r}; expected the next_page_token of an earlier answer")
    return int(task), int(serial)


def jobs_page(jobs: Iterable[Job], token: str) -> pb.ListJobsResponse:
    """Return a page of jobs in the order of their names: the first ones after the name in the token."""
    answer, page = pb.ListJobsResponse(), Page()
    later = heapq.nsmallest(PAGE_ENTRIES + 1, (job for job in jobs if job.name > token), key=lambda job: job.name)
    for job in later:
        if page.is_full:
            answer.next_page_token = answer.jobs[-1].job
            break
        summary = pb.JobSummary(
            job=job.name,
            num_clients=job.num_clients,
            attempt=job.attempt,
            num_alive=job.tasks.num_alive,
            num_open_barriers=len(job.open),
        )
        answer.jobs.append(summary)
        page.note(summary)
    return answer


def barrier_status(barrier: Barrier, now: float, max_missing: int) -> pb.BarrierStatus:
    return pb.BarrierStatus(
        barrier_id=barrier.barrier_id,
        name=barrier.name,
        generation=barrier.generation,
        num_participants=len(barrier.participants),
        missing=barrier.missing(max_missing),
        num_missing=barrier.num_missing,
        state=_state(barrier),
        failure=failure_message(barrier.failure) if barrier.failure else None,
        age_s=now - barrier.opened_at,
    )


def _task_status(job: Job, number: int, now: float) -> pb.TaskStatus:
    task = job.tasks.get(number)
    if task is None:
        return pb.TaskStatus(task=number, name=job.full_task_name(number))
    progress = task.progress
    return pb.TaskStatus(
        task=number,
        name=job.full_task_name(number),
        state=pb.TaskState.Value(f"TASK_STATE_{task.state}"),
        incarnation=task.incarnation,
        attempt=task.attempt,
        host=task.host,
        heartbeat_age_s=now - task.heard_at,
        progress=pb.Progress(
            phase=progress.phase,
            step=progress.step,
            bytes_done=progress.bytes_done,
            bytes_total=progress.bytes_total,
        ),
        progress_age_s=now - task.progressed_at,
    )
