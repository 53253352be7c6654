"""``dtckpt copy``: copy a checkpoint, or the steps of a root, to another place."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from dtckpt.cli.exit_codes import ExitCode
from dtckpt.cli.options import debug_option, json_option, parse_size, quiet_option, source_and_target
from dtckpt.cli.output import format_count, open_progress, write_event, write_line, write_summary
from dtckpt.errors import ConfigError, format_nbytes, printable

if TYPE_CHECKING:
    from dtckpt.checkpoint.copying.copy import CopyReport
    from dtckpt.checkpoint.copying.copy_files import CopiedCheckpoint

MAX_DIGITS = 19
"""Steps have fewer digits."""

EPILOG = """\b
Examples:
  dtckpt copy run s3://bucket/run                all steps
  dtckpt copy run /archive/run --newest 1 --max-rate 200MiB
  dtckpt copy s3://bucket/run/step_00000100 /scratch/step_100
  dtckpt copy run /archive/run --keep-links --steps 100,200

A copy that was interrupted goes on where it was: start the same command again.

"""


@click.command("copy", epilog=EPILOG)
@source_and_target
@click.option(
    "--newest", type=click.IntRange(min=1), metavar="N", help="Of a root: copy the N newest steps of the run."
)
@click.option("--steps", metavar="STEP,...", help="Of a root: copy these steps.")
@click.option("--keep-links", is_flag=True, help="Keep hard links between the files of a root as hard links.")
@click.option("--overwrite", is_flag=True, help="Replace another checkpoint at DST, once the copy is durable.")
@click.option("--max-rate", metavar="SIZE", help="Bound on bytes per second: 200MiB, 1GB.")
@click.option(
    "--threads", type=click.IntRange(min=1), default=4, show_default=True, help="Files that are copied at one time."
)
@json_option("Print one JSON line per checkpoint, then one with the totals.")
@quiet_option
@debug_option
def command(
    *,
    src: str,
    dst: str,
    newest: int | None,
    steps: str | None,
    keep_links: bool,
    overwrite: bool,
    max_rate: str | None,
    threads: int,
    as_json: bool,
) -> ExitCode:
    """Copy checkpoint SRC, or the steps of root SRC, to DST; both are paths or URLs.

    Every byte is verified by digest on both sides. Each checkpoint appears at DST whole or not at all. Checkpoints
    that DST has already are passed over; exit with 1 if a step could not be copied.
    """
    from dtckpt.checkpoint.copying.copy import copy, expected_nbytes
    from dtckpt.storage.location import location_of

    chosen = None if steps is None else _parse_steps(steps)
    rate = None if max_rate is None else parse_size(max_rate)
    expected = expected_nbytes(location_of(src), newest=newest, steps=chosen)
    with open_progress("copying", expected) as progress:
        report = copy(
            src,
            dst,
            newest=newest,
            steps=chosen,
            keep_links=keep_links,
            overwrite=overwrite,
            max_rate=rate,
            threads=threads,
            progress=progress.advance,
            copied=_write_event if as_json else _write_failure,
        )
    if as_json:
        _write_totals(report)
    else:
        _write_text(report)
    return ExitCode.FAILED if report.failed else ExitCode.OK


def _parse_steps(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.isdecimal() and part.isascii() and len(part) < MAX_DIGITS for part in parts):
        raise ConfigError(f"--steps {text!r} cannot be used; expected steps with commas between them: 100,200")
    return [int(part) for part in parts]


def _write_event(copied: CopiedCheckpoint) -> None:
    write_event(
        "copied",
        source=str(copied.source),
        target=str(copied.target),
        is_copied=not copied.failure,
        reason=copied.failure or None,
        was_there=copied.was_there,
        files=copied.num_files,
        kept=copied.num_kept,
        linked=copied.num_linked,
        by_store=copied.num_by_store,
        bytes=copied.nbytes,
        seconds=round(copied.seconds, 6),
    )


def _write_failure(copied: CopiedCheckpoint) -> None:
    if copied.failure:
        write_line(printable(f"not copied: {copied.source}: {copied.failure}"))


def _write_totals(report: CopyReport) -> None:
    write_event(
        "copy",
        source=str(report.source),
        target=str(report.target),
        checkpoints=len(report.checkpoints),
        failed=len(report.failed),
        were_there=sum(each.was_there for each in report.checkpoints),
        bytes=report.nbytes,
        seconds=round(report.seconds, 6),
    )


def _write_text(report: CopyReport) -> None:
    there = sum(each.was_there for each in report.checkpoints)
    new = format_count(len(report.checkpoints) - there - len(report.failed), "checkpoint")
    rate = format_nbytes(report.nbytes / max(report.seconds, 1e-9))
    notes = [
        f"{there} were there already" if there else "",
        f"{len(report.failed)} could not be copied" if report.failed else "",
        f"{format_count(kept, 'file')} from an earlier call" if (kept := _total(report, "num_kept")) else "",
        f"{format_count(linked, 'hard link')}" if (linked := _total(report, "num_linked")) else "",
        f"{format_count(by_store, 'file')} by the store itself" if (by_store := _total(report, "num_by_store")) else "",
    ]
    write_summary(
        printable(
            f"copied {new} to {report.target}: {format_nbytes(report.nbytes)} in {report.seconds:.1f} s ({rate}/s)"
            + "".join(f"; {note}" for note in notes if note)
        )
    )


def _total(report: CopyReport, name: str) -> int:
    return sum(getattr(each, name) for each in report.checkpoints)
