"""Names of tensors for people: groups of names that differ in numbers only, and trees with sizes; pure.

``layers.{0..31}.norm`` stands for 32 names; a shell expands the braces to the same names.

The label of a subtree ends with the separator of its names, so the labels along a path make up a name::

    model/             30  1.2 GiB
      embed             1  0.2 GiB  32000x4096  bfloat16
      layers.{0..28}.  29  1.0 GiB  ...
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from dtckpt.errors import format_nbytes
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


_SEPARATOR = re.compile(r"(?<=[/.])(?![^{]*\})")
"""Behind a ``/`` or ``.`` that is not between braces."""
_INDENT = "  "


@dataclass(frozen=True, slots=True)
class TreeLeaf:
    """A leaf of the tree.

    Args:
        name: Its name.
        count: How many tensors it stands for.
        nbytes: Their bytes.
        cells: Further cells of its row.
    """

    name: str
    count: int
    nbytes: int
    cells: tuple[str, ...]


@dataclass(slots=True)
class _Subtree:
    below: dict[str, _Subtree] = field(default_factory=dict)
    leaves: list[TreeLeaf] = field(default_factory=list)
    count: int = 0
    nbytes: int = 0


def tree_rows(leaves: Iterable[TreeLeaf], *, by_size: bool) -> list[tuple[str, ...]]:
    """Return a row for each subtree and leaf: indented label, number of tensors, size, further cells of a leaf.

    Args:
        leaves: The leaves.
        by_size: Whether larger subtrees come first; else they are in natural order.
    """
    root = _Subtree()
    for leaf in leaves:
        *folders, last = _SEPARATOR.split(leaf.name)
        at = root
        for folder in (*folders, last):
            at.count, at.nbytes = at.count + leaf.count, at.nbytes + leaf.nbytes
            at = at.below.setdefault(folder, _Subtree())
        at.count, at.nbytes = at.count + leaf.count, at.nbytes + leaf.nbytes
        at.leaves.append(leaf)

    def order(item: tuple[str, _Subtree]) -> tuple[object, ...]:
        return (-item[1].nbytes if by_size else 0, natural_key(item[0]))

    return list(_rows(root, 0, order))


def _rows(
    tree: _Subtree, depth: int, order: Callable[[tuple[str, _Subtree]], tuple[object, ...]]
) -> Iterator[tuple[str, ...]]:
    for label, below in (_joined(*item) for item in sorted(tree.below.items(), key=order)):
        first, *others = below.leaves or [TreeLeaf("", 0, 0, ("", ""))]
        yield (_INDENT * depth + label, str(below.count), format_nbytes(below.nbytes), *first.cells)
        for leaf in others:
            yield (_INDENT * depth + label, str(leaf.count), format_nbytes(leaf.nbytes), *leaf.cells)
        yield from _rows(below, depth + 1, order)


def _joined(label: str, tree: _Subtree) -> tuple[str, _Subtree]:
    """Return a subtree with its label; one with nothing but one other in it shares a line with that one."""
    while len(tree.below) == 1 and not tree.leaves:
        ((more, tree),) = tree.below.items()
        label += more
    return label, tree
