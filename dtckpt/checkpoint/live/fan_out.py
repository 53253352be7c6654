"""Which source a relay pulls a part from, and which relays a source lets in; pure.

A *relay* is a reader that keeps a version for further readers. If a thousand relays begin at once, their publisher must
not send a thousand copies. So a source lets few relays in at a time, and a publisher sends few copies in all. A relay
that is refused asks another one, which passes pieces on as soon as it has them::

    publisher --> relay 1 --> relay 3 --> relay 7 ...       each source has at most two relays at a time
              |           +-> relay 4 --> relay 8 ...       a relay serves the pieces that it has while it pulls the
              +-> relay 2 --> relay 5 ...                   others, so a chain takes little longer than one copy
                          +-> relay 6 ...

No relay waits for ever. If it finds no other relay, or gets nothing for a while, it insists: then the publisher lets it
in as soon as a place is free. If it gets nothing for longer, it stops being a relay, and reads as a plain reader.
Time and randomness come from the caller. ``tests/checkpoint/live/test_fan_out.py`` simulates a thousand readers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

MAX_PULLERS = 2
"""Relays that a source serves at a time, of each part."""
MAX_COPIES = 2
"""Copies of its part that a publisher sends to relays that do not insist."""
IDLE_S = 10.0
"""A relay that asks for nothing for so long has lost its place at a source."""
LONELY_S, INSIST_S = 3.0, 15.0
"""A relay insists after so many seconds without a new piece: if it knows no other relay, and if it knows some."""
STALL_S = 5.0
"""A relay leaves a source that has had no new piece for it for so long."""
GIVE_UP_S = 60.0
"""After so many seconds without a new piece a relay stops pulling."""
MAX_FAILURES = 2
"""A source that has failed so often is not asked again."""
FIRST_PAUSE_S, MAX_PAUSE_S = 0.05, 2.0
"""How long a relay leaves a source alone that has no place, and the registry: doubled each time."""
RETRY_S = 1.0
"""How long a relay leaves a source alone that did not answer, or that had nothing new."""
MAX_POLL_S = 0.4
"""How long a relay leaves its own source alone that has nothing new yet, at most."""
GAP_S = 0.02
"""From one source that has no place to the next."""


class Places:
    """The relays that a source serves a part of one version.

    Args:
        max_copies: How many copies it sends in all to relays that do not insist; None: any number.
    """

    def __init__(self, max_copies: int | None = None) -> None:
        self._max_copies = max_copies
        self._served: dict[str, float] = {}
        self._num_done = 0

    def admit(self, puller: str, now: float, *, insists: bool) -> bool:
        """Give a relay a place, or let it keep its place; return whether it has one.

        Args:
            puller: Random name of the relay.
            now: Seconds.
            insists: Whether the relay has found no other source.
        """
        self._served = {name: seen for name, seen in self._served.items() if now - seen < IDLE_S}
        if puller not in self._served:
            # A relay that got lost on the way has passed nothing on: it does not count as a copy.
            num_copies = self._num_done + len(self._served)
            is_enough = self._max_copies is not None and num_copies >= self._max_copies and not insists
            if is_enough or len(self._served) >= MAX_PULLERS:
                return False
        self._served[puller] = now
        return True

    def done(self, puller: str) -> None:
        """Note that a relay has been sent the last piece that it lacked."""
        if self._served.pop(puller, None) is not None:
            self._num_done += 1


@dataclass(slots=True)
class _Standing:
    """The knowledge of a relay about a source."""

    retry_at: float = 0.0
    pause_s: float = FIRST_PAUSE_S
    num_failures: int = 0
    stalls_since: float | None = None

    @property
    def is_usable(self) -> bool:
        return self.num_failures < MAX_FAILURES


class SourceChoice:
    """The source that a relay asks next for pieces of a part.

    A relay stays with a source as long as that has pieces for it. Else it asks the other relays, in their order, and
    the publisher last; if it insists, the publisher first.

    Args:
        now: Seconds.
        random: Returns numbers from 0 to 1.
    """

    def __init__(self, now: float, random: Callable[[], float]) -> None:
        self._random = random
        self._progress_at = now
        self._known: dict[str, _Standing] = {}
        self._current: str | None = None
        self._relays: Sequence[str] = ()
        self._publisher: str | None = None
        self._next_at = self._ask_at = now
        self._ask_pause_s = FIRST_PAUSE_S

    def wants_news(self, now: float) -> bool:
        """Whether to ask the registry for relays, and to `tell` of them."""
        return self._current is None and now >= self._ask_at

    def tell(self, relays: Sequence[str], publisher: str | None, now: float) -> None:
        """Learn of the sources: relays in the order of preference, and the publisher, if it is alive."""
        self._relays, self._publisher = relays, publisher
        self._ask_at = now + self._ask_pause_s * (1 + self._random())
        if now < (lonely_at := self._progress_at + LONELY_S):
            self._ask_at = min(self._ask_at, lonely_at)  # a relay may have begun meanwhile: then none need insist
        self._ask_pause_s = min(2 * self._ask_pause_s, MAX_PAUSE_S)

    def choose(self, now: float) -> str | None:
        """Return the source to ask; None: wait, for `pause_s`."""
        if now < self._next_at:
            return None
        return next((source for source in self._asked(now) if self._retry_at(source) <= now), None)

    def pause_s(self, now: float) -> float:
        """Return how long to wait before the next choice."""
        retries = (self._retry_at(source) for source in self._asked(now))
        left_s = max(min(retries, default=self._ask_at), self._next_at) - now
        return min(max(left_s, GAP_S / 2), MAX_PAUSE_S)

    def _asked(self, now: float) -> Sequence[str]:
        """Return the sources that may be asked, in order."""
        publisher = [self._publisher] if self._publisher is not None else []
        sources = [self._current] if self._current is not None else [*self._relays, *publisher]
        if self.insists(now):
            sources = [*publisher, *sources]
        return [source for source in sources if self._standing(source).is_usable]

    def _retry_at(self, source: str) -> float:
        return self._standing(source).retry_at

    def insists(self, now: float) -> bool:
        """Whether the publisher should let this relay in although it has sent copies enough."""
        is_lonely = not any(self._standing(relay).is_usable for relay in self._relays)
        return now - self._progress_at >= (LONELY_S if is_lonely else INSIST_S)

    def is_over(self, now: float) -> bool:
        """Whether to stop pulling."""
        return now - self._progress_at >= GIVE_UP_S

    def took(self, source: str, now: float) -> None:
        """Note that a source has sent pieces."""
        self._current, self._progress_at = source, now
        self._known[source], self._ask_pause_s = _Standing(), FIRST_PAUSE_S

    def has_nothing(self, source: str, now: float) -> None:
        """Note that a source has given a place, and has no piece yet that is new."""
        standing = self._standing(source)
        self._current = source
        standing.stalls_since = now if standing.stalls_since is None else standing.stalls_since
        if now - standing.stalls_since >= STALL_S:
            self._leave(source, now + RETRY_S * (1 + self._random()))
        else:
            standing.retry_at = now + standing.pause_s
            standing.pause_s = min(2 * standing.pause_s, MAX_POLL_S)

    def is_full(self, source: str, now: float) -> None:
        """Note that a source has no place."""
        standing = self._standing(source)
        self._leave(source, now + standing.pause_s * (0.5 + self._random()))
        self._next_at = now + GAP_S * (0.5 + self._random())
        standing.pause_s = min(2 * standing.pause_s, MAX_PAUSE_S)

    def failed(self, source: str, now: float, *, is_damaged: bool) -> None:
        """Note that a source did not answer, or sent a piece that is damaged."""
        self._standing(source).num_failures += MAX_FAILURES if is_damaged else 1
        self._leave(source, now + RETRY_S)

    def _leave(self, source: str, retry_at: float) -> None:
        standing = self._standing(source)
        standing.retry_at, standing.stalls_since = retry_at, None
        if self._current == source:
            self._current = None

    def _standing(self, source: str) -> _Standing:
        return self._known.setdefault(source, _Standing())
