"""Turns: whose call is next, when more come than the coordinator can answer, and how many an owner has under way.

gRPC hands calls over in the order in which they come, so the calls of one owner would delay those of all others. Here
each owner has a queue of its own, and the queues take turns. While calls still come in, they are let in rather than
answered: a call that waits inside is in the queue of its owner, one that waits outside is before everyone.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from dtckpt_server.quotas import BusyError, Quotas, Rates, Shares

MAX_CALLS = 60_000
"""Calls under way at one time, unless the server is told otherwise; a waiter at a barrier is one."""
CALLS_AT_ONCE = 16
"""How many calls are answered before the event loop looks for new ones."""
PERIOD_S = 0.005
"""While calls come in, so much time passes between two rounds of answers."""
MAX_LATE_S = 1.0
"""How long a request of an owner that makes too many is held back before it is refused."""
NOBODY = ""
"""Owner of the calls that are not authorized."""


class Turns:
    """Queues of calls, one for each owner.

    Args:
        quotas: What one owner may have.
        max_calls: Calls under way at one time, of all owners, and as many heartbeat streams.
        clock: Monotonic seconds.
    """

    def __init__(self, quotas: Quotas, max_calls: int, clock: Callable[[], float]) -> None:
        scarce: Any = {"cure": "repeat later, with fewer at one time", "error": BusyError}
        self._calls = Shares("calls under way", quotas.calls, max_calls, "--max-owner-calls", **scarce)
        # Streams stay, and must leave room for the others.
        self._streams = Shares("heartbeat streams", quotas.streams, max_calls, "--max-owner-streams", **scarce)
        self._rates = Rates(quotas.requests_per_s)
        self._max_rate = quotas.requests_per_s
        self._clock = clock
        self._queues: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        self._answering: asyncio.Task[None] | None = None
        self._num_come = 0
        self._period_began, self._num_in_period = 0.0, 0

    def reserve_for(self, num_owners: int) -> None:
        """Reserve shares for so many owners."""
        self._calls.reserve_for(num_owners)
        self._streams.reserve_for(num_owners)

    @contextmanager
    def call(self, owner: str) -> Iterator[None]:
        """Count a call while it is under way.

        Raises:
            BusyError: There are too many.
        """
        with _counted(self._calls, owner, "a call"):
            yield

    @contextmanager
    def stream(self, owner: str) -> Iterator[None]:
        """Count a heartbeat stream while it is open.

        Raises:
            BusyError: There are too many.
        """
        with _counted(self._streams, owner, "a heartbeat stream"):
            yield

    async def take(self, owner: str) -> None:
        """Wait until it is a request's turn.

        Raises:
            BusyError: Its owner makes so many that it would have to wait for long.
        """
        await self._hold_back(owner)
        self._num_come += 1
        now = self._clock()
        if now - self._period_began >= PERIOD_S:
            self._period_began, self._num_in_period = now, 0
        self._num_in_period += 1
        if not self._queues and self._num_in_period <= CALLS_AT_ONCE:
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queues.setdefault(owner, deque()).append(turn)
        if self._answering is None or self._answering.done():
            self._answering = asyncio.ensure_future(self._answer())
        await turn

    async def _hold_back(self, owner: str) -> None:
        if wait_s := self._rates.wait_s(owner, self._clock()):
            await asyncio.sleep(min(wait_s, MAX_LATE_S))
            if self._rates.wait_s(owner, self._clock()):
                raise BusyError(
                    f"owner {owner!r} makes too many requests of the coordinator: its quota is {self._max_rate} a "
                    "second (--max-owner-requests-per-s of dtckpt-coordinator serve); repeat later, more rarely",
                    quota="requests a second",
                )

    async def _answer(self) -> None:
        """Let calls go on, those of one owner after those of another, until none waits."""
        while self._queues:
            begin, num_come = self._clock(), -1
            while num_come != self._num_come and self._clock() - begin < PERIOD_S:
                num_come = self._num_come
                await asyncio.sleep(0)
            for _ in range(CALLS_AT_ONCE):
                if not self._queues:
                    break
                owner, queue = next(iter(self._queues.items()))
                self._queues.move_to_end(owner)
                if not (turn := queue.popleft()).done():  # else its call is over
                    turn.set_result(None)
                if not queue:
                    del self._queues[owner]


@contextmanager
def _counted(shares: Shares, owner: str, what: str) -> Iterator[None]:
    shares.check(owner, 1, what)
    shares.note(owner, 1)
    try:
        yield
    finally:
        shares.note(owner, -1)
