"""All clients of one job, in processes of their own, which do what comes through a pipe."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

from . import forkserver

ANSWER_WITHIN_S = 60.0


def attempt(work: Callable[[], Any]) -> tuple[Any, str, tuple[int, ...], float]:
    """Return how work went: its result or its error's class, the error's text and clients, and when that was."""
    try:
        return work(), "", (), time.monotonic()
    except Exception as error:
        return type(error).__name__, str(error), getattr(error, "clients", ()), time.monotonic()


class Crew:
    """Processes with a pipe to each. `time.monotonic` is one clock for all processes of a machine.

    Args:
        work: Run by each process with its arguments and its end of the pipe; says "ready" first.
        arguments: Those of each client.
    """

    def __init__(self, work: Callable[..., None], arguments: Sequence[tuple[Any, ...]]) -> None:
        self._processes, self._pipes = [], []
        for own in arguments:
            ours, theirs = forkserver.Pipe()
            process = forkserver.start(work, *own, theirs)
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
        for client in range(len(arguments)):
            assert self.answer(client) == "ready"

    def send(self, client: int, message: Any) -> None:
        self._pipes[client].send(message)

    def has_answered(self, client: int) -> bool:
        return self._pipes[client].poll()

    def answer(self, client: int) -> Any:
        assert self._pipes[client].poll(ANSWER_WITHIN_S), f"client {client} hangs"
        return self._pipes[client].recv()

    def signal(self, client: int, number: int) -> None:
        os.kill(self._processes[client].pid, number)

    def join(self, client: int) -> None:
        self._processes[client].join(10)

    def end(self) -> None:
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            process.kill()
            process.join(10)
            process.close()
            pipe.close()


def serve(pipe: Connection, handle: Callable[[Any], Any]) -> None:
    """Answer what comes through the pipe, until it is None."""
    pipe.send("ready")
    while (message := pipe.recv()) is not None:
        pipe.send(attempt(lambda message=message: handle(message)))
