"""Survey of every operator of PyTorch's OpInfo database on DTensors.

Run it in ``tests``: ``python -m dtensor.operators.operator_survey``.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import multiprocessing
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

import torch
from support.time_limit import time_limit

from .arrangements import ARRANGEMENTS, Arrangement, Plain, torch_arrangements
from .operator_database import BACKWARD, DIRECTIONS, ERROR, FORWARD, FULL, QUICK, RIGHT, Outcome, Scale, outcomes_of
from .operator_samples import operators

OPERATOR_TIMEOUT_S = 60
SLOWEST = 15
RUNTIMES = {"dtckpt": lambda: ARRANGEMENTS, "plain": lambda: (Plain(),), "torch": torch_arrangements}


@dataclass(frozen=True)
class Job:
    """What to try of one operator."""

    name: str
    directions: tuple[str, ...]
    scale: Scale
    runtime: str


@dataclass(frozen=True)
class Report:
    """What became of one operator."""

    name: str
    outcomes: tuple[Outcome, ...]
    seconds: float
    ways: dict[str, dict[str, int]]
    """By operator of ATen: how often it ran by which way."""

    def are_right(self, direction: str) -> bool | None:
        """Whether all trials of a direction were right; None if there were none."""
        verdicts = [outcome.verdict for outcome in self.outcomes if outcome.direction == direction]
        return all(verdict == RIGHT for verdict in verdicts) if verdicts else None


def survey(job: Job) -> Report:
    """Try one operator; it may raise, or take for ever."""
    start = time.monotonic()
    among: Sequence[Arrangement] = RUNTIMES[job.runtime]()
    outcomes: list[Outcome] = []
    before = statistics()
    with time_limit(OPERATOR_TIMEOUT_S):
        try:
            outcomes.extend(outcomes_of(job.name, job.scale, job.directions, among))
        except Exception as error:
            outcomes.append(_broken(job, f"{type(error).__name__}: {error}"))
    return Report(job.name, tuple(outcomes), time.monotonic() - start, _difference(before, statistics()))


def _broken(job: Job, text: str) -> Outcome:
    return Outcome(job.name, job.directions[0], "trial", 0, "", ERROR, text)


def statistics() -> dict[str, dict[str, int]]:
    """Return how often each operator of ATen ran by a rule, a decomposition or replication, where that is counted."""
    debug = importlib.import_module("dtckpt.dtensor.debug")
    found = getattr(debug, "operator_statistics", dict)()
    return {str(name): {str(way): int(count) for way, count in ways.items()} for name, ways in found.items()}


def _difference(before: dict[str, dict[str, int]], after: dict[str, dict[str, int]]) -> dict[str, dict[str, int]]:
    found = {}
    for name, ways in after.items():
        more = {way: count - before.get(name, {}).get(way, 0) for way, count in ways.items()}
        if any(more.values()):
            found[name] = {way: count for way, count in more.items() if count}
    return found


# --- all operators ------------------------------------------------------------------------------------------------


def reports_of(jobs: Sequence[Job], processes: int) -> Iterator[Report]:
    """Try operators in separate processes; an operator that ends its process is tried once more, alone."""
    left = list(jobs)
    lost: list[Job] = []
    with _executor(processes) as executor:
        futures = [executor.submit(survey, job) for job in left]
        for job, future in zip(left, futures, strict=True):
            report = _report_of(future)
            if report is None:
                lost.append(job)
            else:
                yield report
    for job in lost:
        with _executor(1) as executor:
            report = _report_of(executor.submit(survey, job))
        yield report or Report(job.name, (_broken(job, "the process died"),), 0.0, {})


def _executor(processes: int) -> ProcessPoolExecutor:
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(processes, mp_context=context, initializer=torch.set_num_threads, initargs=(1,))


def _report_of(future: Future[Report]) -> Report | None:
    try:
        return future.result()
    except BrokenProcessPool:
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--op", action="append", default=[], metavar="NAME", help="only operators whose name has this")
    parser.add_argument("--only", choices=DIRECTIONS, action="append", default=[], help="only this direction")
    parser.add_argument("--quick", action="store_true", help="what the suite tries")
    parser.add_argument("--on", choices=sorted(RUNTIMES), default="dtckpt", help="whose tensors")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--json", type=Path, help="write all outcomes here")
    options = parser.parse_args()
    names = [name for name in operators() if not options.op or any(part in name for part in options.op)]
    directions = tuple(options.only) or DIRECTIONS
    scale = QUICK if options.quick else FULL
    start = time.monotonic()
    reports = []
    for report in reports_of([Job(name, directions, scale, options.on) for name in names], options.jobs):
        reports.append(report)
        for line in lines_of(report):
            print(line, flush=True)
    print(*summary(reports, directions), sep="\n")
    print(f"{time.monotonic() - start:.0f} s")
    if options.json:
        options.json.write_text(json.dumps([dataclasses.asdict(report) for report in reports], indent=1))


# --- printed tables -----------------------------------------------------------------------------------------------


def lines_of(report: Report) -> Iterator[str]:
    """Return what failed, one line for each direction and reason, after a line with counts."""
    wrong = [outcome for outcome in report.outcomes if outcome.verdict != RIGHT]
    if not wrong:
        return
    counts = ", ".join(
        f"{direction} {sum(o.verdict == RIGHT for o in outcomes)}/{len(outcomes)}"
        for direction, outcomes in _by_direction(report.outcomes)
    )
    yield f"{report.name}: {counts}"
    for direction, outcomes in _by_direction(wrong):
        reasons = Counter((outcome.verdict, reason_of(outcome.text)) for outcome in outcomes)
        for (verdict, reason), count in reasons.most_common(3):
            first = next(o for o in outcomes if (o.verdict, reason_of(o.text)) == (verdict, reason))
            where = f"{first.form}, sample {first.sample}, {first.arrangement}"
            yield f"    {direction} {count}x {verdict} ({where}): {reason}"


def _by_direction(outcomes: Iterable[Outcome]) -> Iterator[tuple[str, list[Outcome]]]:
    found = list(outcomes)
    for direction in DIRECTIONS:
        if chosen := [outcome for outcome in found if outcome.direction == direction]:
            yield direction, chosen


def reason_of(text: str) -> str:
    """Return the beginning of a failure's text."""
    return " ".join(text.split())[:160]


