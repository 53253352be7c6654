"""Progress of bytes on standard error: a `Bar` on a terminal, `ProgressLines` in a pipe or a log."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Self, TextIO

from dtckpt.errors import format_nbytes, printable

FIRST_LINE_S = 1.0
"""Seconds to the first line of progress, at least; shorter work prints none."""
LINE_S = 10.0
"""Seconds between two further lines, at least."""


def open_progress(title: str, nbytes: int) -> AbstractContextManager[Bar | ProgressLines]:
    """Return a context manager whose value has ``advance``: a bar on a terminal, else lines."""
    return Bar(title, nbytes) if is_watched(sys.stdout, sys.stderr) else nullcontext(ProgressLines(title, nbytes))


class Bar:
    """A bar with the name of the tensor at work, bytes, speed and time left; it disappears when the context ends.

    Args:
        title: The text that is shown before the first tensor's name.
        nbytes: Bytes in all.
    """

    def __init__(self, title: str, nbytes: int) -> None:
        self._title = title
        self._nbytes = nbytes

    def __enter__(self) -> Self:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        # A tensor's name may look like rich's markup.
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
        )
        self._progress = Progress(*columns, console=Console(stderr=True), transient=True)
        self._task = self._progress.add_task(self._title, total=self._nbytes)
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def advance(self, name: str, nbytes: int) -> None:
        """Advance the bar by ``nbytes``; show the name from now on, if it is not empty."""
        title = printable(name)[-40:] if name else None
        self._progress.update(self._task, description=title, advance=nbytes)


class ProgressLines:
    """Lines with bytes, speed and time left, the first after `FIRST_LINE_S` seconds, then one every `LINE_S` seconds.

    Args:
        title: The name of the work, such as ``comparing``.
        nbytes: Bytes in all.
        clock: Returns the time, in seconds.
        write: Writes a line; default: to standard error.
    """

    def __init__(
        self,
        title: str,
        nbytes: int,
        clock: Callable[[], float] = time.monotonic,
        write: Callable[[str], object] = lambda line: sys.stderr.write(f"{line}\n"),
    ) -> None:
        self._title = title
        self._nbytes = nbytes
        self._clock = clock
        self._write = write
        self._done = 0
        self._start = clock()
        self._next = self._start + FIRST_LINE_S

    def advance(self, name: str, nbytes: int) -> None:  # noqa: ARG002  (a line has no room for names)
        """Count ``nbytes``, and write a line if it is time to."""
        self._done += nbytes
        now = self._clock()
        if now < self._next:
            return
        self._next = now + LINE_S
        rate = self._done / (now - self._start)
        left = f", {max(0, self._nbytes - self._done) / rate:.0f} s left" if rate else ""
        done = f"{format_nbytes(self._done)} of {format_nbytes(self._nbytes)}"
        self._write(f"dtckpt: {self._title}: {done}, {format_nbytes(rate)}/s{left}")


def is_watched(*streams: TextIO | None) -> bool:
    """Whether all of the streams are terminals, where a user may read."""
    return all(stream is not None and stream.isatty() for stream in streams)
