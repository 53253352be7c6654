"""Check that all clients are at the same save or restore: each client's *ordinal*, and consequences of a difference.

Before any other work, the clients of an operation exchange their ordinals in its first round. An ordinal is the step,
if all clients give one; else the number of the call in the life of each process.

Two different ordinals may mean two things. Here all clients come to a save, client 0 to its 9th, client 1 to its 8th::

    skipped                                       behind
    client 0   7th   8th (fails)       9th        client 0   7th   8th (fails)       9th
    client 1   7th   (skips it)        8th        client 1   7th   ...cut off...     8th
    the two calls are the same save;              client 1's call is the save that client 0 has given up:
    client 1 only counts one less                 to join the two would put two steps into one checkpoint

* A client *skipped* an operation, or gave one up alone, and all clients are at the same point of their programs. Then
  all fail once and take the highest ordinal. So they are *level* again, and the next operation succeeds.
* A client is *behind*: it was cut off while the others gave operations up and went on. Its count is right. Then it
  fails at each operation that the others have given up, while the others wait until it has caught up.

Three signs distinguish the two cases:

* A client knows that it, or the others, went on alone. A call of the client ended without a verdict, or with a verdict
  that names the client as lost or missing. Then the counts are right, and the client with the lower ordinal is behind.
* With steps: if the same clients are behind a second time in succession, they are really behind.
* Waiting: the others wait for a client that is behind. If it comes no closer in the time that a client needs to catch
  up by one operation, it had skipped.
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
"""Shortest wait that counts, in seconds or in pauses between operations: a client that is behind needs about one such
pause to come closer by one operation."""


@dataclass(frozen=True, slots=True)
class Ordinal:
    """A client's number or step among its operations of one kind.

    Args:
        number: Number of the call, from 1 on, in the life of the process.
        step: Step of the training run, from 0 on; None: the caller gave none.
        was_cut_off: Whether the client has gone on without the others, or the others without it, since all were level.
        waited_gap: The others' distance behind when this client waited for them in vain; 0: it did not wait in vain.
        is_unsure: Whether the client does not know its operation. Such a client waits for others, and never counts as
            late.
    """

    number: int
    step: int | None = None
    was_cut_off: bool = False
    waited_gap: int = 0
    is_unsure: bool = False

    @property
    def position(self) -> Position:
        """Return the position by which the coordinator, or the store, knows late arrivals."""
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
    """The comparison of the ordinals of all clients.

    Args:
        behind: The clients that are behind the others.
        gap: Number of operations (or steps) that the last of these clients is behind.
        others_wait: Whether the others wait for these clients; else all fail once and are level.
        message: The difference in words; "": all are at one operation.
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
        operation: Name of the operation in messages: ``save`` or the like.
        last_behind: The clients that were behind in the comparison before.
    """
    steps = {client: ordinal.step for client, ordinal in ordinals.items() if ordinal.step is not None}
    if steps and len(steps) < len(ordinals):
        silent = capped(f"client {client}" for client in sorted(set(ordinals) - set(steps)))
        return Comparison(message=f"{silent} gave no step, the others did; pass step= on every client or on none")
    positions = steps or {client: ordinal.number for client, ordinal in ordinals.items()}
    newest = max(positions.values())
    behind = frozenset(client for client, position in positions.items() if position < newest)
    if not behind:
        return SAME
    gap = newest - min(positions.values())
    if steps:
        others_wait = behind <= last_behind
    else:
        others_wait = any(ordinal.was_cut_off for ordinal in ordinals.values())
        waited = max(ordinal.waited_gap for ordinal in ordinals.values())
        if others_wait and waited and gap >= waited:
            return SAME  # it came no closer while others waited for it, so it had skipped some
    return Comparison(behind, gap, others_wait, _describe(positions, operation, bool(steps), others_wait))


def _describe(positions: Mapping[int, int], operation: str, are_steps: bool, others_wait: bool) -> str:
    (usual, _), *_ = Counter(sorted(positions.values(), reverse=True)).most_common(1)
    odd = {client: position for client, position in positions.items() if position != usual}
    if are_steps:
        text = f"{_listed(odd, lambda position: f'is at step {position}')}, the others at step {usual}"
    else:
        told = _listed(odd, lambda position: f"is at its {_nth(position)} {operation}")
        text = f"{told}, the others at their {_nth(usual)}"
    if others_wait:
        return f"{text}: the clients behind meet operations that the others have given up, and must catch up"
    return f"{text}: a client skipped one, gave one up alone, or was restarted; nothing was done, and all are level now"


def _listed(odd: Mapping[int, int], tell: Callable[[int], str]) -> str:
    return capped(f"client {client} {tell(position)}" for client, position in sorted(odd.items()))


def _nth(number: int) -> str:
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


class OrdinalTracker:
    """Counts the operations of one kind that this client begins, and decides how it reacts when ordinals differ.

    An operation calls `next_ordinal`, exchanges the ordinals in its first round, and calls `reconcile` with them. A
    client that must wait for clients behind it meets again, with the same ordinal, and reconciles again. The error of a
    failed round goes to `note_failure`.

    Args:
        operation: Name of the operation in messages.
        clock: Monotonic seconds.
    """

    def __init__(self, operation: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._operation = operation
        self._clock = clock
        self._number = 0
        self._was_cut_off = False
        self._last_behind: frozenset[int] = frozenset()
        self._begun_at = clock()
        self._pause_s = 0.0  # between the last two operations, without the wait in rounds that failed
        self._was_retold = False  # the last operation failed with the error of an earlier one
        self._waiting_gap = 0  # gap when this operation first began to wait for others; 0: it does not wait
        self._last_gap = 0  # the same, of the operation before
        self._waited_s = 0.0  # time waited in vain since the gap last became smaller
        self._waited_gap = 0  # the gap, once this client has waited for long enough in vain

    def next_ordinal(self, step: int | None = None) -> Ordinal:
        """Return the ordinal of the next operation."""
        now = self._clock()
        self._number, self._begun_at, self._pause_s = self._number + 1, now, now - self._begun_at
        self._waiting_gap = 0
        # A client that always comes first, with the count of a failed round, would count as late for ever. So after it
        # counted as late once, it sends no position.
        was_retold, self._was_retold = self._was_retold and step is None, False
        return Ordinal(self._number, step, self._was_cut_off, self._waited_gap, was_retold)

    def reconcile(self, ordinals: Mapping[int, Ordinal], client: int, *, cut_off: Sequence[int] = ()) -> Comparison:
        """Compare the ordinals of all clients, and level or keep this client's count.

        Args:
            ordinals: By client.
            client: This client.
            cut_off: Clients whose arrival got through only at a later try; see `Verdict.cut_off`.
        """
        ordinals = {
            each: replace(ordinal, was_cut_off=ordinal.was_cut_off or each in cut_off)
            for each, ordinal in ordinals.items()
        }
        comparison = compare(ordinals, self._operation, self._last_behind)
        self._last_behind = comparison.behind
        if comparison.is_same or not comparison.others_wait:
            self._number = max(ordinal.number for ordinal in ordinals.values())
            self._was_cut_off, self._waited_s = False, 0.0
            self._waiting_gap = self._last_gap = self._waited_gap = 0
        else:
            self._was_cut_off = True  # on every client, whichever of them knew it, until all are level again
            if client not in comparison.behind and not self._waiting_gap:
                self._waiting_gap = comparison.gap
                if comparison.gap < self._last_gap:
                    self._waited_s, self._waited_gap = 0.0, 0
                self._last_gap = comparison.gap
        return comparison

    def note_failure(self, error: BaseException, client: int, waited_s: float) -> None:
        """Note this client's error of a failed round of an operation.

        The client was cut off if the error is no verdict, if the verdict names it as lost or missing, or if its arrival
        succeeded only at a later try. Then the client has gone on without the others, or the others without it.

        Args:
            error: The error that the barrier raised.
            client: This client.
            waited_s: Seconds that it waited there.
        """
        absent = (*getattr(error, "clients", ()), *getattr(error, "missing", ()))
        is_verdict, was_cut_off = (getattr(error, fact, False) for fact in ("is_verdict", "was_cut_off"))
        self._was_retold = getattr(error, "is_retold", False)
        self._was_cut_off |= not is_verdict or was_cut_off or client in absent
        self._begun_at += waited_s  # a pause is the program's own time between operations
        # The wait does not count if a client was lost, because the lost client could not come. Without a verdict, too,
        # the wait does not count: then this client does not know which clients came.
        if self._waiting_gap and is_verdict and not getattr(error, "clients", ()):
            self._waited_s += waited_s
            if self._waited_s >= max(LEAST_VAIN_WAIT_S, PAUSES_WAITED * self._pause_s):
                self._waited_gap = self._waiting_gap
