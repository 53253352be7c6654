"""Coordination over the key-value store of `torch.distributed`; the default under torchrun.

Only store keys are used, no collectives: a collective of a process group neither says who is missing nor mixes with
other threads. `dtckpt.coordination.torch_store_rounds` has the keys of barriers.

A no-voter writes the verdict *before* its arrival, so "all have arrived" without a verdict means that all votes were
ok. Whoever arrives last declares the pass. The first to arrive watches everyone's heartbeats, the others watch only
the first: N reads per tick in all instead of N squared. Should the first die, it is a lost participant itself, so its
loss is the verdict and nobody has to take over.

`Store.wait` is not used: a wait that times out writes to stderr, and never returns if the host is frozen. Clients poll.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TypeVar
from urllib.parse import quote

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, Store

from dtckpt import errors
from dtckpt.comm import fork_guard, rendezvous
from dtckpt.config import Config
from dtckpt.coordination import barrier_rules, identity, verdicts
from dtckpt.coordination.api import (
    ANYWHERE,
    BEGIN,
    DEFAULT_HEARTBEAT_TIMEOUT_S,
    YES,
    BarrierStatus,
    JobStatus,
    Member,
    Operation,
    Position,
    Progress,
    TaskStatus,
    Verdict,
    Vote,
)
from dtckpt.coordination.identity import Report
from dtckpt.coordination.torch_store_calls import Link, StoreCalls, StoreSilentError
from dtckpt.coordination.torch_store_rounds import Arrival, Joined, Meeting, Round, StoreRounds
from dtckpt.coordination.verdicts import Decision, Outcome

logger = logging.getLogger("dtckpt.coordination")
T = TypeVar("T")

MAX_POLLS_PER_S = 10_000
"""Polls of all clients together; a TCPStore answers several times as many."""
POLL_S = 0.005
"""Between two polls of a client that has waited for long: first they come faster, as most barriers are soon passed."""
GOODBYE_S = 1.0
"""How long a client that leaves waits until the store has taken its goodbye; nothing depends on it."""
KEPT_BARRIERS = 16
"""A client removes its keys of a barrier after this many later ones."""
NEVER_REGISTERED = "-"


@dataclass(frozen=True, slots=True)
class _Beat:
    """What a client writes under its heartbeat key; any change of it is a sign of life."""

    incarnation: int
    count: int = 0
    state: str = "registered"
    progress: Progress = field(default_factory=Progress)
    report: Report = field(default_factory=Report)

    def dump(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def load(cls, text: str) -> _Beat | None:
        if text == NEVER_REGISTERED:
            return None
        fields = json.loads(text)
        progress, report = Progress(**fields["progress"]), Report(**fields["report"])
        return cls(**{**fields, "progress": progress, "report": report})


class ProcessGroupCoordination:
    """Clients that meet at a `torch.distributed.Store`.

    Args:
        store: Any store that all clients reach; it is cloned, never used directly.
        member: Who this client is.
        heartbeat_timeout_s: Silence after which a client is lost; the same for all clients.
        host_client: The client whose process hosts the store, or None if no client does. That client leaves last.
        clock: Monotonic seconds.
        wall_clock: Seconds since the epoch.
    """

    def __init__(
        self,
        store: Store,
        member: Member,
        *,
        heartbeat_timeout_s: float = DEFAULT_HEARTBEAT_TIMEOUT_S,
        host_client: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.member = member
        self.heartbeat_timeout_s = heartbeat_timeout_s
        self._host_client = host_client
        self._clock = clock
        self._wall_clock = wall_clock
        self._rounds = StoreRounds(member, wall_clock)
        self._own_calls = identity.calls_of(member)
        prefix = f"dtckpt/{quote(member.job, safe='')}/{member.attempt}/"
        self._calls = StoreCalls(store, prefix, silence_s=heartbeat_timeout_s, clock=clock)
        self._tick_s = min(heartbeat_timeout_s / 10, 0.25)
        self._least_poll_s = min(member.num_clients / MAX_POLLS_PER_S, 0.25)
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._finished: deque[Round] = deque()
        self._open: dict[int, Round | None] = {}  # by call
        self._seen: dict[int, tuple[str, float]] = {}
        self._beat = _Beat(member.incarnation)
        self._progress = Progress()
        self._fenced = ""
        self._beating: threading.Thread | None = None
        self._leaving = threading.Event()
        self._wake = threading.Event()

    # --- registration and heartbeats --------------------------------------------------------------------------

    def register(self) -> None:
        fork_guard.claim_process()
        with self._lock:
            if self._beating is None:
                self._beat = self._run(self._claim_place)
                self._leaving.clear()
                self._beating = threading.Thread(target=self._send_heartbeats, daemon=True, name="dtckpt-heartbeat")
                self._beating.start()
        self._raise_if_fenced()

    def _claim_place(self, link: Link) -> _Beat:
        mine = _Beat(self.member.incarnation, report=self._own_calls.report)
        deadline = self._clock() + self.heartbeat_timeout_s
        found = holder = link.set_if(_beat_key(self.member.client), "", mine.dump())
        while found != mine.dump():
            beat = _Beat.load(found)
            if found != holder:
                raise errors.FencedError(
                    f"{self._who()} of attempt {self.member.attempt} is another live process; every client needs "
                    "an id of its own, and a restarted job a higher attempt"
                )
            is_silent = self._clock() > deadline
            if beat is None or beat.state == "left" or beat.incarnation == mine.incarnation or is_silent:
                found = holder = link.set_if(_beat_key(self.member.client), found, mine.dump())
            else:
                link.abandoned.wait(self._tick_s)
                (found,) = link.read(_beat_key(self.member.client))
        return mine

    def _send_heartbeats(self) -> None:
        link = self._calls.open_link()
        others = [client for client in range(self.member.num_clients) if client != self.member.client]
        try:
            while not identity.pause(self._wake, self._leaving, self.heartbeat_timeout_s / 6):
                self._send(link, "registered")
                if self._host_client == self.member.client:
                    self._observe(link, others)  # it leaves last, and must know by then who is lost
            self._send(link, "left")
        except errors.FencedError as error:
            self._fenced = error.message
            logger.error("%s", error)
        except dist.DistError as error:
            logger.warning("%s stops sending heartbeats: %s", self._who(), error)

    def _send(self, link: Link, state: str) -> None:
        beat = _Beat(self.member.incarnation, self._beat.count + 1, state, self._progress, self._own_calls.report)
        if link.set_if(_beat_key(self.member.client), self._beat.dump(), beat.dump()) != beat.dump():
            raise errors.FencedError(f"another process has taken the place of {self._who()}")
        self._beat = beat

    def _raise_if_fenced(self) -> None:
        if self._fenced:
            raise errors.FencedError(self._fenced)

    def heartbeat(self, progress: Progress) -> None:
        is_new_phase = progress.phase != self._progress.phase
        self._progress = progress
        if is_new_phase:
            self._wake.set()

    def leave(self) -> None:
        with self._lock:
            beating, self._beating = self._beating, None
        if beating is None or os.getpid() != self._pid:
            return
        self._leaving.set()
        self._wake.set()
        beating.join(GOODBYE_S)
        if self._host_client == self.member.client:
            # The store dies with this process, and the others may still be reading a verdict from it.
            self._run(self._wait_for_others_to_leave)
        self._calls.close()

    def _wait_for_others_to_leave(self, link: Link) -> None:
        others = [client for client in range(self.member.num_clients) if client != self.member.client]
        deadline = self._clock() + self.heartbeat_timeout_s
        while others and self._clock() < deadline and not link.abandoned.is_set():
            states = {state for state, _ in self._observe(link, others).values()}
            if states.isdisjoint(("registered", "suspect")):
                return
            link.abandoned.wait(self._tick_s)

    # --- barrier ------------------------------------------------------------------------------------------------

    def barrier(
        self,
        name: str,
        vote: Vote = YES,
        *,
        timeout_s: float,
        participants: Sequence[int] | None = None,
        collect: bool = False,
        operation: Operation | None = None,
        position: Position = ANYWHERE,
        moved_from: str | None = None,
    ) -> Verdict:
        """Meet as `Coordination.barrier` says.

        Args:
            moved_from: For a barrier that was begun at a coordinator: id of the latest round of its name that the
                client was told about there.
        """
        members = verdicts.validate_barrier(self.member, name, timeout_s, participants)
        self.register()
        call = self._own_calls.begin(of_operation=operation is not None)
        meeting = Meeting(name, operation, position, members, timeout_s, vote, collect, call, moved_from)
        with self._lock:
            self._open[call] = None
        if operation == BEGIN:
            self._own_calls.wait_at(name)
        begun = BEGIN
        try:
            round_, outcome, arrivals = self._run(lambda link: self._meet(link, meeting))
            if operation is not None and not outcome.code:
                calls = {client: arrival.call for client, arrival in arrivals.items()}
                begun = operation if operation.id else Operation(round_.claim.round_id, calls)
        finally:
            if operation is not None:
                self._own_calls.end(call, operation.id or begun.id)
            with self._lock:
                del self._open[call]
        with rendezvous.restart_advice():
            outcome.raise_failure()
        payloads = {client: arrival.payload for client, arrival in arrivals.items()} if collect else {}
        if None in payloads.values():
            raise errors.BarrierConflictError(
                f"barrier {name!r} passed elsewhere, and nobody there asked for the payloads"
            )
        known = {client: payload or b"" for client, payload in payloads.items()}
        return Verdict(name, round_.claim.generation, known, begun)

    def _meet(self, link: Link, meeting: Meeting) -> tuple[Round, Outcome, dict[int, Arrival]]:
        """Join a round and wait for its verdict; return them, with the arrivals where the call needs them."""
        begin = self._clock()
        joined = self._rounds.join(link, meeting)
        round_, outcome = joined.round, joined.outcome
        if outcome is None and not meeting.vote.ok:
            outcome = self._rounds.decide(link, round_, verdicts.voted_no(self.member.client, meeting.vote))
        if outcome is None:
            with self._lock:
                self._open[meeting.call] = round_
            outcome = self._rounds.arrive(link, joined, meeting) or self._wait(link, joined, meeting, begin)
        elif outcome.code and not round_.operation:
            self._rounds.note_told(link, round_, meeting)
        needs_arrivals = not outcome.code and (meeting.collect or meeting.operation == BEGIN)
        arrivals = self._rounds.arrivals(link, round_) if needs_arrivals else {}
        self._forget_old(link, round_)
        return round_, outcome, arrivals

    def _wait(self, link: Link, joined: Joined, meeting: Meeting, begin: float) -> Outcome:
        round_, former = joined.round, joined.former
        is_first = round_.claim.client == self.member.client
        watched = meeting.participants if is_first else (round_.claim.client,)
        # The others give the first a moment, so that at the deadline one client looks who is missing, not all.
        deadline = begin + meeting.timeout_s + (0.0 if is_first else self._tick_s)
        late_until = begin + barrier_rules.grace_s(self.heartbeat_timeout_s)
        next_look, now = 0.0, self._clock()
        next_log = now + verdicts.STILL_WAITING_S
        seen: dict[int, str] = {}
        while (outcome := self._rounds.verdict(link, round_)) is None:
            now = self._clock()
            self._raise_if_fenced()
            if link.abandoned.is_set():  # interrupted: nobody should wait for this client
                who = f"barrier {meeting.name!r}: {self._who()} was interrupted while it waited"
                return self._rounds.decide(link, round_, verdicts.failed(errors.BarrierCancelledError, who))
            if now >= next_look:
                next_look = now + self._tick_s
                if is_first and link.has(*round_.arrival_keys()):  # the last to arrive could not say so
                    return self._rounds.decide(link, round_, verdicts.PASSED)
                if lost := self._find_lost(link, watched):
                    return self._rounds.decide(link, round_, verdicts.lost(meeting.name, lost))
                if meeting.operation is not None and (
                    failure := self._find_elsewhere(link, round_, meeting, watched, seen)
                ):
                    return self._rounds.decide(link, round_, failure)
            if former is not None and now >= late_until:
                if self._rounds.are_all_late(link, round_):
                    age_s = max(self._wall_clock() - former.decided_at - (now - begin), 0.0)
                    return self._rounds.decide(link, round_, verdicts.came_late(meeting.name, age_s, former))
                former = None
            if now >= deadline:
                late = verdicts.timed_out(
                    meeting.name, meeting.timeout_s, len(meeting.participants), self._missing(link, round_)
                )
                return self._rounds.decide(link, round_, late)
            if is_first and now >= next_log:
                next_log = now + verdicts.STILL_WAITING_S
                missing = self._missing(link, round_)
                logger.warning("barrier %r: still waiting for %s", meeting.name, errors.capped(missing.values()))
            link.abandoned.wait(max(self._least_poll_s, min((now - begin) / 8, POLL_S)))
        return outcome

    def _find_elsewhere(
        self, link: Link, round_: Round, meeting: Meeting, watched: Sequence[int], seen: dict[int, str]
    ) -> Outcome | None:
        """Return the failure of a round for which a watched client will not come, or has given up waiting.

        Args:
            link: The store.
            round_: An open round of an operation.
            meeting: This client's call there.
            watched: Whom to look at.
            seen: The heartbeat of each that has been looked at; those that have not changed are passed over.
        """
        for client in watched:
            text = self._seen[client][0] if client in self._seen else NEVER_REGISTERED
            beat = _Beat.load(text)
            if client == self.member.client or beat is None or seen.get(client) == text:
                continue
            seen[client] = text
            report = beat.report
            stored = link.get(*round_.arrival_keys(client))
            if stored is not None:
                if Arrival.load(stored).call <= report.num_ended:
                    return verdicts.gave_up(meeting.name, self._who(client))
            elif round_.operation:
                begun = meeting.operation.calls.get(client, 0) if meeting.operation else 0
                if report.operation != round_.operation and report.num_ended >= begun:
                    return verdicts.is_elsewhere(meeting.name, self._who(client))
            elif report.waits_at and (failure := self._find_deadlock(link, round_, client, report.waits_at)):
                return failure
        return None

    def _find_deadlock(self, link: Link, round_: Round, client: int, name: str) -> Outcome | None:
        """Fail a round in which a client, whom this one waits for, waits for this one; return the failure."""
        other = self._rounds.latest(link, name, "") if name != round_.name else None
        if other is None or self.member.client not in other.claim.participants:
            return None
        if link.has(*other.arrival_keys(self.member.client)) or not link.has(*other.arrival_keys(client)):
            return None
        failure = verdicts.wait_for_each_other(self._who(), round_.name, self._who(client), name)
        decided = self._rounds.decide(link, other, failure)
        if decided.message != failure.message:
            return None
        decided = self._rounds.decide(link, round_, failure)
        if decided.message == failure.message:
            self._rounds.note_known(link, other, round_)
        return decided

    def publish(self, decision: Decision) -> None:
        """Write down how a round ended elsewhere, for clients that come here to ask.

        Raises:
            CoordinationError: The store cannot be reached.
        """
        self._run(lambda link: self._rounds.publish(link, decision))

    def settle(self, name: str, text: str) -> str:
        """Settle a question of the whole job once for all; return the answer, which an earlier caller may have given.

        Raises:
            CoordinationError: The store cannot be reached.
        """
        return self._run(lambda link: link.set_if(f"settled/{name}", "", text))

    def settled(self, name: str) -> str:
        """Return the answer to a question of the whole job, "" if there is none. Raises as `settle`."""
        return self._run(lambda link: link.get(f"settled/{name}")) or ""

    def _missing(self, link: Link, round_: Round) -> dict[int, str]:
        """Return how to call each participant that has not arrived."""
        missing = [client for client in round_.claim.participants if not link.has(*round_.arrival_keys(client))]
        self._observe(link, missing)
        return {client: self._who(client) + self._last_seen(client) for client in missing}

    def _forget_old(self, link: Link, round_: Round) -> None:
        with self._lock:
            self._finished.append(round_)
            old = self._finished.popleft() if len(self._finished) > KEPT_BARRIERS else None
        if old is not None:
            self._rounds.forget(link, old)

    # --- observing the others ---------------------------------------------------------------------------------

    def _observe(self, link: Link, clients: Sequence[int]) -> dict[int, tuple[str, float]]:
        """Return state and heartbeat age of each client, judged by this process's clock since the last change."""
        if not clients:
            return {}
        for client in clients:
            if client not in self._seen:
                link.set_if(_beat_key(client), "", NEVER_REGISTERED)  # read() needs keys that exist
        texts = link.read(*map(_beat_key, clients))
        now = self._clock()
        with self._lock:
            for client, text in zip(clients, texts, strict=True):
                if client not in self._seen or self._seen[client][0] != text:
                    self._seen[client] = (text, now)
            return {client: self._judge(client, now) for client in clients}

    def _judge(self, client: int, now: float) -> tuple[str, float]:
        text, since = self._seen[client]
        beat, age = _Beat.load(text), now - since
        if beat is None:
            return "unknown", age
        if beat.state == "left":
            return "left", age
        if age > self.heartbeat_timeout_s:
            return "lost", age
        return ("suspect" if age > self.heartbeat_timeout_s / 2 else "registered"), age

    def _find_lost(self, link: Link, clients: Sequence[int]) -> dict[int, str]:
        """Return what became of each client that is gone."""
        reasons = {}
        for client, (state, age) in self._observe(link, [c for c in clients if c != self.member.client]).items():
            if state == "lost":
                reasons[client] = f"{self._who(client)} sent no heartbeat for {age:.1f} s{self._last_seen(client)}"
            elif state == "left":
                reasons[client] = f"{self._who(client)} has left{self._last_seen(client)}"
        return reasons

    def _last_seen(self, client: int) -> str:
        beat = _Beat.load(self._seen[client][0])
        return verdicts.last_seen(beat.progress if beat else None)

    def status(self) -> JobStatus:
        return self._run(self._status)

    def _status(self, link: Link) -> JobStatus:
        tasks = []
        for client, (state, age) in self._observe(link, range(self.member.num_clients)).items():
            beat, name = _Beat.load(self._seen[client][0]), self.member.full_task_name(client)
            if beat is None:
                tasks.append(TaskStatus(client, state, name=name))
            else:
                tasks.append(TaskStatus(client, state, beat.incarnation, age, beat.progress, name=name))
        with self._lock:
            open_rounds = [round_ for round_ in self._open.values() if round_ is not None]
        waiting = [
            BarrierStatus(r.name, r.claim.generation, len(r.claim.participants), tuple(self._missing(link, r)))
            for r in open_rounds
        ]
        return JobStatus(self.member.job, self.member.num_clients, tuple(tasks), tuple(waiting))

    # --- the store --------------------------------------------------------------------------------------------

    def _run(self, work: Callable[[Link], T]) -> T:
        try:
            return self._calls.run(work, tick_s=self._tick_s)
        except (dist.DistError, StoreSilentError) as error:
            raise self._store_lost(str(error)) from error

    def _store_lost(self, reason: str) -> errors.CoordinationError:
        if self._host_client is None or self._host_client == self.member.client:
            return errors.CoordinatorUnavailableError(f"the store where clients meet cannot be reached: {reason}")
        return errors.ClientLostError(
            f"{self._who(self._host_client)}, whose process hosts the store where clients meet, is gone: {reason}",
            clients=(self._host_client,),
        )

    def _who(self, client: int | None = None) -> str:
        return verdicts.task_name(self.member.job, self.member.client if client is None else client)


