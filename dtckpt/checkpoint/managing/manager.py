"""`CheckpointManager`: save a run's checkpoints by step, decide when, keep some, restore the newest valid one."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from types import TracebackType
from typing import Any, Literal

from dtckpt.checkpoint.collective import Collective
from dtckpt.checkpoint.converting.shared_export import ExportOptions, export_together
from dtckpt.checkpoint.managing.candidates import Candidate
from dtckpt.checkpoint.managing.interval import AutoInterval
from dtckpt.checkpoint.managing.lineage import Run
from dtckpt.checkpoint.managing.mirror import Mirror, MirrorCopies, mirror_of
from dtckpt.checkpoint.managing.options import FailedSaves, ManagerOptions, OnFailure, auto_interval, is_continuous
from dtckpt.checkpoint.managing.removal import StepRemoval
from dtckpt.checkpoint.managing.resize import Givers, Resize, ResizedState, ResizeRequest
from dtckpt.checkpoint.managing.restore_newest import RestoredStep, restore_newest_valid
from dtckpt.checkpoint.managing.retention import Metrics, Retention
from dtckpt.checkpoint.managing.root import root_of
from dtckpt.checkpoint.managing.run_history import RUNS_FOLDER, RunHistory
from dtckpt.checkpoint.managing.schedule import Pace, SaveRules, Schedule
from dtckpt.checkpoint.managing.state_origin import StateOrigin
from dtckpt.checkpoint.managing.step_folders import StepFolders
from dtckpt.checkpoint.managing.step_sources import StepSources
from dtckpt.checkpoint.managing.tier_saves import TierSaves, forgive_cut_off
from dtckpt.checkpoint.options import RestoreOptions, SaveOptions, validated_keys
from dtckpt.checkpoint.parts.peers import own_address
from dtckpt.checkpoint.parts.records import SaveId
from dtckpt.checkpoint.restoring.layout_choice import Layouts
from dtckpt.checkpoint.restoring.restore import restore
from dtckpt.checkpoint.saving.save_async import start_save
from dtckpt.checkpoint.saving.save_handle import SaveHandle
from dtckpt.checkpoint.saving.state import State, state_of_tree
from dtckpt.checkpoint.signing.keys import KeySource
from dtckpt.checkpoint.tiers.local_restore import LocalRestore
from dtckpt.checkpoint.tiers.options import LocalTier
from dtckpt.comm import fork_guard
from dtckpt.config import Config
from dtckpt.coordination import identity
from dtckpt.coordination.api import Coordination, Member
from dtckpt.coordination.connect import current_coordination, joined_member, rejoin
from dtckpt.errors import CheckpointNotFoundError, ConfigError, DtckptError, StorageError
from dtckpt.layout.device_mesh import MeshLike
from dtckpt.storage.location import Location, location_of

logger = logging.getLogger("dtckpt.checkpoint")


class CheckpointManager:
    """Saves checkpoints as ``root/step_00000010``, decides when, removes old ones, and restores the newest valid one.

    Anything else in ``root`` is ignored. One process at a time manages a root; others may read.

    A step that is saved again replaces its old checkpoint, atomically. A run that restores an older step, or saves a
    smaller step, goes back: with its next save the newer steps become `abandoned_steps`.

    Args:
        root: Directory of the checkpoints, made by the first save; or a URL.
        keep: The checkpoints that are kept: a number of newest ones, or a `Retention`; default all.
        save_interval_steps: Save at multiples of this. Default, if no other rule is given: every step.
        save_interval_s: Save when this many seconds have passed since the last save began; client 0 decides.
        save_when: Save when this function of the step returns true; client 0 decides.
        save_interval: ``"continuous"``: save when the save before, and the removals after it, have ended; client 0
            decides.
        every: ``"auto"`` or an `AutoInterval`: save at the interval that loses the least time, by the cost of the saves
            and the failures of this root's runs. Client 0 decides. See `dtckpt.optimal_interval`.
        is_async: Whether saves go on in the background.
        skip_when_busy: Whether to skip a step while a save is still in flight; otherwise the step waits for that save.
        on_failure: ``"raise"``, or ``"warn"``: log a save that fails with a `StorageError`, and go on; any other error
            is raised.
        leftover_age_s: Seconds without any change after which an unfinished attempt whose leader is gone is removed.
        options: How checkpoints are written; ``overwrite`` is always on.
        reuse: Whether a save shares the parts that have not changed with the step before it; see ``base`` of
            `dtckpt.save`. Each step stays a whole checkpoint, whichever others are removed.
        local: Frequent checkpoints in the memory of the hosts, with copies on other hosts; see `dtckpt.LocalTier`. The
            rules above then say which of them are also written to ``root``, from that memory. While such a write is
            under way, no other begins: a step that is due then gives its place to the next step that can be written.
        mirror: A path or URL, or a `Mirror`: a second root. Client 0 copies each step there in the background, after
            its commit; the step stays in ``root`` meanwhile. A restore takes a step from there that the root lacks, or
            that is damaged in the root. The next save raises the error of a copy, on all clients; so does `close`, on
            client 0.
        trusted_keys: As in `RestoreOptions`, for all restores. Steps that none of these keys has signed are passed
            over, and the local tier is not restored.
        clock: Returns monotonic seconds, for ``save_interval_s``.

    >>> import tempfile, torch, dtckpt
    >>> weight = torch.zeros(3)
    >>> with dtckpt.CheckpointManager(tempfile.mkdtemp(), keep=2, save_interval_steps=10) as manager:
    ...     for step in range(40):
    ...         weight += 1
    ...         handle = manager.save(step, {"weight": weight})
    ...     manager.wait()
    ...     manager.all_steps(), manager.restore().tree["weight"].tolist()
    ([20, 30], [31.0, 31.0, 31.0])
    """

    def __init__(
        self,
        root: str | Location,
        *,
        keep: int | Retention | None = None,
        save_interval_steps: int | None = None,
        save_interval_s: float | None = None,
        save_when: Callable[[int], bool] | None = None,
        save_interval: Literal["continuous"] | None = None,
        every: Literal["auto"] | AutoInterval | None = None,
        is_async: bool = True,
        skip_when_busy: bool = False,
        on_failure: OnFailure = "raise",
        leftover_age_s: float = 3600.0,
        options: SaveOptions | None = None,
        reuse: bool = False,
        local: LocalTier | None = None,
        mirror: str | Location | Mirror | None = None,
        trusted_keys: Sequence[KeySource] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._root = root_of(location_of(root))
        self._folders = StepFolders(self._root)
        self.options = ManagerOptions(
            keep=keep if isinstance(keep, Retention) else Retention(last=keep),
            rules=SaveRules(
                interval_steps=save_interval_steps,
                interval_s=save_interval_s,
                when=save_when,
                auto=auto_interval(every),
                is_continuous=is_continuous(save_interval),
                skip_when_busy=skip_when_busy,
            ),
            is_async=is_async,
            leftover_age_s=leftover_age_s,
            save=replace(options or SaveOptions(), overwrite=True),
            reuse=reuse,
            trusted_keys=validated_keys(trusted_keys),
        )
        self._clock = clock
        auto = self.options.rules.auto
        self._pace = None if auto is None else Pace(auto, RunHistory(self._root.folder / RUNS_FOLDER), self.root)
        self._schedule = Schedule(
            self.options.rules,
            timeout_s=self.options.save.timeout_s,
            clock=clock,
            auto_s=self._pace.interval_s if self._pace else lambda: math.inf,
        )
        self._failed = FailedSaves(on_failure, self.root)
        self._handle: SaveHandle | None = None
        # The step whose checkpoint is the base of the next save; None until this manager has saved or restored one.
        self._base_step: int | None = None
        self._tier = TierSaves(local, self._folders, self._root.folder, self.options.save) if local else None
        self._removal = StepRemoval(self._root, self._folders, self.options.keep, leftover_age_s)
        self._copies = (
            None
            if mirror is None
            else MirrorCopies(mirror_of(mirror), self._folders, self._removal.pin, is_tolerant=on_failure == "warn")
        )
        self._sources = StepSources(self._folders, self._copies, self._tier)
        self._origin = StateOrigin(joined_member(), self._folders, self._sources)
        self._right_lock = threading.Lock()

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._close(has_failed=isinstance(error, Exception))
        except DtckptError as failure:
            if error is None:
                raise
            logger.error("while another error was on its way: %s", failure)

    # --- the steps ----------------------------------------------------------------------------------------------

    @property
    def root(self) -> Location:
        """The root's path or URL."""
        return self._folders.root

    def path(self, step: int) -> Location:
        """Return where the checkpoint of a step is, or would be."""
        return self._folders.path(step)

    def all_steps(self) -> list[int]:
        """Return the steps of the run that have a finished checkpoint, ascending, as this client sees them."""
        return self._folders.all_steps()

    def abandoned_steps(self) -> list[int]:
        """Return the steps of runs that were abandoned, ascending; they are restored by their number only."""
        return self._folders.abandoned_steps()

    def latest_step(self) -> int | None:
        """Return the newest step of the run that has a finished checkpoint; of the mirror, if the root has no step."""
        return self._sources.latest_step()

    def best_step(self) -> int | None:
        """Return the step with the best metric, as ``keep`` names it."""
        steps = self.all_steps()
        return next(iter(self.options.keep.ranked(steps, {step: self.metrics(step) for step in steps})), None)

    def metrics(self, step: int) -> Metrics:
        """Return the metrics that a step was saved with; empty if there were none."""
        return self._folders.metrics(step)

    # --- when to save -------------------------------------------------------------------------------------------

    def should_save(self, step: int) -> bool:
        """Return whether to save a step; the same on all clients. Asking again does not change the answer.

        Collective: Over all clients, if client 0 decides (``save_interval_s``, ``save_when``, ``skip_when_busy``) or
        preemption is watched: barrier ``manager/decide``. Local otherwise.

        Raises:
            BarrierConflictError: Clients ask for different steps.
            ClientFailedError: ``save_when`` failed on client 0; raised on all clients.
        """
        return self._is_due_in_root(step) or (self._tier is not None and self._tier.is_due(step))

    def _is_due_in_root(self, step: int) -> bool:
        self.path(step)
        return self._schedule.should_save(step, is_busy=self._handle is not None and self._handle.is_busy)

    def preemption(self, *signals: int) -> AbstractContextManager[None]:
        """Watch, in a context, for signals that announce the end of the process, by default SIGTERM.

        The first `should_save` after any client got one is true on all clients, and `reached_preemption` is set
        there: save, and leave the training loop. The former handlers of the signals are restored at the end. Workers of
        a ``DataLoader`` that are forked inside the context leave a signal that their client has got to the client.

        Collective: All clients watch; then `should_save` is collective.

        Raises:
            ValueError: The caller is not the main thread; only the main thread can handle signals.
        """
        return self._schedule.watch.watch(*signals)

    @property
    def reached_preemption(self) -> bool:
        """Whether a signal has reached some client, and all clients know of it."""
        return self._schedule.reached_preemption

    @property
    def num_failed_saves(self) -> int:
        """The number of saves that failed and after which training went on, by ``on_failure="warn"``."""
        return self._failed.count

    @property
    def num_failed_copies(self) -> int:
        """The number of copies to the mirror that failed; each is tried again after the next save."""
        return 0 if self._copies is None else self._copies.num_failed

    # --- saving -------------------------------------------------------------------------------------------------

    def save(self, step: int, tree: Any, *, metrics: Metrics | None = None, force: bool = False) -> SaveHandle | None:
        """Save the state of a step, if the step is due.

        When the checkpoint is committed, client 0 removes checkpoints that need not be kept, also in the background.

        Collective: As `should_save`, then as `dtckpt.save_async` (``is_async``) or `dtckpt.save`.

        Args:
            step: The step.
            tree: As for `dtckpt.save`; several named items are a dict.
            metrics: Numbers by name, for ``keep``; the metrics of client 0 count. Tensors and arrays of one number are
                numbers, too.
            force: Whether to save even if the step is not due.

        Returns:
            The save's handle; None if the step is not due, or if the save could not begin and ``on_failure`` is
            ``"warn"``.

        Raises:
            CheckpointConflictError: Another process, or another manager of this one, saves to this root.
            ConfigError: A metric is no number; or ``metrics`` lacks the metric by which ``keep`` ranks steps.
            DtckptError: As for `dtckpt.save_async` and `dtckpt.save`; or the error of the previous save, if the caller
                has not looked at it.
        """
        if self._tier is not None:
            self._tier.resume()
            is_durable = self._is_due_in_root(step) or force
            if not (is_durable or self._tier.is_due(step)):
                return None
            is_last = force or self.reached_preemption
            handle = self._save_in_tier(self._tier, step, tree, metrics, is_durable=is_durable, is_last=is_last)
            if handle is not None or not is_durable:
                return handle
            self._tier.owe_nothing()
        elif not force and not self.should_save(step):
            return None
        start, options, coordination = self._clock(), self.options.save, self._coordination_of_state()
        is_leader = coordination.member.client == 0
        files: dict[str, bytes] = {}
        if self._handle is not None:
            self._handle.wait()  # also for the removals after that save, which must not see half of this one

        def collect() -> State:
            if is_leader:
                self._acquire(coordination.member)
                self._raise_failed_copy()
                noted = self.options.keep.metrics_of(step, metrics)
                files.update(self._origin.step_files(step, self._next_number(), noted))
            return state_of_tree(tree, options, coordination.member.client, range(coordination.member.num_clients))

        try:
            self._handle = start_save(
                self.path(step),
                collect,
                options=options,
                coordination=coordination,
                extra_files=files,
                then=lambda handle: self._after_save(step, start, handle, is_leader=is_leader),
                step=step,
                follow_link=False,
                base=self._base(),
            )
        except StorageError as error:
            if not self._failed.tolerate(step, error, is_told=is_leader):
                raise
            self._schedule.note_saved(step)
            return None
        self._schedule.note_saved(step)
        if not self.options.is_async:
            self._handle.wait()
            self._handle.raise_unseen_failure()
        if self._pace is not None:
            self._pace.note_returned(self._clock() - start)
        return self._handle

    def _save_in_tier(
        self, tier: TierSaves, step: int, tree: Any, metrics: Metrics | None, *, is_durable: bool, is_last: bool
    ) -> SaveHandle | None:
        """Save a step in the local tier, and from there in the root if it is due there."""
        start, coordination = self._clock(), self._coordination_of_state()
        noted: dict[str, float] = {}

        def collect() -> State:
            member = coordination.member
            if member.client == 0:
                noted.update(self.options.keep.metrics_of(step, metrics))
                self._acquire(member)
                self._raise_failed_copy()
            return state_of_tree(tree, self.options.save, member.client, range(member.num_clients))

        handle = tier.save(
            step, collect, coordination, noted, self._write_durable, is_durable=is_durable, is_last=is_last
        )
        if handle is not None:
            if is_durable:
                self._schedule.note_saved(step)
            if not self.options.is_async:
                self.wait()
            if self._pace is not None:
                self._pace.note_returned(self._clock() - start)
        return handle

    def _coordination_of_state(self) -> Coordination:
        """Return the connection to the other clients; this process now has the state of one of them."""
        coordination = current_coordination()
        self._origin.note_whole(coordination.member)
        return coordination

    def _write_durable(
        self, save: SaveId, collect: Callable[[], State], metrics: Metrics, options: SaveOptions
    ) -> SaveHandle:
        """Begin to write a step of the local tier to the root."""
        tier, start = self._tier, self._clock()
        assert tier is not None  # noqa: S101  only a manager with a tier is called back
        is_leader = current_coordination().member.client == 0
        files: dict[str, bytes] = {}

        def describe() -> State:
            if is_leader:
                self._acquire(current_coordination().member)
                files.update(self._origin.step_files(save.step, save.number, metrics))
            return collect()

        def after(handle: SaveHandle) -> None:
            self._after_save(save.step, start, handle, is_leader=is_leader)

        path, then = self.path(save.step), tier.pinned(save, after)
        base = self._base()
        return tier.writer.start(path, save.step, describe, options, extra_files=files, then=then, base=base)

    def _base(self) -> Location | None:
        """Return the checkpoint that the next save may share parts with; clients agree on it in the save."""
        if not self.options.reuse:
            return None
        if self._base_step is None:
            with self._removal.tolerated("listed"):
                self._base_step = max(set(self.all_steps()) - self._removal.damaged, default=None)
        return None if self._base_step is None else self.path(self._base_step)

    def _acquire(self, member: Member) -> None:
        """Take the right to change the root, on client 0 in a save's first round: all clients raise the error."""
        with self._right_lock:  # a write from the tier begins in the background
            self._root.right.acquire()
            if self._tier is not None:
                self._tier.name_root()
            if self._pace is not None:
                self._pace.begin(-(-member.num_clients // Config.from_environ().local_world_size))

    def _raise_failed_copy(self) -> None:
        """Raise the error of a copy to the mirror, once, on client 0 in a save's first round: all clients raise it."""
        if self._copies is not None:
            self._copies.raise_failure()

    def _after_save(self, step: int, start: float, handle: SaveHandle, *, is_leader: bool) -> None:
        if self._failed.tolerate(step, handle.failure, is_told=is_leader):
            handle.forgive()
        if handle.is_committed:
            self._base_step, self._origin.restored = step, None
        # Only after the commit: until then the old checkpoints may be the only good ones.
        if is_leader and handle.is_committed:
            if self._pace is not None:
                self._pace.note_committed(self._clock() - start)
            if self._copies is not None:
                self._copies.copy_soon()
            self._origin.note_listed(self._removal.remove_old(step, time.time()))

    def _next_number(self) -> int:
        """Return the number of a save that begins now: nanoseconds since the epoch."""
        return time.time_ns() if self._tier is None else self._tier.session.next_number()

    def wait(self) -> None:
        """Wait for the save in flight, for the removal of old checkpoints, and for copies to the mirror.

        Raises:
            DtckptError: The error of the save, if the caller has not seen it yet.
        """
        self._wait(for_copies=True)

    def _wait(self, *, for_copies: bool) -> None:
        if self._handle is not None:
            self._handle.wait()
            self._handle.raise_unseen_failure()
        if self._tier is not None:
            self._tier.wait(for_copies=for_copies)
        if self._copies is not None and for_copies:
            self._copies.wait()

    def close(self) -> None:
        """Wait as `wait` does, and let other processes manage the root. Idempotent.

        A process that was forked from the process that saves neither waits nor gives up the root, which its parent has.
        """
        self._close(has_failed=False)

    def _close(self, *, has_failed: bool) -> None:
        if fork_guard.is_forked():
            return
        try:
            self._wait(for_copies=not has_failed)
            if self._pace is not None and not has_failed:
                self._pace.end()
        finally:
            try:
                if self._tier is not None:
                    self._tier.close(has_failed=has_failed)
            finally:
                self._origin.note_listed(None)  # others may save there now
                self._root.right.release()
                if self._copies is not None:
                    self._copies.close(has_failed=has_failed)

    # --- restoring ----------------------------------------------------------------------------------------------

    def restore(
        self,
        step: int | None = None,
        target: Any = None,
        *,
        mesh: MeshLike | None = None,
        layouts: Layouts | None = None,
        options: RestoreOptions | None = None,
        partial: bool = False,
    ) -> RestoredStep:
        """Restore a step; by default the newest valid one, passing over damaged ones.

        The run goes on from this step: with its next save, the steps that are not older become abandoned. A restore
        alone changes nothing on storage. To look at a step in the middle of a run, restore it by another manager, or
        from its `path`.

        The restore waits for a save in flight; the save's error is not raised here.

        Collective: Over all clients; barriers ``manager/chosen`` and ``manager/restored`` around `dtckpt.restore`.

        Args:
            step: The step; default the newest. A step that is named is not replaced by another.
            target: As for `dtckpt.restore`.
            mesh: As for `dtckpt.restore`.
            layouts: As for `dtckpt.restore`.
            options: As for `dtckpt.restore`.
            partial: Whether the target may ask for less than the checkpoint holds: some items of many.

        Raises:
            CheckpointNotFoundError: There is no valid checkpoint.
            DtckptError: As for `dtckpt.restore`: any error but damage, and damage too if the step was named.
        """
        options = options or RestoreOptions()
        options = replace(
            options,
            allow_unexpected=options.allow_unexpected or partial,
            trusted_keys=options.trusted_keys or self.options.trusted_keys,
        )
        coordination = current_coordination()
        collective = Collective(coordination, "manager", options.timeout_s)
        # Named, for the stages of a pipeline have targets on no common mesh, and each asks for its part only.
        everyone = range(coordination.member.num_clients)
        if self._handle is not None:
            self._handle.wait()
        tier = self._tier
        if tier is not None:
            tier.wait_for_local()

        def read(chosen: Candidate) -> tuple[Any, LocalRestore | None, Run | None]:
            local = None
            if chosen.local and tier is not None:
                tree, local = tier.restore(chosen, target, options, mesh=mesh, layouts=layouts, group=everyone)
            else:
                path = self._sources.path(chosen)
                tree = restore(path, target, mesh=mesh, layouts=layouts, options=options, group=everyone)
            return tree, local, self._sources.run_at(chosen) if collective.is_leader else None

        def pin(chosen: Candidate) -> AbstractContextManager[None]:
            return nullcontext() if chosen.local or chosen.is_mirrored else self._removal.pin(chosen.step)

        self._origin.is_torn = self._origin.is_torn or target is not None  # until it is filled
        with collective.process_lock():
            if tier is not None:
                tier.join(collective, is_save=False)
            restored = restore_newest_valid(
                lambda: self._sources.candidates(is_named=step is not None, is_signed=bool(options.trusted_keys)),
                collective,
                step,
                read,
                pin,
                damaged=lambda: () if tier is None else tier.damaged_copies,
                folders=self._folders,
            )
        chosen, skipped = restored.chosen, restored.skipped
        tree, local, run = restored.tree
        self._origin.note_restored(chosen, run, coordination.member)
        self._schedule.note_restored()
        self._removal.damaged.update(each for each in skipped if each != chosen.step)
        self._base_step = None if chosen.local or chosen.is_mirrored else chosen.step
        if chosen.is_mirrored:
            self._removal.damaged.add(chosen.step)  # the root lacks it, or has it damaged
        if tier is not None:
            tier.go_on_from(chosen, restored.damaged, self._write_durable)
        return RestoredStep(chosen.step, tree, skipped, local, chosen.is_mirrored)

    def resize(
        self,
        state: Any = None,
        *,
        step: int | None = None,
        target: Any = None,
        mesh: MeshLike | None = None,
        layouts: Layouts | None = None,
        options: RestoreOptions | None = None,
    ) -> ResizedState:
        """Go on with other clients, without a restart of the processes: move the state to its new places.

        First the program makes the process group anew, among the processes that go on. Then all of these call this
        method, which also connects them as the clients of one job. If the clients that are left have every part of
        every tensor, and are at one step, no step is lost: each reads its new parts from the tensors of the others, and
        verifies them. Otherwise all go back to the newest step that `restore` finds, in the local tier or the root.

        The target may hold the tensors and objects of ``state`` itself. Tensors of the old state change only when all
        clients have read. A client that fails before leaves the old state whole: call the method again.

        The state must not change until the method returns. A save in flight is waited for; if it failed because clients
        are gone, its error is logged, and not raised.

        Collective: Over all clients of the new process group; barriers ``resize/met``, ``resize/lent`` and
        ``resize/moved``, and as `restore`.

        Blocks: On the slowest client, at most for ``timeout_s`` of the options at each barrier.

        Args:
            state: The state of this process, as for `save`; None if the process is new, or its state is not whole.
            step: The step that ``state`` is at.
            target: As for `dtckpt.restore`.
            mesh: As for `dtckpt.restore`.
            layouts: As for `dtckpt.restore`.
            options: As for `dtckpt.restore`. ``trusted_keys`` count if the clients go back.

        Raises:
            BarrierConflictError: Two clients were the same client before, or come from different jobs.
            ConfigError: A state has no step; or this manager has neither saved nor restored, so that it does not know
                which client this process was.
            CheckpointNotFoundError: The clients must go back, and there is no valid checkpoint.
            ClientLostError: A client was lost meanwhile. Make the process group anew, and call the method again.
            BarrierTimeoutError: A client of the process group did not come in time. The cure is the same.
            DtckptError: As `dtckpt.save`, if the clients describe different states, and as `restore`.
        """
        origin, options = self._origin, options or RestoreOptions()
        before = origin.member or joined_member()
        if self._handle is not None:
            self._handle.wait()
            forgive_cut_off(self._handle)
        if self._tier is not None:
            self._tier.leave_world()
        coordination = rejoin(options.timeout_s, "CheckpointManager.resize")
        tier, client = None if self._tier is None else self._tier.session.tier, coordination.member.client

        def prepare() -> None:
            if state is not None and before is None:
                raise ConfigError(
                    "resize: this manager has neither saved nor restored, so it does not know which client this "
                    "process was; save or restore a step by it first, or pass state=None"
                )
            if client != 0:
                # Another process changes the root now.
                if self._pace is not None:
                    self._pace.renew(has_failed=False)
                if self._copies is not None:
                    self._copies.hand_over()
                self._root.right.release()

        def begin() -> None:
            origin.is_torn = True

        request = ResizeRequest(
            state=None if origin.is_torn else state,
            step=step,
            seen=None if state is None else step,
            origin=None if origin.restored is None else origin.restored.facts,
            world=before or coordination.member,
            target=target,
            mesh=mesh,
            layouts=layouts,
            options=options,
            begin=begin,
            host=identity.host_name() if tier is None else tier.host_name,
            address=(tier and tier.address) or own_address(),
        )
        with Resize(coordination, request) as resize:
            givers, resized = resize.run(prepare)
        self._schedule.note_restored()
        if client == 0 and self._pace is not None:
            self._pace.renew(has_failed=resized is None)
        if resized is None:
            return self._go_back(givers, target, mesh=mesh, layouts=layouts, options=options)
        origin.note_moved(None if givers.origin is None else Candidate(*givers.origin), coordination.member)
        return resized

    def _go_back(self, givers: Givers, target: Any, **others: Any) -> ResizedState:
        """Restore the newest step in the place of a state that cannot be moved."""
        if current_coordination().member.client == 0:
            logger.warning("a resize goes back to a checkpoint: %s", givers.reason)
        try:
            restored = self.restore(target=target, **others)
        except CheckpointNotFoundError as error:
            error.message += f"; the state of the clients could not be moved: {givers.reason}"
            raise
        lost = max(0, (givers.newest or restored.step) - restored.step)
        return ResizedState(restored.step, restored.tree, lost, givers.reason, restored)

    # --- exporting ----------------------------------------------------------------------------------------------

    def export(self, path: str | Location, step: int | None = None, *, options: ExportOptions | None = None) -> int:
        """Write a step as safetensors files, by all clients: each writes its share of the files.

        As in `dtckpt.convert`, the files appear together, when all are durable and proved. The export waits for
        the save in flight.

        Collective: Over all clients; barriers ``export/chosen``, ``export/planned``, ``export/written`` and
            ``export/placed``.

        Args:
            path: As ``dst`` of `dtckpt.convert`: a file or directory that all clients reach.
            step: The step; default: the newest.
            options: See `ExportOptions`. With a smaller ``max_shard_size`` there are more files to share.

        Returns:
            The step.

        Raises:
            CheckpointNotFoundError: There is no checkpoint of the step, or no checkpoint at all.
            DtckptError: As for `dtckpt.convert`; or the error of the save in flight. The same on all clients.
        """
        self.wait()
        collective = Collective(current_coordination(), "export", self.options.save.timeout_s)
        with ExitStack() as pinned, collective.process_lock():

            def choose() -> int:
                chosen = self.latest_step() if step is None else step
                if chosen is None:
                    raise CheckpointNotFoundError(f"there is no checkpoint to export below {self.root}; save one first")
                pinned.enter_context(self._removal.pin(chosen))
                return chosen

            return export_together(collective, choose, self.path, location_of(path), options or ExportOptions())
