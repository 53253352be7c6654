"""`TierSaves`: the saves and restores of a manager that has a local tier.

A step that is due is copied into the tier. If it is due in the root, too, it is written there from the tier, in the
background: training never waits for storage. While such a write is under way no other begins; the step that would have
been next is the first one after it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from dtckpt.checkpoint.collective import Collective
from dtckpt.checkpoint.managing.restore_newest import Candidate
from dtckpt.checkpoint.managing.step_folders import StepFolders
from dtckpt.checkpoint.options import RestoreOptions, SaveOptions
from dtckpt.checkpoint.restoring.restore import restore_opened
from dtckpt.checkpoint.saving.save_handle import SaveHandle
from dtckpt.checkpoint.saving.state import State
from dtckpt.checkpoint.tiers.durable import DurableWriter, state_of_save
from dtckpt.checkpoint.tiers.holdings import HeldSave, restorable
from dtckpt.checkpoint.tiers.local_restore import LocalRestore
from dtckpt.checkpoint.tiers.options import LocalTier
from dtckpt.checkpoint.tiers.records import SaveId
from dtckpt.checkpoint.tiers.session import Begun, SaveRequest, TierSession
from dtckpt.checkpoint.tiers.status import write_status
from dtckpt.checkpoint.tiers.tier_files import TierCheckpoint
from dtckpt.coordination.api import Coordination
from dtckpt.errors import CheckpointNotFoundError, StorageError, capped
from dtckpt.storage.folder import Folder

logger = logging.getLogger("dtckpt.tiers")

WriteDurable = Callable[[SaveId, Callable[[], State], Mapping[str, float], SaveOptions], SaveHandle]
"""Begins to write a step to the root: the save, a description of its state, its metrics, and how it is written."""


class TierSaves:
    """The local tier of one manager.

    Args:
        tier: The options.
        folders: The durable checkpoints.
        folder: The files of their root.
        options: How checkpoints are written.
    """

    def __init__(self, tier: LocalTier, folders: StepFolders, folder: Folder, options: SaveOptions) -> None:
        self.session = TierSession(tier, str(folders.root))
        self.writer = DurableWriter()
        self._root_folder = folder
        self._has_durable = lambda: bool(folders.saved())
        self._options = options
        self._handle: SaveHandle | None = None
        self._is_owed = False
        self._opened: dict[str, TierCheckpoint] = {}

    def is_due(self, step: int) -> bool:
        """Whether a step is saved in the tier."""
        return self.session.is_due(step)

    def join(self, collective: Collective) -> None:
        """Let the clients tell each other what their hosts hold. Collective: As `TierSession.join`."""
        self.session.join(collective, self._has_durable)
        # The first step of a job is written to the root: a job that has steps in its tier alone would look new.
        self._is_owed |= not self.session.has_durable

    # --- saving -------------------------------------------------------------------------------------------------

    def save(
        self,
        step: int,
        collect: Callable[[], State],
        coordination: Coordination,
        metrics: Mapping[str, float],
        write_durable: WriteDurable,
        *,
        is_durable: bool,
    ) -> SaveHandle | None:
        """Save a step in the tier, and from there in the root if it is due there.

        Collective: As `TierSession.save`.

        Args:
            step: The step.
            collect: Returns this client's description of the state.
            coordination: The connection to the other clients.
            metrics: The step's metrics, on client 0.
            write_durable: Begins to write the step to the root; called in the background.
            is_durable: Whether the step is due in the root.

        Returns:
            The save's handle; None if a host's tier refused it.
        """
        self.wait_for_local()
        if not self.session.has_joined:
            collective = Collective(coordination, "tier", self._options.timeout_s)
            with collective.process_lock():
                self.join(collective)
        is_wanted = is_durable or self._is_owed

        def then(begun: Begun) -> None:
            # All clients hear from the save's name what client 0 decided.
            self._is_owed = is_wanted and not begun.save.is_durable
            if begun.save.is_durable:
                options = replace(self._options, check_replicas=begun.has_compared)
                write_durable(begun.save, lambda: begun.staged_state, begun.metrics, options)
            if coordination.member.client == 0:
                with _tolerated("the status of the local tier"):
                    write_status(self._root_folder, self.session, begun)

        try:
            request = SaveRequest(
                step=step,
                collect=collect,
                options=self._options,
                metrics=metrics,
                is_durable=lambda: is_wanted and not self.writer.is_busy,
                compares_copies=is_wanted and self._options.check_replicas,
            )
            self._handle = self.session.save(request, coordination, then)
        except StorageError as error:
            if coordination.member.client == 0:
                logger.warning("step %d is not saved in the local tier: %s", step, error)
            return None
        return self._handle

    def pinned(self, save: SaveId, then: Callable[[SaveHandle], object]) -> Callable[[SaveHandle], None]:
        """Keep a save in the tier until a call that follows a write has been made; return that call."""
        unpin = self.session.folder.pin(save)

        def after(handle: SaveHandle) -> None:
            unpin()
            then(handle)

        return after

    def wait_for_local(self) -> None:
        """Wait until the local save under way counts, or has failed."""
        if self._handle is not None:
            self._handle.wait()

    def wait(self) -> None:
        """Wait for everything under way. Raises: DtckptError: A save failed, and nobody has looked at its error."""
        self.wait_for_local()
        if self.writer.handle is not None:
            self.writer.handle.wait()
        self.session.replicator.wait(self.session.tier.timeout_s)
        for handle in (self._handle, self.writer.handle):
            if handle is not None:
                handle.raise_unseen_failure()

    def close(self, *, has_failed: bool) -> None:
        """End the background work; see `TierSession.close`."""
        self.wait_for_local()
        self.writer.close()
        self.session.close(has_failed=has_failed)

    # --- restoring ----------------------------------------------------------------------------------------------

    def candidates(self) -> list[Candidate]:
        """Return what the hosts can put together, the newest first. After `join`."""
        return [Candidate(held.save.step, held.save.name) for held in restorable(self.session.held)]

    def held(self, name: str) -> HeldSave:
        """Return a save by its name."""
        for held in self.session.held:
            if held.save.name == name:
                return held
        raise CheckpointNotFoundError(f"no host holds {name} of the local tier any more")

    def restore(
        self, chosen: Candidate, target: Any, options: RestoreOptions, **others: Any
    ) -> tuple[Any, LocalRestore]:
        """Restore a save of the tier. Collective: As `dtckpt.restore` over all clients."""
        held = self.held(chosen.local)
        opened: list[TierCheckpoint] = []

        def open_() -> TierCheckpoint:
            opened.append(self.session.open(held))
            return opened[-1]

        where = self.session.folder.path / held.save.name
        tree = restore_opened(where, open_, target, options=options, **others)
        self._opened = {chosen.local: opened[-1]}
        traffic = opened[-1].parts.traffic
        lost = {
            each.save.step: f"no host holds the parts of clients {capped(each.missing)}"
            for each in self.session.held
            if each.save > held.save and each.is_voted and each.missing
        }
        return tree, LocalRestore(
            age_s=max(0.0, time.time() - held.save.number / 1e9),
            local_nbytes=traffic.local,
            nbytes_by_host=dict(traffic.by_host),
            copies=held.num_copies,
            passed_over=tuple(traffic.damaged),
            lost_steps=lost,
        )

    def go_on_from(self, chosen: Candidate, is_in_root: Callable[[SaveId], bool], write_durable: WriteDurable) -> None:
        """After a restore, make the copies that are missing, and finish a durable write that was cut off.

        Collective: Over all clients, in the background.
        """
        if not chosen.local:
            return
        held = self.held(chosen.local)
        self.session.copy_anew(held)
        if held.save.is_durable and not is_in_root(held.save):
            checkpoint = self._opened[chosen.local]
            state = state_of_save(checkpoint, held, self.session.hosts, self._options)
            write_durable(
                held.save, lambda: state, checkpoint.parts.metrics, replace(self._options, check_replicas=False)
            )


@contextmanager
def _tolerated(what: str) -> Iterator[None]:
    """Log a warning if something that no checkpoint depends on fails."""
    try:
        yield
    except (StorageError, OSError) as error:
        logger.warning("%s cannot be written: %s", what, error)
