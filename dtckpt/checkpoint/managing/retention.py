"""`Retention`: the rules which checkpoints of a training run are kept, and which are removed; pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import SupportsFloat

from dtckpt.errors import ConfigError, capped, did_you_mean

Metrics = Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """The rules which steps are kept: a step stays if any rule keeps it. Without rules, all steps stay.

    Args:
        last: Keep this many newest steps.
        every_steps: Keep steps that are multiples of this.
        newer_than_s: Keep steps that were saved within so many seconds.
        every_s: Of each period of so many seconds, counted from the epoch, keep the step that was saved first.
        best: Keep this many steps with the best metric.
        metric: Name of the metric.
        mode: Whether the best metric is the smallest (``min``) or the largest (``max``).

    >>> Retention(last=2, every_steps=100).doomed([90, 100, 110, 120, 130])
    [90, 110]
    >>> hourly = Retention(newer_than_s=3600, every_s=3600)
    >>> hourly.doomed([1, 2, 3, 4], times={1: 0, 2: 1800, 3: 3600, 4: 5400}, now=7000)
    [2]
    """

    last: int | None = None
    every_steps: int | None = None
    newer_than_s: float | None = None
    every_s: float | None = None
    best: int | None = None
    metric: str = "loss"
    mode: str = "min"

    def __post_init__(self) -> None:
        for name in ("last", "every_steps", "best"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ConfigError(f"retention {name} must be a positive number of steps or None; got {value!r}")
        for name in ("newer_than_s", "every_s"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, int | float) and 0 < value < math.inf):
                raise ConfigError(f"retention {name} must be a positive number of seconds or None; got {value!r}")
        if not isinstance(self.metric, str):
            raise ConfigError(f"retention metric must be the name of a metric; got {self.metric!r}")
        if self.mode not in ("min", "max"):
            raise ConfigError(f"retention mode is unknown; got {self.mode!r}, expected 'min' or 'max'")

    def metrics_of(self, step: int, passed: Mapping[str, SupportsFloat] | None) -> dict[str, float]:
        """Return the passed metrics as floats; NumPy's and PyTorch's numbers count, too.

        Raises:
            ConfigError: A metric is no number; or there are metrics, but not the metric that ranks the steps.
        """
        metrics = {}
        if passed is not None and not isinstance(passed, Mapping):
            raise ConfigError(f"metrics of step {step} must be numbers by name; got {passed!r:.80}; pass a dict")
        for name, value in (passed or {}).items():
            try:
                if not isinstance(name, str) or isinstance(value, str | bytes):
                    raise TypeError
                metrics[name] = float(value)
            except (TypeError, ValueError, RuntimeError, OverflowError):
                raise ConfigError(
                    f"metrics of step {step} must be numbers by name; got {value!r:.80} for {name!r:.80}; leave out a "
                    "metric that is not known"
                ) from None
        if self.best is not None and metrics and self.metric not in metrics:
            raise ConfigError(
                f"step {step} is saved without metric {self.metric!r}, by which Retention(best={self.best}) ranks the "
                f"steps; got {capped(map(repr, metrics))}{did_you_mean(self.metric, metrics)}; pass the metric too, or "
                "name another one by Retention(metric=...)"
            )
        return metrics

    @property
    def needs_times(self) -> bool:
        """Whether a rule asks when steps were saved."""
        return self.newer_than_s is not None or self.every_s is not None

    def ranked(self, steps: Collection[int], metrics: Mapping[int, Metrics]) -> list[int]:
        """Return the steps that have the metric, best first, the newer first among equals."""
        sign = 1.0 if self.mode == "min" else -1.0
        values = {step: sign * metrics.get(step, {}).get(self.metric, math.nan) for step in steps}
        return sorted((step for step in steps if not math.isnan(values[step])), key=lambda step: (values[step], -step))

    def doomed(
        self,
        steps: Collection[int],
        metrics: Mapping[int, Metrics] | None = None,
        *,
        times: Mapping[int, float] | None = None,
        now: float = math.inf,
        protected: Collection[int] = (),
        damaged: Collection[int] = (),
        abandoned: Collection[int] = (),
    ) -> list[int]:
        """Return the steps that need not be kept, ascending. The newest good step is never among them.

        Args:
            steps: All steps of the run that have a checkpoint.
            metrics: Metrics by step, as far as they are known.
            times: When each step was saved, in seconds since the epoch. A rule by time keeps a step of unknown time.
            now: Seconds since the epoch.
            protected: Steps that stay in any case.
            damaged: Steps that cannot be restored. The rules do not count them; they stay for the user to look at.
            abandoned: Steps of abandoned runs. No rule keeps them: they go when the run has passed them.
        """
        good = sorted(set(steps) - set(damaged))
        if {self.last, self.every_steps, self.newer_than_s, self.every_s, self.best} == {None}:
            return []
        kept = {*protected, *good[-max(1, self.last or 1) :]}
        if self.every_steps is not None:
            kept.update(step for step in good if step % self.every_steps == 0)
        kept.update(self._kept_by_time(good, times or {}, now))
        if self.best is not None:
            kept.update(self.ranked(good, metrics or {})[: self.best])
        passed = {step for step in abandoned if step < max(good, default=0)} - {*protected, *damaged}
        return sorted({step for step in good if step not in kept} | passed)

    def _kept_by_time(self, steps: Sequence[int], times: Mapping[int, float], now: float) -> set[int]:
        if not self.needs_times:
            return set()
        kept = set(steps) - times.keys()
        known = sorted(set(steps) - kept, key=lambda step: (times[step], step))
        if self.newer_than_s is not None:
            kept.update(step for step in known if now - times[step] < self.newer_than_s)
        if self.every_s is not None:
            # The newest first, so that the table keeps the first step of each period.
            kept.update({times[step] // self.every_s: step for step in reversed(known)}.values())
        return kept
