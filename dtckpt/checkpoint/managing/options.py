"""The options of a manager (`ManagerOptions`), and whether training goes on after a save that failed (`FailedSaves`).

All clients of a save raise the same class of error, so each of them decides by the class, and all decide the same.
Storage may be mended until the next save. Any other error is about the job or its state: a client is lost, clients
disagree, copies differ, another job has the root. No later save would mend that, so it is raised in any case.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Literal

from dtckpt.checkpoint.managing.interval import AutoInterval
from dtckpt.checkpoint.managing.retention import Retention
from dtckpt.checkpoint.managing.schedule import SaveRules
from dtckpt.checkpoint.options import SaveOptions
from dtckpt.checkpoint.signing.keys import KeySource
from dtckpt.errors import ConfigError, StorageError
from dtckpt.storage.location import Location


@dataclass(frozen=True, slots=True, kw_only=True)
class ManagerOptions:
    """The options of a manager, grouped; see `CheckpointManager`."""

    keep: Retention
    rules: SaveRules
    is_async: bool
    leftover_age_s: float
    save: SaveOptions
    reuse: bool = False
    trusted_keys: tuple[KeySource, ...] = ()

    def __post_init__(self) -> None:
        if not self.leftover_age_s > 0:
            raise ConfigError(f"leftover_age_s must be positive; got {self.leftover_age_s!r}")
        if not isinstance(self.reuse, bool):
            raise ConfigError(f"reuse must be True or False; got {self.reuse!r}")


def auto_interval(every: object) -> AutoInterval | None:
    """Return the rule that the argument ``every`` names."""
    if every is None or isinstance(every, AutoInterval):
        return every
    if every == "auto":
        return AutoInterval()
    raise ConfigError(f"every must be 'auto' or an AutoInterval; got {every!r}")


def is_continuous(interval: object) -> bool:
    """Return whether the argument ``save_interval`` asks for saves back to back."""
    if interval not in (None, "continuous"):
        raise ConfigError(
            f"save_interval must be 'continuous', got {interval!r}; a number goes to save_interval_steps or _s"
        )
    return interval is not None


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
