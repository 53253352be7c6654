"""How operators on DTensors ran, seen from outside."""

from __future__ import annotations

from dtckpt.dtensor.operators import dispatch

ROUTES = ("rule", "decomposition", "replication")


def operator_statistics() -> dict[str, dict[str, int]]:
    """Return how often each operator ran by each route in this process, since `clear_operator_statistics`.

    Routes are ``rule`` (each device worked on its pieces), ``decomposition`` (by other operators, which count too) and
    ``replication`` (each device worked on the whole; logged once per operator by ``dtckpt.dtensor.operators``).
    """
    found: dict[str, dict[str, int]] = {}
    for (func, route), number in sorted(dispatch.counts().items(), key=lambda item: str(item[0][0])):
        found.setdefault(str(func), dict.fromkeys(ROUTES, 0))[route] += number
    return found


def clear_operator_statistics() -> None:
    """Forget how often operators ran."""
    dispatch.clear_counts()
