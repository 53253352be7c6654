"""Rounds of barriers at a `torch.distributed` store: their keys, and how clients join and decide them without a server.

One use of a barrier's name is a *round*. The rounds of one name share a prefix. A barrier that belongs to no operation
has ``alone/<name>``, the first barrier of operations ``first/<name>``, and a later barrier of one operation
``in/<operation>/<name>``. Below the prefix are these keys:

``open``              the `RoundHeader` of the latest round: its number, its opener, participants, topic, position
``<n>/arrived/<i>``   the `Arrival` of client i in round n
``<n>/count``         only a hint when to look whether all have arrived
``<n>/verdict``       the `Outcome` of round n, written with compare-and-set: the first decision is for all

A save by three clients, with two barriers::

    prefix     first/save%2Fbegin                    in/<id>/save%2Fwritten
    client 0   opens round 4, arrives                arrives
    client 1   joins round 4, arrives                joins round 0, arrives last: passed
    client 2   joins round 4, arrives last: passed   opens round 0, arrives
                         |
                         +-- the round_id in the header of round 4 is the operation's <id>

Invariants:

* All clients see one order of rounds: to open the next round, a client must replace the header of a decided round with
  compare-and-set.
* A round has at most one verdict: every writer uses compare-and-set on an absent key.
* A no-voter first writes the verdict, and then perhaps its arrival. So if all have arrived without a verdict, all votes
  were ok.
* A round without keys does not look open: its header has ``is_over``.

`dtckpt.coordination.barrier_rules` decides which round a call joins.
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
from dtckpt.coordination.torch_store_calls import StoreConnection
from dtckpt.coordination.verdicts import Decision, Outcome

KEPT_FAILURES = 8
"""Number of failed rounds since the last passed round that a late client can still learn of."""
DECIDED_ELSEWHERE = "*"
"""Stands for the incarnation of a client that arrived at the coordinator; see `StoreRounds.publish`."""
NO_PAYLOAD = "-"
"""Stands for a payload that no client at the store knows."""


@dataclass(frozen=True, slots=True)
class RoundHeader:
    """Facts about a round, from the client that opens it. The store holds the names of the fields.

    Args:
        generation: Number of the round among the rounds of its name.
        round_id: The id of the operation that the round begins, if it begins one.
        client: The client that opened the round.
        participants: The clients that take part.
        topic: Topic of the first vote, in hexadecimal digits.
        position: Position of the first call.
        failed: Generation and position of each round that failed since the last passed round, at most `KEPT_FAILURES`.
        told: If the opener's call came from a coordinator: id of the latest round of this name whose verdict the client
            got there, "" for none. None: the call was made here.
        is_published: Whether the round was decided elsewhere (at a coordinator) and only its verdict was written here.
        is_over: Whether the round is decided and its other keys have been removed.
    """

    generation: int
    round_id: str
    client: int
    participants: tuple[int, ...]
    topic: str = ""
    position: str = ""
    failed: tuple[tuple[int, str], ...] = ()
    told: str | None = None
    is_published: bool = False
    is_over: bool = False

    def dump(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def load(cls, text: str) -> RoundHeader:
        fields = json.loads(text)
        failed = tuple((generation, position) for generation, position in fields["failed"])
        return cls(**{**fields, "participants": tuple(fields["participants"]), "failed": failed})


@dataclass(frozen=True, slots=True)
class Arrival:
    """One client's arrival at a round.

    Args:
        incarnation: Of the client; `DECIDED_ELSEWHERE` if another client wrote the arrival down.
        call: Number of the client's call.
        is_late: Whether the client may have come for an earlier, failed round.
        payload: None: no client at the store knows it.
    """

    incarnation: str
    call: int
    is_late: bool
    payload: bytes | None

    def dump(self) -> str:
        payload = NO_PAYLOAD if self.payload is None else base64.b64encode(self.payload).decode()
        return f"{self.incarnation} {self.call} {int(self.is_late)} {payload}"

    @classmethod
    def load(cls, text: str) -> Arrival:
        incarnation, call, is_late, payload = text.split(" ")
        return cls(incarnation, int(call), is_late == "1", None if payload == NO_PAYLOAD else base64.b64decode(payload))


@dataclass(frozen=True, slots=True)
class BarrierCall:
    """One call of `Coordination.barrier` by this client.

    Args:
        number: Of the call in the life of the process; see `dtckpt.coordination.identity.BarrierCalls`.
        moved_from: For a call that was made at a coordinator first: id of the latest round of this name whose verdict
            the client got there, "" for none. None: the call was made here.
    """

    name: str
    operation: Operation | None
    position: Position
    participants: tuple[int, ...]
    timeout_s: float
    vote: Vote
    collect: bool
    number: int
    moved_from: str | None = None


@dataclass(frozen=True, slots=True)
class Round:
    """One round of a name, and its keys.

    Args:
        name: Of the barrier.
        operation: The operation that the round belongs to; "": it begins one. None: it stands alone.
        header: The header that its opener wrote.
    """

    name: str
    operation: str | None
    header: RoundHeader

    @property
    def prefix(self) -> str:
        # quote() leaves no "/" in a name, so no name can reach into the keys of another.
        name = quote(self.name, safe="")
        if self.operation:
            return f"in/{quote(self.operation, safe='')}/{name}"
        return f"alone/{name}" if self.operation is None else f"first/{name}"

    @property
    def open_key(self) -> str:
        return f"{self.prefix}/open"

    @property
    def key(self) -> str:
        return f"{self.prefix}/{self.header.generation}"

    @property
    def verdict_key(self) -> str:
        return f"{self.key}/verdict"

    @property
    def count_key(self) -> str:
        return f"{self.key}/count"

    def arrival_keys(self, *clients: int) -> list[str]:
        """Return the keys of these clients' arrivals, by default of all participants'."""
        key = self.key
        return [f"{key}/arrived/{client}" for client in clients or self.header.participants]


@dataclass(frozen=True, slots=True)
class JoinedRound:
    """The round that a call belongs to.

    Args:
        round: The round.
        outcome: Its verdict, if the call gets it at once; None: the call takes part in the round.
        missed: The verdict of an earlier, failed round that the client may be late for; None: it is not late.
    """

    round: Round
    outcome: Outcome | None = None
    missed: Outcome | None = None


class StoreRounds:
    """Joins and decides rounds for one client.

    Args:
        member: The client.
        wall_clock: Seconds since the epoch.
    """

    def __init__(self, member: Member, wall_clock: Callable[[], float] = time.time) -> None:
        self._member = member
        self._wall_clock = wall_clock

    def verdict(self, store: StoreConnection, round_: Round) -> Outcome | None:
        """Return the end of a round, None if it is open."""
        text = store.get(round_.verdict_key)
        return None if text is None else Outcome.load(text)

    def decide(self, store: StoreConnection, round_: Round, outcome: Outcome) -> Outcome:
        """Propose a verdict; return the valid one, which is the first that was stored."""
        # The time of day, because clients on other hosts read it; only error texts name it, and no decision uses it.
        proposal = replace(outcome, decided_at=self._wall_clock())
        return Outcome.load(store.compare_set(round_.verdict_key, "", proposal.dump()))

    def latest(self, store: StoreConnection, name: str, operation: str | None) -> Round | None:
        """Return the latest round of a name, None if there was none."""
        empty = Round(name, operation, RoundHeader(0, "", 0, ()))
        text = store.get(empty.open_key)
        return replace(empty, header=RoundHeader.load(text)) if text else None

    def join(self, store: StoreConnection, call: BarrierCall) -> JoinedRound:
        """Return the round that a new call joins, or the round for which it is late.

        Each pass of the loop looks at the latest round. The loop ends when the call belongs to that round, or when
        compare-and-set has made this client's own proposal the latest round. Another client may have been faster; then
        the next pass looks at that client's round.
        """
        me, operation = self._member.client, None if call.operation is None else call.operation.id
        own = Round(
            call.name,
            operation,
            RoundHeader(
                0, secrets.token_hex(8), me, call.participants, call.vote.topic.hex(), call.position.text,
                told=call.moved_from,
            ),
        )  # fmt: skip
        # The random id makes this header unique: equal text means that this client has opened the round.
        text = store.compare_set(own.open_key, "", own.header.dump())
        missed = None
        while text != own.header.dump():
            latest = replace(own, header=RoundHeader.load(text))
            # The verdict of a round that is over is removed; the code below only needs to know that the round is
            # decided.
            outcome = verdicts.PASSED if latest.header.is_over else self.verdict(store, latest)
            # A later barrier of an operation takes place once. A round that the coordinator decided is this call's
            # round if the client left the coordinator before it got the verdict.
            is_news = latest.header.is_published and call.moved_from not in (None, latest.header.round_id)
            if operation or is_news:
                return JoinedRound(latest, outcome)
            late = self._missed_round(store, call, latest, outcome)
            if late is not None and late.outcome is not None:
                return late
            missed = None if late is None else late.missed
            if outcome is None:
                if (failure := self._contradiction(call, latest.header)) is not None:
                    return JoinedRound(latest, self.decide(store, latest, failure))
                if not store.has(*latest.arrival_keys(me)):
                    return JoinedRound(latest, None, missed)
                # This client gave up the call that had arrived there, and now comes anew.
                outcome = self.decide(store, latest, verdicts.gave_up(latest.name, self._who()))
            # A passed round had all participants, so no client can be late for an earlier, failed round.
            failed = (*latest.header.failed, (latest.header.generation, latest.header.position)) if outcome.code else ()
            header = replace(own.header, generation=latest.header.generation + 1, failed=failed[-KEPT_FAILURES:])
            own = replace(own, header=header)
            text = store.compare_set(own.open_key, text, header.dump())
        return JoinedRound(own, None, missed)

    def _missed_round(
        self, store: StoreConnection, call: BarrierCall, latest: Round, outcome: Outcome | None
    ) -> JoinedRound | None:
        """Return the newest failed round that this client missed and may be late for.

        Args:
            store: The store.
            call: This client's call.
            latest: The latest round of its name.
            outcome: Verdict of the latest round, None if it is open.

        Returns:
            With ``outcome``: the client is late for that round, and gets its verdict. With ``missed``: it may be late.
        """
        header, me = latest.header, self._member.client
        failed = (*header.failed, (header.generation, header.position)) if outcome and outcome.code else header.failed
        # The newest first: a late client gets the latest of the verdicts that it missed.
        for generation, position in reversed(failed):
            round_ = replace(latest, header=replace(header, generation=generation))
            if (
                position not in (barrier_rules.UNKNOWN_POSITION, call.position.text)
                or (failure := self.verdict(store, round_)) is None
            ):
                continue
            was_there = store.has(*round_.arrival_keys(me))
            # The verdict of a retold round contains the failed rounds before it, so a client of that round knows them.
            if was_there and failure.is_retold:
                return None
            if was_there or failure.is_retold:
                continue
            if barrier_rules.is_late(me, is_certain=call.position.is_certain, missing=failure.missing):
                return JoinedRound(round_, failure)
            return JoinedRound(round_, None, failure)
        return None

    def _contradiction(self, call: BarrierCall, header: RoundHeader) -> Outcome | None:
        me, topic = self._member.client, call.vote.topic
        if header.participants != call.participants:
            return verdicts.participants_differ(call.name, header.client, header.participants, me, call.participants)
        if header.topic != topic.hex():
            return verdicts.topics_differ(call.name, header.client, bytes.fromhex(header.topic), me, topic)
        return None

    def arrival(self, call: BarrierCall, *, is_late: bool) -> str:
        """Return this client's arrival as it is stored."""
        return Arrival(str(self._member.incarnation), call.number, is_late, call.vote.payload).dump()

    def note_told(self, store: StoreConnection, round_: Round, call: BarrierCall) -> None:
        """Record that this client knows a failed round's verdict, so that it does not get the verdict again."""
        (key,) = round_.arrival_keys(self._member.client)
        store.compare_set(key, "", self.arrival(call, is_late=True))

    def note_known(self, store: StoreConnection, *rounds: Round) -> None:
        """Record that each client in one of these failed rounds knows how all of them failed."""
        known = {
            client
            for round_ in rounds
            for client in round_.header.participants
            if store.has(*round_.arrival_keys(client))
        }
        for round_ in rounds:
            for client in known.intersection(round_.header.participants):
                (key,) = round_.arrival_keys(client)
                store.compare_set(key, "", Arrival(DECIDED_ELSEWHERE, 0, True, None).dump())

    def arrive(self, store: StoreConnection, joined: JoinedRound, call: BarrierCall) -> Outcome | None:
        """Arrive with an ok vote; return the verdict if this is the last arrival."""
        round_ = joined.round
        (key,) = round_.arrival_keys(self._member.client)
        text = self.arrival(call, is_late=joined.missed is not None)
        if store.compare_set(key, "", text) != text:  # another thread of this client is here
            return self.decide(store, round_, verdicts.gave_up(round_.name, self._who()))
        # The count only spares the others a read of all keys: a client may die between its arrival and its count.
        is_last = store.add(round_.count_key) >= len(round_.header.participants)
        return self.decide(store, round_, verdicts.PASSED) if is_last and store.has(*round_.arrival_keys()) else None

    def arrivals(self, store: StoreConnection, round_: Round) -> dict[int, Arrival]:
        """Return the arrivals at a passed round, by client."""
        texts = store.multi_get(*round_.arrival_keys())
        return {client: Arrival.load(text) for client, text in zip(round_.header.participants, texts, strict=True)}

    def are_all_late(self, store: StoreConnection, round_: Round) -> bool:
        """Whether all clients that have arrived may have come for an earlier round."""
        return all(Arrival.load(text).is_late for key in round_.arrival_keys() if (text := store.get(key)) is not None)

    def publish(self, store: StoreConnection, decision: Decision) -> None:
        """Record the verdict of a round that was decided elsewhere; an existing verdict stays."""
        header = RoundHeader(0, decision.round_id, self._member.client, decision.participants, is_published=True)
        own = Round(decision.name, decision.operation, header)
        text = store.compare_set(own.open_key, "", header.dump())
        while text != own.header.dump():
            latest = replace(own, header=RoundHeader.load(text))
            is_open = not latest.header.is_over and self.verdict(store, latest) is None
            if decision.operation or latest.header.round_id == decision.round_id:
                own = latest
                break
            if is_open:
                if latest.header.told in (None, decision.round_id) and not latest.header.is_published:
                    return  # the client that opened it does not wait for this verdict: it has come for a later round
                own = latest
                break
            own = replace(own, header=replace(header, generation=latest.header.generation + 1))
            text = store.compare_set(own.open_key, text, own.header.dump())
        if not decision.outcome.code:  # a client that reads the verdict reads the arrivals next, so they come first
            for client, key in zip(decision.participants, own.arrival_keys(), strict=True):
                payload = None if decision.payloads is None else decision.payloads[client]
                store.compare_set(key, "", Arrival(DECIDED_ELSEWHERE, 0, False, payload).dump())
        self.decide(store, own, decision.outcome)

    def forget(self, store: StoreConnection, round_: Round) -> None:
        """Remove keys of a round that no client can be reading any more.

        Each client removes its own arrival; the first participant also removes the keys that all share.
        """
        me = self._member.client
        store.delete(*round_.arrival_keys(me))
        if me != round_.header.participants[0]:
            return
        if round_.operation:
            store.delete(round_.open_key)
        else:  # without its verdict the round would look open
            # Only if it is still the latest header: the header of a newer round stays.
            header = replace(round_.header, failed=(), is_over=True)
            store.compare_set(round_.open_key, round_.header.dump(), header.dump())
        store.delete(round_.verdict_key)
        store.delete(round_.count_key)

    def _who(self) -> str:
        return barrier_texts.task_name(self._member.job, self._member.client)
