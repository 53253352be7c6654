"""`ManagerOptions`: the options of a manager, and arguments that are names of rules."""

from __future__ import annotations

from dataclasses import dataclass

from dtckpt.checkpoint.managing.interval import AutoInterval
from dtckpt.checkpoint.managing.retention import Retention
from dtckpt.checkpoint.managing.schedule import SaveRules
from dtckpt.checkpoint.options import SaveOptions
from dtckpt.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ManagerOptions:
    """The options of a manager, grouped; see `CheckpointManager`."""

    keep: Retention
    rules: SaveRules
    is_async: bool
    leftover_age_s: float
    save: SaveOptions

    def __post_init__(self) -> None:
        if not self.leftover_age_s > 0:
            raise ConfigError(f"leftover_age_s must be positive; got {self.leftover_age_s!r}")


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
