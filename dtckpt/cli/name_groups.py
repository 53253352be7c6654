"""Group names that differ in numbers only: ``layers.{0..31}.norm`` stands for 32 names; pure.

A shell expands the braces to the same names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from dtckpt.format.names import natural_key

T = TypeVar("T")

_NUMBER = re.compile(r"(?<![0-9])(0|[1-9][0-9]{0,17})(?![0-9])")
"""A number without zeros in front: only such numbers give their names back."""

_Parts = tuple["str | tuple[int, ...]", ...]
"""A name in parts: texts, and between each two of them the numbers that stand there, ascending."""


@dataclass(frozen=True, slots=True)
class NameGroup(Generic[T]):
    """Things that are alike but for numbers in their names.

    Args:
        name: Their names, with braces for the numbers.
        items: The things, in natural order of their names.
    """

    name: str
    items: Sequence[T]


def group_names(
    items: Iterable[T], name_of: Callable[[T], str], facts_of: Callable[[T], Hashable]
) -> list[NameGroup[T]]:
    """Group things; a group stands for every combination of its numbers, and for nothing else.

    Args:
        items: The things.
        name_of: Returns the name of a thing; names differ among things of equal facts.
        facts_of: Returns the facts that must be equal in a group.

    Returns:
        The groups, in natural order of their first names.
    """
    ordered = sorted(items, key=lambda item: natural_key(name_of(item)))
    groups: dict[tuple[_Parts, Hashable], list[T]] = {}
    for item in ordered:
        groups.setdefault((_parts(name_of(item)), facts_of(item)), []).append(item)
    # The last numbers first: experts of a layer, then layers whose experts are alike.
    for place in range(max((len(parts) for parts, _ in groups), default=0) - 2, 0, -2):
        merged: dict[tuple[_Parts, Hashable], tuple[list[int], list[T]]] = {}
        for (parts, facts), members in groups.items():
            numbers = parts[place] if place < len(parts) else ()
            rest = (*parts[:place], (), *parts[place + 1 :]) if place < len(parts) else parts
            all_numbers, all_members = merged.setdefault((rest, facts), ([], []))
            all_numbers += (number for number in numbers if isinstance(number, int))
            all_members += members
        groups = {
            ((*rest[:place], tuple(sorted(numbers)), *rest[place + 1 :]) if numbers else rest, facts): members
            for (rest, facts), (numbers, members) in merged.items()
        }
    named = [NameGroup("".join(map(_text, parts)), members) for (parts, _), members in groups.items()]
    return sorted(named, key=lambda group: natural_key(name_of(group.items[0])))


def _parts(name: str) -> _Parts:
    return tuple((int(part),) if place % 2 else part for place, part in enumerate(_NUMBER.split(name)))


def _text(part: str | tuple[int, ...]) -> str:
    """Return a text, a number, or numbers in braces, runs of them as ``first..last``."""
    if isinstance(part, str):
        return part
    if len(part) == 1:
        return str(part[0])
    runs: list[list[int]] = []
    for number in part:
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return f"{{{','.join('..'.join(map(str, run)) for run in runs)}}}"
