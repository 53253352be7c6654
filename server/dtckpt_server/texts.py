"""What the coordinator says about barriers.

The clients' `dtckpt.coordination.verdicts` says the same about barriers that no coordinator decides. The server may not
import it (its image carries no part of the library that needs torch), so these few sentences stand twice; the contract
tests hold both to the same words.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dtckpt import errors
from dtckpt.coordination import barrier_rules

UNCHANGED_S = 10.0
"""From when on it is said how long a task's progress has not changed."""

NUMBER_NBYTES = 40
"""Of a number in a tuple."""


@dataclass(frozen=True, slots=True)
class Progress:
    """What a task last reported."""

    phase: str = ""
    step: int = 0
    bytes_done: int = 0
    bytes_total: int = 0


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a barrier failed: the error that every participant raises."""

    cause: str
    code: str
    message: str
    clients: tuple[int, ...] = ()
    missing: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        """About how much memory it takes."""
        return sys.getsizeof(self.message) + NUMBER_NBYTES * (len(self.clients) + len(self.missing))


def _failure(cause: str, cls: type[errors.DtckptError], message: str, **facts: tuple[int, ...]) -> Failure:
    return Failure(cause, cls.__name__, message[: errors.MAX_MESSAGE_CHARS], **facts)


def task_name(job: str, task: int) -> str:
    return f"client {task} ({job}/{task})"


def last_seen(progress: Progress, unchanged_s: float = 0.0) -> str:
    """Return what a task last reported, and for how long if it is long: who beats but does nothing is stuck."""
    if not progress.phase:
        return ""
    step = f" step {progress.step}" if progress.step else ""
    share = f", {progress.bytes_done / progress.bytes_total:.0%}" if progress.bytes_total > 0 else ""
    stuck = f", unchanged for {unchanged_s:.0f} s" if unchanged_s >= UNCHANGED_S else ""
    return f"; last seen in phase {progress.phase!r}{step}{share}{stuck}"


def voted_no(task: int, code: str, reason: str) -> Failure:
    message = f"client {task}: {reason or 'voted no without a reason'}"[: errors.MAX_MESSAGE_CHARS]
    return Failure("VOTE", code[:64] or errors.ClientFailedError.__name__, message)


def lost(name: str, clients: Sequence[int], fates: Iterable[str]) -> Failure:
    """``fates`` may be only of the first of the clients."""
    text = f"barrier {name!r} failed: {errors.capped(fates, count=len(clients))}"
    return _failure("TASK_LOST", errors.ClientLostError, text, clients=tuple(clients))


def timed_out(name: str, timeout_s: float, situation: str, missing: Sequence[int]) -> Failure:
    text = f"barrier {name!r} timed out after {timeout_s:g} s: {situation}"
    return _failure("TIMEOUT", errors.BarrierTimeoutError, text, missing=tuple(missing))


def cancelled(name: str, who: str, reason: str) -> Failure:
    return _failure("CANCELLED", errors.BarrierCancelledError, f"barrier {name!r}: {who} {reason}")


def fenced(name: str, job: str, attempt: int) -> Failure:
    return _failure("FENCED", errors.FencedError, f"barrier {name!r}: attempt {attempt} of job {job!r} has begun")


def came_late(name: str, age_s: float, former: Failure) -> Failure:
    """Return the failure of a round at which only tasks arrived that had missed an earlier one."""
    message = barrier_rules.came_late(name, age_s, former.message)[: errors.MAX_MESSAGE_CHARS]
    return Failure("LATE", former.code, message, former.clients, former.missing)


def gave_up(name: str, who: str) -> Failure:
    return _failure("CANCELLED", errors.BarrierCancelledError, barrier_rules.gave_up(name, who))


def is_elsewhere(name: str, who: str) -> Failure:
    return _failure("CONFLICT", errors.BarrierConflictError, barrier_rules.is_elsewhere(name, who))


def wait_for_each_other(first: str, first_name: str, second: str, second_name: str) -> Failure:
    text = barrier_rules.wait_for_each_other(first, first_name, second, second_name)
    return _failure("CONFLICT", errors.BarrierConflictError, text)


def topics_differ(name: str, first: int, first_topic: bytes, task: int, topic: bytes) -> Failure:
    text = (
        f"topics differ: client {first} came for {first_topic.hex() or 'none'}, "
        f"client {task} for {topic.hex() or 'none'}"
    )
    return _failure("CONFLICT", errors.BarrierConflictError, f"barrier {name!r}: {text}")


def participants_differ(name: str, first: int, theirs: Sequence[int], task: int, ours: Sequence[int]) -> Failure:
    extra = [errors.capped(sorted(more)) or "no one" for more in (set(theirs) - set(ours), set(ours) - set(theirs))]
    text = f"participants differ: client {first} also expects {extra[0]}, client {task} also expects {extra[1]}"
    return _failure("CONFLICT", errors.BarrierConflictError, f"barrier {name!r}: {text}")
