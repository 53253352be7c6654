"""How a command reads live versions: as the only client of a job that exists only while the command runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from dtckpt.cli.options import LIVE

HEARTBEAT_TIMEOUT_S = 5.0
"""Half of the time for which a command looks for the coordinator; then the coordinator says its own."""


@contextmanager
def job_of_command(arguments: Sequence[str]) -> Iterator[None]:
    """Join the coordinator, if an argument names a live version, and leave it after the command."""
    if not any(argument.startswith(LIVE) for argument in arguments):
        yield
        return
    from dtckpt.checkpoint.live.feed_client import end_feed_client
    from dtckpt.coordination.connect import as_job_of_command

    with as_job_of_command(HEARTBEAT_TIMEOUT_S) as coordination:
        try:
            yield
        finally:
            end_feed_client(coordination)
