"""Natural order: names sorted as people count, ``layers.2`` before ``layers.10``."""

from __future__ import annotations

import re

_DIGITS = re.compile(r"([0-9]+)")


def natural_key(name: str) -> tuple[tuple[object, ...], str]:
    """Return a sort key by which numbers in names count as numbers; different names have different keys."""
    parts: list[object] = list(_DIGITS.split(name))
    for position in range(1, len(parts), 2):
        digits = str(parts[position]).lstrip("0")
        # By length first: a name may have more digits than Python converts to an int.
        parts[position] = (len(digits), digits)
    # Names that differ in zeros in front of numbers have equal parts.
    return tuple(parts), name
