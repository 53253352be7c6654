"""Bounded use of a `torch.distributed` store."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import wait
from functools import partial
from typing import TypeVar

from torch._C._distributed_c10d import Store

from dtckpt.comm import fork_guard
from dtckpt.comm.background_threads import begin

T = TypeVar("T")


class StoreSilentError(Exception):
    """The store does not answer; translated by the one caller of `StoreCalls.run`."""


class Link:
    """One connection to the store, for one thread at a time. Knows for how long an answer is due."""

    def __init__(self, root: Store, prefix: str, clock: Callable[[], float]) -> None:
        self._root = root
        self._prefix = prefix
        self._clock = clock
        self._store: Store | None = None
        self._asked: float | None = None
        self.abandoned = threading.Event()
        """Set when nobody waits for the result any more; what runs on this link should end."""

    def _ask(self, work: Callable[[Store], T]) -> T:
        self._asked = self._clock()
        if self._store is None:
            # A clone of a TCPStore is a connection of its own: a blocking call blocks all users of a connection.
            self._store = self._root.clone()  # type: ignore[attr-defined]  # not in torch's stubs
        answer = work(self._store)
        self._asked = None
        return answer

    def unanswered_s(self) -> float:
        asked = self._asked
        return 0.0 if asked is None else self._clock() - asked

    def set_if(self, key: str, expected: str, value: str) -> str:
        """Write ``value`` if the key holds ``expected`` ("" = absent or empty); return what it holds then."""
        return str(self._ask(lambda store: store.compare_set(self._prefix + key, expected, value)), "utf-8")

    def has(self, *keys: str) -> bool:
        return bool(self._ask(lambda store: store.check([self._prefix + key for key in keys])))

    def read(self, *keys: str) -> list[str]:
        """Return the values of keys that exist; for others the store would wait."""
        values = self._ask(lambda store: store.multi_get([self._prefix + key for key in keys]))
        return [str(value, "utf-8") for value in values]

    def get(self, key: str) -> str | None:
        return self.read(key)[0] if self.has(key) else None

    def add(self, key: str) -> int:
        return int(self._ask(lambda store: store.add(self._prefix + key, 1)))

    def delete(self, key: str) -> None:
        self._ask(lambda store: store.delete_key(self._prefix + key))


class StoreCalls:
    """Runs work that asks the store in threads that are given up when the store does not answer.

    A frozen host keeps a store client inside a system call for good. Only a thread of its own keeps the caller free to
    see the deadline, and Ctrl-C.
    """

    def __init__(self, store: Store, prefix: str, *, silence_s: float, clock: Callable[[], float]) -> None:
        self._store = store
        self._prefix = prefix
        self._silence_s = silence_s
        self._clock = clock
        self._lock = threading.Lock()
        self._idle: list[Link] = []

    def open_link(self) -> Link:
        return Link(self._store, self._prefix, self._clock)

    def _take(self) -> Link:
        fork_guard.validate_process()  # a forked process must not speak on its parent's connections
        with self._lock:
            return self._idle.pop() if self._idle else self.open_link()

    def run(self, work: Callable[[Link], T], *, tick_s: float) -> T:
        """Return ``work(link)``. An exception here (Ctrl-C) sets ``link.abandoned`` and gives the work one tick to end.

        Raises:
            StoreSilentError: The store has not answered a request for too long.
        """
        link = self._take()
        result = begin(partial(work, link), "dtckpt-store")
        try:
            while not wait([result], tick_s).done:
                if link.unanswered_s() > self._silence_s:
                    raise StoreSilentError(f"it has not answered for {self._silence_s:g} s")
        except BaseException:
            link.abandoned.set()
            wait([result], tick_s)
            raise
        answer = result.result()
        with self._lock:
            self._idle.append(link)
        return answer

    def close(self) -> None:
        with self._lock:
            self._idle.clear()
