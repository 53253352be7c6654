"""Runs one command of ``dtckpt``, and turns its errors into messages and exit codes."""

from __future__ import annotations

import traceback
from collections.abc import Sequence

import click

from dtckpt.cli.commands import cli
from dtckpt.cli.exit_codes import ExitCode, exit_code_of
from dtckpt.cli.output import write_event
from dtckpt.errors import DtckptError, printable

_OPTIONS = (
    ("pass SaveOptions(overwrite=True)", "pass --overwrite"),
    ("pass overwrite=True", "pass --overwrite"),
    ("pass ignore_rest=True", "pass --ignore-rest"),
    ("max_memory is too small", "--max-memory is too small"),
)
"""The library's words for an argument, and the command line's words for the option."""


def run(arguments: Sequence[str]) -> int:
    """Run a command and return its exit code."""
    # click returns a code if it has answered by itself, as for --help.
    return cli.main(list(arguments), prog_name="dtckpt", standalone_mode=False) or ExitCode.OK


def report(error: BaseException, arguments: Sequence[str]) -> int:
    """Print the error of a command, unless it has ended by itself; return its exit code."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else ExitCode.FAILED
    code, message = exit_code_of(error), _message(error)
    # Searched by hand, because parsing may have failed.
    flags = arguments[: arguments.index("--")] if "--" in arguments else arguments
    if "--debug" in flags:
        click.echo("".join(traceback.format_exception(error)), err=True, nl=False)
    click.echo(f"dtckpt: error: {printable(message)}", err=True)
    if "--json" in flags:
        write_event("error", code=type(error).__name__, exit_code=code, message=message)
    return code


def _message(error: BaseException) -> str:
    if isinstance(error, click.UsageError):
        hint = f"; see '{error.ctx.command_path} --help'" if error.ctx else ""
        return " ".join(error.format_message().rstrip(".").split()) + hint
    if isinstance(error, DtckptError):
        message = error.message
        for argument, option in _OPTIONS:
            message = message.replace(argument, option)
        return message
    if isinstance(error, click.ClickException):
        return error.format_message()
    if isinstance(error, OSError):
        return str(error)
    return f"internal error: {type(error).__name__}: {error}"
