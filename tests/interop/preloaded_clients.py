"""Client processes that share more imports: the server of all tests does not need the large frameworks.

::

    test process -- asks --> server -- fork --> nursery (imports the modules once) -- fork --> client processes
         '---------------------------------- pipes --------------------------------------------------'
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support import forkserver
from support.client_processes import Pool, Worker, serve

LOOK_S = 0.01


@dataclass
class ForkedProcess:
    """A process that another one has forked, with the members of multiprocessing's that `Worker` uses."""

    pid: int
    name: str

    def is_alive(self) -> bool:
        """Whether it runs; the nursery reaps clients that have ended."""
        return Path(f"/proc/{self.pid}").exists()

    def join(self, timeout_s: float) -> None:
        """Wait until it has ended."""
        deadline = time.monotonic() + timeout_s
        while self.is_alive() and time.monotonic() < deadline:
            time.sleep(LOOK_S)


class PreloadedPool(Pool):
    """A `Pool` whose first clients have imported some modules before they were forked.

    Args:
        modules: Names of the modules.
        clients: How many such clients there are; further clients, and clients that replace others, import by
        themselves.
    """

    def __init__(self, modules: Sequence[str], clients: int) -> None:
        super().__init__()
        pipes = [forkserver.Pipe() for _ in range(clients)]
        told, tell = forkserver.Pipe()
        self._nursery = forkserver.start(bring_up, modules, tell, [theirs for _, theirs in pipes], name="nursery")
        for _, theirs in pipes:
            theirs.close()
        tell.close()
        for pid, (ours, _) in zip(told.recv(), pipes, strict=True):
            self._workers.append(Worker(next(self._numbers), ours, ForkedProcess(pid, f"client-process-{pid}")))

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self._nursery.join(10)


def bring_up(modules: Sequence[str], tell: Any, connections: Sequence[Any]) -> None:
    """Import modules, fork a client process for each connection, and wait until all of them have ended."""
    for module in modules:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # the clients' collectors would copy the pages of what is imported
    pids = []
    for connection in connections:
        pid = os.fork()
        if not pid:
            tell.close()
            for other in connections:
                if other is not connection:
                    other.close()
            serve(connection)
            os._exit(0)
        pids.append(pid)
    for connection in connections:
        connection.close()
    tell.send(pids)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for pid in pids:
        os.waitpid(pid, 0)
