"""Survey the checkpoints below a root: sizes, ages, metrics, damage, and which of them is the newest valid one."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dtckpt.checkpoint.managing.leftovers import Leftover
from dtckpt.checkpoint.managing.lineage import Saved, current_steps
from dtckpt.checkpoint.managing.root import Root, root_of
from dtckpt.checkpoint.managing.step_folders import StepFolders
from dtckpt.checkpoint.open import open_checkpoint
from dtckpt.checkpoint.reading.manifest_files import KIND
from dtckpt.comm.background_threads import Pool
from dtckpt.errors import CheckpointIncompleteError, CheckpointNotFoundError, DtckptError
from dtckpt.storage.commit import commit_target_of
from dtckpt.storage.disk_usage import DiskUsage, disk_usage
from dtckpt.storage.location import Location

NUM_THREADS = 8
"""Checkpoints that are looked at at one time, which hides the latency of an object store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SurveyedCheckpoint:
    """One checkpoint below a root.

    Args:
        name: Its name.
        where: Its path or URL.
        step: Its step; None if it has not a step's name.
        nbytes: Bytes of its tensors; None if it is damaged.
        num_tensors: Number of its tensors; None if it is damaged.
        saved_s: When it was saved, in seconds since the epoch; None if nothing tells.
        metrics: The metrics that it was saved with.
        is_rolled_back: Whether the run went back to an older step, and has saved since.
        damage: Why it cannot be opened; empty if it can.
        reuses: Whether it was saved with chunks of an earlier checkpoint.
        usage: Its disk space, measured where checkpoints of a directory share files; None elsewhere.
    """

    name: str
    where: Location
    step: int | None
    nbytes: int | None = None
    num_tensors: int | None = None
    saved_s: float | None = None
    metrics: Mapping[str, float]
    is_rolled_back: bool = False
    damage: str = ""
    reuses: bool = False
    usage: DiskUsage | None = None


@dataclass(frozen=True, slots=True)
class Survey:
    """The checkpoints below a root, and the files of other saves.

    Args:
        root: The root.
        folders: The checkpoints of steps.
        saved: Their lineages.
        checkpoints: All checkpoints, by step, then by name.
        leftovers: The files of attempts, also of attempts under way.
    """

    root: Root
    folders: StepFolders
    saved: Saved
    checkpoints: tuple[SurveyedCheckpoint, ...]
    leftovers: tuple[Leftover, ...]

    @property
    def newest_valid(self) -> int | None:
        """The newest step of the run whose checkpoint can be opened."""
        return self.good_steps[-1].step if self.good_steps else None

    @property
    def good_steps(self) -> tuple[SurveyedCheckpoint, ...]:
        """The steps of the run whose checkpoints can be opened, oldest first."""
        return tuple(
            each for each in self.checkpoints if each.step is not None and not each.damage and not each.is_rolled_back
        )

    @property
    def damaged(self) -> frozenset[int]:
        """The steps whose checkpoints cannot be opened."""
        return frozenset(each.step for each in self.checkpoints if each.damage and each.step is not None)


def survey(where: Location, *, min_age_s: float, now: float) -> Survey:
    """Survey everything below a root. Only metadata is read.

    Args:
        where: The root's path or URL.
        min_age_s: Seconds without a change after which an attempt can count as dead.
        now: Seconds since the epoch.

    Raises:
        CheckpointNotFoundError: There is no such root, or it is a checkpoint itself.
        StorageError: The root cannot be listed.
    """
    root = root_of(where)
    if not root.exists():
        raise CheckpointNotFoundError(f"there is no folder of checkpoints at {where}")
    folders = StepFolders(root)
    saved = folders.saved()
    current = current_steps(saved)

    def look(name: str) -> SurveyedCheckpoint | None:
        step = folders.step_of(name)
        facts: dict[str, Any] = {"name": name, "where": where / name, "step": step}
        try:
            with open_checkpoint(where / name) as checkpoint:
                facts["nbytes"] = sum(info.nbytes for info in checkpoint.tensors.values())
                facts["num_tensors"] = len(checkpoint.tensors)
                facts["reuses"] = checkpoint.format == KIND and bool(checkpoint.manifest.origins)
        except CheckpointNotFoundError:
            return None
        except DtckptError as error:
            # A folder with another name and no commit marker is no checkpoint of dtckpt.
            if step is None and (isinstance(error, CheckpointIncompleteError) or not _is_committed(where / name)):
                return None
            facts["damage"] = error.message
        return SurveyedCheckpoint(
            **facts,
            saved_s=root.saved_s(name) if step is None else folders.saved_s(step, saved),
            metrics={} if step is None else folders.metrics(step),
            is_rolled_back=step in saved and step not in current,
        )

    names = sorted(name for name in root.names() if not name.startswith("."))
    with Pool(NUM_THREADS, "dtckpt-survey") as pool:
        found = [each for each in pool.map(look, names) if each is not None]
        # A look at every file takes long, so only where there is something to be told.
        if any(each.reuses for each in found):
            found = list(pool.map(_measured, found))
    leftovers = tuple(root.leftovers(min_age_s=min_age_s, now=now))
    if not found and not leftovers and _is_checkpoint(where):
        raise CheckpointNotFoundError(
            f"{where} is a checkpoint itself, not a folder of them; see dtckpt inspect {where}"
        )
    found.sort(key=lambda each: (each.step is None, each.step or 0, each.name))
    return Survey(root, folders, saved, tuple(found), leftovers)


def _measured(each: SurveyedCheckpoint) -> SurveyedCheckpoint:
    if isinstance(each.where, Path):
        with suppress(OSError):  # it is removed meanwhile
            return replace(each, usage=disk_usage(each.where))
    return each


def _is_committed(where: Location) -> bool:
    try:
        commit_target_of(where).locate()
    except DtckptError:
        return False
    return True


def _is_checkpoint(where: Location) -> bool:
    try:
        open_checkpoint(where).close()
    except DtckptError:
        return False
    return True
