"""``dtckpt gc``: show, and remove, garbage below a root."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from dtckpt.checkpoint.managing.garbage import Garbage, find_garbage, remove_step, right_to_remove, sum_nbytes
from dtckpt.checkpoint.managing.retention import Retention
from dtckpt.cli.ls import leftover_facts, leftover_row
from dtckpt.cli.output import (
    format_age,
    format_count,
    open_progress,
    write_event,
    write_line,
    write_summary,
    write_table,
)
from dtckpt.errors import ConfigError, StorageError, capped, format_nbytes, printable
from dtckpt.storage.location import location_of


@dataclass(frozen=True, slots=True, kw_only=True)
class GcRequest:
    """The arguments of the command, as `click` passes them; see `dtckpt.cli.commands`."""

    root: str
    keep: int | None
    keep_every: int | None
    keep_newer_s: float | None
    keep_every_s: float | None
    keep_best: int | None
    metric: str
    mode: str
    min_age_s: float
    is_confirmed: bool
    take_over: bool
    as_json: bool


def run_gc(request: GcRequest) -> None:
    """Run the command.

    Raises:
        CheckpointNotFoundError: There is no such root.
        CheckpointConflictError: A manager saves there.
        ConfigError: No step has the metric.
        StorageError: A leftover cannot be removed.
    """
    now = time.time()
    where = location_of(request.root)
    keep = Retention(
        last=request.keep,
        every_steps=request.keep_every,
        newer_than_s=request.keep_newer_s,
        every_s=request.keep_every_s,
        best=request.keep_best,
        metric=request.metric,
        mode=request.mode,
    )

    def find() -> Garbage:
        return find_garbage(where, keep, min_age_s=request.min_age_s, now=now)

    garbage = find()
    if request.keep_best:
        _validate_metric(garbage, request.metric)
    if not request.is_confirmed:
        _report(garbage, now, request, kept=frozenset())
        return
    with right_to_remove(garbage.found, take_over=request.take_over):
        garbage = find()  # now that nobody else changes it
        kept = _remove(garbage, min_age_s=request.min_age_s, now=now)
        left = garbage.found.root.leftovers(min_age_s=request.min_age_s, now=now)
    stay = {each.name: each.where.name for each in left if each.is_dead}
    removed = replace(garbage, leftovers=tuple(each for each in garbage.leftovers if each.name not in stay))
    _report(removed, now, request, kept=kept)
    if stay:
        names = capped(sorted(stay.values()))
        raise StorageError(f"cannot remove all leftovers below {where}: {names} stay; check their permissions")


def _validate_metric(garbage: Garbage, metric: str) -> None:
    """Refuse a metric that no step has, which is most likely a typo: it would keep nothing."""
    known = sorted({name for each in garbage.found.checkpoints for name in each.metrics})
    if metric not in known:
        has = f"they have {', '.join(known)}" if known else "they have none"
        raise ConfigError(f"no step below {garbage.found.root.where} has the metric {metric!r}; {has}: see --metric")


def _remove(garbage: Garbage, *, min_age_s: float, now: float) -> frozenset[int]:
    """Remove the garbage; return the steps that stay because they are being restored."""
    kept = set()
    with open_progress("removing", garbage.nbytes) as progress:
        for each in garbage.steps:
            if each.step is not None and not remove_step(garbage.found, each.step):
                kept.add(each.step)
            progress.advance(each.name, each.nbytes or 0)
        garbage.found.root.collect(min_age_s=min_age_s, now=now)
    return frozenset(kept)


def _report(garbage: Garbage, now: float, request: GcRequest, *, kept: frozenset[int]) -> None:
    gone = [each for each in garbage.steps if each.step not in kept]
    nbytes = sum_nbytes(gone) + sum_nbytes(garbage.leftovers)
    if request.as_json:
        for leftover in garbage.leftovers:
            write_event("leftover", **leftover_facts(leftover, now))
        for each in garbage.steps:
            write_event(
                "step",
                path=str(each.where),
                step=each.step,
                bytes=each.nbytes,
                is_rolled_back=each.is_rolled_back,
                is_in_use=each.step in kept,
            )
        write_event(
            "gc",
            root=str(garbage.found.root.where),
            dry_run=not request.is_confirmed,
            leftovers=len(garbage.leftovers),
            steps=len(gone),
            bytes=nbytes,
            in_use=len(kept),
            newest_valid=garbage.found.newest_valid,
        )
        return
    rows = [leftover_row(leftover, now) for leftover in garbage.leftovers]
    rows += [
        (
            each.name,
            "",
            "" if each.nbytes is None else format_nbytes(each.nbytes),
            "" if each.saved_s is None else format_age(now - each.saved_s),
            "in use" if each.step in kept else "rolled back" if each.is_rolled_back else "no rule keeps it",
            "",
        )
        for each in garbage.steps
    ]
    if rows:
        write_table(("NAME", "", "SIZE", "AGE", "WHY", ""), rows)
        write_line("")
    what = f"{format_count(len(garbage.leftovers), 'leftover')} and {format_count(len(gone), 'step')}"
    total = f"{what}, {format_nbytes(nbytes)}"
    root = printable(str(garbage.found.root.where))
    if request.is_confirmed:
        write_summary(f"removed from {root}: {total}")
    else:
        write_summary(f"would remove from {root}: {total}; this was a dry run, --yes removes them")
