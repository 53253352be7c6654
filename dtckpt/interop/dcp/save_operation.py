"""`SaveOperation`: one save, as one rank goes through it, and the attempt that the coordinator has under construction.

DCP does not tell a writer that a save has failed. So the attempt is removed when no reference to the operation is left.

The coordinator tells the other ranks of the attempt by an `Announcement`, through the plans that DCP scatters. A
planner that caches plans (``enable_plan_caching``) drops the plan that it gets, and uses an older one. So a rank takes
an announcement from the message itself. An `Announcement` notes itself in the thread that makes or receives it, and
that thread goes on with the save.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from dtckpt.checkpoint.options import SaveOptions
from dtckpt.checkpoint.saving.construction import Construction, validate_target
from dtckpt.comm import fork_guard
from dtckpt.config import Config
from dtckpt.coordination.identity import incarnation
from dtckpt.errors import CheckpointError, CheckpointExistsError, DtckptError
from dtckpt.interop.dcp.known_saves import warn_of_replacement
from dtckpt.interop.dcp.write_plan import Share
from dtckpt.storage.commit import commit_target_of
from dtckpt.storage.commit_target import CommitAttempt, CommitTarget
from dtckpt.storage.location import Location

_latest = threading.local()


class SaveOperation:
    """One save, as one rank goes through it.

    Args:
        target: Where the checkpoint will be.
    """

    def __init__(self, target: CommitTarget) -> None:
        self.target = target
        self._construction = Construction(target)

    def lead(self, options: SaveOptions, decider: str) -> str:
        """Begin the attempt; return the token that the other ranks join it by.

        Args:
            options: Of the save.
            decider: The object whose argument ``overwrite`` the caller has set, for the error.
        """
        validate_target(self.target, replace(options, overwrite=True), [options.codec] if options.codec else [])
        if not options.overwrite:
            _validate_absence(self.target, decider)
        warn_of_replacement(self.target)
        self._finalizer = weakref.finalize(self, _abandon, self._construction)
        return self._construction.lead(Config.from_environ().attempt, incarnation())

    @contextmanager
    def joined(self, token: str) -> Iterator[CommitAttempt]:
        """Give the attempt that the coordinator has announced; if another one took over, an error says so."""
        construction = self._construction
        attempt = construction.join(token)
        try:
            with construction.takeover_explained():
                yield attempt
        except BaseException:
            # The coordinator's attempt stays until DCP has told all ranks: others may still write to it.
            if construction.led is None:
                construction.sweep()
            raise

    @contextmanager
    def ended(self) -> Iterator[tuple[Construction, CommitAttempt]]:
        """Give the attempt that this rank leads, and end it: if the work inside fails, it is removed."""
        construction, led = self._construction, self._construction.led
        if led is None:
            raise CheckpointError("prepare_global_plan must be called before finish, in the same thread")
        try:
            with construction.ended():
                construction.join(led.token)
                yield construction, led
        finally:
            self._finalizer.detach()


def _validate_absence(target: CommitTarget, decider: str) -> None:
    """Refuse a target where a checkpoint is."""
    try:
        target.check_target(overwrite=False)
    except CheckpointExistsError as error:
        # The text begins with the words of DCP's own writer: loops look for them.
        raise CheckpointExistsError(
            f"Checkpoint already exists at {target.where}; pass {decider}(overwrite=True) to replace it, "
            "or save elsewhere"
        ) from error


def _abandon(construction: Construction) -> None:
    """Remove an attempt that was not committed."""
    if fork_guard.is_forked():
        return  # the attempt belongs to the parent process
    with contextlib.suppress(DtckptError):
        construction.abandon()


class Announcement:
    """A save that the coordinator has begun, as ``storage_data`` of a rank's plan.

    Args:
        token: The attempt that all ranks write to.
        where: The checkpoint's path or URL.
        options: The coordinator's options.
        share: The rank's share; None: the same share as when its planner cached its plan.
    """

    def __init__(self, token: str, where: str, options: SaveOptions, share: Share | None) -> None:
        self.token = token
        self.where = where
        self.options = options
        self.share = share
        _latest.announcement = self

    def __reduce__(self) -> tuple[Any, ...]:
        return Announcement, (self.token, self.where, self.options, self.share)


def forget_announcement() -> None:
    """Forget the announcement of an earlier save of this thread."""
    _latest.announcement = None


def received_announcement() -> Announcement:
    """Return the announcement of the save that this thread is in.

    Raises:
        CheckpointError: There is none.
    """
    announcement: Announcement | None = getattr(_latest, "announcement", None)
    if announcement is None:
        raise CheckpointError(
            "this rank was not told which save it is in; prepare_global_plan of the coordinator's writer must have "
            "been called, and its plans sent to all ranks"
        )
    return announcement


def share_of(announcement: Announcement, cached: Any) -> Share:
    """Return a rank's share in a save.

    Args:
        announcement: The announcement of the save.
        cached: ``storage_data`` of the plan that the planner gave: an announcement too, or an older one. The function
            adds the new share, as the planner will give this value again.

    Raises:
        CheckpointError: ``cached`` is no announcement, or has no share of an earlier save.
    """
    if not isinstance(cached, Announcement):
        raise CheckpointError(
            f"the planner's plan has no storage_data of this writer; got {type(cached).__name__}; finish_plan must "
            "keep it"
        )
    if cached.token != announcement.token and announcement.share is not None:
        cached.share = announcement.share
    if cached.share is None:
        raise CheckpointError("the planner uses a cached plan that was never written; make a planner without the cache")
    return cached.share


def rank_folder(rank: int) -> str:
    """Return the name of the checkpoint that one rank saves without collectives."""
    return f"rank_{rank}"


def validate_free(where: Location) -> None:
    """Refuse a path with a checkpoint of all ranks, to which each rank would add a separate checkpoint."""
    try:
        commit_target_of(where).locate()
    except CheckpointError:
        return  # nothing is there, or only the checkpoints of single ranks
    raise CheckpointExistsError(
        f"there is a checkpoint of all ranks at {where}; save elsewhere, or with use_collectives=True"
    )
