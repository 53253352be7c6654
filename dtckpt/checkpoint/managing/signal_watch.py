"""`SignalWatch`: note signals that announce the end of the process, so that the clients save before it.

A launcher sends such a signal to the process group of a client, and so to the workers of its data loaders as well. A
worker that dies of it would fail the training loop before the clients have agreed to save. So a worker leaves a signal
that its parent has noted to the parent.
"""

from __future__ import annotations

import logging
import mmap
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from dtckpt.comm.torch_private import loader_signals

logger = logging.getLogger("dtckpt.checkpoint")

PARENT_S = 5.0
"""Longest time from a signal to a worker until its parent has noted the same; then the worker alone was meant."""
POLL_S = 0.01
MAX_HANDLER_ERRORS = 16
"""Most errors of other signals' handlers during which the end of a watch goes on."""
SET_HANDLERS = "_set_worker_signal_handlers"

_WATCHING, _NOTED, _OVER = range(3)


class SignalWatch:
    """The signals that a process watches for.

    Args:
        is_answered: Returns whether the clients have acted on a signal.
    """

    def __init__(self, is_answered: Callable[[], bool]) -> None:
        self._is_answered = is_answered
        self._noted = threading.Event()
        self._num_open = 0

    @property
    def is_open(self) -> bool:
        """Whether the process watches now."""
        return self._num_open > 0

    @property
    def has_noted(self) -> bool:
        """Whether a signal has come."""
        return self._noted.is_set()

    @contextmanager
    def watch(self, *signals: int) -> Iterator[None]:
        """Watch for signals, by default SIGTERM; restore their former handlers at the end.

        If the work inside fails before a decision has told all clients of a signal, no client will act on the signal.
        So the failure is logged, and the signal is raised again under its former handler. Otherwise torchrun would wait
        half a minute for a survivor that ignores SIGTERM. A forked process does not watch: it handles the signal as
        before.
        """
        watcher, received = os.getpid(), list[int]()
        state = mmap.mmap(-1, 1)  # shared with workers

        def note(number: int, _: object) -> None:
            if os.getpid() != watcher:
                _raise_under(before[number], number)
                return
            state[0] = _NOTED
            received.append(number)
            self._noted.set()

        before = {number: signal.signal(number, note) for number in signals or (signal.SIGTERM,)}
        self._num_open += 1
        failure: BaseException | None = None
        try:
            with _workers_leave(list(before), state):
                yield
        except BaseException as error:
            failure = error
        self._num_open -= 1
        state[0] = _OVER
        has_former_effect = bool(received)
        for _ in range(MAX_HANDLER_ERRORS):
            # PyTorch raises the error about a dead worker of a DataLoader in a handler of SIGCHLD, so maybe in here.
            try:
                for number, handler in before.items():
                    signal.signal(number, handler)
                has_former_effect = failure is not None and bool(received) and not self._is_answered()
                break
            except Exception as error:
                failure = failure or error
        if has_former_effect:
            try:
                _log_failure(received[0], failure)
            finally:
                signal.raise_signal(received[0])
        if failure is not None:
            raise failure


def _log_failure(number: int, failure: BaseException | None) -> None:
    name = signal.Signals(number).name
    logger.error(
        "%s came, but the training loop failed before the clients had agreed to save, so no checkpoint was saved for "
        "it, and the signal has its former effect now. The failure: %r. If a worker of a DataLoader died of the same "
        "signal: start the workers by 'fork', inside the context of `preemption`, or have them ignore %s in "
        "`worker_init_fn`",
        name,
        failure,
        name,
    )


@contextmanager
def _workers_leave(signals: list[int], state: mmap.mmap) -> Iterator[None]:
    """Have the workers of PyTorch's data loaders that are forked inside leave signals to the process that watches."""
    watcher = os.getpid()
    set_handlers = getattr(loader_signals, SET_HANDLERS)

    def leave(number: int, _: object) -> None:
        deadline = time.monotonic() + PARENT_S
        while state[0] == _WATCHING and os.getppid() == watcher and time.monotonic() < deadline:
            time.sleep(POLL_S)
        if os.getppid() == watcher and state[0] == _NOTED:
            return
        if os.getppid() == watcher and state[0] == _OVER:
            os._exit(0)  # as PyTorch's own handler does if the parent ends a worker
        _raise_under(signal.SIG_DFL, number)

    def set_worker_handlers() -> None:
        set_handlers()
        for number in signals:
            signal.signal(number, leave)

    setattr(loader_signals, SET_HANDLERS, set_worker_handlers)
    try:
        yield
    finally:
        setattr(loader_signals, SET_HANDLERS, set_handlers)


def _raise_under(handler: Any, number: int) -> None:
    signal.signal(number, handler)
    signal.raise_signal(number)
