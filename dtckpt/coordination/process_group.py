"""Coordination over the key-value store of `torch.distributed`; the default under torchrun.

Only store keys are used, no collectives: a collective of a process group neither says who is missing nor mixes with
other threads. The keys of a barrier (name, participants, generation) are

``open``       per name: claim of the first arrival; agreeing with it is what being at the same barrier means
``arrived/i``  client i's incarnation and payload
``count``      only a hint when to look whether all have arrived
``verdict``    written with compare-and-set, so the first decision is everyone's

A no-voter writes the verdict *before* its arrival, so "all have arrived" without a verdict means that all votes were
ok. Whoever arrives last declares the pass. The first to arrive watches everyone's heartbeats, the others watch only
the first: N reads per tick in all instead of N squared. Should the first die, it is a lost participant itself, so its
loss is the verdict and nobody has to take over.

`Store.wait` is not used: a wait that times out writes to stderr, and never returns if the host is frozen. Clients poll.
"""

from __future__ import annotations

import base64
import hashlib
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

from dtckpt import errors, forks, rendezvous
from dtckpt.config import Config
from dtckpt.coordination import process, rules
from dtckpt.coordination.protocol import (
    DEFAULT_HEARTBEAT_TIMEOUT_S,
    YES,
    BarrierStatus,
    JobStatus,
    Member,
    Progress,
    TaskStatus,
    Verdict,
    Vote,
)
from dtckpt.coordination.rules import Claim, Decision, Outcome
from dtckpt.coordination.store import Link, StoreCalls, StoreSilentError

logger = logging.getLogger("dtckpt.coordination")
T = TypeVar("T")

MAX_POLLS_PER_S = 10_000
"""Polls of all clients together; a TCPStore answers several times as many."""
POLL_S = 0.005
"""Between two polls of a client that has waited for long: first they come faster, as most barriers are soon passed."""
KEPT_BARRIERS = 16
"""A client removes its keys of a barrier after this many later ones."""
NEVER_REGISTERED = "-"
ELSEWHERE = "*"
"""Stands for the incarnation of a client that arrived where the barrier was decided; see `publish`."""


