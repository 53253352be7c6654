"""Run the tests in several processes that are forked after the collection: ``pytest --workers=4``.

::

    pytest: imports and collects, once
      |-- fork --> worker 0: takes a batch of tests, sends their reports, takes the next batch
      |-- fork --> worker 1
      '-- hands out the batches; shows, counts and keeps the reports, as if it had run the tests

Workers with separate interpreters, as in xdist, would each import and collect the same: ten seconds of the processor.
This process must not have threads when it forks, and uses only modules that it has imported by then.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from types import SimpleNamespace
from typing import Any

import pytest

from . import forkserver
from .batches import Dealer, neighbours

_context = multiprocessing.get_context("fork")
HAS_CLIENTS = "processes"
"""Marker of tests that start client processes."""
TOGETHER = "together"
"""Marker of tests that one worker runs, as each worker would set up for them what takes long."""
STOP_S = 30.0
"""How long a worker may take to tear down the fixtures of the session."""


def num_workers(text: str, cores: int, *, without_clients: bool) -> int:
    """Return how many workers ``--workers=text`` asks for; 0 means that pytest runs the tests by itself.

    ``auto`` is three times as many as cores, as tests of client processes wait more than they work, and twelve at most;
    without those tests it is one more than cores.
    """
    if text != "auto":
        return int(text)
    cores = min(cores, 4)
    return cores + 1 if without_clients else 3 * cores


class ForkedWorkers:
    """The plugin of the process that collects.

    Args:
        count: Number of workers.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._workers: dict[Connection, _Worker] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """Run all tests; pytest's own loop is left what it does instead of running tests."""
        if session.config.option.collectonly or session.testsfailed:
            return None
        dealer = self._dealer(session.items)
        if any(HAS_CLIENTS in item.keywords for item in session.items):
            forkserver.start_server()
        gc.collect()
        gc.freeze()  # the workers' collectors pass over what is imported and collected, and copy none of its pages
        try:
            for number in range(min(self._count, len(session.items))):
                self._start(session, number)
            while self._workers:
                self._step(session, dealer)
        finally:
            for worker in self._workers.values():
                worker.process.kill()
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        return True

    def _dealer(self, items: list[pytest.Item]) -> Dealer:
        def group_of(index: int) -> object:
            marker = items[index].get_closest_marker(TOGETHER)
            return marker.args if marker else items[index].path

        with_clients = [index for index, item in enumerate(items) if HAS_CLIENTS in item.keywords]
        others = [index for index, item in enumerate(items) if HAS_CLIENTS not in item.keywords]
        # The other workers use the processor while clients wait.
        most_with_clients = max(3, 2 * self._count // 3)
        return Dealer(neighbours(with_clients, group_of), neighbours(others, group_of), most_with_clients)

    def _start(self, session: pytest.Session, number: int) -> None:
        ours, theirs = _context.Pipe()
        process = _context.Process(target=_work, args=(session, number, theirs), name=f"worker {number}")
        process.start()
        theirs.close()
        self._workers[ours] = _Worker(number, process)

    def _step(self, session: pytest.Session, dealer: Dealer) -> None:
        """Take the workers' messages, and give work to workers that wait for it."""
        for connection in wait(list(self._workers)):
            worker = self._workers[connection]
            try:
                kind, value = connection.recv()
            except (EOFError, ConnectionError):
                self._bury(session, dealer, connection)
                continue
            if kind == "starts":
                worker.running = value
            elif kind == "report":
                hook = session.config.hook
                self._show(session, worker, hook.pytest_report_from_serializable(config=session.config, data=value))
            elif kind == "wants":
                worker.is_waiting, worker.running = not worker.is_told, None
        if session.shouldfail or session.shouldstop:
            dealer.clear()
            for connection, worker in self._workers.items():
                worker.end(connection)
        for connection, worker in self._workers.items():
            if worker.is_waiting:
                worker.give(connection, dealer.take(worker.number), is_last=dealer.is_empty)

    def _show(self, session: pytest.Session, worker: _Worker, report: pytest.TestReport) -> None:
        # As reports of xdist have a node, pytest does not print the name of a file whenever another worker reports.
        report.node = worker.node  # type: ignore[attr-defined]
        session.config.hook.pytest_runtest_logreport(report=report)

    def _bury(self, session: pytest.Session, dealer: Dealer, connection: Connection) -> None:
        """Forget a worker that has ended; if it died, its test has failed, and another worker has the rest."""
        worker = self._workers.pop(connection)
        connection.close()
        worker.process.join(STOP_S)
        if worker.process.exitcode == 0:
            return
        if worker.running is not None:
            item = session.items[worker.running]
            text = f"{worker.process.name} died with exit code {worker.process.exitcode} while it ran this test"
            keywords = dict.fromkeys(item.keywords, 1)
            report = pytest.TestReport(item.nodeid, item.location, keywords, "failed", text, "call")
            self._show(session, worker, report)
        else:
            session.shouldfail = f"{worker.process.name} failed between tests; see its traceback"
        dealer.give_back(worker.number, worker.rest)
        if not dealer.is_empty:
            self._start(session, worker.number)


@dataclass(eq=False)
class _Node:
    """What pytest prints of a worker with a failure, and keeps for itself; ``--junitxml`` needs a hash of it."""

    gateway: SimpleNamespace
    workerinfo: Mapping[str, Any]


class _Worker:
    """What the process that collects knows of one worker."""

    def __init__(self, number: int, process: Any) -> None:
        self.number, self.process = number, process
        self.batch: tuple[int, ...] = ()
        self.running: int | None = None
        self.is_waiting = False
        self.is_told = False
        self.node = _Node(
            SimpleNamespace(id=process.name),
            {
                "id": process.name,
                "sysplatform": sys.platform,
                "version_info": sys.version_info,
                "executable": sys.executable,
            },
        )

    @property
    def rest(self) -> tuple[int, ...]:
        """Indices of the tests of its batch that come after the running test."""
        return self.batch[self.batch.index(self.running) + 1 :] if self.running in self.batch else ()

    def give(self, connection: Connection, batch: tuple[int, ...] | None, *, is_last: bool) -> None:
        """Send a batch; or, if none will come any more, that this is the end."""
        if batch is not None:
            self.batch, self.is_waiting = batch, False
            self._send(connection, batch)
        elif is_last:  # else it waits until a worker has done its tests with client processes
            self.end(connection)

    def end(self, connection: Connection) -> None:
        """Tell it, once, to run no test after the running test."""
        if not self.is_told:
            self.is_told, self.is_waiting = True, False
            self._send(connection, ())

    def _send(self, connection: Connection, batch: tuple[int, ...]) -> None:
        with suppress(ConnectionError):  # it has died, and its end of the pipe says so next
            connection.send(batch)


# --- in the workers -----------------------------------------------------------------------------------------------


def _work(session: pytest.Session, number: int, connection: Connection) -> None:
    config = session.config
    forkserver.use_server_of_parent()
    _separate(config, number)
    config.pluginmanager.register(_Reporter(config, connection))
    while True:
        connection.send(("wants", None))
        batch = connection.recv()
        if not batch:
            break
        for index, following in zip(batch, (*batch[1:], None), strict=True):
            connection.send(("starts", index))
            # After the last test of a batch the fixtures of the session stay: the next batch is of the same session.
            nextitem: Any = session if following is None else session.items[following]
            config.hook.pytest_runtest_protocol(item=session.items[index], nextitem=nextitem)
            if connection.poll():  # it is told to end
                break
    session._setupstate.teardown_exact(None)


def _separate(config: pytest.Config, number: int) -> None:
    """Give this process its own files for captured output and for ``tmp_path``, and leave the terminal to the other."""
    for name in ("terminalreporter", "forked-workers"):
        config.pluginmanager.unregister(name=name)
    capture = config.pluginmanager.getplugin("capturemanager")
    capture.stop_global_capturing()
    capture.start_global_capturing()
    factory = config._tmp_path_factory
    factory._basetemp = factory.getbasetemp() / f"worker-{number}-{os.getpid()}"
    factory._basetemp.mkdir()


class _Reporter:
    def __init__(self, config: pytest.Config, connection: Connection) -> None:
        self._config, self._connection = config, connection

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._connection.send(("report", data))
