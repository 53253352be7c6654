"""``dtckpt status``: show a coordinator's jobs, clients and open barriers, once or until interrupted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click

from dtckpt.cli.looks import VARIABLES, look, look_options
from dtckpt.cli.options import debug_option, json_option
from dtckpt.cli.output import format_count, table_lines
from dtckpt.errors import JobNotFoundError, capped, printable

if TYPE_CHECKING:
    from dtckpt.coordination.api import BarrierStatus, JobStatus, TaskStatus
    from dtckpt.coordination.grpc_status import StatusClient

_WORST_FIRST = ("lost", "unknown", "suspect", "fenced", "registered", "left")
_HEADER = ("client", "state", "heard", "phase", "step", "done", "unchanged", "host")

EPILOG = f"""\b
{VARIABLES}  DTCKPT_COORDINATOR_TOKEN_FILE or _TOKEN: a job's token shows that job, a token of the job * shows all.

\b
Examples:
  dtckpt status --coordinator localhost:50051
  dtckpt status --job run --watch
  dtckpt status --json

"""


@click.command("status", epilog=EPILOG)
@click.option("--job", metavar="NAME", help="Only this job [default: all that the token shows].")
@look_options
@click.option(
    "--rows",
    type=click.IntRange(min=0),
    default=20,
    show_default=True,
    help="Clients to show of each job, those silent for longest first.",
)
@json_option("Print one JSON line per look.")
@debug_option
def command(
    *,
    coordinator: str | None,
    job: str | None,
    watch: bool,
    interval_s: float,
    timeout_s: float,
    rows: int,
    as_json: bool,
) -> None:
    """Show jobs, clients and open barriers of a coordinator: which clients are missing, and the last phase of each."""
    look(
        coordinator,
        lambda client: _query(client, job, timeout_s),
        lambda jobs: {"jobs": [_job_json(each) for each in jobs]},
        lambda address, jobs: _report(address, jobs, rows),
        event="status",
        watch=watch,
        interval_s=interval_s,
        as_json=as_json,
    )


def _query(client: StatusClient, job: str | None, timeout_s: float) -> list[JobStatus]:
    if job is not None:
        return [client.job(job, timeout_s)]
    jobs = []
    for name in client.jobs(timeout_s):
        with suppress(JobNotFoundError):  # the job has ended since it was listed
            jobs.append(client.job(name, timeout_s))
    return jobs


# --- as text ----------------------------------------------------------------------------------------------------------


def _report(address: str, jobs: Sequence[JobStatus], rows: int) -> Iterator[str]:
    yield f"coordinator {address}: {format_count(len(jobs), 'job')}"
    for job in jobs:
        alive = sum(task.state in ("registered", "suspect") for task in job.tasks)
        yield ""
        yield printable(f"job {job.job}: {alive}/{job.num_clients} clients alive, attempt {job.attempt}")
        for barrier in job.barriers:
            yield printable(f"  {_barrier_text(job, barrier)}")
        worst = sorted(job.tasks, key=_worst_first)
        for line in table_lines(_HEADER, [_task_row(task) for task in worst[:rows]]):
            yield f"  {line}"
        if len(worst) > rows:
            yield f"  and {len(worst) - rows} more clients"


def _worst_first(task: TaskStatus) -> tuple[int, float, int]:
    """Return a sort key that puts clients first that are gone, then those silent for longest."""
    return _WORST_FIRST.index(task.state), -(task.heartbeat_age_s or 0.0), task.client


def _barrier_text(job: JobStatus, barrier: BarrierStatus) -> str:
    tasks = {task.client: task for task in job.tasks}
    arrived = f"{barrier.num_participants - barrier.num_missing}/{barrier.num_participants} arrived"
    # The coordinator lists barriers and tasks at two moments, so a missing client may lack a task.
    shown = [_missing_text(tasks[client]) for client in barrier.missing if client in tasks]
    missing = capped(shown, count=barrier.num_missing)
    where = f"barrier {barrier.name} generation {barrier.generation}"
    return f"{where}: open for {barrier.age_s or 0.0:.1f} s, {arrived}; missing {missing}"


def _missing_text(task: TaskStatus) -> str:
    if task.heartbeat_age_s is None:
        return f"client {task.client} (never registered)"
    did = f"; {task.progress.phase} step {task.progress.step}" if task.progress.phase else ""
    share = f" {_done(task)}" if _done(task) else ""
    since = f", unchanged for {task.progress_age_s or 0.0:.0f} s" if did else ""
    return f"client {task.client} ({task.state}, heard {task.heartbeat_age_s:.1f} s ago{did}{share}{since})"


def _task_row(task: TaskStatus) -> Sequence[str]:
    if task.heartbeat_age_s is None:
        return str(task.client), task.state, "never", "", "", "", "", ""
    step = str(task.progress.step) if task.progress.phase else ""
    heard, unchanged = f"{task.heartbeat_age_s:.1f} s ago", f"{task.progress_age_s or 0.0:.0f} s"
    return str(task.client), task.state, heard, task.progress.phase, step, _done(task), unchanged, task.host


def _done(task: TaskStatus) -> str:
    total = task.progress.bytes_total
    return f"{task.progress.bytes_done / total:.0%}" if total > 0 else ""


# --- as JSON ----------------------------------------------------------------------------------------------------------


def _job_json(job: JobStatus) -> dict[str, Any]:
    from dataclasses import asdict

    fields = asdict(job)
    for task in fields["tasks"]:
        task["incarnation"] = f"{task['incarnation']:x}"  # as text: many JSON readers round integers of 64 bits
    return fields
