"""`copy`: a checkpoint, or the steps of a root, to another place."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from dtckpt.checkpoint.copying.copy_files import (
    NUM_THREADS,
    CopiedCheckpoint,
    CopyOptions,
    CopyProgress,
    copy_checkpoint,
)
from dtckpt.checkpoint.managing.lineage import current_steps
from dtckpt.checkpoint.managing.root import root_of
from dtckpt.checkpoint.managing.step_folders import StepFolders
from dtckpt.checkpoint.open import open_checkpoint
from dtckpt.errors import (
    CheckpointError,
    CheckpointIncompleteError,
    CheckpointNotFoundError,
    ConfigError,
    StorageError,
    capped,
)
from dtckpt.storage.commit import commit_target_of
from dtckpt.storage.location import Location, is_inside, location_of
from dtckpt.storage.whole_files import RateLimit

LIVE = "live"
"""The scheme of live versions, which are in memory."""


@dataclass(frozen=True, slots=True)
class CopyReport:
    """The result of `dtckpt.copy`.

    Args:
        source: The checkpoint or root.
        target: The checkpoint or root that the copies are at.
        checkpoints: The result of each checkpoint, in the order of the copies.
        seconds: The time that it took.
    """

    source: Location
    target: Location
    checkpoints: tuple[CopiedCheckpoint, ...]
    seconds: float

    @property
    def nbytes(self) -> int:
        """Bytes that were copied."""
        return sum(each.nbytes for each in self.checkpoints)

    @property
    def failed(self) -> tuple[CopiedCheckpoint, ...]:
        """The checkpoints of a root that could not be copied."""
        return tuple(each for each in self.checkpoints if each.failure)


def copy(
    src: str | Location,
    dst: str | Location,
    *,
    newest: int | None = None,
    steps: Collection[int] | None = None,
    keep_links: bool = False,
    overwrite: bool = False,
    max_rate: float | None = None,
    threads: int = NUM_THREADS,
    progress: CopyProgress | None = None,
    copied: Callable[[CopiedCheckpoint], object] | None = None,
) -> CopyReport:
    """Copy a checkpoint, or the steps of a root, to another root, disk or store. Local: no other client takes part.

    All bytes of a chunk are compared with the manifest's digest while they are read, and all bytes of a file with the
    bytes that were read after they are written. Each copy appears whole or not at all. A repeated call keeps the
    files of an earlier call.

    Args:
        src: The checkpoint, or the root of a `CheckpointManager`.
        dst: The path or URL of the copy, or of the root of the copies.
        newest: Of a root: copy this many newest steps of the run; default: all steps, also of abandoned runs.
        steps: Of a root: copy these steps.
        keep_links: Keep hard links between the files of a root; both places must be directories.
        overwrite: Replace another checkpoint at the target, once the copy is durable.
        max_rate: Bound on bytes per second.
        threads: Files that are copied at one time.
        progress: See `CopyProgress`.
        copied: Called with the result of each checkpoint.

    Returns:
        The report. A step that cannot be copied is in `CopyReport.failed`, and the other steps are copied.

    Raises:
        CheckpointNotFoundError: There is no checkpoint of dtckpt at the source, or the root lacks one of the steps.
        CheckpointExistsError: There is another checkpoint at the target of a checkpoint, or something else.
        CheckpointCorruptError: The checkpoint is damaged.
        CheckpointConflictError: A save replaced it meanwhile, or another process copies to the target.
        ConfigError: An argument cannot be used.
        StorageError: Storage refused.
    """
    start = time.monotonic()
    source, target = location_of(src), location_of(dst)
    _validate(source, target, newest=newest, max_rate=max_rate, threads=threads, keep_links=keep_links)
    options = CopyOptions(
        overwrite=overwrite,
        threads=threads,
        limit=RateLimit(max_rate),
        links={} if keep_links else None,
        progress=progress or (lambda _name, _nbytes: None),
    )
    tell = copied or (lambda _copied: None)
    if is_checkpoint(source):
        if newest is not None or steps is not None:
            raise ConfigError(f"{source} is a checkpoint itself; newest and steps choose checkpoints of a root")
        results = [copy_checkpoint(source, target, options)]
        tell(results[0])
    else:
        results = []
        for step in _chosen(source, newest, steps):
            name = f"step_{step:08d}"
            results.append(_try_copy(source / name, target / name, options))
            tell(results[-1])
    return CopyReport(source, target, tuple(results), time.monotonic() - start)


def _validate(
    source: Location, target: Location, *, newest: int | None, max_rate: float | None, threads: int, keep_links: bool
) -> None:
    for name, value in (("newest", newest), ("threads", threads)):
        if value is not None and (type(value) is not int or value < 1):
            raise ConfigError(f"{name} must be a whole number from 1 on; got {value!r}")
    if max_rate is not None and not max_rate > 0:
        raise ConfigError(f"max_rate must be a positive number of bytes per second; got {max_rate!r}")
    if source == target or is_inside(target, source) or is_inside(source, target):
        raise ConfigError(f"{target} and {source} overlap; choose another destination")
    if LIVE in {getattr(source, "scheme", ""), getattr(target, "scheme", "")}:
        raise ConfigError(f"a live version is in memory and has no files; use dtckpt convert; got {source}, {target}")
    if keep_links and not all(isinstance(each, Path) for each in (source, target)):
        raise ConfigError(f"keep_links needs two directories, as object stores have no links; got {source}, {target}")


def is_checkpoint(where: Location) -> bool:
    """Whether there is a checkpoint of dtckpt at a path or URL, not a root."""
    try:
        commit_target_of(where).locate()
    except (CheckpointNotFoundError, CheckpointIncompleteError):
        return False
    return True


def _chosen(source: Location, newest: int | None, steps: Collection[int] | None) -> list[int]:
    """Return the steps of a root that are copied, ascending."""
    saved = StepFolders(root_of(source)).saved()
    if not saved:
        raise CheckpointNotFoundError(f"there is neither a checkpoint of dtckpt nor a root with steps at {source}")
    chosen = set(saved) if steps is None else set(steps)
    if lacking := sorted(chosen - saved.keys()):
        raise CheckpointNotFoundError(
            f"{source} lacks steps {capped(map(str, lacking))}; it has {capped(map(str, sorted(saved)))}"
        )
    if newest is not None:
        chosen = set(sorted(chosen & current_steps(saved))[-newest:])
    return sorted(chosen)


def _try_copy(source: Location, target: Location, options: CopyOptions) -> CopiedCheckpoint:
    """Copy one of several checkpoints. Its failure does not keep the others from being copied."""
    start = time.monotonic()
    try:
        return copy_checkpoint(source, target, options)
    except CheckpointError as error:
        if isinstance(error, StorageError):
            raise  # the next one would fail, too
        failed = CopiedCheckpoint(source, target, failure=error.message)
        return replace(failed, seconds=time.monotonic() - start)


def expected_nbytes(source: Location, *, newest: int | None = None, steps: Collection[int] | None = None) -> int:
    """Return the bytes of the tensors that `copy` would copy, for a display of progress."""
    places = [source]
    if not is_checkpoint(source):
        places = [source / f"step_{step:08d}" for step in _chosen(source, newest, steps)]
    nbytes = 0
    for place in places:
        with suppress(CheckpointError), open_checkpoint(place) as checkpoint:
            nbytes += sum(info.nbytes for info in checkpoint.tensors.values())
    return nbytes
