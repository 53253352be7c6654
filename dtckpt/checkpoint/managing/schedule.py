"""When a manager saves: the same answer on all clients, whatever only one of them knows."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic

from dtckpt.checkpoint.collective import meet_at_same_operation, process_standing
from dtckpt.comm import fork_guard
from dtckpt.coordination.api import Verdict, Vote
from dtckpt.coordination.connect import current_coordination
from dtckpt.errors import BarrierConflictError, ConfigError, DtckptError

DECISION = "decision whether to save"


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRules:
    """When to save: whenever any of the rules says so. Without rules, at every step.

    Args:
        interval_steps: At multiples of this.
        interval_s: When this many seconds have passed since the last save began; client 0 decides.
        when: When this says so; client 0 decides.
        skip_when_busy: Whether a step is passed over while a save is still in flight; client 0 decides.
    """

    interval_steps: int | None = None
    interval_s: float | None = None
    when: Callable[[int], bool] | None = None
    skip_when_busy: bool = False

    def __post_init__(self) -> None:
        for name in ("interval_steps", "interval_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"save_{name} must be positive; got {value!r}")

    @property
    def is_local(self) -> bool:
        """Whether every client comes to the same answer by itself."""
        return self.interval_s is None and self.when is None and not self.skip_when_busy

    def says(self, step: int, elapsed_s: float, *, is_busy: bool) -> bool:
        """Return the answer, as client 0 gives it."""
        if is_busy and self.skip_when_busy:
            return False
        if self.interval_steps is None and self.interval_s is None and self.when is None:
            return True
        return bool(
            (self.interval_steps is not None and step % self.interval_steps == 0)
            or (self.interval_s is not None and elapsed_s >= self.interval_s)
            or (self.when is not None and self.when(step))
        )


class Schedule:
    """Decides for one manager.

    Args:
        rules: When to save.
        timeout_s: Longest wait for the other clients.
        clock: Monotonic seconds.
    """

    def __init__(self, rules: SaveRules, *, timeout_s: float, clock: Callable[[], float]) -> None:
        self.rules = rules
        self.reached_preemption = False
        self._timeout_s = timeout_s
        self._clock = clock
        self._saved_at = clock()
        self._saved_step: int | None = None
        self._decided: tuple[int, bool] | None = None
        self._signalled = threading.Event()
        self._num_watches = 0

    def note_saved(self, step: int) -> None:
        """Note that the save of a step has begun; it is not due again."""
        self._saved_step, self._saved_at = step, self._clock()

    def note_restored(self) -> None:
        """Note that the run may come by the same steps again; those are due again."""
        self._saved_step = self._decided = None

    def should_save(self, step: int, *, is_busy: bool) -> bool:
        """Return the decision for a step. Collective: barrier ``manager/decide`` if any client alone knows something.

        Raises:
            BarrierConflictError: Clients ask for different steps.
            DtckptError: Client 0 could not decide.
        """
        if self._decided is None or self._decided[0] != step:
            is_leader = current_coordination().member.client == 0
            needs_answer = step != self._saved_step and (is_leader or self.rules.is_local)

            def is_due() -> bool:
                return needs_answer and self.rules.says(step, self._clock() - self._saved_at, is_busy=is_busy)

            is_collective = self._num_watches or not self.rules.is_local
            self._decided = step, self._agree(step, is_due) if is_collective else is_due()
        return self._decided[1]

    def _agree(self, step: int, is_due: Callable[[], bool]) -> bool:
        """Take client 0's decision, and everybody's signals; if client 0 cannot decide, all raise why."""
        coordination, failure = current_coordination(), None
        member = coordination.member
        standing = process_standing(member, DECISION, ())
        ordinal = standing.advance(step)
        try:
            payload = ordinal.to_bytes() + json.dumps([is_due(), self._signalled.is_set()]).encode()
            vote = Vote(payload=payload)
        except Exception as error:
            if member.num_clients == 1:
                raise
            failure, vote = error, Vote.of_error(error)

        def meet() -> Verdict:
            # Straight to the barrier: a round would report its phase in the place of that of a save in flight.
            begun = monotonic()
            try:
                return coordination.barrier(
                    "manager/decide", vote, timeout_s=self._timeout_s, collect=True, position=ordinal.position
                )
            except BaseException as error:
                standing.note_failure(error, member.client, monotonic() - begun)
                raise

        try:
            payloads = meet_at_same_operation(meet, standing, member.client, BarrierConflictError)
        except DtckptError as error:
            raise error from failure
        answers = {client: json.loads(data) for client, data in sorted(payloads.items())}
        is_news = not self.reached_preemption and any(answer[1] for answer in answers.values())
        self.reached_preemption |= is_news
        return bool(answers[0][0]) or (is_news and step != self._saved_step)

    @contextmanager
    def preemption(self, *signals: int) -> Iterator[None]:
        """Watch for signals, by default SIGTERM. What they did before is put back at the end.

        A signal that nobody acts on any more, since the work failed, does so then: torchrun would wait half a minute
        for a survivor that heeds no SIGTERM. A forked process (of a data loader) does not watch.
        """

        def note(number: int, _: object) -> None:
            if fork_guard.is_forked():
                signal.signal(number, before[number])
                signal.raise_signal(number)
            else:
                self._signalled.set()
                unheeded.append(number)

        unheeded: list[int] = []
        before = {number: signal.signal(number, note) for number in signals or (signal.SIGTERM,)}
        self._num_watches += 1
        has_failed = True
        try:
            yield
            has_failed = False
        finally:
            self._num_watches -= 1
            for number, handler in before.items():
                signal.signal(number, handler)
            if has_failed and unheeded and not self.reached_preemption:
                signal.raise_signal(unheeded[0])
