"""`Bar`: a progress bar of bytes on standard error."""

from __future__ import annotations

from types import TracebackType
from typing import Self, TextIO

from dtckpt.errors import printable


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


def is_watched(*streams: TextIO | None) -> bool:
    """Whether all of the streams are terminals, where somebody may read."""
    return all(stream is not None and stream.isatty() for stream in streams)
