"""Decide when a manager saves: at which steps, with the same decision on all clients.

A decision that depends on the step alone is made by each client by itself. Clocks, functions of the user, a save in
flight and signals differ from client to client. Decisions that depend on them are made at the barrier
``manager/decide``: client 0's answer counts for all, and a signal to any client is told to all.

    client 0   answer of the rules, signal?  --+                      +-->  decision, and reached_preemption
    client 1   (its answer is ignored), signal?  --> manager/decide --+-->  the same
    client 2   (its answer is ignored), signal?  --+                  +-->  the same

Invariant: whether a decision is collective is the same on all clients. The rules and `Schedule.watch`, which all
clients enter, determine this; the clock and signals never do.

With ``every="auto"``, a `Pace` finds the interval: from the cost of the saves and the failures of the runs.
"""

from __future__ import annotations

import json
import logging
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic

from dtckpt.checkpoint.collective import meet_at_same_operation, tracker_of
from dtckpt.checkpoint.managing.interval import AutoInterval, Costs, PastRun, estimate_mtbf, optimal_interval
from dtckpt.checkpoint.managing.run_history import RunHistory
from dtckpt.checkpoint.managing.signal_watch import SignalWatch
from dtckpt.coordination.api import Verdict, Vote
from dtckpt.coordination.connect import current_coordination
from dtckpt.errors import BarrierConflictError, ConfigError, DtckptError
from dtckpt.storage.failures import translate_errors
from dtckpt.storage.location import Location

