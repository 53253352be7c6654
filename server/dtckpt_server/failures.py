"""Why a barrier failed: the error that its participants raise, with its cause for the protocol.

The sentences come from `dtckpt.coordination.barrier_texts`; clients without a coordinator use them, too.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dtckpt import errors
from dtckpt.coordination import barrier_texts

NUMBER_NBYTES = 40
"""Memory that a number in a tuple takes."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a barrier failed: the error that every participant raises.

    Args:
        cause: Name of a ``Failure.Cause`` of the protocol, without its prefix.
        code: Class of `dtckpt.errors`.
        message: Text of the error.
        clients: The clients that fell silent or left, if that is the cause.
        missing: The clients that did not arrive in time, if that is the cause.
    """

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


def voted_no(task: int, code: str, reason: str) -> Failure:
    message = barrier_texts.voted_no(task, reason)[: errors.MAX_MESSAGE_CHARS]
    return Failure("VOTE", code[:64] or errors.ClientFailedError.__name__, message)


def lost(name: str, clients: Sequence[int], fates: Iterable[str]) -> Failure:
    """Return the failure of a barrier without these clients; ``fates`` may describe only the first of them."""
    text = barrier_texts.lost(name, fates, len(clients))
    return _failure("TASK_LOST", errors.ClientLostError, text, clients=tuple(clients))


def timed_out(
    name: str, timeout_s: float, num_arrived: int, num_participants: int, waiting_for: str, *, missing: Sequence[int]
) -> Failure:
    """Return the failure of a barrier whose deadline passed.

    Args:
        name: Of the barrier.
        timeout_s: Seconds.
        num_arrived: How many tasks arrived in time.
        num_participants: Of how many.
        waiting_for: Description of the missing tasks.
        missing: Their numbers, perhaps only the first.
    """
    text = barrier_texts.timed_out(name, timeout_s, num_arrived, num_participants, waiting_for)
    return _failure("TIMEOUT", errors.BarrierTimeoutError, text, missing=tuple(missing))


def cancelled(name: str, who: str, reason: str) -> Failure:
    return _failure("CANCELLED", errors.BarrierCancelledError, barrier_texts.cancelled(name, who, reason))


def fenced(name: str, job: str, attempt: int) -> Failure:
    return _failure("FENCED", errors.FencedError, f"barrier {name!r}: attempt {attempt} of job {job!r} has begun")


def came_late(name: str, age_s: float, missed: Failure) -> Failure:
    """Return the failure of a round at which only tasks arrived that had missed an earlier, failed round."""
    message = barrier_texts.came_late(name, age_s, missed.message)[: errors.MAX_MESSAGE_CHARS]
    return Failure("LATE", missed.code, message, missed.clients, missed.missing)


def gave_up(name: str, who: str) -> Failure:
    return _failure("CANCELLED", errors.BarrierCancelledError, barrier_texts.gave_up(name, who))


def is_elsewhere(name: str, who: str) -> Failure:
    return _failure("CONFLICT", errors.BarrierConflictError, barrier_texts.is_elsewhere(name, who))


def wait_for_each_other(first: str, first_name: str, second: str, second_name: str) -> Failure:
    text = barrier_texts.wait_for_each_other(first, first_name, second, second_name)
    return _failure("CONFLICT", errors.BarrierConflictError, text)


def topics_differ(name: str, first: int, first_topic: bytes, task: int, topic: bytes) -> Failure:
    text = barrier_texts.topics_differ(name, first, first_topic, task, topic)
    return _failure("CONFLICT", errors.BarrierConflictError, text)


def participants_differ(name: str, first: int, theirs: Sequence[int], task: int, ours: Sequence[int]) -> Failure:
    text = barrier_texts.participants_differ(name, first, theirs, task, ours)
    return _failure("CONFLICT", errors.BarrierConflictError, text)
