"""``dtckpt sign``: sign a checkpoint, so that restores with trusted keys accept it."""

from __future__ import annotations

import click

from dtckpt.cli.options import LOCATION, debug_option, json_option, quiet_option
from dtckpt.cli.output import format_count, open_progress, write_event, write_summary
from dtckpt.errors import format_nbytes, printable

EPILOG = """\b
Examples:
  openssl genpkey -algorithm ed25519 -out key.pem
  openssl pkey -in key.pem -pubout -out key.pub
  dtckpt sign run/step_00000100 --key key.pem
  dtckpt verify run/step_00000100 --key key.pub

"""


@click.command("sign", epilog=EPILOG)
@click.argument("path", type=LOCATION)
@click.option("--key", required=True, type=click.Path(), metavar="FILE", help="Private Ed25519 key, in PEM.")
@json_option("Print one JSON line with the result.")
@quiet_option
@debug_option
def command(*, path: str, key: str, as_json: bool) -> None:
    """Verify checkpoint PATH, and sign the SHA-256 digests of its files; the signature is dtckpt.signature in it.

    A restore with RestoreOptions(trusted_keys=...) refuses a checkpoint that no trusted key has signed, or that was
    changed after that. Needs the package cryptography: pip install 'dtckpt[sign]'.
    """
    from dtckpt.checkpoint.open import open_checkpoint
    from dtckpt.checkpoint.signing.sign import sign

    with open_checkpoint(path) as checkpoint:
        nbytes = sum(info.nbytes for info in checkpoint.tensors.values())
    with open_progress("signing", nbytes) as progress:
        report = sign(path, key, progress=progress.advance)
    if as_json:
        write_event(
            "signed",
            path=str(report.path),
            key=report.key,
            files=report.num_files,
            bytes=report.nbytes,
            signatures=report.num_signatures,
            seconds=round(report.seconds, 6),
        )
        return
    rate = format_nbytes(report.nbytes / max(report.seconds, 1e-9))
    files = f"{format_count(report.num_files, 'file')}, {format_nbytes(report.nbytes)}"
    write_summary(
        printable(f"{report.path} is signed by key {report.key}: {files} in {report.seconds:.1f} s ({rate}/s)")
    )
