"""The cache of exchange plans, seen from outside."""

from __future__ import annotations

from dataclasses import dataclass

from dtckpt.planning.exchange import plan_exchange


@dataclass(frozen=True, slots=True)
class PlanCacheInfo:
    """Statistics of the plan cache since it was cleared.

    Args:
        hits: Plans that were found.
        misses: Plans that were made.
        size: Plans that are kept.
        max_size: The most that are kept; beyond it, the one that was not used for longest goes.
    """

    hits: int
    misses: int
    size: int
    max_size: int


def plan_cache_info() -> PlanCacheInfo:
    """Return the statistics of this process's plan cache."""
    info = plan_exchange.cache_info()
    return PlanCacheInfo(info.hits, info.misses, info.currsize, info.maxsize or 0)


def clear_plan_cache() -> None:
    """Forget all plans of this process, and their statistics."""
    plan_exchange.cache_clear()
