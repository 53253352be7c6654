"""What Prometheus may know.

What is counted is counted when it happens; what is, is looked up when someone asks. Labels are jobs, which are bounded
and forgotten, and small enumerations; never steps, barrier names or tasks.
"""

from __future__ import annotations

import time
from collections import Counter as Tally
from collections.abc import Callable, Iterable

import prometheus_client as prometheus
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from dtckpt.errors import FencedError
from dtckpt_server.rules import ALIVE, FENCED, LEFT, LOST, Effects, HeldError, Rules, Transition

PREFIX = "dtckpt_coordinator_"
STATES = (*ALIVE, LOST, LEFT, FENCED)
KINDS = frozenset(
    f"{operation}/{name}"
    for operation, names in {
        "save": ("begin", "edges", "written", "merged"),
        "restore": ("planned", "read"),
        "manager": ("decide", "chosen", "restored"),
    }.items()
    for name in names
)
"""Barriers of dtckpt's own; all others are of kind ``user``."""
BARRIER_SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0)
LAG_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)


def kind_of(barrier: str) -> str:
    """Return the kind of a barrier by its name; groups of clients add a suffix to the name."""
    name = barrier.partition("#")[0]
    return name.replace("/", "_") if name in KINDS else "user"


class Metrics:
    """The metrics of one coordinator, in a registry of their own. Lives on the coordinator's event loop.

    Args:
        rules: Returns the rules as they are.
        version: Of the coordinator.
        clock: Monotonic seconds, as the rules are given.
    """

    def __init__(self, rules: Callable[[], Rules], version: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.registry = prometheus.CollectorRegistry()
        self._lost = self._counter("task_lost", "Tasks that were declared lost.", "job", "reason")
        self._fenced = self._counter("fenced_calls", "Calls of processes whose place is taken.")
        self._refused = self._counter("refused_calls", "Calls that ended with an error, by status code.", "code")
        self._barriers = self._counter("barriers", "Barriers that were decided.", "job", "kind", "outcome")
        self._duration = self._histogram("barrier_duration", "First arrival to verdict.", BARRIER_SECONDS, "kind")
        self._skew = self._histogram("barrier_skew", "First arrival to last.", BARRIER_SECONDS, "kind")
        self._lag = self._histogram("event_loop_lag", "How late the event loop came to its tick.", LAG_SECONDS)
        self.registry.register(_Current(rules, version, clock))

    def _counter(self, name: str, text: str, *labels: str) -> prometheus.Counter:
        return prometheus.Counter(PREFIX + name, text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...], *labels: str) -> prometheus.Histogram:
        return prometheus.Histogram(f"{PREFIX}{name}_seconds", text, labels, registry=self.registry, buckets=buckets)

    def note(self, effects: Effects) -> None:
        """Count what an event did."""
        if isinstance(effects.refusal, FencedError) and not isinstance(effects.refusal, HeldError):
            self._fenced.inc()
        for transition in effects.log:
            self._note_transition(transition)

    def _note_transition(self, transition: Transition) -> None:
        facts, job = transition.facts, str(transition.facts["job"])
        match transition.event:
            case "task_lost":
                self._lost.labels(job, "heartbeat").inc()
            case "barrier_passed" | "barrier_failed":
                kind = kind_of(str(facts["barrier"]))
                self._barriers.labels(job, kind, facts["outcome"]).inc()
                self._duration.labels(kind).observe(float(str(facts["duration_s"])))
                self._skew.labels(kind).observe(float(str(facts["skew_s"])))
            case "job_over":
                for counter in (self._lost, self._barriers):
                    counter.remove_by_labels({"job": job})

    def note_refusal(self, code: str) -> None:
        """Count a call that ended with an error."""
        self._refused.labels(code).inc()

    def note_lag(self, late_s: float) -> None:
        """Count a tick of the event loop that came late by this much."""
        self._lag.observe(late_s)


class _Current(Collector):
    """What is true at the moment of asking."""

    def __init__(self, rules: Callable[[], Rules], version: str, clock: Callable[[], float]) -> None:
        self._rules, self._version, self._clock = rules, version, clock
        self._started_at = time.time()

    def collect(self) -> Iterable[Metric]:
        yield InfoMetricFamily(PREFIX + "build", "The coordinator's version.", {"version": self._version})
        start = PREFIX + "incarnation_start_timestamp_seconds"
        yield GaugeMetricFamily(start, "When this life of the coordinator began.", self._started_at)
        tasks = GaugeMetricFamily(PREFIX + "tasks", "Tasks by state.", labels=("job", "state"))
        age = GaugeMetricFamily(
            PREFIX + "heartbeat_age_max_seconds", "Longest silence of a task that is not lost.", labels=("job",)
        )
        barriers = GaugeMetricFamily(PREFIX + "barriers_open", "Open barriers.", labels=("job", "kind"))
        heartbeats = CounterMetricFamily(PREFIX + "heartbeats", "Heartbeats that were accepted.", labels=("job",))
        now = self._clock()
        for job in self._rules().jobs.values():
            heartbeats.add_metric((job.name,), job.num_heartbeats)
            states = Tally(task.state for task in job.tasks.values())
            for state in STATES:
                tasks.add_metric((job.name, state), states[state])
            ages = [now - task.heard_at for task in job.tasks.values() if task.state in ALIVE]
            age.add_metric((job.name,), max(ages, default=0.0))
            for kind, count in sorted(Tally(kind_of(barrier.name) for barrier in job.open.values()).items()):
                barriers.add_metric((job.name, kind), count)
        yield from (tasks, age, barriers, heartbeats)
