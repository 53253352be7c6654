"""Bytes of large answers that clients have yet to read: bounded for each owner, as its clients may not read at all."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

MAX_NBYTES = 64 << 20
"""How many bytes of answers are on their way to the clients of one owner; a larger answer goes alone."""


class OutgoingAnswers:
    """The bytes of answers on their way to the clients of each owner."""

    def __init__(self) -> None:
        self._nbytes: Counter[str] = Counter()
        self._waiting: dict[str, deque[tuple[int, asyncio.Future[None]]]] = {}

    def nbytes_of(self, owner: str) -> int:
        return self._nbytes[owner]

    async def begin(self, owner: str, nbytes: int) -> None:
        """Wait until there is room for an answer, and count it; `end` must follow."""
        if owner not in self._waiting and self._has_room(owner, nbytes):
            self._nbytes[owner] += nbytes
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append((nbytes, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.end(owner, nbytes)
            else:
                self._go_on(owner)
            raise

    def end(self, owner: str, nbytes: int) -> None:
        """Count an answer no more: its client has read it, or is gone."""
        self._nbytes[owner] -= nbytes
        self._go_on(owner)
        if not self._nbytes[owner]:
            del self._nbytes[owner]

    @asynccontextmanager
    async def room(self, owner: str, nbytes: int) -> AsyncIterator[None]:
        """Count an answer that is sent in the body."""
        await self.begin(owner, nbytes)
        try:
            yield
        finally:
            self.end(owner, nbytes)

    async def begin_call(self, owner: str, nbytes: int, context: Any) -> None:
        """Count the answer of a call until the call is over."""
        await self.begin(owner, nbytes)
        context.add_done_callback(lambda _: self.end(owner, nbytes))

    def _has_room(self, owner: str, nbytes: int) -> bool:
        return not self._nbytes[owner] or self._nbytes[owner] + nbytes <= MAX_NBYTES

    def _go_on(self, owner: str) -> None:
        waiting = self._waiting.get(owner, deque())
        while waiting and (waiting[0][1].done() or self._has_room(owner, waiting[0][0])):
            nbytes, turn = waiting.popleft()
            if not turn.done():
                self._nbytes[owner] += nbytes
                turn.set_result(None)
        if not waiting:
            with suppress(KeyError):
                del self._waiting[owner]
