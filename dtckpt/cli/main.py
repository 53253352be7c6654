"""The entry point ``dtckpt``: runs a command, which signals may end."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn

from dtckpt.cli.interrupts import SIGNALS, Interrupt, Interrupts
from dtckpt.errors import printable

INTERRUPTED = tuple(128 + number for number in SIGNALS)
"""Exit codes of a command that was interrupted or terminated."""
WRITERS = ("reshard", "convert", "copy")
"""The commands that write a checkpoint."""
BEGINNERS = ("__main__", "dtckpt.cli.")
"""Name prefixes of modules that import the needs of a command. A command that writes does this before its work."""


def main(args: Sequence[str] | None = None) -> int:
    """Run ``dtckpt`` in a process that goes on; return its exit code.

    Args:
        args: Arguments; default: the arguments of this process.
    """
    arguments = sys.argv[1:] if args is None else args
    return _run(arguments, Interrupts(None, BEGINNERS))


def run() -> NoReturn:
    """Run ``dtckpt`` as this process."""
    arguments = sys.argv[1:]

    def end(code: int) -> None:
        _say_how_to_go_on(arguments)
        _end_at_once(code)

    code = _run(arguments, Interrupts(end, BEGINNERS))
    if code in INTERRUPTED:
        _end_at_once(code)
    sys.exit(code)


def _run(arguments: Sequence[str], interrupts: Interrupts) -> int:
    with interrupts:
        try:
            # Imported here, where signals are handled already.
            from dtckpt.cli import commands

            try:
                code = commands.run(arguments)
            except BaseException as error:
                if interrupts.code:  # also if the interrupt became another error on its way
                    raise Interrupt(interrupts.code) from error
                code = commands.report(error, arguments)
            interrupts.stop()
        except Interrupt:
            code = interrupts.code
            _say_how_to_go_on(arguments)
    return code


def _end_at_once(code: int) -> None:
    """End this process without Python's finalization, which threads of libraries that still work might abort."""
    with suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _say_how_to_go_on(arguments: Sequence[str]) -> None:
    """Print the command that goes on with an interrupted one, if that writes a checkpoint.

    Its output is removed but for the files of a copy, and, on a file system, for the parts of a reshard that are done,
    which ``--resume`` finds.
    """
    command = next((argument for argument in arguments if not argument.startswith("-")), "")
    if command not in WRITERS:
        return
    has_parts = command == "reshard" and not any("://" in argument for argument in arguments)
    more = ["--resume"] if has_parts and "--resume" not in arguments else []
    line = shlex.join(["dtckpt", *arguments, *more])
    state = "the checkpoints that are whole stay" if command == "copy" else "nothing is committed"
    with suppress(OSError, ValueError):
        sys.stderr.write(f"dtckpt: interrupted, and {state}; to go on: {printable(line)}\n")


if __name__ == "__main__":
    run()