def summary(reports: Sequence[Report], directions: Sequence[str]) -> Iterator[str]:
    """Return totals: operators and trials by direction, verdicts, ways, and where the time went."""
    yield ""
    for direction in directions:
        verdicts = Counter(o.verdict for report in reports for o in report.outcomes if o.direction == direction)
        claims = [claim for report in reports if (claim := report.are_right(direction)) is not None]
        detail = ", ".join(f"{count} {verdict}" for verdict, count in verdicts.most_common())
        yield f"{direction}: {sum(claims)} of {len(claims)} operators fully right; {verdicts.total()} trials: {detail}"
    if FORWARD in directions and BACKWARD in directions:
        both = [report.are_right(FORWARD) and report.are_right(BACKWARD) is not False for report in reports]
        yield f"{sum(map(bool, both))} of {len(both)} operators fully right forward and, where they have one, backward"
    ways = Counter[str]()
    for report in reports:
        for counts in report.ways.values():
            ways.update(counts)
    if ways:
        yield "how they ran: " + ", ".join(f"{count} by {way}" for way, count in ways.most_common())
    reasons = Counter(
        reason_of(outcome.text)[:90] for report in reports for outcome in report.outcomes if outcome.verdict != RIGHT
    )
    yield from (f"  {count:6d}x {reason}" for reason, count in reasons.most_common(SLOWEST))
    slowest = sorted(reports, key=lambda report: -report.seconds)[:SLOWEST]
    yield f"in trials {sum(report.seconds for report in reports):.0f} s of process time; most in: " + ", ".join(
        f"{report.name} {report.seconds:.1f} s" for report in slowest
    )


if __name__ == "__main__":
    main()
