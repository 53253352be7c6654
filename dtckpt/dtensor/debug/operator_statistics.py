"""Statistics of operators on DTensors: how often each ran by which route."""

from __future__ import annotations

from dtckpt.dtensor.operators import dispatch

ROUTES = ("rule", "decomposition", "replication")


def operator_statistics() -> dict[str, dict[str, int]]:
    """Return how often each operator ran by each route in this process, since `clear_operator_statistics`.

    Routes are ``rule`` (each device worked on its component), ``decomposition`` (other operators did it, which count
    too) and ``replication`` (each device worked on the whole tensors; ``dtckpt.dtensor.operators`` logs this once per
    operator).
    """
    statistics: dict[str, dict[str, int]] = {}
    for (func, route), number in sorted(dispatch.counts().items(), key=lambda item: str(item[0][0])):
        statistics.setdefault(str(func), dict.fromkeys(ROUTES, 0))[route] += number
    return statistics


def clear_operator_statistics() -> None:
    """Forget how often operators ran."""
    dispatch.clear_counts()
