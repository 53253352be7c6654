"""`Mirror`: copies of a manager's steps in a second root, made in the background by client 0 after each commit.

One client copies, with several files at a time: no barrier is met in the background, so a slow or lost store never
makes the others wait. Steps are copied in the order of their commits. A step that fails is tried again after the next
commit, and a job that starts again copies the steps that the job before it did not.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass

from dtckpt.checkpoint.copying.copy_files import NUM_THREADS, CopyOptions, copy_checkpoint
from dtckpt.checkpoint.managing.lineage import Saved, current_steps
from dtckpt.checkpoint.managing.retention import Retention
from dtckpt.checkpoint.managing.root import root_of
from dtckpt.checkpoint.managing.step_folders import StepFolders
from dtckpt.comm.background_threads import begin
from dtckpt.errors import (
    CheckpointConflictError,
    CheckpointIncompleteError,
    CheckpointNotFoundError,
    ConfigError,
    DtckptError,
    StorageError,
)
from dtckpt.storage.location import Location, is_inside, location_of
from dtckpt.storage.whole_files import RateLimit

logger = logging.getLogger("dtckpt.checkpoint")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mirror:
    """A second root that a `CheckpointManager` copies its steps to.

    Args:
        path: The path or URL of the root.
        keep: The copies that are kept: a number of newest ones, or a `Retention`; default all.
        max_rate: Bound on bytes per second.
        threads: Files that are copied at one time.
    """

    path: str | os.PathLike[str] | Location
    keep: int | Retention | None = None
    max_rate: float | None = None
    threads: int = NUM_THREADS

    def __post_init__(self) -> None:
        if self.max_rate is not None and not self.max_rate > 0:
            raise ConfigError(f"max_rate of a mirror must be a positive number of bytes; got {self.max_rate!r}")
        if type(self.threads) is not int or self.threads < 1:
            raise ConfigError(f"threads of a mirror must be a whole number from 1 on; got {self.threads!r}")


def mirror_of(mirror: str | os.PathLike[str] | Location | Mirror) -> Mirror:
    """Return the mirror that a manager's argument names."""
    return mirror if isinstance(mirror, Mirror) else Mirror(path=mirror)


