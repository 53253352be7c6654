"""Coordinators to test against: in a thread of the test, and as the real command in a process."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from dtckpt_server.server import Server, ServerConfig

from support.client_calls import HEARTBEAT_S


@contextmanager
def server_in_thread(heartbeat_timeout_s: float = HEARTBEAT_S, **options) -> Iterator[int]:
    """Run a coordinator on an event loop in a thread; yields its port. It drains at the end."""
    with running_server(heartbeat_timeout_s=heartbeat_timeout_s, **options) as server:
        yield server.port


@contextmanager
def running_server(**options) -> Iterator[Server]:
    """Run a coordinator on an event loop in a thread; it drains at the end. Options are as for `ServerConfig`."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def start() -> Server:
        server = Server(ServerConfig(**{"port": 0} | options))
        await server.start()
        return server

    async def stop() -> None:
        await server.stop(0.1)
        # Else a later test would print that they were destroyed.
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)

    server = asyncio.run_coroutine_threadsafe(start(), loop).result(20)
    try:
        yield server
    finally:
        asyncio.run_coroutine_threadsafe(stop(), loop).result(20)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(20)
        loop.close()


class ServerProcess:
    """``dtckpt-coordinator serve`` as a separate process.

    Args:
        arguments: More of them; default: serve in plaintext and stop at once when told to.
        env: Variables to add.
    """

    def __init__(
        self,
        *arguments: str,
        port: int = 0,
        heartbeat_timeout_s: float = HEARTBEAT_S,
        env: dict[str, str] | None = None,
    ) -> None:
        options = ["--port", str(port), "--heartbeat-timeout-s", str(heartbeat_timeout_s)]
        options += arguments or ("--insecure", "--drain-timeout-s", "0")
        # A file, since a full pipe would block the server.
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed by _close
        self.process = subprocess.Popen(
            [sys.executable, "-m", "dtckpt_server.main", "serve", *options],
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=os.environ | (env or {}),
        )
        self.first_line = self.process.stdout.readline()
        if not self.first_line:
            self.process.wait(20)
            raise AssertionError(self._close())
        self.port = int(self.first_line.rpartition(":")[2])

    def _close(self) -> str:
        """Release what this process holds and return the log."""
        self.process.stdout.close()
        with self._log as log:
            log.seek(0)
            return log.read()

    def kill(self) -> str:
        return self._end(signal.SIGKILL)

    def terminate(self) -> str:
        """Stop it as Kubernetes does."""
        return self._end(signal.SIGTERM)

    def _end(self, number: int) -> str:
        if self.process.stdout.closed:
            return ""
        self.process.send_signal(number)
        self.process.wait(20)
        return self._close()


@contextmanager
def server_process(*arguments, **options) -> Iterator[ServerProcess]:
    server = ServerProcess(*arguments, **options)
    try:
        yield server
    finally:
        server.kill()
