"""Background threads and a thread pool that work even while the interpreter shuts down.

From Python 3.12 on, a process cannot start threads once the main thread has ended, but an asynchronous save still needs
threads then. So `keep_reserve` starts a few threads beforehand, which run tasks when no new thread can start.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from concurrent.futures import wait as wait_for
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, ParamSpec, TypeVar

from typing_extensions import override

P = ParamSpec("P")
T = TypeVar("T")

RESERVE = 8
"""Number of reserve threads: twice as many as a save needs at a time, not counting its pools, which work with fewer."""

_Task = Callable[[], object]
_Item = tuple[Future[Any], Callable[[], Any]] | None

_lock = threading.Lock()
_reserve: SimpleQueue[_Task] | None = None


def begin(work: Callable[[], T], name: str) -> Future[T]:
    """Run ``work`` in a daemon thread, and return the future of its result.

    Raises:
        RuntimeError: The interpreter shuts down, and there is no reserve.
    """
    future: Future[T] = Future()
    task = partial(_run, future, work)
    try:
        threading.Thread(target=task, daemon=True, name=name).start()
    except RuntimeError:
        if _reserve is None:
            raise
        _reserve.put(task)
    return future


def keep_reserve() -> None:
    """Start the reserve threads, unless they run already."""
    global _reserve  # noqa: PLW0603  (a process has one)
    with _lock:
        if _reserve is None:
            tasks: SimpleQueue[_Task] = SimpleQueue()
            for _ in range(RESERVE):
                threading.Thread(target=_serve_reserve, args=(tasks,), daemon=True, name="dtckpt-reserve").start()
            _reserve = tasks


class Pool(Executor):
    """A `concurrent.futures.ThreadPoolExecutor` whose threads come from `begin`.

    Args:
        size: Largest number of threads.
        name: Name of the threads.
        prepare: Called first in each thread.
    """

    def __init__(self, size: int, name: str, prepare: Callable[[], object] = lambda: None) -> None:
        self._size, self._name, self._prepare = size, name, prepare
        self._tasks: SimpleQueue[_Item] = SimpleQueue()
        self._workers: list[Future[None]] = []

    @override
    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()
        self._tasks.put((future, partial(fn, *args, **kwargs)))
        if len(self._workers) < self._size:
            self._workers.append(begin(partial(_serve, self._tasks, self._prepare), self._name))
        return future

    @override
    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        while cancel_futures:
            try:
                item = self._tasks.get_nowait()
            except Empty:
                break
            if item is not None:
                item[0].cancel()
        for _ in self._workers:
            self._tasks.put(None)
        if wait:
            wait_for(self._workers)

    def __del__(self) -> None:
        self.shutdown(wait=False)


def _serve(tasks: SimpleQueue[_Item], prepare: Callable[[], object]) -> None:
    prepare()
    while (item := tasks.get()) is not None:
        future, work = item
        if future.set_running_or_notify_cancel():
            _run(future, work)
        # A thread that waits would keep the arguments and the result of its last task.
        del item, future, work


def _run(future: Future[T], work: Callable[[], T]) -> None:
    try:
        future.set_result(work())
    except BaseException as error:
        future.set_exception(error)


def _serve_reserve(tasks: SimpleQueue[_Task]) -> None:
    while True:
        tasks.get()()


def _forget_parent() -> None:
    """Start anew in a forked process: the parent's threads do not run there, and its lock may stay locked for ever."""
    global _lock, _reserve
    _lock, _reserve = threading.Lock(), None


os.register_at_fork(after_in_child=_forget_parent)
