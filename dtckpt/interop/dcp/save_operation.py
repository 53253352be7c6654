"""`SaveOperation`: one save, as one rank goes through it, and the attempt that the coordinator has under construction.

DCP does not tell a writer that a save has failed. So the attempt is removed when nobody knows the operation any more.
"""

from __future__ import annotations

import contextlib
import secrets
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from dtckpt.checkpoint.options import SaveOptions
from dtckpt.comm import fork_guard
from dtckpt.config import Config
from dtckpt.coordination.identity import incarnation
from dtckpt.errors import CheckpointError, CheckpointExistsError, DtckptError
from dtckpt.interop.dcp.known_saves import warn_of_replacement
from dtckpt.storage.commit import CommitAttempt, CommitTarget, commit_target_of
from dtckpt.storage.failures import taken_over_error
from dtckpt.storage.location import Location
from dtckpt.storage.zarr_files import validate_kind


class SaveOperation:
    """One save, as one rank goes through it.

    Args:
        target: Where the checkpoint will be.
        is_coordinator: Whether this rank commits.
    """

    def __init__(self, target: CommitTarget, is_coordinator: bool) -> None:
        self.target = target
        self._is_coordinator = is_coordinator
        self._led: CommitAttempt | None = None
        self._alive = ExitStack()

    def lead(self, options: SaveOptions) -> str:
        """Begin the attempt; return the token that the other ranks join it by."""
        validate_kind(options.kvstore, self.target.folder, [options.codec] if options.codec else [])
        _validate_target(self.target, overwrite=options.overwrite)
        warn_of_replacement(self.target)
        token = f"{Config.from_environ().attempt}-{incarnation():x}-{secrets.token_hex(4)}"
        self._led = self.target.begin(token)
        self._alive.enter_context(self._led.keep_alive())
        self._finalizer = weakref.finalize(self, _abandon, self._led, self._alive)
        return self._led.token

    @contextmanager
    def attempt_of(self, token: str) -> Iterator[CommitAttempt]:
        """Give the attempt that the coordinator has announced; if another one took over, an error says so."""
        attempt = self._led if self._is_coordinator and self._led is not None else self.target.join(token)
        try:
            yield attempt
        except BaseException as error:
            is_taken_over = isinstance(error, CheckpointError) and attempt.is_taken_over()
            if attempt is not self._led:
                # The coordinator may have removed the folder while this rank wrote, which made it again.
                attempt.sweep()
            if is_taken_over:
                raise taken_over_error(self.target.where) from error
            raise

    @contextmanager
    def removed_on_failure(self) -> Iterator[CommitAttempt]:
        """Give the attempt that this rank leads, and end it: if the work inside fails, it is removed."""
        if self._led is None:
            raise CheckpointError("prepare_global_plan must be called before finish, in the same thread")
        try:
            with self.attempt_of(self._led.token) as attempt:
                yield attempt
        except BaseException:
            self._led.abandon()
            raise
        finally:
            self._finalizer.detach()
            self._alive.close()


def _validate_target(target: CommitTarget, *, overwrite: bool) -> None:
    """Refuse a target that may not be written."""
    target.check_target(overwrite=True)
    if not overwrite:
        try:
            target.check_target(overwrite=False)
        except CheckpointExistsError as error:
            # It begins with the words of DCP's own writer: loops look for them.
            raise CheckpointExistsError(
                f"Checkpoint already exists at {target.where}; pass DtckptStorageWriter(overwrite=True) to replace "
                "it, or save elsewhere"
            ) from error


def _abandon(attempt: CommitAttempt, alive: ExitStack) -> None:
    """Remove an attempt that was not committed."""
    if fork_guard.is_forked():
        return  # it is that of the parent process
    with contextlib.suppress(DtckptError):
        attempt.abandon()
    alive.close()


def rank_folder(rank: int) -> str:
    """Return the name of the checkpoint that one rank saves without collectives."""
    return f"rank_{rank}"


def validate_free(where: Location) -> None:
    """Refuse a path with a checkpoint of all ranks, to which each would add one of its own."""
    try:
        commit_target_of(where).locate()
    except CheckpointError:
        return  # nothing is there, or only the checkpoints of single ranks
    raise CheckpointExistsError(
        f"there is a checkpoint of all ranks at {where}; save elsewhere, or with use_collectives=True"
    )
