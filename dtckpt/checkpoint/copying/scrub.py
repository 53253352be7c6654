"""`scrub`: verify the steps of a root in rounds, some bytes at a time, and mend them from a copy."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from dtckpt.checkpoint.copying.scrub_checkpoint import CheckpointScrub, Frame, ScrubDamage, is_own
from dtckpt.checkpoint.copying.scrub_state import MAX_STATE_NBYTES, STATE_NAME, KnownCheckpoint, ScrubState
from dtckpt.checkpoint.managing.root import Root, root_of
from dtckpt.checkpoint.managing.step_folders import StepFolders
from dtckpt.errors import (
    CheckpointConflictError,
    CheckpointIncompleteError,
    CheckpointNotFoundError,
    CheckpointVersionError,
    ConfigError,
    StoragePermissionError,
)
from dtckpt.storage.commit import commit_target_of
from dtckpt.storage.directory_lock import lock_directory
from dtckpt.storage.failures import translate_errors
from dtckpt.storage.folder import Folder
from dtckpt.storage.local_folder import LocalFolder, is_draft
from dtckpt.storage.location import Location, location_of
from dtckpt.storage.whole_files import RateLimit, WholeFile, drop_spare_memory, list_files

logger = logging.getLogger("dtckpt.checkpoint")

DRAFT_AGE_S = 3600.0
"""Older drafts in a checkpoint are of processes that died while they mended or signed it."""
SEGMENTS_AT_ONCE = 16
"""Segments that are verified between two looks at the budget."""

ScrubProgress = Callable[[str, int], object]
"""Called with a checkpoint's name and the bytes that were read since the last call."""


@dataclass(frozen=True, slots=True)
class ScrubReport:
    """The result of one run of `dtckpt.scrub`.

    Args:
        root: The root.
        num_checkpoints: Checkpoints that this run has read to their end.
        nbytes: Bytes that it read, of the root and of the copy.
        seconds: The time that it took.
        damages: The damages that it found.
        damaged: The checkpoints that were damaged when they were read last, and were not mended.
        rotations: Rounds through the root that have ended.
        began_s: When the round began that is under way, in seconds since the epoch.
        next: The checkpoint that the next run begins with; empty if a round has ended.
    """

    root: Location
    num_checkpoints: int
    nbytes: int
    seconds: float
    damages: tuple[ScrubDamage, ...]
    damaged: tuple[str, ...]
    rotations: int
    began_s: float
    next: str

    @property
    def is_sound(self) -> bool:
        """Whether no damage is left, as far as the round has come."""
        return not self.damaged


def scrub(
    root: str | Location,
    *,
    bytes_per_day: float | None = None,
    source: str | Location | None = None,
    max_rate: float | None = None,
    progress: ScrubProgress | None = None,
    now: Callable[[], float] = time.time,
) -> ScrubReport:
    """Verify the steps of a root, and mend damaged files from a copy. Local: no other client takes part.

    A run goes on where the last run ended, until it has read its share of the bytes of a day, or the round has ended.

    Args:
        root: The root of a `CheckpointManager`.
        bytes_per_day: The budget; default: a run reads all steps.
        source: A root with copies of the steps, as `dtckpt.copy` makes them, by which damage is mended.
        max_rate: Bound on bytes per second.
        progress: See `ScrubProgress`.
        now: Returns seconds since the epoch.

    Raises:
        CheckpointNotFoundError: There is no such root.
        CheckpointConflictError: Another process scrubs the root.
        ConfigError: An argument cannot be used.
        StorageError: Storage cannot be reached, or the state cannot be written.
    """
    for name, value in (("bytes_per_day", bytes_per_day), ("max_rate", max_rate)):
        if value is not None and not value > 0:
            raise ConfigError(f"{name} must be a positive number of bytes; got {value!r}")
    found = root_of(location_of(root))
    if not found.exists():
        raise CheckpointNotFoundError(f"there is no folder of checkpoints at {found.where}")
    copies = None if source is None else location_of(source)
    if copies == found.where:
        raise ConfigError(f"{copies} is the root itself; --from names a copy of it")
    with _alone(found):
        run = _ScrubRun(
            found,
            copies,
            bytes_per_day=bytes_per_day,
            limit=RateLimit(max_rate),
            progress=progress or (lambda _name, _nbytes: None),
            now=now,
        )
        return run.run()


