"""Facts of ``Optimizer.state_dict()``: its groups, and the keys of its parameters; pure, and without torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def own_names_of(groups: Any) -> list[str | None]:
    """Return the names that an optimizer got with its parameters, in its order; None where it got none."""
    return [name for group in groups for name in _own_names(group)]


def _own_names(group: Mapping[str, Any]) -> Iterator[str | None]:
    names = group.get("param_names")
    if isinstance(names, list | tuple) and len(names) == len(group["params"]):
        yield from (name if isinstance(name, str) else None for name in names)
    else:
        yield from (None for _ in group["params"])


def is_numbered(state: Any, count: int) -> bool:
    """Whether the state of an optimizer of so many parameters numbers them from 0 on."""
    if not isinstance(state, Mapping) or not {"state", "param_groups"} <= state.keys():
        return False
    groups = state["param_groups"]
    keys = [key for group in groups for key in group["params"]] if isinstance(groups, list | tuple) else None
    return isinstance(state["state"], Mapping) and keys == list(range(count))
