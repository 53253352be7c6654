"""A model of whole jobs: clients that save step after step through faults of every kind, against the real rules.

The coordinator's rules (`dtckpt_server.rules`) and the clients' comparison of ordinals
(`dtckpt.coordination.operation_ordinals`) are the real ones. The network, time, and the few lines of a client between
them (`GrpcCoordination.barrier`, `Collective`, the save protocol) are modelled. Each client writes its step number into
its rows, so a commit that joins two operations is seen at once.

Everything happens in one thread, in an order that one seed gives.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

from dtckpt_server import rules as server_rules
from dtckpt_server.events import Arrive, Cancel, Heartbeat, Identity, Register, TaskReport, Tick
from dtckpt_server.rules import Rules

from dtckpt.coordination.identity import BarrierCalls
from dtckpt.coordination.operation_ordinals import Ordinal, OrdinalTracker

HEARTBEAT_TIMEOUT_S = 2.0
INTERVAL_S = HEARTBEAT_TIMEOUT_S / 6
TICK_S = 0.25
TIMEOUT_S = 6.0
RETRY_S = 0.2
PATIENCE_S = 2.0
"""How long after its deadline a call still looks for the coordinator."""
FAULTS = ("cut", "restart", "skip", "raise", "interrupt", "reborn", "lose", "double", "impatient", "freeze")


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong.

    Args:
        kind: One of `FAULTS`.
        client: The client that it strikes; a restart strikes the coordinator.
        step: It strikes when the client is at this step.
        delay_s: How long after the step's save has begun.
        seconds: How long it lasts.
    """

    kind: str
    client: int
    step: int
    delay_s: float
    seconds: float


@dataclass(frozen=True)
class Job:
    """How the clients of a job run.

    Args:
        num_clients: How many there are.
        num_steps: Steps; each is saved.
        is_lockstep: Whether a step begins when all clients have ended the step before it, as if steps had collectives.
        gives_step: Whether saves get their step.
        faults: What goes wrong.
        step_s: About how long a step takes.
        timeout_s: Longest wait of a save for others, per round.
        lead: A client, and how long before the others it comes to each save.
    """

    num_clients: int
    num_steps: int
    is_lockstep: bool
    gives_step: bool
    faults: tuple[Fault, ...] = ()
    step_s: float = 0.5
    timeout_s: float = TIMEOUT_S
    lead: tuple[int, float] = (-1, 0.0)


class VerdictError(Exception):
    """A failed barrier, as a client raises it."""

    def __init__(self, failure: Any, was_cut_off: bool) -> None:
        super().__init__(failure.message)
        self.is_verdict = True
        self.was_cut_off = was_cut_off
        self.is_retold = failure.cause == "LATE"
        self.clients, self.missing = failure.clients, failure.missing


class NoVerdictError(Exception):
    """A call that ended without a verdict."""


class DisagreementError(Exception):
    is_verdict = True


class _Gone(BaseException):
    """The process has ended."""


@dataclass
class Client:
    """One client, in the present life of its process."""

    number: int
    tracker: OrdinalTracker
    life: int = 0
    calls: BarrierCalls = field(default_factory=BarrierCalls)
    is_cut: int = 0
    frozen_until: float = 0.0
    step: int = 0
    interrupts: bool = False
    loses: int = 0
    was_forgotten: bool = False
    doubles: int = 0
    is_impatient: bool = False
    outcomes: dict[int, str] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)

    @property
    def incarnation(self) -> int:
        return 100 * self.life + self.number + 1


Play = Generator[float, None, Any]
"""A client's program: yields how long to wait before it goes on."""


