"""``dtckpt gc``: show, and remove, garbage below a root."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click

from dtckpt.cli.ls import leftover_facts, leftover_row
from dtckpt.cli.options import LOCATION, debug_option, json_option, quiet_option
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

if TYPE_CHECKING:
    from dtckpt.checkpoint.managing.garbage import Garbage


EPILOG = """\b
Examples:
  dtckpt gc run                             leftovers of saves that were killed
  dtckpt gc run --keep 3 --keep-every 100   and which steps would go
  dtckpt gc run --keep 3 --keep-every 100 --yes
  dtckpt gc run --keep 1 --keep-best 2 --metric loss

"""


@click.command("gc", epilog=EPILOG)
@click.argument("root", type=LOCATION)
@click.option("--keep", type=click.IntRange(min=1), metavar="N", help="Keep the N newest steps.")
@click.option("--keep-every", type=click.IntRange(min=1), metavar="N", help="Keep steps that are multiples of N.")
@click.option("--keep-newer-s", type=click.FloatRange(min=1), metavar="S", help="Keep steps younger than S s.")
@click.option("--keep-every-s", type=click.FloatRange(min=1), metavar="S", help="Keep the first step of each S s.")
@click.option("--keep-best", type=click.IntRange(min=1), metavar="N", help="Keep the N steps with the best metric.")
@click.option("--metric", metavar="NAME", default="loss", show_default=True, help="Which metric.")
@click.option(
    "--mode", type=click.Choice(("min", "max")), default="min", show_default=True, help="Which metric is the best."
)
@click.option(
    "--min-age",
    "min_age_s",
    type=click.FloatRange(min=0),
    default=3600.0,
    show_default=True,
    metavar="SECONDS",
    help="How long nothing changed in a leftover, at least.",
)
@click.option("--yes", "is_confirmed", is_flag=True, help="Remove; without it, only show.")
@click.option(
    "--take-over",
    is_flag=True,
    help="On an object store: remove although a manager is registered; if it lives, its next save is refused.",
)
@json_option("Print one JSON line per leftover and step, then one with the totals.")
@quiet_option
@debug_option
def command(
    *,
    root: str,
    keep: int | None,
    keep_every: int | None,
    keep_newer_s: float | None,
    keep_every_s: float | None,
    keep_best: int | None,
    metric: str,
    mode: str,
    min_age_s: float,
    is_confirmed: bool,
    take_over: bool,
    as_json: bool,
) -> None:
    """Show, and with --yes remove, leftovers below ROOT and the old steps that no --keep rule keeps.

    The rules work as in a CheckpointManager. Without a rule, all steps stay. The newest valid step, damaged steps, and
    files that a process writes or restores, always stay.
    """
    from dataclasses import replace

    from dtckpt.checkpoint.managing.garbage import find_garbage, right_to_remove
    from dtckpt.checkpoint.managing.retention import Retention
    from dtckpt.storage.location import location_of

    now = time.time()
    where = location_of(root)
    rules = Retention(
        last=keep,
        every_steps=keep_every,
        newer_than_s=keep_newer_s,
        every_s=keep_every_s,
        best=keep_best,
        metric=metric,
        mode=mode,
    )

    def find() -> Garbage:
        return find_garbage(where, rules, min_age_s=min_age_s, now=now)

    garbage = find()
    if keep_best:
        _validate_metric(garbage, metric)
    if not is_confirmed:
        _report(garbage, now, kept=frozenset(), is_confirmed=False, as_json=as_json)
        return
    with right_to_remove(garbage.found, take_over=take_over):
        garbage = find()  # now that no other process changes it
        kept = _remove(garbage, min_age_s=min_age_s, now=now)
        left = garbage.found.root.leftovers(min_age_s=min_age_s, now=now)
    stay = {each.name: each.where.name for each in left if each.is_dead}
    removed = replace(garbage, leftovers=tuple(each for each in garbage.leftovers if each.name not in stay))
    _report(removed, now, kept=kept, is_confirmed=True, as_json=as_json)
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
    from dtckpt.checkpoint.managing.garbage import remove_step

    kept = set()
    with open_progress("removing", garbage.nbytes) as progress:
        for each in garbage.steps:
            if each.step is not None and not remove_step(garbage.found, each.step):
                kept.add(each.step)
            progress.advance(each.name, each.nbytes or 0)
        garbage.found.root.collect(min_age_s=min_age_s, now=now)
    return frozenset(kept)


def _report(garbage: Garbage, now: float, *, kept: frozenset[int], is_confirmed: bool, as_json: bool) -> None:
    from dtckpt.checkpoint.managing.garbage import sum_nbytes

    gone = [each for each in garbage.steps if each.step not in kept]
    nbytes = sum_nbytes(gone) + sum_nbytes(garbage.leftovers)
    if as_json:
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
            dry_run=not is_confirmed,
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
    if is_confirmed:
        write_summary(f"removed from {root}: {total}")
    else:
        write_summary(f"would remove from {root}: {total}; this was a dry run, --yes removes them")
