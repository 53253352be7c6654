"""The entry point ``dtckpt``: runs a command, and turns errors and signals into messages and exit codes."""

from __future__ import annotations

import shlex
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

import click

from dtckpt.cli.commands import cli
from dtckpt.cli.exit_codes import ExitCode, exit_code_of
from dtckpt.cli.output import write_event
from dtckpt.errors import DtckptError, printable

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
INTERRUPTED = tuple(128 + number for number in _SIGNALS)
"""Exit codes of a command that was interrupted or terminated."""
WRITERS = ("reshard", "convert")
"""The commands that write a checkpoint."""
_OPTIONS = (
    ("pass overwrite=True", "pass --overwrite"),
    ("pass ignore_rest=True", "pass --ignore-rest"),
    ("max_memory is too small", "--max-memory is too small"),
)
"""By the words in which the library names an argument, those that name the option."""


def main(args: Sequence[str] | None = None) -> int:
    """Run ``dtckpt`` and return its exit code.

    Args:
        args: Arguments; default: those of this process.
    """
    arguments = list(sys.argv[1:] if args is None else args)
    try:
        with _exit_on_signals():
            # click returns a code if it has answered by itself, as for --help.
            return cli.main(arguments, prog_name="dtckpt", standalone_mode=False) or ExitCode.OK
    except SystemExit as end:
        if end.code in INTERRUPTED:
            _say_how_to_go_on(arguments)
        return end.code if isinstance(end.code, int) else ExitCode.FAILED
    except BaseException as error:
        return _report(error, arguments)


@contextmanager
def _exit_on_signals() -> Iterator[None]:
    """Raise SystemExit for SIGINT and SIGTERM in the body, so that unfinished output is removed on the way out."""

    def end(number: int, _: FrameType | None) -> None:
        # Some senders signal twice (a terminal, `timeout`). The second signal must not interrupt the removal.
        for other in handlers:
            signal.signal(other, signal.SIG_IGN)
        raise SystemExit(128 + number)

    is_main = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in _SIGNALS} if is_main else {}
    # Signals that the parent has set to be ignored stay so, such as SIGINT for background jobs of scripts.
    handlers = {number: handler for number, handler in handlers.items() if handler is not signal.SIG_IGN}
    for number in handlers:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _say_how_to_go_on(arguments: Sequence[str]) -> None:
    """Print the command that goes on with an interrupted one, if that writes a checkpoint.

    Its output is removed but, on a file system, for the parts of a reshard that are done, which ``--resume`` finds.
    """
    command = next((argument for argument in arguments if not argument.startswith("-")), "")
    if command not in WRITERS:
        return
    has_parts = command == "reshard" and not any("://" in argument for argument in arguments)
    more = ["--resume"] if has_parts and "--resume" not in arguments else []
    line = shlex.join(["dtckpt", *arguments, *more])
    click.echo(f"dtckpt: interrupted, and nothing is committed; to go on: {printable(line)}", err=True)


def _report(error: BaseException, arguments: Sequence[str]) -> int:
    """Print an error and return its exit code."""
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


if __name__ == "__main__":
    sys.exit(main())
