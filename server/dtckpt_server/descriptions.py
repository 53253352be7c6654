"""Descriptions of tasks and barriers for people: in errors, in answers about a barrier, and in log lines."""

from __future__ import annotations

from collections.abc import Sequence

from dtckpt.coordination import barrier_texts
from dtckpt.coordination.barrier_texts import task_name
from dtckpt_server.state import Barrier, Job, Transition
from dtckpt_server.tasks import FENCED, LEFT, Task


def missing_task(job: Job, number: int, now: float) -> str:
    """Describe a task that has not arrived: its name, and its last progress."""
    task = job.tasks.get(number)
    if task is None or task.state == FENCED:
        return task_name(job.name, number) + barrier_texts.NEVER_REGISTERED
    return task_name(job.name, number) + barrier_texts.last_seen(task.progress, now - task.progressed_at)


def fates(job: Job, gone: Sequence[int], now: float) -> list[str]:
    """Describe the end of each of these tasks, which are lost or have left."""
    descriptions = []
    for task in map(job.tasks.__getitem__, gone):
        who, seen = task_name(job.name, task.number), barrier_texts.last_seen(task.progress)
        if task.state == LEFT:
            descriptions.append(barrier_texts.has_left(who, seen))
        else:
            descriptions.append(barrier_texts.fell_silent(who, now - task.heard_at, seen))
    return descriptions


def superseded(job: str, number: int, attempt: int) -> str:
    """Return the error of a task whose attempt is over."""
    return f"{task_name(job, number)}: attempt {attempt} has begun"


def task_transition(event: str, job: Job, task: Task, text: str) -> Transition:
    """Return the log entry about a task's new state; ``text`` goes after its name."""
    facts = {"job": job.name, "task": task.number, "incarnation": f"{task.incarnation:x}", "attempt": task.attempt}
    return Transition(f"task_{event}", f"{task_name(job.name, task.number)} {text}", facts)


def verdict_transition(barrier: Barrier, now: float) -> Transition:
    """Return the log entry about a barrier that was just decided."""
    failure, duration_s = barrier.failure, now - barrier.opened_at
    verdict = f"failed: {failure.code}: {failure.message}" if failure else "passed"
    text = (
        f"job {barrier.job!r} barrier {barrier.name!r} generation {barrier.generation} after {duration_s:.3f} s "
        f"{verdict}"
    )
    facts = {
        "job": barrier.job,
        "barrier": barrier.name,
        "generation": barrier.generation,
        "outcome": failure.cause.lower() if failure else "passed",
        "duration_s": round(duration_s, 6),
        "skew_s": round(barrier.last_arrival_at - barrier.opened_at, 6),
    }
    return Transition("barrier_failed" if failure else "barrier_passed", text, facts)
