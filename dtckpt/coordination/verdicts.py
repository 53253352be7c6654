"""Verdicts of barriers on the side of the clients: how a round ended, and the error that its participants raise.

Also checks the arguments of `Coordination.barrier`. Pure: no clock, no I/O.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from dtckpt import errors
from dtckpt.coordination import barrier_texts
from dtckpt.coordination.api import MAX_NAME_BYTES, Member, Progress, Vote, wire_text


@dataclass(frozen=True, slots=True)
class Outcome:
    """The verdict of a round: passed, or the error that every participant raises. Its fields are stored by name.

    Args:
        code: Class of `dtckpt.errors`; "": the round passed.
        message: Text of the error.
        clients: The clients that fell silent or left, if this is the reason.
        missing: The clients that did not arrive in time, if this is the reason.
        decided_at: Seconds since the epoch, for messages.
        is_retold: Whether the error comes from an earlier round, which the participants had missed.
    """

    code: str = ""
    message: str = ""
    clients: tuple[int, ...] = ()
    missing: tuple[int, ...] = ()
    decided_at: float = 0.0
    is_retold: bool = False

    def dump(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def load(cls, text: str) -> Outcome:
        fields = json.loads(text)
        return cls(**{**fields, "clients": tuple(fields["clients"]), "missing": tuple(fields["missing"])})

    def raise_failure(self, *, was_cut_off: bool = False) -> None:
        """Raise the error of a failed barrier; return for a passed one.

        Args:
            was_cut_off: Whether this client's arrival succeeded only at a later try; see `Coordination.barrier`.
        """
        if self.code:
            facts = {"clients": self.clients, "missing": self.missing}
            attributes = {name: ids for name, ids in facts.items() if ids}
            raise errors.from_wire(
                self.code,
                self.message,
                is_verdict=True,
                is_retold=self.is_retold,
                was_cut_off=was_cut_off,
                **attributes,
            )


@dataclass(frozen=True, slots=True)
class Decision:
    """The end of a round at the coordinator, as a client records it at the store for the others.

    Args:
        name: Of the barrier.
        operation: The operation that it belongs to; "": this is an operation's first round. None: it stands alone.
        participants: The clients that took part.
        round_id: The coordinator's id of it.
        outcome: The verdict.
        payloads: By client; None if this client did not ask for them.
    """

    name: str
    operation: str | None
    participants: tuple[int, ...]
    round_id: str
    outcome: Outcome
    payloads: Mapping[int, bytes] | None


PASSED = Outcome()
MAX_TIMEOUT_S = 7 * 86400.0
STILL_WAITING_S = 30.0
"""Seconds between two log lines of a waiting client about the clients that it waits for."""


def failed(
    cls: type[errors.DtckptError], message: str, *, clients: tuple[int, ...] = (), missing: tuple[int, ...] = ()
) -> Outcome:
    """Return the outcome that makes all clients raise ``cls(message)``."""
    return Outcome(cls.__name__, wire_text(message), clients, missing)


def voted_no(client: int, vote: Vote) -> Outcome:
    """Return the outcome of a no-vote."""
    code = vote.code or errors.ClientFailedError.__name__
    return Outcome(code=code, message=wire_text(barrier_texts.voted_no(client, vote.reason)))


def last_seen(progress: Progress | None) -> str:
    """Return the end of a message about a client: its last progress; None means that it never registered."""
    return barrier_texts.NEVER_REGISTERED if progress is None else barrier_texts.last_seen(progress)


def lost(name: str, fates: Mapping[int, str]) -> Outcome:
    """Return the outcome of a barrier of which these participants fell silent or left."""
    text = barrier_texts.lost(name, fates.values(), len(fates))
    return failed(errors.ClientLostError, text, clients=tuple(fates))


def timed_out(name: str, timeout_s: float, num_participants: int, missing: Mapping[int, str]) -> Outcome:
    """Return the outcome of a barrier whose deadline passed."""
    num_arrived = num_participants - len(missing)
    text = barrier_texts.timed_out(name, timeout_s, num_arrived, num_participants, errors.capped(missing.values()))
    return failed(errors.BarrierTimeoutError, text, missing=tuple(missing))


def cancelled(name: str, who: str) -> Outcome:
    """Return the outcome of a barrier at which a client was interrupted."""
    return failed(errors.BarrierCancelledError, barrier_texts.cancelled(name, who, barrier_texts.WAS_INTERRUPTED))


def came_late(name: str, age_s: float, missed: Outcome) -> Outcome:
    """Return the outcome of a round with arrivals only of clients that had missed an earlier, failed round."""
    return replace(missed, message=wire_text(barrier_texts.came_late(name, age_s, missed.message)), is_retold=True)


def gave_up(name: str, who: str) -> Outcome:
    """Return the outcome of a round in which a client stopped waiting before it got a verdict."""
    return failed(errors.BarrierCancelledError, barrier_texts.gave_up(name, who))


def is_elsewhere(name: str, who: str) -> Outcome:
    """Return the outcome of an operation's round that waits for a client which has left the operation."""
    return failed(errors.BarrierConflictError, barrier_texts.is_elsewhere(name, who))


def wait_for_each_other(first: str, first_name: str, second: str, second_name: str) -> Outcome:
    """Return the outcome of two rounds, each of which waits for a client that waits in the other."""
    text = barrier_texts.wait_for_each_other(first, first_name, second, second_name)
    return failed(errors.BarrierConflictError, text)


def topics_differ(name: str, first: int, first_topic: bytes, client: int, topic: bytes) -> Outcome:
    """Return the outcome of a round to which two clients came with different topics."""
    text = barrier_texts.topics_differ(name, first, first_topic, client, topic)
    return failed(errors.BarrierConflictError, text)


def participants_differ(name: str, first: int, theirs: Sequence[int], client: int, ours: Sequence[int]) -> Outcome:
    """Return the outcome of a round to which two clients came with different participants."""
    text = barrier_texts.participants_differ(name, first, theirs, client, ours)
    return failed(errors.BarrierConflictError, text)


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
    if not 0 < timeout_s <= MAX_TIMEOUT_S:
        raise errors.ConfigError(
            f"barrier {name!r}: timeout_s is {timeout_s}; expected a positive number of seconds, at most "
            f"{MAX_TIMEOUT_S:g}"
        )
    everyone = range(member.num_clients)
    members = tuple(everyone) if participants is None else tuple(sorted(set(participants)))
    strangers = [client for client in members if client not in everyone]
    if strangers or (participants is not None and len(members) != len(participants)):
        raise errors.ConfigError(
            f"barrier {name!r}: participants {errors.capped(participants or ())} must be different ids "
            f"from 0 to {member.num_clients - 1}"
        )
    if member.client not in members:
        raise errors.BarrierConflictError(barrier_texts.is_no_participant(name, member.client, members))
    return members
