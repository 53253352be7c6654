"""Looking into a coordinator without being a client of it."""

from __future__ import annotations

from dtckpt._proto import coordinator_pb2 as pb
from dtckpt.coordination.calls import CALL_TIMEOUT_S, Caller, UnknownError
from dtckpt.coordination.protocol import BarrierStatus, JobStatus, Progress, TaskStatus
from dtckpt.errors import JobNotFoundError


class Observer(Caller):
    """Asks a coordinator what it knows. Changes nothing there.

    Both methods raise `CoordinatorUnavailableError` if it cannot be reached within ``timeout_s``, and
    `CoordinatorPermissionError` if it refuses the token.
    """

    def jobs(self, timeout_s: float = CALL_TIMEOUT_S) -> list[str]:
        """Return the names of all jobs that the token may see, sorted."""
        request = pb.ListJobsRequest()
        answer = self._call(lambda stub, t: stub.ListJobs(request, timeout=t), self._clock() + timeout_s)
        return sorted(job.job for job in answer.jobs)

    def job(self, name: str, timeout_s: float = CALL_TIMEOUT_S) -> JobStatus:
        """Return what is known about a job.

        Raises:
            JobNotFoundError: There is none of that name.
        """
        request = pb.GetJobRequest(job=name)
        try:
            answer = self._call(lambda stub, t: stub.GetJob(request, timeout=t), self._clock() + timeout_s)
        except UnknownError:
            raise JobNotFoundError(f"the coordinator at {self._address} knows no job {name!r}") from None
        return job_status(name, answer)


def job_status(name: str, job: pb.GetJobResponse) -> JobStatus:
    """Return a coordinator's answer as a value."""
    barriers = [
        BarrierStatus(each.name, each.generation, each.num_participants, tuple(each.missing), each.age_s)
        for each in job.open_barriers
    ]
    return JobStatus(name, job.num_clients, tuple(map(_task_status, job.tasks)), tuple(barriers), job.attempt)


def _task_status(task: pb.TaskStatus) -> TaskStatus:
    if task.state == pb.TASK_STATE_UNSPECIFIED:
        return TaskStatus(task.task, "unknown", name=task.name)
    state = pb.TaskState.Name(task.state).removeprefix("TASK_STATE_").lower()
    seen = task.progress
    progress = Progress(seen.phase, seen.step, seen.bytes_done, seen.bytes_total)
    return TaskStatus(
        task.task, state, task.incarnation, task.heartbeat_age_s, progress, task.progress_age_s, task.host, task.name
    )