def _beat_key(client: int) -> str:
    return f"beat/{client}"


def from_environment(
    member: Member, *, heartbeat_timeout_s: float = DEFAULT_HEARTBEAT_TIMEOUT_S
) -> ProcessGroupCoordination:
    """Meet at the store of the default process group, or at the one that ``MASTER_ADDR`` and ``MASTER_PORT`` name.

    Collective: Over all clients, if there is no default process group and several agents of torchrun have started the
    clients: their counts of restarts may differ, so the clients agree on an attempt first.

    Raises:
        ConfigError: There is no process group and the environment names no store.
        CoordinatorUnavailableError: The store cannot be reached.
        BarrierTimeoutError: The clients have to agree on their attempt, and some did not come.
    """
    agent_hosts = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if dist.is_initialized():
        store = dist.distributed_c10d._get_default_store()
        if rendezvous.is_stale():
            logger.warning("%s", rendezvous.RESTART_ADVICE)
    else:
        config = Config.from_environ()
        store = rendezvous.open_store(config)
        if agent_hosts and int(os.environ.get("LOCAL_WORLD_SIZE", config.num_clients)) < config.num_clients:
            topic = f"coordination/{quote(member.job, safe='')}"
            store, attempt = rendezvous.agree_on_attempt(store, topic, config)
            member = replace(member, attempt=attempt)
    return ProcessGroupCoordination(
        store, member, heartbeat_timeout_s=heartbeat_timeout_s, host_client=None if agent_hosts else 0
    )


def local_group(
    num_clients: int, *, job: str = "local", heartbeat_timeout_s: float = DEFAULT_HEARTBEAT_TIMEOUT_S
) -> list[ProcessGroupCoordination]:
    """Return clients that live in one process, one per thread, and meet in memory."""
    store, incarnation = HashStore(), secrets.randbits(62)
    return [
        ProcessGroupCoordination(
            store,
            Member(job, client, num_clients, incarnation=incarnation + client),
            heartbeat_timeout_s=heartbeat_timeout_s,
        )
        for client in range(num_clients)
    ]
