"""What belongs to the life of this process and outlives a connection: its incarnation and its generation counts.

A client that leaves and connects again is still the same process to the others, so it must not begin counting anew.
"""

from __future__ import annotations

import functools
import os
import secrets
import threading
from collections import Counter

from dtckpt.coordination.protocol import Member

_lock = threading.Lock()
_generations: Counter[tuple[Member, str, tuple[int, ...] | None]] = Counter()


def incarnation() -> int:
    """Return this process's random id; a forked process has another one."""
    return _incarnation(os.getpid())


@functools.cache
def _incarnation(_pid: int) -> int:
    return secrets.randbits(63) or 1


def _key(member: Member, name: str, participants: tuple[int, ...]) -> tuple[Member, str, tuple[int, ...] | None]:
    # One entry per name ever used: "everyone" must not cost a tuple of thousands each time.
    return member, name, participants if len(participants) < member.num_clients else None


def generation(member: Member, name: str, participants: tuple[int, ...]) -> int:
    """Return how many barriers of this name and these participants the member has seen decided."""
    with _lock:
        return _generations[_key(member, name, participants)]


def end_generation(member: Member, name: str, participants: tuple[int, ...], ended: int) -> None:
    """Note that generation ``ended`` is decided. Repeating it, as two threads at one barrier do, changes nothing."""
    with _lock:
        _generations[_key(member, name, participants)] = ended + 1


def pause(wake: threading.Event, leaving: threading.Event, interval_s: float) -> bool:
    """Wait until the next heartbeat is due or wanted; return whether there shall be no more."""
    wake.wait(interval_s)
    wake.clear()
    return leaving.is_set()
