"""Exit codes of the command line, and the table from error classes to exit codes."""

from __future__ import annotations

import enum

import click

from dtckpt import errors


class ExitCode(enum.IntEnum):
    """Exit codes, for scripts; values above 63 come from ``sysexits.h``."""

    OK = 0
    FAILED = 1
    USAGE = 2
    NOT_FOUND = 3
    CONFLICT = 4
    UNAVAILABLE = 69
    INTERNAL = 70
    TRY_AGAIN = 75


MEANINGS = {
    ExitCode.OK: "ok",
    ExitCode.FAILED: "check failed: a checkpoint is damaged, of a newer format, not what was expected; or two differ",
    ExitCode.USAGE: "usage: an option, mesh, layout or dtype cannot be used as given",
    ExitCode.NOT_FOUND: "not found: no checkpoint (or only an unfinished one), or no such tensor or job",
    ExitCode.CONFLICT: "conflict: the destination exists, or another writer was faster",
    ExitCode.UNAVAILABLE: "unavailable: access is denied, or the coordinator cannot be reached",
    ExitCode.INTERNAL: "internal error: please report it with the output of --debug",
    ExitCode.TRY_AGAIN: "try again: storage is full or failed, or clients were lost or late",
}

EXIT_CODES: dict[type[BaseException], ExitCode] = {
    click.ClickException: ExitCode.USAGE,
    # Most errors that are neither about checkpoints nor coordination are about an argument that does not fit.
    errors.DtckptError: ExitCode.USAGE,
    errors.ReplicaMismatchError: ExitCode.FAILED,
    # Users pass no tree to a command: the error is about a tree in a checkpoint.
    errors.TreeError: ExitCode.FAILED,
    errors.SaveDisagreementError: ExitCode.FAILED,
    errors.CheckpointError: ExitCode.FAILED,
    errors.CheckpointNotFoundError: ExitCode.NOT_FOUND,
    errors.CheckpointIncompleteError: ExitCode.NOT_FOUND,
    errors.TensorNotFoundError: ExitCode.NOT_FOUND,
    errors.RegionNotFoundError: ExitCode.NOT_FOUND,
    errors.CheckpointExistsError: ExitCode.CONFLICT,
    errors.CheckpointConflictError: ExitCode.CONFLICT,
    errors.StorageError: ExitCode.TRY_AGAIN,
    errors.StoragePermissionError: ExitCode.UNAVAILABLE,
    errors.CoordinationError: ExitCode.TRY_AGAIN,
    errors.JobNotFoundError: ExitCode.NOT_FOUND,
    errors.ClientFailedError: ExitCode.FAILED,
    errors.BarrierConflictError: ExitCode.CONFLICT,
    errors.FencedError: ExitCode.CONFLICT,
    errors.CoordinatorUnavailableError: ExitCode.UNAVAILABLE,
    errors.CoordinatorPermissionError: ExitCode.UNAVAILABLE,
    # Errors of storage are `StorageError`s, so a bare OSError says that the command's own output cannot be written.
    OSError: ExitCode.TRY_AGAIN,
    BaseException: ExitCode.INTERNAL,
}
"""Exit code by error class. An error has the code of the first class in its method resolution order that is here."""


def exit_code_of(error: BaseException) -> ExitCode:
    """Return the exit code of an error."""
    return next(EXIT_CODES[cls] for cls in type(error).__mro__ if cls in EXIT_CODES)


def exit_code_lines() -> list[str]:
    """Return the lines of ``dtckpt help exit-codes``."""
    lines = [f"  {code:>3}  {meaning}" for code, meaning in MEANINGS.items()]
    return ["Exit codes:", *lines, "  130  interrupted (143: terminated); nothing is at the destination"]
