"""The group of all commands, and how one of them runs: its errors become messages and exit codes.

A command is a module of `dtckpt.cli` with its options and its body. The module is imported when the command runs, when
its help is asked, or when a shell completes its arguments. Its body imports PyTorch, NumPy and
storage, so that ``--help`` does not wait for them.
"""

from __future__ import annotations

import importlib
import traceback
from collections import UserDict
from collections.abc import Sequence
from typing import Any

import click

import dtckpt
from dtckpt.cli.exit_codes import ExitCode, exit_code_of
from dtckpt.cli.live_access import job_of_command
from dtckpt.cli.options import debug_option
from dtckpt.cli.output import write_event
from dtckpt.errors import DtckptError, printable

NAMES = (
    "cat",
    "completion",
    "convert",
    "copy",
    "diff",
    "gc",
    "help",
    "inspect",
    "live",
    "ls",
    "plot",
    "reshard",
    "scrub",
    "sign",
    "simulate",
    "status",
    "tiers",
    "verify",
)
"""The commands: each is `command` of the module of this name."""

_OPTIONS = (
    ("pass SaveOptions(overwrite=True)", "pass --overwrite"),
    ("pass overwrite=True", "pass --overwrite"),
    ("pass ignore_rest=True", "pass --ignore-rest"),
    ("max_memory is too small", "--max-memory is too small"),
)
"""The library's words for an argument, and the command line's words for the option."""


class LazyCommands(UserDict[str, Any]):
    """The commands by name; a look-up imports the command's module.

    Args:
        data: The modules by name.
    """

    def __getitem__(self, name: str) -> click.Command:
        command: click.Command = importlib.import_module(super().__getitem__(name)).command
        return command


@click.group(
    commands=LazyCommands({name: f"dtckpt.cli.{name}" for name in NAMES}),
    no_args_is_help=False,
    epilog="""\b
Topics:
  dtckpt help COMMAND      the same as dtckpt COMMAND --help
  dtckpt help exit-codes   the meaning of the exit codes
""",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.version_option(dtckpt.__version__, prog_name="dtckpt", message="%(prog)s %(version)s")
@debug_option
def cli() -> None:
    """Look at checkpoints and lay them out anew, without the devices that they are for; look at running jobs."""


def run(arguments: Sequence[str]) -> int:
    """Run a command and return its exit code."""
    with job_of_command(arguments):
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
