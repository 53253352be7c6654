"""`Phases`: measure the phases of a save or restore on one client, in seconds and bytes; and find slow clients.

Each phase is measured once, here. The log, reports and handles, heartbeats, the progress bar and OpenTelemetry's spans
all show these measurements.

OpenTelemetry gets spans if its API is installed (extra ``otel``). The program configures where they go.
"""

from __future__ import annotations

import logging
import statistics
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from time import monotonic
from typing import Any

from dtckpt._proto import checkpoint_pb2
from dtckpt.checkpoint.progress_bar import Bar, is_watched
from dtckpt.coordination.api import Progress
from dtckpt.errors import printable
from dtckpt.format.manifest import Costs, PhaseCost, costs_from_proto, phases_to_proto

TRACER_NAME = "dtckpt"
_MAX_ERROR_CHARS = 500


@lru_cache(maxsize=1)
def _api() -> Any:
    """Return the module ``opentelemetry.trace``; None if it is not installed."""
    try:
        from opentelemetry import trace
    except ImportError:
        return None
    return trace


def open_span(name: str, attributes: Mapping[str, Any], parent: Any = None) -> Any:
    """Open a span below ``parent``; by default below the current span of the caller's context."""
    api = _api()
    if api is None:
        return None
    context = None if parent is None else api.set_span_in_context(parent)
    return api.get_tracer(TRACER_NAME).start_span(name, context=context, attributes=attributes)


def close_span(span: Any, attributes: Mapping[str, Any], error: BaseException | None = None) -> None:
    """End a span, also in another thread than it was opened in, and record the error, if there is one."""
    if span is None:
        return
    span.set_attributes(attributes)
    if error is not None:
        span.record_exception(error)
        span.set_status(_api().StatusCode.ERROR, f"{type(error).__name__}: {error}"[:_MAX_ERROR_CHARS])
    span.end()


logger = logging.getLogger("dtckpt.checkpoint")

BARRIER = "barrier"
"""The phase that is no work: the wait for the other clients."""
TOLD_NBYTES = 32 << 20
"""The next heartbeat is given the progress after every so many bytes."""
SLOW_FACTOR = 3.0
SLOW_EXCESS_S = 1.0
"""A client is slow in a phase if it takes so many times as long as the median of the others, and so many seconds
longer."""


@dataclass(slots=True, eq=False)
class _Open:
    """A phase that is under way. Its clock stops while a phase inside it is under way."""

    name: str
    since: float
    seconds: float = 0.0
    nbytes: int = 0
    told_nbytes: int = 0


