"""Calls to a `torch.distributed` store that a frozen store cannot block for good.

A call to a store does not return while the store's host is frozen, and no timeout or Ctrl-C ends it. So `StoreCalls`
runs such calls in separate threads, and gives a thread up when the store is silent for too long.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import wait
from functools import partial
from typing import TypeVar

from dtckpt.comm import fork_guard
from dtckpt.comm.background_threads import begin
from dtckpt.comm.torch_private import Store

T = TypeVar("T")


class StoreSilentError(Exception):
    """The store does not answer. The one caller of `StoreCalls.run` translates it."""


class StoreConnection:
    """One connection to the store, for one thread at a time; notes for how long a call has had no answer."""

    def __init__(self, root: Store, prefix: str, clock: Callable[[], float]) -> None:
        self._root = root
        self._prefix = prefix
        self._clock = clock
        self._store: Store | None = None
        self._asked: float | None = None
        self.abandoned = threading.Event()
        """Set when the caller no longer waits for the result; then work that uses this connection should end."""

    def _ask(self, work: Callable[[Store], T]) -> T:
        self._asked = self._clock()
        if self._store is None:
            # A clone of a TCPStore has a separate connection: a blocking call blocks all users of a connection.
            self._store = self._root.clone()  # type: ignore[attr-defined]  # not in torch's stubs
        answer = work(self._store)
        self._asked = None
        return answer

    def unanswered_s(self) -> float:
        """Return the seconds since the begin of the current call, 0 if there is none."""
        asked = self._asked
        return 0.0 if asked is None else self._clock() - asked

    def compare_set(self, key: str, expected: str, value: str) -> str:
        """Write ``value`` if the key holds ``expected`` ("": is absent or empty); return the key's value afterwards."""
        return str(self._ask(lambda store: store.compare_set(self._prefix + key, expected, value)), "utf-8")

    def has(self, *keys: str) -> bool:
        return bool(self._ask(lambda store: store.check([self._prefix + key for key in keys])))

    def multi_get(self, *keys: str) -> list[str]:
        """Return the values of keys, all of which must exist: the store would wait for an absent one."""
        values = self._ask(lambda store: store.multi_get([self._prefix + key for key in keys]))
        return [str(value, "utf-8") for value in values]

    def get(self, key: str) -> str | None:
        return self.multi_get(key)[0] if self.has(key) else None

    def add(self, key: str) -> int:
        return int(self._ask(lambda store: store.add(self._prefix + key, 1)))

    def delete(self, key: str) -> None:
        self._ask(lambda store: store.delete_key(self._prefix + key))


class StoreCalls:
    """Runs work on a store in threads, each with a separate connection.

    A frozen host keeps a store client inside a system call for good. Because the call is in another thread, the caller
    still sees its deadline, and Ctrl-C.

    Args:
        store: The store; each connection is a clone of it.
        prefix: Begins all keys.
        silence_s: Seconds without an answer after which the store counts as silent.
        clock: Monotonic seconds.
    """

    def __init__(self, store: Store, prefix: str, *, silence_s: float, clock: Callable[[], float]) -> None:
        self._store = store
        self._prefix = prefix
        self._silence_s = silence_s
        self._clock = clock
        self._lock = threading.Lock()
        self._idle: list[StoreConnection] = []

    def open_connection(self) -> StoreConnection:
        return StoreConnection(self._store, self._prefix, self._clock)

    def _idle_connection(self) -> StoreConnection:
        fork_guard.validate_process()  # a forked process must not speak on its parent's connections
        with self._lock:
            return self._idle.pop() if self._idle else self.open_connection()

    def run(self, work: Callable[[StoreConnection], T], *, tick_s: float) -> T:
        """Return ``work(connection)``.

        An exception here, as by Ctrl-C, sets ``connection.abandoned`` and gives the work ``tick_s`` to end.

        Raises:
            StoreSilentError: The store has not answered a request for too long.
        """
        connection = self._idle_connection()
        result = begin(partial(work, connection), "dtckpt-store")
        try:
            while not wait([result], tick_s).done:
                if connection.unanswered_s() > self._silence_s:
                    raise StoreSilentError(f"it has not answered for {self._silence_s:g} s")
        except BaseException:
            connection.abandoned.set()
            wait([result], tick_s)
            raise
        answer = result.result()
        with self._lock:
            self._idle.append(connection)
        return answer

    def close(self) -> None:
        with self._lock:
            self._idle.clear()
