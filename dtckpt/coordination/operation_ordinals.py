"""Which operation each client is at, and whether all are at the same one.

Clients that come to the first round of an operation compare their ordinals before anything is done: the step, where
all give one; else the ordinal of the call in the life of each process. Where they differ there are two explanations:

* A client *skipped* an operation, or gave one up alone, and all are at the same point of their programs. Then all fail
  once and take the highest ordinal, so that the next operation finds them level.
* A client is *behind*: it was cut off while the others gave operations up and went on. Its count is right. Then it
  fails, at each of its operations that the others have given up, while the others wait until it has caught up. To level
  the counts here would join different steps.

A client knows whether it or the others went on alone: a call of it ended without a verdict, or with one that names it
as gone. Then counts are right. Steps tell by themselves, once the same clients are behind a second time. So does
waiting: where a client came no closer in a time in which a free one would have, it had skipped.
"""

from __future__ import annotations

import struct
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from dtckpt.coordination.api import Position
from dtckpt.coordination.barrier_rules import UNKNOWN_POSITION
from dtckpt.errors import capped

_FORMAT = struct.Struct("<QqQ?")
NBYTES = _FORMAT.size
NO_STEP = -1
LEAST_VAIN_WAIT_S = 2.0
PAUSES_WAITED = 2.0
"""To have waited for less, or for fewer of the pauses between operations, says nothing: a client that runs free and is
behind needs such a pause to come closer by one."""


@dataclass(frozen=True, slots=True)
class Ordinal:
    """Which operation of its kind a client is at.

    Args:
        number: Of the call, from 1 on, in the life of the process.
        step: Of the training run, from 0 on; None: not said.
        was_cut_off: Whether it has gone on without the others, or they without it, since all were level.
        waited_gap: How far others were behind when this client waited for them in vain; 0: it did not.
        is_unsure: Whether the client cannot say, so that it waits for others and is not told that it is late.
    """

    number: int
    step: int | None = None
    was_cut_off: bool = False
    waited_gap: int = 0
    is_unsure: bool = False

    @property
    def position(self) -> Position:
        """Return the mark by which keepers of barriers know late arrivals."""
        if self.is_unsure:
            return Position(UNKNOWN_POSITION)
        text = f"#{self.number}" if self.step is None else f"step {self.step}"
        return Position(text, is_certain=self.step is not None)

    def to_bytes(self) -> bytes:
        """Return `NBYTES` bytes."""
        step = NO_STEP if self.step is None else self.step
        return _FORMAT.pack(self.number, step, self.waited_gap, self.was_cut_off)

    @classmethod
    def from_bytes(cls, data: bytes) -> Ordinal:
        """Read the first `NBYTES` bytes."""
        number, step, waited_gap, was_cut_off = _FORMAT.unpack_from(data)
        return cls(number, None if step == NO_STEP else step, was_cut_off, waited_gap)


@dataclass(frozen=True, slots=True)
class Comparison:
    """How the ordinals of all clients compare.

    Args:
        behind: The clients that are behind the others; none: all are at one operation.
        gap: How far the last of them is behind.
        others_wait: Whether the others wait for them; else all fail and are level.
        message: What differs.
    """

    behind: frozenset[int] = frozenset()
    gap: int = 0
    others_wait: bool = False
    message: str = ""

    @property
    def is_same(self) -> bool:
        """Whether all clients are at one operation."""
        return not self.message


SAME = Comparison()


def compare(ordinals: Mapping[int, Ordinal], operation: str, last_behind: frozenset[int] = frozenset()) -> Comparison:
    """Compare the ordinals of all clients; every client comes to the same result.

    Args:
        ordinals: By client.
        operation: What the clients do: ``save`` or the like.
        last_behind: The clients that were behind when ordinals were compared before.
    """
    steps = {client: ordinal.step for client, ordinal in ordinals.items()}
    given = {client: step for client, step in steps.items() if step is not None}
    if given and len(given) < len(steps):
        silent = capped(f"client {client}" for client in sorted(set(steps) - set(given)))
        return Comparison(message=f"{silent} gave no step, the others did; pass step= on every client or on none")
    places = given or {client: ordinal.number for client, ordinal in ordinals.items()}
    newest = max(places.values())
    behind = frozenset(client for client, place in places.items() if place < newest)
    if not behind:
        return SAME
    gap = newest - min(places.values())
    if given:
        others_wait = behind <= last_behind
    else:
        others_wait = any(ordinal.was_cut_off for ordinal in ordinals.values())
        waited = max(ordinal.waited_gap for ordinal in ordinals.values())
        if others_wait and waited and gap >= waited:
            return SAME  # it came no closer while it was waited for, so it had skipped some
    return Comparison(behind, gap, others_wait, _describe(places, operation, bool(given), others_wait))


