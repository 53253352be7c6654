"""Turns: whose call is next, when more come than the coordinator can answer, and how many an owner has under way.

gRPC hands calls over in the order in which they come, so the calls of one owner would delay the calls of all others.
Here each owner has a separate queue, and the next call comes from the owner that has taken the least time so far. While
calls still come in, they are let in rather than answered. A call that waits inside is in the queue of its owner; a call
that waits outside delays all owners.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from dtckpt_server.quotas import BusyError, Quotas, Rates, Shares

MAX_CALLS = 60_000
"""Calls under way at one time, unless the server is told otherwise; a waiter at a barrier is one."""
PERIOD_S = 0.005
"""For so long calls are let in, as long as more come, and then for as long others are answered."""
STEPS_TO_COME = 8
"""In so many steps of the event loop the next call comes, if gRPC has one."""
IDLE_S = 0.001
"""After so much time without a call the next call is answered at once."""
MAX_LATE_S = 1.0
"""How long a request of an owner that makes too many is held back before it is refused."""
NOBODY = ""
"""Owner of the calls that are not authorized."""


class Turns:
    """Queues of calls, one for each owner: the job of a token, or else the part of a job's name before the first ``#``.

    Args:
        quotas: Limits for one owner.
        max_calls: Bound on the calls under way at one time, of all owners together. The same bound holds separately for
            heartbeat streams.
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
        self._queues: dict[str, deque[asyncio.Future[None]]] = {}
        self._took_s: dict[str, float] = {}  # of owners with waiting calls; a new owner begins with the least
        self._least_s = 0.0
        self._answering: asyncio.Task[None] | None = None
        self._num_come = 0
        self._busy_at = -IDLE_S

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
        if not self._queues and self._calls.only(owner) and self._streams.only(owner):
            return  # there is no other owner whose calls could be late
        if not self._queues and self._clock() - self._busy_at > IDLE_S:
            self._busy_at = self._clock()
            asyncio.get_running_loop().call_soon(self._note_end)
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if owner not in self._queues:
            self._queues[owner] = deque()
            self._took_s[owner] = max(self._took_s.get(owner, 0.0), self._least_s)
        self._queues[owner].append(turn)
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
        """Let waiting calls go on, each time a call of the owner that has taken the least time, until no call waits."""
        while self._queues:
            await self._let_in()
            begin = self._clock()
            while self._queues and self._clock() - begin < PERIOD_S:
                owner = min(self._queues, key=self._took_s.__getitem__)
                self._least_s = self._took_s[owner]
                turn = self._queues[owner].popleft()
                if not self._queues[owner]:
                    del self._queues[owner]
                if not turn.done():  # else its call is over
                    since = self._clock()
                    turn.set_result(None)
                    await asyncio.sleep(0)  # the call goes on
                    self._took_s[owner] += self._clock() - since
        self._took_s.clear()
        self._least_s = 0.0
        self._note_end()

    async def _let_in(self) -> None:
        """Wait while more calls come."""
        begin, num_come = self._clock(), -1
        while num_come != self._num_come and self._clock() - begin < PERIOD_S:
            num_come = self._num_come
            for _ in range(STEPS_TO_COME):
                await asyncio.sleep(0)

    def _note_end(self) -> None:
        self._busy_at = self._clock()


@contextmanager
def _counted(shares: Shares, owner: str, what: str) -> Iterator[None]:
    shares.check(owner, 1, what)
    shares.note(owner, 1)
    try:
        yield
    finally:
        shares.note(owner, -1)
