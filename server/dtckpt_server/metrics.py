"""Metrics for Prometheus.

Counters count events when they happen; gauges look the state up when they are scraped. Labels are small enumerations,
and jobs, as many as fit into 1 MiB of text; never steps, barrier names or tasks.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter as Tally
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import chain

import prometheus_client as prometheus
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from dtckpt.coordination.feeds.state import VERSION_STATES, Feed
from dtckpt.errors import FencedError
from dtckpt_server.rules import HeldError, Rules
from dtckpt_server.state import Job, Transition
from dtckpt_server.tasks import STATES

PREFIX = "dtckpt_coordinator_"
KINDS = frozenset(
    f"{operation}/{name}"
    for operation, names in {
        "save": ("begin", "edges", "written", "merged"),
        "restore": ("planned", "read"),
        "manager": ("decide", "chosen", "restored"),
    }.items()
    for name in names
)
"""The barriers of dtckpt itself; all others are of kind ``user``."""
BARRIER_SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0)
MAX_SERIES_NBYTES = 900 << 10
"""Bound of the text of all jobs' series; the other series take less than 100 KiB."""
JOB_LINES, BARRIER_LINES, LINE_NBYTES = 24, 2, 110
"""Lines of a job, more lines for each kind and outcome of its barriers, and the length of a line without the job."""
NEWEST, OLDER, NONE = USES = "newest", "older", "none"
"""The version that a reader of a feed uses."""
OTHERS = ""
"""Label of all jobs that have no separate series."""
JOBS_AT_ONCE = 64
"""How many jobs are read before other work gets a turn on the event loop."""
LAG_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)


def kind_of(barrier: str) -> str:
    """Return the kind of a barrier by its name; groups of clients add a suffix to the name."""
    name = barrier.partition("#")[0]
    return name.replace("/", "_") if name in KINDS else "user"


