"""Facts as text for people: safe on any terminal and in any log."""

from __future__ import annotations

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def printable(text: str) -> str:
    """Escape what could break a line or steer a terminal: names and paths come from anywhere."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def format_nbytes(nbytes: float) -> str:
    """Return a size for people: ``1.5 GiB``."""
    for unit in _UNITS[:-1]:
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} {_UNITS[-1]}"