class World:
    """One history."""

    def __init__(self, job: Job, seed: int) -> None:
        self.job = job
        self.draw = random.Random(seed)
        self.now = 0.0
        self.clients = [
            Client(number, tracker=OrdinalTracker("save", lambda: self.now)) for number in range(job.num_clients)
        ]
        self.commits: list[tuple[int, ...]] = []
        self.last_fault_step = 0
        self.trace: list[str] = []
        self._rows: dict[str, dict[int, int]] = {}
        self._lives = itertools.count(1)
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = itertools.count()
        self._begin_coordinator()

    # --- time -----------------------------------------------------------------------------------------------------

    def after(self, seconds: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now + seconds, next(self._serial), happen))

    def run(self) -> None:
        for client in self.clients:
            self._start(client)
        self._every(TICK_S, lambda: self._send(Tick()))
        limit = 0
        while self._queue and not self._is_over():
            self.now, _, happen = heapq.heappop(self._queue)
            happen()
            limit += 1
            assert limit < 200_000, "a history does not end"

    def _is_over(self) -> bool:
        return all(client.step >= self.job.num_steps for client in self.clients)

    def _every(self, seconds: float, happen: Callable[[], None]) -> None:
        def again() -> None:
            happen()
            self.after(seconds, again)

        self.after(seconds * self.draw.random(), again)

    def _start(self, client: Client) -> None:
        life = client.life
        play = self._train(client)

        def go_on() -> None:
            if client.life != life:
                play.close()
                return
            pause_s = max(client.frozen_until - self.now, 0.0)
            if pause_s:
                self.after(pause_s, go_on)
                return
            try:
                seconds = next(play)
            except StopIteration:
                return
            self.after(seconds, go_on)

        self.after(0.0, go_on)

        def beat() -> None:
            if client.life == life and client.frozen_until <= self.now:
                self._beat(client)

        self._every(INTERVAL_S, beat)

    # --- the coordinator ------------------------------------------------------------------------------------------

    def _begin_coordinator(self) -> None:
        self.rules: Rules | None = Rules(HEARTBEAT_TIMEOUT_S, incarnation=next(self._lives))

    def _send(self, event: Any) -> Any:
        """Let an event reach the coordinator; return the effects."""
        assert self.rules is not None or isinstance(event, Tick)
        if self.rules is None:
            return None
        self.rules, effects = server_rules.apply(self.rules, event, self.now)
        return effects

    def _reaches(self, client: Client) -> bool:
        return self.rules is not None and not client.is_cut

    def _who(self, client: Client) -> Identity:
        return Identity("job", client.number, client.incarnation)

    def _report(self, client: Client) -> TaskReport:
        report = client.calls.report
        return TaskReport(report.operation, report.num_ended)

    def _beat(self, client: Client) -> None:
        if self._reaches(client):
            effects = self._send(Heartbeat(self._who(client), report=self._report(client)))
            if isinstance(effects.refusal, server_rules.UnknownError):
                client.was_forgotten = True
                self._register(client)

    def _register(self, client: Client) -> bool:
        effects = self._send(Register(self._who(client), self.job.num_clients, report=self._report(client)))
        return effects.refusal is None

    # --- a client's program -----------------------------------------------------------------------------------------

    def _train(self, client: Client) -> Play:
        while not (self._reaches(client) and self._register(client)):
            yield RETRY_S  # the place is held until the life before has been silent for long enough
        while client.step < self.job.num_steps:
            while self.job.is_lockstep and min(other.step for other in self.clients) < client.step:
                yield 0.01
            step = client.step
            first, lead_s = self.job.lead
            yield self.job.step_s + 0.2 * (self.draw.random() - 0.5) + lead_s * (client.number != first)
            begun = self.now
            struck = {fault.kind for fault in self._strike(client, step)}
            if "skip" in struck:
                client.outcomes[step] = "skipped"
            else:
                try:
                    yield from self._save(client, step, is_fit="raise" not in struck)
                    client.outcomes[step] = "saved"
                except (VerdictError, NoVerdictError, DisagreementError, KeyboardInterrupt) as error:
                    client.outcomes[step] = f"{type(error).__name__}: {error}"
            client.seconds[step] = self.now - begun
            client.interrupts = client.is_impatient = False
            self.trace.append(f"{self.now:7.2f} client {client.number} step {step}: {client.outcomes[step]}")
            client.step = step + 1

    def _strike(self, client: Client, step: int) -> list[Fault]:
        """Let this client's faults of a step begin; return them."""
        struck = [fault for fault in self.job.faults if (fault.client, fault.step) == (client.number, step)]
        for fault in struck:
            self.trace.append(f"{self.now:7.2f} {fault}")
            if fault.kind in ("skip", "raise"):
                self._note_fault()
            else:
                self.after(fault.delay_s, lambda fault=fault: self._fault(client, fault))
        return struck

    def _fault(self, client: Client, fault: Fault) -> None:
        def heal() -> None:
            self._note_fault()
            if fault.kind == "cut":
                client.is_cut -= 1
            elif fault.kind == "restart" and self.rules is None:
                self._begin_coordinator()
            elif fault.kind == "reborn":
                client.calls, client.tracker = BarrierCalls(), OrdinalTracker("save", lambda: self.now)
                self._start(client)

        if fault.kind == "reborn" and client.life:
            return  # once is enough
        match fault.kind:
            case "cut":
                client.is_cut += 1
            case "restart":
                self.rules = None
            case "reborn":
                client.life += 1
                client.outcomes[client.step] = "reborn"
            case "interrupt":
                client.interrupts = True
            case "lose":
                client.loses += 2
            case "double":
                client.doubles += 2
            case "impatient":
                client.is_impatient = True
            case "freeze":
                client.frozen_until = self.now + fault.seconds
        self._note_fault()
        if fault.kind in ("cut", "restart", "reborn", "freeze"):
            self.after(fault.seconds, heal)

    def _save(self, client: Client, step: int, *, is_fit: bool) -> Play:
        calls, tracker = client.calls, client.tracker
        ordinal = tracker.next_ordinal(step if self.job.gives_step else None)
        begun = self.now
        try:
            while True:
                begun = self.now
                calls.leave_operation()
                barrier = yield from self._barrier(
                    client, "save/begin", "", self.job.timeout_s, ordinal=ordinal, is_ok=is_fit
                )
                ordinals = {task: Ordinal.from_bytes(data) for task, data in barrier.payloads.items()}
                found = tracker.reconcile(ordinals, client.number, cut_off=sorted(barrier.cut_off))
                if found.is_same:
                    break
                if not found.others_wait or client.number in found.behind:
                    raise DisagreementError(found.message)
        except (VerdictError, NoVerdictError, KeyboardInterrupt) as error:
            tracker.note_failure(error, client.number, self.now - begun)
            raise
        operation = barrier.barrier_id
        try:
            self._rows.setdefault(operation, {})[client.number] = step
            yield 0.05 * self.draw.random()
            yield from self._barrier(client, "save/written", operation, self.job.timeout_s)
            if client.number == 0:
                yield 0.02 * self.draw.random()
                rows = self._rows[operation]
                self.commits.append(tuple(rows.get(number, -1) for number in range(self.job.num_clients)))
            yield from self._barrier(client, "save/merged", operation, self.job.timeout_s)
        except (VerdictError, NoVerdictError, KeyboardInterrupt) as error:
            tracker.note_failure(error, client.number, self.now - begun)
            raise
        finally:
            calls.leave_operation()

    def _barrier(
        self,
        client: Client,
        name: str,
        operation: str,
        timeout_s: float,
        *,
        ordinal: Ordinal | None = None,
        is_ok: bool = True,
    ) -> Play:
        """Arrive until there is a verdict, as `GrpcCoordination.barrier` does; return the round."""
        calls = client.calls  # of this life: the end of it may come when the next has begun
        call, begun = calls.begin(of_operation=True), ""
        timeout_s = max(0.5 if client.is_impatient else timeout_s, 0.1)
        deadline, was_sent, barrier, life = self.now + timeout_s, False, None, None
        was_cut_off, client.was_forgotten = client.was_forgotten, False
        try:
            while True:
                if client.interrupts:
                    client.interrupts = False
                    self._cancel(client, barrier)
                    raise KeyboardInterrupt
                if self.now > deadline + PATIENCE_S:
                    raise NoVerdictError(name)
                if not self._reaches(client) or (client.loses and self.draw.random() < 0.5):
                    client.loses = max(client.loses - 1, 0)
                    was_cut_off |= barrier is None or not self._reaches(client)
                    yield RETRY_S * (0.5 + self.draw.random())
                    continue
                assert self.rules is not None
                if barrier is None or life != self.rules.incarnation:
                    position = ordinal.position if ordinal is not None else None
                    arrival = Arrive(
                        self._who(client), name, call, (), max(deadline - self.now, 0.1), is_ok,
                        payload=ordinal.to_bytes() if ordinal else b"", code="" if is_ok else "TreeError",
                        reason="" if is_ok else "no state", operation=operation,
                        position=position.text if position else "",
                        is_certain=bool(position and position.is_certain), is_again=was_sent,
                        was_cut_off=was_cut_off, report=self._report(client),
                    )  # fmt: skip
                    effects = self._send(arrival)
                    was_sent = True
                    if client.doubles:
                        client.doubles -= 1
                        self._send(arrival)
                    if effects.refusal is not None:
                        if isinstance(effects.refusal, server_rules.UnknownError):
                            was_cut_off = True
                            self._register(client)
                        yield RETRY_S * self.draw.random()
                        continue
                    if client.loses and self.draw.random() < 0.5:  # the answer is lost
                        client.loses -= 1
                        was_cut_off = True
                        yield RETRY_S * (0.5 + self.draw.random())
                        continue
                    barrier, life = effects.barrier, self.rules.incarnation
                    yield 0.02 * self.draw.random()
                    continue  # the answer may get lost
                if not barrier.is_open:
                    break
                yield 0.05 + 0.02 * self.draw.random()
            if barrier.failure is not None:
                raise VerdictError(barrier.failure, was_cut_off)
            begun = operation or barrier.barrier_id
            return barrier
        finally:
            calls.end(call, operation or begun)

    def _cancel(self, client: Client, barrier: Any) -> None:
        if barrier is not None and self._reaches(client):
            self._send(Cancel(self._who(client), barrier.barrier_id, "was interrupted"))

    # --- promises ---------------------------------------------------------------------------------------------------

    def mixed(self) -> list[tuple[int, ...]]:
        """Return commits that join rows of different steps, or lack some."""
        return [rows for rows in self.commits if len(set(rows)) > 1]

    def _note_fault(self) -> None:
        """Note how far clients had come when a fault began or ended."""
        self.last_fault_step = max(client.step for client in self.clients)

    def failures_after(self, step: int) -> list[int]:
        """Return the steps after this one that not all clients saved."""
        steps = range(step + 1, self.job.num_steps)
        return [s for s in steps if any(client.outcomes.get(s) != "saved" for client in self.clients)]