class Metrics:
    """The metrics of one coordinator, in a separate registry. Lives on the coordinator's event loop.

    A job gets separate series when it first registers. When the first barrier of a kind and outcome ends, the job gets
    more series for them, if there is room. Events without room for their series are counted for `OTHERS`.

    Args:
        rules: Returns the current rules.
        version: Of the coordinator.
        clock: Monotonic seconds, as the rules are given.
    """

    def __init__(self, rules: Callable[[], Rules], version: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.registry = prometheus.CollectorRegistry()
        self._lost = self._counter("task_lost", "Tasks that were declared lost.", "job", "reason")
        self._fenced = self._counter("fenced_calls", "Calls of processes whose place is taken.")
        self._refused = self._counter("refused_calls", "Calls that ended with an error, by status code.", "code")
        self._quotas = self._counter("quota_refusals", "Calls that a quota of their owner refused.", "quota")
        self._barriers = self._counter("barriers", "Barriers that were decided.", "job", "kind", "outcome")
        self._versions = self._counter("feed_version_changes", "Versions that became so.", "change")
        self._leases = self._counter("feed_leases_ended", "Leases that ended without their readers.", "outcome")
        self._duration = self._histogram("barrier_duration", "First arrival to verdict.", BARRIER_SECONDS, "kind")
        self._skew = self._histogram("barrier_skew", "First arrival to last.", BARRIER_SECONDS, "kind")
        self._lag = self._histogram("event_loop_lag", "How late the event loop came to its tick.", LAG_SECONDS)
        self._series: dict[str, set[tuple[str, ...]]] = {}  # of each job that has any
        self._room = MAX_SERIES_NBYTES
        self._rules, self._version, self._clock = rules, version, clock
        self._started_at = time.time()
        of_feeds = self._versions, self._leases
        counters = self._lost, self._fenced, self._refused, self._quotas, self._barriers, *of_feeds
        self._counted: tuple[Collector, ...] = (*counters, self._duration, self._skew, self._lag)
        self.registry.register(_Collected(lambda: _finish(self._look())))

    async def snapshot(self) -> Collector:
        """Return all metrics, to be collected in any thread: gauges as of now, counters as of the collection."""
        looking = self._look()
        while (families := next(looking)) is None:
            await asyncio.sleep(0)
        return _Collected(lambda: chain(families, *(counter.collect() for counter in self._counted)))

    def _counter(self, name: str, text: str, *labels: str) -> prometheus.Counter:
        return prometheus.Counter(PREFIX + name, text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...], *labels: str) -> prometheus.Histogram:
        return prometheus.Histogram(f"{PREFIX}{name}_seconds", text, labels, registry=self.registry, buckets=buckets)

    def note_refused_event(self, refusal: BaseException) -> None:
        """Count an event that the rules refused."""
        if isinstance(refusal, FencedError) and not isinstance(refusal, HeldError):
            self._fenced.inc()

    def note(self, transition: Transition) -> None:
        """Count a change of the state."""
        facts, job = transition.facts, str(transition.facts["job"])
        match transition.event:
            case "task_lost":
                self._lost.labels(self._label(job), "heartbeat").inc()
            case "barrier_passed" | "barrier_failed":
                kind, outcome = kind_of(str(facts["barrier"])), str(facts["outcome"])
                self._barriers.labels(self._label(job, kind, outcome), kind, outcome).inc()
                self._duration.labels(kind).observe(float(str(facts["duration_s"])))
                self._skew.labels(kind).observe(float(str(facts["skew_s"])))
            case "job_over":
                self._room += sum(_nbytes(job, series) for series in self._series.pop(job, ()))
                for counter in (self._lost, self._barriers):
                    counter.remove_by_labels({"job": job})
            case "lease_ended":
                self._leases.labels(facts["outcome"]).inc()
            case "version_readable" | "version_retired" | "version_lost" | "version_failed" as change:
                self._versions.labels(change.removeprefix("version_")).inc()
            case _:
                self._label(job)

    def _label(self, job: str, *series: str) -> str:
        """Return the label under which to count something for a job."""
        counted = self._series.get(job, set())
        for each in {(), series} - counted:
            if _nbytes(job, each) > self._room:
                return OTHERS
            self._room -= _nbytes(job, each)
            counted.add(each)
            self._series[job] = counted
        return job

    def note_refusal(self, code: str, quota: str | None = None) -> None:
        """Count a call that ended with an error, and the quota that refused it."""
        self._refused.labels(code).inc()
        if quota is not None:
            self._quotas.labels(quota.replace(" ", "_")).inc()

    def note_lag(self, late_s: float) -> None:
        """Count a tick of the event loop that came late by this much."""
        self._lag.observe(late_s)

    # --- gauges: the state at the moment of a scrape ------------------------------------------------------------

    def _look(self) -> Iterator[list[Metric] | None]:
        """Look at all jobs; yields None when others should get a turn, and at last the metrics."""
        totals, now = _JobTotals(), self._clock()
        for number, job in enumerate(list(self._rules().jobs.values()), start=1):
            totals.add(job.name if job.name in self._series else OTHERS, job, now)
            if number % JOBS_AT_ONCE == 0:
                yield None
        start = PREFIX + "incarnation_start_timestamp_seconds"
        yield [
            InfoMetricFamily(PREFIX + "build", "The coordinator's version.", {"version": self._version}),
            GaugeMetricFamily(start, "When this life of the coordinator began.", self._started_at),
            *totals.families(),
            *_of_feeds(self._rules().feeds.feeds.values(), now),
        ]


def _use_of(applied: int, feed: Feed) -> str:
    newest = feed.newest
    return NONE if not applied else NEWEST if newest is None or applied >= newest.number else OLDER


