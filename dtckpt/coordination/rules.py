"""Rules and texts that the implementations share. Pure: no clock, no I/O."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from dtckpt import errors
from dtckpt.coordination.protocol import MAX_NAME_BYTES, Member, Progress, Vote, printable


@dataclass(frozen=True, slots=True)
class Outcome:
    """The decided end of a barrier: passed (no code), or the error that every participant raises."""

    code: str = ""
    message: str = ""
    clients: tuple[int, ...] = ()
    missing: tuple[int, ...] = ()

    def dump(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def load(cls, text: str) -> Outcome:
        fields = json.loads(text)
        return cls(fields["code"], fields["message"], tuple(fields["clients"]), tuple(fields["missing"]))

    def raise_failure(self) -> None:
        """Raise the error of a failed barrier; return for a passed one."""
        if self.code:
            facts = {"clients": self.clients, "missing": self.missing}
            raise errors.from_wire(self.code, self.message, **{name: ids for name, ids in facts.items() if ids})


@dataclass(frozen=True, slots=True)
class Decision:
    """How one barrier ended. ``payloads`` is None for who did not ask for them."""

    name: str
    generation: int
    participants: tuple[int, ...]
    outcome: Outcome
    payloads: Mapping[int, bytes] | None


PASSED = Outcome()
STILL_WAITING_S = 30.0
"""How often a waiting client says for whom it waits."""


def failed(cls: type[errors.DtckptError], message: str, **facts: tuple[int, ...]) -> Outcome:
    """Return the outcome that makes everyone raise ``cls(message)``."""
    return Outcome(code=cls.__name__, message=printable(message), **facts)


def voted_no(client: int, vote: Vote) -> Outcome:
    """Return the outcome of a no-vote."""
    code = vote.code or errors.ClientFailedError.__name__
    return Outcome(code=code, message=printable(f"client {client}: {vote.reason or 'voted no without a reason'}"))


def task_name(job: str, client: int) -> str:
    """Return how messages name a client."""
    return f"client {client} ({job}/{client})"


def last_seen(progress: Progress | None) -> str:
    """Return what a client last reported, for the end of a message about it; None means that it never registered."""
    if progress is None:
        return ", which never registered"
    if not progress.phase:
        return ""
    step = f" step {progress.step}" if progress.step else ""
    share = f", {progress.bytes_done / progress.bytes_total:.0%}" if progress.bytes_total > 0 else ""
    return f"; last seen in phase {progress.phase!r}{step}{share}"


def lost(name: str, gone: Mapping[int, str]) -> Outcome:
    """Return the outcome of a barrier of which these participants fell silent or left."""
    text = f"barrier {name!r} failed: {errors.capped(gone.values())}"
    return failed(errors.ClientLostError, text, clients=tuple(gone))


def timed_out(name: str, timeout_s: float, num_participants: int, missing: Mapping[int, str]) -> Outcome:
    """Return the outcome of a barrier whose deadline passed."""
    arrived = f"{num_participants - len(missing)}/{num_participants} arrived"
    text = f"barrier {name!r} timed out after {timeout_s:g} s: {arrived}, missing {errors.capped(missing.values())}"
    return failed(errors.BarrierTimeoutError, text, missing=tuple(missing))


def restarted(name: str, generation: int, who: str) -> Outcome:
    """Return the outcome of a barrier at which an earlier life of the client has arrived."""
    text = f"barrier {name!r}: {who} was restarted and is behind: an earlier process arrived at generation {generation}"
    return failed(errors.BarrierConflictError, f"{text}; restart the whole job with a higher attempt")


def validate_barrier(
    member: Member, name: str, timeout_s: float, participants: Sequence[int] | None
) -> tuple[int, ...]:
    """Check a barrier's arguments and return its participants, sorted.

    Raises:
        ConfigError: Name, timeout or participants cannot be used.
        BarrierConflictError: The client is not among the participants.
    """
    try:
        nbytes = len(name.encode())
    except UnicodeEncodeError as error:
        raise errors.ConfigError(f"barrier name {name!r} is not valid Unicode: {error.reason}") from None
    if not 0 < nbytes <= MAX_NAME_BYTES:
        raise errors.ConfigError(f"barrier name {name!r} has {nbytes} bytes; expected 1 to {MAX_NAME_BYTES}")
    if not 0 < timeout_s < math.inf:
        raise errors.ConfigError(f"barrier {name!r}: timeout_s is {timeout_s}; expected a positive number of seconds")
    everyone = range(member.num_clients)
    members = tuple(everyone) if participants is None else tuple(sorted(set(participants)))
    strangers = [client for client in members if client not in everyone]
    if strangers or (participants is not None and len(members) != len(participants)):
        raise errors.ConfigError(
            f"barrier {name!r}: participants {errors.capped(participants or ())} must be different ids "
            f"from 0 to {member.num_clients - 1}"
        )
    if member.client not in members:
        raise errors.BarrierConflictError(
            f"barrier {name!r}: client {member.client} is not a participant; participants are {errors.capped(members)}"
        )
    return members


@dataclass(frozen=True, slots=True)
class Claim:
    """What the first arrival says a barrier is; every later one must agree with it."""

    generation: int
    participants: tuple[int, ...]
    topic: bytes
    client: int

    def dump(self) -> str:
        return json.dumps({**asdict(self), "topic": self.topic.hex()})

    @classmethod
    def load(cls, text: str) -> Claim:
        fields = json.loads(text)
        topic = bytes.fromhex(fields["topic"])
        return cls(fields["generation"], tuple(fields["participants"]), topic, fields["client"])


def conflict(name: str, mine: Claim, theirs: Claim) -> Outcome | None:
    """Return the failure of an open barrier when an arrival does not agree with the first one."""
    if mine.participants != theirs.participants:
        ours, others = set(mine.participants), set(theirs.participants)
        extra = [errors.capped(sorted(more)) or "no one" for more in (others - ours, ours - others)]
        text = (
            f"participants differ: client {theirs.client} also expects {extra[0]}, "
            f"client {mine.client} also expects {extra[1]}"
        )
    elif mine.generation != theirs.generation:
        ahead, behind = (mine, theirs) if mine.generation > theirs.generation else (theirs, mine)
        text = (
            f"client {ahead.client} is ahead: it is at generation {ahead.generation}, "
            f"client {behind.client} at generation {behind.generation}; was one of them restarted?"
        )
    elif mine.topic != theirs.topic:
        text = (
            f"topics differ: client {theirs.client} came for {theirs.topic.hex() or 'none'}, "
            f"client {mine.client} for {mine.topic.hex() or 'none'}"
        )
    else:
        return None
    return failed(errors.BarrierConflictError, f"barrier {name!r}: {text}")
