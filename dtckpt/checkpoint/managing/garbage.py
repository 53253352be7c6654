"""Remove garbage below the root of a run, from outside the run: leftovers, and steps that no rule keeps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from dtckpt.checkpoint.managing.leftovers import Leftover
from dtckpt.checkpoint.managing.retention import Retention
from dtckpt.checkpoint.managing.survey import Survey, SurveyedCheckpoint, survey
from dtckpt.checkpoint.open import open_checkpoint
from dtckpt.errors import CheckpointConflictError, CheckpointIncompleteError, CheckpointNotFoundError, DtckptError
from dtckpt.storage.location import Location
from dtckpt.storage.url import Url


@dataclass(frozen=True, slots=True)
class Garbage:
    """The garbage below a root.

    Args:
        found: The survey that found it.
        leftovers: The leftovers of dead attempts.
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
    """Find the garbage below a root, by the rules of a `CheckpointManager`. Nothing is changed.

    Args:
        where: The root's path or URL.
        keep: The rules; without any, all steps stay.
        min_age_s: Seconds without a change after which an attempt can count as dead.
        now: Seconds since the epoch.

    Raises:
        CheckpointNotFoundError: There is no such root.
    """
    found = survey(where, min_age_s=min_age_s, now=now)
    newest = _newest_complete(found)
    protected = () if newest is None else (newest,)
    doomed = frozenset(found.folders.doomed(keep, found.saved, now, protected=protected, damaged=found.damaged))
    return Garbage(
        found,
        tuple(each for each in found.leftovers if each.is_dead),
        tuple(each for each in found.checkpoints if each.step in doomed),
    )


def _newest_complete(found: Survey) -> int | None:
    """Return the newest step whose files are all there, as long as they should be; their elements are not read."""
    for each in reversed(found.good_steps):
        try:
            with open_checkpoint(each.where) as checkpoint:
                chunks = ((name, chunk.region) for name, info in checkpoint.tensors.items() for chunk in info.chunks)
                checkpoint.validate_stored(chunks, unchecked=0)
        except DtckptError:
            continue
        return each.step
    return None


@contextmanager
def right_to_remove(found: Survey, *, take_over: bool) -> Iterator[None]:
    """Hold the right to change a root, so that no manager saves there at the same time.

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
    """Remove the checkpoint of a step; return whether it is gone. A step that a process on this host restores stays."""
    place = found.folders.place(step)
    try:
        place.remove()
        place.locate()
    except (CheckpointNotFoundError, CheckpointIncompleteError):
        return True  # by another process maybe
    return False
