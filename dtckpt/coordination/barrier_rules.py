"""What every keeper of barriers says and decides alike: the coordinator, and clients that meet at a store.

A barrier's *name* may be used again and again; one use of it is a *round*. Its keeper opens and numbers the rounds:

* A call that comes while a round is open joins it; else it opens the next one. A client never counts rounds.
* A call has a number of its own, drawn by its process. The same call again gets the round that it had joined, with its
  stored verdict. A new call never gets the verdict of a round that another call of its client has joined.
* The id of an operation's first round *is* the operation's identity. Its later rounds carry that id, so each of them
  takes place once, and a client that comes late gets its verdict.
* A client tells with its heartbeats which operation it is in and which of its calls have ended. A round that waits for
  a client which is known to be elsewhere fails at once.

One question is left: a first round has failed without client B, and then B comes. Is B late for that round, or has it
skipped it and come for the next one? Where B's position (its step, or the ordinal of its call) is another one, it is
not late. Where the position is the same and certain, it is; and where the round did not time out waiting for B, for
then B had no time to come, or was lost. Else B may have skipped one: it waits, for `grace_s` at most, whether others
come to a new round, and is told the old failure if none does.

Pure: no clock, no I/O. Imports nothing that the coordinator's image lacks.
"""

from __future__ import annotations

from collections.abc import Collection

UNKNOWN_POSITION = "?"
"""Position of a client that cannot say where it is. If its round fails, all who were not there came for it."""


def grace_s(heartbeat_timeout_s: float) -> float:
    """Return how long a client that may be late waits for others: one heartbeat interval."""
    return heartbeat_timeout_s / 6


def is_late(client: int, *, is_certain: bool, missing: Collection[int]) -> bool:
    """Whether a client that comes with the position of a failed round, where it had not arrived, came for that one.

    Args:
        client: The client.
        is_certain: Whether the position is more than a count.
        missing: The clients that had not arrived when the round timed out; empty if it failed otherwise.
    """
    return is_certain or client not in missing
