"""Suggest names that a user may have meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

MAX_COMPARED = 20_000
"""Names that are compared letter by letter, which takes some 50 us for each."""
MAX_SUGGESTED = 3


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return a question for a message, such as ``; did you mean 'model/w'?``; empty if no name is close."""
    known = list(names)
    plain = name.replace(".", "/").strip("/")
    # The same name with other separators, then a longer name with this end, then similar spelling.
    close = [each for each in known if each.replace(".", "/") == plain]
    close = close or [each for each in known if each.replace(".", "/").endswith(f"/{plain}")]
    close = close or difflib.get_close_matches(name, known[:MAX_COMPARED], MAX_SUGGESTED)
    close = close or close_prefixes(plain, known)
    return f"; did you mean {' or '.join(map(repr, close[:MAX_SUGGESTED]))}?" if close else ""


def close_prefixes(name: str, names: Iterable[str]) -> list[str]:
    """Return prefixes of names that begin as a name does, up to its first key that no name has there."""
    split = [each.split("/") for each in names]
    path = name.split("/")
    for depth, key in enumerate(path):
        keys = dict.fromkeys(each[depth] for each in split if len(each) > depth)
        if key not in keys:
            close = difflib.get_close_matches(key, list(keys)[:MAX_COMPARED], MAX_SUGGESTED)
            return ["/".join((*path[:depth], each)) for each in close]
        split = [each for each in split if len(each) > depth and each[depth] == key]
    return []
