"""Printing for the commands: lines, tables and JSON events, safe for any terminal."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from dtckpt.errors import printable

if TYPE_CHECKING:
    from dtckpt.format.plain_values import Node
    from dtckpt.layout.layout import Layout

MAX_VALUE_CHARS = 80


def write_line(text: str) -> None:
    """Print one line on standard output. Ends the process quietly if the reader of a pipe has gone."""
    try:
        click.echo(text)
    except BrokenPipeError:
        # At exit the interpreter flushes standard output once more, and would complain about the closed pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(128 + signal.SIGPIPE) from None


def write_event(event: str, **facts: Any) -> None:
    """Print one JSON object on a line of its own."""
    write_line(json.dumps({"event": event, **facts}, allow_nan=False))


def format_count(count: int, noun: str) -> str:
    """Return a number with its noun: ``1 tensor``, ``2 tensors``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def format_shape(shape: Sequence[int]) -> str:
    """Return a shape as ``512x64``, or ``scalar``."""
    return "x".join(map(str, shape)) or "scalar"


def format_layout(layout: Layout | None) -> str:
    """Return a layout's specs as ``--layout`` takes them; ``none`` without a layout, ``scalar`` without dims."""
    from dtckpt.layout.text_format import spec_to_text  # here, because ``--help`` does without NumPy and protobuf

    return "none" if layout is None else ",".join(map(spec_to_text, layout.sharding_specs)) or "scalar"


def value_text(node: Node) -> str:
    """Return the plain value of a node as Python writes it."""
    from dtckpt.format.plain_values import peek_value  # here, because ``--help`` does without NumPy

    ((kind, content),) = node.items()
    return repr(peek_value(kind, content))


def format_value(node: Node) -> str:
    """Return the plain value of a node as `value_text`, cut short if it is long."""
    text = value_text(node)
    return text if len(text) <= MAX_VALUE_CHARS else f"{text[: MAX_VALUE_CHARS - 3]}..."


def table_lines(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table whose columns are as wide as their widest cell."""
    safe = [[printable(cell) for cell in row] for row in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*safe, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in safe]


def write_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table; see `table_lines`."""
    for line in table_lines(header, rows):
        write_line(line)
