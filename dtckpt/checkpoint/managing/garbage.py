"""Remove, from outside of a run, what its root need not keep: leftovers, and steps that no rule keeps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from dtckpt.checkpoint.managing.leftovers import Leftover
from dtckpt.checkpoint.managing.retention import Retention
from dtckpt.checkpoint.managing.survey import Survey, SurveyedCheckpoint, survey
from dtckpt.errors import CheckpointConflictError, CheckpointIncompleteError, CheckpointNotFoundError
from dtckpt.storage.location import Location, Url


@dataclass(frozen=True, slots=True)
class Garbage:
    """What a root need not keep.

    Args:
        found: The survey that tells.
        leftovers: What attempts left that are dead.
        steps: The steps that no rule keeps.
    """

    found: Survey
    leftovers: tuple[Leftover, ...]
    steps: tuple[SurveyedCheckpoint, ...]

    @property
    def nbytes(self) -> int:
        """Bytes in it, as far as storage tells."""
        return sum_nbytes(self.leftovers) + sum_nbytes(self.steps)


def sum_nbytes(items: Iterable[Leftover | SurveyedCheckpoint]) -> int:
    """Return the bytes of leftovers or steps, as far as storage tells."""
    return sum(each.nbytes or 0 for each in items)


def find_garbage(where: Location, keep: Retention, *, min_age_s: float, now: float) -> Garbage:
    """Find what a root need not keep, by the rules that a `CheckpointManager` has. Nothing is changed.

    Args:
        where: The root's path or URL.
        keep: The rules; without any, all steps stay.
        min_age_s: Seconds without a change after which an attempt can count as dead.
        now: Seconds since the epoch.

    Raises:
        CheckpointNotFoundError: There is no such root.
    """
    found = survey(where, min_age_s=min_age_s, now=now)
    newest = () if found.newest_valid is None else (found.newest_valid,)
    doomed = frozenset(found.folders.doomed(keep, found.saved, protected=newest, damaged=found.damaged))
    return Garbage(
        found,
        tuple(each for each in found.leftovers if each.is_dead),
        tuple(each for each in found.checkpoints if each.step in doomed),
    )


@contextmanager
def right_to_remove(found: Survey, *, take_over: bool) -> Iterator[None]:
    """Hold the right to change a root, so that nobody saves there at the same time.

    A directory's lock tells whether its manager lives. An object store only tells that there was one: to take its right
    makes its next save fail, if it lives.

    Raises:
        CheckpointConflictError: A manager has it.
    """
    right = found.root.right
    if isinstance(found.root.where, Url) and not take_over and (holder := right.holder()):
        raise CheckpointConflictError(
            f"{holder} saves checkpoints to {found.root.where}, or has ended without giving the right up; if it has "
            "ended, pass --take-over"
        )
    right.acquire()
    try:
        yield
    finally:
        right.release()


def remove_step(found: Survey, step: int) -> bool:
    """Remove the checkpoint of a step; return whether it is gone. It stays if a process on this host restores it."""
    place = found.folders.place(step)
    try:
        place.remove()
        place.locate()
    except (CheckpointNotFoundError, CheckpointIncompleteError):
        return True  # by another process maybe
    return False