@dataclass(frozen=True, slots=True)
class _Beat:
    """What a client writes under its heartbeat key; any change of it is a sign of life."""

    incarnation: int
    count: int = 0
    state: str = "registered"
    progress: Progress = field(default_factory=Progress)

    def dump(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def load(cls, text: str) -> _Beat | None:
        if text == NEVER_REGISTERED:
            return None
        fields = json.loads(text)
        return cls(**{**fields, "progress": Progress(**fields["progress"])})


@dataclass(frozen=True, slots=True)
class _Meeting:
    """One barrier as one client takes part in it, and the keys where it takes place."""

    name: str
    claim: Claim
    timeout_s: float
    vote: Vote
    collect: bool

    @property
    def open_key(self) -> str:
        # quote() leaves no "/" in a name, so no name can reach into the keys of another.
        return f"barrier/{quote(self.name, safe='')}/open"

    @property
    def key(self) -> str:
        members = hashlib.sha256(json.dumps(self.claim.participants).encode()).hexdigest()[:16]
        return f"barrier/{quote(self.name, safe='')}/{members}.{self.claim.generation}"

    @property
    def verdict_key(self) -> str:
        return f"{self.key}/verdict"

    def arrival_keys(self, *clients: int) -> list[str]:
        key = self.key
        return [f"{key}/arrived/{client}" for client in clients or self.claim.participants]


class ProcessGroupCoordination:
    """Clients that meet at a `torch.distributed.Store`.

    Args:
        store: Any store that all clients reach; it is cloned, never used directly.
        member: Who this client is.
        heartbeat_timeout_s: Silence after which a client is lost; the same for all clients.
        host_client: The client whose process hosts the store, or None if no client does. That client leaves last.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        store: Store,
        member: Member,
        *,
        heartbeat_timeout_s: float = DEFAULT_HEARTBEAT_TIMEOUT_S,
        host_client: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.member = member
        self.heartbeat_timeout_s = heartbeat_timeout_s
        self._host_client = host_client
        self._clock = clock
        prefix = f"dtckpt/{quote(member.job, safe='')}/{member.attempt}/"
        self._calls = StoreCalls(store, prefix, silence_s=heartbeat_timeout_s, clock=clock)
        self._tick_s = min(heartbeat_timeout_s / 10, 0.25)
        self._least_poll_s = min(member.num_clients / MAX_POLLS_PER_S, 0.25)
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._finished: deque[_Meeting] = deque()
        self._open: list[_Meeting] = []
        self._seen: dict[int, tuple[str, float]] = {}
        self._beat = _Beat(member.incarnation)
        self._progress = Progress()
        self._fenced = ""
        self._beating: threading.Thread | None = None
        self._leaving = threading.Event()
        self._wake = threading.Event()

    # --- registration and heartbeats --------------------------------------------------------------------------

    def register(self) -> None:
        forks.claim_process()
        with self._lock:
            if self._beating is None:
                self._beat = self._run(self._claim_place)
                self._leaving.clear()
                self._beating = threading.Thread(target=self._send_heartbeats, daemon=True, name="dtckpt-heartbeat")
                self._beating.start()
        self._raise_if_fenced()

    def _claim_place(self, link: Link) -> _Beat:
        mine = _Beat(self.member.incarnation)
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
        try:
            while not process.pause(self._wake, self._leaving, self.heartbeat_timeout_s / 6):
                self._send(link, "registered")
            self._send(link, "left")
        except errors.FencedError as error:
            self._fenced = error.message
            logger.error("%s", error)
        except dist.DistError as error:
            logger.warning("%s stops sending heartbeats: %s", self._who(), error)

    def _send(self, link: Link, state: str) -> None:
        beat = _Beat(self.member.incarnation, self._beat.count + 1, state, self._progress)
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
        beating.join(self.heartbeat_timeout_s)
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
    ) -> Verdict:
        members = rules.validate_barrier(self.member, name, timeout_s, participants)
        self.register()
        generation = process.generation(self.member, name, members)
        claim = Claim(generation, members, vote.topic, self.member.client)
        meeting = _Meeting(name, claim, timeout_s, vote, collect)
        with self._lock:
            self._open.append(meeting)
        try:
            outcome, payloads = self._run(lambda link: self._meet(link, meeting))
        finally:
            with self._lock:
                self._open.remove(meeting)
        # Only a known verdict ends the generation: a call that raised before may be repeated and is the same barrier.
        process.end_generation(self.member, name, members, generation)
        with rendezvous.advised():
            outcome.raise_failure()
        return Verdict(name, generation, payloads)

    def _meet(self, link: Link, meeting: _Meeting) -> tuple[Outcome, dict[int, bytes]]:
        outcome = self._stored(link, meeting)
        if outcome is None:
            outcome = self._arrive_and_wait(link, meeting)
        elif not outcome.code:
            self._check_own_arrival(link, meeting, link.get(*meeting.arrival_keys(self.member.client)))
        payloads = {}
        if meeting.collect and not outcome.code:
            arrivals = link.read(*meeting.arrival_keys())
            if ELSEWHERE in arrivals:
                text = f"barrier {meeting.name!r} passed elsewhere, and nobody there asked for the payloads"
                raise errors.BarrierConflictError(text)
            for client, arrival in zip(meeting.claim.participants, arrivals, strict=True):
                payloads[client] = base64.b64decode(arrival.partition(" ")[2])
        self._forget_old(link, meeting)
        return outcome, payloads

    def _arrive_and_wait(self, link: Link, meeting: _Meeting) -> Outcome:
        deadline = self._clock() + meeting.timeout_s
        first = self._join(link, meeting)
        if isinstance(first, Outcome):
            return first
        if not meeting.vote.ok:
            return self._decide(link, meeting, rules.voted_no(self.member.client, meeting.vote))
        arrival = f"{self.member.incarnation} {base64.b64encode(meeting.vote.payload).decode()}"
        (key,) = meeting.arrival_keys(self.member.client)
        self._check_own_arrival(link, meeting, link.set_if(key, "", arrival))
        is_last = link.add(f"{meeting.key}/count") >= len(meeting.claim.participants)
        if is_last and link.has(*meeting.arrival_keys()):
            return self._decide(link, meeting, rules.PASSED)
        return self._wait(link, meeting, deadline, first)

    def _join(self, link: Link, meeting: _Meeting) -> int | Outcome:
        """Agree with the first arrival on what this barrier is; return its client, or the failure."""
        mine = meeting.claim.dump()
        found = link.set_if(meeting.open_key, "", mine)
        while found != mine:
            theirs = Claim.load(found)
            failure = rules.conflict(meeting.name, meeting.claim, theirs)
            if failure is None:
                return theirs.client
            other = replace(meeting, claim=theirs)
            if other.key == meeting.key:
                return self._decide(link, meeting, failure)
            is_behind = (
                theirs.participants == meeting.claim.participants and theirs.generation > meeting.claim.generation
            )
            if is_behind or not link.has(other.verdict_key):
                self._decide(link, other, failure)
                return self._decide(link, meeting, failure)
            found = link.set_if(meeting.open_key, found, mine)
        return self.member.client

    def _wait(self, link: Link, meeting: _Meeting, deadline: float, first: int) -> Outcome:
        is_first = first == self.member.client
        watched = meeting.claim.participants if is_first else (first,)
        # The others give the first a moment, so that at the deadline one client looks who is missing, not all.
        deadline += 0.0 if is_first else self._tick_s
        next_look, begin = 0.0, self._clock()
        next_log = begin + rules.STILL_WAITING_S
        while (outcome := self._stored(link, meeting)) is None:
            self._raise_if_fenced()
            now = self._clock()
            if link.abandoned.is_set():
                text = f"barrier {meeting.name!r}: {self._who()} was interrupted while it waited"
                return self._decide(link, meeting, rules.failed(errors.BarrierCancelledError, text))
            if now >= next_look:
                next_look = now + self._tick_s
                if is_first and link.has(*meeting.arrival_keys()):
                    return self._decide(link, meeting, rules.PASSED)
                if lost := self._find_lost(link, watched):
                    return self._decide(link, meeting, rules.lost(meeting.name, lost))
            if now >= deadline:
                late = rules.timed_out(
                    meeting.name, meeting.timeout_s, len(meeting.claim.participants), self._missing(link, meeting)
                )
                return self._decide(link, meeting, late)
            if is_first and now >= next_log:
                next_log = now + rules.STILL_WAITING_S
                missing = self._missing(link, meeting)
                logger.warning("barrier %r: still waiting for %s", meeting.name, errors.capped(missing.values()))
            link.abandoned.wait(max(self._least_poll_s, min((now - begin) / 8, POLL_S)))
        return outcome

    def publish(self, decision: Decision) -> None:
        """Write down how a barrier ended elsewhere, for clients that come here to ask; what is here already stands.

        Raises:
            CoordinationError: The store cannot be reached.
        """
        claim = Claim(decision.generation, decision.participants, b"", self.member.client)
        self._run(lambda link: self._write_down(link, _Meeting(decision.name, claim, 0.0, YES, False), decision))

    def _write_down(self, link: Link, meeting: _Meeting, decision: Decision) -> None:
        if not decision.outcome.code:  # who reads the verdict reads the arrivals next, so they come first
            for client, key in zip(decision.participants, meeting.arrival_keys(), strict=True):
                payload = None if decision.payloads is None else base64.b64encode(decision.payloads[client]).decode()
                link.set_if(key, "", ELSEWHERE if payload is None else f"{ELSEWHERE} {payload}")
        self._decide(link, meeting, decision.outcome)

    def settle(self, name: str, text: str) -> str:
        """Settle a question of the whole job once for all; return the answer, which an earlier caller may have given.

        Raises:
            CoordinationError: The store cannot be reached.
        """
        return self._run(lambda link: link.set_if(f"settled/{name}", "", text))

    def settled(self, name: str) -> str:
        """Return the answer to a question of the whole job, "" if there is none. Raises as `settle`."""
        return self._run(lambda link: link.get(f"settled/{name}")) or ""

    def _stored(self, link: Link, meeting: _Meeting) -> Outcome | None:
        text = link.get(meeting.verdict_key)
        return None if text is None else Outcome.load(text)

    def _decide(self, link: Link, meeting: _Meeting, outcome: Outcome) -> Outcome:
        """Propose a verdict and return the one that counts: whichever was stored first."""
        return Outcome.load(link.set_if(meeting.verdict_key, "", outcome.dump()))

    def _check_own_arrival(self, link: Link, meeting: _Meeting, arrival: str | None) -> None:
        """Refuse to stand on the arrival of an earlier life of this client."""
        if (arrival or "").partition(" ")[0] not in (str(self.member.incarnation), ELSEWHERE):
            failure = rules.restarted(meeting.name, meeting.claim.generation, self._who())
            self._decide(link, meeting, failure)
            failure.raise_failure()

    def _missing(self, link: Link, meeting: _Meeting) -> dict[int, str]:
        """Return how to call each participant that has not arrived."""
        missing = [client for client in meeting.claim.participants if not link.has(*meeting.arrival_keys(client))]
        self._observe(link, missing)
        return {client: self._who(client) + self._last_seen(client) for client in missing}

    def _forget_old(self, link: Link, meeting: _Meeting) -> None:
        """Remove keys of a barrier that nobody can still be reading: the own and, as first participant, the shared."""
        with self._lock:
            self._finished.append(meeting)
            old = self._finished.popleft() if len(self._finished) > KEPT_BARRIERS else None
        if old is None:
            return
        link.delete(*old.arrival_keys(self.member.client))
        if self.member.client == old.claim.participants[0]:
            claim = link.get(old.open_key)
            if claim and replace(old, claim=Claim.load(claim)).key == old.key:
                link.set_if(old.open_key, claim, "")  # without its verdict the barrier would look open
            link.delete(old.verdict_key)
            link.delete(f"{old.key}/count")

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
        return rules.last_seen(beat.progress if beat else None)

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
            meetings = list(self._open)
        barriers = [
            BarrierStatus(m.name, m.claim.generation, len(m.claim.participants), tuple(self._missing(link, m)))
            for m in meetings
        ]
        return JobStatus(self.member.job, self.member.num_clients, tuple(tasks), tuple(barriers))

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
        return rules.task_name(self.member.job, self.member.client if client is None else client)


def _beat_key(client: int) -> str:
    return f"beat/{client}"


def from_environment(
    member: Member, *, heartbeat_timeout_s: float = DEFAULT_HEARTBEAT_TIMEOUT_S
) -> ProcessGroupCoordination:
    """Meet at the store of the default process group, or at the one that ``MASTER_ADDR`` and ``MASTER_PORT`` name.

    Collective: Over all clients, if there is no default process group.

    Raises:
        ConfigError: There is no process group and the environment names no store.
        CoordinatorUnavailableError: The store cannot be reached.
        BarrierTimeoutError: There is no process group, and other clients did not come to the store.
    """
    agent_hosts = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if dist.is_initialized():
        store = dist.distributed_c10d._get_default_store()
        if rendezvous.is_stale():
            logger.warning("%s", rendezvous.ADVICE)
    else:
        config = Config.from_environ()
        topic = f"coordination/{quote(member.job, safe='')}"
        store, attempt = rendezvous.meet(rendezvous.open_store(config), topic, config)
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
