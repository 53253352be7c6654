"""What the commands print: lines of text or JSON, safe for any terminal."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

import click

from dtckpt.text import printable


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


def format_count(count: int, noun: str) -> str:
    """Return ``1 tensor``, ``2 tensors``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def format_shape(shape: Sequence[int]) -> str:
    """Return ``512x64``."""
    return "x".join(map(str, shape)) or "scalar"


def table_lines(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows in columns, as wide as their widest cell."""
    safe = [[printable(cell) for cell in row] for row in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*safe, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in safe]


def write_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print `table_lines`."""
    for line in table_lines(header, rows):
        write_line(line)
