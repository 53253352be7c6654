"""A tree of names, with the sizes of its subtrees; pure.

The label of a subtree ends with the separator of its names, so the labels along a path make up a name::

    model/             30  1.2 GiB
      embed             1  0.2 GiB  32000x4096  bfloat16
      layers.{0..28}.  29  1.0 GiB  ...
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from dtckpt.errors import format_nbytes
from dtckpt.format.names import natural_key

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
