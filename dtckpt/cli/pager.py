"""Show text that may be longer than the terminal in a pager, as git does."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import IO, cast

from dtckpt.checkpoint.progress_bar import is_watched
from dtckpt.cli.output import write_line

LESS = "FRX"
"""Options of less, unless the user sets ``LESS``: end at once if all fits on the screen, and leave the text there."""


def page(lines: Iterable[str], *, is_wanted: bool = True) -> None:
    """Print lines: on a terminal through the pager, unless there is none or ``is_wanted`` is false."""
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