def random_job(draw: random.Random) -> Job:
    """Return a job whose faults lie in its first half, so that it has time to heal."""
    num_clients = draw.choice((2, 2, 3, 4, 5))
    is_lockstep = draw.random() < 0.6
    gives_step = draw.random() < 0.5
    kinds = list(FAULTS)
    if not is_lockstep and not gives_step:  # nothing but the count of calls can tell steps apart, so it must be right
        kinds = [kind for kind in kinds if kind not in ("skip", "reborn", "impatient")]
    faults = tuple(
        Fault(
            draw.choice(kinds),
            draw.randrange(num_clients),
            draw.randrange(2, 7),
            draw.choice((0.0, 0.02, 0.05, 0.1, 0.3)) * (0.5 + draw.random()),
            draw.choice((0.1, 0.5, 1.5, 3.0, 5.0, 9.0)),
        )
        for _ in range(draw.choice((1, 1, 2, 3, 5)))
    )
    num_steps = (14 if gives_step else 24) if is_lockstep else 60
    step_s, timeout_s = draw.choice(((0.5, TIMEOUT_S), (0.5, TIMEOUT_S), (0.1, TIMEOUT_S), (4.0, 2.5)))
    return Job(num_clients, num_steps, is_lockstep, gives_step, faults, step_s, timeout_s)