class Phases:
    """The phases of one operation on one client, one after the other or one inside the other.

    Invariant: no second counts twice, so the seconds of all phases add up to the seconds of the operation. While an
    inner phase runs, the clock of the outer phase stands:

        plan   |=====     ====|
        stage         |===|

    Args:
        operation: ``save``, ``restore`` or another kind of operation.
        client: This client.
        tell: Called with the progress that the next heartbeat is to tell.
    """

    def __init__(self, operation: str, client: int, tell: Callable[[Progress], object]) -> None:
        self.round = ""
        """Name of the round that this client is in."""
        self._operation = operation
        self._client = client
        self._tell = tell
        self._subject = ""
        self._lock = threading.Lock()
        self._closed: dict[str, PhaseCost] = {}
        self._open: list[_Open] = []
        self._expected = ("", 0)
        self._is_shown = False
        self._bar: Bar | None = None
        self._span: Any = None

    def begin(self, subject: object, *, is_shown: bool = False) -> None:
        """Begin the operation: open its span, and with ``is_shown`` allow its bar, if standard error is a terminal."""
        self._subject = printable(str(subject))
        self._is_shown = is_shown and is_watched(sys.stderr)
        attributes = {"dtckpt.path": self._subject, "dtckpt.client": self._client}
        self._span = open_span(f"dtckpt.{self._operation}", attributes)

    @contextmanager
    def operation(self, subject: object, *, is_shown: bool) -> Iterator[None]:
        """Begin the operation, and end it with the context."""
        self.begin(subject, is_shown=is_shown)
        try:
            yield
        except BaseException as error:
            self.end(error)
            raise
        self.end()

    def end(self, error: BaseException | None = None) -> None:
        """End the operation: close the span and the bar, and log the costs of all phases."""
        span, self._span = self._span, None
        bar, self._bar = self._bar, None
        close_span(span, {"dtckpt.nbytes": self.progress[0]}, error)
        if bar is not None:
            bar.__exit__(None, None, None)
        if logger.isEnabledFor(logging.INFO):
            costs = self.costs
            total_s = sum(cost.seconds for cost in costs.values())
            how = "done" if error is None else f"failed in round {self.round!r} ({type(error).__name__})"
            parts = ", ".join(f"{name} {cost}" for name, cost in costs.items())
            logger.info("%s of %s: %s on client %d in %.3f s: %s", *self._what, how, self._client, total_s, parts)

    @property
    def _what(self) -> tuple[str, str]:
        return self._operation, self._subject

    def enter(self, round_name: str) -> None:
        """Note the round that this client is in now, and tell it with the next heartbeat."""
        self.round = round_name
        self._beat()

    def expect(self, phase: str, nbytes: int) -> None:
        """Name the phase whose bytes are the operation's progress, and how many there will be; a bar shows them."""
        self._expected = phase, nbytes
        if self._is_shown:
            self._bar = Bar(f"{self._operation} {self._subject}", nbytes).__enter__()

    @property
    def is_shown(self) -> bool:
        """Whether a bar is, or will be, shown."""
        return self._is_shown

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Measure the context as a phase; the costs of phases of one name are added."""
        is_outer = not self._open
        span = open_span(f"dtckpt.{self._operation}.{name}", {}, self._span) if is_outer and self._span else None
        phase, failure = self._start(name), None
        try:
            yield
        except BaseException as error:
            failure = error
            raise
        finally:
            cost = self._stop(phase)
            if name == self._expected[0] and phase.nbytes > phase.told_nbytes:
                self._beat()  # so that heartbeats tell the bytes also during the wait for the others
            if is_outer:
                close_span(span, {"dtckpt.nbytes": cost.nbytes, "dtckpt.round": self.round}, failure)
                logger.debug("%s of %s: %s took %s on client %d", *self._what, name, cost, self._client)

    def _start(self, name: str) -> _Open:
        with self._lock:
            now = monotonic()
            if self._open:
                self._open[-1].seconds += now - self._open[-1].since
            self._open.append(_Open(name, now))
            return self._open[-1]

    def _stop(self, phase: _Open) -> PhaseCost:
        with self._lock:
            now = monotonic()
            self._open.remove(phase)
            cost = PhaseCost(phase.seconds + now - phase.since, phase.nbytes)
            self._closed[phase.name] = self._closed.get(phase.name, PhaseCost()) + cost
            if self._open:
                self._open[-1].since = now
            return cost

    def count(self, nbytes: int) -> None:
        """Add bytes to the open phase."""
        phase = self._open[-1]
        phase.nbytes += nbytes
        if self._bar is not None and phase.name == self._expected[0]:
            self._bar.advance("", nbytes)
        if phase.nbytes - phase.told_nbytes >= TOLD_NBYTES:
            phase.told_nbytes = phase.nbytes
            self._beat()

    def _beat(self) -> None:
        done, total = self.progress
        self._tell(Progress(f"{self._operation}/{self.round}", bytes_done=done, bytes_total=total))

    @property
    def costs(self) -> dict[str, PhaseCost]:
        """The costs of all phases so far, by name, including phases that are under way."""
        with self._lock:
            costs = dict(self._closed)
            now = monotonic()
            for depth, phase in enumerate(reversed(self._open)):
                running = 0.0 if depth else now - phase.since
                cost = PhaseCost(phase.seconds + running, phase.nbytes)
                costs[phase.name] = costs.get(phase.name, PhaseCost()) + cost
        return costs

    @property
    def progress(self) -> tuple[int, int]:
        """Bytes that are done, and bytes in all, of the phase that `expect` named."""
        name, nbytes = self._expected
        return self.costs.get(name, PhaseCost()).nbytes, nbytes


@dataclass(frozen=True, slots=True)
class SlowClient:
    """A client that took much longer for a phase than the others.

    Args:
        client: The client.
        phase: The phase.
        cost: Its cost on this client.
        median: Median seconds, and median bytes, of the other clients.
    """

    client: int
    phase: str
    cost: PhaseCost
    median: PhaseCost

    def __str__(self) -> str:
        return (
            f"client {self.client} is slow: its phase {self.phase!r} took {self.cost}; median of the others: "
            f"{self.median}"
        )


def find_slow(costs: Costs) -> SlowClient | None:
    """Return the client that others wait for the longest, if a client is slow (see `SLOW_FACTOR`).

    Args:
        costs: By client, the cost of each of its phases; ``barrier`` does not count.
    """
    slow: list[tuple[float, SlowClient]] = []
    for phase in sorted({name for own in costs.values() for name in own} - {BARRIER}):
        by_client = {client: own[phase] for client, own in sorted(costs.items()) if phase in own}
        client = max(by_client, key=lambda client: by_client[client].seconds)
        cost = by_client.pop(client)
        if not by_client:
            continue
        others = by_client.values()
        median = PhaseCost(
            statistics.median(other.seconds for other in others),
            round(statistics.median(other.nbytes for other in others)),
        )
        excess_s = cost.seconds - median.seconds
        if excess_s >= SLOW_EXCESS_S and cost.seconds >= SLOW_FACTOR * median.seconds:
            slow.append((excess_s, SlowClient(client, phase, cost, median)))
    return max(slow, key=lambda item: item[0], default=(0.0, None))[1]


@dataclass(frozen=True, slots=True)
class Written:
    """The vote of a client that has written its part of a save, or read its part of a restore.

    Args:
        chunk_list: Digest of the file of its chunk list; 0 in a restore.
        costs: Cost of each phase so far, by name.
        nbytes_reused: Bytes of its chunks that the save's base has already.
    """

    chunk_list: int
    costs: Mapping[str, PhaseCost]
    nbytes_reused: int = 0

    def to_bytes(self) -> bytes:
        """Return the payload."""
        message = checkpoint_pb2.Written(
            chunk_list=self.chunk_list,
            phases=phases_to_proto({0: self.costs}),
            nbytes_reused=self.nbytes_reused,
        )
        return message.SerializeToString(deterministic=True)

    @classmethod
    def from_bytes(cls, data: bytes) -> Written:
        """Read a payload."""
        message = checkpoint_pb2.Written.FromString(data)
        return cls(message.chunk_list, costs_from_proto([0], message.phases)[0], message.nbytes_reused)
