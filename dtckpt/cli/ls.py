"""``dtckpt ls``: list the checkpoints below a root, as text or JSON."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from dtckpt.cli.options import LOCATION, debug_option, json_option, pager_option
from dtckpt.cli.output import finite_json, format_age, format_count, page, table_lines, write_event
from dtckpt.errors import format_nbytes, printable
from dtckpt.format.names import natural_key

if TYPE_CHECKING:
    from dtckpt.checkpoint.managing.leftovers import Leftover
    from dtckpt.checkpoint.managing.survey import Survey, SurveyedCheckpoint

LEFTOVER_AGE_S = 3600.0
"""As `CheckpointManager` has by default."""
MAX_METRICS = 4
"""Metrics of a checkpoint that a line shows."""

EPILOG = """\b
States:
  whole      a finished checkpoint whose metadata can be read; dtckpt verify reads its elements, too
  damaged    a finished checkpoint that cannot be opened; --json says why
  unfinished files of a save that is under way, or that was killed less than an hour ago
  leftover   of a save that did not end, or of a checkpoint that was removed; dtckpt gc removes it

\b
Examples:
  dtckpt ls run
  dtckpt ls run --sort size
  dtckpt ls s3://bucket/run --json

"""


@click.command("ls", epilog=EPILOG)
@click.argument("root", type=LOCATION)
@click.option(
    "--sort",
    type=click.Choice(("name", "size", "age")),
    default="name",
    show_default=True,
    help="Order: step 2 before step 10; or the largest, or the newest first.",
)
@pager_option
@json_option("Print one JSON line per checkpoint, then one with the totals.")
@debug_option
def command(*, root: str, sort: str, pager: bool, as_json: bool) -> None:
    """List the checkpoints below ROOT: steps, sizes, ages, states and metrics; * marks the newest valid one.

    ROOT is the directory or URL of a CheckpointManager, or any folder of checkpoints. On an object store, those are
    listed that dtckpt saved there. A step is rolled back if the run went back to an older one and saved again. Where
    checkpoints share files, OWN is the disk space that a removal of only this one frees, and SHARED the rest.
    """
    from dtckpt.checkpoint.managing.survey import survey
    from dtckpt.storage.location import location_of

    now = time.time()
    found = survey(location_of(root), min_age_s=LEFTOVER_AGE_S, now=now)
    checkpoints = sorted(found.checkpoints, key=lambda each: _order(each, sort))
    if as_json:
        _write_json(found, checkpoints, now)
    else:
        page(_lines(found, checkpoints, now), is_wanted=pager)


def _order(each: SurveyedCheckpoint, sort: str) -> tuple[Any, ...]:
    if sort == "size":
        return (-(each.nbytes or 0), each.name)
    if sort == "age":
        return (-(each.saved_s or 0.0), each.name)
    return (each.step is None, each.step or 0, natural_key(each.name))


# --- JSON -------------------------------------------------------------------------------------------------------------


def _write_json(found: Survey, checkpoints: list[SurveyedCheckpoint], now: float) -> None:
    for each in checkpoints:
        write_event(
            "checkpoint",
            path=str(each.where),
            name=each.name,
            step=each.step,
            state="damaged" if each.damage else "whole",
            reason=each.damage or None,
            is_newest_valid=_is_newest(found, each),
            is_rolled_back=each.is_rolled_back,
            tensors=each.num_tensors,
            bytes=each.nbytes,
            own_bytes=None if each.usage is None else each.usage.own_nbytes,
            shared_bytes=None if each.usage is None else each.usage.shared_nbytes,
            saved_s=each.saved_s,
            age_s=None if each.saved_s is None else round(now - each.saved_s, 3),
            metrics={name: finite_json(value) for name, value in each.metrics.items()},
        )
    for leftover in found.leftovers:
        write_event("attempt", **leftover_facts(leftover, now))
    write_event(
        "ls",
        root=str(found.root.where),
        checkpoints=len(checkpoints),
        bytes=sum(each.nbytes or 0 for each in checkpoints),
        newest_valid=found.newest_valid,
        holder=found.root.right.holder() or None,
    )


def leftover_facts(leftover: Leftover, now: float) -> dict[str, Any]:
    """Return the facts about an attempt for JSON."""
    return {
        "path": str(leftover.where),
        "name": leftover.name,
        "state": "leftover" if leftover.is_dead else "unfinished",
        "bytes": leftover.nbytes,
        "since_s": leftover.since_s,
        "age_s": round(now - leftover.since_s, 3),
        "holder": leftover.holder or None,
    }


def _is_newest(found: Survey, each: SurveyedCheckpoint) -> bool:
    return each.step is not None and each.step == found.newest_valid


# --- text -------------------------------------------------------------------------------------------------------------


def _lines(found: Survey, checkpoints: list[SurveyedCheckpoint], now: float) -> Iterator[str]:
    rows = [_row(found, each, now) for each in checkpoints]
    rows += [leftover_row(leftover, now) for leftover in found.leftovers]
    header: tuple[str, ...] = ("NAME", "", "SIZE", "AGE", "STATE", "")
    if any(each.usage is not None for each in checkpoints):
        header = _with_usage(header, ("OWN", "SHARED"))
        cells = [_usage_cells(each) for each in checkpoints] + [("", "")] * len(found.leftovers)
        rows = list(map(_with_usage, rows, cells))
    if rows:
        yield from table_lines(header, rows)
        yield ""
    total = format_nbytes(sum(each.nbytes or 0 for each in checkpoints))
    newest = "no valid step" if found.newest_valid is None else f"newest valid step {found.newest_valid}"
    yield printable(f"{found.root.where}: {format_count(len(checkpoints), 'checkpoint')}, {total}; {newest}")


def _with_usage(row: tuple[str, ...], cells: tuple[str, str]) -> tuple[str, ...]:
    """Return a row with the cells of the disk space behind the size."""
    return (*row[:3], *cells, *row[3:])


def _usage_cells(each: SurveyedCheckpoint) -> tuple[str, str]:
    usage = each.usage
    return ("", "") if usage is None else (format_nbytes(usage.own_nbytes), format_nbytes(usage.shared_nbytes))


def _row(found: Survey, each: SurveyedCheckpoint, now: float) -> tuple[str, ...]:
    shown = [f"{name}={value:g}" for name, value in sorted(each.metrics.items())[:MAX_METRICS]]
    left = len(each.metrics) - MAX_METRICS
    notes = ["rolled back"] * each.is_rolled_back + shown + [f"and {left} more"] * (left > 0)
    return (
        each.name,
        "*" if _is_newest(found, each) else "",
        "" if each.nbytes is None else format_nbytes(each.nbytes),
        "" if each.saved_s is None else format_age(now - each.saved_s),
        "damaged" if each.damage else "whole",
        each.damage or ", ".join(notes),
    )


def leftover_row(leftover: Leftover, now: float) -> tuple[str, ...]:
    """Return the cells of the row of an attempt."""
    size = "" if leftover.nbytes is None else format_nbytes(leftover.nbytes)
    state = "leftover" if leftover.is_dead else "unfinished"
    note = f"by {leftover.holder}" if leftover.holder else str(leftover.where.name)
    return leftover.name, "", size, format_age(now - leftover.since_s), state, note
