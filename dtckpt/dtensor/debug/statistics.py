"""Statistics of operators (how often each ran by each route) and of the cache of redistribution plans."""

from __future__ import annotations

from dataclasses import dataclass

from dtckpt.dtensor.operators import dispatch
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


ROUTES = ("rule", "decomposition", "replication")


def operator_statistics() -> dict[str, dict[str, int]]:
    """Return how often each operator ran by each route in this process, since `clear_operator_statistics`.

    Route ``rule``: each device worked on its component. Route ``decomposition``: other operators did the work, and they
    count, too. Route ``replication``: each device worked on the whole tensors; ``dtckpt.dtensor.operators`` logs this
    once per operator.
    """
    statistics: dict[str, dict[str, int]] = {}
    for (func, route), number in sorted(dispatch.counts().items(), key=lambda item: str(item[0][0])):
        statistics.setdefault(str(func), dict.fromkeys(ROUTES, 0))[route] += number
    return statistics


def clear_operator_statistics() -> None:
    """Forget how often operators ran."""
    dispatch.clear_counts()