def _describe(places: Mapping[int, int], operation: str, are_steps: bool, others_wait: bool) -> str:
    (usual, _), *_ = Counter(sorted(places.values(), reverse=True)).most_common(1)
    odd = {client: place for client, place in places.items() if place != usual}
    if are_steps:
        text = f"{_listed(odd, lambda place: f'is at step {place}')}, the others at step {usual}"
    else:
        told = _listed(odd, lambda place: f"is at its {_nth(place)} {operation}")
        text = f"{told}, the others at their {_nth(usual)}"
    if others_wait:
        return f"{text}: those who are behind come to what the others have given up, and have to catch up"
    return f"{text}: a client skipped one, gave one up alone, or was restarted; nothing was done, and all are level now"


def _listed(odd: Mapping[int, int], tell: Callable[[int], str]) -> str:
    return capped(f"client {client} {tell(place)}" for client, place in sorted(odd.items()))


def _nth(number: int) -> str:
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


class OrdinalTracker:
    """The ordinals of one client at one kind of operation, in the life of its process.

    Args:
        operation: What the clients do, for messages.
        clock: Monotonic seconds.
    """

    def __init__(self, operation: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._operation = operation
        self._clock = clock
        self._number = 0
        self._was_cut_off = False
        self._last_behind: frozenset[int] = frozenset()
        self._begun_at = clock()
        self._pause_s = 0.0  # between the last two operations
        self._was_retold = False  # the last operation failed with the error of an earlier one
        self._waiting_gap = 0  # of the first meeting of this operation, if the others are waited for
        self._last_gap = 0  # of the operation before it
        self._waited_s = 0.0  # in vain, since the gap last became smaller
        self._waited_gap = 0  # the gap, once it was waited for long enough in vain

    def next_ordinal(self, step: int | None = None) -> Ordinal:
        """Return the ordinal of the next operation."""
        now = self._clock()
        self._number, self._begun_at, self._pause_s = self._number + 1, now, now - self._begun_at
        self._waiting_gap = 0
        # A client that has been told twice to be late would be so for ever if it is always the first to come.
        was_retold, self._was_retold = self._was_retold and step is None, False
        return Ordinal(self._number, step, self._was_cut_off, self._waited_gap, was_retold)

    def reconcile(self, ordinals: Mapping[int, Ordinal], client: int, *, cut_off: Sequence[int] = ()) -> Comparison:
        """Compare the ordinals of all clients, and take the consequences for this one.

        Args:
            ordinals: By client.
            client: This client.
            cut_off: Clients whose arrival got through at a later try only.
        """
        ordinals = {
            each: replace(ordinal, was_cut_off=ordinal.was_cut_off or each in cut_off)
            for each, ordinal in ordinals.items()
        }
        found = compare(ordinals, self._operation, self._last_behind)
        self._last_behind = found.behind
        if found.is_same or not found.others_wait:
            self._number = max(ordinal.number for ordinal in ordinals.values())
            self._was_cut_off, self._waited_s = False, 0.0
            self._waiting_gap = self._last_gap = self._waited_gap = 0
        else:
            self._was_cut_off = True  # whoever knows it: until all are level again
            if client not in found.behind and not self._waiting_gap:
                self._waiting_gap = found.gap
                if found.gap < self._last_gap:
                    self._waited_s, self._waited_gap = 0.0, 0
                self._last_gap = found.gap
        return found

    def note_failure(self, error: BaseException, client: int, waited_s: float) -> None:
        """Note how a round of an operation failed for this client.

        It was cut off if that is no verdict, or one that names this client as lost or missing, or if an arrival of the
        operation got through at a later try only: it has gone on without the others, or they without it.

        Args:
            error: What the barrier raised.
            client: This client.
            waited_s: Seconds that it waited there.
        """
        absent = (*getattr(error, "clients", ()), *getattr(error, "missing", ()))
        is_verdict, was_cut_off = (getattr(error, fact, False) for fact in ("is_verdict", "was_cut_off"))
        self._was_retold = getattr(error, "is_retold", False)
        self._was_cut_off |= not is_verdict or was_cut_off or client in absent
        self._begun_at += waited_s  # a pause is the time that the program takes between operations
        # A client that was lost could not come; and one that heard no verdict does not know whether another came.
        if self._waiting_gap and is_verdict and not getattr(error, "clients", ()):
            self._waited_s += waited_s
            if self._waited_s >= max(LEAST_VAIN_WAIT_S, PAUSES_WAITED * self._pause_s):
                self._waited_gap = self._waiting_gap
