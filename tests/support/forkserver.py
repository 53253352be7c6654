"""Start client processes by a fork of a server that has imported torch and dtckpt, which takes milliseconds.

    test process ---- asks ---> server (one per run of pytest; imports, uses nothing, starts no thread)
         |                        |
         |                        +-- fork --> client process
         |                        +-- fork --> client process
         +---------- pipe --------------------------'

A new interpreter would need three seconds of the processor for the same imports, and so would a server per worker.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.forkserver import _forkserver
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any

TESTS = str(Path(__file__).parents[1])
IMPORTS = "support.client_imports"

_context = multiprocessing.get_context("forkserver")
Pipe = _context.Pipe


def start(target: Callable[..., Any], *args: Any, name: str | None = None) -> BaseProcess:
    """Start a process that calls ``target(*args)`` in the environment of this one; it is killed when this one exits."""
    start_server()
    process = _context.Process(target=_run, args=(_Streams(), dict(os.environ), target, args), name=name, daemon=True)
    process.start()
    return process


def start_server() -> None:
    """Start the server, unless it runs."""
    _context.set_forkserver_preload([IMPORTS])
    with _importable():
        _forkserver.ensure_running()


def use_server_of_parent() -> None:
    """Ask the server that the parent of this forked process has started, if it has; only the parent can wait for it."""
    if _forkserver._forkserver_pid is not None:
        _forkserver.ensure_running = lambda: None


class _Streams:
    """Output and errors of this process, for a process that the server forks: the server itself has the output of
    another test."""

    def __getstate__(self) -> list[Any]:
        return [DupFd(descriptor) for descriptor in (1, 2)]

    def __setstate__(self, duplicates: list[Any]) -> None:
        for descriptor, duplicate in enumerate(duplicates, 1):
            own = duplicate.detach()
            os.dup2(own, descriptor)
            os.close(own)


@contextmanager
def _importable() -> Iterator[None]:
    """Let the server find `support`: it gets the variables of this process, but not the ``sys.path`` of pytest."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = TESTS if before is None else f"{TESTS}{os.pathsep}{before}"
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def _run(_: _Streams, environment: dict[str, str], target: Callable[..., Any], args: tuple[Any, ...]) -> None:
    # The server ignores an import that fails, and every client would take two seconds of the processor.
    assert IMPORTS in sys.modules, f"the server could not import {IMPORTS}"
    os.environ.clear()
    os.environ.update(environment)
    reset_signals()
    target(*args)


def reset_signals() -> None:
    """Handle signals as a program in the foreground does, also where a script has started the tests in the background.

    There SIGINT (and by nohup SIGHUP) is ignored, and every process inherits that.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
