"""The texts of barrier errors: one source for the coordinator and for clients that meet at a store.

A user sees the same sentence from both meeting points, and tests compare each sentence byte by byte.
Pure: no clock, no I/O. Imports nothing that the coordinator's image lacks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Protocol

from dtckpt.errors import capped

UNCHANGED_S = 10.0
"""Texts call progress unchanged if it has not changed for at least so long."""
NEVER_REGISTERED = ", which never registered"
"""Ends the description of a missing client that never registered."""
WAS_INTERRUPTED = "was interrupted while it waited"
"""Why a client cancels a barrier after Ctrl-C."""
BESIDE = "#"
"""Separates the two parts of the name of a job beside another: the other job, and the work beside it."""
DURABLE = "durable-"
"""Begins the name of such work, for a local tier that writes to the root. A number in hexadecimal digits follows."""
COMMAND = "command-"
"""Begins the name of such work, for a command that reads live versions. A number follows, too."""
_BESIDE_ANOTHER = re.compile(f"(.+){BESIDE}(?:{DURABLE}|{COMMAND})[0-9a-f]{{1,16}}", re.DOTALL)


def main_job(job: str) -> str:
    """Return the main job of a job beside it; return any other job itself."""
    match = _BESIDE_ANOTHER.fullmatch(job)
    return match[1] if match else job


class ReportedProgress(Protocol):
    """The progress that a client reports; the coordinator and the clients have different classes for it."""

    @property
    def phase(self) -> str: ...

    @property
    def step(self) -> int: ...

    @property
    def bytes_done(self) -> int: ...

    @property
    def bytes_total(self) -> int: ...


# --- clients ----------------------------------------------------------------------------------------------------


def task_name(job: str, client: int) -> str:
    """Return the name of a client in messages."""
    return f"client {client} ({job}/{client})"


def last_seen(progress: ReportedProgress, unchanged_s: float = 0.0) -> str:
    """Return the end of a message about a client: its last progress, "" if it reported none.

    Args:
        progress: The client's last report.
        unchanged_s: Seconds since its report last changed. A client that sends heartbeats but makes no progress is
            stuck.
    """
    if not progress.phase:
        return ""
    step = f" step {progress.step}" if progress.step else ""
    share = f", {progress.bytes_done / progress.bytes_total:.0%}" if progress.bytes_total > 0 else ""
    stuck = f", unchanged for {unchanged_s:.0f} s" if unchanged_s >= UNCHANGED_S else ""
    return f"; last seen in phase {progress.phase!r}{step}{share}{stuck}"


def fell_silent(who: str, silent_s: float, seen: str) -> str:
    """Describe the end of a lost client; ``seen`` is its `last_seen`."""
    return f"{who} sent no heartbeat for {silent_s:.1f} s{seen}"


def has_left(who: str, seen: str) -> str:
    """Describe the end of a client that said goodbye; ``seen`` is its `last_seen`."""
    return f"{who} has left{seen}"


def is_rival(who: str, attempt: int) -> str:
    """Return the error of a process that wants the client id of another, living process."""
    return (
        f"{who} of attempt {attempt} is another live process; every client needs a unique id, and a "
        "restarted job a higher attempt"
    )


def was_replaced(who: str) -> str:
    """Return the error of a process whose id another process has taken."""
    return f"another process has taken the place of {who}"


# --- verdicts ---------------------------------------------------------------------------------------------------


def voted_no(client: int, reason: str) -> str:
    """Return the error of a barrier at which a client voted no."""
    return f"client {client}: {reason or 'voted no without a reason'}"


def lost(name: str, fates: Iterable[str], num_clients: int) -> str:
    """Return the error of a barrier whose participants fell silent or left.

    Args:
        name: Of the barrier.
        fates: Descriptions of the ends of the first of these clients.
        num_clients: Number of all these clients.
    """
    return f"barrier {name!r} failed: {capped(fates, count=num_clients)}"


def timed_out(name: str, timeout_s: float, num_arrived: int, num_participants: int, missing: str) -> str:
    """Return the error of a barrier whose deadline passed; ``missing`` describes the clients that did not arrive."""
    arrived = f"{num_arrived}/{num_participants} arrived"
    return f"barrier {name!r} timed out after {timeout_s:g} s: {arrived}, missing {missing}"


def cancelled(name: str, who: str, reason: str) -> str:
    """Return the error of a barrier that a participant cancelled."""
    return f"barrier {name!r}: {who} {reason}"


def came_late(name: str, age_s: float, message: str) -> str:
    """Return the error of clients that came after a round had failed, when no other client came for a new round.

    Args:
        name: Of the barrier.
        age_s: Seconds from the failure of that round to the arrival of the first of these clients.
        message: The error of that round.
    """
    return (
        f"barrier {name!r}: the others had given up {age_s:.1f} s before this client came; that round failed: {message}"
    )


def gave_up(name: str, who: str) -> str:
    """Return the error of a round in which a client stopped waiting before it got a verdict."""
    return f"barrier {name!r}: {who} has given up waiting: it was cut off, interrupted, or its own time was over"


def is_elsewhere(name: str, who: str) -> str:
    """Return the error of an operation's round that waits for a client which is not (or no longer) in the operation."""
    return f"barrier {name!r}: {who} is not in this operation any more: it gave it up, or never heard that it had begun"


def wait_for_each_other(first: str, first_name: str, second: str, second_name: str) -> str:
    """Return the error of two rounds, each of which waits for a client that waits in the other."""
    return (
        f"{first} waits at {first_name!r}, {second} at {second_name!r}, each for the other; all clients must call the "
        "same operations in the same order"
    )


def topics_differ(name: str, first: int, first_topic: bytes, client: int, topic: bytes) -> str:
    """Return the error of a round to which two clients came with different topics."""
    return (
        f"barrier {name!r}: topics differ: client {first} came for {first_topic.hex() or 'none'}, "
        f"client {client} for {topic.hex() or 'none'}"
    )


def participants_differ(name: str, first: int, theirs: Sequence[int], client: int, ours: Sequence[int]) -> str:
    """Return the error of a round to which two clients came with different participants.

    Args:
        name: Of the barrier.
        first: The client that opened the round.
        theirs: Its participants.
        client: The other client.
        ours: The participants of the other client.
    """
    extra = [capped(sorted(more)) or "no one" for more in (set(theirs) - set(ours), set(ours) - set(theirs))]
    return (
        f"barrier {name!r}: participants differ: client {first} also expects {extra[0]}, "
        f"client {client} also expects {extra[1]}"
    )


def is_no_participant(name: str, client: int, participants: Sequence[int]) -> str:
    """Return the error of a client that comes to a barrier of others."""
    return f"barrier {name!r}: client {client} is not a participant; participants are {capped(participants)}"
