"""Ask a coordinator about its jobs and feeds, without joining one of them."""

from __future__ import annotations

from collections.abc import Sequence

from dtckpt._proto import coordinator_pb2 as pb
from dtckpt.coordination.api import BarrierStatus, JobStatus, Progress, TaskStatus
from dtckpt.coordination.grpc_calls import CALL_TIMEOUT_S, Caller, UnknownError
from dtckpt.errors import JobNotFoundError


class StatusClient(Caller):
    """Asks a coordinator for the status of jobs and, by `feeds`, of feeds. Changes nothing there.

    All methods raise `CoordinatorUnavailableError` if the coordinator cannot be reached within ``timeout_s``, and
    `CoordinatorPermissionError` if it refuses the token.
    """

    def jobs(self, timeout_s: float = CALL_TIMEOUT_S) -> list[str]:
        """Return the names of all jobs that the token may see, sorted."""
        deadline = self._clock() + timeout_s
        request, pages = pb.ListJobsRequest(), list[pb.ListJobsResponse]()
        while not pages or request.page_token:
            pages.append(self._call(lambda stub, t: stub.ListJobs(request, timeout=t), deadline))
            request.page_token = pages[-1].next_page_token
        return sorted(job.job for page in pages for job in page.jobs)

    def job(self, name: str, timeout_s: float = CALL_TIMEOUT_S) -> JobStatus:
        """Return the status of a job.

        Raises:
            JobNotFoundError: The coordinator has no job of that name.
        """
        try:
            return job_status(name, self._job_pages(name, self._clock() + timeout_s))
        except UnknownError:
            raise JobNotFoundError(f"the coordinator at {self._address} knows no job {name!r}") from None


def job_status(name: str, pages: Sequence[pb.GetJobResponse]) -> JobStatus:
    """Return the pages of a coordinator's answer about job ``name`` as one value."""
    tasks = {task.task: _task_status(task) for page in pages for task in page.tasks}
    barriers = [_barrier_status(barrier) for page in pages for barrier in page.open_barriers]
    last = pages[-1]
    return JobStatus(name, last.num_clients, tuple(tasks.values()), tuple(barriers), last.attempt)


def _barrier_status(barrier: pb.BarrierStatus) -> BarrierStatus:
    missing = tuple(barrier.missing)
    num_unlisted = max(barrier.num_missing - len(missing), 0)
    return BarrierStatus(
        barrier.name, barrier.generation, barrier.num_participants, missing, barrier.age_s, num_unlisted
    )


def _task_status(task: pb.TaskStatus) -> TaskStatus:
    if task.state == pb.TASK_STATE_UNSPECIFIED:
        return TaskStatus(task.task, "unknown", name=task.name)
    state = pb.TaskState.Name(task.state).removeprefix("TASK_STATE_").lower()
    seen = task.progress
    progress = Progress(seen.phase, seen.step, seen.bytes_done, seen.bytes_total)
    return TaskStatus(
        task.task, state, task.incarnation, task.heartbeat_age_s, progress, task.progress_age_s, task.host, task.name
    )