def _of_feeds(feeds: Collection[Feed], now: float) -> Iterator[Metric]:
    """Count the feeds, their versions by state, leases and holders; and how old the feeds' newest versions are."""
    versions = [version for feed in feeds for version in feed.versions.values()]
    states = Tally(version.state for version in versions)
    by_state = GaugeMetricFamily(PREFIX + "feed_versions", "Versions that have not ended, by state.", labels=("state",))
    for state in VERSION_STATES:
        by_state.add_metric((state,), states[state])
    newest = [version for feed in feeds if (version := feed.newest) is not None]
    age_s = max((now - (version.readable_at or now) for version in newest), default=0.0)
    uses = Tally(_use_of(use.applied, feed) for feed in feeds for use in feed.latest.values())
    by_use = GaugeMetricFamily(PREFIX + "feed_readers", "Readers, by the version that they use.", labels=("uses",))
    for kind in USES:
        by_use.add_metric((kind,), uses[kind])
    num_leases = sum(len(version.leases) for version in versions)
    num_holders = sum(len(version.holders) for version in versions)
    yield by_state
    yield by_use
    yield GaugeMetricFamily(PREFIX + "feeds", "Feeds that are open.", len(feeds))
    yield GaugeMetricFamily(PREFIX + "feed_leases", "Live leases of readers.", num_leases)
    yield GaugeMetricFamily(PREFIX + "feed_holders", "Clients of readers that serve a version on.", num_holders)
    yield GaugeMetricFamily(PREFIX + "feed_age_max_seconds", "Age of the oldest of the feeds' newest versions.", age_s)


def _finish(looking: Iterator[list[Metric] | None]) -> list[Metric]:
    return next(families for families in looking if families is not None)


def _nbytes(job: str, series: tuple[str, ...]) -> int:
    """Return about how much text some series of a job take: the series of some barriers, or () for the others."""
    name_nbytes = len(json.dumps(job, ensure_ascii=False).encode(errors="replace"))
    return (BARRIER_LINES if series else JOB_LINES) * (LINE_NBYTES + name_nbytes)


class _JobTotals:
    """Totals over the jobs of each label: tasks by state, open barriers, heartbeats, longest silence."""

    def __init__(self) -> None:
        self._tasks: Tally[tuple[str, str]] = Tally()
        self._barriers: Tally[tuple[str, str]] = Tally()
        self._heartbeats: Tally[str] = Tally()
        self._ages: dict[str, float] = {}

    def add(self, label: str, job: Job, now: float) -> None:
        for state, tasks in job.tasks.by_state.items():
            self._tasks[label, state] += len(tasks)
        self._barriers.update((label, kind_of(barrier.name)) for barrier in job.open.values())
        self._heartbeats[label] += job.num_heartbeats
        longest = next(job.tasks.longest_silent(), None)
        self._ages[label] = max(self._ages.get(label, 0.0), now - longest.heard_at if longest else 0.0)

    def families(self) -> Iterator[Metric]:
        tasks = GaugeMetricFamily(PREFIX + "tasks", "Tasks by state.", labels=("job", "state"))
        age = GaugeMetricFamily(
            PREFIX + "heartbeat_age_max_seconds", "Longest silence of a task that is not lost.", labels=("job",)
        )
        barriers = GaugeMetricFamily(PREFIX + "barriers_open", "Open barriers.", labels=("job", "kind"))
        heartbeats = CounterMetricFamily(PREFIX + "heartbeats", "Heartbeats that were accepted.", labels=("job",))
        for label, count in self._heartbeats.items():
            heartbeats.add_metric((label,), count)
            age.add_metric((label,), self._ages[label])
            for state in STATES:
                tasks.add_metric((label, state), self._tasks[label, state])
        for labels, count in sorted(self._barriers.items()):
            barriers.add_metric(labels, count)
        yield from (tasks, age, barriers, heartbeats)


class _Collected(Collector):
    """Metrics as some function returns them."""

    def __init__(self, collect: Callable[[], Iterable[Metric]]) -> None:
        self._collect = collect

    def collect(self) -> Iterable[Metric]:
        return self._collect()