DECISION = "decision whether to save"


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRules:
    """The rules when to save: at every step at which any of them says so; without rules, at every step.

    Args:
        interval_steps: Save at multiples of this.
        interval_s: Save when this many seconds have passed since the last save began, on client 0's clock.
        when: Save when this function of the step returns true on client 0.
        auto: Save when the interval of `Pace` has passed since the last save began, on client 0's clock.
        is_continuous: Save whenever no save is in flight on client 0.
        skip_when_busy: Do not save while a save is still in flight on client 0.
    """

    interval_steps: int | None = None
    interval_s: float | None = None
    when: Callable[[int], bool] | None = None
    auto: AutoInterval | None = None
    is_continuous: bool = False
    skip_when_busy: bool = False

    def __post_init__(self) -> None:
        for name in ("interval_steps", "interval_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"save_{name} must be positive; got {value!r}")

    @property
    def is_local(self) -> bool:
        """Whether every client comes to the same decision by itself."""
        depends = self.interval_s is not None or self.when is not None or self.auto is not None
        return not (depends or self.is_continuous or self.skip_when_busy)

    def says(self, step: int, elapsed_s: float, auto_s: Callable[[], float], *, is_busy: bool) -> bool:
        """Return client 0's answer.

        Args:
            step: The step.
            elapsed_s: Seconds since the last save began.
            auto_s: Returns the interval of ``auto`` in seconds.
            is_busy: Whether a save is in flight.
        """
        if is_busy and self.skip_when_busy:
            return False
        if self == SaveRules(skip_when_busy=self.skip_when_busy):
            return True
        return bool(
            (self.is_continuous and not is_busy)
            or (self.interval_steps is not None and step % self.interval_steps == 0)
            or (self.interval_s is not None and elapsed_s >= self.interval_s)
            or (self.auto is not None and elapsed_s >= auto_s())
            or (self.when is not None and self.when(step))
        )


class Schedule:
    """The decisions of one manager.

    Args:
        rules: See `SaveRules`.
        timeout_s: Longest wait for the other clients, in seconds.
        clock: Returns monotonic seconds.
        auto_s: Returns the interval of ``rules.auto`` in seconds.
    """

    def __init__(
        self, rules: SaveRules, *, timeout_s: float, clock: Callable[[], float], auto_s: Callable[[], float]
    ) -> None:
        self.rules = rules
        self.reached_preemption = False
        self._timeout_s = timeout_s
        self._clock = clock
        self._auto_s = auto_s
        self._saved_at = clock()
        self._saved_step: int | None = None
        self._decision: tuple[int, bool] | None = None  # the last one: the step, and whether it is saved
        self.watch = SignalWatch(lambda: self.reached_preemption)

    def note_saved(self, step: int) -> None:
        """Note that the save of a step has begun, so that the step is not due again."""
        self._saved_step, self._saved_at = step, self._clock()

    def note_restored(self) -> None:
        """Note that the run may reach the same steps again, so that they are due again."""
        self._saved_step = self._decision = None

    def should_save(self, step: int, *, is_busy: bool) -> bool:
        """Return the decision for a step; asking again returns the same.

        Collective: Barrier ``manager/decide``, if the rules or a watched signal make the decision differ by client.

        Raises:
            BarrierConflictError: Clients ask for different steps.
            DtckptError: Client 0 could not decide.
        """
        if self._decision is None or self._decision[0] != step:
            is_leader = current_coordination().member.client == 0
            # `when` may have effects or cost time, so it is called where its answer counts only.
            needs_answer = step != self._saved_step and (is_leader or self.rules.is_local)

            def is_due() -> bool:
                elapsed_s = self._clock() - self._saved_at
                return needs_answer and self.rules.says(step, elapsed_s, self._auto_s, is_busy=is_busy)

            is_collective = self.watch.is_open or not self.rules.is_local
            self._decision = step, self._agree(step, is_due) if is_collective else is_due()
        return self._decision[1]

    def _agree(self, step: int, is_due: Callable[[], bool]) -> bool:
        """Return client 0's answer, or true if a signal has just reached any client; see the drawing above.

        If the rules fail on client 0, it votes no with the error, and all clients raise it.
        """
        coordination, failure = current_coordination(), None
        member = coordination.member
        tracker = tracker_of(member, DECISION, ())
        ordinal = tracker.next_ordinal(step)
        try:
            payload = ordinal.to_bytes() + json.dumps([is_due(), self.watch.has_noted]).encode()
            vote = Vote(payload=payload)
        except Exception as error:
            if member.num_clients == 1:
                raise
            failure, vote = error, Vote.of_error(error)

        def meet() -> Verdict:
            # Not by `Collective`: its heartbeats would replace the progress of a save in flight.
            start = monotonic()
            try:
                return coordination.barrier(
                    "manager/decide", vote, timeout_s=self._timeout_s, collect=True, position=ordinal.position
                )
            except BaseException as error:
                tracker.note_failure(error, member.client, monotonic() - start)
                raise

        try:
            payloads = meet_at_same_operation(meet, tracker, member.client, BarrierConflictError)
        except DtckptError as error:
            raise error from failure
        answers = {client: json.loads(data) for client, data in sorted(payloads.items())}
        # Only the first decision after a signal saves because of it; the training loop is expected to end then.
        is_first_signal = not self.reached_preemption and any(answer[1] for answer in answers.values())
        self.reached_preemption |= is_first_signal
        return bool(answers[0][0]) or (is_first_signal and step != self._saved_step)


logger = logging.getLogger("dtckpt.checkpoint")

NUM_MEASURED = 8
"""Saves whose costs count: the newest ones."""
NOTABLE = 0.2
"""Relative change of the interval that is logged."""


class Pace:
    """The interval between saves. Client 0 asks its `Pace` and decides; the other clients do not ask theirs.

    Args:
        auto: The user's part.
        history: The runs of the root.
        where: The root, for messages.
        now: Returns seconds since the epoch.
    """

    def __init__(
        self, auto: AutoInterval, history: RunHistory, where: Location, now: Callable[[], float] = time.time
    ) -> None:
        self._auto = auto
        self._history = history
        self._where = where
        self._num_hosts = 1
        self._now = now
        self._past: tuple[PastRun, ...] = ()
        self._former_costs: Costs | None = None
        self._blocking: deque[float] = deque(maxlen=NUM_MEASURED)
        self._lags: deque[float] = deque(maxlen=NUM_MEASURED)
        self._logged: float | None = None
        self._lock = threading.Lock()  # a commit is noted by the thread of the save
        self._has_begun = False

    def begin(self, num_hosts: int) -> None:
        """Note that this run saves, on so many hosts. Idempotent; only for the process with the right to the root."""
        if not self._has_begun:
            self._has_begun, self._num_hosts = True, num_hosts
            with self._tolerated():
                past, self._former_costs = self._history.begin(self._now())
                self._past = tuple(past)

    def note_returned(self, blocking_s: float) -> None:
        """Note for how long the call of a save stopped training."""
        with self._lock:
            self._blocking.append(blocking_s)

    def note_committed(self, lag_s: float) -> None:
        """Note how long after its begin a save was committed."""
        with self._lock:
            self._lags.append(lag_s)
        with self._tolerated():
            self._history.note(self._now(), self.costs, has_ended=False)

    def end(self) -> None:
        """Note that this run has not failed."""
        with self._tolerated():
            self._history.note(self._now(), self.costs, has_ended=True)
            self._has_begun = False

    def renew(self, *, has_failed: bool) -> None:
        """Let the next save begin a new run, on other hosts.

        Args:
            has_failed: Whether the run until now has failed.
        """
        if has_failed:
            self._has_begun = False
        else:
            self.end()

    @property
    def costs(self) -> Costs | None:
        """Costs of the newest saves: the median stop and the longest lag; before there are any, of the last run."""
        with self._lock:
            if not self._blocking or not self._lags:
                return self._former_costs
            return Costs(statistics.median(self._blocking), max(self._lags))

    def interval_s(self) -> float:
        """Return the interval in seconds; 0 while no cost is known, so that the first save measures it."""
        costs, auto = self.costs, self._auto
        if costs is None:
            return auto.min_s
        mtbf_s = auto.mtbf_s or estimate_mtbf(self._past, self._history.uptime_s, self._num_hosts)
        interval = optimal_interval(costs.blocking_s, mtbf_s, lag_s=costs.lag_s)
        interval = min(max(interval, auto.min_s), auto.max_s)
        if self._logged is None or abs(interval - self._logged) > NOTABLE * self._logged:
            self._logged = interval
            reason = f"a save stops training for {costs.blocking_s:.3f} s and is complete after {costs.lag_s:.1f} s"
            failures = f"a failure is expected every {mtbf_s / 3600:.2f} h ({self._reason()})"
            logger.info("saves every %.1f s: %s; %s", interval, reason, failures)
        return interval

    def _reason(self) -> str:
        if self._auto.mtbf_s is not None:
            return "given by mtbf_s"
        failures = sum(run.has_failed for run in self._past)
        return f"earlier runs: {len(self._past)}, failed: {failures}; hosts: {self._num_hosts}"

    @contextmanager
    def _tolerated(self) -> Iterator[None]:
        """Log a warning if the history cannot be read or written: saves do not depend on it."""
        try:
            with translate_errors("keep the history of runs", self._where):
                yield
        except DtckptError as error:
            logger.warning("the history of runs, which every='auto' estimates failures by, is not available: %s", error)
