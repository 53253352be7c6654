"""Coordination through the key-value store of `torch.distributed`: barriers and heartbeats; the default under torchrun.

There is no server with rules: each client reads and writes keys, and decides a round when it sees the reason. No
collectives are used: a collective of a process group neither names missing clients nor works beside other threads.
`dtckpt.coordination.torch_store_rounds` has the keys of barriers; a client's heartbeat is the key ``beat/<client>``.

The verdicts of a round, and the clients that decide them:

============================== =======================================================================================
verdict                        decided by
============================== =======================================================================================
failed, a client voted no      that client, *before* its arrival. So "all have arrived" without a verdict means that
                               all votes were ok
passed                         the client that arrives last; should it die before it can say so, the opener of the round
failed, a client is lost       the opener, which watches the heartbeats of all participants; the others watch only the
                               opener. All clients together so make N reads per tick instead of N squared. Should the
                               opener die, its loss is the verdict, and no other client has to take over
failed, timeout                the first client whose deadline passes; all but the opener wait a moment longer
============================== =======================================================================================

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

from dtckpt import errors
from dtckpt.comm import default_process_group, fork_guard, torch_private
from dtckpt.comm.torch_private import HashStore, Store
from dtckpt.config import DEFAULT_HEARTBEAT_TIMEOUT_S, Config
from dtckpt.coordination import barrier_rules, barrier_texts, identity, verdicts
from dtckpt.coordination.api import (
    BEGIN,
    NO_POSITION,
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
from dtckpt.coordination.identity import OperationReport
from dtckpt.coordination.torch_store_calls import StoreCalls, StoreConnection, StoreSilentError
from dtckpt.coordination.torch_store_rounds import Arrival, BarrierCall, JoinedRound, Round, StoreRounds
from dtckpt.coordination.verdicts import Decision, Outcome

logger = logging.getLogger("dtckpt.coordination")
T = TypeVar("T")

MAX_POLLS_PER_S = 10_000
"""Bound on the polls of all clients together; a TCPStore answers several times as many."""
POLL_S = 0.005
"""Pause between two polls of a client that has waited for long. First it polls faster, as most barriers pass soon."""
GOODBYE_S = 1.0
"""How long a client that leaves waits until the store has its goodbye; nothing depends on it."""
KEPT_BARRIERS = 16
"""A client removes its keys of a barrier after this many later barriers."""
NO_HEARTBEAT = "-"
"""Value of the heartbeat key of a client that never registered."""


@dataclass(frozen=True, slots=True)
class _Heartbeat:
    """The value of a client's heartbeat key; any change is a sign of life. The store holds its fields by name."""

    incarnation: int
    count: int = 0
    state: str = "registered"
    progress: Progress = field(default_factory=Progress)
    report: OperationReport = field(default_factory=OperationReport)

    def dump(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def load(cls, text: str) -> _Heartbeat | None:
        if text == NO_HEARTBEAT:
            return None
        fields = json.loads(text)
        progress, report = Progress(**fields["progress"]), OperationReport(**fields["report"])
        return cls(**{**fields, "progress": progress, "report": report})


class TorchStoreCoordination:
    """Clients that meet at a `torch.distributed.Store`.

    Args:
        store: Any store that all clients reach; it is cloned, never used directly.
        member: Who this client is.
        heartbeat_timeout_s: Silence after which a client is lost; equal on all clients.
        host_client: The client whose process hosts the store, and which therefore leaves last. None: no client does.
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
        self._calls = identity.calls_of(member)
        prefix = f"dtckpt/{quote(member.job, safe='')}/{member.attempt}/"
        self._store_calls = StoreCalls(store, prefix, silence_s=heartbeat_timeout_s, clock=clock)
        self._tick_s = min(heartbeat_timeout_s / 10, 0.25)
        self._least_poll_s = min(member.num_clients / MAX_POLLS_PER_S, 0.25)
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._finished: deque[Round] = deque()
        self._open: dict[int, Round | None] = {}  # round by number of the call; None: not joined yet
        self._seen: dict[int, tuple[str, float]] = {}  # heartbeat of each client, and when this process first read it
        self._last_sent = _Heartbeat(member.incarnation)
        self._progress = Progress()
        self._fenced = ""
        self._heartbeat_thread: threading.Thread | None = None
        self._leaving = threading.Event()
        self._wake = threading.Event()

    # --- registration and heartbeats --------------------------------------------------------------------------

    def register(self) -> None:
        fork_guard.claim_process()
        with self._lock:
            if self._heartbeat_thread is None:
                self._last_sent = self._run(self._claim_place)
                self._leaving.clear()
                self._heartbeat_thread = threading.Thread(
                    target=self._send_heartbeats, daemon=True, name="dtckpt-heartbeat"
                )
                self._heartbeat_thread.start()
        self._raise_if_fenced()

    def _claim_place(self, store: StoreConnection) -> _Heartbeat:
        """Make this process's heartbeat the heartbeat of the client; return it.

        Another process may hold the place. If its heartbeat changes while this process watches, it is alive and this
        process is fenced. If it is unchanged for the heartbeat timeout, or says goodbye, this process replaces it.
        """
        key, own = _heartbeat_key(self.member.client), _Heartbeat(self.member.incarnation, report=self._calls.report)
        deadline = self._clock() + self.heartbeat_timeout_s
        stored = holder = store.compare_set(key, "", own.dump())
        while stored != own.dump():
            if stored != holder:
                raise errors.FencedError(barrier_texts.is_rival(self._who(), self.member.attempt))
            beat, is_silent = _Heartbeat.load(stored), self._clock() > deadline
            if beat is None or beat.state == "left" or beat.incarnation == own.incarnation or is_silent:
                stored = holder = store.compare_set(key, stored, own.dump())
            else:
                store.abandoned.wait(self._tick_s)
                (stored,) = store.multi_get(key)
        return own

    def _send_heartbeats(self) -> None:
        # A separate connection: a barrier's call without an answer must not hold heartbeats back.
        store = self._store_calls.open_connection()
        others = [client for client in range(self.member.num_clients) if client != self.member.client]
        try:
            while not identity.wait_for_heartbeat(self._wake, self._leaving, self.heartbeat_timeout_s / 6):
                self._send(store, "registered")
                if self._host_client == self.member.client:
                    self._observe(store, others)  # this client leaves last, and must know the lost clients by then
            self._send(store, "left")
        except errors.FencedError as error:
            self._fenced = error.message
            logger.error("%s", error)
        except dist.DistError as error:
            logger.warning("%s stops sending heartbeats: %s", self._who(), error)

    def _send(self, store: StoreConnection, state: str) -> None:
        # Replaces only this process's own last heartbeat: so a process that has lost its place learns this, and changes
        # nothing.
        beat = _Heartbeat(self.member.incarnation, self._last_sent.count + 1, state, self._progress, self._calls.report)
        if store.compare_set(_heartbeat_key(self.member.client), self._last_sent.dump(), beat.dump()) != beat.dump():
            raise errors.FencedError(barrier_texts.was_replaced(self._who()))
        self._last_sent = beat

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
            thread, self._heartbeat_thread = self._heartbeat_thread, None
        # A forked process inherits this object: it must not say goodbye for its parent.
        if thread is None or os.getpid() != self._pid:
            return
        self._leaving.set()
        self._wake.set()
        thread.join(GOODBYE_S)
        if self._host_client == self.member.client:
            # The store dies with this process, and the others may still be reading a verdict from it.
            self._run(self._wait_for_others_to_leave)
        self._store_calls.close()

    def _wait_for_others_to_leave(self, store: StoreConnection) -> None:
        others = [client for client in range(self.member.num_clients) if client != self.member.client]
        deadline = self._clock() + self.heartbeat_timeout_s
        while others and self._clock() < deadline and not store.abandoned.is_set():
            # A lost client reads no verdict any more, and a client that never registered waits for no verdict.
            states = {state for state, _ in self._observe(store, others).values()}
            if states.isdisjoint(("registered", "suspect")):
                return
            store.abandoned.wait(self._tick_s)

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
        position: Position = NO_POSITION,
        moved_from: str | None = None,
        call: int | None = None,
    ) -> Verdict:
        """Wait at a barrier as `Coordination.barrier` does.

        Args:
            moved_from: For a call that was made at a coordinator first: id of the latest round of its name whose
                verdict the client got there, "" for none.
            call: Number of the call, if the caller has begun it and will end it.
        """
        members = verdicts.validate_barrier(self.member, name, timeout_s, participants)
        self.register()
        number = self._calls.begin(of_operation=operation is not None) if call is None else call
        request = BarrierCall(name, operation, position, members, timeout_s, vote, collect, number, moved_from)
        with self._lock:
            self._open[number] = None
        if operation == BEGIN:
            self._calls.wait_at(name)
        begun = BEGIN
        try:
            round_, outcome, arrivals = self._run(lambda store: self._join_and_wait(store, request))
            if operation is not None and not outcome.code:
                calls = {client: arrival.call for client, arrival in arrivals.items()}
                begun = operation if operation.id else Operation(round_.header.round_id, calls)
        finally:
            # With a verdict or without: heartbeats now report the end of this call, so a round that still waits for it
            # fails.
            if operation is not None and call is None:
                self._calls.end(number, operation.id or begun.id)
            with self._lock:
                del self._open[number]
        with default_process_group.restart_advice():
            outcome.raise_failure()
        payloads = {client: arrival.payload for client, arrival in arrivals.items()} if collect else {}
        if None in payloads.values():
            raise errors.BarrierConflictError(
                f"barrier {name!r} passed elsewhere, and no client there asked for the payloads"
            )
        known = {client: payload or b"" for client, payload in payloads.items()}
        return Verdict(name, round_.header.generation, known, begun)

    def _join_and_wait(self, store: StoreConnection, call: BarrierCall) -> tuple[Round, Outcome, dict[int, Arrival]]:
        """Join a round and wait for its verdict; return both, with the arrivals if the call needs them."""
        begin = self._clock()
        joined = self._rounds.join(store, call)
        round_, outcome = joined.round, joined.outcome
        if outcome is None and not call.vote.ok:
            outcome = self._rounds.decide(store, round_, verdicts.voted_no(self.member.client, call.vote))
        if outcome is None:
            with self._lock:
                self._open[call.number] = round_
            outcome = self._rounds.arrive(store, joined, call) or self._wait_for_verdict(store, joined, call, begin)
        elif outcome.code and not round_.operation:
            self._rounds.note_told(store, round_, call)
        # An operation's first round needs them, too: they hold the number of each client's call, see `_is_elsewhere`.
        needs_arrivals = not outcome.code and (call.collect or call.operation == BEGIN)
        arrivals = self._rounds.arrivals(store, round_) if needs_arrivals else {}
        self._forget_old(store, round_)
        return round_, outcome, arrivals

    def _wait_for_verdict(
        self, store: StoreConnection, joined: JoinedRound, call: BarrierCall, begin: float
    ) -> Outcome:
        round_, missed = joined.round, joined.missed
        is_opener = round_.header.client == self.member.client
        watched = call.participants if is_opener else (round_.header.client,)
        # The others give the opener a moment, so that at the deadline only one client looks for missing clients.
        deadline = begin + call.timeout_s + (0.0 if is_opener else self._tick_s)
        late_until = begin + barrier_rules.grace_s(self.heartbeat_timeout_s)
        next_look, now = 0.0, self._clock()
        next_log = now + verdicts.STILL_WAITING_S
        seen: dict[int, str] = {}
        # The order of the checks is the precedence of verdicts: interrupted, passed, lost, elsewhere, late, timed out.
        while (outcome := self._rounds.verdict(store, round_)) is None:
            now = self._clock()
            self._raise_if_fenced()
            if store.abandoned.is_set():  # interrupted: no other client should wait for this one
                return self._rounds.decide(store, round_, verdicts.cancelled(call.name, self._who()))
            if self._is_given_up(call):
                return self._rounds.decide(store, round_, verdicts.gave_up(call.name, self._who()))
            if now >= next_look:
                next_look = now + self._tick_s
                if is_opener and store.has(*round_.arrival_keys()):  # the last client did not write it
                    return self._rounds.decide(store, round_, verdicts.PASSED)
                if lost := self._find_lost(store, watched):
                    return self._rounds.decide(store, round_, verdicts.lost(call.name, lost))
                if call.operation is not None and (
                    failure := self._failure_by_reports(store, round_, call, watched, seen)
                ):
                    return self._rounds.decide(store, round_, failure)
            if missed is not None and now >= late_until:
                if self._rounds.are_all_late(store, round_):
                    age_s = max(self._wall_clock() - missed.decided_at - (now - begin), 0.0)
                    return self._rounds.decide(store, round_, verdicts.came_late(call.name, age_s, missed))
                missed = None
            if now >= deadline:
                late = verdicts.timed_out(
                    call.name, call.timeout_s, len(call.participants), self._missing(store, round_)
                )
                return self._rounds.decide(store, round_, late)
            if is_opener and now >= next_log:
                next_log = now + verdicts.STILL_WAITING_S
                missing = self._missing(store, round_)
                logger.warning("barrier %r: still waiting for %s", call.name, errors.capped(missing.values()))
            # An eighth of the wait so far, so each client learns a verdict soon. At most POLL_S; longer with many
            # clients, so that the store can answer all.
            store.abandoned.wait(max(self._least_poll_s, min((now - begin) / 8, POLL_S)))
        return outcome

    def _is_given_up(self, call: BarrierCall) -> bool:
        """Whether the client has left the operation of this call, as after an interrupt of the thread that needs it."""
        return call.operation is not None and call.number <= self._calls.report.num_ended

    def _failure_by_reports(
        self, store: StoreConnection, round_: Round, call: BarrierCall, watched: Sequence[int], seen: dict[int, str]
    ) -> Outcome | None:
        """Return the failure of a round if a heartbeat shows that its client will not come, or has given up waiting.

        Args:
            store: The store.
            round_: An open round of an operation.
            call: This client's call there.
            watched: Clients whose heartbeats to read.
            seen: The last heartbeat read of each client. A client with the same heartbeat is skipped.
        """
        for client in watched:
            # Read a moment ago, when `_find_lost` looked.
            text = self._seen[client][0] if client in self._seen else NO_HEARTBEAT
            beat = _Heartbeat.load(text)
            if client == self.member.client or beat is None or seen.get(client) == text:
                continue
            seen[client] = text
            report = beat.report
            stored = store.get(*round_.arrival_keys(client))
            if stored is not None:
                if Arrival.load(stored).call <= report.num_ended:
                    return verdicts.gave_up(call.name, self._who(client))
            elif round_.operation:
                if self._is_elsewhere(call, client, report):
                    return verdicts.is_elsewhere(call.name, self._who(client))
            elif report.waits_at and (failure := self._fail_deadlock(store, round_, client, report.waits_at)):
                return failure
        return None

    @staticmethod
    def _is_elsewhere(call: BarrierCall, client: int, report: OperationReport) -> bool:
        """Whether a client that has not arrived at a later round of an operation is not in the operation any more."""
        if call.operation is None or report.operation == call.operation.id:
            return False
        begun = call.operation.calls.get(client)
        # If a coordinator began the operation, a client that waits in a first round may not know the operation yet.
        return not report.waits_at if begun is None else report.num_ended >= begun

    def _fail_deadlock(self, store: StoreConnection, round_: Round, client: int, name: str) -> Outcome | None:
        """Fail two rounds in which two clients wait for each other; return the failure, None without such a deadlock.

        Args:
            store: The store.
            round_: The round where this client waits for ``client``.
            client: A participant of it that has not arrived.
            name: The barrier at which ``client`` waits.
        """
        other = self._rounds.latest(store, name, "") if name != round_.name else None
        # Deadlocked: that client has arrived at the other round, and this client is a participant that has not.
        if other is None or self.member.client not in other.header.participants:
            return None
        if store.has(*other.arrival_keys(self.member.client)) or not store.has(*other.arrival_keys(client)):
            return None
        failure = verdicts.wait_for_each_other(self._who(), round_.name, self._who(client), name)
        # Both clients may find the deadlock at once. Clients decide the rounds in one order, so one client decides
        # both.
        for each in sorted((round_, other), key=lambda deadlocked: deadlocked.verdict_key):
            if self._rounds.decide(store, each, failure).message != failure.message:
                return None
        self._rounds.note_known(store, other, round_)
        return failure

    def publish(self, decision: Decision) -> None:
        """Record the end of a round at the coordinator, for clients that come to the store instead.

        Raises:
            CoordinationError: The store cannot be reached.
        """
        self._run(lambda store: self._rounds.publish(store, decision))

    def record_once(self, name: str, text: str) -> str:
        """Record a decision of the whole job, unless there is one; return the recorded decision.

        Raises:
            CoordinationError: The store cannot be reached.
        """
        return self._run(lambda store: store.compare_set(f"settled/{name}", "", text))

    def recorded(self, name: str) -> str:
        """Return a decision of `record_once`, "" if there is none. Raises as that does."""
        return self._run(lambda store: store.get(f"settled/{name}")) or ""

    def _missing(self, store: StoreConnection, round_: Round) -> dict[int, str]:
        """Return a description of each participant that has not arrived."""
        missing = [client for client in round_.header.participants if not store.has(*round_.arrival_keys(client))]
        self._observe(store, missing)
        return {client: self._who(client) + self._last_seen(client) for client in missing}

    def _forget_old(self, store: StoreConnection, round_: Round) -> None:
        with self._lock:
            self._finished.append(round_)
            old = self._finished.popleft() if len(self._finished) > KEPT_BARRIERS else None
        if old is not None:
            self._rounds.forget(store, old)

    # --- observing the others ---------------------------------------------------------------------------------

    def _observe(self, store: StoreConnection, clients: Sequence[int]) -> dict[int, tuple[str, float]]:
        """Read heartbeats; return the state of each client, and the seconds since its heartbeat last changed.

        Seconds are of this process's monotonic clock; no other host's clock matters.
        """
        if not clients:
            return {}
        for client in clients:
            if client not in self._seen:
                store.compare_set(_heartbeat_key(client), "", NO_HEARTBEAT)  # multi_get() needs keys that exist
        texts = store.multi_get(*map(_heartbeat_key, clients))
        now = self._clock()
        with self._lock:
            for client, text in zip(clients, texts, strict=True):
                if client not in self._seen or self._seen[client][0] != text:
                    self._seen[client] = (text, now)
            return {client: self._judge(client, now) for client in clients}

    def _judge(self, client: int, now: float) -> tuple[str, float]:
        text, since = self._seen[client]
        beat, age = _Heartbeat.load(text), now - since
        if beat is None:
            return "unknown", age
        if beat.state == "left":
            return "left", age
        if age > self.heartbeat_timeout_s:
            return "lost", age
        return ("suspect" if age > self.heartbeat_timeout_s / 2 else "registered"), age

    def _find_lost(self, store: StoreConnection, clients: Sequence[int]) -> dict[int, str]:
        """Describe the end of each of these clients that is gone."""
        reasons = {}
        for client, (state, age) in self._observe(store, [c for c in clients if c != self.member.client]).items():
            if state == "lost":
                reasons[client] = barrier_texts.fell_silent(self._who(client), age, self._last_seen(client))
            elif state == "left":
                reasons[client] = barrier_texts.has_left(self._who(client), self._last_seen(client))
        return reasons

    def _last_seen(self, client: int) -> str:
        beat = _Heartbeat.load(self._seen[client][0])
        return verdicts.last_seen(beat.progress if beat else None)

    def status(self) -> JobStatus:
        return self._run(self._status)

    def _status(self, store: StoreConnection) -> JobStatus:
        tasks = []
        for client, (state, age) in self._observe(store, range(self.member.num_clients)).items():
            beat, name = _Heartbeat.load(self._seen[client][0]), self.member.full_task_name(client)
            if beat is None:
                tasks.append(TaskStatus(client, state, name=name))
            else:
                tasks.append(TaskStatus(client, state, beat.incarnation, age, beat.progress, name=name))
        with self._lock:
            open_rounds = [round_ for round_ in self._open.values() if round_ is not None]
        waiting = [
            BarrierStatus(r.name, r.header.generation, len(r.header.participants), tuple(self._missing(store, r)))
            for r in open_rounds
        ]
        return JobStatus(self.member.job, self.member.num_clients, tuple(tasks), tuple(waiting))

    # --- the store --------------------------------------------------------------------------------------------

    def _run(self, work: Callable[[StoreConnection], T]) -> T:
        try:
            return self._store_calls.run(work, tick_s=self._tick_s)
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
        return barrier_texts.task_name(self.member.job, self.member.client if client is None else client)


def _heartbeat_key(client: int) -> str:
    return f"beat/{client}"


def from_environment(
    member: Member, *, heartbeat_timeout_s: float = DEFAULT_HEARTBEAT_TIMEOUT_S
) -> TorchStoreCoordination:
    """Return coordination at the store of the default process group, or at ``MASTER_ADDR`` and ``MASTER_PORT``.

    Collective: Over all clients, if there is no default process group and several agents of torchrun have started the
    clients: their counts of restarts may differ, so the clients agree on an attempt first.

    Raises:
        ConfigError: There is no process group and the environment names no store.
        CoordinatorUnavailableError: The store cannot be reached.
        BarrierTimeoutError: The clients have to agree on their attempt, and some did not come.
    """
    agent_hosts = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if dist.is_initialized():
        store = torch_private.get_default_store()
        if default_process_group.is_stale():
            logger.warning("%s", default_process_group.RESTART_ADVICE)
    else:
        config = Config.from_environ()
        store = default_process_group.open_store(config)
        # Several agents: each counts the restarts that its own processes caused, so their counts may differ.
        if agent_hosts and int(os.environ.get("LOCAL_WORLD_SIZE", config.num_clients)) < config.num_clients:
            topic = f"coordination/{quote(member.job, safe='')}"
            store, attempt = default_process_group.agree_on_attempt(store, topic, config)
            member = replace(member, attempt=attempt)
    # The store of an agent outlives the clients, so no client has to leave last.
    return TorchStoreCoordination(
        store, member, heartbeat_timeout_s=heartbeat_timeout_s, host_client=None if agent_hosts else 0
    )


def local_group(
    num_clients: int, *, job: str = "local", heartbeat_timeout_s: float = DEFAULT_HEARTBEAT_TIMEOUT_S
) -> list[TorchStoreCoordination]:
    """Return the coordinations of clients that live in one process, one per thread, and meet at a store in memory."""
    store, incarnation = HashStore(), secrets.randbits(62)
    return [
        TorchStoreCoordination(
            store,
            Member(job, client, num_clients, incarnation=incarnation + client),
            heartbeat_timeout_s=heartbeat_timeout_s,
        )
        for client in range(num_clients)
    ]
