"""Rounds of barriers at a `torch.distributed` store: their keys, and how clients join them without a server.

The rounds of one name (inside an operation: of the name and the operation's id) have these keys:

``open``              the claim of the latest round: by whom it was opened, with which participants, topic and position
``<n>/arrived/i``     client i's incarnation, call and payload in round n
``<n>/count``         only a hint when to look whether all have arrived
``<n>/verdict``       written with compare-and-set, so the first decision is everyone's

The next round is opened by replacing the claim of a decided one with compare-and-set, so all clients see one order of
rounds. `dtckpt.coordination.barrier_rules` says which round a call joins.
"""

from __future__ import annotations

import base64
import json
import secrets
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from urllib.parse import quote

from dtckpt.coordination import barrier_rules, barrier_texts, verdicts
from dtckpt.coordination.api import Member, Operation, Position, Vote
from dtckpt.coordination.torch_store_calls import Link
from dtckpt.coordination.verdicts import Decision, Outcome

KEPT_FAILURES = 8
"""Failed rounds since the last one that passed, of which a late client can still be told."""
ELSEWHERE = "*"
"""Stands for the incarnation of a client that arrived where the round was decided; see `StoreRounds.publish`."""
UNKNOWN = "-"


@dataclass(frozen=True, slots=True)
class Claim:
    """What the client that opens a round says about it.

    Args:
        generation: Number of the round among those of its name.
        round_id: The id of the operation that the round begins, if it does.
        client: Who opened it.
        participants: Who takes part.
        topic: Of the first vote.
        position: Of the first call.
        failed: Generation and position of rounds that failed since one passed.
        told: Id of the latest round that the client which opened this one was told about elsewhere.
        is_published: Whether the round was decided elsewhere.
        is_over: Whether the round's other keys have been removed.
    """

    generation: int
    round_id: str
    client: int
    participants: tuple[int, ...]
    topic: str = ""
    position: str = ""
    failed: tuple[tuple[int, str], ...] = ()
    told: str = ""
    is_published: bool = False
    is_over: bool = False

    def dump(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def load(cls, text: str) -> Claim:
        fields = json.loads(text)
        failed = tuple((generation, position) for generation, position in fields["failed"])
        return cls(**{**fields, "participants": tuple(fields["participants"]), "failed": failed})


@dataclass(frozen=True, slots=True)
class Arrival:
    """One client's arrival at a round; ``payload`` is None where nobody who was told the verdict knows it."""

    incarnation: str
    call: int
    is_late: bool
    payload: bytes | None

    def dump(self) -> str:
        payload = UNKNOWN if self.payload is None else base64.b64encode(self.payload).decode()
        return f"{self.incarnation} {self.call} {int(self.is_late)} {payload}"

    @classmethod
    def load(cls, text: str) -> Arrival:
        incarnation, call, is_late, payload = text.split(" ")
        return cls(incarnation, int(call), is_late == "1", None if payload == UNKNOWN else base64.b64decode(payload))


@dataclass(frozen=True, slots=True)
class Meeting:
    """One call of one client: what it asks for.

    Args:
        moved_from: For a call that was made at a coordinator first: id of the latest round of this name that the
            client was told about there. None: the call was made here.
    """

    name: str
    operation: Operation | None
    position: Position
    participants: tuple[int, ...]
    timeout_s: float
    vote: Vote
    collect: bool
    call: int
    moved_from: str | None = None


@dataclass(frozen=True, slots=True)
class Round:
    """One round of a name, and the keys where it takes place."""

    name: str
    operation: str | None
    claim: Claim

    @property
    def slot(self) -> str:
        # quote() leaves no "/" in a name, so no name can reach into the keys of another.
        name = quote(self.name, safe="")
        if self.operation:
            return f"in/{quote(self.operation, safe='')}/{name}"
        return f"alone/{name}" if self.operation is None else f"first/{name}"

    @property
    def open_key(self) -> str:
        return f"{self.slot}/open"

    @property
    def key(self) -> str:
        return f"{self.slot}/{self.claim.generation}"

    @property
    def verdict_key(self) -> str:
        return f"{self.key}/verdict"

    @property
    def count_key(self) -> str:
        return f"{self.key}/count"

    def arrival_keys(self, *clients: int) -> list[str]:
        key = self.key
        return [f"{key}/arrived/{client}" for client in clients or self.claim.participants]


@dataclass(frozen=True, slots=True)
class Joined:
    """The round that a call belongs to.

    Args:
        round: The round.
        outcome: Its verdict, if the call is told that one; None: the call takes part.
        former: The failed round that the client may be late for.
    """

    round: Round
    outcome: Outcome | None = None
    former: Outcome | None = None


class StoreRounds:
    """Joins and decides rounds for one client.

    Args:
        member: The client.
        wall_clock: Seconds since the epoch.
    """

    def __init__(self, member: Member, wall_clock: Callable[[], float] = time.time) -> None:
        self._member = member
        self._wall_clock = wall_clock

    def verdict(self, link: Link, round_: Round) -> Outcome | None:
        """Return how a round has ended."""
        text = link.get(round_.verdict_key)
        return None if text is None else Outcome.load(text)

    def decide(self, link: Link, round_: Round, outcome: Outcome) -> Outcome:
        """Propose a verdict and return the one that counts: whichever was stored first."""
        proposed = replace(outcome, decided_at=self._wall_clock())
        return Outcome.load(link.set_if(round_.verdict_key, "", proposed.dump()))

    def latest(self, link: Link, name: str, operation: str | None) -> Round | None:
        """Return the latest round of a name."""
        empty = Round(name, operation, Claim(0, "", 0, ()))
        text = link.get(empty.open_key)
        return replace(empty, claim=Claim.load(text)) if text else None

    def join(self, link: Link, meeting: Meeting) -> Joined:
        """Return the round that a new call joins, or that it is late for."""
        me, operation = self._member.client, None if meeting.operation is None else meeting.operation.id
        mine = Round(
            meeting.name,
            operation,
            Claim(
                0, secrets.token_hex(8), me, meeting.participants, meeting.vote.topic.hex(), meeting.position.text,
                told=meeting.moved_from or "",
            ),
        )  # fmt: skip
        text = link.set_if(mine.open_key, "", mine.claim.dump())
        former = None
        while text != mine.claim.dump():
            found = replace(mine, claim=Claim.load(text))
            outcome = verdicts.PASSED if found.claim.is_over else self.verdict(link, found)
            if operation or (found.claim.is_published and meeting.moved_from not in (None, found.claim.round_id)):
                return Joined(found, outcome)
            late = self._missed(link, meeting, found, outcome)
            if late is not None and late.outcome is not None:
                return late
            former = None if late is None else late.former
            if outcome is None:
                if (failure := self._contradiction(meeting, found.claim)) is not None:
                    return Joined(found, self.decide(link, found, failure))
                if not link.has(*found.arrival_keys(me)):
                    return Joined(found, None, former)
                # The call that had arrived was given up by this client, which now comes anew.
                outcome = self.decide(link, found, verdicts.gave_up(found.name, self._who()))
            failed = (*found.claim.failed, (found.claim.generation, found.claim.position)) if outcome.code else ()
            claim = replace(mine.claim, generation=found.claim.generation + 1, failed=failed[-KEPT_FAILURES:])
            mine = replace(mine, claim=claim)
            text = link.set_if(mine.open_key, text, claim.dump())
        return Joined(mine, None, former)

    def _missed(self, link: Link, meeting: Meeting, found: Round, outcome: Outcome | None) -> Joined | None:
        """Return the newest failed round that this client was not in and may be late for, told at once or not."""
        claim, me = found.claim, self._member.client
        failed = (*claim.failed, (claim.generation, claim.position)) if outcome and outcome.code else claim.failed
        for generation, position in reversed(failed):
            missed = replace(found, claim=replace(claim, generation=generation))
            if (
                position not in (barrier_rules.UNKNOWN_POSITION, meeting.position.text)
                or (failure := self.verdict(link, missed)) is None
            ):
                continue
            was_there = link.has(*missed.arrival_keys(me))
            if was_there and failure.is_retold:
                return None  # it was told of all before
            if was_there or failure.is_retold:
                continue
            if barrier_rules.is_late(me, is_certain=meeting.position.is_certain, missing=failure.missing):
                return Joined(missed, failure)
            return Joined(missed, None, failure)
        return None

    def _contradiction(self, meeting: Meeting, claim: Claim) -> Outcome | None:
        me, topic = self._member.client, meeting.vote.topic
        if claim.participants != meeting.participants:
            return verdicts.participants_differ(
                meeting.name, claim.client, claim.participants, me, meeting.participants
            )
        if claim.topic != topic.hex():
            return verdicts.topics_differ(meeting.name, claim.client, bytes.fromhex(claim.topic), me, topic)
        return None

    def arrival(self, meeting: Meeting, *, is_late: bool) -> str:
        """Return this client's arrival as it is stored."""
        return Arrival(str(self._member.incarnation), meeting.call, is_late, meeting.vote.payload).dump()

    def note_told(self, link: Link, round_: Round, meeting: Meeting) -> None:
        """Write down that this client knows a failed round's verdict, so that it is not told again."""
        (key,) = round_.arrival_keys(self._member.client)
        link.set_if(key, "", self.arrival(meeting, is_late=True))

    def note_known(self, link: Link, *rounds: Round) -> None:
        """Write down that whoever is in one of these failed rounds knows how all of them failed."""
        known = {
            client
            for round_ in rounds
            for client in round_.claim.participants
            if link.has(*round_.arrival_keys(client))
        }
        for round_ in rounds:
            for client in known.intersection(round_.claim.participants):
                (key,) = round_.arrival_keys(client)
                link.set_if(key, "", Arrival(ELSEWHERE, 0, True, None).dump())

    def arrive(self, link: Link, joined: Joined, meeting: Meeting) -> Outcome | None:
        """Arrive with an ok vote; return the verdict if that is the last arrival."""
        round_ = joined.round
        (key,) = round_.arrival_keys(self._member.client)
        text = self.arrival(meeting, is_late=joined.former is not None)
        if link.set_if(key, "", text) != text:  # another thread of this client is here
            return self.decide(link, round_, verdicts.gave_up(round_.name, self._who()))
        is_last = link.add(round_.count_key) >= len(round_.claim.participants)
        return self.decide(link, round_, verdicts.PASSED) if is_last and link.has(*round_.arrival_keys()) else None

    def arrivals(self, link: Link, round_: Round) -> dict[int, Arrival]:
        """Return the arrivals at a passed round, by client."""
        texts = link.read(*round_.arrival_keys())
        return {client: Arrival.load(text) for client, text in zip(round_.claim.participants, texts, strict=True)}

    def are_all_late(self, link: Link, round_: Round) -> bool:
        """Whether all who have arrived may have come for an earlier round."""
        return all(Arrival.load(text).is_late for key in round_.arrival_keys() if (text := link.get(key)) is not None)

    def publish(self, link: Link, decision: Decision) -> None:
        """Write down how a round ended elsewhere; what has been decided here already stands."""
        claim = Claim(0, decision.round_id, self._member.client, decision.participants, is_published=True)
        mine = Round(decision.name, decision.operation, claim)
        text = link.set_if(mine.open_key, "", claim.dump())
        while text != mine.claim.dump():
            found = replace(mine, claim=Claim.load(text))
            is_open = not found.claim.is_over and self.verdict(link, found) is None
            if decision.operation or found.claim.round_id == decision.round_id:
                mine = found
                break
            if is_open:
                if found.claim.told == decision.round_id:
                    return  # whoever waits there was told of this one, and waits for the next
                mine = found
                break
            mine = replace(mine, claim=replace(claim, generation=found.claim.generation + 1))
            text = link.set_if(mine.open_key, text, mine.claim.dump())
        if not decision.outcome.code:  # who reads the verdict reads the arrivals next, so they come first
            for client, key in zip(decision.participants, mine.arrival_keys(), strict=True):
                payload = None if decision.payloads is None else decision.payloads[client]
                link.set_if(key, "", Arrival(ELSEWHERE, 0, False, payload).dump())
        self.decide(link, mine, decision.outcome)

    def forget(self, link: Link, round_: Round) -> None:
        """Remove keys of a round that nobody can still be reading: the own and, as first participant, the shared."""
        me = self._member.client
        link.delete(*round_.arrival_keys(me))
        if me != round_.claim.participants[0]:
            return
        if round_.operation:
            link.delete(round_.open_key)
        else:  # without its verdict the round would look open
            link.set_if(round_.open_key, round_.claim.dump(), replace(round_.claim, failed=(), is_over=True).dump())
        link.delete(round_.verdict_key)
        link.delete(round_.count_key)

    def _who(self) -> str:
        return barrier_texts.task_name(self._member.job, self._member.client)
