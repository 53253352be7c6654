"""`TierSaves`: the saves and restores of a manager that has a local tier.

A step that is due is copied into the tier. If it is due in the root, too, it is written there from the tier, in the
background: training never waits for storage. While such a write is under way no other begins, and a step that is due
then is owed. In its place, the root gets the next step that is saved after the write, at the latest the last step, when
the manager is closed. A step whose write fails is owed, too.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

from dtckpt.checkpoint.collective import Collective
from dtckpt.checkpoint.managing.candidates import Candidate
from dtckpt.checkpoint.managing.step_folders import StepFolders
from dtckpt.checkpoint.options import RestoreOptions, SaveOptions
from dtckpt.checkpoint.parts.part_files import PartCheckpoint
from dtckpt.checkpoint.parts.records import UNKNOWN_ROOT, PartCopy, SaveId
from dtckpt.checkpoint.restoring.restore import restore_opened
from dtckpt.checkpoint.saving.save_handle import SaveHandle
from dtckpt.checkpoint.saving.state import State
from dtckpt.checkpoint.tiers.durable import DurableWriter, state_of_save
from dtckpt.checkpoint.tiers.holdings import HeldSave
from dtckpt.checkpoint.tiers.local_restore import LocalRestore, copy_anew, note_restore, open_held
from dtckpt.checkpoint.tiers.local_save import Begun, SaveRequest, save_in_tier
from dtckpt.checkpoint.tiers.options import LocalTier
from dtckpt.checkpoint.tiers.root_identity import RootFacts, claim_identity, read_identity
from dtckpt.checkpoint.tiers.session import TierSession
from dtckpt.checkpoint.tiers.status import write_status
from dtckpt.comm.background_threads import begin
from dtckpt.coordination.api import Coordination, Progress
from dtckpt.errors import CheckpointNotFoundError, CoordinationError, DtckptError, StorageError, capped
from dtckpt.storage.folder import Folder

logger = logging.getLogger("dtckpt.tiers")

HELD = "local step held"
"""Phase of a client's progress between local saves; the progress has the step."""

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
        self._begin_world(tier, str(folders.root))
        self._root_folder = folder
        self._folders = folders
        self._options = options
        self._handle: SaveHandle | None = None
        self._written = 0
        """Number of the newest save that this job has written to the root."""
        self._debt = 0
        """Number of the newest save that is owed to the root; 0: none. The same on all clients, between writes."""
        self._is_refused = False
        self._status = _StatusWriter()

    def _begin_world(self, tier: LocalTier, root: str) -> None:
        """Know nothing of the clients, as a new process."""
        self.session = TierSession(tier, root)
        self.writer = DurableWriter(tier.max_root_rate)
        self._is_named = False
        self._write_last: Callable[[], object] = lambda: None
        """Begins to write the newest save to the root."""
        self._last = ""
        """The name of that save."""
        self._opened: dict[str, PartCheckpoint] = {}
        self._resume: Callable[[], object] | None = None
        """Begins to write the restored step to the root."""

    def leave_world(self) -> None:
        """Let go of the clients of the job: it will have others. The first step after it is written to the root.

        Local. Blocks: On saves under way, which fail without the clients that are gone.
        """
        self.wait_for_local()
        self.writer.wait()
        forgive_cut_off(self._handle)
        begin(self.writer.close, "dtckpt-leave")
        session = self.session
        session.close(has_failed=True)
        self._begin_world(session.tier, str(self._folders.root))
        self._debt = 1

    def _ask_root(self) -> RootFacts:
        """Return the facts about the root that clients need. A root that cannot be listed counts as not empty."""
        try:
            saved = self._folders.saved()
        except StorageError as error:
            logger.warning("the steps of the root cannot be listed: %s", error)
            return RootFacts(has_steps=True, identity=UNKNOWN_ROOT, newest=0)
        newest = max((lineage.number for lineage in saved.values()), default=0)
        return RootFacts(bool(saved), read_identity(self._root_folder, str(self._folders.root)), newest)

    def name_root(self) -> None:
        """Give the root an identity, or learn its identity. On client 0, with the right to change the root."""
        if not self._is_named:
            session = self.session
            session.root = claim_identity(self._root_folder, str(self._folders.root), session.root)
            self._is_named = True

    def is_due(self, step: int) -> bool:
        """Whether a step is saved in the tier."""
        return step % self.session.tier.every_steps == 0

    def join(self, collective: Collective, *, is_save: bool) -> None:
        """Let the clients tell each other which parts their hosts hold. Collective: As `TierSession.join`."""
        self.session.join(collective, self._ask_root, is_save=is_save)
        self.writer.life = self.session.joined.life
        # The first step of a job is written to the root: a job that has steps in its tier alone would look new.
        if not self.session.joined.has_durable:
            self._debt = max(self._debt, 1)

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
        is_last: bool,
    ) -> SaveHandle | None:
        """Save a step in the tier, and from there in the root if it is due there.

        Collective: As `save_in_tier`.

        Args:
            step: The step.
            collect: Returns this client's description of the state.
            coordination: The connection to the other clients.
            metrics: The step's metrics, on client 0.
            write_durable: Begins to write the step to the root; called in the background.
            is_durable: Whether the step is due in the root.
            is_last: Whether it may be the last step; then the root gets this step, and no later one in its place.

        Returns:
            The save's handle; None if a host's tier refused it.

        Raises:
            DtckptError: As `save_in_tier`; or the error of the local save before, if the caller has not seen it yet.
        """
        self.wait_for_local()
        if is_last:
            self.writer.wait()
        if not self.session.has_joined:
            collective = Collective(coordination, "tier", self._options.timeout_s)
            with collective.process_lock():
                self.join(collective, is_save=True)
        is_leader, before = coordination.member.client == 0, self._handle
        is_wanted = is_durable or self._debt > 0

        def collect_next() -> State:
            # In the first round, so that all clients raise it together.
            if before is not None:
                before.raise_unseen_failure()
            return collect()

        def then(begun: Begun, ended: SaveHandle) -> None:
            if is_durable:
                self._debt = max(self._debt, begun.save.number)
            if isinstance(ended.failure, StorageError):
                ended.forgive()
                self._note_refusal(step, ended.failure, is_told=is_leader)
            if not ended.is_committed:
                return
            self._note_taken(step, is_told=is_leader)
            # For the coordinator's status page, until the client does something else.
            coordination.heartbeat(Progress(HELD, step))
            save, staged, noted = begun.save, begun.agreed.state, begun.metrics
            options = replace(self._options, check_replicas=begun.has_compared)
            self._write_last, self._last = lambda: write_durable(save, lambda: staged, noted, options), save.name
            # The save's name tells all clients the decision of client 0.
            if save.is_durable:
                self._write_last()
            if is_leader:
                self._status.submit(lambda: write_status(self._root_folder, self.session, begun))

        try:
            request = SaveRequest(
                step=step,
                collect=collect_next,
                options=self._options,
                metrics=metrics,
                # In this order: a write that ends at this moment may pay the debt.
                is_durable=lambda: not self.writer.is_busy and (is_durable or self._debt > 0),
                compares_copies=is_wanted and bool(self._options.check_replicas),
            )
            self._handle = save_in_tier(self.session, request, coordination, then)
        except StorageError as error:
            self._note_refusal(step, error, is_told=is_leader)
            return None
        return self._handle

    def _note_refusal(self, step: int, error: BaseException, *, is_told: bool) -> None:
        if is_told and not self._is_refused:
            logger.warning(
                "step %d is not saved in the local tier, nor are later steps until the error is mended: %s", step, error
            )
        self._is_refused = True

    def _note_taken(self, step: int, *, is_told: bool) -> None:
        if is_told and self._is_refused:
            logger.warning("steps are saved in the local tier again, from step %d on", step)
        self._is_refused = False

    def owe_nothing(self) -> None:
        """Note that a step is written to the root past the tier, when the write under way has ended."""
        self.writer.wait()
        self._debt = 0

    def pinned(self, save: SaveId, then: Callable[[SaveHandle], object]) -> Callable[[SaveHandle], None]:
        """Keep a save in the tier until a call that follows a write has been made; return that call."""
        unpin = self.session.folder.pin(save)

        def after(handle: SaveHandle) -> None:
            unpin()
            if handle.is_committed:
                self._written = max(self._written, save.number)
                self._debt = self._debt if self._debt > save.number else 0
            else:
                self._debt = max(self._debt, save.number)
                logger.warning(
                    "step %d of the local tier could not be written to the root, a later one will be: %s",
                    save.step, handle.failure,
                )  # fmt: skip
            then(handle)

        return after

    def wait_for_local(self) -> None:
        """Wait until the local save under way counts, or has failed."""
        if self._handle is not None:
            self._handle.wait()

    def wait(self, *, for_copies: bool = True) -> None:
        """Wait for everything under way.

        Args:
            for_copies: Whether to wait for other hosts, too.

        Raises:
            DtckptError: A save failed, and the caller has not seen its error yet.
        """
        self.wait_for_local()
        self.writer.wait()
        if for_copies:
            self.session.replicator.wait(self.session.tier.timeout_s)
            self._status.wait(self.session.tier.timeout_s)
        self._raise_unseen_failure()

    def _raise_unseen_failure(self) -> None:
        for handle in (self._handle, self.writer.handle):
            if handle is not None:
                handle.raise_unseen_failure()

    def close(self, *, has_failed: bool) -> None:
        """Write the step that is owed to the root, and end the background work; see `TierSession.close`.

        Collective: Over all clients, if a step is owed to the root.

        Raises:
            DtckptError: The step could not be written.
        """
        self.wait_for_local()
        self.writer.wait()
        try:
            if self._debt and not has_failed:
                self._write_last()
        finally:
            self._write_last, self._resume, self._is_named = lambda: None, None, False
            self.writer.close()
            self.session.close(has_failed=has_failed)
        if not has_failed:
            self._raise_unseen_failure()

    # --- restoring ----------------------------------------------------------------------------------------------

    def restorable(self, *, is_named: bool) -> list[HeldSave]:
        """Return the saves that the hosts hold; unless the step is named, without saves restored too often."""
        worn_out = frozenset() if is_named else self.session.joined.worn_out
        for save in worn_out:
            logger.warning(
                "step %d of the local tier is passed over: it was restored %d times, and no newer step was saved",
                save.step, self.session.tier.max_restores,
            )  # fmt: skip
        return [held for held in self.session.joined.held if held.save not in worn_out]

    def held(self, name: str) -> HeldSave:
        """Return a save by its name."""
        for held in self.session.joined.held:
            if held.save.name == name:
                return held
        raise CheckpointNotFoundError(f"no host holds {name} of the local tier any more")

    def restore(
        self, chosen: Candidate, target: Any, options: RestoreOptions, **others: Any
    ) -> tuple[Any, LocalRestore]:
        """Restore a save of the tier. Collective: As `dtckpt.restore` over all clients."""
        held = self.held(chosen.local)
        self._opened = {}
        opened: list[PartCheckpoint] = []

        def open_() -> PartCheckpoint:
            opened.append(open_held(self.session, held))
            return opened[-1]

        where = self.session.folder.path / held.save.name
        tree = restore_opened(where, open_, target, options=options, **others)
        self._opened = {chosen.local: opened[-1]}
        note_restore(self.session, held)
        traffic = opened[-1].parts.traffic
        lost = {
            each.save.step: f"no host holds the parts of clients {capped(each.missing)}"
            for each in self.session.joined.held
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

    @property
    def damaged_copies(self) -> Collection[PartCopy]:
        """The copies that this client found damaged when it restored the last save of the tier."""
        return {copy for opened in self._opened.values() for copy in opened.parts.traffic.damaged_copies}

    def go_on_from(self, chosen: Candidate, damaged: Collection[PartCopy], write_durable: WriteDurable) -> None:
        """After a restore, make the copies that are missing, and prepare to `resume` a durable write that was cut off.

        If the restored step is later than the step that was being written, the write takes the restored step.

        Collective: Over all clients, in the background.

        Args:
            chosen: The candidate that was restored.
            damaged: The copies of it that clients found damaged.
            write_durable: Begins to write a step to the root.
        """
        self._resume = None
        if chosen.local != self._last:
            # The run goes on from another step, so the newest save is abandoned. Its first save pays the debt.
            self._write_last = lambda: None
        if not chosen.local:
            return
        held = self.held(chosen.local)
        copy_anew(self.session, held, damaged)
        begun = [
            each.save.number for each in self.session.joined.held if each.save.is_durable and each.save <= held.save
        ]
        if not begun or max(begun) <= self.session.joined.newest_in_root:
            return
        self.writer.wait()
        if max(begun) > self._written:
            checkpoint = self._opened[chosen.local]
            state = state_of_save(checkpoint, held, self.session.joined.hosts, self._options)
            options = replace(self._options, check_replicas=False)
            self._resume = lambda: write_durable(held.save, lambda: state, checkpoint.parts.metrics, options)

    def resume(self) -> None:
        """Begin to write the restored step to the root, if a former process was cut off while it did that.

        Not before the first save: a process that only restores, beside a job that saves, must not change the root.

        Collective: Over all clients, in the background.
        """
        resume, self._resume = self._resume, None
        if resume is not None:
            resume()


def forgive_cut_off(handle: SaveHandle | None) -> None:
    """Mark the error of a save as seen if it failed because clients were gone."""
    if handle is not None and isinstance(handle.failure, CoordinationError):
        logger.warning("a save was cut off: %s", handle.failure)
        handle.forgive()


class _StatusWriter:
    """Writes the status in a separate thread, as storage may be slow. Only the newest status waits."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._next: Callable[[], object] | None = None
        self._is_running = False

    def submit(self, write: Callable[[], object]) -> None:
        """Write the status when the former status is written."""
        with self._changed:
            self._next = write
            if not self._is_running:
                self._is_running = True
                begin(self._run, "dtckpt-tier-status")

    def wait(self, timeout_s: float) -> None:
        """Wait until the newest status is written, at most so long."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_running, timeout_s)

    def _run(self) -> None:
        while True:
            with self._changed:
                write, self._next = self._next, None
                if write is None:
                    self._is_running = False
                    self._changed.notify_all()
                    return
            try:
                write()
            except (DtckptError, OSError) as error:
                # No checkpoint depends on it.
                logger.warning("the status of the local tier cannot be written: %s", error)
