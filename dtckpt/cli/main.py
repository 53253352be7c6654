"""The process around a command: arguments in; signals, errors and exit code out."""

from __future__ import annotations

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
from dtckpt.errors import DtckptError
from dtckpt.text import printable

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def main(args: Sequence[str] | None = None) -> int:
    """Run ``dtckpt`` and return its exit code.

    Args:
        args: Arguments; default: those of the process.
    """
    arguments = list(sys.argv[1:] if args is None else args)
    try:
        with _ended_by_signals():
            # Ends by returning a code where click itself has answered, as for --help.
            return cli.main(arguments, prog_name="dtckpt", standalone_mode=False) or ExitCode.OK
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else ExitCode.FAILED
    except BaseException as error:
        return _report(error, arguments)


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Turn SIGINT and SIGTERM into SystemExit, so that what is under construction gets removed."""

    def end(number: int, _: FrameType | None) -> None:
        # Some senders signal twice (a terminal, `timeout`); the second must not interrupt the removal.
        for each in before:
            signal.signal(each, signal.SIG_IGN)
        raise SystemExit(128 + number)

    is_main = threading.current_thread() is threading.main_thread()
    before = {each: signal.getsignal(each) for each in _SIGNALS} if is_main else {}
    before = {each: handler for each, handler in before.items() if handler is not signal.SIG_IGN}
    for each in before:
        signal.signal(each, end)
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def _report(error: BaseException, arguments: Sequence[str]) -> int:
    """Print an error and return its exit code."""
    code, message = exit_code_of(error), _message(error)
    # Looked up here, since parsing may be what failed.
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
        # The one remedy that is spelled otherwise here.
        return error.message.replace("pass overwrite=True", "pass --overwrite")
    if isinstance(error, click.ClickException):
        return error.format_message()
    if isinstance(error, OSError):
        return str(error)
    return f"internal error: {type(error).__name__}: {error}"


if __name__ == "__main__":
    sys.exit(main())
