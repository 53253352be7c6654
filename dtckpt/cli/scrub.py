"""``dtckpt scrub``: verify the steps of a root in rounds, and mend damaged files from a copy."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dtckpt.cli.exit_codes import ExitCode
from dtckpt.cli.options import LOCATION, debug_option, json_option, parse_size, quiet_option
from dtckpt.cli.output import format_age, format_count, open_progress, write_event, write_line, write_summary
from dtckpt.errors import CheckpointError, capped, format_nbytes, printable

if TYPE_CHECKING:
    from dtckpt.checkpoint.copying.scrub import ScrubReport

EPILOG = """\b
Examples:
  dtckpt scrub run                                     all steps, now
  dtckpt scrub run --bytes-per-day 2TB                 from a timer: each run goes on where the last one ended
  dtckpt scrub run --from s3://bucket/run --metrics /var/lib/node_exporter/dtckpt_scrub.prom

"""


@click.command("scrub", epilog=EPILOG)
@click.argument("root", type=LOCATION)
@click.option("--bytes-per-day", metavar="SIZE", help="Read at most so many bytes a day: 500GiB, 2TB.")
@click.option("--from", "source", type=LOCATION, metavar="OTHER", help="Mend damage from this root of copies.")
@click.option("--max-rate", metavar="SIZE", help="Bound on bytes per second: 200MiB, 1GB.")
@click.option(
    "--metrics",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write metrics to a file, in the text format of Prometheus.",
)
@json_option("Print one JSON line per damage, then one with the totals.")
@quiet_option
@debug_option
def command(
    *,
    root: str,
    bytes_per_day: str | None,
    source: str | None,
    max_rate: str | None,
    metrics: Path | None,
    as_json: bool,
) -> ExitCode:
    """Verify the steps below ROOT in rounds, within a budget; exit with 1 if damage is left.

    A run goes on where the last one ended, as .dtckpt-scrub.json in ROOT remembers. With --from, a damaged file is
    replaced by its sound parts and the parts that the copy has; then it is no damage that is left.
    """
    from dtckpt.checkpoint.copying.copy import expected_nbytes
    from dtckpt.checkpoint.copying.scrub import scrub
    from dtckpt.storage.location import location_of

    expected = 0
    with suppress(CheckpointError):  # which `scrub` raises, or counts as damage
        expected = expected_nbytes(location_of(root))
    with open_progress("scrubbing", expected) as progress:
        report = scrub(
            root,
            bytes_per_day=None if bytes_per_day is None else parse_size(bytes_per_day),
            source=source,
            max_rate=None if max_rate is None else parse_size(max_rate),
            progress=progress.advance,
        )
    if metrics is not None:
        _write_metrics(report, metrics)
    if as_json:
        _write_json(report)
    else:
        _write_text(report)
    return ExitCode.OK if report.is_sound else ExitCode.FAILED


def _write_json(report: ScrubReport) -> None:
    for damage in report.damages:
        write_event(
            "damage",
            checkpoint=str(damage.checkpoint),
            file=damage.file or None,
            reason=damage.reason,
            is_mended=damage.is_mended,
        )
    write_event(
        "scrub",
        root=str(report.root),
        is_sound=report.is_sound,
        checkpoints=report.num_checkpoints,
        bytes=report.nbytes,
        damages=len(report.damages),
        mended=sum(damage.is_mended for damage in report.damages),
        damaged=list(report.damaged),
        rounds=report.rotations,
        began_s=report.began_s,
        next=report.next or None,
        seconds=round(report.seconds, 6),
    )


def _write_text(report: ScrubReport) -> None:
    for damage in report.damages:
        state = "mended" if damage.is_mended else "DAMAGED"
        write_line(printable(f"{state}: {damage.checkpoint} {damage.file}: {damage.reason}"))
    read = f"{format_count(report.num_checkpoints, 'checkpoint')}, {format_nbytes(report.nbytes)} read"
    state = f"; damage is left in {capped(report.damaged)}" if report.damaged else "; no damage is left"
    age = format_age(time.time() - report.began_s)
    where = f"; the next run begins with {report.next}, in a round of {age}" if report.next else "; the round has ended"
    write_summary(printable(f"{report.root}: {read} in {report.seconds:.1f} s{state}{where}"))


def _write_metrics(report: ScrubReport, path: Path) -> None:
    """Write the metrics in one step: a collector may read the file at any moment."""
    import prometheus_client as prometheus

    from dtckpt.storage.failures import translate_errors
    from dtckpt.storage.local_folder import LocalFolder

    registry, root = prometheus.CollectorRegistry(), str(report.root)
    mended = sum(damage.is_mended for damage in report.damages)
    for name, text, value in (
        ("last_run_timestamp_seconds", "When the last run ended.", time.time()),
        ("last_run_seconds", "The time that the last run took.", report.seconds),
        ("last_run_read_bytes", "Bytes that the last run read.", report.nbytes),
        ("last_run_damages", "Damages that the last run found.", len(report.damages)),
        ("last_run_mended", "Damages that the last run mended.", mended),
        ("damaged_checkpoints", "Checkpoints whose damage is left.", len(report.damaged)),
        ("rounds", "Rounds through the root that have ended.", report.rotations),
        ("round_start_timestamp_seconds", "When the round began that is under way, or the last one.", report.began_s),
    ):
        prometheus.Gauge(f"dtckpt_scrub_{name}", text, ["root"], registry=registry).labels(root).set(value)
    with translate_errors("write the metrics", path):
        LocalFolder(path.absolute().parent).replace(path.name, prometheus.generate_latest(registry))
