"""What the commands print: lines of text or JSON, safe for any terminal."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

import click

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def write_line(text: str) -> None:
    """Print one line on standard output; ends the process quietly when nobody reads on."""
    try:
        click.echo(text)
    except BrokenPipeError:
        # Otherwise the interpreter would flush into the closed pipe once more at exit, and complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(128 + signal.SIGPIPE) from None


def write_event(event: str, **facts: Any) -> None:
    """Print one JSON object on a line of its own."""
    write_line(json.dumps({"event": event, **facts}, allow_nan=False))


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


def format_count(count: int, noun: str) -> str:
    """Return ``1 tensor``, ``2 tensors``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def format_shape(shape: Sequence[int]) -> str:
    """Return ``512x64``."""
    return "x".join(map(str, shape)) or "scalar"


def write_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows in columns, as wide as their widest cell."""
    safe = [[printable(cell) for cell in row] for row in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*safe, strict=True)]
    for row in safe:
        write_line("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
