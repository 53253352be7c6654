"""Look at a coordinator, once or until interrupted: options, and the loop of the commands that do."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, TypeVar

import click

from dtckpt.checkpoint.progress_bar import is_watched
from dtckpt.cli.output import write_event, write_line
from dtckpt.errors import ConfigError, CoordinatorUnavailableError, printable

if TYPE_CHECKING:
    from dtckpt.coordination.grpc_status import StatusClient

T = TypeVar("T")
_Command = TypeVar("_Command", bound=Callable[..., Any])

VARIABLES = """\
Variables:
  DTCKPT_COORDINATOR, or another variable that names the coordinator to clients.
  DTCKPT_COORDINATOR_CA, _CERT, _KEY, _SERVER_NAME for TLS.
"""


def look_options(command: _Command) -> _Command:
    """Add ``--coordinator``, ``--watch``, ``--interval`` and ``--timeout``."""
    coordinator = click.option(
        "--coordinator", metavar="HOST:PORT", help="Which coordinator [default: by the environment]."
    )
    watch = click.option("--watch", is_flag=True, help="Look again and again, until interrupted.")
    interval = click.option(
        "--interval",
        "interval_s",
        type=click.FloatRange(min=0.1, max=3600),
        default=2.0,
        show_default=True,
        metavar="SECONDS",
        help="Between two looks.",
    )
    timeout = click.option(
        "--timeout",
        "timeout_s",
        type=click.FloatRange(min=0.1, max=3600),
        default=10.0,
        show_default=True,
        metavar="SECONDS",
        help="How long to look for the coordinator.",
    )
    return coordinator(watch(interval(timeout(command))))


def look(
    coordinator: str | None,
    query: Callable[[StatusClient], T],
    facts: Callable[[T], dict[str, Any]],
    lines: Callable[[str, T], Iterable[str]],
    *,
    event: str,
    watch: bool,
    interval_s: float,
    as_json: bool,
) -> None:
    """Ask a coordinator, and print the answer, once or until interrupted.

    Args:
        coordinator: Its address; default: the address in the environment.
        query: Asks the coordinator.
        facts: Returns the answer's facts for JSON.
        lines: Returns the lines of text of an answer from an address.
        event: Name of the events.
        watch: Whether to ask again and again.
        interval_s: Seconds between two looks.
        as_json: Whether to print events.

    Raises:
        ConfigError: Nothing names a coordinator.
        CoordinatorUnavailableError: It does not answer, and ``watch`` is false.
    """
    from dtckpt._proto import COORDINATOR, require

    require(*COORDINATOR)
    from dtckpt.coordination.discovery import SOURCES, find_coordinator
    from dtckpt.coordination.grpc_credentials import Access
    from dtckpt.coordination.grpc_status import StatusClient

    found = find_coordinator(os.environ, coordinator)
    if found is None:
        raise ConfigError(f"there is no coordinator to ask; give --coordinator HOST:PORT, or set {SOURCES}")
    client = StatusClient(found.address, Access.from_environ(os.environ))
    with ExitStack() as stack:
        stack.callback(client.close)
        screen = _Screen() if watch and not as_json and is_watched(sys.stdout) else None
        if screen is not None:
            stack.enter_context(screen.live)
        while True:
            try:
                answer = query(client)
            except CoordinatorUnavailableError as error:
                if not watch:
                    raise
                if as_json:
                    write_event("unreachable", coordinator=found.address, message=error.message)
                shown = [printable(error.message)]
            else:
                if as_json:
                    write_event(event, coordinator=found.address, **facts(answer))
                shown = list(lines(found.address, answer))
            if screen is not None:
                screen.show(shown)
            elif not as_json:
                for line in shown:
                    write_line(line)
            if not watch:
                return
            time.sleep(interval_s)


class _Screen:
    """Shows lines on the whole terminal, and replaces them in place."""

    def __init__(self) -> None:
        from rich.live import Live  # here, because only ``--watch`` on a terminal needs it

        self.live = Live(screen=True, auto_refresh=False)

    def show(self, lines: Sequence[str]) -> None:
        from rich.text import Text  # here for the same reason

        text = Text("\n".join(lines), no_wrap=True, overflow="ellipsis")
        text.highlight_regex(r"\b(suspect|lost|fenced|failed|unknown|never registered)\b", "bold red")
        self.live.update(text, refresh=True)
