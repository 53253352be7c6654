"""Text for people: escape untrusted text for terminals and logs, and format sizes."""

from __future__ import annotations

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def printable(text: str) -> str:
    """Escape characters that could break a line or control a terminal; names and paths may hold any."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def format_nbytes(nbytes: float) -> str:
    """Return a size in bytes with a binary unit, such as ``1.5 GiB``."""
    for unit in _UNITS[:-1]:
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} {_UNITS[-1]}"