@contextmanager
def _alone(root: Root) -> Iterator[None]:
    """Keep other processes of this host from scrubbing a directory; runs on an object store only repeat each other."""
    if not isinstance(root.where, Path):
        yield
        return
    with lock_directory(root.where) as is_mine:
        if not is_mine:
            raise CheckpointConflictError(f"another process scrubs {root.where}; wait until it has ended")
        yield


class _ScrubRun:
    """One run.

    Args:
        root: The root.
        copies: The root of the copies; None: there is none.
        bytes_per_day: See `scrub`, like the further arguments.
        limit: Bounds the bytes per second.
        progress: See `ScrubProgress`.
        now: Returns seconds since the epoch.
    """

    def __init__(
        self,
        root: Root,
        copies: Location | None,
        *,
        bytes_per_day: float | None,
        limit: RateLimit,
        progress: ScrubProgress,
        now: Callable[[], float],
    ) -> None:
        self._root = root
        self._folders = StepFolders(root)
        self._copies = copies
        self._bytes_per_day = bytes_per_day
        self._limit = limit
        self._progress = progress
        self._now = now
        self._name = ""
        self._nbytes = 0
        self._num_checkpoints = 0
        self._damages: list[ScrubDamage] = []
        self._state = self._read_state()

    def run(self) -> ScrubReport:
        """Read until the budget is used up, or the round has ended."""
        start = time.monotonic()
        names = [name for name in self._root.names() if self._folders.step_of(name) is not None]
        state = self._state.only(names)
        began_s = state.began_s if state.name else self._now()
        self._state, budget = replace(state, began_s=began_s), state.allowance(self._bytes_per_day, self._now())
        for name in self._state.order(names):
            self._state = replace(self._state, name=name, segment=self._state.segment if name == state.name else 0)
            if self._nbytes >= budget or not self._visit(name, budget):
                break
            self._num_checkpoints += 1
            self._write_state(budget)
        else:
            self._state = replace(self._state, name="", segment=0, rotations=self._state.rotations + 1)
        self._write_state(budget)
        known = self._state.known
        return ScrubReport(
            self._root.where,
            self._num_checkpoints,
            self._nbytes,
            time.monotonic() - start,
            tuple(self._damages),
            tuple(sorted(name for name in known if known[name].num_damages)),
            self._state.rotations,
            self._state.began_s,
            self._state.name,
        )

    def _count(self, nbytes: int) -> None:
        self._nbytes += nbytes
        self._limit.take(nbytes)
        self._progress(self._name, nbytes)

    # --- one checkpoint -------------------------------------------------------------------------------------------

    def _visit(self, name: str, budget: float) -> bool:
        """Verify a checkpoint from the state's segment on; return whether its end was reached."""
        self._name = name
        where = self._root.where / name
        place = commit_target_of(where)
        with place.pin():
            # This very directory: a save that replaces the checkpoint must not get files of the old one.
            folder = self._folder_of(where)
            if folder is None:
                return True
            known = self._state.known.get(name)
            if isinstance(folder, LocalFolder):
                with translate_errors("remove drafts", where):
                    drafts = ((each, status) for each, status in folder.walk() if is_draft(each))
                    old = [each for each, status in drafts if status.st_mtime < time.time() - DRAFT_AGE_S]
                    folder.remove_files(old)
            job = CheckpointScrub(where, folder, self._copy_of(name), known, relink=self._relink, count=self._count)
            try:
                return self._check(job, name, known, budget)
            except (CheckpointVersionError, StoragePermissionError) as error:
                # The steps after this one must have their turn, too.
                self._damages.append(ScrubDamage(where, "", error.message, is_mended=False))
                self._state = self._state.seen(name, replace(known or KnownCheckpoint(0, 0), num_damages=1))
                return True
            finally:
                drop_spare_memory()

    def _check(self, job: CheckpointScrub, name: str, known: KnownCheckpoint | None, budget: float) -> bool:
        is_continued = known is not None and self._state.segment > 0
        before = known.num_damages if known is not None and is_continued else 0
        frame = job.frame()
        is_whole = True
        if frame is not None:
            # Another checkpoint is there now, or the first visit: from its beginning.
            first = self._state.segment if known is not None and known.manifest == frame.digest else 0
            is_whole = self._check_chunks(job, frame, first, budget)
        if not self._is_there(self._root.where / name, job.folder):
            return True  # it was removed or replaced meanwhile: no file that was missing was damaged
        self._damages += job.damages
        left = sum(not damage.is_mended for damage in job.damages)
        seen = job.known or known or KnownCheckpoint(0, 0)
        self._state = self._state.seen(name, replace(seen, num_damages=before + left))
        return is_whole

    def _check_chunks(self, job: CheckpointScrub, frame: Frame, first: int, budget: float) -> bool:
        """Verify chunks from a segment on, until the budget is used up; return whether the end was reached."""
        number = 0
        for name in frame.names():
            segments = frame.plan.chunk_segments(name)
            while batch := list(islice(segments, SEGMENTS_AT_ONCE)):
                number += len(batch)
                if number <= first:
                    continue
                job.check(frame, name, batch)
                if self._nbytes >= budget:
                    self._state = replace(self._state, segment=number)
                    return False
        return True

    def _folder_of(self, where: Location) -> Folder | None:
        """Return the folder of a checkpoint, also of one whose manifest is missing; None if there is none."""
        place = commit_target_of(where)
        try:
            folder = place.locate()
        except CheckpointNotFoundError:
            return None
        except CheckpointIncompleteError:
            # A step's name, and no manifest: the manifest was lost, or another library saved the step.
            folder = place.folder
            with translate_errors("list the files", where):
                if where.name not in self._state.known and not any(map(is_own, list_files(folder))):
                    return None
        with translate_errors("open the checkpoint", where):
            try:
                return folder.hold(follow=False) if isinstance(folder, LocalFolder) else folder
            except (FileNotFoundError, NotADirectoryError) as error:
                logger.warning("%s is passed over: %s", where, error)  # removed meanwhile, or a link to elsewhere
                return None

    def _is_there(self, where: Location, folder: Folder) -> bool:
        """Whether a folder is still the checkpoint at a path."""
        now = self._folder_of(where)
        if isinstance(now, LocalFolder) and isinstance(folder, LocalFolder):
            return now.inode(".") == folder.inode(".")
        return now is not None and str(now) == str(folder)

    def _copy_of(self, name: str) -> tuple[Location, Folder] | None:
        if self._copies is None:
            return None
        where = self._copies / name
        try:
            return where, commit_target_of(where).locate()
        except (CheckpointNotFoundError, CheckpointIncompleteError):
            return None

    def _relink(self, old: WholeFile, folder: LocalFolder, name: str) -> None:
        """Give all names that a replaced file has in other checkpoints of the root the new file."""
        for other in sorted(self._root.names()):
            if self._folders.step_of(other) is None:
                continue
            place = commit_target_of(self._root.where / other)
            with place.pin(), suppress(FileNotFoundError):
                found = self._folder_of(self._root.where / other)
                if not isinstance(found, LocalFolder):
                    continue
                for each in list_files(found).values():
                    if each.identity == old.identity:
                        found.link(each.name, folder, name)

    # --- the state ------------------------------------------------------------------------------------------------

    def _read_state(self) -> ScrubState:
        with translate_errors("read the state of scrub", self._root.where):
            try:
                return ScrubState.from_bytes(self._root.folder.read_whole(STATE_NAME, MAX_STATE_NBYTES))
            except FileNotFoundError:
                return ScrubState()
            except (ValueError, OSError) as error:
                logger.warning(
                    "%s in %s cannot be read, so the round begins again: %s", STATE_NAME, self._root.where, error
                )
                return ScrubState()

    def _write_state(self, budget: float) -> None:
        left = 0.0 if self._bytes_per_day is None else max(0.0, budget - self._nbytes)
        self._state = replace(self._state, at_s=self._now(), left=left)
        with translate_errors("write the state of scrub", self._root.where):
            self._root.folder.replace(STATE_NAME, self._state.to_bytes())
