"""Calls by all clients of a job at the same time, each in a thread; and what tests of a coordination compare.

A test of the rules needs no client processes: several coordinations live in its process, and each has a thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from dtckpt.coordination.api import BEGIN, Coordination, Operation, Position, Verdict

TIMEOUT_S = 20.0
"""Timeout of barriers that are expected to end earlier."""
HEARTBEAT_S = 1.0
AT_ONCE_S = 5.0
"""Far less than `TIMEOUT_S`, and more than heartbeats take to tell on a busy machine."""
TASK = r"client {0} \(.+/{0}\)"
FIRST, SECOND = Position("step 1", is_certain=True), Position("step 2", is_certain=True)
"""Positions of clients that must count as late only for their own rounds, however slow the machine is."""


@dataclass
class Result:
    """How one client's call ended."""

    value: Any = None
    error: BaseException | None = None
    seconds: float = 0.0


class Running:
    """One call per client, each in a thread."""

    def __init__(self, clients: Iterable[Coordination], call: Callable[[Coordination], Any]) -> None:
        self._results: dict[int, Result] = {}
        self._threads = [threading.Thread(target=self._run, args=(client, call), daemon=True) for client in clients]
        for thread in self._threads:
            thread.start()

    def _run(self, client: Coordination, call: Callable[[Coordination], Any]) -> None:
        start, result = time.monotonic(), Result()
        try:
            result.value = call(client)
        except BaseException as error:
            result.error = error
        result.seconds = time.monotonic() - start
        self._results[client.member.client] = result

    def results(self, within_s: float = 2 * TIMEOUT_S) -> dict[int, Result]:
        deadline = time.monotonic() + within_s
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0.0))
        assert len(self._results) == len(self._threads), "a call hangs"
        return dict(sorted(self._results.items()))


def leave_all(clients: Iterable[Coordination]) -> None:
    """Leave together, because the client that hosts a store waits for the others to leave."""
    together(clients, lambda client: client.leave())


def together(clients: Iterable[Coordination], call: Callable[[Coordination], Any]) -> dict[int, Result]:
    return Running(clients, call).results()


def at(name: str, **options: Any) -> Callable[[Coordination], Verdict]:
    options = {"timeout_s": TIMEOUT_S, **options}
    return lambda client: client.barrier(name, **options)


def begin(clients: Iterable[Coordination], name: str = "save/begin", **options: Any) -> dict[int, Operation]:
    """Begin an operation; return it as each client knows it."""
    results = together(clients, at(name, operation=BEGIN, **options))
    assert not any(result.error for result in results.values()), results
    return {client: result.value.operation for client, result in results.items()}


def inside(operations: Mapping[int, Operation], name: str, **options: Any) -> Callable[[Coordination], Verdict]:
    """Return a call to a later round of an operation."""
    return lambda client: at(name, operation=operations[client.member.client], **options)(client)


def wait_until(condition: Callable[[], object], within_s: float = 10.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "the condition never came true"
        time.sleep(0.01)


def same_error(results: dict[int, Result], cls: type[BaseException], match: str) -> BaseException:
    """Assert that all clients raised the same class and text; return one of the errors."""
    for result in results.values():
        assert result.error is not None, results
    seen = {(type(result.error), str(result.error)) for result in results.values()}
    assert len(seen) == 1, seen
    with pytest.raises(cls, match=match):
        raise results[min(results)].error
    return results[min(results)].error
