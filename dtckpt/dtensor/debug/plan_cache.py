"""Statistics of the cache of redistribution plans, and a way to clear it."""

from __future__ import annotations

from dataclasses import dataclass

from dtckpt.redistribution import execute
from dtckpt.redistribution.exchange_plan import plan_exchange


@dataclass(frozen=True, slots=True)
class PlanCacheInfo:
    """Statistics of the plan cache since it was cleared.

    Args:
        hits: Plans that were in the cache.
        misses: Plans that had to be made.
        size: Plans in the cache.
        max_size: Most plans in the cache; beyond that, the least recently used one is evicted.
    """

    hits: int
    misses: int
    size: int
    max_size: int


def plan_cache_info() -> PlanCacheInfo:
    """Return the statistics of this process's plan cache."""
    return PlanCacheInfo(*execute.cache_info())


def clear_plan_cache() -> None:
    """Forget all plans of this process, and their statistics."""
    execute.clear_cache()
    plan_exchange.cache_clear()
