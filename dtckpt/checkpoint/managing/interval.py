"""How often to save: the interval that loses the least time, from the cost of a save and the time between failures.

A save stops training for C seconds. A failure, every M seconds on average, loses the work since the last save that is
complete: half an interval, and the L seconds that a save takes to complete. With an interval of T seconds, the part of
the time that is lost is about

    C / T  +  (T / 2 + L) / M

so both a short and a long interval cost; the minimum is flat. Pure functions, and the values that they need.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dtckpt.errors import ConfigError

HOST_MTBF_S = 6335 * 3600.0
"""Seconds between failures of one host: 16 384 GPUs in 2048 hosts had one every 3.09 h (The Llama 3 Herd of Models)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoInterval:
    """Saves as often as `optimal_interval` says, from measured costs and failures.

    Args:
        mtbf_s: Mean seconds between failures of the whole job. Default: estimated from the failures of the earlier runs
            that saved to the same root, and from the number of hosts.
        min_s: Shortest interval in seconds.
        max_s: Longest interval in seconds.
    """

    mtbf_s: float | None = None
    min_s: float = 0.0
    max_s: float = math.inf

    def __post_init__(self) -> None:
        if self.mtbf_s is not None and not 0 < self.mtbf_s < math.inf:
            raise ConfigError(f"mtbf_s must be a positive number of seconds; got {self.mtbf_s!r}")
        if not 0 <= self.min_s <= self.max_s:
            raise ConfigError(f"expected 0 <= min_s <= max_s; got {self.min_s!r} and {self.max_s!r}")


@dataclass(frozen=True, slots=True)
class Costs:
    """The cost of saves.

    Args:
        blocking_s: Seconds for which a save stops training.
        lag_s: Seconds from the begin of a save until its checkpoint is complete.
    """

    blocking_s: float
    lag_s: float


@dataclass(frozen=True, slots=True)
class PastRun:
    """One run that saved to a root.

    Args:
        uptime_s: Seconds from its first save to its last.
        has_failed: Whether it ended without closing its manager.
    """

    uptime_s: float
    has_failed: bool


def optimal_interval(blocking_s: float, mtbf_s: float, *, lag_s: float = 0.0) -> float:
    """Return the seconds between the begins of two saves that lose the least time.

    Daly's formula (J. T. Daly, A higher order estimate of the optimum checkpoint interval for restart dumps, 2006)
    follows the exact optimum for failures at random times. The result is at least ``lag_s``, as one save at a time is
    in flight.

    Args:
        blocking_s: Seconds for which a save stops training.
        mtbf_s: Mean seconds between failures.
        lag_s: Seconds from the begin of a save until its checkpoint is complete.

    Raises:
        ConfigError: A number is negative, or ``mtbf_s`` is not positive.

    >>> round(optimal_interval(0.5, 3.09 * 3600))
    105
    """
    if not (blocking_s >= 0 and lag_s >= 0 and mtbf_s > 0):
        raise ConfigError(f"expected costs of 0 s or more and a positive mtbf_s; got {blocking_s}, {lag_s}, {mtbf_s}")
    if blocking_s >= 2 * mtbf_s:
        return max(mtbf_s, lag_s)
    share = blocking_s / (2 * mtbf_s)
    interval = math.sqrt(2 * blocking_s * mtbf_s) * (1 + math.sqrt(share) / 3 + share / 9) - blocking_s
    return max(interval, lag_s)


def lost_share(interval_s: float, blocking_s: float, mtbf_s: float, *, lag_s: float = 0.0) -> float:
    """Return the part of the time that is lost with an interval between saves, as the module's formula has it.

    Args:
        interval_s: Seconds between the begins of two saves; positive.
        blocking_s: As for `optimal_interval`, as are the others.
        mtbf_s: Mean seconds between failures.
        lag_s: Seconds until a save is complete.
    """
    return blocking_s / interval_s + (interval_s / 2 + lag_s) / mtbf_s


def estimate_mtbf(past: Sequence[PastRun], uptime_s: float, num_hosts: int) -> float:
    """Return the mean seconds between failures, from the runs before and from the general failure rate of hosts.

    The general rate counts as one failure that was seen, so that a young job is neither sure of itself nor in a panic:

        (M0 + seconds of all runs) / (1 + failures),   M0 = HOST_MTBF_S / hosts

    Args:
        past: The earlier runs.
        uptime_s: Seconds that this run has lasted.
        num_hosts: Number of hosts of the job.
    """
    seconds = HOST_MTBF_S / num_hosts + uptime_s + sum(run.uptime_s for run in past)
    return seconds / (1 + sum(run.has_failed for run in past))
