"""Client processes of one job that a test drives step by step, by messages through a pipe to each."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from . import forkserver

ANSWER_WITHIN_S = 60.0


def run_and_describe(work: Callable[[], Any]) -> tuple[Any, str, tuple[int, ...], float]:
    """Return the result of ``work`` or its error's class, the error's text and clients, and the time of its end."""
    try:
        return work(), "", (), time.monotonic()
    except Exception as error:
        return type(error).__name__, str(error), getattr(error, "clients", ()), time.monotonic()


class Crew:
    """Processes with a pipe to each. `time.monotonic` is one clock for all processes of a machine.

    Args:
        work: Run by each process with its arguments and its end of the pipe; sends "ready" first.
        arguments: The arguments of each client.
    """

    def __init__(self, work: Callable[..., None], arguments: Sequence[tuple[Any, ...]]) -> None:
        self._processes, self._pipes = [], []
        for own in arguments:
            parent_end, child_end = forkserver.Pipe()
            process = forkserver.start(work, *own, child_end)
            child_end.close()
            self._processes.append(process)
            self._pipes.append(parent_end)
        for client in range(len(arguments)):
            assert self.answer(client) == "ready"

    def send(self, client: int, message: Any) -> None:
        self._pipes[client].send(message)

    def has_answered(self, client: int) -> bool:
        return self._pipes[client].poll()

    def wait_for_any(self, clients: Collection[int]) -> list[int]:
        """Wait until some of these clients have answered, and return them."""
        ready = wait([self._pipes[client] for client in clients], ANSWER_WITHIN_S)
        assert ready, f"clients {sorted(clients)} hang"
        return [client for client in clients if self._pipes[client] in ready]

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
    """Handle the messages that come through the pipe, and send each result back, until a message is None."""
    pipe.send("ready")
    while (message := pipe.recv()) is not None:
        pipe.send(run_and_describe(lambda message=message: handle(message)))
