"""``dtckpt verify``: read a whole checkpoint, compare every digest, and report the damage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from dtckpt.cli.exit_codes import ExitCode
from dtckpt.cli.options import LOCATION, debug_option, json_option, map_options, parse_map, quiet_option
from dtckpt.cli.output import format_count, open_progress, write_event, write_line, write_summary
from dtckpt.errors import format_nbytes, printable

if TYPE_CHECKING:
    from dtckpt.checkpoint.reading.verify import Damage, VerifyReport


EPILOG = """\b
Examples:
  dtckpt verify step_100
  dtckpt verify s3://bucket/step_100 --threads 16 --json
  dtckpt verify step_100 --key release.pub
  dtckpt verify step_100 --map names.json

"""


@click.command("verify", epilog=EPILOG)
@click.argument("path", type=LOCATION)
@click.option("--threads", type=click.IntRange(min=1), help="Chunks that are read at one time [default: one per core].")
@click.option(
    "--key",
    "keys",
    type=click.Path(),
    multiple=True,
    metavar="FILE",
    help="Public Ed25519 key, in PEM: refuse a checkpoint without a signature of such a key.",
)
@map_options
@json_option("Print one JSON line per damage, then one with the result.")
@quiet_option
@debug_option
def command(
    *,
    path: str,
    threads: int | None,
    keys: tuple[str, ...],
    map_name: str | None,
    map_back: str | None,
    map_sizes: Sequence[str],
    as_json: bool,
) -> ExitCode:
    """Read all of checkpoint PATH and compare every digest; exit with 1 if anything is damaged.

    With a map, damaged tensors have the names that the map gives them.
    """
    from dtckpt.checkpoint.open import open_checkpoint

    rules = parse_map(map_name, map_back, map_sizes)
    with open_checkpoint(path, map=rules, trusted_keys=keys) as checkpoint:
        nbytes = sum(info.nbytes for info in checkpoint.tensors.values())
        signed = checkpoint.signed
        with open_progress("verifying", nbytes) as progress:
            if signed is not None:  # all files, also files that no reader needs
                signed.validate_files()
            report = checkpoint.verify(threads=threads, progress=progress.advance)
    signers = () if signed is None else signed.signers
    if as_json:
        _write_json(report, signers)
    else:
        _write_text(report, signers)
    return ExitCode.OK if report.is_sound else ExitCode.FAILED


def _write_json(report: VerifyReport, signers: Sequence[str]) -> None:
    for damage in report.damages:
        write_event("damage", tensor=damage.tensor, region=_region_text(damage), reason=damage.reason)
    write_event(
        "verified",
        path=str(report.path),
        is_sound=report.is_sound,
        tensors=report.num_tensors,
        contents=report.num_contents,
        unverified=report.num_unverified,
        chunks=report.num_chunks,
        bytes=report.nbytes,
        damages=len(report.damages),
        unread=report.unread,
        signed_by=list(signers),
        seconds=round(report.seconds, 6),
    )


def _write_text(report: VerifyReport, signers: Sequence[str]) -> None:
    for damage in report.damages:
        write_line(printable(f"damaged: {damage.tensor} {_region_text(damage) or ''}: {damage.reason}"))
    for name in report.unread:
        write_line(printable(f"not verified: {name}"))
    result = "readable" if report.num_unverified else "sound"
    if report.damages:
        result = f"DAMAGED in {format_count(len(report.damages), 'place')}"
    tensors, chunks = format_count(report.num_tensors, "tensor"), format_count(report.num_chunks, "chunk")
    rate = format_nbytes(report.nbytes / max(report.seconds, 1e-9))
    write_summary(
        f"{printable(str(report.path))} is {result}: {tensors}, {chunks}, {format_nbytes(report.nbytes)} read in "
        f"{report.seconds:.1f} s ({rate}/s)"
    )
    if report.num_unverified:
        tensors = format_count(report.num_unverified, "tensor")
        write_summary(f"no digest is noted of {tensors}: bytes that changed since are not found there")
    if signers:
        write_summary(f"signed by {', '.join(f'key {signer}' for signer in signers)}")


def _region_text(damage: Damage) -> str | None:
    return None if damage.region is None else str(damage.region)
