"""The directories that a manager keeps checkpoints in, one per step."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from pathlib import Path

from dtckpt.checkpoint.leftovers import targets_of_leftovers
from dtckpt.errors import CheckpointIncompleteError, CheckpointNotFoundError, ConfigError
from dtckpt.storage import directory

logger = logging.getLogger("dtckpt.checkpoint")

METRICS_NAME = "metrics.json"
_STEP_NAME = re.compile(r"step_(\d{8,18})")


class StepFolders:
    """The checkpoints ``step_00000010`` and so on under one directory; whatever else is there is ignored."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, step: int) -> Path:
        """Return where the checkpoint of a step is, or would be.

        Raises:
            ConfigError: This is no step.
        """
        if type(step) is not int or not 0 <= step < 10**18:
            raise ConfigError(f"a step must be a whole number from 0 on; got {step!r}")
        return self.root / f"step_{step:08d}"

    def all_steps(self) -> list[int]:
        """Return the steps that have a finished checkpoint, ascending."""
        try:
            names = {entry.name for entry in self.root.iterdir()} | targets_of_leftovers(self.root)
        except FileNotFoundError:
            return []
        steps = {int(match[1]) for match in map(_STEP_NAME.fullmatch, names) if match}
        return sorted(step for step in steps if self._is_there(step))

    def _is_there(self, step: int) -> bool:
        try:
            directory.locate(self.path(step))
        except (CheckpointNotFoundError, CheckpointIncompleteError):
            return False
        return True

    def metrics(self, step: int) -> Mapping[str, float]:
        """Return the metrics that a step was saved with; none if they cannot be read."""
        try:
            found = json.loads((self.path(step) / METRICS_NAME).read_text())
            return {str(name): float(value) for name, value in found.items()}
        except FileNotFoundError:
            return {}
        except (ValueError, TypeError, AttributeError, OSError) as error:
            logger.warning("the metrics of step %d cannot be read and count as none: %s", step, error)
            return {}
