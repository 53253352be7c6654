"""`StepSources`: the places that a manager restores steps from: the root, the mirror and the local tier."""

from __future__ import annotations

import logging

from dtckpt.checkpoint.managing.candidates import Candidate, nearest_first
from dtckpt.checkpoint.managing.lineage import Run, Saved, ancestry, current_steps
from dtckpt.checkpoint.managing.mirror import MirrorCopies
from dtckpt.checkpoint.managing.step_folders import StepFolders
from dtckpt.checkpoint.managing.tier_saves import TierSaves
from dtckpt.errors import StorageError
from dtckpt.storage.location import Location

logger = logging.getLogger("dtckpt.checkpoint")


class StepSources:
    """The places of one manager's steps.

    Args:
        folders: The steps of the root.
        copies: The mirror; None: the manager has no mirror.
        tier: The local tier; None: the manager has no tier.
    """

    def __init__(self, folders: StepFolders, copies: MirrorCopies | None, tier: TierSaves | None) -> None:
        self._folders = folders
        self._copies = copies
        self._tier = tier

    def mirrored(self) -> Saved:
        """Return the steps of the mirror."""
        return {} if self._copies is None else self._copies.saved()

    def latest_step(self) -> int | None:
        """Return the newest step of the run in the root; if the root has none, the newest step in the mirror."""
        return max(self._folders.all_steps() or current_steps(self.mirrored()), default=None)

    def path(self, chosen: Candidate) -> Location:
        """Return the path or URL of a candidate that is not in the local tier."""
        if chosen.is_mirrored and self._copies is not None:
            return self._copies.path(chosen.step)
        return self._folders.path(chosen.step)

    def candidates(self, *, is_named: bool, is_signed: bool) -> list[Candidate]:
        """Return the steps that can be restored, newest first; without the root's steps if it cannot be listed.

        Args:
            is_named: Whether the caller named the step.
            is_signed: Whether only signed steps count; the memory of the hosts is not signed.
        """
        held = self._tier.restorable(is_named=is_named) if self._tier is not None and not is_signed else ()
        saved, copies = {}, self.mirrored()
        try:
            saved = self._folders.saved()
        except StorageError as error:
            if not copies and not any(each.is_restorable for each in held):
                raise
            logger.warning(
                "the steps of %s cannot be listed, so none of them is restored: %s", self._folders.root, error
            )
        return nearest_first(saved, copies, held)

    def run_at(self, chosen: Candidate) -> Run | None:
        """Return the run that a restored state descends from; None if the root cannot be listed now."""
        mirrored = self.mirrored()
        try:
            saved = {**mirrored, **self._folders.saved()}
        except StorageError:
            if chosen.local:
                return None
            if not chosen.is_mirrored:
                raise
            saved = dict(mirrored)
        if not chosen.local:
            return Run.at(saved, ancestry(saved, chosen.step))
        number = chosen.number
        older = {step for step in current_steps(saved) if step <= chosen.step and saved[step].number <= number}
        return Run.at(saved, frozenset(older))
