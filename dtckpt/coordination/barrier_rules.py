"""Rules of the coordinator and of clients at a store: which round of a barrier a call joins, and when a client is late.

A barrier has a *name*, which may be used again and again; one use is a *round*. The *meeting point* (the coordinator,
or the clients' store) opens the rounds of a name and numbers them. A client never counts rounds:

* A call that comes while a round is open joins it; otherwise it opens the next round.
* Each call has a number, greater than the numbers of the process's earlier calls. A repeated call returns to its round,
  with the stored verdict. A new call does not get the verdict of a round that an earlier call of its client has joined.
* An *operation* (a save, a restore) begins with a round, and the id of that round is the operation's id. The
  operation's later rounds carry this id. Each of them takes place once: a client that comes late gets its verdict.
* A client's heartbeats name its current operation and its ended calls. A round of an operation that waits for a client
  fails at once when that client reports that it is elsewhere.

One question remains: a first round has failed without client B, and then B comes. Is B late for that round, or has B
skipped that operation and come for the next one? B's *position* (its step, or the ordinal of its call) answers:

======================================== =============================================================================
position of B and of the failed round    B is
======================================== =============================================================================
differ                                   not late: it joins the open round, or opens the next one
are equal, and certain (a step)          late: it gets the old verdict
are equal, a count; the round timed out  unknown: it waits in a new round, for `grace_s`, and gets the old verdict if
while it waited for B                    only clients come there that may be late, too
are equal, a count; the round failed     late: it had no time to come, or was lost
for another reason
======================================== =============================================================================

A step is certain, because a client that skipped an operation has another step. A count of calls is not certain: a
client that skipped an operation counts one call less than the others.

Pure: no clock, no I/O. Imports nothing that the coordinator's image lacks.
"""

from __future__ import annotations

from collections.abc import Collection

UNKNOWN_POSITION = "?"
"""Position of a client that does not know its operation. A failed round with this position matches every position."""


def grace_s(heartbeat_timeout_s: float) -> float:
    """Return how long a client that may be late waits for others, in seconds: one heartbeat interval."""
    return heartbeat_timeout_s / 6


def is_late(client: int, *, is_certain: bool, missing: Collection[int]) -> bool:
    """Tell whether a client that missed a failed round, and comes with the position of that round, came for it.

    Args:
        client: The client.
        is_certain: Whether a client that skipped rounds would have another position.
        missing: The clients that had not arrived when the round timed out; empty if it failed for another reason.
    """
    return is_certain or client not in missing
