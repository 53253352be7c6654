"""`StepRemoval`: a manager removes the steps that need not be kept, and leftovers of dead attempts.

`dtckpt.checkpoint.managing.retention` decides which steps are kept, and `dtckpt.checkpoint.managing.leftovers` which
attempts are dead. A step that a restore reads stays until the restore has ended.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from dtckpt.checkpoint.managing.lineage import Saved
from dtckpt.checkpoint.managing.retention import Retention
from dtckpt.checkpoint.managing.root import Root
from dtckpt.checkpoint.managing.step_folders import StepFolders
from dtckpt.errors import DtckptError

logger = logging.getLogger("dtckpt.checkpoint")


class StepRemoval:
    """The removal of a run's old steps after each save.

    Args:
        root: The root.
        folders: The steps of the root.
        keep: The rules which steps are kept.
        leftover_age_s: Seconds without any change after which an attempt whose leader is gone is removed.
    """

    def __init__(self, root: Root, folders: StepFolders, keep: Retention, leftover_age_s: float) -> None:
        self.damaged: set[int] = set()
        """Steps that a restore found damaged."""
        self._root = root
        self._folders = folders
        self._keep = keep
        self._leftover_age_s = leftover_age_s
        self._lock = threading.Lock()
        self._pinned: set[int] = set()  # steps that a restore reads

    @contextmanager
    def pin(self, step: int) -> Iterator[None]:
        """Keep a step from being removed, by this process or another one on this host."""
        with self._lock:
            self._pinned.add(step)
        try:
            with self._folders.place(step).pin():
                yield
        finally:
            self._pinned.discard(step)

    def remove_old(self, committed: int, now: float) -> Saved | None:
        """Remove the steps that need not be kept, and leftovers of dead attempts.

        Args:
            committed: The step whose commit is the occasion; it stays.
            now: Seconds since the epoch.

        Returns:
            The steps as they were before the removal; None if they could not be listed.
        """
        self.damaged.discard(committed)
        saved = None
        with self.tolerated():
            saved = self._folders.saved()
            doomed = self._folders.doomed(self._keep, saved, now, protected={committed}, damaged=self.damaged)
            for step in doomed:
                with self.tolerated():
                    self._remove(step)
        with self.tolerated():
            self._root.collect(min_age_s=self._leftover_age_s, now=now)
        return saved

    @contextmanager
    def tolerated(self, action: str = "removed") -> Iterator[None]:
        """Log a warning if old steps cannot be removed, and go on: the save is good, and the next save tries again."""
        try:
            yield
        except (DtckptError, OSError) as error:
            logger.warning("old checkpoints in %s could not all be %s: %s", self._root.where, action, error)

    def _remove(self, step: int) -> None:
        with self._lock:
            # Looked at under the lock, so a restore cannot choose the step between the look and the removal.
            if step not in self._pinned:
                self._folders.place(step).remove()
