"""The identity of one life of one task, as the rules of the coordinator and of feeds know it. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Identity:
    """One life of one task."""

    job: str
    task: int
    incarnation: int