class MirrorCopies:
    """The copies of one manager's steps, on client 0; other clients only restore from them.

    Args:
        mirror: See `Mirror`.
        folders: The manager's steps.
        pin: Keeps a step from being removed, in a context.
        is_tolerant: Whether a failure of storage is logged only.
    """

    def __init__(
        self,
        mirror: Mirror,
        folders: StepFolders,
        pin: Callable[[int], AbstractContextManager[None]],
        *,
        is_tolerant: bool,
    ) -> None:
        where = location_of(mirror.path)
        if where == folders.root or is_inside(where, folders.root) or is_inside(folders.root, where):
            raise ConfigError(f"the mirror {where} and the root {folders.root} overlap; choose another mirror")
        self.num_failed = 0
        """The copies that failed."""
        self._root = root_of(where)
        self._mirrored = StepFolders(self._root)
        self._folders = folders
        self._pin = pin
        self._keep = mirror.keep if isinstance(mirror.keep, Retention) else Retention(last=mirror.keep)
        self._options = CopyOptions(overwrite=True, threads=mirror.threads, limit=RateLimit(mirror.max_rate))
        self._is_tolerant = is_tolerant
        self._lock = threading.Lock()
        self._is_due = False
        self._is_running = False
        self._is_over = False
        self._idle = threading.Condition(self._lock)
        self._owed: set[int] = set()  # only the thread that copies uses it
        self._failure: DtckptError | None = None

    @property
    def where(self) -> Location:
        """The mirror's path or URL."""
        return self._root.where

    def path(self, step: int) -> Location:
        """Return where the copy of a step is, or would be."""
        return self._mirrored.path(step)

    def saved(self) -> Saved:
        """Return the steps of the mirror; none if it cannot be listed."""
        try:
            return self._mirrored.saved()
        except StorageError as error:
            logger.warning("the steps of the mirror %s cannot be listed: %s", self.where, error)
            return {}

    # --- copying --------------------------------------------------------------------------------------------------

    def copy_soon(self) -> None:
        """Copy, in the background, the steps that were committed since the last copy."""
        with self._lock:
            self._is_due = True
            if self._is_running or self._is_over:
                return
            self._is_running = True
        begin(self._run, "dtckpt-mirror")

    def raise_failure(self) -> None:
        """Raise the error of a copy in the background, once."""
        with self._lock:
            failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def wait(self) -> None:
        """Wait until all steps that were committed are copied, or have failed."""
        with self._lock:
            self._idle.wait_for(lambda: not self._is_running)

    def hand_over(self) -> None:
        """Wait for the copies under way, and let another process copy from now on."""
        self.wait()
        self._root.right.release()

    def close(self, *, has_failed: bool) -> None:
        """Wait for the copies, unless the caller has failed, and raise the error of a copy that was not raised yet."""
        with self._lock:
            self._is_over = True
        if has_failed:
            return
        self.wait()
        self._root.right.release()
        self.raise_failure()

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._is_due:
                    self._is_running = False
                    self._idle.notify_all()
                    return
                self._is_due = False
            try:
                self._copy_due()
            except Exception as error:
                self._note(error, f"the steps of {self._folders.root} are not copied to {self.where}")

    def _copy_due(self) -> None:
        self._root.right.acquire()
        saved, there = self._folders.saved(), self._mirrored.saved()
        if (stranger := unknown_step(saved, there)) is not None:
            raise CheckpointConflictError(
                f"the mirror {self.where} holds step {stranger} of a run that the root does not know; restore it "
                "before the first save, choose another mirror, or remove the newer steps from this one"
            )
        # An abandoned step that the root has no more is stated by no later save: it would seem to be of the run.
        for step in there.keys() - current_steps(there) - saved.keys():
            self._mirrored.place(step).remove()
        for step in steps_to_copy(saved, there, self._owed, self._keep):
            try:
                self._copy(step)
            except Exception as error:
                self._owed.add(step)
                self._note(error, f"step {step} is not copied to {self.where}, and is tried again after the next save")
            else:
                self._owed.discard(step)
        now = self._mirrored.saved()
        for step in self._mirrored.doomed(self._keep, now, time.time()):
            self._mirrored.place(step).remove()

    def _copy(self, step: int) -> None:
        # The root's rules may have removed the step before its turn came; or a save replaces it now, and is next.
        with (
            suppress(CheckpointNotFoundError, CheckpointIncompleteError, CheckpointConflictError),
            self._pin(step),
        ):
            copied = copy_checkpoint(self._folders.path(step), self.path(step), self._options)
            logger.info("step %d is copied to %s in %.1f s", step, copied.target, copied.seconds)

    def _note(self, error: Exception, text: str) -> None:
        self.num_failed += 1
        is_told = self._is_tolerant and isinstance(error, StorageError)
        (logger.warning if is_told else logger.error)("%s: %s", text, error)
        if not is_told:
            error.add_note(f"{text}; this was found in the background.")
            failure = error if isinstance(error, DtckptError) else StorageError(f"{text}: {error}")
            with self._lock:
                self._failure = failure


def unknown_step(saved: Saved, there: Saved) -> int | None:
    """Return the mirror's newest step if the run of the root neither descends from it nor has set it aside; pure.

    A root that was lost, and whose job began anew, must not replace the only copies that are left.
    """
    if not saved or not there:
        return None
    newest = max(there, key=lambda step: (there[step].number, step))
    last = max(saved, key=lambda step: (saved[step].number, step))
    is_known = newest in saved or newest < last or newest in saved[last].aside
    return None if is_known or not saved[last].number else newest


def steps_to_copy(saved: Saved, there: Saved, owed: set[int], keep: Retention) -> list[int]:
    """Return the steps of the run that a mirror lacks, in the order of their commits; pure.

    Args:
        saved: The steps of the root.
        there: The steps of the mirror.
        owed: The steps whose copy failed.
        keep: The mirror's rules; a step that they would remove at once is left out.
    """
    newest = max((lineage.number for lineage in there.values()), default=0)
    steps = current_steps(saved)
    due = {
        step
        for step in steps
        if saved[step].number > newest or (step in owed and (step not in there or there[step] != saved[step]))
    }
    # Without metrics and times, only the rules by steps tell.
    by_step = Retention(last=keep.last, every_steps=keep.every_steps)
    has_others = keep.needs_times or keep.best is not None
    doomed = set() if has_others else set(by_step.doomed(sorted(steps | there.keys())))
    return sorted(due - doomed, key=lambda step: (saved[step].number, step))
