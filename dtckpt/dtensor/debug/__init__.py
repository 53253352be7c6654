"""Debugging tools: count communication, explain redistributions, inspect caches, draw shardings."""

from dtckpt.dtensor.debug.comm_mode import CommDebugMode
from dtckpt.dtensor.debug.explain import Explanation, Step, Traffic, explain
from dtckpt.dtensor.debug.statistics import (
    PlanCacheInfo,
    clear_operator_statistics,
    clear_plan_cache,
    operator_statistics,
    plan_cache_info,
)
from dtckpt.dtensor.debug.visualize import sharding_grid, sharding_html, sharding_svg, visualize_sharding

__all__ = [
    "CommDebugMode",
    "Explanation",
    "PlanCacheInfo",
    "Step",
    "Traffic",
    "clear_operator_statistics",
    "clear_plan_cache",
    "explain",
    "operator_statistics",
    "plan_cache_info",
    "sharding_grid",
    "sharding_html",
    "sharding_svg",
    "visualize_sharding",
]
