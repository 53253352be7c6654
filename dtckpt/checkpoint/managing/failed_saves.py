"""`FailedSaves`: whether training goes on after a save that failed.

All clients of a save raise the same class of error, so each of them decides by the class, and all decide the same.
Storage may be mended until the next save. Any other error is about the job or its state: a client is lost, clients
disagree, copies differ, another job has the root. No later save would mend that, so it is raised in any case.
"""

from __future__ import annotations

import logging
from typing import Literal

from dtckpt.errors import ConfigError, StorageError
from dtckpt.storage.location import Location

logger = logging.getLogger("dtckpt.checkpoint")

OnFailure = Literal["raise", "warn"]


class FailedSaves:
    """The failed saves of a manager.

    Args:
        on_failure: Whether a failure of storage is raised, or logged.
        root: The root, for messages.
    """

    def __init__(self, on_failure: OnFailure, root: Location) -> None:
        if on_failure not in ("raise", "warn"):
            raise ConfigError(f"on_failure must be 'raise' or 'warn'; got {on_failure!r}")
        self._is_raised = on_failure == "raise"
        self._root = root
        self.count = 0
        """The failures after which training went on."""

    def tolerate(self, step: int, failure: BaseException | None, *, is_told: bool) -> bool:
        """Return whether training goes on; then the failure is counted and, if ``is_told``, logged."""
        if self._is_raised or not isinstance(failure, StorageError):
            return False
        self.count += 1
        if is_told:
            logger.warning(
                "step %d is not saved in %s, and training goes on; failed saves so far: %d; the reason: %s",
                step, self._root, self.count, failure,
            )  # fmt: skip
        return True
