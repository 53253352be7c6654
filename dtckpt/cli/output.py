"""Printing for the commands: lines, tables, JSON events, safe for any terminal; long text in a pager, as git does."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

import click

from dtckpt.checkpoint import progress_bar
from dtckpt.cli.options import QUIET
from dtckpt.errors import printable

if TYPE_CHECKING:
    from dtckpt.checkpoint.converting.report import SourceAccount
    from dtckpt.format.plain_values import Node
    from dtckpt.layout.layout import Layout

import shutil
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import IO, cast

from dtckpt.checkpoint.progress_bar import is_watched

MAX_VALUE_CHARS = 80
MAX_COLUMN_WIDTH = 256


def write_line(text: str) -> None:
    """Print one line on standard output. Ends the process quietly if the reader of a pipe has gone."""
    try:
        click.echo(text)
    except OSError as error:
        # At exit the interpreter flushes standard output once more. It would complain, and change the exit code.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            raise SystemExit(128 + signal.SIGPIPE) from None
        raise


def is_quiet() -> bool:
    """Whether the command that runs was given ``--quiet``."""
    context = click.get_current_context(silent=True)
    return context is not None and bool(context.meta.get(QUIET))


def write_summary(text: str) -> None:
    """Print the closing line of a command, unless ``--quiet`` is given."""
    if not is_quiet():
        write_line(text)


class ProgressDisplay(Protocol):
    """Progress of some work."""

    def advance(self, name: str, nbytes: int) -> None:
        """Note that bytes of a tensor are done."""
        ...


class _Silence:
    """ProgressDisplay that shows nothing."""

    def advance(self, name: str, nbytes: int) -> None:
        pass


def open_progress(title: str, nbytes: int) -> AbstractContextManager[ProgressDisplay]:
    """Return `progress_bar.open_progress`, or silent progress with ``--quiet``."""
    return nullcontext(_Silence()) if is_quiet() else progress_bar.open_progress(title, nbytes)


def write_event(event: str, **facts: Any) -> None:
    """Print one JSON object on a separate line."""
    write_line(json.dumps({"event": event, **facts}, allow_nan=False))


def format_count(count: int, noun: str) -> str:
    """Return a number with its noun: ``1 tensor``, ``2 tensors``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def format_age(seconds: float) -> str:
    """Return a time span in its largest units: ``12 s``, ``5 min``, ``3.2 h``, ``4.0 d``."""
    for unit, size, digits in (("d", 86400, 1), ("h", 3600, 1), ("min", 60, 0)):
        if seconds >= size:
            return f"{seconds / size:.{digits}f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def finite_json(number: float) -> float | dict[str, str]:
    """Return a number for JSON, which lacks some; those are nodes, as in ``dtckpt inspect``."""
    return number if math.isfinite(number) else {"float": str(number)}


@lru_cache(maxsize=1 << 12)
def format_shape(shape: tuple[int, ...]) -> str:
    """Return a shape as ``512x64``, or ``scalar``."""
    return "x".join(map(str, shape)) or "scalar"


def format_layout(layout: Layout | None) -> str:
    """Return a layout's specs as ``--layout`` takes them; ``none`` without a layout, ``scalar`` without dims."""
    if layout is None:
        return "none"
    from dtckpt.layout.text_format import spec_to_text  # here, because ``--help`` does without NumPy and protobuf

    return ",".join(map(spec_to_text, layout.sharding_specs)) or "scalar"


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
    """Return the lines of a table whose columns are as wide as their widest cell, but for lines with longer ones."""
    safe = [[printable(cell) for cell in row] for row in (header, *rows)]
    # Bounded: else one long name in a file makes every line as long.
    widths = [min(MAX_COLUMN_WIDTH, max(map(len, column))) for column in zip(*safe, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in safe]


def write_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table; see `table_lines`."""
    for line in table_lines(header, rows):
        write_line(line)


def write_left(account: SourceAccount) -> None:
    """Print a line for each file and note that is left, and for each key that the caller did not leave out himself."""
    from dtckpt.checkpoint.converting.report import NOT_SELECTED  # here for the same reason

    for name in account.left_files:
        write_line(printable(f"left behind: {name}: dtckpt does not read it"))
    for path, reason in account.left_keys.items():
        if reason != NOT_SELECTED:
            write_line(printable(f"left behind: {path}: {reason}"))
    if unselected := sum(reason == NOT_SELECTED for reason in account.left_keys.values()):
        write_line(f"left behind: {format_count(unselected, 'key')} that --select does not match")


def account_facts(account: SourceAccount) -> dict[str, Any]:
    """Return the facts as an event has them."""
    return {
        "files_taken": account.files,
        "files_left": account.left_files,
        "keys_taken": len(account.keys),
        "keys_renamed": account.renamed,
        "keys_left": account.left_keys,
    }


LESS = "FRX"
"""Options of less, unless the user sets ``LESS``: end at once if all fits on the screen, and leave the text there."""


def page(lines: Iterable[str], *, is_wanted: bool = True) -> None:
    """Print lines: through the pager if output goes to a terminal, a pager exists and ``is_wanted`` is true."""
    command = pager_command(os.environ) if is_wanted and is_watched(sys.stdin, sys.stdout) else None
    if command is None:
        for line in lines:
            write_line(line)
        return
    import subprocess  # here, because ``--help`` does without it

    environment = {"LESS": LESS, **os.environ}
    with (
        suppress(BrokenPipeError),  # the user has seen enough
        # Through a shell, for which the user wrote the variable.
        subprocess.Popen(  # noqa: S602
            command,
            shell=True,
            stdin=subprocess.PIPE,
            env=environment,
            text=True,
            errors="backslashreplace",
        ) as pager,
        _no_interrupts(),
    ):
        stdin = cast("IO[str]", pager.stdin)
        for line in lines:
            stdin.write(f"{line}\n")
        stdin.close()
        pager.wait()


def pager_command(environ: Mapping[str, str]) -> str | None:
    """Return the command of the pager: ``PAGER``, or else less, if there is one; None for no pager."""
    command = environ.get("PAGER")
    if command is None:
        return "less" if shutil.which("less") else None
    return None if command.strip() in ("", "cat") else command


@contextmanager
def _no_interrupts() -> Iterator[None]:
    """Leave Ctrl-C to the pager, which takes it for the end of a search."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
