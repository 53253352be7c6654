"""`StepFolders`: the checkpoints of a manager by step, with their lineages and metrics, as storage has them."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping

from dtckpt.checkpoint.managing.lineage import LINEAGE_NAME, MAX_STEP, UNKNOWN, Lineage, Saved, current_steps
from dtckpt.checkpoint.managing.lineage import MAX_NBYTES as MAX_LINEAGE_NBYTES
from dtckpt.checkpoint.managing.retention import Retention
from dtckpt.checkpoint.managing.root import Root
from dtckpt.errors import CheckpointIncompleteError, CheckpointNotFoundError, ConfigError
from dtckpt.format import json_facts
from dtckpt.storage.commit import commit_target_of
from dtckpt.storage.commit_target import CommitTarget
from dtckpt.storage.location import Location

logger = logging.getLogger("dtckpt.checkpoint")

METRICS_NAME = "metrics.json"
MAX_METRICS_NBYTES = 16 << 20
_STEP_NAME = re.compile(r"step_(\d{8,18})")


class StepFolders:
    """The checkpoints ``step_00000010`` and so on below one root; whatever else is there is ignored."""

    def __init__(self, root: Root) -> None:
        self._root = root

    @property
    def root(self) -> Location:
        """The root's path or URL."""
        return self._root.where

    def path(self, step: int) -> Location:
        """Return where the checkpoint of a step is, or would be.

        Raises:
            ConfigError: ``step`` is no whole number from 0 on.
        """
        if type(step) is not int or not 0 <= step < MAX_STEP:
            raise ConfigError(f"a step must be a whole number from 0 on; got {step!r}")
        return self.root / f"step_{step:08d}"

    def step_of(self, name: str) -> int | None:
        """Return the step whose checkpoint has a name; None if that is no step's."""
        match = _STEP_NAME.fullmatch(name)
        return int(match[1]) if match and f"step_{int(match[1]):08d}" == name else None

    def place(self, step: int) -> CommitTarget:
        """Return the place of a step's checkpoint. Raises: as `path`."""
        return commit_target_of(self.path(step))

    def saved(self) -> dict[int, Lineage]:
        """Return all steps that have a finished checkpoint, whichever run saved them, and their lineages."""
        steps = {int(match[1]) for match in map(_STEP_NAME.fullmatch, self._root.names()) if match}
        lineages = {step: self._lineage(step) for step in sorted(steps)}
        return {step: lineage for step, lineage in lineages.items() if lineage is not None}

    def all_steps(self) -> list[int]:
        """Return the steps of the run that saved last, ascending."""
        return sorted(current_steps(self.saved()))

    def abandoned_steps(self) -> list[int]:
        """Return the steps of all other runs, ascending."""
        saved = self.saved()
        return sorted(saved.keys() - current_steps(saved))

    def doomed(
        self,
        keep: Retention,
        saved: Saved,
        now: float,
        *,
        protected: Collection[int] = (),
        damaged: Collection[int] = (),
    ) -> list[int]:
        """Return the steps that need not be kept at a time, in seconds since the epoch; see `Retention.doomed`."""
        steps = current_steps(saved)
        metrics = {step: self.metrics(step) for step in steps} if keep.best else {}
        abandoned = saved.keys() - steps
        times = {}
        if keep.needs_times:
            times = {step: time for step in steps if (time := self.saved_s(step, saved)) is not None}
        return keep.doomed(
            steps, metrics, times=times, now=now, protected=protected, damaged=damaged, abandoned=abandoned
        )

    def saved_s(self, step: int, saved: Saved) -> float | None:
        """Return when a step was saved, in seconds since the epoch; None if nothing tells."""
        number = saved[step].number if step in saved else 0
        return number / 1e9 if number else self._root.saved_s(f"step_{step:08d}")

    def _lineage(self, step: int) -> Lineage | None:
        """Return the lineage that the checkpoint of a step states; None if there is no checkpoint."""
        for _ in range(2):  # the checkpoint may be replaced or removed between `locate` and `read`
            try:
                folder = self.place(step).locate()
            except (CheckpointNotFoundError, CheckpointIncompleteError):
                return None
            try:
                return Lineage.from_bytes(folder.read_whole(LINEAGE_NAME, MAX_LINEAGE_NBYTES))
            except FileNotFoundError:
                continue
            except (ValueError, OSError) as error:
                logger.warning("the lineage of step %d cannot be read and counts as unknown: %s", step, error)
                break
        return UNKNOWN

    def metrics(self, step: int) -> Mapping[str, float]:
        """Return the metrics that a step was saved with; none if they cannot be read."""
        try:
            file = self.place(step).locate().read_whole(METRICS_NAME, MAX_METRICS_NBYTES)
            return {name: json_facts.number(value) for name, value in json_facts.parse_object(file).items()}
        except FileNotFoundError:
            return {}
        except (ValueError, OSError) as error:
            logger.warning("the metrics of step %d cannot be read and count as none: %s", step, error)
            return {}
