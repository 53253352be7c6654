"""Check types of facts in JSON that may be damaged or forged; each function returns its type or raises ValueError.

Without a check, a wrong type causes an error far from the file, or none. Python accepts a text as a sequence and
``true`` as 1, and JSON has ``NaN`` and numbers of any length.
"""

from __future__ import annotations

import json
import math
from typing import Any

MAX_NUMBER = 1 << 63
"""Whole numbers of a file are below this."""
MAX_SHOWN = 80
"""Characters of a wrong value that an error shows."""


def parse_object(data: bytes) -> dict[str, Any]:
    """Return the fields of a file."""
    try:
        return fields(json.loads(data))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def fields(value: Any) -> dict[str, Any]:
    """Return an object's fields."""
    if not isinstance(value, dict):
        raise _wrong(value, "an object")
    return value


def items(value: Any) -> list[Any]:
    """Return the items of an array."""
    if not isinstance(value, list):
        raise _wrong(value, "an array")
    return value


def text(value: Any) -> str:
    """Return a text."""
    if not isinstance(value, str):
        raise _wrong(value, "a text")
    return value


def truth(value: Any) -> bool:
    """Return a truth value."""
    if not isinstance(value, bool):
        raise _wrong(value, "true or false")
    return value


def whole(value: Any, below: int = MAX_NUMBER) -> int:
    """Return a whole number from 0 on."""
    if type(value) is not int or not 0 <= value < below:
        raise _wrong(value, f"a whole number from 0 on, below {below}")
    return value


def number(value: Any) -> float:
    """Return a number, which may be infinite or none (NaN)."""
    if type(value) not in (int, float):
        raise _wrong(value, "a number")
    try:
        return float(value)
    except OverflowError:
        raise ValueError("a number is too large") from None


def amount(value: Any) -> float:
    """Return a finite number from 0 on."""
    found = number(value)
    if not 0 <= found < math.inf:
        raise _wrong(value, "a finite number from 0 on")
    return found


def _wrong(value: Any, expected: str) -> ValueError:
    return ValueError(f"got {str(value)[:MAX_SHOWN]!r}, expected {expected}")
